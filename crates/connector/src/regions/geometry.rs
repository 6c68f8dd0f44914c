//! The memory of both sides of a transfer as descriptors and ids need it.

use crate::protocol::params::Generation;
use crate::topology::{EngineTopology, GroupKind, LocalTopology, TpMapping};
use crate::transport::MemoryType;

use super::{Layout, Region, StateGeometry};

/// How the peer's regions are found for the local ones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum RegionRouting {
    /// Both sides list the same regions.
    #[default]
    Whole,
    /// A pipeline stage: its regions are a window of the peer's, from this index on.
    Window {
        /// The peer's region that corresponds to local region 0.
        first: usize,
    },
    /// A pipeline stage of a hybrid or packed model: regions are matched by layer.
    ByLayer(Vec<RoutedLayer>),
}

/// A layer of a stage that matches regions by layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedLayer {
    /// Layer name.
    pub name: String,
    /// Local region that holds it.
    pub region: usize,
    /// Its cache group.
    pub group: usize,
}

/// The local rank's memory and the settings that decide what peers it may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalGeometry {
    /// Protocol generation.
    pub generation: Generation,
    /// The engine of this rank.
    pub engine_id: String,
    /// Ranks and sizes.
    pub topology: LocalTopology,
    /// Kind of every transferred cache group.
    pub groups: Vec<GroupKind>,
    /// Tokens per kernel block.
    pub block_size: u64,
    /// Kernel blocks per logical block.
    pub blocks_per_logical: u64,
    /// Layout of the cache, or of the host buffer.
    pub layout: Layout,
    /// Attention backend name.
    pub attn_backend: String,
    /// Device of the memory.
    pub device: u64,
    /// Regions in the order that peers see.
    pub regions: Vec<Region>,
    /// Per region whether all ranks hold the same bytes; absent entries follow the model's attention.
    pub replicated: Vec<bool>,
    /// v2: whether a block holds all keys and then all values, and is indexed in halves.
    pub halves: bool,
    /// State of state-space layers.
    pub states: Option<StateGeometry>,
    /// How the peer's regions are found.
    pub routing: RegionRouting,
    /// Whether transfers end in a host buffer.
    pub host_buffer: bool,
    /// Whether a head-major cache may be received into a token-major one.
    pub permute_received: bool,
    /// Whether the hybrid cache allocator is needed.
    pub hma_required: bool,
    /// Whether prefix caching is on.
    pub prefix_caching: bool,
    /// Whether attention and state share pages that move as a whole.
    pub csa_linear: bool,
    /// v2: a platform that only reads from equal sizes.
    pub equal_sizes_only: bool,
}

impl LocalGeometry {
    /// One attention group over `regions`, with vLLM's defaults for everything else.
    pub fn new(
        generation: Generation,
        engine_id: impl Into<String>,
        topology: LocalTopology,
        regions: Vec<Region>,
    ) -> Self {
        let layout = match generation {
            Generation::V2 => Layout::Hnd,
            Generation::V14 => Layout::Lbhnc,
        };
        Self {
            generation,
            engine_id: engine_id.into(),
            topology,
            groups: vec![GroupKind::Attention],
            block_size: 16,
            blocks_per_logical: 1,
            layout,
            attn_backend: "FLASH_ATTN".to_owned(),
            device: 0,
            regions,
            replicated: Vec::new(),
            halves: false,
            states: None,
            routing: RegionRouting::Whole,
            host_buffer: false,
            permute_received: false,
            hma_required: false,
            prefix_caching: true,
            csa_linear: false,
            equal_sizes_only: false,
        }
    }

    /// Whether all ranks hold the same bytes in a region.
    pub fn is_replicated(&self, region: usize) -> bool {
        self.replicated.get(region).copied().unwrap_or(self.topology.is_mla)
    }

    /// Local region of every transferred one, in the order of descriptors.
    pub fn transferred_regions(&self) -> Vec<usize> {
        match &self.routing {
            RegionRouting::ByLayer(layers) => layers.iter().map(|layer| layer.region).collect(),
            RegionRouting::Whole | RegionRouting::Window { .. } => (0..self.regions.len()).collect(),
        }
    }

    /// Whether some layers keep state instead of tokens.
    pub fn has_states(&self) -> bool {
        self.states.is_some()
    }
}

/// One region of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Address of block 0.
    pub base_address: u64,
    /// Bytes per block.
    pub block_len: u64,
    /// Bytes from block to block.
    pub block_stride: u64,
    /// Kernel blocks.
    pub num_blocks: u64,
    /// Cache group, or [`super::SHARED_GROUP`].
    pub group: i64,
}

/// One validated rank of a peer engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerGeometry {
    /// The engine.
    pub engine_id: String,
    /// Its sizes.
    pub topology: EngineTopology,
    /// How the local rank maps onto it.
    pub mapping: TpMapping,
    /// Remote blocks per local block.
    pub block_size_ratio: u64,
    /// Kernel blocks, as announced for the whole rank.
    pub num_blocks: u64,
    /// Device of its memory.
    pub device: u64,
    /// Kind of its memory.
    pub memory: MemoryType,
    /// Its regions, aligned with the local transferred ones.
    pub regions: Vec<RemoteRegion>,
    /// Bytes of convolution and temporal state per logical block.
    pub state_sizes: [u64; 2],
    /// Bytes of a per-layer-embedding page.
    pub ple_block_len: Option<u64>,
    /// Whether received blocks must be turned from head-major to token-major order.
    pub permute: bool,
    /// Whether received blocks must be packed for the local attention backend.
    pub repack_attention: bool,
    /// Whether its regions belong to other cache groups than the local ones.
    pub differs_in_groups: bool,
}
