//! Why a peer is refused.

use thiserror::Error;

use crate::topology::{ErrorKind, TopologyError};

use super::descriptors::DescriptorError;

/// A rule that a peer breaks.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PeerError {
    /// Metadata of the other generation.
    #[error("the metadata belongs to another protocol generation")]
    Generation,
    /// Shared pages whose head layout differs.
    #[error("tensor-parallel sizes {local} and {remote} lie on both sides of {heads} KV heads")]
    HeadBoundary {
        /// Local size.
        local: u32,
        /// Remote size.
        remote: u32,
        /// KV heads of the model.
        heads: u32,
    },
    /// Context parallelism that spans a part of its group only.
    #[error("decode context size {dcp} does not span the prefill context size {pcp}")]
    PartialContext {
        /// Remote prefill context size.
        pcp: u64,
        /// Remote decode context size.
        dcp: u64,
    },
    /// One side copies its context while the other deals it out.
    #[error("a replicated prefill context cannot be paired with a sharded one")]
    ReplicatedContext,
    /// The metadata belongs to another engine.
    #[error("engine id mismatch: expected {expected}, got {got}")]
    EngineId {
        /// The engine named by the transfer parameters.
        expected: String,
        /// The engine that answered.
        got: String,
    },
    /// The peer is this engine.
    #[error("an engine cannot be its own peer")]
    OwnEngine,
    /// Matching by layer with different block sizes.
    #[error("matching by layer needs equal block sizes: local {local}, remote {remote}")]
    RoutedBlockSizes {
        /// Tokens per local block.
        local: u64,
        /// Tokens per remote block.
        remote: u64,
    },
    /// Matching by layer with more remote ranks.
    #[error("matching by layer needs at most {local} remote ranks, not {remote}")]
    RoutedSizes {
        /// Local size.
        local: u32,
        /// Remote size.
        remote: u32,
    },
    /// A layer that the peer announces more than once.
    #[error("layer {0} is announced in several regions")]
    RepeatedLayer(String),
    /// A local layer that the peer does not announce.
    #[error("layer {0} is not announced")]
    MissingLayer(String),
    /// A packed layer without a place, or with one that does not fit.
    #[error("packed layer {0} has no usable place in its block")]
    PackedLayer(String),
    /// Sizes that have no mapping.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// Another rank of the engine announced something else.
    #[error("{what} was {first} for an earlier rank and is {now}")]
    Changed {
        /// The quantity.
        what: &'static str,
        /// The earlier value.
        first: u64,
        /// The value of this rank.
        now: u64,
    },
    /// Context sizes that do not divide one another.
    #[error("decode context sizes {local} and {remote} do not divide one another")]
    ContextSizes {
        /// Local size.
        local: u32,
        /// Remote size.
        remote: u32,
    },
    /// State with different context sizes.
    #[error("state needs equal decode context sizes: local {local}, remote {remote}")]
    StateContext {
        /// Local size.
        local: u32,
        /// Remote size.
        remote: u32,
    },
    /// More remote ranks than heads while the remote side is the larger one.
    #[error("{remote} remote ranks share {heads} heads and outnumber the local ranks")]
    SharedHeads {
        /// Remote size.
        remote: u32,
        /// KV heads of the model.
        heads: u32,
    },
    /// Context parallelism with other groups and logical blocks.
    #[error("context-parallel regions of other groups need equal logical and kernel blocks")]
    ContextRegions,
    /// State, prefix caching and different logical blocks.
    #[error("prefix caching of state needs {local} kernel blocks per logical one, the peer has {remote}")]
    StatePrefixCaching {
        /// Local kernel blocks per logical block.
        local: u64,
        /// Remote ones.
        remote: u64,
    },
    /// Different block sizes with a host buffer.
    #[error("a host buffer needs equal block sizes")]
    HostBufferBlockSizes,
    /// The layouts of the caches differ.
    #[error("cache layout mismatch: local {local}, remote {remote}")]
    Layout {
        /// Local layout.
        local: String,
        /// Remote layout.
        remote: String,
    },
    /// A conversion on receive that the hybrid allocator excludes.
    #[error("a hybrid cache cannot be permuted on receive")]
    PermuteHybrid,
    /// As above for the local attention backend.
    #[error("a hybrid cache cannot be repacked for attention backend {0}")]
    RepackHybrid(String),
    /// Heads must be split but do not lie together.
    #[error("different sizes need heads that lie together, not {0}")]
    ScatteredHeads(String),
    /// Sizes that this platform cannot combine.
    #[error("this platform reads from equal sizes only, the ratio is {0}")]
    UnequalSizes(u32),
    /// Different block sizes with a larger remote side.
    #[error("head slices need equal block sizes, the ratio is {0}")]
    SlicedSubBlocks(u64),
    /// A block of another length.
    #[error("region {region}: block length is {got}, expected {expected}")]
    BlockLen {
        /// Region index.
        region: usize,
        /// The length that fits.
        expected: u64,
        /// The announced one.
        got: u64,
    },
    /// A list of another length.
    #[error("{got} {what}, expected {expected}")]
    ListLength {
        /// What is listed.
        what: &'static str,
        /// Entries needed.
        expected: usize,
        /// Entries announced.
        got: usize,
    },
    /// Blocks that overlap.
    #[error("region {region}: stride {stride} is shorter than block length {len}")]
    ShortStride {
        /// Region index.
        region: usize,
        /// Bytes from block to block.
        stride: u64,
        /// Bytes per block.
        len: u64,
    },
    /// A region that belongs to another layer.
    #[error("region {region} belongs to layer {got}, expected {expected}")]
    RegionName {
        /// Region index.
        region: usize,
        /// The local layer.
        expected: String,
        /// The announced one.
        got: String,
    },
    /// A peer with several kinds of memory.
    #[error("the peer's regions are in several kinds of memory")]
    MixedMemory,
    /// A kind of memory that does not exist.
    #[error("memory type {0} is unknown")]
    MemoryType(String),
    /// A number that cannot be a size.
    #[error("{what} is {value}")]
    Number {
        /// The quantity.
        what: &'static str,
        /// The announced value.
        value: i64,
    },
    /// The slice to read does not lie in the peer's block.
    #[error("region {region}: the slice of this rank is not within the block")]
    SliceOutsideBlock {
        /// Region index.
        region: usize,
    },
    /// The descriptors cannot be built.
    #[error(transparent)]
    Descriptors(DescriptorError),
}

impl PeerError {
    /// What vLLM would have raised.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::HeadBoundary { .. } => ErrorKind::Value,
            Self::PartialContext { .. }
            | Self::ReplicatedContext
            | Self::RoutedBlockSizes { .. }
            | Self::RoutedSizes { .. }
            | Self::ContextRegions
            | Self::MixedMemory => ErrorKind::NotImplemented,
            Self::Generation
            | Self::EngineId { .. }
            | Self::StateContext { .. }
            | Self::StatePrefixCaching { .. }
            | Self::Layout { .. }
            | Self::RepackHybrid(_)
            | Self::ScatteredHeads(_) => ErrorKind::Runtime,
            Self::Descriptors(error) => error.kind(),
            _ => ErrorKind::Assertion,
        }
    }
}
