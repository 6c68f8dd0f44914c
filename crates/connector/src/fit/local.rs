//! The memory of the engine that opens the handshake, as its own worker knows it: read back from
//! what it publishes, with a guess for each setting that it does not tell.

use crate::protocol::metadata::NixlAgentMetadata;
use crate::protocol::params::Generation;
use crate::regions::{Layout, LocalGeometry, Region};
use crate::topology::{GroupKind, LocalTopology, ParallelSizes};
use crate::transport::MemoryType;

use super::{EngineTraits, PublishedRank};

/// What metadata of either generation says of the memory.
pub(super) struct Shape<'a> {
    metadata: &'a NixlAgentMetadata,
}

/// One combination of settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Guess {
    pub(super) kv_heads: u32,
    pub(super) is_mla: bool,
    pub(super) host_buffer: bool,
    pub(super) hma_required: bool,
}

/// Every combination of settings that the engine may have, given what it and its peer, which serves
/// the same model, tell.
pub(super) fn guesses(local: &EngineTraits, peer: &EngineTraits, sizes: [u32; 2]) -> Vec<Guess> {
    let either = |told: Option<bool>| told.map_or(vec![false, true], |told| vec![told]);
    let heads = local.kv_heads.or(peer.kv_heads);
    // Every relation that the number of heads can have to the two sizes.
    let mut possible: Vec<u32> = heads
        .map_or_else(|| vec![sizes[0].saturating_mul(sizes[1]), 1, sizes[0], sizes[1]], |heads| vec![heads]);
    possible.dedup();
    let mut guesses = Vec::new();
    for is_mla in either(local.is_mla.or(peer.is_mla)) {
        for kv_heads in if is_mla { vec![1] } else { possible.clone() } {
            for host_buffer in either(local.host_buffer) {
                for hma_required in either(local.hma_required) {
                    guesses.push(Guess { kv_heads, is_mla, host_buffer, hma_required });
                }
            }
        }
    }
    guesses
}

impl<'a> Shape<'a> {
    pub(super) fn of(rank: &PublishedRank<'a>) -> Self {
        Self { metadata: rank.metadata }
    }

    pub(super) fn dcp_size(&self) -> u32 {
        match self.metadata {
            NixlAgentMetadata::V2(_) => 1,
            NixlAgentMetadata::V14(metadata) => u32::try_from(metadata.dcp_size).unwrap_or(1),
        }
    }

    pub(super) fn has_states(&self) -> bool {
        match self.metadata {
            NixlAgentMetadata::V2(_) => false,
            NixlAgentMetadata::V14(metadata) => {
                metadata.ssm_sizes != [0, 0] || metadata.ple_block_len.is_some()
            }
        }
    }

    /// Whether both describe memory of one shape, wherever it lies.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        match (self.metadata, other.metadata) {
            (NixlAgentMetadata::V2(one), NixlAgentMetadata::V2(other)) => {
                (&one.block_lens, &one.kv_cache_layout, one.block_size)
                    == (&other.block_lens, &other.kv_cache_layout, other.block_size)
            }
            (NixlAgentMetadata::V14(one), NixlAgentMetadata::V14(other)) => {
                let places = (one.dcp_size, one.pcp_size, one.ssm_sizes, one.ple_block_len)
                    == (other.dcp_size, other.pcp_size, other.ssm_sizes, other.ple_block_len);
                places
                    && one.physical_blocks_per_logical_kv_block == other.physical_blocks_per_logical_kv_block
                    && (&one.block_lens, &one.kv_cache_layout, one.block_size)
                        == (&other.block_lens, &other.kv_cache_layout, other.block_size)
                    && (&one.region_group_ids, &one.region_names, &one.region_mem_types)
                        == (&other.region_group_ids, &other.region_names, &other.region_mem_types)
            }
            _ => false,
        }
    }
}

/// The geometry of one rank; none when its own numbers make no sense.
pub(super) fn geometry(
    engine_id: &str,
    traits: &EngineTraits,
    (rank, sizes): (u32, ParallelSizes),
    metadata: &NixlAgentMetadata,
    guess: Guess,
) -> Option<LocalGeometry> {
    let size = |value: i64| u64::try_from(value).ok();
    let topology =
        |pcp| LocalTopology { rank, sizes, pcp, total_kv_heads: guess.kv_heads, is_mla: guess.is_mla };
    let local = match metadata {
        NixlAgentMetadata::V2(metadata) => {
            let lists = metadata.kv_caches_base_addr.iter().zip(&metadata.block_lens);
            let regions = lists.map(|(base_address, len)| {
                let block_len = size(*len)?;
                Some(Region {
                    name: String::new(),
                    base_address: *base_address,
                    block_len,
                    block_stride: block_len,
                    num_blocks: size(metadata.num_blocks)?,
                    memory: MemoryType::Dram,
                    group: 0,
                })
            });
            LocalGeometry {
                block_size: size(metadata.block_size)?,
                layout: Layout::parse(&metadata.kv_cache_layout)?,
                device: size(metadata.device_id)?,
                ..LocalGeometry::new(Generation::V2, engine_id, topology(1), regions.collect::<Option<_>>()?)
            }
        }
        NixlAgentMetadata::V14(metadata) => {
            let regions = (0..metadata.kv_caches_base_addr.len()).map(|index| {
                let counts = metadata.region_num_blocks.as_ref().filter(|counts| !counts.is_empty());
                let names = metadata.region_names.as_ref().and_then(|names| names.get(index));
                let kind = metadata.region_mem_types.as_ref().and_then(|kinds| kinds.get(index));
                let group = metadata.region_group_ids.as_ref().and_then(|groups| groups.get(index));
                Some(Region {
                    name: names.cloned().unwrap_or_default(),
                    base_address: *metadata.kv_caches_base_addr.get(index)?,
                    block_len: size(*metadata.block_lens.get(index)?)?,
                    block_stride: size(*metadata.block_strides.get(index)?)?,
                    num_blocks: size(
                        counts.map_or(Some(&metadata.num_blocks), |counts| counts.get(index)).copied()?,
                    )?,
                    memory: match kind.map(String::as_str) {
                        Some("VRAM") => MemoryType::Vram,
                        _ => MemoryType::Dram,
                    },
                    group: group.copied().unwrap_or(0),
                })
            });
            let regions: Vec<Region> = regions.collect::<Option<_>>()?;
            let groups = regions.iter().map(|region| region.group).max().unwrap_or(0).max(0);
            LocalGeometry {
                groups: vec![GroupKind::Attention; usize::try_from(groups).ok()?.checked_add(1)?],
                block_size: size(metadata.block_size)?,
                blocks_per_logical: size(metadata.physical_blocks_per_logical_kv_block)?,
                layout: Layout::parse(&metadata.kv_cache_layout)?,
                attn_backend: metadata.attn_backend_name.clone(),
                device: size(metadata.device_id)?,
                ..LocalGeometry::new(
                    Generation::V14,
                    engine_id,
                    topology(u32::try_from(metadata.pcp_size).ok()?),
                    regions,
                )
            }
        }
    };
    Some(LocalGeometry {
        host_buffer: guess.host_buffer,
        hma_required: guess.hma_required,
        // What vLLM does unless it is told otherwise.
        permute_received: traits.permute_received.unwrap_or(false),
        ..local
    })
}
