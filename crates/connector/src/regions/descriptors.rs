//! Descriptor lists: every block of the local side, of one remote rank, and local head slices.
//!
//! Lists are region-major, attention first, then state, then pages of per-layer embeddings.

use thiserror::Error;

use crate::topology::{ErrorKind, TpMapping};
use crate::transport::Descriptor;

use super::{LocalGeometry, MAX_DESCRIPTORS, PeerGeometry, StateGeometry};

/// A list that cannot be built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DescriptorError {
    /// A block would end past the address space.
    #[error("region {region} does not fit the address space")]
    AddressOverflow {
        /// Region index.
        region: usize,
    },
    /// More than [`MAX_DESCRIPTORS`].
    #[error("{count} descriptors are more than a list may have")]
    TooMany {
        /// Descriptors asked for.
        count: u64,
    },
    /// A region that the other side does not have.
    #[error("region {region} does not exist")]
    NoRegion {
        /// Region index.
        region: usize,
    },
    /// Head slices of blocks that are also cut into smaller blocks.
    #[error("head slices need equal block sizes on both sides")]
    SlicedSubBlocks,
    /// The page of per-layer embeddings differs.
    #[error("pages of per-layer embeddings must be equal: local {local} bytes, remote {remote}")]
    PlePages {
        /// Local page bytes.
        local: u64,
        /// Remote page bytes.
        remote: u64,
    },
    /// A mapping without the source ranks that its groups need.
    #[error("the mapping names no source rank")]
    NoSources,
}

impl DescriptorError {
    /// What vLLM would have raised.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::PlePages { .. } => ErrorKind::Value,
            _ => ErrorKind::Assertion,
        }
    }
}

/// One run of equally long, equally spaced ranges.
#[derive(Debug, Clone, Copy)]
struct Run {
    region: usize,
    start: u64,
    len: u64,
    stride: u64,
    count: u64,
    device: u64,
}

impl Run {
    fn append(self, list: &mut Vec<Descriptor>) -> Result<(), DescriptorError> {
        let count = (list.len() as u64).saturating_add(self.count);
        if count > MAX_DESCRIPTORS {
            return Err(DescriptorError::TooMany { count });
        }
        let Some(last) = self.count.checked_sub(1) else { return Ok(()) };
        last.checked_mul(self.stride)
            .and_then(|offset| self.start.checked_add(offset))
            .and_then(|start| start.checked_add(self.len))
            .ok_or(DescriptorError::AddressOverflow { region: self.region })?;
        let Self { start, len, stride, device, .. } = self;
        list.extend((0..self.count).map(|block| Descriptor { address: start + block * stride, len, device }));
        Ok(())
    }
}

/// All local descriptors, with attention blocks cut into `sub_blocks` pieces.
///
/// # Errors
/// Regions that do not fit the address space or are too many.
pub fn local_descriptors(local: &LocalGeometry, sub_blocks: u64) -> Result<Vec<Descriptor>, DescriptorError> {
    let mut list = Vec::new();
    for index in local.transferred_regions() {
        attention_blocks(local, index, sub_blocks.max(1), &mut list)?;
    }
    if let Some(states) = &local.states {
        local_states(local, states, &mut list)?;
    }
    Ok(list)
}

fn attention_blocks(
    local: &LocalGeometry,
    index: usize,
    sub_blocks: u64,
    list: &mut Vec<Descriptor>,
) -> Result<(), DescriptorError> {
    let region = local.regions.get(index).ok_or(DescriptorError::NoRegion { region: index })?;
    let piece = region.block_len / sub_blocks;
    let run = Run {
        region: index,
        start: region.base_address,
        len: piece,
        stride: region.block_stride,
        count: region.num_blocks,
        device: local.device,
    };
    if local.halves {
        // Dense v2 blocks: the pieces of all blocks follow one another.
        let count =
            region.num_blocks.checked_mul(sub_blocks).ok_or(DescriptorError::TooMany { count: u64::MAX })?;
        let keys = Run { len: piece / 2, stride: piece, count, ..run };
        keys.append(list)?;
        let start =
            run.start.checked_add(piece / 2).ok_or(DescriptorError::AddressOverflow { region: index })?;
        return Run { start, ..keys }.append(list);
    }
    if sub_blocks == 1 {
        return run.append(list);
    }
    for block in 0..region.num_blocks.min(MAX_DESCRIPTORS) {
        let start = block
            .checked_mul(region.block_stride)
            .and_then(|offset| run.start.checked_add(offset))
            .ok_or(DescriptorError::AddressOverflow { region: index })?;
        Run { start, stride: piece, count: sub_blocks, ..run }.append(list)?;
    }
    Ok(())
}

/// Base, stride and number of logical blocks of one region's state pages.
#[derive(Clone, Copy)]
struct Pages {
    region: usize,
    base: u64,
    stride: u64,
    count: u64,
    device: u64,
}

impl Pages {
    fn part(self, offset: u64, len: u64, list: &mut Vec<Descriptor>) -> Result<(), DescriptorError> {
        let region = self.region;
        let start = self.base.checked_add(offset).ok_or(DescriptorError::AddressOverflow { region })?;
        Run { region, start, len, stride: self.stride, count: self.count, device: self.device }.append(list)
    }
}

fn local_pages(
    local: &LocalGeometry,
    states: &StateGeometry,
    index: usize,
) -> Result<Pages, DescriptorError> {
    let region = local.regions.get(index).ok_or(DescriptorError::NoRegion { region: index })?;
    Ok(Pages {
        region: index,
        base: region.base_address,
        stride: region
            .block_stride
            .checked_mul(local.blocks_per_logical)
            .ok_or(DescriptorError::AddressOverflow { region: index })?,
        count: states.num_blocks,
        device: local.device,
    })
}

fn local_states(
    local: &LocalGeometry,
    states: &StateGeometry,
    list: &mut Vec<Descriptor>,
) -> Result<(), DescriptorError> {
    let [conv_bytes, temporal_bytes] = states.sizes;
    let offsets = states.conv.local_offsets();
    for index in states.state_regions(local.regions.len()) {
        let pages = local_pages(local, states, index)?;
        for (offset, len) in &offsets {
            pages.part(*offset, *len, list)?;
        }
        pages.part(conv_bytes, temporal_bytes, list)?;
    }
    if let Some((index, page)) = states.ple {
        let len = page.saturating_mul(local.blocks_per_logical);
        local_pages(local, states, index)?.part(0, len, list)?;
    }
    Ok(())
}

/// All descriptors of one remote rank, as far as the local rank reads them.
///
/// # Errors
/// Regions that do not fit the address space or are too many, unequal embedding pages.
pub fn remote_descriptors(
    local: &LocalGeometry,
    peer: &PeerGeometry,
) -> Result<Vec<Descriptor>, DescriptorError> {
    let transferred = local.transferred_regions();
    let mut list = Vec::new();
    for (position, remote) in peer.regions.iter().enumerate() {
        let index = *transferred.get(position).ok_or(DescriptorError::NoRegion { region: position })?;
        let slice = head_slice(local, peer, index)?;
        let mut run = Run {
            region: position,
            start: remote
                .base_address
                .checked_add(slice.offset)
                .ok_or(DescriptorError::AddressOverflow { region: position })?,
            len: slice.len,
            stride: remote.block_stride,
            count: remote.num_blocks,
            device: peer.device,
        };
        run.append(&mut list)?;
        if local.halves {
            run.start = run
                .start
                .checked_add(remote.block_len / 2)
                .ok_or(DescriptorError::AddressOverflow { region: position })?;
            run.append(&mut list)?;
        }
    }
    if let Some(states) = &local.states {
        remote_states(local, states, peer, &mut list)?;
    }
    Ok(list)
}

/// Which bytes of a remote block the local rank reads, from the block's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadSlice {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The slice of each remote block that goes into local region `region`.
///
/// # Errors
/// A region that does not exist, an offset without 64 bits.
pub fn head_slice(
    local: &LocalGeometry,
    peer: &PeerGeometry,
    region: usize,
) -> Result<HeadSlice, DescriptorError> {
    let block_len = local.regions.get(region).ok_or(DescriptorError::NoRegion { region })?.block_len;
    let whole = if local.halves { block_len / 2 } else { block_len };
    let unit = whole / peer.block_size_ratio.max(1);
    if local.is_replicated(region) {
        return Ok(HeadSlice { offset: 0, len: unit });
    }
    let reads = (peer.mapping.attention_ranks.len() as u64).max(1);
    let offset = peer
        .mapping
        .rank_offset_factor
        .checked_mul(unit)
        .ok_or(DescriptorError::AddressOverflow { region })?;
    Ok(HeadSlice { offset, len: unit / reads })
}

fn remote_states(
    local: &LocalGeometry,
    states: &StateGeometry,
    peer: &PeerGeometry,
    list: &mut Vec<Descriptor>,
) -> Result<(), DescriptorError> {
    let ratio = peer.mapping.tp_ratio;
    // State is always sharded, even where attention heads are shared.
    let share = u64::from(local.topology.rank) % ratio.max(1).unsigned_abs();
    let overflow = |region| DescriptorError::AddressOverflow { region };
    let offsets = states.conv.remote_offsets(share, ratio).ok_or(overflow(0))?;
    let temporal_bytes = if ratio >= 1 { states.sizes[1] } else { peer.state_sizes[1] };
    let per_logical = peer.topology.blocks_per_logical.max(1);
    let pages = |index: usize| -> Result<Pages, DescriptorError> {
        let remote = peer.regions.get(index).ok_or(DescriptorError::NoRegion { region: index })?;
        let stride = remote.block_stride.checked_mul(per_logical).ok_or(overflow(index))?;
        let count = peer.num_blocks / per_logical;
        Ok(Pages { region: index, base: remote.base_address, stride, count, device: peer.device })
    };
    let temporal_offset = share
        .checked_mul(temporal_bytes)
        .and_then(|offset| offset.checked_add(peer.state_sizes[0]))
        .ok_or(overflow(0))?;
    for index in states.state_regions(peer.regions.len()) {
        let pages = pages(index)?;
        for (offset, len) in &offsets {
            pages.part(*offset, *len, list)?;
        }
        pages.part(temporal_offset, temporal_bytes, list)?;
    }
    if let Some((index, page)) = states.ple {
        let local_page = page.saturating_mul(local.blocks_per_logical);
        let remote_page = peer.ple_block_len.unwrap_or(0).saturating_mul(per_logical);
        if local_page != remote_page {
            return Err(DescriptorError::PlePages { local: local_page, remote: remote_page });
        }
        pages(index)?.part(0, remote_page, list)?;
    }
    Ok(())
}

/// The local list once per source rank, with each descriptor cut to what that rank sends.
///
/// `list` is [`local_descriptors`] for `sub_blocks`; the result follows
/// [`TpMapping::source_ranks`].
///
/// # Errors
/// Head slices of sub-blocks, a mapping without sources.
pub fn split_local_descriptors(
    local: &LocalGeometry,
    mapping: &TpMapping,
    list: &[Descriptor],
    sub_blocks: u64,
) -> Result<Vec<Vec<Descriptor>>, DescriptorError> {
    let slices = mapping.attention_ranks.len() as u64;
    if slices == 0 {
        return Err(DescriptorError::NoSources);
    }
    let mut replicated = Vec::with_capacity(list.len());
    for index in local.transferred_regions() {
        let region = local.regions.get(index).ok_or(DescriptorError::NoRegion { region: index })?;
        let copies = if local.halves { 2 } else { 1 };
        let count = region.num_blocks.saturating_mul(sub_blocks.max(1)).saturating_mul(copies);
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(list.len() - replicated.len());
        replicated.extend(std::iter::repeat_n(local.is_replicated(index), count));
    }
    if sub_blocks > 1 && slices > 1 && replicated.contains(&false) {
        return Err(DescriptorError::SlicedSubBlocks);
    }
    let whole_tail = match &local.states {
        Some(states) if states.ple.is_some() => usize::try_from(states.num_blocks).unwrap_or(usize::MAX),
        _ => 0,
    };
    let state_end = list.len().saturating_sub(whole_tail);
    let state_slices = (mapping.state_ranks.len() as u64).max(1);
    let cut = |descriptor: &Descriptor, slices: u64, slot: u64| {
        let len = descriptor.len / slices;
        Descriptor { address: descriptor.address.wrapping_add(slot.wrapping_mul(len)), len, ..*descriptor }
    };
    let lists = (0_u64..).zip(&mapping.source_ranks).map(|(position, rank)| {
        let slot = u64::from(mapping.attention_slots.get(rank).copied().unwrap_or(0));
        let pieces = list.iter().enumerate().map(|(index, descriptor)| match replicated.get(index) {
            Some(true) => *descriptor,
            Some(false) => cut(descriptor, slices, slot),
            None if index < state_end => cut(descriptor, state_slices, position),
            None => *descriptor,
        });
        pieces.collect()
    });
    Ok(lists.collect())
}
