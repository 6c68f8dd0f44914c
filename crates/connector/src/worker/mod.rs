//! The worker half: starts transfers, polls them, keeps leases and reports each end once.
//!
//! Synchronous and clock-injected; the only I/O is through the transport, and handshakes are
//! jobs for the host. It never waits and never reads a clock.

mod config;
mod connect;
mod evict;
mod failure;
mod lease;
mod lists;
mod pairing;
mod peer;
mod post;
mod push;
mod read;
mod received;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

pub use config::{
    ClockSample, HandshakeError, HandshakeFailure, HandshakeJob, RankReply, Received, ReceivedGroup,
    TransferResults, WorkerConfig, WorkerSetupError,
};

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::handshake::NixlHandshakePayload;
use crate::protocol::metadata::{AgentMetadataV2, AgentMetadataV14, NixlAgentMetadata};
use crate::protocol::params::{Generation, TransferMode};
use crate::push::PushMatcher;
use crate::regions::{LocalGeometry, Region};
use crate::scheduler::{RecvRequest, StepMeta};
use crate::stats::Stats;
use crate::transport::{
    AgentName, Descriptor, MemoryType, RegistrationId, TransferId, TransferState, Transport, TransportError,
};

use evict::Backoff;
use lists::LocalLists;
use peer::{Peer, PendingHandshake, Waiting};
use push::Sending;

/// What a read leaves for the end of its receive.
#[derive(Debug, Default)]
struct RecvState {
    /// Remote blocks per cache group that reach the local ones.
    covered: Vec<usize>,
    zero_by_region: Vec<Vec<u64>>,
}

/// What a poll made of a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Polled {
    /// It must be polled again.
    Kept,
    /// It is released.
    Gone,
}

/// The worker half of one rank.
#[derive(Debug)]
pub struct Worker<T: Transport> {
    config: WorkerConfig,
    geometry: LocalGeometry,
    transport: T,
    registrations: Vec<RegistrationId>,
    lists: LocalLists,
    peers: BTreeMap<String, Peer>,
    /// Which engine now serves an address; engines that no address maps to were replaced.
    engine_by_address: HashMap<(String, i64), String>,
    /// Engines with a counted failure since the last poll.
    failed_engines: BTreeSet<String>,
    /// Engines the transport has lost track of; reads from them fail at once.
    invalid: BTreeSet<String>,
    backoff: HashMap<String, Backoff>,
    handshakes: HashMap<String, PendingHandshake>,
    new_jobs: Vec<HandshakeJob>,
    ready: VecDeque<Waiting>,
    /// Receives that failed outside a poll, to be reported by the next one.
    failed_outside_poll: Vec<String>,
    /// Receives that will be reported.
    recving: HashMap<String, RecvRequest>,
    recv_states: HashMap<String, RecvState>,
    /// Live transfers per receive; an empty list is a receive with nothing left to wait for.
    transfers: BTreeMap<String, Vec<TransferId>>,
    /// Messages that wait for all transfers of a receive.
    pending_notifications: HashMap<String, Vec<(AgentName, Vec<u8>)>>,
    /// Receives seen failed whose sibling transfers may still run.
    recv_failures: BTreeSet<String>,
    invalid_blocks: BTreeSet<u64>,
    to_process: HashSet<String>,
    leases: HashMap<String, ClockTime>,
    consumer_counts: HashMap<String, i64>,
    /// Requests that this copy of a replicated context has nothing to send for.
    replicated_sent: BTreeSet<String>,
    matcher: PushMatcher,
    sending: BTreeMap<String, Sending>,
    stats: Stats,
    /// Set by a failed v2 handshake when such failures are fatal.
    pending_fatal: Option<EngineFatal>,
}

impl<T: Transport> Worker<T> {
    /// Registers the regions of one full-attention group and prepares the local descriptors.
    ///
    /// # Errors
    /// Impossible regions, or memory the transport does not accept.
    pub fn new(config: WorkerConfig, transport: T, regions: Vec<Region>) -> Result<Self, WorkerSetupError> {
        let geometry = config.geometry(regions)?;
        let ranges = geometry.regions.iter().map(|region| {
            (
                region.memory,
                Descriptor { address: region.base_address, len: region.span(), device: geometry.device },
            )
        });
        let ranges = ranges.collect();
        Self::with_geometry(config, transport, geometry, ranges)
    }

    /// As [`Self::new`] for any geometry; `ranges` is the memory to register, of both kinds.
    ///
    /// # Errors
    /// Impossible regions, or memory the transport does not accept.
    pub fn with_geometry(
        config: WorkerConfig,
        mut transport: T,
        geometry: LocalGeometry,
        ranges: Vec<(MemoryType, Descriptor)>,
    ) -> Result<Self, WorkerSetupError> {
        check_regions(&config, &geometry)?;
        let mut registrations = Vec::new();
        for memory in [MemoryType::Dram, MemoryType::Vram] {
            let ranges: Vec<Descriptor> =
                ranges.iter().filter(|(kind, _)| *kind == memory).map(|(_, range)| *range).collect();
            if !ranges.is_empty() {
                registrations.push(transport.register_memory(memory, &ranges)?);
            }
        }
        let lists = LocalLists::whole(&mut transport, &geometry)?;
        Ok(Self {
            config,
            geometry,
            transport,
            registrations,
            lists,
            peers: BTreeMap::new(),
            engine_by_address: HashMap::new(),
            failed_engines: BTreeSet::new(),
            invalid: BTreeSet::new(),
            backoff: HashMap::new(),
            handshakes: HashMap::new(),
            new_jobs: Vec::new(),
            ready: VecDeque::new(),
            failed_outside_poll: Vec::new(),
            recving: HashMap::new(),
            recv_states: HashMap::new(),
            transfers: BTreeMap::new(),
            pending_notifications: HashMap::new(),
            recv_failures: BTreeSet::new(),
            invalid_blocks: BTreeSet::new(),
            to_process: HashSet::new(),
            leases: HashMap::new(),
            consumer_counts: HashMap::new(),
            replicated_sent: BTreeSet::new(),
            matcher: PushMatcher::default(),
            sending: BTreeMap::new(),
            stats: Stats::default(),
            pending_fatal: None,
        })
    }

    /// The settings it was built with.
    pub fn config(&self) -> &WorkerConfig {
        &self.config
    }

    /// The memory it was built over.
    pub fn geometry(&self) -> &LocalGeometry {
        &self.geometry
    }

    /// The metadata peers need to read from this rank.
    pub fn agent_metadata(&self) -> NixlAgentMetadata {
        let wire = |size: u64| i64::try_from(size).unwrap_or(i64::MAX);
        let (config, local) = (&self.config, &self.geometry);
        let regions = &local.regions;
        let base_addresses = regions.iter().map(|region| region.base_address).collect();
        let block_lens = regions.iter().map(|region| wire(region.block_len)).collect();
        let num_blocks = regions.first().map_or(0, |region| wire(region.num_blocks));
        let layout = local.layout.as_str().to_owned();
        match config.generation {
            Generation::V2 => NixlAgentMetadata::V2(AgentMetadataV2 {
                engine_id: config.engine_id.clone(),
                agent_metadata: self.transport.agent_metadata(),
                kv_caches_base_addr: base_addresses,
                device_id: wire(local.device),
                num_blocks,
                block_lens,
                kv_cache_layout: layout,
                block_size: wire(local.block_size),
            }),
            Generation::V14 => NixlAgentMetadata::V14(Box::new(AgentMetadataV14 {
                engine_id: config.engine_id.clone(),
                agent_metadata: self.transport.agent_metadata(),
                kv_caches_base_addr: base_addresses,
                device_id: wire(local.device),
                num_blocks,
                block_lens,
                block_strides: regions.iter().map(|region| wire(region.block_stride)).collect(),
                kv_cache_layout: layout,
                block_size: wire(local.block_size),
                ssm_sizes: local.states.as_ref().map_or([0, 0], |states| states.sizes.map(wire)),
                attn_backend_name: local.attn_backend.clone(),
                physical_blocks_per_logical_kv_block: wire(local.blocks_per_logical),
                region_num_blocks: Some(regions.iter().map(|region| wire(region.num_blocks)).collect()),
                region_group_ids: Some(regions.iter().map(|region| region.group).collect()),
                region_names: Some(regions.iter().map(|region| region.name.clone()).collect()),
                region_mem_types: Some(
                    regions.iter().map(|region| region.memory.as_str().to_owned()).collect(),
                ),
                dcp_size: i64::from(local.topology.sizes.dcp),
                pcp_size: i64::from(local.topology.pcp),
                ple_block_len: local.states.as_ref().and_then(|states| states.ple).map(|(_, len)| wire(len)),
                region_members: config.region_members.clone(),
                packed_member_layouts: config.packed_member_layouts.clone(),
            })),
        }
    }

    /// The encoded handshake payload to publish, or none for a rank that serves nothing.
    pub fn published_payload(&self) -> Option<Vec<u8>> {
        self.config.serves.then(|| self.handshake_payload())
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
        match self.config.mode {
            TransferMode::Push => self.await_pushes(meta, now),
            TransferMode::Pull => {
                for (request, recv) in &meta.reqs_to_recv {
                    if recv.awaiting_kvs || recv.local_block_ids.iter().any(|group| !group.is_empty()) {
                        self.recving.insert(request.clone(), recv.clone());
                    }
                    self.start_or_fail(request, recv.clone(), now, &mut fatal);
                }
            }
        }
        // Only what is queued now: what needs a new handshake comes back later.
        for _ in 0..self.ready.len() {
            if let Some(waiting) = self.ready.pop_front() {
                self.go_on(waiting, now, &mut fatal);
            }
        }
        if !self.config.serves {
            self.replicated_sent.extend(meta.reqs_to_send.iter().map(|(request, _)| request.clone()));
            return fatal.map_or(Ok(()), Err);
        }
        self.keep_leases(meta, now, &mut fatal);
        self.offer_finished(meta, now);
        self.send_heartbeats(&meta.heartbeats, now);
        fatal.map_or(Ok(()), Err)
    }

    fn go_on(&mut self, waiting: Waiting, now: ClockTime, fatal: &mut Option<EngineFatal>) {
        match waiting {
            Waiting::Read(request, recv) if self.config.mode == TransferMode::Push => {
                self.notify_finished(&request, &recv);
            }
            Waiting::Read(request, recv) => self.start_or_fail(&request, recv, now, fatal),
            Waiting::Register(request, registration) => self.announce(&request, registration, now),
            Waiting::Write(push) => self.start_write(push, now),
        }
    }

    /// Handshakes to carry out; each is handed out once.
    pub fn take_handshake_jobs(&mut self) -> Vec<HandshakeJob> {
        std::mem::take(&mut self.new_jobs)
    }

    /// True while requests wait for a handshake or a transfer, so the host should keep stepping.
    pub fn has_pending_receives(&self) -> bool {
        !self.recving.is_empty()
            || !self.ready.is_empty()
            || !self.handshakes.is_empty()
            || !self.sending.is_empty()
    }

    /// Looks at everything in flight and returns what came to an end; never waits.
    ///
    /// # Errors
    /// Only when v2 handshake failures are set to be fatal; the results come with the next call.
    pub fn poll(&mut self, now: ClockTime) -> Result<TransferResults, EngineFatal> {
        if let Some(fatal) = self.pending_fatal.take() {
            return Err(fatal);
        }
        self.matcher.forget_stale(now, self.config.push_registration_timeout);
        let mut finished_sending = self.receive_notifications(now);
        let mut finished_recving = self.poll_transfers();
        finished_sending.extend(self.poll_writes());
        finished_sending.extend(std::mem::take(&mut self.replicated_sent));
        self.recv_failures.extend(self.failed_outside_poll.drain(..));
        let failed_recving = self.settle_failures();
        finished_recving.extend(failed_recving.iter().cloned());
        let mut received = Vec::new();
        finished_recving.retain(|request| {
            let Some(recv) = self.recving.remove(request) else { return false };
            let state = self.recv_states.remove(request).unwrap_or_default();
            self.consumer_counts.remove(request);
            if failed_recving.contains(request) {
                self.pending_notifications.remove(request);
                if !self.geometry.hma_required {
                    self.invalid_blocks.extend(recv.local_block_ids.first().into_iter().flatten());
                }
            } else {
                self.send_pending_notifications(request, &recv);
                received.extend(self.received(request, &recv, &state));
            }
            true
        });
        finished_sending.extend(self.sweep_leases(now));
        self.release_stale_peers(now);
        Ok(TransferResults {
            finished_sending,
            finished_recving: finished_recving.into_iter().collect(),
            failed_recving: failed_recving.into_iter().collect(),
            received,
        })
    }

    /// As [`Self::poll`], for a host that expects reports of sends from serving ranks only.
    ///
    /// # Errors
    /// Those of [`Self::poll`].
    pub fn poll_serving(&mut self, now: ClockTime) -> Result<TransferResults, EngineFatal> {
        let mut results = self.poll(now)?;
        if !self.config.serves {
            results.finished_sending.clear();
        }
        Ok(results)
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

    /// Releases transfers, lists, peers and registrations, in this order; calling it again does
    /// nothing. A step that fails is logged and the next one is taken.
    pub fn shutdown(&mut self) {
        self.handshakes.clear();
        self.new_jobs.clear();
        self.ready.clear();
        let reads = std::mem::take(&mut self.transfers).into_values().flatten();
        let writes = std::mem::take(&mut self.sending).into_values().flat_map(|sending| sending.handles);
        for handle in reads.chain(writes).collect::<Vec<_>>() {
            log_failed("release a transfer", self.transport.release_transfer(handle));
        }
        self.lists.release_all(&mut self.transport);
        for engine in self.peers.keys().cloned().collect::<Vec<_>>() {
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
            let mut kept = Vec::new();
            for handle in handles {
                let (polled, failure) = self.poll_handle(&request, handle);
                if let Some((failure_type, error)) = failure {
                    self.note_transfer_failure(failure_type, &request, error.as_ref());
                }
                if polled == Polled::Kept {
                    kept.push(handle);
                }
            }
            if !kept.is_empty() {
                live.insert(request, kept);
            } else if !self.recv_failures.contains(&request) {
                done.insert(request);
            }
        }
        self.transfers = live;
        done
    }

    /// Polls one transfer and releases it when it has ended; a handle that cannot be released is
    /// kept, and an end that was a failure is named.
    fn poll_handle(
        &mut self,
        request: &str,
        handle: TransferId,
    ) -> (Polled, Option<(&'static str, Option<TransportError>)>) {
        let failure = match self.transport.poll(handle) {
            Ok(TransferState::InProgress) => return (Polled::Kept, None),
            Ok(TransferState::Done) => {
                if let Some(telemetry) = self.transport.telemetry(handle) {
                    self.stats.record(&telemetry);
                }
                None
            }
            Ok(TransferState::Failed) => Some(("transfer_failed", None)),
            Err(error) => Some(("transfer_exception", Some(error))),
        };
        let polled = if self.try_release(request, handle) { Polled::Gone } else { Polled::Kept };
        (polled, failure)
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

fn check_regions(config: &WorkerConfig, geometry: &LocalGeometry) -> Result<(), WorkerSetupError> {
    let regions = &geometry.regions;
    let Some(first) = regions.first() else { return Err(WorkerSetupError::NoRegions) };
    for (index, region) in regions.iter().enumerate() {
        let sizes = [region.block_len, region.block_stride, region.num_blocks];
        let fits = sizes.iter().all(|size| i64::try_from(*size).is_ok());
        if !fits || region.block_stride < region.block_len {
            return Err(WorkerSetupError::BadRegion { region: index });
        }
    }
    let mixed = regions.iter().any(|region| region.memory != first.memory);
    let divisible = geometry.topology.is_mla && !geometry.has_states() && config.mode == TransferMode::Pull;
    if mixed && !divisible { Err(WorkerSetupError::MixedMemory) } else { Ok(()) }
}

fn log_failed<E: std::fmt::Display>(action: &'static str, result: Result<(), E>) {
    if let Err(error) = result {
        tracing::warn!(action, %error, "clean-up step failed");
    }
}

#[cfg(test)]
mod tests;
