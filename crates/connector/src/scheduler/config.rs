//! Settings of the scheduler half; the engine fills them, nothing is read from outside.

use std::time::Duration;

use crate::protocol::params::Generation;

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
        }
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
