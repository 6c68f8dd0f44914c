//! Issuing reads: pairing blocks, building descriptor ids, posting, and what failures leave behind.

use std::time::Duration;

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::notification;
use crate::protocol::params::Generation;
use crate::regions::{descriptor_ids, kernel_block_ids};
use crate::scheduler::RecvRequest;
use crate::transport::{TransferOp, Transport, TransportError};

use super::Worker;

/// A read is declined when the remote blocks expire sooner than this.
const EXPIRY_MARGIN: Duration = Duration::from_secs(5);

/// Only equal topologies are served so far, where each block has one reader.
const CONSUMERS: u32 = 1;

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
        let Some(peer) = self.peers.get_mut(&recv.remote.engine_id) else {
            self.await_handshake(request, recv, now);
            return Ok(());
        };
        peer.last_active = now;
        let fills_blocks = recv.local_block_ids.iter().any(|group| !group.is_empty());
        if !fills_blocks {
            self.notify_only(request, &recv);
            return Ok(());
        }
        let expired = recv
            .remote
            .blocks_expiry_time
            .is_some_and(|expiry| (now + EXPIRY_MARGIN).as_secs_f64() >= expiry - peer.clock_offset);
        if expired {
            self.stats.num_kv_expired_reqs.push(1);
            self.failed_outside_poll.push(request.to_owned());
            return Ok(());
        }
        let remote_block_ids = paired_remote_blocks(self.config.generation, request, &recv)?;
        if let Err(error) = self.post_read(request, &recv, &remote_block_ids) {
            self.note_transfer_failure("transfer_setup_failed", request, Some(&error));
        }
        Ok(())
    }

    /// Nothing to fill here: tells the remote side so that it can free its blocks.
    fn notify_only(&mut self, request: &str, recv: &RecvRequest) {
        let message = notification::completion(&recv.remote.request_id, CONSUMERS);
        let agent = self.peers.get(&recv.remote.engine_id).map(|peer| peer.agent.clone());
        let sent = agent.map(|agent| self.transport.send_notification(&agent, &message));
        if let Some(Err(error)) = sent {
            self.stats.num_failed_notifications.push(1);
            self.log_failure("notification_failed", request, recv, Some(&error));
        }
        if recv.awaiting_kvs {
            self.transfers.entry(request.to_owned()).or_default();
        }
    }

    fn post_read(
        &mut self,
        request: &str,
        recv: &RecvRequest,
        remote_block_ids: &[Vec<u64>],
    ) -> Result<(), TransportError> {
        let (Some(peer), Some(local_list)) = (self.peers.get(&recv.remote.engine_id), self.local_list) else {
            return Err(TransportError::UnknownAgent(recv.remote.engine_id.clone()));
        };
        let blocks_per_logical = u64::from(self.config.physical_blocks_per_logical);
        let local_blocks: Vec<u64> = self.regions.iter().map(|region| region.num_blocks).collect();
        let local_groups: Vec<i64> = self.regions.iter().map(|region| region.group).collect();
        let local_kernel = expand(&recv.local_block_ids, blocks_per_logical);
        let remote_kernel = expand(remote_block_ids, peer.blocks_per_logical);
        check_range(&local_kernel, &local_blocks)?;
        check_range(&remote_kernel, &peer.region_blocks)?;
        let local_ids = descriptor_ids(&local_blocks, &local_groups, &local_kernel);
        let remote_ids = descriptor_ids(&peer.region_blocks, &peer.region_groups, &remote_kernel);
        let (Some(local_ids), Some(remote_ids)) = (local_ids, remote_ids) else {
            return Err(TransportError::Mismatch);
        };
        let message = notification::completion(&recv.remote.request_id, CONSUMERS);
        let handle = self.transport.make_transfer(
            TransferOp::Read,
            (local_list, &local_ids),
            (peer.list, &remote_ids),
            Some(&message),
        )?;
        match self.transport.post(handle) {
            Ok(_) => {
                self.transfers.entry(request.to_owned()).or_default().push(handle);
                Ok(())
            }
            Err(error) => {
                if self.transport.release_transfer(handle).is_err() {
                    self.transfers.entry(request.to_owned()).or_default().push(handle);
                }
                Err(error)
            }
        }
    }

    /// Counts a failed transfer and marks its receive as failed.
    pub(super) fn note_transfer_failure(
        &mut self,
        failure_type: &'static str,
        request: &str,
        error: Option<&TransportError>,
    ) {
        self.stats.num_failed_transfers.push(1);
        if let Some(recv) = self.recving.get(request) {
            self.log_failure(failure_type, request, recv, error);
        }
        self.recv_failures.insert(request.to_owned());
    }

    pub(super) fn log_failure(
        &self,
        failure_type: &'static str,
        request: &str,
        recv: &RecvRequest,
        error: Option<&TransportError>,
    ) {
        let local_blocks: usize = recv.local_block_ids.iter().map(Vec::len).sum();
        tracing::error!(
            failure_type,
            request_id = request,
            engine_id = self.config.engine_id,
            remote_engine_id = recv.remote.engine_id,
            remote_request_id = recv.remote.request_id,
            remote_host = recv.remote.host,
            remote_port = recv.remote.port,
            num_local_blocks = local_blocks,
            num_remote_blocks = recv.remote.block_ids.total(),
            error = error.map(tracing::field::display),
            "NIXL transfer failure"
        );
    }
}

/// The remote blocks that go into the local ones: per group the last as many, as the first may be
/// in the local prefix cache.
fn paired_remote_blocks(
    generation: Generation,
    request: &str,
    recv: &RecvRequest,
) -> Result<Vec<Vec<u64>>, EngineFatal> {
    let remote = &recv.remote.block_ids;
    if remote.total() > 0 && remote.is_flat() != (generation == Generation::V2) {
        return Err(EngineFatal::BlockIdShape { request: request.to_owned() });
    }
    if remote.groups().len() != recv.local_block_ids.len() {
        return Err(EngineFatal::GroupCountMismatch {
            request: request.to_owned(),
            local: recv.local_block_ids.len(),
            remote: remote.groups().len(),
        });
    }
    let pairs = recv.local_block_ids.iter().zip(remote.groups()).enumerate();
    pairs
        .map(|(group, (local, remote))| match remote.len().checked_sub(local.len()) {
            Some(skipped) => Ok(remote[skipped..].to_vec()),
            None => Err(EngineFatal::RemoteBlocksTooFew {
                request: request.to_owned(),
                group,
                local: local.len(),
                remote: remote.len(),
            }),
        })
        .collect()
}

fn expand(groups: &[Vec<u64>], blocks_per_logical: u64) -> Vec<Vec<u64>> {
    groups.iter().map(|ids| kernel_block_ids(ids, blocks_per_logical)).collect()
}

/// An id past the end of its region would silently select a block of the next region.
fn check_range(groups: &[Vec<u64>], region_blocks: &[u64]) -> Result<(), TransportError> {
    let len = region_blocks.iter().copied().min().unwrap_or(0);
    match groups.iter().flatten().find(|id| **id >= len) {
        Some(&index) => Err(TransportError::IndexOutOfRange { index, len }),
        None => Ok(()),
    }
}
