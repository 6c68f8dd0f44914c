//! Settings and answers of the worker half.

use std::time::Duration;

use thiserror::Error;

use crate::ClockTime;
use crate::protocol::msgpack::DecodeError;
use crate::protocol::params::Generation;
use crate::transport::TransportError;

/// Settings of one rank's worker half.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerConfig {
    /// Protocol generation spoken by the engine.
    pub generation: Generation,
    /// Name of the engine this rank belongs to.
    pub engine_id: String,
    /// Transfer tensor-parallel rank.
    pub tp_rank: u32,
    /// Transfer tensor-parallel size.
    pub tp_size: u32,
    /// Tokens per kernel block.
    pub block_size: u32,
    /// Kernel blocks per logical block.
    pub physical_blocks_per_logical: u32,
    /// Layout name: `HND` or `NHD` in v2, such as `LBHNC` in v14.
    pub kv_cache_layout: String,
    /// Attention backend name.
    pub attn_backend_name: String,
    /// Device of the memory; 0 for host memory.
    pub device_id: u32,
    /// Compatibility hash of this engine.
    pub compatibility_hash: String,
    /// Whether peers with another hash are refused.
    pub enforce_compatibility: bool,
    /// Lease of the engine's scheduler; a heartbeat extends leases by two thirds of it.
    pub lease: Duration,
    /// Idle time after which a peer is forgotten; zero never forgets.
    pub engine_ttl: Duration,
    /// Whether the hybrid cache allocator is needed; failed blocks are then not named.
    pub hma_required: bool,
    /// Die as vLLM 0.13 does when a v2 handshake fails while a request waits for it.
    pub v2_dies_on_failed_handshake: bool,
}

impl WorkerConfig {
    /// The defaults of `generation` for a TP-1 engine with 16-token blocks in host memory.
    pub fn new(generation: Generation, engine_id: impl Into<String>, compatibility_hash: String) -> Self {
        let (kv_cache_layout, lease) = match generation {
            Generation::V2 => ("HND", 480),
            Generation::V14 => ("LBHNC", 30),
        };
        Self {
            generation,
            engine_id: engine_id.into(),
            tp_rank: 0,
            tp_size: 1,
            block_size: 16,
            physical_blocks_per_logical: 1,
            kv_cache_layout: kv_cache_layout.to_owned(),
            attn_backend_name: "CPU_ATTN".to_owned(),
            device_id: 0,
            compatibility_hash,
            enforce_compatibility: true,
            lease: Duration::from_secs(lease),
            engine_ttl: Duration::from_secs(3600),
            hma_required: false,
            v2_dies_on_failed_handshake: false,
        }
    }

    /// By how much a heartbeat extends a lease: two thirds of it in whole seconds.
    pub fn heartbeat_extension(&self) -> Duration {
        Duration::from_secs(self.lease.as_secs() * 2 / 3)
    }
}

/// A handshake for the host to carry out; answered with [`super::Worker::complete_handshake`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandshakeJob {
    /// The peer engine.
    pub engine_id: String,
    /// Its side channel host.
    pub host: String,
    /// Its side channel port, unchecked.
    pub port: i64,
    /// The generation to speak.
    pub generation: Generation,
    /// Its transfer tensor-parallel size.
    pub tp_size: u32,
    /// Its pipeline stages.
    pub pp_size: u32,
    /// The (pipeline, tensor) ranks to ask, in order.
    pub ranks: Vec<(u32, u32)>,
}

/// A peer's clock, sampled by one exchange.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClockSample {
    /// Local clock when the request left.
    pub sent: ClockTime,
    /// Local clock when the reply arrived.
    pub received: ClockTime,
    /// The peer's clock in the reply, in seconds.
    pub remote_seconds: f64,
}

/// One rank's reply to a handshake.
#[derive(Debug, Clone, PartialEq)]
pub struct RankReply {
    /// Pipeline stage.
    pub pp_rank: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// The encoded handshake payload.
    pub payload: Vec<u8>,
    /// The peer's clock, where the channel carries it.
    pub clock: Option<ClockSample>,
}

/// Why the host could not get the replies.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HandshakeFailure {
    /// No reply in time.
    #[error("the peer did not answer in time")]
    Timeout,
    /// No connection.
    #[error("the peer cannot be reached")]
    Unreachable,
    /// The engine or rank is not known where it was asked for.
    #[error("the engine is not known")]
    UnknownEngine,
    /// An answer that is no reply.
    #[error("the answer is not a handshake reply")]
    BadReply,
}

/// Why a handshake did not lead to a connection.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HandshakeError {
    /// No handshake for this engine is under way.
    #[error("no handshake is under way for engine {0}")]
    NotPending(String),
    /// The replies could not be got.
    #[error(transparent)]
    Failure(#[from] HandshakeFailure),
    /// A rank that was asked for is not among the replies.
    #[error("rank ({pp_rank}, {tp_rank}) did not reply")]
    MissingRank {
        /// Pipeline stage.
        pp_rank: u32,
        /// Tensor-parallel rank.
        tp_rank: u32,
    },
    /// The outer payload cannot be decoded.
    #[error("failed to decode the handshake payload: {0}")]
    Payload(#[source] DecodeError),
    /// The peer computed another compatibility hash.
    #[error("compatibility hash mismatch: local {local}, remote {remote}")]
    HashMismatch {
        /// This engine's hash.
        local: String,
        /// The peer's hash.
        remote: String,
    },
    /// The inner metadata cannot be decoded.
    #[error("failed to decode the agent metadata: {0}")]
    Metadata(#[source] DecodeError),
    /// The metadata belongs to another engine.
    #[error("engine id mismatch: expected {expected}, got {got}")]
    EngineIdMismatch {
        /// The engine the transfer parameters named.
        expected: String,
        /// The engine that replied.
        got: String,
    },
    /// The peer is this engine itself.
    #[error("an engine cannot read from itself")]
    SelfHandshake,
    /// Sizes this version does not map onto each other.
    #[error("unsupported topology: {what} is {remote} at the peer and {local} here")]
    UnsupportedTopology {
        /// The quantity that differs.
        what: &'static str,
        /// Its local value.
        local: i64,
        /// Its remote value.
        remote: i64,
    },
    /// The layouts of the caches differ.
    #[error("cache layout mismatch: local {local}, remote {remote}")]
    LayoutMismatch {
        /// Local layout.
        local: String,
        /// Remote layout.
        remote: String,
    },
    /// A per-region quantity does not fit the local regions.
    #[error("region {region}: {what} is {remote}, expected {expected}")]
    RegionMismatch {
        /// The quantity.
        what: &'static str,
        /// Region index, or the number of regions for a count.
        region: usize,
        /// The value that would fit.
        expected: i64,
        /// The peer's value.
        remote: i64,
    },
    /// The regions belong to other layers.
    #[error("region {region} belongs to another layer at the peer")]
    RegionNameMismatch {
        /// Region index.
        region: usize,
    },
    /// The transport refused the peer.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// Why a worker could not be set up.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WorkerSetupError {
    /// No regions.
    #[error("a worker needs at least one region")]
    NoRegions,
    /// A stride shorter than its block, or a number beyond the wire's range.
    #[error("region {region} has impossible sizes")]
    BadRegion {
        /// Region index.
        region: usize,
    },
    /// The transport refused the memory.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// What came to an end since the last poll; every request is named once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TransferResults {
    /// Requests whose blocks need not be kept any longer.
    pub finished_sending: Vec<String>,
    /// Parked requests whose receive has ended, failed ones included.
    pub finished_recving: Vec<String>,
    /// Those of `finished_recving` that failed.
    pub failed_recving: Vec<String>,
}

impl TransferResults {
    /// True when nothing came to an end.
    pub fn is_empty(&self) -> bool {
        self.finished_sending.is_empty() && self.finished_recving.is_empty()
    }
}
