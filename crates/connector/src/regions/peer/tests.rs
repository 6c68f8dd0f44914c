use proptest::prelude::*;
use serde_json::Value;

use super::super::{ConvSplit, Layout, Region, RegionRouting, RoutedLayer, StateGeometry, descriptors};
use super::*;
use crate::golden::{list, vectors};
use crate::protocol::metadata::{AgentMetadataV2, AgentMetadataV14};
use crate::protocol::params::Generation;
use crate::topology::{ErrorKind, GroupKind, LocalTopology, TopologyError};
use crate::transport::MemoryType;

fn region(name: &str, base_address: u64, block_len: u64) -> Region {
    Region {
        name: name.to_owned(),
        base_address,
        block_len,
        block_stride: block_len,
        num_blocks: 4,
        memory: MemoryType::Vram,
        group: 0,
    }
}

/// A decode rank with regions of the given block lengths.
fn decode(rank: u32, tp: u32, heads: u32, lens: &[u64]) -> LocalGeometry {
    let regions =
        (0_u64..).zip(lens).map(|(i, len)| region(&format!("l{i}"), 0x10_0000 * (i + 1), *len)).collect();
    LocalGeometry::new(Generation::V14, "decode", LocalTopology::new(rank, tp, heads), regions)
}

/// Metadata of a prefill rank with regions of the given block lengths.
fn prefill(lens: &[i64]) -> AgentMetadataV14 {
    AgentMetadataV14 {
        engine_id: "prefill".to_owned(),
        kv_caches_base_addr: (1..).take(lens.len()).map(|i| 0x800_0000 * i).collect(),
        num_blocks: 4,
        block_lens: lens.to_vec(),
        block_strides: lens.to_vec(),
        kv_cache_layout: "LBHNC".to_owned(),
        block_size: 16,
        attn_backend_name: "FLASH_ATTN".to_owned(),
        ..AgentMetadataV14::default()
    }
}

fn validate(
    local: &LocalGeometry,
    sizes: ParallelSizes,
    metadata: &AgentMetadataV14,
) -> Result<PeerGeometry, PeerError> {
    let request = PeerRequest { engine_id: "prefill", sizes, known: None };
    validate_peer(local, &request, &NixlAgentMetadata::V14(Box::new(metadata.clone())))
}

fn refused(local: &LocalGeometry, tp: u32, metadata: &AgentMetadataV14) -> (PeerError, ErrorKind) {
    let error = validate(local, ParallelSizes::tp(tp), metadata).unwrap_err();
    let kind = error.kind();
    (error, kind)
}

#[test]
fn t12_another_layout_is_refused_for_equal_sizes_too() {
    for tp in [1, 2] {
        let local = decode(0, tp, 4, &[1024]);
        let metadata = AgentMetadataV14 { kv_cache_layout: "LBNHC".to_owned(), ..prefill(&[1024]) };
        let error = PeerError::Layout { local: "LBHNC".to_owned(), remote: "LBNHC".to_owned() };
        assert_eq!(refused(&local, tp, &metadata), (error, ErrorKind::Runtime));
    }
}

#[test]
fn t13_a_head_major_peer_is_accepted_by_a_token_major_cache_that_permutes() {
    let mut local = decode(0, 2, 4, &[1024]);
    local.layout = Layout::Lbnhc;
    local.permute_received = true;
    let peer = validate(&local, ParallelSizes::tp(1), &prefill(&[2048])).unwrap();
    assert!(peer.permute);
    assert_eq!(peer.mapping.tp_ratio, 2);
    local.hma_required = true;
    assert_eq!(refused(&local, 1, &prefill(&[2048])), (PeerError::PermuteHybrid, ErrorKind::Assertion));
    local.hma_required = false;
    local.permute_received = false;
    assert_eq!(refused(&local, 1, &prefill(&[2048])).1, ErrorKind::Runtime);
}

#[test]
fn t15_full_attention_doubles_and_latents_stay_in_a_mixed_model() {
    let mut local = decode(0, 2, 8, &[1024, 96]);
    local.replicated = vec![false, true];
    assert!(validate(&local, ParallelSizes::tp(1), &prefill(&[2048, 96])).is_ok());
    let error = PeerError::BlockLen { region: 1, expected: 96, got: 192 };
    assert_eq!(refused(&local, 1, &prefill(&[2048, 192])), (error, ErrorKind::Assertion));
}

#[test]
fn t16_shared_heads_keep_the_block_length() {
    let local = decode(3, 16, 8, &[1024]);
    let peer = validate(&local, ParallelSizes::tp(8), &prefill(&[1024])).unwrap();
    assert_eq!((peer.mapping.tp_ratio, peer.mapping.rank_offset_factor), (2, 0));
}

#[test]
fn t17_a_block_length_that_should_double_is_refused() {
    let local = decode(1, 4, 32, &[1024]);
    let error = PeerError::BlockLen { region: 0, expected: 2048, got: 1024 };
    assert_eq!(refused(&local, 2, &prefill(&[1024])), (error, ErrorKind::Assertion));
    assert!(validate(&local, ParallelSizes::tp(2), &prefill(&[2048])).is_ok());
}

#[test]
fn contexts_that_do_not_fit_are_not_implemented() {
    let local = LocalGeometry { topology: LocalTopology::mla(0, 4), ..decode(0, 4, 1, &[576]) };
    let sizes = |pcp_size, dcp_size| AgentMetadataV14 { pcp_size, dcp_size, ..prefill(&[576]) };
    let partial = refused(&local, 4, &sizes(4, 2));
    assert_eq!(partial, (PeerError::PartialContext { pcp: 4, dcp: 2 }, ErrorKind::NotImplemented));
    let mut replicated = local.clone();
    replicated.topology.pcp = 2;
    let error = (PeerError::ReplicatedContext, ErrorKind::NotImplemented);
    assert_eq!(refused(&replicated, 4, &sizes(1, 4)), error);
    let mut sharded = local.clone();
    sharded.topology.sizes.dcp = 4;
    assert_eq!(refused(&sharded, 4, &sizes(2, 1)), error);
    let mut three = local;
    three.topology.sizes = ParallelSizes { tp: 2, dcp: 2 };
    let request = PeerRequest { engine_id: "prefill", sizes: ParallelSizes { tp: 6, dcp: 3 }, known: None };
    let answer = validate_peer(&three, &request, &NixlAgentMetadata::V14(Box::new(sizes(1, 3))));
    assert_eq!(answer, Err(PeerError::ContextSizes { local: 2, remote: 3 }));
}

#[test]
fn the_engine_is_the_expected_one_and_not_this_one() {
    let local = decode(0, 1, 4, &[1024]);
    let other = AgentMetadataV14 { engine_id: "other".to_owned(), ..prefill(&[1024]) };
    let error = PeerError::EngineId { expected: "prefill".to_owned(), got: "other".to_owned() };
    assert_eq!(refused(&local, 1, &other), (error, ErrorKind::Runtime));
    let own = LocalGeometry { engine_id: "prefill".to_owned(), ..local.clone() };
    assert_eq!(refused(&own, 1, &prefill(&[1024])), (PeerError::OwnEngine, ErrorKind::Assertion));
    let v2 = NixlAgentMetadata::V2(AgentMetadataV2::default());
    let request = PeerRequest { engine_id: "", sizes: ParallelSizes::tp(1), known: None };
    assert_eq!(validate_peer(&local, &request, &v2), Err(PeerError::Generation));
}

#[test]
fn shared_pages_need_the_same_side_of_the_head_boundary() {
    let local = LocalGeometry { csa_linear: true, ..decode(0, 4, 4, &[1024]) };
    let error = PeerError::HeadBoundary { local: 4, remote: 2, heads: 4 };
    assert_eq!(refused(&local, 2, &prefill(&[2048])), (error, ErrorKind::Value));
}

#[test]
fn sizes_must_divide_and_stay_the_same_for_all_ranks() {
    let local = decode(0, 3, 6, &[1024]);
    let error = PeerError::Topology(TopologyError::NotDivisible { local: 3, remote: 2 });
    assert_eq!(refused(&local, 2, &prefill(&[1024])), (error, ErrorKind::Assertion));
    let local = decode(0, 1, 4, &[1024]);
    let blocks = AgentMetadataV14 { block_size: 32, ..prefill(&[1024]) };
    let error = PeerError::Topology(TopologyError::BlockSizes { local: 16, remote: 32 });
    assert_eq!(refused(&local, 1, &blocks), (error, ErrorKind::Assertion));
    let known = validate(&local, ParallelSizes::tp(2), &prefill(&[512])).unwrap();
    let again = |tp, metadata: AgentMetadataV14| {
        let request = PeerRequest { engine_id: "prefill", sizes: ParallelSizes::tp(tp), known: Some(&known) };
        validate_peer(&local, &request, &NixlAgentMetadata::V14(Box::new(metadata)))
    };
    assert!(again(2, prefill(&[512])).is_ok());
    assert_eq!(again(4, prefill(&[256])), Err(PeerError::Changed { what: "tp_size", first: 2, now: 4 }));
    let more = AgentMetadataV14 { num_blocks: 5, ..prefill(&[512]) };
    assert_eq!(again(2, more), Err(PeerError::Changed { what: "num_blocks", first: 4, now: 5 }));
    let sharded = AgentMetadataV14 { dcp_size: 2, ..prefill(&[512]) };
    assert_eq!(again(2, sharded), Err(PeerError::Changed { what: "dcp_size", first: 1, now: 2 }));
}

fn with_states(mut local: LocalGeometry) -> LocalGeometry {
    local.groups = vec![GroupKind::Attention, GroupKind::Ssm];
    local.states = Some(StateGeometry {
        conv: ConvSplit::mamba1(4, 4, 1, 2).unwrap(),
        sizes: [8, 16],
        num_blocks: 4,
        regions: vec![],
        scratch_regions: vec![],
        ple: None,
    });
    local
}

#[test]
fn state_has_rules_of_its_own() {
    let mla = LocalGeometry { topology: LocalTopology::mla(0, 2), ..decode(0, 2, 1, &[576]) };
    let mut sharded = with_states(mla.clone());
    sharded.topology.sizes.dcp = 2;
    let error = PeerError::StateContext { local: 2, remote: 1 };
    assert_eq!(refused(&sharded, 2, &prefill(&[576])), (error, ErrorKind::Runtime));
    let logical = AgentMetadataV14 { physical_blocks_per_logical_kv_block: 2, ..prefill(&[576]) };
    let mut local = with_states(mla);
    let error = PeerError::StatePrefixCaching { local: 1, remote: 2 };
    assert_eq!(refused(&local, 2, &logical), (error, ErrorKind::Runtime));
    local.prefix_caching = false;
    assert!(validate(&local, ParallelSizes::tp(2), &logical).is_ok());
    // Latent pages beside state differ by the block size only.
    let smaller = AgentMetadataV14 { block_size: 8, ..prefill(&[288]) };
    assert!(validate(&local, ParallelSizes::tp(2), &smaller).is_ok());
    let error = PeerError::BlockLen { region: 0, expected: 288, got: 576 };
    let wrong = AgentMetadataV14 { block_size: 8, ..prefill(&[576]) };
    assert_eq!(refused(&local, 2, &wrong), (error, ErrorKind::Assertion));
}

#[test]
fn more_remote_ranks_than_heads_are_refused_without_state() {
    let local = decode(0, 2, 4, &[2048]);
    let error = PeerError::SharedHeads { remote: 8, heads: 4 };
    assert_eq!(refused(&local, 8, &prefill(&[1024])), (error, ErrorKind::Assertion));
    assert!(validate(&with_states(local), ParallelSizes::tp(8), &prefill(&[1024])).is_ok());
}

#[test]
fn context_parallel_regions_of_other_groups_need_kernel_blocks() {
    let mut local = LocalGeometry { topology: LocalTopology::mla(0, 2), ..decode(0, 2, 1, &[576]) };
    local.topology.sizes.dcp = 2;
    local.blocks_per_logical = 2;
    let groups = AgentMetadataV14 { region_group_ids: Some(vec![1]), ..prefill(&[576]) };
    assert_eq!(refused(&local, 2, &groups), (PeerError::ContextRegions, ErrorKind::NotImplemented));
    local.blocks_per_logical = 1;
    assert!(validate(&local, ParallelSizes::tp(2), &groups).unwrap().differs_in_groups);
}

#[test]
fn conversions_have_conditions() {
    let smaller = AgentMetadataV14 { block_size: 8, ..prefill(&[512]) };
    let mut local = decode(0, 1, 4, &[1024]);
    assert_eq!(validate(&local, ParallelSizes::tp(1), &smaller).unwrap().block_size_ratio, 2);
    local.host_buffer = true;
    let error = (PeerError::HostBufferBlockSizes, ErrorKind::Assertion);
    assert_eq!(refused(&local, 1, &smaller), error);
    let smaller = AgentMetadataV14 { block_size: 8, ..prefill(&[256]) };
    let error = (PeerError::SlicedSubBlocks(2), ErrorKind::Assertion);
    assert_eq!(refused(&decode(0, 1, 4, &[1024]), 2, &smaller), error);
    let mut local = decode(0, 1, 4, &[1024]);
    local.attn_backend = "CPU_ATTN".to_owned();
    assert!(validate(&local, ParallelSizes::tp(1), &prefill(&[1024])).unwrap().repack_attention);
    local.hma_required = true;
    let error = (PeerError::RepackHybrid("CPU_ATTN".to_owned()), ErrorKind::Runtime);
    assert_eq!(refused(&local, 1, &prefill(&[1024])), error);
    let mut local = decode(0, 2, 4, &[1024]);
    local.layout = Layout::Blnhc;
    let scattered = AgentMetadataV14 { kv_cache_layout: "BLNHC".to_owned(), ..prefill(&[2048]) };
    let error = (PeerError::ScatteredHeads("BLNHC".to_owned()), ErrorKind::Runtime);
    assert_eq!(refused(&local, 1, &scattered), error);
}

#[test]
fn lists_must_agree_with_the_local_regions() {
    let local = decode(0, 1, 4, &[1024, 1024]);
    let good = prefill(&[1024, 1024]);
    let length = |what, got| (PeerError::ListLength { what, expected: 2, got }, ErrorKind::Assertion);
    assert_eq!(refused(&local, 1, &prefill(&[1024])), length("block lengths", 1));
    let bases = AgentMetadataV14 { kv_caches_base_addr: vec![1], ..good.clone() };
    assert_eq!(refused(&local, 1, &bases), length("base addresses", 1));
    let counts = AgentMetadataV14 { region_num_blocks: Some(vec![4, 4, 4]), ..good.clone() };
    assert_eq!(refused(&local, 1, &counts), length("block counts", 3));
    let strides = AgentMetadataV14 { block_strides: vec![1024], ..good.clone() };
    assert_eq!(refused(&local, 1, &strides), length("block strides", 1));
    let short = AgentMetadataV14 { block_strides: vec![1024, 1023], ..good.clone() };
    let error = PeerError::ShortStride { region: 1, stride: 1023, len: 1024 };
    assert_eq!(refused(&local, 1, &short), (error, ErrorKind::Assertion));
    let groups = AgentMetadataV14 { region_group_ids: Some(vec![0]), ..good.clone() };
    assert_eq!(refused(&local, 1, &groups), length("cache groups", 1));
    let names = AgentMetadataV14 { region_names: Some(vec!["l1".into(), "l0".into()]), ..good.clone() };
    let error = PeerError::RegionName { region: 0, expected: "l0".to_owned(), got: "l1".to_owned() };
    assert_eq!(refused(&local, 1, &names), (error, ErrorKind::Assertion));
    let memory = AgentMetadataV14 { region_mem_types: Some(vec!["VRAM".into()]), ..good.clone() };
    assert_eq!(refused(&local, 1, &memory), length("memory types", 1));
    let mixed =
        AgentMetadataV14 { region_mem_types: Some(vec!["VRAM".into(), "DRAM".into()]), ..good.clone() };
    assert_eq!(refused(&local, 1, &mixed), (PeerError::MixedMemory, ErrorKind::NotImplemented));
    let negative = AgentMetadataV14 { num_blocks: -1, ..good.clone() };
    let error = PeerError::Number { what: "num_blocks", value: -1 };
    assert_eq!(refused(&local, 1, &negative), (error, ErrorKind::Assertion));
    let peer = validate(&local, ParallelSizes::tp(1), &good).unwrap();
    assert_eq!((peer.memory, peer.regions.len()), (MemoryType::Vram, 2));
}

#[test]
fn a_stage_sees_its_window_of_the_peers_regions() {
    let mut local = decode(0, 1, 4, &[1024, 1024]);
    local.routing = RegionRouting::Window { first: 1 };
    let mut metadata = prefill(&[512, 1024, 1024, 512]);
    metadata.region_names = Some(["x", "l0", "l1", "y"].map(str::to_owned).to_vec());
    let peer = validate(&local, ParallelSizes::tp(1), &metadata).unwrap();
    let bases: Vec<u64> = peer.regions.iter().map(|region| region.base_address).collect();
    assert_eq!(bases, metadata.kv_caches_base_addr[1..3]);
    local.routing = RegionRouting::Window { first: 3 };
    let error = PeerError::ListLength { what: "base addresses", expected: 5, got: 4 };
    assert_eq!(refused(&local, 1, &metadata), (error, ErrorKind::Assertion));
}

/// A stage with layers a and b in regions of their own, in the order b, a.
fn by_layer() -> LocalGeometry {
    let mut local = LocalGeometry { topology: LocalTopology::mla(0, 1), ..decode(0, 1, 1, &[96, 128]) };
    let layer = |name: &str, region, group| RoutedLayer { name: name.to_owned(), region, group };
    local.routing = RegionRouting::ByLayer(vec![layer("b", 1, 1), layer("a", 0, 0)]);
    local.groups = vec![GroupKind::Attention; 2];
    local
}

fn members(lens: &[i64], names: &[&[&str]]) -> AgentMetadataV14 {
    let names = names.iter().map(|names| names.iter().map(|name| (*name).to_owned()).collect());
    AgentMetadataV14 { region_members: names.collect(), ..prefill(lens) }
}

#[test]
fn regions_are_matched_by_layer() {
    let local = by_layer();
    let metadata = members(&[96, 64, 128], &[&["a"], &["z"], &["b"]]);
    let peer = validate(&local, ParallelSizes::tp(1), &metadata).unwrap();
    let bases: Vec<u64> = peer.regions.iter().map(|region| region.base_address).collect();
    assert_eq!(bases, [metadata.kv_caches_base_addr[2], metadata.kv_caches_base_addr[0]]);
    let ids = super::super::DescriptorIndex::remote(&local, &peer).unwrap().ids(&[vec![1], vec![2]]);
    assert_eq!(ids, Ok(vec![2, 5]));
    let list = descriptors::remote_descriptors(&local, &peer).unwrap();
    assert_eq!((list[2].address, list[2].len), (bases[0] + 256, 128));
    // A packed row is narrowed to the page of the layer.
    let mut packed = members(&[96 + 128], &[&["a", "b"]]);
    packed.packed_member_layouts = vec![("a".to_owned(), [0, 96]), ("b".to_owned(), [96, 128])];
    packed.block_strides = vec![96 + 128];
    let peer = validate(&local, ParallelSizes::tp(1), &packed).unwrap();
    assert_eq!(peer.regions[0].base_address, packed.kv_caches_base_addr[0] + 96);
    assert_eq!((peer.regions[0].block_len, peer.regions[0].block_stride), (128, 224));
}

#[test]
fn layers_that_do_not_match_are_refused() {
    let local = by_layer();
    let assertion = |error| (error, ErrorKind::Assertion);
    let missing = members(&[96], &[&["a"]]);
    assert_eq!(refused(&local, 1, &missing), assertion(PeerError::MissingLayer("b".to_owned())));
    let repeated = members(&[96, 128], &[&["a", "b"], &["b"]]);
    assert_eq!(refused(&local, 1, &repeated), assertion(PeerError::RepeatedLayer("b".to_owned())));
    let error = PeerError::ListLength { what: "region members", expected: 2, got: 0 };
    assert_eq!(refused(&local, 1, &prefill(&[96, 128])), assertion(error));
    let blocks = AgentMetadataV14 { block_size: 8, ..members(&[96, 128], &[&["a"], &["b"]]) };
    let error = PeerError::RoutedBlockSizes { local: 16, remote: 8 };
    assert_eq!(refused(&local, 1, &blocks), (error, ErrorKind::NotImplemented));
    let heads = LocalGeometry { topology: LocalTopology::new(0, 1, 8), ..local.clone() };
    let error = PeerError::RoutedSizes { local: 1, remote: 2 };
    let metadata = members(&[96, 128], &[&["a"], &["b"]]);
    assert_eq!(refused(&heads, 2, &metadata), (error, ErrorKind::NotImplemented));
    for layout in [[200, 128], [-1, 128], [0, 0], [0, 64], [i64::MAX, 128]] {
        let mut packed = members(&[224], &[&["a", "b"]]);
        packed.packed_member_layouts = vec![("a".to_owned(), [0, 96]), ("b".to_owned(), layout)];
        assert_eq!(refused(&local, 1, &packed), assertion(PeerError::PackedLayer("b".to_owned())));
    }
}

#[test]
fn v2_peers_equal_vllm() {
    let vectors = vectors("topology_v013.json");
    let cases = list(&vectors["descriptor_cases"]);
    let mut seen = 0;
    for case in cases.iter().filter(|case| case["kind"].as_str().unwrap().starts_with("add_remote_agent")) {
        seen += 1;
        let (local, metadata) = v2_case(&case["in"]);
        let sizes = ParallelSizes::tp(u32::try_from(case["in"]["remote_tp_size"].as_u64().unwrap()).unwrap());
        let request = PeerRequest { engine_id: "prefill", sizes, known: None };
        let answer = validate_peer(&local, &request, &NixlAgentMetadata::V2(metadata));
        match case["out"].get("error").and_then(Value::as_str) {
            Some("AssertionError") => {
                assert_eq!(answer.unwrap_err().kind(), ErrorKind::Assertion, "{}", case["kind"]);
            }
            Some("RuntimeError") => {
                assert_eq!(answer.unwrap_err().kind(), ErrorKind::Runtime, "{}", case["kind"]);
            }
            Some(other) => panic!("{other}"),
            None => {
                let peer = answer.unwrap();
                let list: Vec<[u64; 3]> = descriptors::remote_descriptors(&local, &peer)
                    .unwrap()
                    .into_iter()
                    .map(|entry| [entry.address, entry.len, entry.device])
                    .collect();
                let expected: Vec<[u64; 3]> = serde_json::from_value(case["out"].clone()).unwrap();
                assert_eq!(list, expected, "{}", case["kind"]);
                let registered = case["local_handles_registered"].as_u64().unwrap();
                assert_eq!(u64::from(peer.block_size_ratio > 1), registered, "{}", case["kind"]);
            }
        }
    }
    assert_eq!(seen, 16);
}

fn v2_case(input: &Value) -> (LocalGeometry, AgentMetadataV2) {
    let number = |key: &str| input[key].as_u64().unwrap();
    let small = |key: &str| u32::try_from(number(key)).unwrap();
    let int = |key: &str| input[key].as_i64().unwrap();
    let text = |key: &str| input[key].as_str().unwrap().to_owned();
    let lens: Vec<u64> = serde_json::from_value(input["local_block_len"].clone()).unwrap();
    let regions = lens.iter().map(|len| region("layer", 0, *len)).collect();
    let mut topology = LocalTopology::new(small("tp_rank"), small("tp_size"), small("total_num_kv_heads"));
    topology.is_mla = input["is_mla"].as_bool().unwrap();
    let mut local = LocalGeometry::new(Generation::V2, "decode", topology, regions);
    local.block_size = number("block_size");
    local.layout = Layout::parse(&text("layout")).unwrap();
    local.halves = input["backend"] == "FLASHINFER";
    let metadata = AgentMetadataV2 {
        engine_id: "prefill".to_owned(),
        agent_metadata: vec![],
        kv_caches_base_addr: serde_json::from_value(input["remote_base"].clone()).unwrap(),
        device_id: int("remote_device_id"),
        num_blocks: int("remote_num_blocks"),
        block_lens: serde_json::from_value(input["remote_block_lens"].clone()).unwrap(),
        kv_cache_layout: text("remote_layout"),
        block_size: int("remote_block_size"),
    };
    (local, metadata)
}

#[test]
fn v2_platforms_may_need_equal_sizes() {
    let vectors = vectors("topology_v013.json");
    let case = list(&vectors["descriptor_cases"])
        .iter()
        .find(|case| case["kind"] == "add_remote_agent: D4 P2")
        .unwrap();
    let (mut local, metadata) = v2_case(&case["in"]);
    local.equal_sizes_only = true;
    let request = PeerRequest { engine_id: "prefill", sizes: ParallelSizes::tp(2), known: None };
    let answer = validate_peer(&local, &request, &NixlAgentMetadata::V2(metadata));
    assert_eq!(answer, Err(PeerError::UnequalSizes(2)));
}

proptest! {
    #[test]
    fn hostile_metadata_is_refused_or_described_within_bounds(
        bases in proptest::collection::vec(any::<u64>(), 0..4),
        lens in proptest::collection::vec(prop_oneof![Just(1024_i64), any::<i64>()], 0..4),
        strides in proptest::collection::vec(prop_oneof![Just(1024_i64), any::<i64>()], 0..4),
        counts in proptest::option::of(proptest::collection::vec(any::<i64>(), 0..4)),
        groups in proptest::option::of(proptest::collection::vec(any::<i64>(), 0..4)),
        numbers in proptest::collection::vec(prop_oneof![Just(1_i64), Just(16), any::<i64>()], 8),
        tp in prop_oneof![1_u32..5, any::<u32>()], states in any::<bool>(), routing in 0_u8..3,
    ) {
        let mut local = decode(0, 1, 4, &[1024, 1024]);
        if states {
            local = with_states(local);
        }
        local.routing = match routing {
            0 => RegionRouting::Whole,
            1 => RegionRouting::Window { first: 1 },
            _ => RegionRouting::ByLayer(vec![RoutedLayer { name: "a".to_owned(), region: 0, group: 0 }]),
        };
        let metadata = AgentMetadataV14 {
            engine_id: "prefill".to_owned(),
            kv_caches_base_addr: bases,
            block_lens: lens,
            block_strides: strides,
            region_num_blocks: counts,
            region_group_ids: groups,
            num_blocks: numbers[0],
            device_id: numbers[1],
            block_size: numbers[2],
            ssm_sizes: [numbers[3], numbers[4]],
            physical_blocks_per_logical_kv_block: numbers[5],
            pcp_size: numbers[6],
            dcp_size: 1,
            kv_cache_layout: "LBHNC".to_owned(),
            region_members: vec![vec!["a".to_owned()], vec!["b".to_owned()]],
            packed_member_layouts: vec![("a".to_owned(), [numbers[7], 1024])],
            ..AgentMetadataV14::default()
        };
        if let Ok(peer) = validate(&local, ParallelSizes::tp(tp), &metadata) {
            let _ = super::super::DescriptorIndex::remote(&local, &peer);
            if let Ok(list) = descriptors::remote_descriptors(&local, &peer) {
                prop_assert!(list.len() as u64 <= super::super::MAX_DESCRIPTORS);
            }
        }
    }
}
