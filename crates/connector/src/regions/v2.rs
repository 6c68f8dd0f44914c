//! Regions and ids as vLLM 0.13 lays them out.

use thiserror::Error;

use crate::transport::MemoryType;

use super::{DescriptorIndex, IdError, MemoryRange, Region};

/// Where the keys and values of a layer lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvOrder {
    /// All keys, then all values: two regions.
    KeysFirst,
    /// Keys and values of each block together: one region whose blocks are indexed in halves.
    BlocksFirst,
    /// One latent per token: one region.
    Latent,
}

/// The cache of one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DenseCache {
    /// Layer name.
    pub name: String,
    /// First byte.
    pub address: u64,
    /// Bytes of the whole cache.
    pub bytes: u64,
    /// Kernel blocks.
    pub num_blocks: u64,
    /// Device it lies on.
    pub device: u64,
    /// Kind of memory.
    pub memory: MemoryType,
}

/// Caches that v2 cannot register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DenseError {
    /// No caches, or caches without blocks.
    #[error("there are no blocks to register")]
    NoBlocks,
    /// Caches with different numbers of blocks.
    #[error("region {region} has {got} blocks, expected {expected}")]
    BlockCount {
        /// Region index.
        region: usize,
        /// Blocks of the first region.
        expected: u64,
        /// Blocks of this one.
        got: u64,
    },
    /// Caches of different sizes without latent attention.
    #[error("region {region} has {got} bytes, expected {expected}")]
    Size {
        /// Region index.
        region: usize,
        /// Bytes of the first region.
        expected: u64,
        /// Bytes of this one.
        got: u64,
    },
    /// A cache that does not fit the address space.
    #[error("region {region} does not fit the address space")]
    Overflow {
        /// Region index.
        region: usize,
    },
}

/// What v2 registers and announces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DenseRegistration {
    /// Memory to register, one range per region.
    pub ranges: Vec<MemoryRange>,
    /// Regions in the order of the caches, keys before values.
    pub regions: Vec<Region>,
    /// Whether blocks are indexed in halves.
    pub halves: bool,
}

/// Registers dense caches; a cache at an address seen before adds nothing.
///
/// # Errors
/// Caches that differ in blocks, or in size without latent attention.
pub fn register_dense(caches: &[DenseCache], order: KvOrder) -> Result<DenseRegistration, DenseError> {
    let mut ranges: Vec<MemoryRange> = Vec::new();
    let mut regions: Vec<Region> = Vec::new();
    for cache in caches {
        let parts = if order == KvOrder::KeysFirst { 2 } else { 1 };
        let bytes = cache.bytes / parts;
        for part in 0..parts {
            let region = regions.len();
            let overflow = DenseError::Overflow { region };
            let start = part.checked_mul(bytes).and_then(|offset| cache.address.checked_add(offset));
            let start = start.ok_or(overflow)?;
            start.checked_add(bytes).ok_or(overflow)?;
            if regions.iter().any(|other| other.base_address == start) {
                continue;
            }
            if cache.num_blocks == 0 {
                return Err(DenseError::NoBlocks);
            }
            if let (Some(first), Some(range)) = (regions.first(), ranges.first()) {
                if first.num_blocks != cache.num_blocks {
                    let (expected, got) = (first.num_blocks, cache.num_blocks);
                    return Err(DenseError::BlockCount { region, expected, got });
                }
                if order != KvOrder::Latent && range.len != bytes {
                    return Err(DenseError::Size { region, expected: range.len, got: bytes });
                }
            }
            let block_len = bytes / cache.num_blocks;
            ranges.push(MemoryRange { start, len: bytes, device: cache.device, memory: cache.memory });
            regions.push(Region {
                name: cache.name.clone(),
                base_address: start,
                block_len,
                block_stride: block_len,
                num_blocks: cache.num_blocks,
                memory: cache.memory,
                group: 0,
            });
        }
    }
    if regions.is_empty() {
        return Err(DenseError::NoBlocks);
    }
    Ok(DenseRegistration { ranges, regions, halves: order == KvOrder::BlocksFirst })
}

/// Blocks of a window of local attention: `chunk` tokens, rounded up to blocks.
pub fn chunk_blocks(chunk: u64, block_size: u64) -> u64 {
    chunk.div_ceil(block_size.max(1))
}

/// Ids of one layer's regions: `regions` of them per layer, `blocks_per_region` descriptors each.
///
/// # Errors
/// Blocks out of range, sizes beyond 64 bits.
pub fn layer_ids(
    layer: usize,
    regions: usize,
    blocks_per_region: u64,
    blocks: &[u64],
) -> Result<Vec<u64>, IdError> {
    if let Some(id) = blocks.iter().copied().max()
        && id >= blocks_per_region
    {
        return Err(IdError::OutOfRange { id, len: blocks_per_region });
    }
    let first = layer.checked_mul(regions).ok_or(IdError::BadCounts)? as u64;
    let end = first.checked_add(regions as u64).ok_or(IdError::BadCounts)?;
    end.checked_mul(blocks_per_region).ok_or(IdError::BadCounts)?;
    let offsets = (first..end).map(|region| region * blocks_per_region);
    Ok(offsets.flat_map(|offset| blocks.iter().map(move |block| offset + block)).collect())
}

/// Ids where layers with local attention take only the last blocks of the list.
///
/// `windows` holds the window of every layer in blocks, none for global attention. To be called
/// for each side with that side's own `blocks_per_region`.
///
/// # Errors
/// Blocks out of range, sizes beyond 64 bits.
pub fn windowed_ids(
    windows: &[Option<u64>],
    regions_per_layer: usize,
    blocks_per_region: u64,
    blocks: &[u64],
) -> Result<Vec<u64>, IdError> {
    let mut ids = Vec::new();
    for (layer, window) in windows.iter().enumerate() {
        let kept = window.map_or(blocks.len(), |window| usize::try_from(window).unwrap_or(usize::MAX));
        let tail = &blocks[blocks.len().saturating_sub(kept)..];
        ids.extend(layer_ids(layer, regions_per_layer, blocks_per_region, tail)?);
    }
    Ok(ids)
}

/// Pairs local blocks with the remote tail; with smaller remote blocks the local ones are cut first.
///
/// None when the local side has more blocks than the remote one offers.
pub fn pair_blocks(local: &[u64], remote: &[u64], ratio: u64) -> Option<(Vec<u64>, Vec<u64>)> {
    let mut local = super::kernel_block_ids(local, ratio.max(1));
    if ratio > 1 {
        local.truncate(remote.len());
    }
    let skipped = remote.len().checked_sub(local.len())?;
    Some((local, remote[skipped..].to_vec()))
}

/// The index of a list whose regions all have `blocks` descriptors.
///
/// # Errors
/// Sizes beyond 64 bits.
pub fn uniform_index(regions: usize, blocks: u64) -> Result<DescriptorIndex, IdError> {
    DescriptorIndex::new(vec![blocks; regions], vec![0; regions])
}
