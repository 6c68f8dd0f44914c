//! The producer's side: leases, completions and heartbeats of those who read from here.

use std::time::Duration;

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::notification::{self, Notification, NotificationError, parse_consumers};
use crate::protocol::params::TransferMode;
use crate::protocol::registration::PushRegistration;
use crate::scheduler::{Heartbeat, StepMeta};
use crate::topology::ParallelSizes;
use crate::transport::{AgentName, Transport};

use super::Worker;
use super::peer::{EngineAddress, Purpose};

impl<T: Transport> Worker<T> {
    /// Follows the batch: who may be read, who withdrew, and until when blocks are kept.
    pub(super) fn keep_leases(&mut self, meta: &StepMeta, now: ClockTime, fatal: &mut Option<EngineFatal>) {
        self.to_process.extend(meta.reqs_in_batch.iter().cloned());
        for request in &meta.reqs_not_processed {
            self.to_process.remove(request);
            if self.leases.contains_key(request) {
                fatal.get_or_insert(EngineFatal::WithdrawnWhileLeased { request: request.clone() });
            }
        }
        for (request, deadline) in &meta.reqs_to_send {
            // A request that was read before its lease came needs none.
            if self.to_process.contains(request) {
                let deadline = match meta.scheduler_clock {
                    Some(clock) => (now + *deadline).saturating_sub(clock),
                    None => *deadline,
                };
                self.leases.insert(request.clone(), deadline);
            }
        }
    }

    /// Renews the leases this engine depends on; a peer that is not connected yet is skipped.
    pub(super) fn send_heartbeats(&mut self, heartbeats: &[Heartbeat], now: ClockTime) {
        // Where others write, this side only ever notifies them.
        let purpose = match self.config.mode {
            TransferMode::Pull => Purpose::Transfer,
            TransferMode::Push => Purpose::Notify,
        };
        for beat in heartbeats {
            let address = EngineAddress {
                engine_id: &beat.engine_id,
                host: &beat.host,
                port: beat.port,
                sizes: ParallelSizes { tp: beat.tp_size, dcp: beat.dcp_size },
                pp_size: beat.pp_size,
            };
            if !self.ensure_connected(address, purpose, None, now) {
                continue;
            }
            let Some(peer) = self.peers.get_mut(&beat.engine_id) else { continue };
            peer.last_active = now;
            let agents: Vec<AgentName> = peer.agents().map(|(_, agent)| agent.clone()).collect();
            let message = notification::heartbeat(beat.request_ids.iter().map(String::as_str));
            for agent in agents {
                if let Err(error) = self.transport.send_notification(&agent, &message) {
                    tracing::debug!(engine_id = beat.engine_id, %error, "heartbeat not sent");
                }
            }
        }
    }

    /// Takes what peers have sent; returns the requests that every consumer has read.
    pub(super) fn receive_notifications(&mut self, now: ClockTime) -> Vec<String> {
        let mut done = Vec::new();
        for (agent, message) in self.transport.take_notifications() {
            match self.apply_notification(&message, now) {
                Ok(Some(request)) => done.push(request),
                Ok(None) => {}
                Err(error) => tracing::warn!(agent = agent.0, %error, "notification ignored"),
            }
        }
        done
    }

    /// Applies one message; a request is returned when it is complete.
    pub(super) fn apply_notification(
        &mut self,
        message: &[u8],
        now: ClockTime,
    ) -> Result<Option<String>, NotificationError> {
        let push = self.config.mode == TransferMode::Push;
        if push && let Some(registration) = PushRegistration::decode(message) {
            match registration {
                Ok(registration) => self.on_registration(registration, now),
                Err(error) => tracing::warn!(%error, "push registration ignored"),
            }
            return Ok(None);
        }
        match Notification::parse(self.config.generation, message)? {
            Notification::Heartbeat { requests } => {
                self.renew_leases(requests, now + self.config.heartbeat_extension());
                Ok(None)
            }
            Notification::Completion { request, consumers } if push => {
                self.count_push_completion(request, consumers)
            }
            Notification::Completion { request, consumers } => self.count_consumer(request, consumers),
        }
    }

    fn renew_leases(&mut self, requests: &str, deadline: Duration) {
        for request in requests.split(',') {
            if let Some(lease) = self.leases.get_mut(request) {
                *lease = deadline.max(*lease);
            }
        }
    }

    fn count_consumer(
        &mut self,
        request: &str,
        consumers: &str,
    ) -> Result<Option<String>, NotificationError> {
        if !self.keeps(request) {
            tracing::error!(request, "notification for a request that is no longer kept");
            self.stats.num_notifications_after_expiry.push(1);
            return Ok(None);
        }
        let expected = parse_consumers(consumers)?;
        let count = self.consumer_counts.entry(request.to_owned()).or_insert(0);
        *count += 1;
        if *count != expected {
            return Ok(None);
        }
        self.forget_producing(request);
        Ok(Some(request.to_owned()))
    }

    /// Gives up leases whose time is over; heartbeats reorder them, so all are looked at.
    pub(super) fn sweep_leases(&mut self, now: ClockTime) -> Vec<String> {
        let mut expired: Vec<String> = self
            .leases
            .iter()
            // A write of our own still reads the blocks: they cannot be given up before it ends.
            .filter(|(request, deadline)| now >= **deadline && !self.sending.contains_key(*request))
            .map(|(request, _)| request.clone())
            .collect();
        expired.sort_unstable();
        for request in &expired {
            tracing::warn!(request, "blocks released unread: the lease has run out");
            self.stats.num_kv_expired_reqs.push(1);
            self.forget_producing(request);
        }
        expired
    }

    pub(super) fn forget_producing(&mut self, request: &str) {
        self.matcher.evict(request);
        self.consumer_counts.remove(request);
        self.to_process.remove(request);
        self.leases.remove(request);
    }
}
