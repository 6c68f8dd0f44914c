//! Settings of the scheduler half; the engine fills them, nothing is read from outside.

use std::time::Duration;

use thiserror::Error;

use crate::protocol::params::{Generation, TransferMode};

/// How the blocks of one cache group are clipped before they are exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GroupClip {
    /// Full attention: every block is exchanged.
    #[default]
    Full,
    /// Sliding window: only the last blocks are exchanged.
    SlidingWindow {
        /// Blocks that can hold tokens of the window: ceil(window / block size) + 1.
        blocks: usize,
    },
    /// State-space model: one block, before the speculative scratch slots at the end.
    StateSpace {
        /// Scratch slots at the end of the list.
        scratch_blocks: usize,
    },
    /// A group of the host that is never exchanged.
    Local,
}

impl GroupClip {
    /// The sliding window of `window` tokens over blocks of `block_size` tokens.
    pub fn sliding_window(window: usize, block_size: usize) -> Self {
        Self::SlidingWindow { blocks: window.div_ceil(block_size.max(1)) + 1 }
    }
}

/// What an engine does in a P/D pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvRole {
    /// Prefill only.
    Producer,
    /// Decode only.
    Consumer,
    /// Either; vLLM has deprecated it.
    Both,
}

/// A combination of settings that no engine can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SchedulerConfigError {
    /// Push mode has no way back from decode to prefill.
    #[error("push mode cannot be bidirectional")]
    BidirectionalPush,
    /// A prefill engine with prefill-context parallelism cannot read blocks back.
    #[error("prefill-context parallelism cannot be bidirectional")]
    BidirectionalContextParallel,
    /// Prefill-context parallelism is for engines that only prefill.
    #[error("prefill-context parallelism needs the role of a producer")]
    ContextParallelRole,
    /// A prefill context that is dealt out needs one tensor-parallel rank and as many shards.
    #[error("a sharded prefill context needs TP 1 and equal context sizes")]
    ContextParallelSizes,
    /// Pipeline parallelism is not for engines that only decode.
    #[error("a consumer cannot have pipeline stages")]
    PipelineConsumer,
    /// Push mode cannot place the slices of decode-context parallelism.
    #[error("push mode cannot be combined with decode-context parallelism")]
    ContextParallelPush,
}

/// Settings of one engine's scheduler half.
#[derive(Debug, Clone, PartialEq)]
pub struct SchedulerConfig {
    /// Protocol generation spoken by the engine.
    pub generation: Generation,
    /// Name of the engine, unique over all engines that can meet.
    pub engine_id: String,
    /// Advertised side channel host.
    pub side_channel_host: String,
    /// Advertised side channel port.
    pub side_channel_port: u16,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
    /// Pipeline stages.
    pub pp_size: u32,
    /// Time for which blocks of a finished prefill are kept; never renewed in v2.
    pub lease: Duration,
    /// Whether decode engines keep their blocks for the next turn's prefill (v14).
    pub bidirectional: bool,
    /// Reads from a decode engine of fewer tokens than this are skipped; 0 never skips.
    pub recompute_threshold: usize,
    /// Time for which a decode engine keeps its blocks when bidirectional.
    pub decoder_blocks_ttl: Duration,
    /// Cache groups in transfer order; their number must match the block lists.
    pub groups: Vec<GroupClip>,
    /// Whether blocks are clipped per group; off when the host's hybrid allocator is disabled.
    pub hybrid_allocator: bool,
    /// Which side drives the copy.
    pub mode: TransferMode,
    /// What the engine does, when it was told; [`KvRole::Both`] is warned about.
    pub role: Option<KvRole>,
    /// Prefill-context-parallel size.
    pub pcp_size: u32,
    /// Prompt tokens a speculative drafter looks ahead of the target; 0 without one.
    pub lookahead_tokens: usize,
    /// Whether a group replays a bounded part of the prefix after a load.
    pub bounded_replay: bool,
    /// Whether blocks are copied through host memory before and after a transfer.
    pub host_buffer: bool,
    /// Time after which a registration without a completed push is given up (push mode).
    pub push_registration_timeout: Duration,
}

impl SchedulerConfig {
    /// The defaults of `generation` for an engine with one full-attention group and TP 1.
    pub fn new(
        generation: Generation,
        engine_id: impl Into<String>,
        side_channel_host: impl Into<String>,
        side_channel_port: u16,
    ) -> Self {
        Self {
            generation,
            engine_id: engine_id.into(),
            side_channel_host: side_channel_host.into(),
            side_channel_port,
            tp_size: 1,
            dcp_size: 1,
            pp_size: 1,
            lease: match generation {
                Generation::V2 => Duration::from_secs(480),
                Generation::V14 => Duration::from_secs(30),
            },
            bidirectional: false,
            recompute_threshold: 64,
            decoder_blocks_ttl: Duration::from_secs(480),
            groups: vec![GroupClip::Full],
            hybrid_allocator: true,
            mode: TransferMode::Pull,
            role: None,
            pcp_size: 1,
            lookahead_tokens: 0,
            bounded_replay: false,
            host_buffer: false,
            push_registration_timeout: Duration::from_secs(480),
        }
    }

    /// Checks that the settings go together.
    ///
    /// # Errors
    /// The first combination that no engine can serve.
    pub fn validate(&self) -> Result<(), SchedulerConfigError> {
        let push = self.mode == TransferMode::Push;
        let refusals = [
            (push && self.bidirectional, SchedulerConfigError::BidirectionalPush),
            (self.pcp_size > 1 && self.bidirectional, SchedulerConfigError::BidirectionalContextParallel),
            (
                self.pcp_size > 1 && self.role != Some(KvRole::Producer),
                SchedulerConfigError::ContextParallelRole,
            ),
            (
                self.pcp_size > 1
                    && self.dcp_size > 1
                    && (self.tp_size != 1 || self.dcp_size != self.pcp_size),
                SchedulerConfigError::ContextParallelSizes,
            ),
            (self.pp_size > 1 && self.role == Some(KvRole::Consumer), SchedulerConfigError::PipelineConsumer),
            (push && self.dcp_size > 1, SchedulerConfigError::ContextParallelPush),
        ];
        refusals.into_iter().find_map(|(refused, error)| refused.then_some(error)).map_or(Ok(()), Err)
    }

    /// Trailing prompt tokens that prefill leaves for decode to compute.
    ///
    /// A recurrent state has to stop one token early; a drafter with several modules needs its
    /// whole look-ahead computed where it drafts.
    pub fn prefill_backoff(&self) -> usize {
        let recurrent = self.groups.iter().any(|group| matches!(group, GroupClip::StateSpace { .. }));
        usize::from(recurrent || self.bounded_replay).max(self.lookahead_tokens.saturating_sub(1))
    }

    /// Time between two heartbeats: a sixth of the lease in whole seconds, 0 for short leases.
    pub fn heartbeat_interval(&self) -> Duration {
        Duration::from_secs(self.lease.as_secs() / 6)
    }

    /// The tensor-parallel size advertised to peers.
    pub fn transfer_tp_size(&self) -> u32 {
        self.tp_size.max(self.dcp_size)
    }
}
