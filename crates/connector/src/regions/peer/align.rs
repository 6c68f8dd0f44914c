//! A peer's region lists brought into the order of the local regions.

use std::collections::{HashMap, HashSet};

use crate::protocol::metadata::AgentMetadataV14;

use super::super::{LocalGeometry, RegionRouting, RoutedLayer};
use super::{PeerError, count, sizes};

/// The region lists of a peer.
#[derive(Debug, Clone)]
pub(super) struct RegionLists {
    pub(super) bases: Vec<u64>,
    pub(super) lens: Vec<u64>,
    pub(super) strides: Vec<u64>,
    pub(super) counts: Option<Vec<u64>>,
    pub(super) groups: Option<Vec<i64>>,
    pub(super) names: Option<Vec<String>>,
    pub(super) memory: Option<Vec<String>>,
}

impl RegionLists {
    pub(super) fn read(metadata: &AgentMetadataV14) -> Result<Self, PeerError> {
        let counts = metadata.region_num_blocks.as_ref();
        Ok(Self {
            bases: metadata.kv_caches_base_addr.clone(),
            lens: sizes("block_lens", &metadata.block_lens)?,
            strides: sizes("block_strides", &metadata.block_strides)?,
            counts: counts.map(|counts| sizes("region_num_blocks", counts)).transpose()?,
            groups: metadata.region_group_ids.clone(),
            names: metadata.region_names.clone(),
            memory: metadata.region_mem_types.clone(),
        })
    }

    /// Selects and orders the regions for the local ones.
    pub(super) fn align(self, local: &LocalGeometry, metadata: &AgentMetadataV14) -> Result<Self, PeerError> {
        match &local.routing {
            RegionRouting::Whole => Ok(self),
            RegionRouting::Window { .. } if self.bases.len() <= local.regions.len() => Ok(self),
            RegionRouting::Window { first } => self.window(*first, local.regions.len()),
            RegionRouting::ByLayer(layers) => self.by_layer(local, layers, metadata),
        }
    }

    fn window(self, first: usize, len: usize) -> Result<Self, PeerError> {
        let end = first.saturating_add(len);
        if self.bases.len() < end {
            return Err(PeerError::ListLength {
                what: "base addresses",
                expected: end,
                got: self.bases.len(),
            });
        }
        // Like a slice in the original, a list that is too short comes out shorter and fails later.
        fn cut<T: Clone>(list: &[T], first: usize, end: usize) -> Vec<T> {
            list.get(first..end.min(list.len())).unwrap_or_default().to_vec()
        }
        Ok(Self {
            bases: cut(&self.bases, first, end),
            lens: cut(&self.lens, first, end),
            strides: cut(&self.strides, first, end),
            counts: self.counts.map(|list| cut(&list, first, end)),
            groups: self.groups.map(|list| cut(&list, first, end)),
            names: self.names.map(|list| cut(&list, first, end)),
            memory: self.memory.map(|list| cut(&list, first, end)),
        })
    }

    fn by_layer(
        self,
        local: &LocalGeometry,
        layers: &[RoutedLayer],
        metadata: &AgentMetadataV14,
    ) -> Result<Self, PeerError> {
        let members = &metadata.region_members;
        let regions = members.len();
        if regions == 0 {
            return Err(PeerError::ListLength { what: "region members", expected: layers.len(), got: 0 });
        }
        count("base addresses", regions, self.bases.len())?;
        count("block lengths", regions, self.lens.len())?;
        count("block strides", regions, self.strides.len())?;
        count("block counts", regions, self.counts.as_ref().map_or(regions, Vec::len))?;
        count("cache groups", regions, self.groups.as_ref().map_or(regions, Vec::len))?;
        count("region names", regions, self.names.as_ref().map_or(regions, Vec::len))?;
        count("memory types", regions, self.memory.as_ref().map_or(regions, Vec::len))?;
        let mut region_of: HashMap<&str, usize> = HashMap::new();
        for (region, names) in members.iter().enumerate() {
            for name in names {
                if region_of.insert(name, region).is_some() {
                    return Err(PeerError::RepeatedLayer(name.clone()));
                }
            }
        }
        let find = |layer: &RoutedLayer| {
            region_of
                .get(layer.name.as_str())
                .copied()
                .ok_or_else(|| PeerError::MissingLayer(layer.name.clone()))
        };
        let order: Vec<usize> = layers.iter().map(find).collect::<Result<_, _>>()?;
        fn pick<T: Clone>(list: &[T], order: &[usize]) -> Vec<T> {
            order.iter().filter_map(|region| list.get(*region)).cloned().collect()
        }
        let mut aligned = Self {
            bases: pick(&self.bases, &order),
            lens: pick(&self.lens, &order),
            strides: pick(&self.strides, &order),
            counts: self.counts.map(|list| pick(&list, &order)),
            groups: self.groups.map(|list| pick(&list, &order)),
            names: self.names.map(|_| layers.iter().map(|layer| layer.name.clone()).collect()),
            memory: self.memory.map(|list| pick(&list, &order)),
        };
        aligned.narrow_packed(local, layers, metadata, (&region_of, &order))?;
        Ok(aligned)
    }

    /// Narrows rows that hold several layers to the page of the layer in question.
    fn narrow_packed(
        &mut self,
        local: &LocalGeometry,
        layers: &[RoutedLayer],
        metadata: &AgentMetadataV14,
        (region_of, order): (&HashMap<&str, usize>, &[usize]),
    ) -> Result<(), PeerError> {
        let layouts: HashMap<&str, [i64; 2]> =
            metadata.packed_member_layouts.iter().map(|(name, layout)| (name.as_str(), *layout)).collect();
        let find = |name: &&str| {
            region_of.get(*name).copied().ok_or_else(|| PeerError::PackedLayer((*name).to_owned()))
        };
        let packed: HashSet<usize> = layouts.keys().map(find).collect::<Result<_, _>>()?;
        for (position, layer) in layers.iter().enumerate() {
            if !packed.contains(&order[position]) {
                continue;
            }
            let error = || PeerError::PackedLayer(layer.name.clone());
            let [offset, page] = *layouts.get(layer.name.as_str()).ok_or_else(error)?;
            let (offset, page) =
                u64::try_from(offset).ok().zip(u64::try_from(page).ok()).ok_or_else(error)?;
            let (base, len) =
                self.bases.get_mut(position).zip(self.lens.get_mut(position)).ok_or_else(error)?;
            let fits = page > 0 && offset.checked_add(page).is_some_and(|end| end <= *len);
            let local_page = local.regions.get(layer.region).map(|region| region.block_len);
            if !fits || local_page != Some(page) {
                return Err(error());
            }
            *base = base.checked_add(offset).ok_or_else(error)?;
            *len = page;
        }
        Ok(())
    }
}
