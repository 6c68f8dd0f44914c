//! The scheduler half: which requests are received, announced, kept, leased or withdrawn.
//!
//! Pure bookkeeping around the host's request table; never does I/O and never reads a
//! clock. The host calls it in the order new request, matched tokens, allocation, step,
//! finished.

mod clip;
mod config;
mod finish;
mod heartbeat;
mod meta;
mod push;

use std::collections::{BTreeSet, HashMap};

use clip::clip;
pub use config::{GroupClip, KvRole, SchedulerConfig, SchedulerConfigError};
use heartbeat::Heartbeats;
pub use meta::{Heartbeat, RecvRequest, RemoteSide, StepMeta};

use crate::ClockTime;
use crate::error::EngineFatal;
use crate::protocol::params::{Generation, KvTransferParams, Presence, TransferMode};

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

/// What the host has to do with a request it has accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Accepted {
    /// Tokens to drop from the prompt's end. When it is not 0, the output limit becomes 1 too.
    pub dropped_prompt_tokens: usize,
}

#[derive(Debug)]
struct Tracked {
    prompt_tokens: usize,
    params: KvTransferParams,
    remote_blocks_processed: bool,
    p_side_truncated: bool,
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
    heartbeats: Heartbeats,
    /// Prefills whose blocks go through host memory and are not completely scheduled yet.
    need_save: BTreeSet<String>,
    saves: Vec<(String, Vec<Vec<u64>>)>,
    push: push::PushState,
}

impl Scheduler {
    /// A scheduler half without requests.
    pub fn new(config: SchedulerConfig) -> Self {
        if config.role == Some(KvRole::Both) {
            tracing::warn!("kv_role='kv_both' is deprecated: name kv_producer or kv_consumer");
        }
        Self {
            config,
            requests: HashMap::new(),
            need_recv: Vec::new(),
            need_send: Vec::new(),
            in_batch: BTreeSet::new(),
            not_processed: BTreeSet::new(),
            heartbeats: Heartbeats::default(),
            need_save: BTreeSet::new(),
            saves: Vec::new(),
            push: push::PushState::default(),
        }
    }

    /// The settings it was built with.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Called once when the host accepts a request; requests without parameters are not tracked.
    pub fn on_new_request(
        &mut self,
        request: &str,
        prompt_tokens: usize,
        params: Option<KvTransferParams>,
    ) -> Accepted {
        self.accept(request, prompt_tokens, params, false)
    }

    /// As [`Self::on_new_request`], for a request that reads nothing from the prefix cache: decode
    /// computes its whole prompt again, so prefill must not stop short of it.
    pub fn on_new_uncached_request(
        &mut self,
        request: &str,
        prompt_tokens: usize,
        params: Option<KvTransferParams>,
    ) -> Accepted {
        self.accept(request, prompt_tokens, params, true)
    }

    fn accept(
        &mut self,
        request: &str,
        prompt_tokens: usize,
        params: Option<KvTransferParams>,
        skips_prefix_cache: bool,
    ) -> Accepted {
        let Some(params) = params else { return Accepted::default() };
        let marked = |mark: &str| params.extra.get(mark) == Some(&serde_json::Value::Bool(true));
        let earlier = self.requests.get(request);
        let mut p_side_truncated =
            marked("_p_side_truncated") || earlier.is_some_and(|earlier| earlier.p_side_truncated);
        let backoff = self.config.prefill_backoff();
        let truncates = self.config.generation == Generation::V14
            && params.do_remote_decode
            && backoff > 0
            && !p_side_truncated
            && prompt_tokens > backoff
            && !skips_prefix_cache;
        p_side_truncated |= truncates;
        let dropped_prompt_tokens = if truncates { backoff } else { 0 };
        if self.config.generation == Generation::V14 {
            self.heartbeats.track(request, &params);
        }
        let tracked = Tracked {
            prompt_tokens: prompt_tokens - dropped_prompt_tokens,
            remote_blocks_processed: marked("_remote_blocks_processed"),
            p_side_truncated,
            params,
        };
        self.requests.insert(request.to_owned(), tracked);
        Accepted { dropped_prompt_tokens }
    }

    /// Tokens of `request` that can be loaded beyond the `computed` ones; changes nothing.
    pub fn matched_tokens(&self, request: &str, computed: usize) -> Matched {
        let Some(tracked) = self.requests.get(request) else { return Matched::default() };
        let params = &tracked.params;
        let tokens = self.remote_prefill_tokens(tracked.prompt_tokens);
        if params.do_remote_prefill && tokens > computed {
            return Matched { tokens: tokens - computed, asynchronous: true };
        }
        let offers_readback = self.config.generation == Generation::V14
            && self.config.mode == TransferMode::Pull
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

    fn remote_prefill_tokens(&self, prompt_tokens: usize) -> usize {
        let backoff = match self.config.generation {
            Generation::V2 => 0,
            Generation::V14 => self.config.prefill_backoff(),
        };
        if prompt_tokens > backoff { prompt_tokens - backoff } else { prompt_tokens }
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
        if self.config.mode == TransferMode::Push {
            return self.update_after_push_alloc(request, blocks, external_tokens);
        }
        let bidirectional = self.bidirectional();
        let Some(tracked) = self.requests.get_mut(request) else { return Ok(AllocOutcome::NoTransfer) };
        let params = &tracked.params;
        if self.config.host_buffer && params.do_remote_decode {
            self.in_batch.insert(request.to_owned());
            self.need_save.insert(request.to_owned());
            return Ok(AllocOutcome::Producing);
        }
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
            if !awaiting_kvs {
                // The blocks are not needed: should the notification be lost, the lease may end.
                self.heartbeats.stop(request);
            }
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

    /// Called for every request scheduled in a step, with the blocks it was newly given.
    ///
    /// Only host-buffer prefills need it: their blocks are saved step by step until the prompt is
    /// completely scheduled.
    ///
    /// # Errors
    /// A wrong number of cache groups.
    pub fn on_scheduled(
        &mut self,
        request: &str,
        new_block_ids: &[Vec<u64>],
        computed_tokens: usize,
        scheduled_tokens: usize,
    ) -> Result<(), EngineFatal> {
        if !self.need_save.contains(request) {
            return Ok(());
        }
        let groups = clip::clip_windows(&self.config, request, new_block_ids.to_vec())?;
        self.saves.push((request.to_owned(), groups));
        let prompt_tokens = self.requests.get(request).map_or(0, |tracked| tracked.prompt_tokens);
        if computed_tokens + scheduled_tokens >= prompt_tokens {
            self.need_save.remove(request);
        }
        Ok(())
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
        self.drop_overdue_registrations(now);
        Ok(StepMeta {
            reqs_to_recv,
            reqs_to_send: std::mem::take(&mut self.need_send),
            scheduler_clock: (self.config.generation == Generation::V14).then_some(now),
            reqs_in_batch: std::mem::take(&mut self.in_batch),
            reqs_not_processed: std::mem::take(&mut self.not_processed),
            heartbeats: self.heartbeats.due(now, self.config.heartbeat_interval()),
            reqs_to_save: std::mem::take(&mut self.saves),
            push_registrations: std::mem::take(&mut self.push.pending),
            push_finished: std::mem::take(&mut self.push.newly_finished),
        })
    }

    /// Called when the worker reports `request` as received.
    pub fn on_received(&mut self, request: &str) {
        self.heartbeats.stop(request);
        self.push.deadlines.remove(request);
    }

    /// Called when the worker reports `request` as sent.
    pub fn on_sent(&mut self, request: &str) {
        self.push.finished.remove(request);
    }

    /// Local requests whose remote leases are being renewed.
    pub fn heartbeating(&self) -> usize {
        self.heartbeats.len()
    }

    fn bidirectional(&self) -> bool {
        self.config.bidirectional && self.config.generation == Generation::V14
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

#[cfg(test)]
mod tests;
