//! Registration: which memory the transport must know and which regions peers see.
//!
//! Works on addresses, shapes and strides only; the caches themselves are never touched.

mod builder;

use thiserror::Error;

use crate::transport::MemoryType;

use builder::Builder;

use super::Region;

/// What a layer stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Keys and values by head.
    Attention,
    /// A latent, equal on all ranks.
    Latent,
    /// Convolution and temporal state.
    State,
    /// State of per-layer embeddings, equal on all ranks.
    Ple,
    /// A circular attention buffer.
    Scratch,
}

impl LayerKind {
    fn is_state(self) -> bool {
        matches!(self, Self::State | Self::Ple)
    }
}

/// A layer's place in the cache configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSpec {
    /// What it stores.
    pub kind: LayerKind,
    /// Its cache group.
    pub group: u32,
    /// Bytes of one logical block.
    pub page_bytes: u64,
}

/// A strided view of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheView {
    /// Address of the first element.
    pub address: u64,
    /// Extents, blocks first.
    pub shape: Vec<u64>,
    /// Bytes from one element to the next, per dimension.
    pub strides: Vec<u64>,
    /// Bytes of one element.
    pub element_bytes: u64,
}

impl CacheView {
    fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.element_bytes, |bytes, extent| bytes.checked_mul(*extent))
    }

    /// Whether one block is one run of exactly `page` bytes.
    fn has_contiguous_page(&self, page: u64) -> bool {
        let Some((_, extents)) = self.shape.split_first().filter(|(_, rest)| !rest.is_empty()) else {
            return false;
        };
        let mut expected = self.element_bytes;
        let strides = self.strides.get(1..).unwrap_or_default();
        for (extent, stride) in extents.iter().zip(strides).rev() {
            if *extent != 1 && *stride != expected {
                return false;
            }
            match expected.checked_mul(*extent) {
                Some(next) => expected = next,
                None => return false,
            }
        }
        expected == page
    }
}

/// The allocation behind a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// First byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Device; ignored for host memory.
    pub device: u64,
    /// Kind of memory.
    pub memory: MemoryType,
    /// Whether it is the host pool of an engine that keeps its cache on the device otherwise.
    pub host_resident: bool,
}

/// The cache of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerCache {
    /// Layer name.
    pub name: String,
    /// Its place in the configuration; none for a layer that uses another one's cache.
    pub spec: Option<LayerSpec>,
    /// Where its blocks are.
    pub view: CacheView,
    /// The memory behind it.
    pub allocation: Allocation,
}

/// How rows that hold a block of several latent layers are treated by a push connector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PackedRows {
    /// Not at all: members are not announced.
    #[default]
    Ignored,
    /// Members are announced, rows move as a whole and the place of each layer is told.
    Announced,
    /// A pipeline stage: members are announced and every layer has its own region.
    PerLayer,
}

/// Settings of a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegisterConfig {
    /// Logical blocks of the cache.
    pub num_blocks: u64,
    /// Logical blocks of the host pool.
    pub host_num_blocks: Option<u64>,
    /// Kernel blocks per logical block.
    pub blocks_per_logical: u64,
    /// Announcement of members.
    pub packed_rows: PackedRows,
    /// Whether the engine packs several layers into one row.
    pub has_packed_cache: bool,
    /// Whether attention and state share pages that move as a whole.
    pub csa_linear: bool,
    /// Whether host memory is left to another rank.
    pub skip_host_memory: bool,
}

impl RegisterConfig {
    /// `num_blocks` logical blocks that are kernel blocks as well.
    pub fn new(num_blocks: u64) -> Self {
        Self {
            num_blocks,
            host_num_blocks: None,
            blocks_per_logical: 1,
            packed_rows: PackedRows::Ignored,
            has_packed_cache: false,
            csa_linear: false,
            skip_host_memory: false,
        }
    }
}

/// Memory for the transport to register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRange {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Device; 0 for host memory.
    pub device: u64,
    /// Kind of memory.
    pub memory: MemoryType,
}

/// Caches that cannot be registered.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// A size beyond 64 bits, or a zero where none may be.
    #[error("layer {layer} has impossible sizes")]
    Sizes {
        /// Layer name.
        layer: String,
    },
    /// A view that is no whole number of segments.
    #[error("layer {layer}: {bytes} bytes are not divisible into segments of {segment}")]
    Segments {
        /// Layer name.
        layer: String,
        /// Bytes of the view.
        bytes: u64,
        /// Bytes of all blocks of one segment.
        segment: u64,
    },
    /// A view with fewer blocks than the configuration says.
    #[error("layer {layer} has {got} blocks, expected {expected}")]
    TooFewBlocks {
        /// Layer name.
        layer: String,
        /// Blocks of the configuration.
        expected: u64,
        /// Blocks of the view.
        got: u64,
    },
    /// A packed page that does not lie in its row.
    #[error("layer {layer} does not lie within its row")]
    OutsideRow {
        /// Layer name.
        layer: String,
    },
    /// One address with two kinds of memory.
    #[error("layer {layer} shares its address with another kind of memory")]
    MemoryConflict {
        /// Layer name.
        layer: String,
    },
    /// A layer in several announced regions.
    #[error("layer {layer} spans several regions")]
    SpansRegions {
        /// Layer name.
        layer: String,
    },
    /// A stage of a packed model with other than latent layers.
    #[error("a pipeline stage with packed rows needs latent attention")]
    PackedNeedsLatent,
    /// Host and device memory together with heads or state.
    #[error("host and device memory can be mixed with latent attention only")]
    MixedMemory,
    /// A host pool of unknown size.
    #[error("layer {layer} is in a host pool of unknown size")]
    HostPool {
        /// Layer name.
        layer: String,
    },
    /// Embedding pages in more than one region, or outside a shared-page engine.
    #[error("layer {layer} holds a second region of per-layer embeddings")]
    Ple {
        /// Layer name.
        layer: String,
    },
}

/// What to register and what to announce.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Registration {
    /// Memory ranges, host memory first.
    pub ranges: Vec<MemoryRange>,
    /// Regions in natural order of their layers.
    pub regions: Vec<Region>,
    /// Per region whether all ranks hold the same bytes.
    pub replicated: Vec<bool>,
    /// Regions that hold state.
    pub state_regions: Vec<usize>,
    /// Regions of circular buffers, ascending.
    pub scratch_regions: Vec<usize>,
    /// Region and kernel page bytes of per-layer embeddings.
    pub ple: Option<(usize, u64)>,
    /// Layers of each region, when they are announced.
    pub members: Vec<Vec<String>>,
    /// Offset in its row and page bytes of every packed layer.
    pub packed_members: Vec<(String, [u64; 2])>,
    /// Device of the memory; 0 for host memory.
    pub device: u64,
    /// Whether regions lie in several kinds of memory.
    pub mixed_memory: bool,
}

/// The order of layers in region lists: runs of digits compare as numbers and before text.
pub fn natural_order(a: &str, b: &str) -> std::cmp::Ordering {
    runs(a).cmp(&runs(b))
}

/// A piece of a layer name; numbers come before text.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum NameRun<'a> {
    /// Digits without leading zeros, shorter ones first.
    Number(usize, &'a str),
    Text(&'a str),
}

/// Text and numbers in turn, beginning with a possibly empty text.
fn runs(name: &str) -> Vec<NameRun<'_>> {
    let mut runs = Vec::new();
    let mut rest = name;
    loop {
        let digits = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, tail) = rest.split_at(digits);
        runs.push(NameRun::Text(text));
        if tail.is_empty() {
            return runs;
        }
        let end = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        let (number, tail) = tail.split_at(end);
        let number = number.trim_start_matches('0');
        runs.push(NameRun::Number(number.len(), number));
        rest = tail;
    }
}

/// Finds the memory and the regions of `layers`.
///
/// # Errors
/// Views that do not fit the configuration or one another.
pub fn register(layers: &[LayerCache], config: &RegisterConfig) -> Result<Registration, RegisterError> {
    let mut sorted: Vec<&LayerCache> = layers.iter().collect();
    if !config.csa_linear {
        sorted.sort_by(|a, b| natural_order(&a.name, &b.name));
    }
    let specs = || layers.iter().filter_map(|layer| layer.spec);
    if config.packed_rows == PackedRows::PerLayer
        && config.has_packed_cache
        && specs().any(|spec| spec.kind != LayerKind::Latent)
    {
        return Err(RegisterError::PackedNeedsLatent);
    }
    let row = |layer: &LayerCache| (layer.allocation.base, layer.view.strides.first().copied());
    let packed_storage = !config.csa_linear && layers.windows(2).all(|pair| row(&pair[0]) == row(&pair[1]));
    let mut builder = Builder::new(config, packed_storage);
    for layer in sorted {
        if let Some(spec) = layer.spec {
            builder.add(layer, spec)?;
        }
    }
    let heads_or_state = specs().any(|spec| spec.kind != LayerKind::Latent);
    builder.finish(heads_or_state)
}
