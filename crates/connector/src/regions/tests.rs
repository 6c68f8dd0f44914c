mod convert;
mod descriptors;
mod ids;
mod pairing;
mod register;
mod rows;
mod tiling;

use serde_json::Value;

use super::*;
use crate::golden::{groups, list, vectors};
use crate::protocol::metadata::{AgentMetadataV14, NixlAgentMetadata};
use crate::protocol::params::Generation;
use crate::topology::{EngineTopology, GroupKind, LocalTopology, ParallelSizes};

fn numbers(value: &Value) -> Vec<u64> {
    list(value).iter().map(|number| number.as_u64().unwrap()).collect()
}

fn signed(value: &Value) -> Vec<i64> {
    list(value).iter().map(|number| number.as_i64().unwrap()).collect()
}

/// `[address, length, device]` triples.
fn triples(value: &Value) -> Vec<Descriptor> {
    list(value).iter().map(numbers).map(|t| Descriptor { address: t[0], len: t[1], device: t[2] }).collect()
}

fn kinds(value: Option<&Value>) -> Vec<GroupKind> {
    let kind = |group: &Value| match group.as_str().unwrap() {
        "SSM" | "MambaSpec" => GroupKind::Ssm,
        _ => GroupKind::Attention,
    };
    value.map_or_else(|| vec![GroupKind::Attention], |groups| list(groups).iter().map(kind).collect())
}

fn region(base_address: u64, block_len: u64, block_stride: u64, num_blocks: u64) -> Region {
    Region {
        name: "layer".to_owned(),
        base_address,
        block_len,
        block_stride,
        num_blocks,
        memory: MemoryType::Dram,
        group: 0,
    }
}

fn dense(bases: &[u64], lens: &[u64], num_blocks: u64) -> Vec<Region> {
    bases.iter().zip(lens).map(|(base, len)| region(*base, *len, *len, num_blocks)).collect()
}

/// A side that reads with `tp` ranks of a model with `heads` KV heads.
fn side(rank: u32, tp: u32, heads: u32, regions: Vec<Region>) -> LocalGeometry {
    LocalGeometry::new(Generation::V14, "decode", LocalTopology::new(rank, tp, heads), regions)
}

/// A peer that is taken as it is, without any check.
fn unchecked_peer(
    local: &LocalGeometry,
    tp: u32,
    regions: Vec<RemoteRegion>,
    num_blocks: u64,
) -> PeerGeometry {
    let sizes = ParallelSizes::tp(tp);
    PeerGeometry {
        engine_id: "prefill".to_owned(),
        topology: EngineTopology { sizes, pcp: 1, block_size: local.block_size, blocks_per_logical: 1 },
        mapping: local.topology.tp_mapping(sizes, &local.groups).unwrap(),
        block_size_ratio: 1,
        num_blocks,
        device: 0,
        memory: MemoryType::Dram,
        regions,
        state_sizes: [0, 0],
        ple_block_len: None,
        permute: false,
        repack_attention: false,
        differs_in_groups: false,
    }
}

/// What a peer with these regions announces.
fn announced(peer: &PeerGeometry) -> NixlAgentMetadata {
    let int = |value: u64| i64::try_from(value).unwrap();
    let each = |pick: fn(&RemoteRegion) -> u64| peer.regions.iter().map(|region| int(pick(region))).collect();
    NixlAgentMetadata::V14(Box::new(AgentMetadataV14 {
        engine_id: peer.engine_id.clone(),
        kv_caches_base_addr: peer.regions.iter().map(|region| region.base_address).collect(),
        device_id: int(peer.device),
        num_blocks: int(peer.num_blocks),
        block_lens: each(|region| region.block_len),
        block_strides: each(|region| region.block_stride),
        kv_cache_layout: "LBHNC".to_owned(),
        block_size: int(peer.topology.block_size),
        ssm_sizes: peer.state_sizes.map(int),
        attn_backend_name: "FLASH_ATTN".to_owned(),
        physical_blocks_per_logical_kv_block: int(peer.topology.blocks_per_logical),
        region_num_blocks: Some(each(|region| region.num_blocks)),
        region_group_ids: Some(peer.regions.iter().map(|region| region.group).collect()),
        ..AgentMetadataV14::default()
    }))
}

#[test]
fn layouts_have_the_properties_vllm_gives_them() {
    let vectors = vectors("topology_v032.json");
    let cases = list(&vectors["layouts"]);
    assert_eq!(cases.len(), 6);
    for case in cases {
        let layout = Layout::parse(case["name"].as_str().unwrap()).unwrap();
        let flag = |key: &str| case[key].as_bool().unwrap();
        assert_eq!(layout.is_layer_compact(), flag("is_layer_compact"), "{layout:?}");
        assert_eq!(layout.is_block_contiguous(), flag("is_block_contiguous"), "{layout:?}");
        assert_eq!(layout.is_block_compact(), flag("is_block_compact"), "{layout:?}");
        assert_eq!(layout.is_block_outermost(), flag("is_block_outermost"), "{layout:?}");
        let order: Vec<u64> = layout.order().into_iter().map(|axis| axis as u64).collect();
        assert_eq!(order, numbers(&case["stride_order"]), "{layout:?}");
    }
}

#[test]
fn every_layout_name_is_known_and_no_other() {
    for layout in Layout::ALL {
        assert_eq!(Layout::parse(layout.as_str()), Some(layout));
    }
    assert_eq!(Layout::parse("HNDX"), None);
    assert_eq!(Layout::Hnd.strides([2, 3, 4, 5, 6], 2), Layout::Lbhnc.strides([2, 3, 4, 5, 6], 2));
    assert_eq!(Layout::Blhnc.strides([2, 3, 4, 5, 6], 2), Some([240, 480, 60, 12, 2]));
    assert_eq!(Layout::Lbhnc.strides([u64::MAX, 2, 2, 2, 2], 1), None);
}

#[test]
fn t32_a_platform_names_the_memory_of_its_buffer_device() {
    let platform = [("oot", MemoryType::Vram)];
    assert_eq!(kv_buffer_memory("oot", &platform), Some(MemoryType::Vram));
    assert_eq!(kv_buffer_memory("oot", &[]), None);
    assert_eq!(kv_buffer_memory("cuda", &[]), Some(MemoryType::Vram));
    assert_eq!(kv_buffer_memory("xpu", &[]), Some(MemoryType::Vram));
    assert_eq!(kv_buffer_memory("cpu", &[]), Some(MemoryType::Dram));
}

#[test]
fn t32_1_an_out_of_tree_device_is_device_memory() {
    assert_eq!(kv_buffer_memory("oot", &[("oot", MemoryType::Vram)]).map(MemoryType::as_str), Some("VRAM"));
}
