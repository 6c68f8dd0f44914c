//! The scheduler half for pull: which requests are received, kept, leased or withdrawn.
//!
//! Pure bookkeeping around the host's request table; never does I/O and never reads a
//! clock. The host calls it in the order new request, matched tokens, allocation, step,
//! finished.

mod config;
mod meta;

use std::collections::{BTreeMap, BTreeSet, HashMap};

pub use config::{GroupClip, SchedulerConfig};
pub use meta::{Heartbeat, RecvRequest, RemoteSide, StepMeta};

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::params::{BlockIds, Generation, KvTransferParams, Presence, TransferMode};

/// How many prompt tokens can be loaded from elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Matched {
    /// Tokens beyond those already computed locally.
    pub tokens: usize,
    /// True when they arrive between steps, so the host has to park the request.
    pub asynchronous: bool,
}

/// The blocks the host has allocated for a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AllocatedBlocks {
    /// Ids of the blocks without a prefix-cache hash, per cache group: those to fill.
    pub unhashed: Vec<Vec<u64>>,
    /// Number of blocks covered by the local prefix cache, per cache group.
    pub cached: Vec<usize>,
}

/// What the scheduler made of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocOutcome {
    /// The request takes no part in a transfer.
    NoTransfer,
    /// The request may be read by others once it has finished.
    Producing,
    /// A receive was enqueued.
    Receiving {
        /// True when the host has parked the request; false for a notification alone.
        awaiting_kvs: bool,
    },
    /// A key is missing, so nothing was enqueued: a parked request now waits for ever.
    Stranded {
        /// The absent key of `kv_transfer_params`.
        missing: &'static str,
    },
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishStatus {
    /// The output limit or the model's length limit was reached.
    LengthCapped,
    /// An end-of-sequence or stop token was generated.
    Stopped,
    /// The client went away or the host withdrew the request.
    Aborted,
    /// The request failed, was ignored or repeated itself.
    Failed,
}

/// The scheduler's answer to the end of a request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Finished {
    /// True when the host must keep the blocks until the worker reports the request as sent.
    pub delay_free: bool,
    /// Transfer parameters for the answer.
    pub params: Option<KvTransferParams>,
}

#[derive(Debug)]
struct Tracked {
    prompt_tokens: usize,
    params: KvTransferParams,
    remote_blocks_processed: bool,
}

#[derive(Debug)]
struct PendingRecv {
    params: KvTransferParams,
    local_block_ids: Vec<Vec<u64>>,
    local_cached_blocks: Vec<usize>,
    awaiting_kvs: bool,
}

/// The scheduler half of one engine.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    requests: HashMap<String, Tracked>,
    need_recv: Vec<(String, PendingRecv)>,
    need_send: Vec<(String, ClockTime)>,
    in_batch: BTreeSet<String>,
    not_processed: BTreeSet<String>,
    heartbeat_by_engine: BTreeMap<String, Heartbeat>,
    /// Local request to the remote engine and remote request it keeps alive.
    heartbeat_of_request: HashMap<String, (String, String)>,
    last_heartbeat: Option<ClockTime>,
}

impl Scheduler {
    /// A scheduler half without requests.
    pub fn new(config: SchedulerConfig) -> Self {
        Self {
            config,
            requests: HashMap::new(),
            need_recv: Vec::new(),
            need_send: Vec::new(),
            in_batch: BTreeSet::new(),
            not_processed: BTreeSet::new(),
            heartbeat_by_engine: BTreeMap::new(),
            heartbeat_of_request: HashMap::new(),
            last_heartbeat: None,
        }
    }

    /// The settings it was built with.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Called once when the host accepts a request; requests without parameters are not tracked.
    pub fn on_new_request(&mut self, request: &str, prompt_tokens: usize, params: Option<KvTransferParams>) {
        let Some(params) = params else { return };
        self.track_heartbeat(request, &params);
        let tracked = Tracked { prompt_tokens, params, remote_blocks_processed: false };
        self.requests.insert(request.to_owned(), tracked);
    }

    /// Tokens of `request` that can be loaded beyond the `computed` ones; changes nothing.
    pub fn matched_tokens(&self, request: &str, computed: usize) -> Matched {
        let Some(tracked) = self.requests.get(request) else { return Matched::default() };
        let params = &tracked.params;
        if params.do_remote_prefill && tracked.prompt_tokens > computed {
            return Matched { tokens: tracked.prompt_tokens - computed, asynchronous: true };
        }
        let offers_readback = self.config.generation == Generation::V14
            && params.do_remote_decode
            && params.names_remote_blocks()
            && params.first_missing_remote_key().is_none();
        if !offers_readback {
            return Matched::default();
        }
        let remote_tokens = params.remote_num_tokens.value().copied().unwrap_or(0);
        let remote_tokens = usize::try_from(remote_tokens).unwrap_or(usize::MAX);
        let tokens = remote_tokens.min(tracked.prompt_tokens).saturating_sub(computed);
        if tokens == 0 || tokens < self.config.recompute_threshold {
            return Matched::default();
        }
        Matched { tokens, asynchronous: true }
    }

    /// Called after the host allocated blocks for `request`, with the external tokens it counts on.
    ///
    /// # Errors
    /// External tokens without remote blocks, or a wrong number of cache groups: vLLM dies here.
    pub fn update_after_alloc(
        &mut self,
        request: &str,
        blocks: &AllocatedBlocks,
        external_tokens: usize,
    ) -> Result<AllocOutcome, EngineFatal> {
        let bidirectional = self.bidirectional();
        let Some(tracked) = self.requests.get_mut(request) else { return Ok(AllocOutcome::NoTransfer) };
        let params = &tracked.params;
        let producing = params.do_remote_decode || (params.do_remote_prefill && bidirectional);
        let receiving = params.do_remote_prefill
            || (params.do_remote_decode && bidirectional && !tracked.remote_blocks_processed);
        if producing {
            self.in_batch.insert(request.to_owned());
        }
        if !receiving {
            return Ok(if producing { AllocOutcome::Producing } else { AllocOutcome::NoTransfer });
        }
        let idle_outcome = if producing { AllocOutcome::Producing } else { AllocOutcome::NoTransfer };
        let outcome = if !params.names_remote_blocks() {
            if external_tokens > 0 {
                return Err(EngineFatal::NoRemoteBlocks { request: request.to_owned(), external_tokens });
            }
            idle_outcome
        } else if let Some(missing) = params.first_missing_remote_key() {
            tracing::warn!(request, missing, "transfer parameters are incomplete, no transfer is started");
            AllocOutcome::Stranded { missing }
        } else {
            let awaiting_kvs = external_tokens > 0;
            let local_block_ids =
                if awaiting_kvs { clip(&self.config, request, blocks.unhashed.clone())? } else { Vec::new() };
            let pending = PendingRecv {
                params: params.clone(),
                local_block_ids,
                local_cached_blocks: blocks.cached.clone(),
                awaiting_kvs,
            };
            push_or_replace(&mut self.need_recv, request, pending);
            AllocOutcome::Receiving { awaiting_kvs }
        };
        tracked.params.do_remote_prefill = false;
        tracked.remote_blocks_processed = true;
        Ok(outcome)
    }

    /// Called once per step; moves everything that is due out to the worker.
    ///
    /// # Errors
    /// A receive whose parameters lack a required key, where vLLM dies. That receive is dropped:
    /// calling again goes on with the others.
    pub fn build_step(&mut self, now: ClockTime) -> Result<StepMeta, EngineFatal> {
        let missing = self.need_recv.iter().enumerate().find_map(|(index, (request, pending))| {
            let key = missing_recv_key(&pending.params)?;
            Some((index, EngineFatal::MissingKey { request: request.clone(), key }))
        });
        if let Some((index, fatal)) = missing {
            self.need_recv.remove(index);
            return Err(fatal);
        }
        let reqs_to_recv = std::mem::take(&mut self.need_recv)
            .into_iter()
            .map(|(request, pending)| (request, recv_request(pending)))
            .collect();
        Ok(StepMeta {
            reqs_to_recv,
            reqs_to_send: std::mem::take(&mut self.need_send),
            scheduler_clock: (self.config.generation == Generation::V14).then_some(now),
            reqs_in_batch: std::mem::take(&mut self.in_batch),
            reqs_not_processed: std::mem::take(&mut self.not_processed),
            heartbeats: self.due_heartbeats(now),
        })
    }

    /// Called when `request` ends, with its blocks per cache group and its computed tokens.
    ///
    /// A request that never reached allocation still notifies the remote side in the next step.
    pub fn request_finished(
        &mut self,
        request: &str,
        status: FinishStatus,
        block_ids: &[Vec<u64>],
        computed_tokens: u64,
        now: ClockTime,
    ) -> Finished {
        let Some(mut tracked) = self.requests.remove(request) else { return Finished::default() };
        let is_prefill = tracked.params.do_remote_decode;
        self.stop_heartbeat(request);
        if tracked.params.do_remote_prefill {
            tracked.params.do_remote_prefill = false;
            let pending = PendingRecv {
                params: tracked.params,
                local_block_ids: Vec::new(),
                local_cached_blocks: Vec::new(),
                awaiting_kvs: false,
            };
            push_or_replace(&mut self.need_recv, request, pending);
            return Finished::default();
        }
        if !is_prefill && !self.bidirectional() {
            return Finished::default();
        }
        let hands_off = match self.config.generation {
            Generation::V2 => status == FinishStatus::LengthCapped,
            Generation::V14 => matches!(status, FinishStatus::LengthCapped | FinishStatus::Stopped),
        };
        if !hands_off {
            self.not_processed.insert(request.to_owned());
            return Finished::default();
        }
        self.hand_off(request, is_prefill, block_ids, computed_tokens, now)
    }

    /// Called when the worker reports `request` as received.
    pub fn on_received(&mut self, request: &str) {
        self.stop_heartbeat(request);
    }

    /// Local requests whose remote leases are being renewed.
    pub fn heartbeating(&self) -> usize {
        self.heartbeat_of_request.len()
    }

    fn bidirectional(&self) -> bool {
        self.config.bidirectional && self.config.generation == Generation::V14
    }

    fn hand_off(
        &mut self,
        request: &str,
        is_prefill: bool,
        block_ids: &[Vec<u64>],
        computed_tokens: u64,
        now: ClockTime,
    ) -> Finished {
        let delay_free = block_ids.iter().any(|group| !group.is_empty());
        let mut groups = block_ids.to_vec();
        let mut expiry = Presence::Null;
        let mut remote_num_tokens = 0;
        if delay_free {
            let ttl = if is_prefill { self.config.lease } else { self.config.decoder_blocks_ttl };
            let deadline = now + ttl;
            self.need_send.push((request.to_owned(), deadline));
            if !is_prefill {
                expiry = Presence::Value(deadline.as_secs_f64());
            }
            clip_groups(&self.config.groups, &mut groups);
            remote_num_tokens = computed_tokens;
        }
        let generation = self.config.generation;
        let mut params = KvTransferParams {
            do_remote_prefill: is_prefill,
            do_remote_decode: !is_prefill,
            remote_block_ids: BlockIds::for_generation(generation, groups).into(),
            remote_engine_id: self.config.engine_id.clone().into(),
            remote_request_id: request.to_owned().into(),
            remote_host: self.config.side_channel_host.clone().into(),
            remote_port: i64::from(self.config.side_channel_port).into(),
            tp_size: self.config.transfer_tp_size().into(),
            ..KvTransferParams::default()
        };
        if generation == Generation::V14 {
            params.dcp_size = self.config.dcp_size.into();
            params.pp_size = self.config.pp_size.into();
            params.remote_num_tokens = remote_num_tokens.into();
            params.remote_blocks_expiry_time = expiry;
            params.transfer_mode = TransferMode::Pull.into();
        }
        Finished { delay_free, params: Some(params) }
    }

    fn track_heartbeat(&mut self, request: &str, params: &KvTransferParams) {
        if self.config.generation == Generation::V2 || !params.do_remote_prefill {
            return;
        }
        let (Some(engine_id), Some(remote_request), Some(host), Some(&port), Some(&tp_size)) = (
            params.remote_engine_id.value(),
            params.remote_request_id.value(),
            params.remote_host.value(),
            params.remote_port.value(),
            params.tp_size.value(),
        ) else {
            return;
        };
        let heartbeat = self.heartbeat_by_engine.entry(engine_id.clone()).or_insert_with(|| Heartbeat {
            engine_id: engine_id.clone(),
            host: host.clone(),
            port,
            tp_size,
            dcp_size: params.dcp_size.value().copied().unwrap_or(1),
            pp_size: params.pp_size.value().copied().unwrap_or(1),
            request_ids: BTreeSet::new(),
        });
        heartbeat.request_ids.insert(remote_request.clone());
        let key = (engine_id.clone(), remote_request.clone());
        self.heartbeat_of_request.insert(request.to_owned(), key);
    }

    fn stop_heartbeat(&mut self, request: &str) {
        let Some(key) = self.heartbeat_of_request.remove(request) else { return };
        // Two local requests may have been given one hand-off: the other still needs the lease.
        if self.heartbeat_of_request.values().any(|other| *other == key) {
            return;
        }
        let (engine_id, remote_request) = key;
        let Some(heartbeat) = self.heartbeat_by_engine.get_mut(&engine_id) else { return };
        heartbeat.request_ids.remove(&remote_request);
        if heartbeat.request_ids.is_empty() {
            self.heartbeat_by_engine.remove(&engine_id);
        }
    }

    fn due_heartbeats(&mut self, now: ClockTime) -> Vec<Heartbeat> {
        let interval = self.config.heartbeat_interval();
        let due = self.last_heartbeat.is_none_or(|last| now.saturating_sub(last) >= interval);
        if self.heartbeat_by_engine.is_empty() || !due {
            return Vec::new();
        }
        self.last_heartbeat = Some(now);
        self.heartbeat_by_engine.values().cloned().collect()
    }
}

/// vLLM keys the table by request id, so a second entry replaces the first in its place.
fn push_or_replace(table: &mut Vec<(String, PendingRecv)>, request: &str, pending: PendingRecv) {
    match table.iter_mut().find(|(id, _)| id == request) {
        Some((_, slot)) => *slot = pending,
        None => table.push((request.to_owned(), pending)),
    }
}

fn missing_recv_key(params: &KvTransferParams) -> Option<&'static str> {
    if params.remote_block_ids.is_absent() {
        return Some("remote_block_ids");
    }
    params.first_missing_remote_key()
}

fn recv_request(pending: PendingRecv) -> RecvRequest {
    let params = pending.params;
    let text = |field: &Presence<String>| field.value().cloned().unwrap_or_default();
    RecvRequest {
        local_block_ids: pending.local_block_ids,
        local_cached_blocks: pending.local_cached_blocks,
        remote: RemoteSide {
            block_ids: params.remote_block_ids.value().cloned().unwrap_or_default(),
            engine_id: text(&params.remote_engine_id),
            request_id: text(&params.remote_request_id),
            host: text(&params.remote_host),
            port: params.remote_port.value().copied().unwrap_or(0),
            blocks_expiry_time: params.remote_blocks_expiry_time.value().copied(),
            num_tokens: params.remote_num_tokens.value().copied(),
        },
        tp_size: params.tp_size.value().copied().unwrap_or(1),
        dcp_size: params.dcp_size.value().copied().unwrap_or(1),
        pp_size: params.pp_size.value().copied().unwrap_or(1),
        awaiting_kvs: pending.awaiting_kvs,
    }
}

fn clip(
    config: &SchedulerConfig,
    request: &str,
    mut groups: Vec<Vec<u64>>,
) -> Result<Vec<Vec<u64>>, EngineFatal> {
    if groups.len() != config.groups.len() {
        return Err(EngineFatal::GroupCountMismatch {
            request: request.to_owned(),
            local: config.groups.len(),
            remote: groups.len(),
        });
    }
    clip_groups(&config.groups, &mut groups);
    Ok(groups)
}

fn clip_groups(clips: &[GroupClip], groups: &mut [Vec<u64>]) {
    for (clip, ids) in clips.iter().zip(groups) {
        match *clip {
            GroupClip::Full => {}
            GroupClip::SlidingWindow { blocks } => {
                ids.drain(..ids.len().saturating_sub(blocks));
            }
            GroupClip::StateSpace { scratch_blocks } => {
                let kept = ids.len() - scratch_blocks.min(ids.len().saturating_sub(1));
                ids.truncate(kept);
                ids.drain(..ids.len().saturating_sub(1));
            }
        }
    }
}

#[cfg(test)]
mod tests;
