//! The rules of the newest generation.

use crate::protocol::metadata::AgentMetadataV14;
use crate::protocol::params::Generation;
use crate::topology::{EngineTopology, TpMapping, block_size_ratio};
use crate::transport::MemoryType;

use super::super::{Layout, LocalGeometry, PeerGeometry, RegionRouting, RemoteRegion};
use super::align::RegionLists;
use super::{PeerError, PeerRequest, block_len, check_slices, count, size};

/// The one attention backend whose cache must be packed after a receive from another one.
const REPACKED_BACKEND: &str = "CPU_ATTN";

/// What the rules share.
struct Check<'a> {
    local: &'a LocalGeometry,
    request: &'a PeerRequest<'a>,
    metadata: &'a AgentMetadataV14,
}

pub(super) fn validate(
    local: &LocalGeometry,
    request: &PeerRequest<'_>,
    metadata: &AgentMetadataV14,
) -> Result<PeerGeometry, PeerError> {
    let check = Check { local, request, metadata };
    check.head_boundary()?;
    check.contexts()?;
    check.engine()?;
    check.routed_sizes()?;
    let lists = RegionLists::read(metadata)?.align(local, metadata)?;
    if metadata.engine_id == local.engine_id {
        return Err(PeerError::OwnEngine);
    }
    let mapping = local.topology.tp_mapping(request.sizes, &local.groups)?;
    let ratio = block_size_ratio(local.block_size, size("block_size", metadata.block_size)?)?;
    let topology = check.topology()?;
    check.known(&topology)?;
    check.context_sizes()?;
    let groups = check.region_groups(&lists);
    check.replication(&mapping)?;
    check.logical_blocks(&topology, &groups)?;
    if ratio != 1 && local.host_buffer {
        return Err(PeerError::HostBufferBlockSizes);
    }
    let permute = check.layout()?;
    let repack_attention = check.attention_backend()?;
    check.split_heads(&mapping)?;
    check.block_lens(&mapping, ratio, &lists)?;
    let num_blocks = size("num_blocks", metadata.num_blocks)?;
    check.lists(num_blocks, &lists)?;
    let memory = check.memory(&lists)?;
    let [conv, temporal] = metadata.ssm_sizes;
    let peer = PeerGeometry {
        engine_id: metadata.engine_id.clone(),
        topology,
        mapping,
        block_size_ratio: ratio,
        num_blocks,
        device: size("device_id", metadata.device_id)?,
        memory,
        differs_in_groups: check.differs_in_groups(&groups),
        regions: regions(&lists, num_blocks, &groups),
        state_sizes: [size("ssm_sizes", conv)?, size("ssm_sizes", temporal)?],
        ple_block_len: metadata.ple_block_len.map(|len| size("ple_block_len", len)).transpose()?,
        permute,
        repack_attention,
    };
    check_slices(local, &peer)?;
    Ok(peer)
}

fn regions(lists: &RegionLists, num_blocks: u64, groups: &[i64]) -> Vec<RemoteRegion> {
    let counts = lists.counts.as_ref().filter(|counts| !counts.is_empty());
    let at = |list: &[u64], index: usize| list.get(index).copied().unwrap_or(0);
    (0..lists.bases.len())
        .map(|index| RemoteRegion {
            base_address: at(&lists.bases, index),
            block_len: at(&lists.lens, index),
            block_stride: at(&lists.strides, index),
            num_blocks: counts.map_or(num_blocks, |counts| at(counts, index)),
            group: groups.get(index).copied().unwrap_or(0),
        })
        .collect()
}

impl Check<'_> {
    fn head_boundary(&self) -> Result<(), PeerError> {
        let heads = self.local.topology.total_kv_heads;
        let (local, remote) = (self.local.topology.sizes.tp, self.request.sizes.tp);
        if self.local.csa_linear && (local < heads) != (remote < heads) {
            return Err(PeerError::HeadBoundary { local, remote, heads });
        }
        Ok(())
    }

    fn contexts(&self) -> Result<(), PeerError> {
        let (pcp, dcp) =
            (size("pcp_size", self.metadata.pcp_size)?, size("dcp_size", self.metadata.dcp_size)?);
        let local = &self.local.topology;
        if pcp > 1 && dcp != 1 && dcp != pcp {
            return Err(PeerError::PartialContext { pcp, dcp });
        }
        let local_replicated = local.pcp > 1 && local.sizes.dcp <= 1;
        let remote_replicated = pcp > 1 && dcp <= 1;
        if (local_replicated && dcp > 1) || (remote_replicated && local.sizes.dcp > 1) {
            return Err(PeerError::ReplicatedContext);
        }
        Ok(())
    }

    fn engine(&self) -> Result<(), PeerError> {
        if self.local.generation != Generation::V14 {
            return Err(PeerError::Generation);
        }
        if self.metadata.engine_id != self.request.engine_id {
            return Err(PeerError::EngineId {
                expected: self.request.engine_id.to_owned(),
                got: self.metadata.engine_id.clone(),
            });
        }
        Ok(())
    }

    fn routed_sizes(&self) -> Result<(), PeerError> {
        let RegionRouting::ByLayer(_) = &self.local.routing else { return Ok(()) };
        let (local, remote) = (self.local.block_size, size("block_size", self.metadata.block_size)?);
        if local != remote {
            return Err(PeerError::RoutedBlockSizes { local, remote });
        }
        let (local, remote) = (self.local.topology.sizes.tp, self.request.sizes.tp);
        if remote > local && !self.local.topology.is_mla {
            return Err(PeerError::RoutedSizes { local, remote });
        }
        Ok(())
    }

    fn topology(&self) -> Result<EngineTopology, PeerError> {
        let metadata = self.metadata;
        let blocks_per_logical = metadata.physical_blocks_per_logical_kv_block;
        let what = "physical_blocks_per_logical_kv_block";
        let per_logical = size(what, blocks_per_logical)?;
        if per_logical == 0 {
            return Err(PeerError::Number { what, value: blocks_per_logical });
        }
        let pcp = u32::try_from(metadata.pcp_size);
        Ok(EngineTopology {
            sizes: self.request.sizes,
            pcp: pcp.map_err(|_| PeerError::Number { what: "pcp_size", value: metadata.pcp_size })?,
            block_size: size("block_size", metadata.block_size)?,
            blocks_per_logical: per_logical,
        })
    }

    /// The sizes of the transfer parameters, of earlier ranks and of the metadata are the same.
    fn known(&self, topology: &EngineTopology) -> Result<(), PeerError> {
        let same = |what, first: u64, now: u64| {
            if first == now { Ok(()) } else { Err(PeerError::Changed { what, first, now }) }
        };
        if let Some(known) = self.request.known {
            same("tp_size", known.topology.sizes.tp.into(), topology.sizes.tp.into())?;
            same("dcp_size", known.topology.sizes.dcp.into(), topology.sizes.dcp.into())?;
        }
        same("dcp_size", topology.sizes.dcp.into(), size("dcp_size", self.metadata.dcp_size)?)
    }

    fn context_sizes(&self) -> Result<(), PeerError> {
        let (local, remote) = (self.local.topology.sizes.dcp, self.request.sizes.dcp);
        if local == 0 || remote == 0 || !(local.is_multiple_of(remote) || remote.is_multiple_of(local)) {
            return Err(PeerError::ContextSizes { local, remote });
        }
        if self.local.has_states() && local != remote {
            return Err(PeerError::StateContext { local, remote });
        }
        Ok(())
    }

    fn replication(&self, mapping: &TpMapping) -> Result<(), PeerError> {
        let topology = &self.local.topology;
        let remote = self.request.sizes.tp;
        let exempt = topology.is_mla || self.local.has_states();
        if !exempt && mapping.tp_ratio < 0 && topology.shares_heads(remote) {
            return Err(PeerError::SharedHeads { remote, heads: topology.total_kv_heads });
        }
        Ok(())
    }

    /// The cache groups of the peer's regions; by default they are the local ones.
    fn region_groups(&self, lists: &RegionLists) -> Vec<i64> {
        if let Some(groups) = lists.groups.as_ref().filter(|groups| !groups.is_empty()) {
            return groups.clone();
        }
        if self.local.regions.len() == lists.bases.len() {
            return self.local.regions.iter().map(|region| region.group).collect();
        }
        vec![0; lists.bases.len()]
    }

    fn differs_in_groups(&self, groups: &[i64]) -> bool {
        !self.local.regions.iter().map(|region| region.group).eq(groups.iter().copied())
    }

    fn logical_blocks(&self, topology: &EngineTopology, groups: &[i64]) -> Result<(), PeerError> {
        let (local, remote) = (self.local.blocks_per_logical, topology.blocks_per_logical);
        let sharded = self.local.topology.sizes.dcp > 1 || topology.sizes.dcp > 1;
        if sharded && self.differs_in_groups(groups) && (local != 1 || remote != 1) {
            return Err(PeerError::ContextRegions);
        }
        if self.local.has_states() && local != remote && self.local.prefix_caching {
            return Err(PeerError::StatePrefixCaching { local, remote });
        }
        Ok(())
    }

    /// Whether received blocks must be permuted.
    fn layout(&self) -> Result<bool, PeerError> {
        let (local, remote) = (self.local.layout, self.metadata.kv_cache_layout.as_str());
        if self.local.topology.is_mla || local.as_str() == remote {
            return Ok(false);
        }
        let permutable = local == Layout::Lbnhc && remote == Layout::Lbhnc.as_str();
        if !(self.local.permute_received && permutable) {
            return Err(PeerError::Layout { local: local.as_str().to_owned(), remote: remote.to_owned() });
        }
        if self.local.hma_required {
            return Err(PeerError::PermuteHybrid);
        }
        Ok(true)
    }

    /// Whether received blocks must be packed for the local backend.
    fn attention_backend(&self) -> Result<bool, PeerError> {
        let local = &self.local.attn_backend;
        if local != REPACKED_BACKEND || *local == self.metadata.attn_backend_name {
            return Ok(false);
        }
        if self.local.hma_required {
            return Err(PeerError::RepackHybrid(local.clone()));
        }
        Ok(true)
    }

    fn split_heads(&self, mapping: &TpMapping) -> Result<(), PeerError> {
        let splits =
            mapping.tp_ratio.unsigned_abs() != 1 && !self.local.topology.replicates(self.request.sizes.tp);
        if splits && !self.local.layout.is_block_contiguous() && !self.local.permute_received {
            return Err(PeerError::ScatteredHeads(self.local.layout.as_str().to_owned()));
        }
        Ok(())
    }

    fn block_lens(&self, mapping: &TpMapping, ratio: u64, lists: &RegionLists) -> Result<(), PeerError> {
        let topology = &self.local.topology;
        let transferred = self.local.transferred_regions();
        if self.local.has_states() && !topology.is_mla {
            return Ok(());
        }
        count("block lengths", transferred.len(), lists.lens.len())?;
        let [local_heads, remote_heads] =
            [topology.sizes.tp, self.request.sizes.tp].map(|tp| u128::from(topology.heads_per_rank(tp)));
        let replicated = topology.replicates(self.request.sizes.tp);
        for (position, (index, &remote)) in transferred.into_iter().zip(&lists.lens).enumerate() {
            let Some(region) = self.local.regions.get(index) else { continue };
            let local = region.block_len;
            if self.local.has_states() {
                // Latent pages do not depend on the ranks, only on the block size.
                if remote.checked_mul(ratio) != Some(local) {
                    return Err(PeerError::BlockLen {
                        region: position,
                        expected: local / ratio,
                        got: remote,
                    });
                }
            } else if replicated || self.local.is_replicated(index) {
                block_len(position, local / ratio, remote)?;
            } else {
                if mapping.tp_ratio < 0 && ratio != 1 {
                    return Err(PeerError::SlicedSubBlocks(ratio));
                }
                let expected = u128::from(local) * remote_heads / local_heads / u128::from(ratio);
                block_len(position, u64::try_from(expected).unwrap_or(u64::MAX), remote)?;
            }
        }
        Ok(())
    }

    fn lists(&self, num_blocks: u64, lists: &RegionLists) -> Result<(), PeerError> {
        if let Some(known) = self.request.known
            && known.num_blocks != num_blocks
        {
            return Err(PeerError::Changed { what: "num_blocks", first: known.num_blocks, now: num_blocks });
        }
        let transferred = self.local.transferred_regions();
        let regions = transferred.len();
        count("base addresses", regions, lists.bases.len())?;
        count("block counts", regions, lists.counts.as_ref().map_or(regions, Vec::len))?;
        count("block strides", regions, lists.strides.len())?;
        count("block lengths", regions, lists.lens.len())?;
        for (region, (&stride, &len)) in lists.strides.iter().zip(&lists.lens).enumerate() {
            if stride < len {
                return Err(PeerError::ShortStride { region, stride, len });
            }
        }
        count("cache groups", regions, lists.groups.as_ref().map_or(regions, Vec::len))?;
        if let Some(names) = &lists.names {
            count("region names", regions, names.len())?;
            self.names(&transferred, names)?;
        }
        count("memory types", regions, lists.memory.as_ref().map_or(regions, Vec::len))
    }

    fn names(&self, transferred: &[usize], names: &[String]) -> Result<(), PeerError> {
        for (region, (index, got)) in transferred.iter().zip(names).enumerate() {
            let expected = match &self.local.routing {
                RegionRouting::ByLayer(layers) => layers.get(region).map(|layer| &layer.name),
                _ => self.local.regions.get(*index).map(|region| &region.name),
            };
            if let Some(expected) = expected
                && expected != got
            {
                return Err(PeerError::RegionName { region, expected: expected.clone(), got: got.clone() });
            }
        }
        Ok(())
    }

    fn memory(&self, lists: &RegionLists) -> Result<MemoryType, PeerError> {
        let local = self.local.regions.iter().map(|region| region.memory).max().unwrap_or(MemoryType::Dram);
        let Some(names) = &lists.memory else { return Ok(local) };
        let Some(first) = names.first() else { return Ok(local) };
        if names.iter().any(|name| name != first) {
            return Err(PeerError::MixedMemory);
        }
        [MemoryType::Dram, MemoryType::Vram]
            .into_iter()
            .find(|memory| memory.as_str() == first)
            .ok_or_else(|| PeerError::MemoryType(first.clone()))
    }
}
