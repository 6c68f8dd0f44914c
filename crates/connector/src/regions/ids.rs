//! Descriptor ids: which entries of a prepared list hold the blocks of a request.
//!
//! Prepared once per list, then only additions over whole block lists.

use thiserror::Error;

use crate::topology::GroupKind;

use super::{LocalGeometry, PeerGeometry, RegionRouting, SHARED_GROUP};

/// Block lists that a descriptor list cannot serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum IdError {
    /// A group with blocks has no region.
    #[error("cache group {group} has blocks but no region")]
    NoRegion {
        /// Cache group.
        group: usize,
    },
    /// A block beyond its region, whose id would select another region's block.
    #[error("block {id} is out of range, the region has {len}")]
    OutOfRange {
        /// The block id.
        id: u64,
        /// Blocks of the region.
        len: u64,
    },
    /// A list per group or region is missing or superfluous.
    #[error("{got} block lists, expected {expected}")]
    ListCount {
        /// Lists needed.
        expected: usize,
        /// Lists given.
        got: usize,
    },
    /// Counts of regions that do not add up in 64 bits, or differ in number.
    #[error("the regions have impossible counts")]
    BadCounts,
}

/// How block lists select regions.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Selection {
    /// Every list selects every region.
    Shared,
    /// A list selects the regions of its cache group and the shared ones.
    Mapped(Vec<i64>),
    /// Region k takes the list of this group.
    Layers(Vec<usize>),
    /// By kind of group: all regions, scratch regions, states.
    Hybrid { kinds: Vec<GroupKind>, scratch: Vec<usize>, states: StateIds },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StateIds {
    first: u64,
    regions: u64,
    blocks: u64,
}

/// The index of one prepared descriptor list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DescriptorIndex {
    counts: Vec<u64>,
    offsets: Vec<u64>,
    selection: Selection,
}

impl DescriptorIndex {
    /// An index over attention regions, `groups` naming the cache group of each.
    ///
    /// # Errors
    /// Lists of different lengths, counts beyond 64 bits.
    pub fn new(counts: Vec<u64>, groups: Vec<i64>) -> Result<Self, IdError> {
        if groups.len() != counts.len() {
            return Err(IdError::BadCounts);
        }
        let shared = groups.windows(2).all(|pair| pair[0] == pair[1]);
        Self::with(counts, if shared { Selection::Shared } else { Selection::Mapped(groups) })
    }

    /// An index over regions in layer order, each with the group of its layer.
    ///
    /// # Errors
    /// Lists of different lengths, counts beyond 64 bits.
    pub fn by_layer(counts: Vec<u64>, layer_groups: Vec<usize>) -> Result<Self, IdError> {
        if layer_groups.len() != counts.len() {
            return Err(IdError::BadCounts);
        }
        Self::with(counts, Selection::Layers(layer_groups))
    }

    /// The index of the local list for blocks cut into `sub_blocks` pieces.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn local(local: &LocalGeometry, sub_blocks: u64) -> Result<Self, IdError> {
        let regions: Vec<_> = local
            .transferred_regions()
            .into_iter()
            .filter_map(|index| local.regions.get(index))
            .map(|region| (region.num_blocks.saturating_mul(sub_blocks.max(1)), region.group))
            .collect();
        let blocks = local.states.as_ref().map_or(0, |states| states.num_blocks);
        Self::of_side(local, regions, blocks)
    }

    /// The index of a peer's list.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn remote(local: &LocalGeometry, peer: &PeerGeometry) -> Result<Self, IdError> {
        let regions = peer.regions.iter().map(|region| (region.num_blocks, region.group)).collect();
        Self::of_side(local, regions, peer.num_blocks / peer.topology.blocks_per_logical.max(1))
    }

    fn of_side(local: &LocalGeometry, regions: Vec<(u64, i64)>, state_blocks: u64) -> Result<Self, IdError> {
        let copies = if local.halves { 2 } else { 1 };
        let (counts, groups): (Vec<u64>, Vec<i64>) =
            regions.iter().flat_map(|region| std::iter::repeat_n(*region, copies)).unzip();
        if let RegionRouting::ByLayer(layers) = &local.routing {
            return Self::by_layer(counts, layers.iter().map(|layer| layer.group).collect());
        }
        let Some(states) = &local.states else {
            return Self::new(counts, groups);
        };
        let regions = states.descriptor_regions(counts.len());
        Self::hybrid(counts, local.groups.clone(), states.scratch_regions.clone(), (regions, state_blocks))
    }

    /// An index over attention regions followed by `states`: state regions and blocks of each.
    ///
    /// # Errors
    /// Counts beyond 64 bits.
    pub fn hybrid(
        counts: Vec<u64>,
        kinds: Vec<GroupKind>,
        scratch: Vec<usize>,
        (regions, blocks): (u64, u64),
    ) -> Result<Self, IdError> {
        let first = total(&counts).ok_or(IdError::BadCounts)?;
        let end = regions.checked_add(1).and_then(|regions| regions.checked_mul(blocks));
        end.and_then(|states| first.checked_add(states)).ok_or(IdError::BadCounts)?;
        Self::with(counts, Selection::Hybrid { kinds, scratch, states: StateIds { first, regions, blocks } })
    }

    fn with(counts: Vec<u64>, selection: Selection) -> Result<Self, IdError> {
        total(&counts).ok_or(IdError::BadCounts)?;
        let offsets = super::prefix_sums(&counts);
        Ok(Self { counts, offsets, selection })
    }

    /// The ids for one block list per cache group.
    ///
    /// # Errors
    /// Blocks out of range, groups without a region.
    pub fn ids(&self, block_ids: &[Vec<u64>]) -> Result<Vec<u64>, IdError> {
        let mut ids = Vec::new();
        self.ids_into(block_ids, &mut ids)?;
        Ok(ids)
    }

    /// As [`Self::ids`], into a buffer whose contents are replaced; a reused one saves page faults.
    ///
    /// # Errors
    /// Blocks out of range, groups without a region; the buffer's contents are then unspecified.
    pub fn ids_into(&self, block_ids: &[Vec<u64>], ids: &mut Vec<u64>) -> Result<(), IdError> {
        ids.clear();
        match &self.selection {
            Selection::Shared => self.shared(block_ids, ids),
            Selection::Mapped(groups) => self.mapped(groups, block_ids, ids),
            Selection::Layers(groups) => {
                for (region, group) in groups.iter().enumerate() {
                    let error = IdError::ListCount { expected: group + 1, got: block_ids.len() };
                    self.region(region, block_ids.get(*group).ok_or(error)?, ids)?;
                }
                Ok(())
            }
            Selection::Hybrid { kinds, scratch, states } => {
                if kinds.len() != block_ids.len() {
                    return Err(IdError::ListCount { expected: kinds.len(), got: block_ids.len() });
                }
                for (kind, group_ids) in kinds.iter().zip(block_ids) {
                    match kind {
                        GroupKind::Attention => self.regions(0..self.counts.len(), group_ids, ids)?,
                        GroupKind::Scratch => self.regions(scratch.iter().copied(), group_ids, ids)?,
                        GroupKind::Ssm => states.append(0..states.regions, group_ids, ids)?,
                        GroupKind::Ple => {
                            states.append(states.regions..states.regions + 1, group_ids, ids)?;
                        }
                    }
                }
                Ok(())
            }
        }
    }

    /// The ids for one block list per region.
    ///
    /// # Errors
    /// Another number of lists, blocks out of range.
    pub fn ids_by_region(&self, block_ids: &[Vec<u64>]) -> Result<Vec<u64>, IdError> {
        if block_ids.len() != self.counts.len() {
            return Err(IdError::ListCount { expected: self.counts.len(), got: block_ids.len() });
        }
        let mut ids = Vec::new();
        for (region, region_ids) in block_ids.iter().enumerate() {
            self.region(region, region_ids, &mut ids)?;
        }
        Ok(ids)
    }

    fn shared(&self, block_ids: &[Vec<u64>], ids: &mut Vec<u64>) -> Result<(), IdError> {
        let flat;
        let blocks: &[u64] = match block_ids {
            [only] => only,
            several => {
                flat = several.concat();
                &flat
            }
        };
        self.regions(0..self.counts.len(), blocks, ids)
    }

    fn mapped(&self, groups: &[i64], block_ids: &[Vec<u64>], ids: &mut Vec<u64>) -> Result<(), IdError> {
        for (group, group_ids) in block_ids.iter().enumerate().filter(|(_, group_ids)| !group_ids.is_empty())
        {
            let own = |region: &i64| *region == SHARED_GROUP || usize::try_from(*region) == Ok(group);
            let before = ids.len();
            let regions =
                groups.iter().enumerate().filter(|(_, region)| own(region)).map(|(region, _)| region);
            self.regions(regions, group_ids, ids)?;
            if ids.len() == before {
                return Err(IdError::NoRegion { group });
            }
        }
        Ok(())
    }

    fn regions(
        &self,
        regions: impl Iterator<Item = usize>,
        blocks: &[u64],
        ids: &mut Vec<u64>,
    ) -> Result<(), IdError> {
        let Some(largest) = blocks.iter().copied().max() else { return Ok(()) };
        ids.reserve(blocks.len().saturating_mul(regions.size_hint().0));
        for region in regions {
            let (Some(&count), Some(&offset)) = (self.counts.get(region), self.offsets.get(region)) else {
                return Err(IdError::BadCounts);
            };
            if largest >= count {
                return Err(IdError::OutOfRange { id: largest, len: count });
            }
            // In range, so the sum stays below the total, which fits.
            ids.extend(blocks.iter().map(|block| block.wrapping_add(offset)));
        }
        Ok(())
    }

    fn region(&self, region: usize, blocks: &[u64], ids: &mut Vec<u64>) -> Result<(), IdError> {
        self.regions(std::iter::once(region), blocks, ids)
    }
}

impl StateIds {
    fn append(
        self,
        regions: std::ops::Range<u64>,
        blocks: &[u64],
        ids: &mut Vec<u64>,
    ) -> Result<(), IdError> {
        if let Some(id) = blocks.iter().copied().max()
            && id >= self.blocks
        {
            return Err(IdError::OutOfRange { id, len: self.blocks });
        }
        for region in regions {
            let offset = self.first.wrapping_add(region.wrapping_mul(self.blocks));
            ids.extend(blocks.iter().map(|block| block.wrapping_add(offset)));
        }
        Ok(())
    }
}

fn total(counts: &[u64]) -> Option<u64> {
    counts.iter().try_fold(0_u64, |sum, count| sum.checked_add(*count))
}
