//! Posting transfers and keeping what cannot be released.

use crate::transport::{AgentName, ListId, TransferId, TransferOp, Transport, TransportError};

use super::Worker;

/// Local and remote descriptor ids.
type IdPairs = (Vec<u64>, Vec<u64>);

/// A selection of a prepared list.
type Side<'a> = (ListId, &'a [u64]);

impl<T: Transport> Worker<T> {
    /// One read, with the notification riding on it.
    pub(super) fn post_one(
        &mut self,
        request: &str,
        (local, remote): (Side<'_>, Side<'_>),
        message: &[u8],
    ) -> Result<(), TransportError> {
        let handle = self.transport.make_transfer(TransferOp::Read, local, remote, Some(message))?;
        match self.transport.post(handle) {
            Ok(_) => {
                self.transfers.entry(request.to_owned()).or_default().push(handle);
                Ok(())
            }
            Err(error) => {
                self.release_or_keep(request, handle);
                Err(error)
            }
        }
    }

    /// A read of host memory and one of device memory; whoever keeps the blocks is told only when
    /// both are done.
    pub(super) fn post_mixed(
        &mut self,
        request: &str,
        (dram, vram): (ListId, ListId),
        remote: ListId,
        (host, device): (IdPairs, IdPairs),
        (agent, message): (AgentName, &[u8]),
    ) -> Result<(), TransportError> {
        let mut reads = Vec::new();
        if self.leaves_host_memory_to_rank_0() {
            self.transfers.entry(request.to_owned()).or_default();
        } else {
            reads.push((dram, host));
        }
        reads.push((vram, device));
        let mut made = Vec::new();
        for (list, (local_ids, remote_ids)) in reads.iter().filter(|(_, (ids, _))| !ids.is_empty()) {
            let (local, remote) = ((*list, local_ids.as_slice()), (remote, remote_ids.as_slice()));
            match self.transport.make_transfer(TransferOp::Read, local, remote, None) {
                Ok(handle) => made.push(handle),
                Err(error) => {
                    made.into_iter().for_each(|handle| self.release_or_keep(request, handle));
                    return Err(error);
                }
            }
        }
        let notifications = self.pending_notifications.entry(request.to_owned()).or_default();
        notifications.push((agent, message.to_vec()));
        let mut unposted = made.into_iter();
        while let Some(handle) = unposted.next() {
            if let Err(error) = self.transport.post(handle) {
                self.release_or_keep(request, handle);
                unposted.for_each(|handle| self.release_or_keep(request, handle));
                return Err(error);
            }
            self.transfers.entry(request.to_owned()).or_default().push(handle);
        }
        Ok(())
    }

    fn leaves_host_memory_to_rank_0(&self) -> bool {
        crate::regions::shares_host_pool(true, self.config.shared_host_pool, self.geometry.topology.rank)
    }

    /// A handle that cannot be released stays with its request and is polled again.
    fn release_or_keep(&mut self, request: &str, handle: TransferId) {
        if !self.try_release(request, handle) {
            self.transfers.entry(request.to_owned()).or_default().push(handle);
        }
    }

    pub(super) fn try_release(&mut self, request: &str, handle: TransferId) -> bool {
        match self.transport.release_transfer(handle) {
            Ok(()) => true,
            Err(error) => {
                self.log_request_failure("transfer_release_failed", request, Some(&error));
                false
            }
        }
    }
}
