//! Carves the memory of one layer after another into ranges and regions.

use std::collections::HashMap;

use crate::transport::MemoryType;

use super::super::{Region, SHARED_GROUP};
use super::{
    LayerCache, LayerKind, LayerSpec, MemoryRange, PackedRows, RegisterConfig, RegisterError, Registration,
};

/// Most segments of one view; a view of more is no cache.
const MAX_SEGMENTS: u64 = 1 << 16;

/// Base, block length and block stride of one region.
type RegionShape = (u64, u64, u64);

pub(super) struct Builder<'a> {
    config: &'a RegisterConfig,
    packed_storage: bool,
    out: Registration,
    index_of: HashMap<u64, usize>,
}

impl<'a> Builder<'a> {
    /// Nothing yet; `packed_storage` tells whether all layers share rows of one allocation.
    pub(super) fn new(config: &'a RegisterConfig, packed_storage: bool) -> Self {
        Self { config, packed_storage, out: Registration::default(), index_of: HashMap::new() }
    }

    /// Adds one layer's memory and regions.
    pub(super) fn add(&mut self, layer: &LayerCache, spec: LayerSpec) -> Result<(), RegisterError> {
        let sizes = || RegisterError::Sizes { layer: layer.name.clone() };
        let per_logical = self.config.blocks_per_logical;
        let logical = match (layer.allocation.host_resident, self.config.host_num_blocks) {
            (false, _) => self.config.num_blocks,
            (true, Some(blocks)) => blocks,
            (true, None) => return Err(RegisterError::HostPool { layer: layer.name.clone() }),
        };
        if logical == 0 || per_logical == 0 || layer.view.shape.len() != layer.view.strides.len() {
            return Err(sizes());
        }
        let num_blocks = match spec.kind.is_state() {
            true => logical,
            false => logical.checked_mul(per_logical).ok_or_else(sizes)?,
        };
        self.add_range(layer).ok_or_else(sizes)?;
        let shapes = if spec.kind.is_state() {
            vec![self.state_region(layer, spec).ok_or_else(sizes)?]
        } else {
            self.attention_regions(layer, spec, num_blocks)?
        };
        for shape in shapes {
            self.add_region(layer, spec, num_blocks, shape)?;
        }
        let got = layer.view.shape.first().copied().unwrap_or(0);
        if per_logical == 1 && got < num_blocks {
            return Err(RegisterError::TooFewBlocks { layer: layer.name.clone(), expected: num_blocks, got });
        }
        Ok(())
    }

    /// The registered memory of a layer: its whole allocation, or its view in a host pool.
    fn backing(layer: &LayerCache) -> Option<(u64, u64)> {
        let allocation = &layer.allocation;
        if allocation.host_resident {
            return Some((layer.view.address, layer.view.bytes()?));
        }
        Some((allocation.base, allocation.len))
    }

    fn add_range(&mut self, layer: &LayerCache) -> Option<()> {
        let (start, len) = Self::backing(layer)?;
        start.checked_add(len)?;
        let memory = layer.allocation.memory;
        let device = if memory == MemoryType::Dram { 0 } else { layer.allocation.device };
        if memory == MemoryType::Vram {
            self.out.device = device;
        }
        if !self.out.ranges.iter().any(|range| (range.start, range.memory) == (start, memory)) {
            self.out.ranges.push(MemoryRange { start, len, device, memory });
        }
        Some(())
    }

    fn state_region(&self, layer: &LayerCache, spec: LayerSpec) -> Option<RegionShape> {
        let per_logical = self.config.blocks_per_logical;
        let strided = self.config.csa_linear && layer.view.shape.len() != 1;
        let stride = if strided { *layer.view.strides.first()? } else { spec.page_bytes };
        if !stride.is_multiple_of(per_logical) {
            return None;
        }
        Some((layer.view.address, spec.page_bytes / per_logical, stride / per_logical))
    }

    fn attention_regions(
        &mut self,
        layer: &LayerCache,
        spec: LayerSpec,
        num_blocks: u64,
    ) -> Result<Vec<RegionShape>, RegisterError> {
        let name = || layer.name.clone();
        let sizes = || RegisterError::Sizes { layer: name() };
        let page = spec.page_bytes / self.config.blocks_per_logical;
        // A flat view of bytes has no dimension for blocks: they follow one another.
        let flat = layer.view.shape.len() <= 1;
        let stride = if flat { page } else { layer.view.strides.first().copied().unwrap_or(page) };
        let (base, len) = Self::backing(layer).ok_or_else(sizes)?;
        let all_blocks = num_blocks.checked_mul(stride).filter(|bytes| *bytes > 0).ok_or_else(sizes)?;
        // An allocation may end in padding that is shorter than a block.
        let block_major = len.checked_sub(all_blocks).is_some_and(|tail| tail < stride);
        let latent = spec.kind == LayerKind::Latent;
        let address = layer.view.address;
        let announced = self.config.packed_rows != PackedRows::Ignored && self.config.has_packed_cache;
        if announced && self.packed_storage && block_major && latent {
            if self.config.packed_rows == PackedRows::PerLayer {
                return Ok(vec![(address, page, stride)]);
            }
            let offset = address.checked_sub(layer.allocation.base);
            let offset = offset.filter(|offset| offset.checked_add(page).is_some_and(|end| end <= stride));
            let offset = offset.ok_or_else(|| RegisterError::OutsideRow { layer: name() })?;
            self.out.packed_members.push((name(), [offset, page]));
            return Ok(vec![(base, stride, stride)]);
        }
        let whole_row = (self.packed_storage && latent) || !self.config.csa_linear;
        if block_major && !layer.view.has_contiguous_page(page) && whole_row {
            return Ok(vec![(base, stride, stride)]);
        }
        if block_major {
            return Ok(vec![(address, page, stride)]);
        }
        let bytes = layer.view.bytes().ok_or_else(sizes)?;
        if !bytes.is_multiple_of(all_blocks) {
            return Err(RegisterError::Segments { layer: name(), bytes, segment: all_blocks });
        }
        let segments = bytes / all_blocks;
        if segments > MAX_SEGMENTS {
            return Err(sizes());
        }
        let block_len = if segments > 1 { stride } else { page };
        let segment = |index: u64| {
            let start = index.checked_mul(all_blocks).and_then(|offset| address.checked_add(offset))?;
            Some((start, block_len, stride))
        };
        (0..segments).map(|index| segment(index).ok_or_else(sizes)).collect()
    }

    fn add_region(
        &mut self,
        layer: &LayerCache,
        spec: LayerSpec,
        num_blocks: u64,
        (base_address, block_len, block_stride): RegionShape,
    ) -> Result<(), RegisterError> {
        let latent = spec.kind == LayerKind::Latent;
        let memory = layer.allocation.memory;
        let group = i64::from(spec.group);
        // A stage with packed rows keeps aliases at one address apart.
        let merges = !(self.config.packed_rows == PackedRows::PerLayer && self.config.has_packed_cache);
        let known = self.index_of.get(&base_address).copied().filter(|_| merges);
        let index = known.unwrap_or(self.out.regions.len());
        if let Some(region) = known.and_then(|index| self.out.regions.get_mut(index)) {
            if region.memory != memory {
                return Err(RegisterError::MemoryConflict { layer: layer.name.clone() });
            }
            if latent {
                (region.block_len, region.block_stride) = (block_len, block_stride);
                region.num_blocks = num_blocks;
            }
            if region.group != group {
                region.group = SHARED_GROUP;
            }
            self.out.replicated[index] |= latent;
        } else {
            self.index_of.entry(base_address).or_insert(index);
            self.out.replicated.push(latent);
            self.out.regions.push(Region {
                name: layer.name.clone(),
                base_address,
                block_len,
                block_stride,
                num_blocks,
                memory,
                group,
            });
        }
        if self.config.packed_rows != PackedRows::Ignored {
            self.out.members.resize(self.out.regions.len(), Vec::new());
            if self.out.members.iter().flatten().any(|member| *member == layer.name) {
                return Err(RegisterError::SpansRegions { layer: layer.name.clone() });
            }
            self.out.members[index].push(layer.name.clone());
        }
        self.note_kind(layer, spec.kind, index, block_len)
    }

    fn note_kind(
        &mut self,
        layer: &LayerCache,
        kind: LayerKind,
        index: usize,
        block_len: u64,
    ) -> Result<(), RegisterError> {
        match kind {
            LayerKind::Ple => {
                let other = self.out.ple.is_some_and(|(region, _)| region != index);
                if other || !self.config.csa_linear {
                    return Err(RegisterError::Ple { layer: layer.name.clone() });
                }
                self.out.ple = Some((index, block_len));
            }
            LayerKind::State if !self.out.state_regions.contains(&index) => {
                self.out.state_regions.push(index);
            }
            LayerKind::Scratch if !self.out.scratch_regions.contains(&index) => {
                self.out.scratch_regions.push(index);
            }
            _ => {}
        }
        Ok(())
    }

    /// The whole registration, with what holds for all layers checked.
    pub(super) fn finish(mut self, heads_or_state: bool) -> Result<Registration, RegisterError> {
        let out = &mut self.out;
        out.scratch_regions.sort_unstable();
        out.mixed_memory = out.regions.windows(2).any(|pair| pair[0].memory != pair[1].memory);
        if out.mixed_memory && heads_or_state {
            return Err(RegisterError::MixedMemory);
        }
        if !out.state_regions.is_empty() || out.ple.is_some() {
            let num_blocks = self.config.num_blocks.saturating_mul(self.config.blocks_per_logical);
            out.regions.iter_mut().for_each(|region| region.num_blocks = num_blocks);
        }
        if self.config.skip_host_memory {
            out.ranges.retain(|range| range.memory != MemoryType::Dram);
        }
        out.ranges.sort_by_key(|range| range.memory.as_str());
        Ok(self.out)
    }
}
