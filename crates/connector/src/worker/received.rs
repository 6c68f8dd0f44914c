//! What a good receive still needs: messages that had to wait, copies, conversions, zeroing.

use crate::protocol::notification;
use crate::regions::expand_groups;
use crate::scheduler::{RecvRequest, StepMeta};
use crate::transport::Transport;

use super::config::{Received, ReceivedGroup};
use super::{RecvState, Worker};

impl<T: Transport> Worker<T> {
    /// Kernel blocks to copy from the device to the host buffer before the step's blocks are read,
    /// as (local request, block ids).
    pub fn blocks_to_save(&self, meta: &StepMeta) -> Vec<(String, Vec<u64>)> {
        let kernel = |ids: &[Vec<u64>]| {
            expand_groups(&self.geometry.groups, ids, self.geometry.blocks_per_logical).concat()
        };
        meta.reqs_to_save.iter().map(|(request, ids)| (request.clone(), kernel(ids))).collect()
    }

    /// Sends what waited for all parts of a receive.
    pub(super) fn send_pending_notifications(&mut self, request: &str, recv: &RecvRequest) {
        for (agent, message) in self.pending_notifications.remove(request).unwrap_or_default() {
            self.notify(request, recv, 0, &agent, &message);
        }
    }

    /// The work that is left on the blocks of a good receive; none when they can be used at once.
    pub(super) fn received(&self, request: &str, recv: &RecvRequest, state: &RecvState) -> Option<Received> {
        let local = &self.geometry;
        let kernel = expand_groups(&local.groups, &recv.local_block_ids, local.blocks_per_logical);
        let mut received = Received { request: request.to_owned(), ..Received::default() };
        if local.host_buffer {
            received.copy_to_device = kernel.concat();
        }
        let peer = self.peers.get(&recv.remote.engine_id).and_then(|peer| peer.geometry());
        if state.zero_by_region.iter().any(|blocks| !blocks.is_empty()) {
            received.zero_by_region = state.zero_by_region.clone();
        } else if let Some(peer) = peer {
            let ratio = peer.block_size_ratio;
            let unequal = peer.topology.blocks_per_logical != local.blocks_per_logical;
            if ratio > 1 || peer.permute || unequal {
                let converts = !local.topology.is_mla;
                received.groups = kernel
                    .iter()
                    .enumerate()
                    .filter(|(group, ids)| {
                        !ids.is_empty() && local.groups.get(*group).is_some_and(|kind| !kind.is_state())
                    })
                    .map(|(group, ids)| ReceivedGroup {
                        group,
                        blocks: ids.clone(),
                        block_size_ratio: ratio,
                        covered_sub_blocks: covered(ids.len(), ratio, state.covered.get(group)),
                        regroup: converts
                            && ratio > 1
                            && (peer.permute || local.layout.is_block_contiguous()),
                        permute: converts && peer.permute,
                    })
                    .collect();
            }
            if peer.repack_attention {
                received.repack = kernel.first().cloned().unwrap_or_default();
            }
        }
        (!received.is_empty()).then_some(received)
    }

    /// Tells a prefill engine that nothing of a request will be read or written any more.
    pub(super) fn notify_finished(&mut self, request: &str, recv: &RecvRequest) {
        let Some(peer) = self.peers.get(&recv.remote.engine_id) else { return };
        let agents: Vec<_> = peer.agents().map(|(rank, agent)| (rank, agent.clone())).collect();
        let message = notification::completion(&recv.remote.request_id, self.geometry.topology.sizes.tp);
        for (rank, agent) in agents {
            self.notify(request, recv, rank, &agent, &message);
        }
    }
}

fn covered(blocks: usize, ratio: u64, remote: Option<&usize>) -> usize {
    let ratio = usize::try_from(ratio).unwrap_or(usize::MAX);
    blocks.saturating_mul(ratio).min(remote.copied().unwrap_or(0))
}
