//! Regions of KV memory, the descriptors over them and the ids that select blocks.
//!
//! Pure: computes addresses and indices, touches no memory and no transport.

pub mod convert;
pub mod descriptors;
mod geometry;
mod ids;
mod layout;
mod memory;
mod pairing;
pub mod peer;
mod register;
mod states;
pub mod v2;

pub use geometry::{LocalGeometry, PeerGeometry, RegionRouting, RemoteRegion, RoutedLayer};
pub use ids::{DescriptorIndex, IdError};
pub use layout::{Axis, Layout};
pub use memory::{IdPairs, MemorySplit, kv_buffer_memory, shares_host_pool};
pub use pairing::{
    PairError, PairedBlocks, RegionPairing, block_ids_by_region, clip_state_blocks, expand_groups,
    pair_block_ids, pair_by_region, split_into_remote_blocks,
};
pub use peer::{PeerError, PeerRequest, validate_peer};
pub use register::{
    Allocation, CacheView, LayerCache, LayerKind, LayerSpec, MemoryRange, PackedRows, RegisterConfig,
    RegisterError, Registration, natural_order, register,
};
pub use states::{ConvError, ConvSplit, StateGeometry};

use crate::transport::{Descriptor, MemoryType};

/// Most descriptors a list may have; a peer that announces more is refused.
pub const MAX_DESCRIPTORS: u64 = 1 << 25;

/// The group id of a region that several cache groups share.
pub const SHARED_GROUP: i64 = -1;

/// One contiguous-strided array of blocks, usually the cache of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Name of the first layer stored in it.
    pub name: String,
    /// Address of block 0.
    pub base_address: u64,
    /// Bytes moved per block.
    pub block_len: u64,
    /// Bytes from one block to the next; at least `block_len`.
    pub block_stride: u64,
    /// Number of blocks.
    pub num_blocks: u64,
    /// Kind of memory.
    pub memory: MemoryType,
    /// Cache group, or [`SHARED_GROUP`].
    pub group: i64,
}

impl Region {
    /// Bytes from the first block's start to the last block's end.
    pub fn span(&self) -> u64 {
        match self.num_blocks.checked_sub(1) {
            None => 0,
            Some(last) => last.saturating_mul(self.block_stride).saturating_add(self.block_len),
        }
    }
}

/// Descriptors of every block, region by region; each block is cut into `sub_blocks` pieces.
pub fn local_descriptors(regions: &[Region], device: u64, sub_blocks: u64) -> Vec<Descriptor> {
    let sub_blocks = sub_blocks.max(1);
    let mut descriptors = Vec::new();
    for region in regions {
        let len = region.block_len / sub_blocks;
        for block in 0..region.num_blocks {
            let start = region.base_address.wrapping_add(block.wrapping_mul(region.block_stride));
            descriptors.extend((0..sub_blocks).map(|sub| Descriptor {
                address: start.wrapping_add(sub.wrapping_mul(len)),
                len,
                device,
            }));
        }
    }
    descriptors
}

/// Which descriptors belong to the block ids of each cache group.
///
/// `region_blocks` holds the number of descriptors per region, `region_groups` the cache group of
/// each region. None when a non-empty group has no region.
pub fn descriptor_ids(
    region_blocks: &[u64],
    region_groups: &[i64],
    block_ids: &[Vec<u64>],
) -> Option<Vec<u64>> {
    let offsets = prefix_sums(region_blocks);
    let uniform = region_groups.windows(2).all(|pair| pair[0] == pair[1]);
    let mut ids = Vec::with_capacity(region_blocks.len() * block_ids.iter().map(Vec::len).sum::<usize>());
    if uniform {
        for offset in offsets {
            ids.extend(block_ids.iter().flatten().map(|id| offset + id));
        }
        return Some(ids);
    }
    for (group, group_ids) in block_ids.iter().enumerate().filter(|(_, group_ids)| !group_ids.is_empty()) {
        let before = ids.len();
        for (&offset, &region_group) in offsets.iter().zip(region_groups) {
            if region_group == SHARED_GROUP || usize::try_from(region_group) == Ok(group) {
                ids.extend(group_ids.iter().map(|id| offset + id));
            }
        }
        if ids.len() == before {
            return None;
        }
    }
    Some(ids)
}

/// Logical block ids as the kernel blocks they consist of.
pub fn kernel_block_ids(logical: &[u64], blocks_per_logical: u64) -> Vec<u64> {
    if blocks_per_logical == 1 {
        return logical.to_vec();
    }
    let mut ids = Vec::with_capacity(logical.len());
    for id in logical {
        let first = id.saturating_mul(blocks_per_logical);
        ids.extend((0..blocks_per_logical).map(|i| first.saturating_add(i)));
    }
    ids
}

fn prefix_sums(counts: &[u64]) -> Vec<u64> {
    let mut next = 0_u64;
    counts
        .iter()
        .map(|count| {
            let offset = next;
            next = next.saturating_add(*count);
            offset
        })
        .collect()
}

#[cfg(test)]
mod tests;
