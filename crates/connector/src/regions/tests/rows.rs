use super::super::descriptors::{
    DescriptorError, local_descriptors as local_list, remote_descriptors, split_local_descriptors,
};
use super::*;

#[test]
fn v2_lists_equal_vllm() {
    let golden = vectors("descriptors.json");
    let golden = &golden["v2_reimplemented"];
    let mut local = side(1, 2, 8, dense(&[1_048_576, 1_572_864], &[512, 512], 2));
    local.generation = Generation::V2;
    assert_eq!(local_list(&local, 1).unwrap(), triples(&golden["local_split_kv"]));
    let peer = |local: &LocalGeometry, bases: &[u64]| {
        let regions = bases
            .iter()
            .map(|base| RemoteRegion {
                base_address: *base,
                block_len: local.regions[0].block_len * 2,
                block_stride: local.regions[0].block_len * 2,
                num_blocks: 2,
                group: 0,
            })
            .collect();
        unchecked_peer(local, 1, regions, 2)
    };
    let remotes = remote_descriptors(&local, &peer(&local, &[9_437_184, 9_961_472])).unwrap();
    assert_eq!(remotes, triples(&golden["remote_split_kv_tp2_rank1"]));
    local.regions = dense(&[1_048_576], &[1024], 2);
    local.halves = true;
    assert_eq!(local_list(&local, 1).unwrap(), triples(&golden["local_blocks_first"]));
    assert_eq!(local_list(&local, 2).unwrap(), triples(&golden["local_blocks_first_ratio2"]));
    let remotes = remote_descriptors(&local, &peer(&local, &[9_437_184])).unwrap();
    assert_eq!(remotes, triples(&golden["remote_blocks_first_tp2_rank1"]));
}

#[test]
fn v2_local_lists_of_the_second_set_equal_vllm() {
    let vectors = vectors("topology_v013.json");
    let cases = list(&vectors["descriptor_cases"]);
    assert_eq!(cases.len(), 21);
    let mut seen = 0;
    for case in cases.iter().filter(|case| case["kind"].as_str().unwrap().starts_with("register_local")) {
        seen += 1;
        let input = &case["in"];
        let number = |key: &str| input[key].as_u64().unwrap();
        let regions =
            dense(&numbers(&input["base"]), &numbers(&input["block_len_per_layer"]), number("num_blocks"));
        let mut local = side(0, 1, 8, regions);
        local.halves = input["backend"] == "FLASHINFER";
        local.device = number("device_id");
        let ratio = number("block_size") / number("for_block_size");
        assert_eq!(local_list(&local, ratio).unwrap(), triples(&case["out"]), "{}", case["kind"]);
    }
    assert_eq!(seen, 5);
}

#[test]
fn t9_1_one_reader_of_four_and_of_six_ranks_splits_its_blocks() {
    splits_for_all_ranks(1);
}

#[test]
fn t9_2_two_readers_of_four_and_of_six_ranks_split_their_blocks() {
    splits_for_all_ranks(2);
}

fn splits_for_all_ranks(tp: u32) {
    let local = side(0, tp, 12, dense(&[4096], &[1200 / u64::from(tp)], 2));
    let list = local_list(&local, 1).unwrap();
    for remote_tp in [4, 6] {
        let sizes = ParallelSizes::tp(remote_tp);
        let mapping = local.topology.tp_mapping(sizes, &local.groups).unwrap();
        let ratio = remote_tp / tp;
        assert_eq!(mapping.tp_ratio, -i64::from(ratio));
        let ranks = crate::topology::handshake_ranks(0, local.topology.sizes, sizes).unwrap();
        assert_eq!(ranks, (0..ratio).collect::<Vec<_>>());
        assert_eq!(mapping.source_ranks, ranks);
        let splits = split_local_descriptors(&local, &mapping, &list, 1).unwrap();
        assert_eq!(splits.len(), ratio as usize);
        let len = list[0].len / u64::from(ratio);
        for (slot, split) in (0..).zip(&splits) {
            let expected: Vec<_> =
                list.iter().map(|d| Descriptor { address: d.address + slot * len, len, device: 0 }).collect();
            assert_eq!(*split, expected);
        }
    }
}

#[test]
fn t14_a_head_slice_of_a_packed_remote_block() {
    let mut local = side(1, 2, 2, dense(&[0x5000], &[1024], 1));
    local.groups = vec![GroupKind::Attention, GroupKind::Ssm];
    let remote =
        RemoteRegion { base_address: 0x1000, block_len: 2048, block_stride: 2048, num_blocks: 1, group: 0 };
    let peer = unchecked_peer(&local, 1, vec![remote], 1);
    let descriptor = Descriptor { address: 0x1000 + 1024, len: 1024, device: 0 };
    assert_eq!(remote_descriptors(&local, &peer), Ok(vec![descriptor]));
}

#[test]
fn t27_mixed_memory_is_divided_into_a_host_and_a_device_list() {
    let mut regions = dense(&[1000, 5000], &[64, 64], 2);
    regions[1].memory = MemoryType::Vram;
    let mut local = side(0, 1, 1, regions);
    local.device = 3;
    let mut list = local_list(&local, 1).unwrap();
    let split = MemorySplit::new(&local.regions, 1).unwrap();
    let (dram, vram) = split.divide(&list);
    let devices = |list: &[Descriptor]| list.iter().map(|entry| entry.device).collect::<Vec<_>>();
    assert_eq!(devices(&[dram.clone(), vram.clone()].concat()), [0, 0, 3, 3]);
    list.truncate(2);
    assert_eq!(dram.iter().map(|entry| entry.address).collect::<Vec<_>>(), [1000, 1064]);
    assert_eq!(vram.iter().map(|entry| entry.address).collect::<Vec<_>>(), [5000, 5064]);
    assert_eq!(MemorySplit::new(&local.regions[..1], 1), None);
}

#[test]
fn t28_ids_of_a_mixed_read_are_places_in_the_list_of_their_memory() {
    let mut regions = dense(&[1000, 5000], &[64, 64], 2);
    regions[1].memory = MemoryType::Vram;
    let split = MemorySplit::new(&regions, 1).unwrap();
    assert_eq!(split.translate(&[0, 2], &[5, 7]), Some(((vec![0], vec![5]), (vec![0], vec![7]))));
    assert_eq!(split.translate(&[4], &[5]), None);
    assert_eq!(split.translate(&[0, 1], &[5]), None);
}

#[test]
fn only_rank_0_moves_a_shared_host_pool() {
    assert!(!shares_host_pool(true, true, 0));
    assert!(shares_host_pool(true, true, 1));
    assert!(!shares_host_pool(false, true, 1));
    assert!(!shares_host_pool(true, false, 1));
}

#[test]
fn impossible_regions_give_errors() {
    let at = |region: Region| local_list(&side(0, 1, 8, vec![region]), 1);
    assert_eq!(at(region(u64::MAX - 10, 8, 8, 2)), Err(DescriptorError::AddressOverflow { region: 0 }));
    assert_eq!(at(region(0, 8, u64::MAX, 3)), Err(DescriptorError::AddressOverflow { region: 0 }));
    assert_eq!(at(region(0, 8, 8, 1 << 40)), Err(DescriptorError::TooMany { count: 1 << 40 }));
    let sub_blocks = local_list(&side(0, 1, 8, vec![region(0, 8, u64::MAX, 1 << 40)]), 2);
    assert_eq!(sub_blocks, Err(DescriptorError::AddressOverflow { region: 0 }));
    let local = side(0, 1, 8, dense(&[0], &[16], 2));
    let mapping = local.topology.tp_mapping(ParallelSizes::tp(2), &local.groups).unwrap();
    let list = local_list(&local, 2).unwrap();
    let sliced = split_local_descriptors(&local, &mapping, &list, 2);
    assert_eq!(sliced, Err(DescriptorError::SlicedSubBlocks));
}
