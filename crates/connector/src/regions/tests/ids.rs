use proptest::prelude::*;

use super::*;

/// The index that a case of `desc_ids_v032.json` describes.
fn index_of(input: &Value) -> DescriptorIndex {
    let ratio = input["block_size_ratio"].as_u64().unwrap_or(1);
    let num_blocks = input["dst_num_blocks"].as_u64().unwrap();
    let regions = usize::try_from(input["num_regions"].as_u64().unwrap()).unwrap();
    let counts = input.get("_rn").map_or_else(|| vec![num_blocks; regions], numbers);
    let counts: Vec<u64> = counts.into_iter().map(|count| count * ratio).collect();
    if let Some(layers) = input.get("_transfer_layer_group_ids") {
        let groups = numbers(layers).into_iter().map(|group| usize::try_from(group).unwrap()).collect();
        return DescriptorIndex::by_layer(counts, groups).unwrap();
    }
    if input.get("_has_mamba").is_some() {
        // These cases have three projections, hence four descriptor regions per layer.
        let state_regions = input.get("_ssm_region_indices").map_or(regions, |indices| list(indices).len());
        let logical = num_blocks / input["physical_blocks_per_logical"].as_u64().unwrap();
        let kinds = kinds(input.get("_group_spec_types"));
        let states = (4 * state_regions as u64, logical);
        return DescriptorIndex::hybrid(counts, kinds, vec![], states).unwrap();
    }
    let groups = input.get("region_group_ids").or(input.get("_rg")).unwrap();
    DescriptorIndex::new(counts, signed(groups)).unwrap()
}

#[test]
fn ids_equal_vllm() {
    let vectors = vectors("desc_ids_v032.json");
    let cases = list(&vectors["cases"]);
    assert_eq!(cases.len(), 15);
    for case in cases {
        let index = index_of(&case["in"]);
        let ids = index.ids(&groups(&case["in"]["block_ids"]));
        assert_eq!(ids, Ok(numbers(&case["out"])), "{}", case["name"]);
    }
}

#[test]
fn ids_of_the_second_set_equal_vllm() {
    let vectors = vectors("descriptors.json");
    let cases = list(&vectors["desc_ids"]);
    assert_eq!(cases.len(), 13);
    for case in cases {
        let (worker, args, name) = (&case["worker"], &case["args"], case["name"].as_str().unwrap());
        let ratio = args["block_size_ratio"].as_u64().unwrap_or(1);
        let counts = args.get("region_num_blocks").map_or_else(|| numbers(&worker["nblk"]), numbers);
        let counts: Vec<u64> = counts.into_iter().map(|count| count * ratio).collect();
        let block_ids = groups(&args["block_ids"]);
        let index = if worker.get("ssm").is_some() {
            let parts = if name.contains("mamba1") { 1 } else { 3 };
            let logical = args["dst_num_blocks"].as_u64().unwrap() / worker["ppl"].as_u64().unwrap();
            let regions = counts.len() as u64 * (parts + 1);
            DescriptorIndex::hybrid(counts, kinds(worker.get("groups")), vec![], (regions, logical)).unwrap()
        } else {
            let groups = args.get("region_group_ids").or(worker.get("gids"));
            let groups = groups.map_or_else(|| vec![0; counts.len()], signed);
            DescriptorIndex::new(counts, groups).unwrap()
        };
        assert_eq!(index.ids(&block_ids), Ok(numbers(&case["ids"])), "{name}");
        if name == "by_region" {
            assert_eq!(index.ids_by_region(&block_ids), Ok(numbers(&case["ids"])));
        }
    }
}

#[test]
fn v2_ids_equal_vllm() {
    let vectors = vectors("desc_ids_v013.json");
    let cases = list(&vectors["cases"]);
    assert_eq!(cases.len(), 5);
    for case in cases {
        let input = &case["in"];
        let size = |key: &str| usize::try_from(input[key].as_u64().unwrap()).unwrap();
        let blocks = input["num_blocks"].as_u64().unwrap() * input["block_size_ratio"].as_u64().unwrap_or(1);
        let block_ids = numbers(&input["block_ids"]);
        let regions = size("num_regions");
        let ids = match input["layer_idx"].as_u64() {
            None => v2::uniform_index(regions, blocks).unwrap().ids(&[block_ids]),
            Some(layer) => {
                let per_layer = regions / size("num_layers");
                v2::layer_ids(usize::try_from(layer).unwrap(), per_layer, blocks, &block_ids)
            }
        };
        assert_eq!(ids, Ok(numbers(&case["out"])), "{}", case["name"]);
    }
}

#[test]
fn layers_with_local_attention_take_the_tail() {
    // Chunks of 8,192 tokens in blocks of 4,096; layer 1 sees everything.
    let window = Some(v2::chunk_blocks(8192, 4096));
    assert_eq!(window, Some(2));
    let windows = [window, None];
    assert_eq!(v2::windowed_ids(&windows, 2, 10, &[1, 2, 3]), Ok(vec![2, 3, 12, 13, 21, 22, 23, 31, 32, 33]));
    // The other side has another number of blocks and pairs entry by entry.
    let remote = v2::windowed_ids(&windows, 2, 20, &[7, 8, 9]).unwrap();
    assert_eq!(remote, [8, 9, 28, 29, 47, 48, 49, 67, 68, 69]);
    let out_of_range = v2::windowed_ids(&windows, 2, 3, &[1, 2, 3]);
    assert_eq!(out_of_range, Err(IdError::OutOfRange { id: 3, len: 3 }));
}

#[test]
fn halves_double_the_regions() {
    let mut local = side(0, 1, 8, dense(&[1000, 5000], &[64, 64], 10));
    local.halves = true;
    let index = DescriptorIndex::local(&local, 1).unwrap();
    assert_eq!(index.ids(&[vec![1, 2]]), Ok(vec![1, 2, 11, 12, 21, 22, 31, 32]));
}

#[test]
fn scratch_groups_select_their_own_regions() {
    let kinds = vec![GroupKind::Attention, GroupKind::Scratch, GroupKind::Ssm];
    let index = DescriptorIndex::hybrid(vec![4, 4, 4], kinds, vec![1], (2, 4)).unwrap();
    assert_eq!(index.ids(&[vec![0], vec![3], vec![2]]), Ok(vec![0, 4, 8, 7, 14, 18]));
}

#[test]
fn blocks_out_of_range_never_select_another_region() {
    let index = DescriptorIndex::new(vec![4, 2], vec![0, 1]).unwrap();
    assert_eq!(index.ids(&[vec![3], vec![1]]), Ok(vec![3, 5]));
    assert_eq!(index.ids(&[vec![3], vec![2]]), Err(IdError::OutOfRange { id: 2, len: 2 }));
    assert_eq!(index.ids(&[vec![], vec![], vec![0]]), Err(IdError::NoRegion { group: 2 }));
    assert_eq!(index.ids_by_region(&[vec![0]]), Err(IdError::ListCount { expected: 2, got: 1 }));
    assert_eq!(DescriptorIndex::new(vec![u64::MAX, 1], vec![0, 0]), Err(IdError::BadCounts));
    let states = DescriptorIndex::hybrid(vec![1], vec![GroupKind::Ssm], vec![], (u64::MAX, 2));
    assert_eq!(states, Err(IdError::BadCounts));
    let layers = DescriptorIndex::by_layer(vec![4], vec![3]).unwrap();
    assert_eq!(layers.ids(&[vec![0]]), Err(IdError::ListCount { expected: 4, got: 1 }));
}

proptest! {
    #[test]
    fn an_index_agrees_with_the_plain_function(
        counts in proptest::collection::vec(1_u64..50, 1..6),
        groups in proptest::collection::vec(-1_i64..3, 6),
        lists in proptest::collection::vec(proptest::collection::vec(0_u64..50, 0..8), 1..4),
    ) {
        let groups = &groups[..counts.len()];
        let index = DescriptorIndex::new(counts.clone(), groups.to_vec()).unwrap();
        if let Ok(ids) = index.ids(&lists) {
            prop_assert_eq!(Some(ids), descriptor_ids(&counts, groups, &lists));
        }
    }
}
