//! The rules of vLLM 0.13.

use std::collections::BTreeMap;

use crate::protocol::metadata::AgentMetadataV2;
use crate::protocol::params::Generation;
use crate::topology::{EngineTopology, TpMapping, block_size_ratio, v2};
use crate::transport::MemoryType;

use super::super::{Layout, LocalGeometry, PeerGeometry, RemoteRegion};
use super::{PeerError, PeerRequest, block_len, check_slices, count, size, sizes};

pub(super) fn validate(
    local: &LocalGeometry,
    request: &PeerRequest<'_>,
    metadata: &AgentMetadataV2,
) -> Result<PeerGeometry, PeerError> {
    if local.generation != Generation::V2 {
        return Err(PeerError::Generation);
    }
    if metadata.engine_id != request.engine_id {
        return Err(PeerError::EngineId {
            expected: request.engine_id.to_owned(),
            got: metadata.engine_id.clone(),
        });
    }
    if metadata.engine_id == local.engine_id {
        return Err(PeerError::OwnEngine);
    }
    let block_size = size("block_size", metadata.block_size)?;
    let ratio = block_size_ratio(local.block_size, block_size)?;
    let remote_tp = request.sizes.tp;
    if let Some(known) = request.known
        && known.topology.sizes.tp != remote_tp
    {
        let (first, now) = (known.topology.sizes.tp.into(), remote_tp.into());
        return Err(PeerError::Changed { what: "tp_size", first, now });
    }
    let topology = &local.topology;
    let tp_ratio = v2::tp_ratio(topology.sizes.tp, remote_tp)?;
    if local.equal_sizes_only && tp_ratio != 1 {
        return Err(PeerError::UnequalSizes(tp_ratio));
    }
    let permute = layout(local, metadata)?;
    let lens = sizes("block_lens", &metadata.block_lens)?;
    let replicates = topology.is_mla || v2::is_replicated(remote_tp, topology.total_kv_heads);
    block_lens(local, replicates, (tp_ratio, ratio), &lens)?;
    let num_blocks = size("num_blocks", metadata.num_blocks)?;
    if let Some(known) = request.known
        && known.num_blocks != num_blocks
    {
        return Err(PeerError::Changed { what: "num_blocks", first: known.num_blocks, now: num_blocks });
    }
    count("base addresses", local.regions.len(), metadata.kv_caches_base_addr.len())?;
    count("block lengths", local.regions.len(), lens.len())?;
    let factor = v2::rank_offset_factor(topology.rank, topology.sizes.tp, remote_tp, replicates)?;
    let regions = metadata.kv_caches_base_addr.iter().zip(&lens).zip(&local.regions);
    let peer = PeerGeometry {
        engine_id: metadata.engine_id.clone(),
        topology: EngineTopology {
            sizes: request.sizes,
            pcp: 1,
            block_size,
            blocks_per_logical: local.blocks_per_logical,
        },
        mapping: mapping(local, topology.rank / tp_ratio, tp_ratio, factor),
        block_size_ratio: ratio,
        num_blocks,
        device: size("device_id", metadata.device_id)?,
        memory: local.regions.iter().map(|region| region.memory).max().unwrap_or(MemoryType::Dram),
        regions: regions
            .map(|((&base_address, &block_len), region)| RemoteRegion {
                base_address,
                block_len,
                block_stride: block_len,
                num_blocks,
                group: region.group,
            })
            .collect(),
        state_sizes: [0, 0],
        ple_block_len: None,
        permute,
        repack_attention: false,
        differs_in_groups: false,
    };
    check_slices(local, &peer)?;
    Ok(peer)
}

fn mapping(local: &LocalGeometry, source: u32, tp_ratio: u32, factor: u32) -> TpMapping {
    TpMapping {
        tp_ratio: i64::from(tp_ratio),
        attention_ranks: vec![source],
        state_ranks: Vec::new(),
        source_ranks: vec![source],
        source_ranks_per_group: vec![vec![source]; local.groups.len()],
        attention_slots: BTreeMap::from([(source, 0)]),
        rank_offset_factor: u64::from(factor),
        local_consumers: tp_ratio,
    }
}

fn layout(local: &LocalGeometry, metadata: &AgentMetadataV2) -> Result<bool, PeerError> {
    let remote = metadata.kv_cache_layout.as_str();
    if local.topology.is_mla || local.layout.as_str() == remote {
        return Ok(false);
    }
    if local.permute_received && remote == Layout::Hnd.as_str() {
        return Ok(true);
    }
    Err(PeerError::Layout { local: local.layout.as_str().to_owned(), remote: remote.to_owned() })
}

fn block_lens(
    local: &LocalGeometry,
    replicates: bool,
    (tp_ratio, ratio): (u32, u64),
    lens: &[u64],
) -> Result<(), PeerError> {
    let Some((&first, rest)) = lens.split_first() else {
        return Err(PeerError::ListLength { what: "block lengths", expected: local.regions.len(), got: 0 });
    };
    if replicates {
        count("block lengths", local.regions.len(), lens.len())?;
        for (index, (region, &len)) in local.regions.iter().zip(lens).enumerate() {
            block_len(index, region.block_len / ratio, len)?;
        }
        return Ok(());
    }
    for (index, &len) in (1..).zip(rest) {
        block_len(index, first, len)?;
    }
    let whole = local.regions.first().map_or(0, |region| u128::from(region.block_len));
    let expected = whole * u128::from(tp_ratio) / u128::from(ratio);
    block_len(0, u64::try_from(expected).unwrap_or(u64::MAX), first)
}
