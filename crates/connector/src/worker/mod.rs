//! The worker half for pull: starts reads, polls them, keeps leases and reports each end once.
//!
//! Synchronous and clock-injected; the only I/O is through the transport, and handshakes are
//! jobs for the host. It never waits and never reads a clock.

mod config;
mod lease;
mod peer;
mod read;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

pub use config::{
    ClockSample, HandshakeError, HandshakeFailure, HandshakeJob, RankReply, TransferResults, WorkerConfig,
    WorkerSetupError,
};

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::handshake::NixlHandshakePayload;
use crate::protocol::metadata::{AgentMetadataV2, AgentMetadataV14, NixlAgentMetadata};
use crate::protocol::params::Generation;
use crate::regions::{Region, local_descriptors};
use crate::scheduler::{RecvRequest, StepMeta};
use crate::stats::Stats;
use crate::transport::{
    Descriptor, ListId, MemoryType, RegistrationId, TransferId, TransferState, Transport,
};

use peer::Peer;

/// A handshake that has not been answered yet, and the receives that wait for it.
#[derive(Debug)]
struct PendingHandshake {
    job: HandshakeJob,
    waiting: Vec<(String, RecvRequest)>,
}

/// The worker half of one rank.
#[derive(Debug)]
pub struct Worker<T: Transport> {
    config: WorkerConfig,
    transport: T,
    regions: Vec<Region>,
    registrations: Vec<RegistrationId>,
    local_list: Option<ListId>,
    peers: HashMap<String, Peer>,
    /// Which engine now serves an address; engines that no address maps to were replaced.
    engine_by_address: HashMap<(String, i64), String>,
    handshakes: HashMap<String, PendingHandshake>,
    new_jobs: Vec<HandshakeJob>,
    ready: VecDeque<(String, RecvRequest)>,
    /// Receives that failed outside a poll, to be reported by the next one.
    failed_outside_poll: Vec<String>,
    /// Receives that will be reported.
    recving: HashMap<String, RecvRequest>,
    /// Live transfers per receive; an empty list is a receive with nothing left to wait for.
    transfers: BTreeMap<String, Vec<TransferId>>,
    /// Receives seen failed whose sibling transfers may still run.
    recv_failures: BTreeSet<String>,
    invalid_blocks: BTreeSet<u64>,
    to_process: HashSet<String>,
    leases: HashMap<String, ClockTime>,
    consumer_counts: HashMap<String, i64>,
    stats: Stats,
    /// Set by a failed v2 handshake when such failures are fatal.
    pending_fatal: Option<EngineFatal>,
}

impl<T: Transport> Worker<T> {
    /// Registers the regions and prepares the local descriptors.
    ///
    /// # Errors
    /// Impossible regions, or memory the transport does not accept.
    pub fn new(
        config: WorkerConfig,
        mut transport: T,
        regions: Vec<Region>,
    ) -> Result<Self, WorkerSetupError> {
        if regions.is_empty() {
            return Err(WorkerSetupError::NoRegions);
        }
        for (index, region) in regions.iter().enumerate() {
            let sizes = [region.block_len, region.block_stride, region.num_blocks];
            let fits = sizes.iter().all(|size| i64::try_from(*size).is_ok());
            if !fits || region.block_stride < region.block_len {
                return Err(WorkerSetupError::BadRegion { region: index });
            }
        }
        let device = u64::from(config.device_id);
        let mut registrations = Vec::new();
        for memory in [MemoryType::Dram, MemoryType::Vram] {
            let ranges: Vec<Descriptor> = regions
                .iter()
                .filter(|region| region.memory == memory)
                .map(|region| Descriptor { address: region.base_address, len: region.span(), device })
                .collect();
            if !ranges.is_empty() {
                registrations.push(transport.register_memory(memory, &ranges)?);
            }
        }
        let local_list = Some(transport.prepare_local(&local_descriptors(&regions, device, 1))?);
        Ok(Self {
            config,
            transport,
            regions,
            registrations,
            local_list,
            peers: HashMap::new(),
            engine_by_address: HashMap::new(),
            handshakes: HashMap::new(),
            new_jobs: Vec::new(),
            ready: VecDeque::new(),
            failed_outside_poll: Vec::new(),
            recving: HashMap::new(),
            transfers: BTreeMap::new(),
            recv_failures: BTreeSet::new(),
            invalid_blocks: BTreeSet::new(),
            to_process: HashSet::new(),
            leases: HashMap::new(),
            consumer_counts: HashMap::new(),
            stats: Stats::default(),
            pending_fatal: None,
        })
    }

    /// The settings it was built with.
    pub fn config(&self) -> &WorkerConfig {
        &self.config
    }

    /// The metadata peers need to read from this rank.
    pub fn agent_metadata(&self) -> NixlAgentMetadata {
        let wire = |size: u64| i64::try_from(size).unwrap_or(i64::MAX);
        let base_addresses = self.regions.iter().map(|region| region.base_address).collect();
        let block_lens = self.regions.iter().map(|region| wire(region.block_len)).collect();
        let num_blocks = self.regions.first().map_or(0, |region| wire(region.num_blocks));
        let config = &self.config;
        match config.generation {
            Generation::V2 => NixlAgentMetadata::V2(AgentMetadataV2 {
                engine_id: config.engine_id.clone(),
                agent_metadata: self.transport.agent_metadata(),
                kv_caches_base_addr: base_addresses,
                device_id: i64::from(config.device_id),
                num_blocks,
                block_lens,
                kv_cache_layout: config.kv_cache_layout.clone(),
                block_size: i64::from(config.block_size),
            }),
            Generation::V14 => NixlAgentMetadata::V14(Box::new(AgentMetadataV14 {
                engine_id: config.engine_id.clone(),
                agent_metadata: self.transport.agent_metadata(),
                kv_caches_base_addr: base_addresses,
                device_id: i64::from(config.device_id),
                num_blocks,
                block_lens,
                block_strides: self.regions.iter().map(|region| wire(region.block_stride)).collect(),
                kv_cache_layout: config.kv_cache_layout.clone(),
                block_size: i64::from(config.block_size),
                attn_backend_name: config.attn_backend_name.clone(),
                physical_blocks_per_logical_kv_block: i64::from(config.physical_blocks_per_logical),
                region_num_blocks: Some(self.regions.iter().map(|region| wire(region.num_blocks)).collect()),
                region_group_ids: Some(self.regions.iter().map(|region| region.group).collect()),
                region_names: Some(self.regions.iter().map(|region| region.name.clone()).collect()),
                region_mem_types: Some(
                    self.regions.iter().map(|region| region.memory.as_str().to_owned()).collect(),
                ),
                ..AgentMetadataV14::default()
            })),
        }
    }

    /// The encoded handshake payload to publish for this rank.
    pub fn handshake_payload(&self) -> Vec<u8> {
        NixlHandshakePayload {
            compatibility_hash: self.config.compatibility_hash.clone(),
            agent_metadata_bytes: self.agent_metadata().encode(),
        }
        .encode()
    }

    /// Starts everything a step asks for; never waits.
    ///
    /// # Errors
    /// The first state in which vLLM's worker dies. The rest of the step is carried out and the
    /// request concerned is reported as failed, so the worker stays usable.
    pub fn start_load(&mut self, meta: &StepMeta, now: ClockTime) -> Result<(), EngineFatal> {
        let mut fatal = None;
        for (request, recv) in &meta.reqs_to_recv {
            if recv.awaiting_kvs || recv.local_block_ids.iter().any(|group| !group.is_empty()) {
                self.recving.insert(request.clone(), recv.clone());
            }
            self.start_or_fail(request, recv.clone(), now, &mut fatal);
        }
        // Only what is queued now: a request that needs a new handshake comes back later.
        for _ in 0..self.ready.len() {
            if let Some((request, recv)) = self.ready.pop_front() {
                self.start_or_fail(&request, recv, now, &mut fatal);
            }
        }
        self.keep_leases(meta, now, &mut fatal);
        self.send_heartbeats(&meta.heartbeats, now);
        fatal.map_or(Ok(()), Err)
    }

    /// Handshakes to carry out; each is handed out once.
    pub fn take_handshake_jobs(&mut self) -> Vec<HandshakeJob> {
        std::mem::take(&mut self.new_jobs)
    }

    /// True while requests wait for a handshake or a transfer, so the host should keep stepping.
    pub fn has_pending_receives(&self) -> bool {
        !self.recving.is_empty() || !self.ready.is_empty() || !self.handshakes.is_empty()
    }

    /// Looks at everything in flight and returns what came to an end; never waits.
    ///
    /// # Errors
    /// Only when v2 handshake failures are set to be fatal; the results come with the next call.
    pub fn poll(&mut self, now: ClockTime) -> Result<TransferResults, EngineFatal> {
        if let Some(fatal) = self.pending_fatal.take() {
            return Err(fatal);
        }
        let mut finished_sending = self.receive_notifications(now);
        let mut finished_recving = self.poll_transfers();
        self.recv_failures.extend(self.failed_outside_poll.drain(..));
        let failed_recving = self.settle_failures();
        finished_recving.extend(failed_recving.iter().cloned());
        finished_recving.retain(|request| {
            let Some(recv) = self.recving.remove(request) else { return false };
            if failed_recving.contains(request) && !self.config.hma_required {
                self.invalid_blocks.extend(recv.local_block_ids.first().into_iter().flatten());
            }
            true
        });
        finished_sending.extend(self.sweep_leases(now));
        self.release_replaced_peers();
        Ok(TransferResults {
            finished_sending,
            finished_recving: finished_recving.into_iter().collect(),
            failed_recving: failed_recving.into_iter().collect(),
        })
    }

    /// Logical ids of blocks whose content did not arrive; visible from the report on, once.
    pub fn take_invalid_blocks(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.invalid_blocks)
    }

    /// Statistics since the last call; none when nothing happened.
    pub fn take_stats(&mut self) -> Option<Stats> {
        let stats = std::mem::take(&mut self.stats);
        (!stats.is_empty()).then_some(stats)
    }

    /// Leases held for other engines, as (request, deadline on this worker's clock).
    pub fn leases(&self) -> impl Iterator<Item = (&str, ClockTime)> {
        self.leases.iter().map(|(request, deadline)| (request.as_str(), *deadline))
    }

    /// Engines with a confirmed handshake.
    pub fn connected_engines(&self) -> impl Iterator<Item = &str> {
        self.peers.keys().map(String::as_str)
    }

    /// Releases transfers, lists, peers and registrations; calling it again does nothing.
    pub fn shutdown(&mut self) {
        for (_, handles) in std::mem::take(&mut self.transfers) {
            for handle in handles {
                log_failed("release a transfer", self.transport.release_transfer(handle));
            }
        }
        self.handshakes.clear();
        self.new_jobs.clear();
        self.ready.clear();
        if let Some(list) = self.local_list.take() {
            log_failed("release the local descriptors", self.transport.release_list(list));
        }
        let engines: Vec<String> = self.peers.keys().cloned().collect();
        for engine in engines {
            self.release_peer(&engine);
        }
        for registration in std::mem::take(&mut self.registrations) {
            log_failed("deregister memory", self.transport.deregister_memory(registration));
        }
    }

    /// Polls every live transfer; returns the receives without any left that did not fail.
    fn poll_transfers(&mut self) -> BTreeSet<String> {
        let mut done = BTreeSet::new();
        let mut live = BTreeMap::new();
        for (request, handles) in std::mem::take(&mut self.transfers) {
            let kept: Vec<TransferId> =
                handles.into_iter().filter(|handle| self.is_kept_after_poll(&request, *handle)).collect();
            if !kept.is_empty() {
                live.insert(request, kept);
            } else if !self.recv_failures.contains(&request) {
                done.insert(request);
            }
        }
        self.transfers = live;
        done
    }

    /// Polls one transfer; true when its handle must be looked at again.
    fn is_kept_after_poll(&mut self, request: &str, handle: TransferId) -> bool {
        match self.transport.poll(handle) {
            Ok(TransferState::InProgress) => return true,
            Ok(TransferState::Done) => {
                if let Some(telemetry) = self.transport.telemetry(handle) {
                    self.stats.record(&telemetry);
                }
            }
            Ok(TransferState::Failed) => self.note_transfer_failure("transfer_failed", request, None),
            Err(error) => self.note_transfer_failure("transfer_exception", request, Some(&error)),
        }
        match self.transport.release_transfer(handle) {
            Ok(()) => false,
            Err(error) => {
                tracing::warn!(request, %error, "a transfer handle cannot be released yet");
                true
            }
        }
    }

    /// Failures that can be reported: those to be reported at all, without a live transfer.
    fn settle_failures(&mut self) -> BTreeSet<String> {
        let recving = &self.recving;
        self.recv_failures.retain(|request| recving.contains_key(request));
        let transfers = &self.transfers;
        let (live, settled) = std::mem::take(&mut self.recv_failures)
            .into_iter()
            .partition(|request| transfers.contains_key(request));
        self.recv_failures = live;
        settled
    }
}

impl<T: Transport> Drop for Worker<T> {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn log_failed<E: std::fmt::Display>(action: &'static str, result: Result<(), E>) {
    if let Err(error) = result {
        tracing::warn!(action, %error, "clean-up step failed");
    }
}

#[cfg(test)]
mod tests;
