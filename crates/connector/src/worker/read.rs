//! Starting receives: what goes on the wire for one, and to which ranks.

use std::time::Duration;

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::notification;
use crate::scheduler::RecvRequest;
use crate::topology::ParallelSizes;
use crate::transport::{AgentName, Transport, TransportError};

use super::failure::FailureContext;
use super::lists::PreparedList;
use super::pairing::RankBlocks;
use super::peer::{EngineAddress, Purpose, Waiting};
use super::{RecvState, Worker};

/// A read is declined when the remote blocks expire sooner than this.
const EXPIRY_MARGIN: Duration = Duration::from_secs(5);

/// One read or notification, decided and not yet carried out.
struct Step {
    agent: AgentName,
    rank: u32,
    blocks: RankBlocks,
    local: Option<PreparedList>,
}

pub(super) fn address_of(recv: &RecvRequest) -> EngineAddress<'_> {
    EngineAddress {
        engine_id: &recv.remote.engine_id,
        host: &recv.remote.host,
        port: recv.remote.port,
        sizes: ParallelSizes { tp: recv.tp_size, dcp: recv.dcp_size },
        pp_size: recv.pp_size,
    }
}

impl<T: Transport> Worker<T> {
    /// Starts one receive; a fatal state fails the request and is kept when it is the first.
    pub(super) fn start_or_fail(
        &mut self,
        request: &str,
        recv: RecvRequest,
        now: ClockTime,
        fatal: &mut Option<EngineFatal>,
    ) {
        if let Err(error) = self.start_read(request, recv, now) {
            self.failed_outside_poll.push(request.to_owned());
            fatal.get_or_insert(error);
        }
    }

    fn start_read(&mut self, request: &str, recv: RecvRequest, now: ClockTime) -> Result<(), EngineFatal> {
        if self.invalid.contains(&recv.remote.engine_id) {
            self.failed_outside_poll.push(request.to_owned());
            return Ok(());
        }
        let waiting = Waiting::Read(request.to_owned(), recv.clone());
        if !self.ensure_connected(address_of(&recv), Purpose::Transfer, Some(waiting), now) {
            return Ok(());
        }
        let Some(peer) = self.peers.get_mut(&recv.remote.engine_id) else { return Ok(()) };
        peer.last_active = now;
        let fills_blocks = recv.local_block_ids.iter().any(|group| !group.is_empty());
        let deadline = recv.remote.blocks_expiry_time.map(|expiry| expiry - peer.clock_offset);
        let expired = deadline.is_some_and(|deadline| (now + EXPIRY_MARGIN).as_secs_f64() >= deadline);
        if self.config.bidirectional && fills_blocks && expired {
            tracing::warn!(request, "read declined: the remote blocks are about to expire");
            self.stats.num_kv_expired_reqs.push(1);
            self.failed_outside_poll.push(request.to_owned());
            return Ok(());
        }
        if fills_blocks {
            // A rank whose slice is empty has nothing to read and still has to report.
            self.transfers.entry(request.to_owned()).or_default();
        }
        let steps = self.read_steps(request, &recv)?;
        self.carry_out(request, &recv, steps);
        Ok(())
    }

    fn read_steps(&mut self, request: &str, recv: &RecvRequest) -> Result<Vec<Step>, EngineFatal> {
        let Some(peer) = self.peers.get(&recv.remote.engine_id) else { return Ok(Vec::new()) };
        let Some(geometry) = peer.geometry() else { return Ok(Vec::new()) };
        let plan = self.plan_read(request, recv, geometry)?;
        let needs_slices =
            geometry.mapping.tp_ratio < 0 && (!self.geometry.topology.is_mla || plan.ranks.len() > 1);
        let whole = self.lists.sub_blocks(geometry).map(|sub_blocks| sub_blocks.list);
        let slices = self.lists.slices(geometry);
        let steps = plan.ranks.into_iter().enumerate().filter_map(|(index, (rank, blocks))| {
            let agent = peer.ranks.get(&(0, rank))?.agent.clone();
            let local = match needs_slices {
                true => slices.and_then(|slices| slices.get(index)).copied(),
                false => whole,
            };
            Some(Step { agent, rank, blocks, local })
        });
        let steps = steps.collect();
        if let Some(state) = self.recv_states.get_mut(request) {
            state.covered = plan.covered;
            state.zero_by_region = plan.zero_by_region;
        } else if self.recving.contains_key(request) {
            let state = RecvState { covered: plan.covered, zero_by_region: plan.zero_by_region };
            self.recv_states.insert(request.to_owned(), state);
        }
        Ok(steps)
    }

    /// Posts reads until one fails: its blocks may be used anew once the failure is reported, so
    /// no more may be started and no one told that they were read.
    fn carry_out(&mut self, request: &str, recv: &RecvRequest, steps: Vec<Step>) {
        let Some(geometry) = self.peers.get(&recv.remote.engine_id).and_then(|peer| peer.geometry()) else {
            return;
        };
        let broadcasts = self.geometry.topology.is_mla && geometry.mapping.tp_ratio < 0 && steps.len() == 1;
        let message = notification::completion(&recv.remote.request_id, geometry.mapping.local_consumers);
        let read_rank = steps.first().map(|step| step.rank);
        for step in steps {
            if step.blocks.is_empty() {
                self.notify(request, recv, step.rank, &step.agent, &message);
                if recv.awaiting_kvs {
                    self.transfers.entry(request.to_owned()).or_default();
                }
            } else if let Err(error) = self.post_read(request, recv, step, &message) {
                self.note_transfer_failure("transfer_setup_failed", request, Some(&error));
                return;
            }
        }
        if broadcasts {
            self.notify_other_ranks(request, recv, read_rank, &message);
        }
    }

    fn post_read(
        &mut self,
        request: &str,
        recv: &RecvRequest,
        step: Step,
        message: &[u8],
    ) -> Result<(), TransportError> {
        let Step { agent, rank, blocks, local } = step;
        let unknown = || TransportError::UnknownAgent(recv.remote.engine_id.clone());
        let peer = self.peers.get(&recv.remote.engine_id).ok_or_else(unknown)?;
        let memory = peer.ranks.get(&(0, rank)).and_then(|peer| peer.memory.as_ref()).ok_or_else(unknown)?;
        let sub_blocks = self.lists.sub_blocks(&memory.geometry).ok_or(TransportError::Mismatch)?;
        let local = local.ok_or(TransportError::Mismatch)?;
        let (local_ids, remote_ids) = blocks.descriptor_ids(&sub_blocks.index, &memory.index)?;
        let remote_list = memory.list;
        match (local, &sub_blocks.division) {
            (PreparedList::Mixed { dram, vram }, Some(division)) => {
                let divided = division.translate(&local_ids, &remote_ids).ok_or(TransportError::Mismatch)?;
                self.post_mixed(request, (dram, vram), remote_list, divided, (agent, message))
            }
            (PreparedList::One(list), _) => {
                let sides = ((list, local_ids.as_slice()), (remote_list, remote_ids.as_slice()));
                self.post_one(request, sides, message)
            }
            (PreparedList::Mixed { .. }, None) => Err(TransportError::Mismatch),
        }
    }

    fn notify_other_ranks(
        &mut self,
        request: &str,
        recv: &RecvRequest,
        read_rank: Option<u32>,
        message: &[u8],
    ) {
        let Some(peer) = self.peers.get(&recv.remote.engine_id) else { return };
        let others: Vec<(u32, AgentName)> = peer
            .agents()
            .filter(|(rank, _)| Some(*rank) != read_rank)
            .map(|(rank, agent)| (rank, agent.clone()))
            .collect();
        for (rank, agent) in others {
            self.notify(request, recv, rank, &agent, message);
        }
    }

    /// Tells one rank that its blocks were read; its lease frees them when this fails.
    pub(super) fn notify(
        &mut self,
        request: &str,
        recv: &RecvRequest,
        rank: u32,
        agent: &AgentName,
        message: &[u8],
    ) {
        if let Err(error) = self.transport.send_notification(agent, message) {
            self.stats.num_failed_notifications.push(1);
            let context =
                FailureContext { remote_rank: Some(rank), ..FailureContext::of_recv(request, recv) };
            self.log_failure("notification_failed", &context, Some(&error));
        }
    }
}
