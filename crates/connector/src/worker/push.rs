//! Push mode: announcing receives, matching them with finished prefills, writing.
//!
//! One thread does it all, so a request's writes are published together by construction.

use std::fmt;

use crate::ClockTime;
use crate::protocol::notification::{NotificationError, parse_consumers};
use crate::protocol::registration::PushRegistration;
use crate::push::Push;
use crate::regions::{
    PairedBlocks, PeerGeometry, RegionRouting, expand_groups, pair_block_ids, split_into_remote_blocks,
};
use crate::scheduler::StepMeta;
use crate::topology::{GroupKind, ParallelSizes};
use crate::transport::{AgentName, TransferId, TransferOp, Transport, TransportError};

use super::failure::FailureContext;
use super::lists::PreparedList;
use super::pairing::RankBlocks;
use super::peer::{EngineAddress, Purpose, Waiting};
use super::read::address_of;
use super::{Polled, Worker};

/// The writes of one finished prefill.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) engine_id: String,
    pub(super) handles: Vec<TransferId>,
    /// Set by the first write that fails: the lease frees the blocks, and not before all have ended.
    pub(super) failed: bool,
}

/// What keeps a write from being planned.
#[derive(Debug)]
enum WriteDefect {
    Groups,
    Pairing(crate::regions::PairError),
}

impl fmt::Display for WriteDefect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Groups => f.write_str("the cache groups of the two sides differ"),
            Self::Pairing(error) => error.fmt(f),
        }
    }
}

impl<T: Transport> Worker<T> {
    /// The consumer's part of a step: receives that others write, and their announcements.
    pub(super) fn await_pushes(&mut self, meta: &StepMeta, now: ClockTime) {
        for (request, recv) in &meta.reqs_to_recv {
            if let Some(peer) = self.peers.get_mut(&recv.remote.engine_id) {
                peer.last_active = now;
            }
            if recv.local_block_ids.iter().any(|group| !group.is_empty()) {
                self.recving.insert(request.clone(), recv.clone());
                continue;
            }
            // Nothing will be written here. The prefill is told, or its blocks stay for the lease.
            let waiting = Waiting::Read(request.clone(), recv.clone());
            if self.ensure_connected(address_of(recv), Purpose::Notify, Some(waiting), now) {
                self.notify_finished(request, recv);
            }
        }
        for (request, registration) in &meta.push_registrations {
            self.announce(request, registration.clone(), now);
        }
    }

    pub(super) fn announce(&mut self, request: &str, registration: PushRegistration, now: ClockTime) {
        let address = EngineAddress {
            engine_id: &registration.remote_engine_id,
            host: &registration.remote_host,
            port: registration.remote_port,
            sizes: ParallelSizes::tp(registration.remote_tp_size),
            pp_size: registration.remote_pp_size,
        };
        let waiting = Waiting::Register(request.to_owned(), registration.clone());
        if !self.ensure_connected(address, Purpose::Notify, Some(waiting), now) {
            return;
        }
        let agents = self.peers.get(&registration.remote_engine_id).map(|peer| {
            peer.agents().map(|(rank, agent)| (rank, agent.clone())).collect::<Vec<(u32, AgentName)>>()
        });
        let message = registration.encode();
        for (rank, agent) in agents.unwrap_or_default() {
            // The other ranks have been told and may write, so the receive goes on.
            if let Err(error) = self.transport.send_notification(&agent, &message) {
                self.stats.num_failed_notifications.push(1);
                let recv = self.recving.get(request);
                let context = FailureContext {
                    request: Some(request),
                    recv,
                    remote_rank: Some(rank),
                    ..FailureContext::default()
                };
                self.log_failure("push_reg_notif_failed", &context, Some(&error));
            }
        }
    }

    /// The producer's part of a step: prefills that have finished.
    pub(super) fn offer_finished(&mut self, meta: &StepMeta, now: ClockTime) {
        for (request, block_ids) in &meta.push_finished {
            if let Some(push) = self.matcher.on_finished(request, block_ids.clone()) {
                self.start_write(push, now);
            }
        }
    }

    pub(super) fn on_registration(&mut self, registration: PushRegistration, now: ClockTime) {
        if let Some(push) = self.matcher.on_registration(registration, now) {
            self.start_write(push, now);
        }
    }

    pub(super) fn start_write(&mut self, push: Push, now: ClockTime) {
        let request = push.request.as_str();
        if !self.keeps(request) {
            tracing::warn!(request, "push dropped: the blocks are no longer kept");
            return;
        }
        if push.local_block_ids.iter().all(Vec::is_empty) {
            tracing::warn!(request, "push dropped: there are no blocks");
            return;
        }
        let registration = &push.registration;
        let engine_id = registration.decode_engine_id.clone();
        let address = EngineAddress {
            engine_id: &engine_id,
            host: &registration.decode_host,
            port: registration.decode_port,
            sizes: ParallelSizes::tp(registration.decode_tp_size),
            pp_size: 1,
        };
        if !self.ensure_connected(address, Purpose::Transfer, Some(Waiting::Write(push.clone())), now) {
            return;
        }
        if let Some(peer) = self.peers.get_mut(&engine_id) {
            peer.last_active = now;
        }
        match self.plan_write(&push) {
            Ok(plan) => self.post_writes(&push, plan),
            Err(defect) => self.log_request_failure("transfer_setup_failed", request, Some(&defect)),
        }
    }

    /// Whether the blocks of a request are still kept for others.
    pub(super) fn keeps(&self, request: &str) -> bool {
        self.leases.contains_key(request) || self.to_process.contains(request)
    }

    fn plan_write(&self, push: &Push) -> Result<Vec<(u32, RankBlocks)>, WriteDefect> {
        let Some(peer) = self.peers.get(&push.registration.decode_engine_id) else { return Ok(Vec::new()) };
        let Some(geometry) = peer.geometry() else { return Ok(Vec::new()) };
        if geometry.differs_in_groups && !matches!(self.geometry.routing, RegionRouting::ByLayer(_)) {
            return Err(WriteDefect::Groups);
        }
        let mapping = &geometry.mapping;
        // A latent is the same on all ranks of the decode engine, so each of them has to get it.
        let to_all = self.geometry.topology.is_mla && mapping.tp_ratio < 0;
        let ranks: Vec<u32> = if to_all && !self.geometry.has_states() {
            peer.ranks.keys().map(|(_, rank)| *rank).collect()
        } else {
            mapping.source_ranks.clone()
        };
        let plan = ranks.into_iter().map(|rank| Ok((rank, self.pair_write(push, geometry, rank, to_all)?)));
        plan.collect::<Result<_, _>>().map_err(WriteDefect::Pairing)
    }

    fn pair_write(
        &self,
        push: &Push,
        peer: &PeerGeometry,
        rank: u32,
        to_all: bool,
    ) -> Result<RankBlocks, crate::regions::PairError> {
        let kinds = &self.geometry.groups;
        let whole_pages = self.geometry.csa_linear && peer.mapping.tp_ratio < 0;
        let goes = |group: usize| {
            whole_pages
                || (to_all && kinds.get(group) == Some(&GroupKind::Attention))
                || peer.mapping.reads(group, rank)
        };
        let of_rank = |lists: &[Vec<u64>], per_logical| {
            let lists: Vec<Vec<u64>> = lists
                .iter()
                .enumerate()
                .map(|(group, ids)| if goes(group) { ids.clone() } else { Vec::new() })
                .collect();
            expand_groups(kinds, &lists, per_logical)
        };
        let per_logical = (peer.topology.blocks_per_logical, self.geometry.blocks_per_logical);
        let mut prefill = of_rank(&push.local_block_ids, per_logical.1);
        let decode = of_rank(&push.registration.local_block_ids, per_logical.0);
        if peer.block_size_ratio > 1 {
            match split_into_remote_blocks(kinds, &prefill, &decode, peer.block_size_ratio) {
                Some(pieces) => prefill = pieces,
                None => return Ok(RankBlocks::default()),
            }
        }
        let paired = pair_block_ids(kinds, PairedBlocks { decode, prefill }, per_logical.0, per_logical.1)?;
        Ok(RankBlocks { local: paired.prefill, remote: paired.decode, by_region: false })
    }

    fn post_writes(&mut self, push: &Push, plan: Vec<(u32, RankBlocks)>) {
        let engine_id = &push.registration.decode_engine_id;
        let tp_size = self.geometry.topology.sizes.tp;
        let message = crate::protocol::notification::completion(&push.registration.request_id, tp_size);
        let mut sending = Sending { engine_id: engine_id.clone(), handles: Vec::new(), failed: false };
        for (index, (rank, blocks)) in
            plan.into_iter().enumerate().filter(|(_, (_, blocks))| !blocks.is_empty())
        {
            if let Err(error) =
                self.post_write(engine_id, (index, rank), &blocks, &message, &mut sending.handles)
            {
                sending.failed = true;
                self.stats.num_failed_transfers.push(1);
                let context = FailureContext {
                    request: Some(&push.request),
                    remote_engine_id: Some(engine_id),
                    remote_rank: Some(rank),
                    ..FailureContext::default()
                };
                self.log_failure("transfer_setup_failed", &context, Some(&error));
            }
        }
        if sending.handles.is_empty() {
            return;
        }
        match self.sending.get_mut(&push.request) {
            Some(earlier) => {
                earlier.handles.extend(sending.handles);
                earlier.failed |= sending.failed;
            }
            None => {
                self.sending.insert(push.request.clone(), sending);
            }
        }
    }

    /// Posts one write; a handle that must be polled is added, after a failure too.
    fn post_write(
        &mut self,
        engine_id: &str,
        (index, rank): (usize, u32),
        blocks: &RankBlocks,
        message: &[u8],
        handles: &mut Vec<TransferId>,
    ) -> Result<(), TransportError> {
        let unknown = || TransportError::UnknownAgent(engine_id.to_owned());
        let peer = self.peers.get(engine_id).ok_or_else(unknown)?;
        let memory = peer.ranks.get(&(0, rank)).and_then(|rank| rank.memory.as_ref()).ok_or_else(unknown)?;
        let sub_blocks = self.lists.sub_blocks(&memory.geometry).ok_or(TransportError::Mismatch)?;
        let list = if memory.geometry.mapping.needs_split(self.geometry.topology.is_mla) {
            self.lists.slices(&memory.geometry).and_then(|slices| slices.get(index)).copied()
        } else {
            Some(sub_blocks.list)
        };
        let Some(PreparedList::One(local)) = list else { return Err(TransportError::Mismatch) };
        let (local_ids, remote_ids) = blocks.descriptor_ids(&sub_blocks.index, &memory.index)?;
        let handle = self.transport.make_transfer(
            TransferOp::Write,
            (local, &local_ids),
            (memory.list, &remote_ids),
            Some(message),
        )?;
        let posted = self.transport.post(handle);
        if posted.is_ok() || self.transport.release_transfer(handle).is_err() {
            handles.push(handle);
        }
        posted.map(|_| ())
    }

    /// Polls every write; returns the requests all of whose writes have ended well.
    pub(super) fn poll_writes(&mut self) -> Vec<String> {
        let mut done = Vec::new();
        for (request, mut sending) in std::mem::take(&mut self.sending) {
            let mut live = Vec::new();
            for handle in sending.handles {
                let (polled, failure) = self.poll_handle(&request, handle);
                if let Some((failure_type, error)) = failure {
                    sending.failed = true;
                    self.stats.num_failed_transfers.push(1);
                    let error = error.as_ref().map(|error| error as &dyn fmt::Display);
                    self.log_request_failure(failure_type, &request, error);
                }
                if polled == Polled::Kept {
                    live.push(handle);
                }
            }
            sending.handles = live;
            if !sending.handles.is_empty() {
                self.sending.insert(request, sending);
            } else if !sending.failed && self.keeps(&request) {
                self.forget_producing(&request);
                done.push(request);
            }
        }
        done
    }

    /// A completion in push mode: for a consumer that a rank has written, for a producer that its
    /// blocks are not wanted.
    pub(super) fn count_push_completion(
        &mut self,
        request: &str,
        count: &str,
    ) -> Result<Option<String>, NotificationError> {
        let own = i64::from(self.geometry.topology.sizes.tp.max(1));
        if self.keeps(request) {
            let consumers = parse_consumers(count)?;
            if consumers < 1 || (consumers > own && consumers % own != 0) {
                return Err(NotificationError::BadCount);
            }
            if self.sending.contains_key(request) {
                return Ok(None);
            }
            let expected = if consumers > own { consumers / own } else { 1 };
            let seen = self.consumer_counts.entry(request.to_owned()).or_insert(0);
            *seen += 1;
            if *seen != expected {
                return Ok(None);
            }
            self.forget_producing(request);
            return Ok(Some(request.to_owned()));
        }
        let Some(recv) = self.recving.get(request) else {
            tracing::error!(request, "notification for a request that is no longer kept");
            self.stats.num_notifications_after_expiry.push(1);
            return Ok(None);
        };
        let producers = (parse_consumers(count)? / own).max(1);
        let expected = producers.saturating_mul(i64::from(recv.pp_size.max(1)));
        let seen = self.consumer_counts.entry(request.to_owned()).or_insert(0);
        *seen += 1;
        if *seen >= expected {
            self.consumer_counts.remove(request);
            self.transfers.entry(request.to_owned()).or_default();
        }
        Ok(None)
    }
}
