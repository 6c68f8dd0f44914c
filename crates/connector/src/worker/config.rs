//! Settings and answers of the worker half.

use std::time::Duration;

use thiserror::Error;

use crate::ClockTime;
use crate::protocol::msgpack::DecodeError;
use crate::protocol::params::{Generation, TransferMode};
use crate::regions::descriptors::DescriptorError;
use crate::regions::{IdError, Layout, LocalGeometry, PeerError, Region};
use crate::topology::{LocalTopology, ParallelSizes, TopologyError};
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
    /// Which side drives the copy.
    pub mode: TransferMode,
    /// KV heads of the model over all ranks; 1 with multi-head latent attention.
    pub total_kv_heads: u32,
    /// Whether the model caches one latent instead of heads.
    pub is_mla: bool,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
    /// Prefill-context-parallel size.
    pub pcp_size: u32,
    /// False for the copies of a replicated prefill context: they serve nothing.
    pub serves: bool,
    /// Whether prefill engines read back from decode engines, whose blocks expire.
    pub bidirectional: bool,
    /// Whether all ranks of a host share its host regions, which rank 0 alone fills.
    pub shared_host_pool: bool,
    /// Time after which a registration that matches no prefill is forgotten (push mode).
    pub push_registration_timeout: Duration,
    /// Layers of each region, for peers that match regions by layer.
    pub region_members: Vec<Vec<String>>,
    /// Per packed layer its offset in the block row and its page bytes.
    pub packed_member_layouts: Vec<(String, [i64; 2])>,
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
            mode: TransferMode::Pull,
            total_kv_heads: 8,
            is_mla: false,
            dcp_size: 1,
            pcp_size: 1,
            serves: true,
            bidirectional: false,
            shared_host_pool: false,
            push_registration_timeout: Duration::from_secs(480),
            region_members: Vec::new(),
            packed_member_layouts: Vec::new(),
        }
    }

    /// The geometry of one attention group over `regions`, with the settings' sizes.
    ///
    /// # Errors
    /// A layout of no known name.
    pub fn geometry(&self, regions: Vec<Region>) -> Result<LocalGeometry, WorkerSetupError> {
        let topology = LocalTopology {
            rank: self.tp_rank,
            sizes: ParallelSizes { tp: self.tp_size, dcp: self.dcp_size },
            pcp: self.pcp_size,
            total_kv_heads: self.total_kv_heads,
            is_mla: self.is_mla,
        };
        let layout = Layout::parse(&self.kv_cache_layout)
            .ok_or_else(|| WorkerSetupError::UnknownLayout(self.kv_cache_layout.clone()))?;
        let replicated = vec![self.is_mla; regions.len()];
        Ok(LocalGeometry {
            block_size: u64::from(self.block_size),
            blocks_per_logical: u64::from(self.physical_blocks_per_logical),
            layout,
            attn_backend: self.attn_backend_name.clone(),
            device: u64::from(self.device_id),
            replicated,
            hma_required: self.hma_required,
            ..LocalGeometry::new(self.generation, self.engine_id.clone(), topology, regions)
        })
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
    /// The sizes of the two sides do not map onto each other.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The peer's metadata does not fit this rank.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The peer's memory cannot be described.
    #[error(transparent)]
    Descriptors(#[from] DescriptorError),
    /// The peer's blocks cannot be indexed.
    #[error(transparent)]
    Index(#[from] IdError),
    /// A pull from an engine with pipeline stages, whose layers are spread over its workers.
    #[error("blocks cannot be pulled from {0} pipeline stages")]
    PipelineStages(u32),
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
    /// A layout of no known name.
    #[error("unknown cache layout {0}")]
    UnknownLayout(String),
    /// Host and device regions on one rank, where they cannot be served.
    #[error("host and device regions need latent attention without state, in pull mode")]
    MixedMemory,
    /// The regions cannot be described.
    #[error(transparent)]
    Descriptors(#[from] DescriptorError),
    /// The regions cannot be indexed.
    #[error(transparent)]
    Index(#[from] IdError),
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
    /// Work on received blocks, to be done before they are used.
    pub received: Vec<Received>,
}

/// What remains to be done with the blocks of a good receive.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Received {
    /// The local request.
    pub request: String,
    /// Kernel blocks to copy from the host buffer to the device, before anything else.
    pub copy_to_device: Vec<u64>,
    /// Kernel blocks per region that the transfer did not cover and that have to be zeroed.
    pub zero_by_region: Vec<Vec<u64>>,
    /// Blocks to convert or to zero from the covered part on.
    pub groups: Vec<ReceivedGroup>,
    /// Kernel blocks to repack for the local attention backend.
    pub repack: Vec<u64>,
}

/// Received blocks of one attention group.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReceivedGroup {
    /// Cache group.
    pub group: usize,
    /// Kernel blocks in the order of their tokens.
    pub blocks: Vec<u64>,
    /// Remote blocks per local block.
    pub block_size_ratio: u64,
    /// Remote blocks that were written; everything past them has to be zeroed.
    pub covered_sub_blocks: usize,
    /// Whether sub-blocks have to be put into the order of one local block.
    pub regroup: bool,
    /// Whether heads have to follow tokens instead of the other way round.
    pub permute: bool,
}

impl Received {
    /// True when the blocks can be used as they are.
    pub fn is_empty(&self) -> bool {
        self.copy_to_device.is_empty()
            && self.zero_by_region.iter().all(Vec::is_empty)
            && self.groups.is_empty()
            && self.repack.is_empty()
    }
}

impl TransferResults {
    /// True when nothing came to an end.
    pub fn is_empty(&self) -> bool {
        self.finished_sending.is_empty() && self.finished_recving.is_empty()
    }
}
