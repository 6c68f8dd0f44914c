use super::*;
use crate::topology::{DcpPair, ErrorKind, dcp_pair};

fn lists(value: &Value) -> Vec<Vec<u64>> {
    groups(value)
}

fn second_set(kind: &str) -> Vec<Value> {
    let vectors = vectors("topology_v032.json");
    list(&vectors["descriptor_cases"]).iter().filter(|case| case["kind"] == kind).cloned().collect()
}

fn check_split(kinds: &[GroupKind], local: &Value, remote: &Value, ratio: &Value, expected: &Value) {
    let pieces = split_into_remote_blocks(kinds, &lists(local), &lists(remote), ratio.as_u64().unwrap());
    let expected = lists(expected);
    // An empty list stands for a full hit.
    assert_eq!(pieces, (!expected.is_empty()).then_some(expected), "{local} {remote}");
}

#[test]
fn block_maps_equal_vllm() {
    let vectors = vectors("descriptors.json");
    let cases = list(&vectors["block_id_maps"]);
    assert_eq!(cases.len(), 12);
    for case in cases {
        let ratio = case["ratio"].as_u64().unwrap_or(1);
        match case["fn"].as_str().unwrap() {
            "get_mapped_blocks" => {
                assert_eq!(kernel_block_ids(&numbers(&case["block_ids"]), ratio), numbers(&case["out"]));
            }
            "map_for_ratio" => {
                let kinds = kinds(case.get("groups"));
                check_split(&kinds, &case["local"], &case["remote"], &case["ratio"], &case["out_local"]);
                assert_eq!(case["remote"], case["out_remote"]);
            }
            "logical_to_kernel" => {
                let expanded = expand_groups(&kinds(case.get("groups")), &lists(&case["block_ids"]), ratio);
                assert_eq!(expanded, lists(&case["out"]));
            }
            "block_ids_by_region" => {
                let by_region =
                    block_ids_by_region(&lists(&case["block_ids"]), &signed(&case["region_group_ids"]));
                assert_eq!(by_region, Ok(lists(&case["out"])));
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn block_maps_of_the_second_set_equal_vllm() {
    let cases = second_set("get_mapped_blocks");
    assert_eq!(cases.len(), 3);
    for case in cases {
        let ids = kernel_block_ids(&numbers(&case["in"]["block_ids"]), case["in"]["ratio"].as_u64().unwrap());
        assert_eq!(ids, numbers(&case["out"]));
    }
    let cases = second_set("map_block_ids_for_block_size_ratio");
    assert_eq!(cases.len(), 4);
    for case in cases {
        let input = &case["in"];
        let kinds = [GroupKind::Attention; 2];
        check_split(&kinds, &input["local"], &input["remote"], &input["ratio"], &case["out"]["local"]);
    }
    let cases = second_set("logical_to_kernel_block_ids");
    assert_eq!(cases.len(), 3);
    for case in cases {
        let ratio = case["in"]["ratio"].as_u64().unwrap();
        let ids = expand_groups(&[GroupKind::Attention; 2], &lists(&case["in"]["block_ids"]), ratio);
        assert_eq!(ids, lists(&case["out"]));
    }
    let cases = second_set("block_ids_by_region");
    assert_eq!(cases.len(), 1);
    let input = &cases[0]["in"];
    let ids = block_ids_by_region(&lists(&input["block_ids"]), &signed(&input["region_group_ids"]));
    assert_eq!(ids, Ok(lists(&cases[0]["out"])));
    let cases = second_set("clip_ssm_state_blocks");
    assert_eq!(cases.len(), 5);
    for case in cases {
        let slots = usize::try_from(case["in"]["num_spec_blocks"].as_u64().unwrap()).unwrap();
        let blocks = numbers(&case["in"]["blocks"]);
        assert_eq!(clip_state_blocks(&blocks, slots), numbers(&case["out"]));
    }
}

fn dcp_arguments(args: &Value, total: &Value) -> DcpPair {
    let small = |key: &str| u32::try_from(args[key].as_u64().unwrap()).unwrap();
    let size = |value: &Value| value.as_u64().map(|value| usize::try_from(value).unwrap());
    DcpPair {
        local_size: small("local_dcp_size"),
        local_rank: small("local_dcp_rank"),
        remote_size: small("remote_dcp_size"),
        remote_rank: small("remote_rank"),
        cached_blocks: size(&args["local_num_computed_blocks"]).unwrap(),
        total_blocks: size(total),
    }
}

#[test]
fn context_parallel_pairs_equal_vllm() {
    let first = vectors("descriptors.json");
    let first = list(&first["dcp_prefix"]);
    assert_eq!(first.len(), 18);
    let first = first
        .iter()
        .map(|case| (case["args"].clone(), case["num_remote_blocks"].clone(), case["out"].clone()));
    let second = second_set("apply_dcp_prefix_caching");
    assert_eq!(second.len(), 11);
    let second = second
        .iter()
        .map(|case| (case["in"].clone(), case["in"]["num_remote_blocks"].clone(), case["out"].clone()));
    for (args, total, out) in first.chain(second) {
        let pair = dcp_arguments(&args, &total);
        let paired = dcp_pair(pair, &numbers(&args["local_ids"]), &numbers(&args["remote_ids"]));
        if out.get("error").is_some() {
            let error = PairError::from(paired.unwrap_err());
            assert_eq!(error.kind(), ErrorKind::Value, "{args}");
            continue;
        }
        let expected = match out.as_array() {
            Some(pair) => (numbers(&pair[0]), numbers(&pair[1])),
            None => (numbers(&out["local"]), numbers(&out["remote"])),
        };
        assert_eq!(paired, Ok(expected), "{args}");
    }
}

/// An empty decode list selects nothing here, where a slice of the last 0 entries takes all.
fn without_unselected(expected: PairedBlocks) -> PairedBlocks {
    let PairedBlocks { decode, mut prefill } = expected;
    for (decode, prefill) in decode.iter().zip(&mut prefill) {
        if decode.is_empty() {
            prefill.clear();
        }
    }
    PairedBlocks { decode, prefill }
}

#[test]
fn prefix_hits_are_paired_as_by_vllm() {
    let first = vectors("descriptors.json");
    let first = list(&first["prefix_caching"]);
    assert_eq!(first.len(), 10);
    let first = first.iter().map(|case| (case.clone(), case["out"].clone()));
    let second = second_set("apply_prefix_caching");
    assert_eq!(second.len(), 10);
    let second = second.iter().map(|case| (case["in"].clone(), case["out"].clone()));
    for (input, out) in first.chain(second) {
        let per_logical = |key: &str| input[key].as_u64().unwrap();
        let blocks = PairedBlocks { decode: lists(&input["decode"]), prefill: lists(&input["prefill"]) };
        let paired = pair_block_ids(
            &kinds(input.get("groups")),
            blocks,
            per_logical("decode_ppl"),
            per_logical("prefill_ppl"),
        );
        if out.get("error").is_some() {
            assert_eq!(paired.unwrap_err().kind(), ErrorKind::Assertion, "{input}");
            continue;
        }
        let [decode, prefill] = match out.as_array() {
            Some(pair) => [lists(&pair[0]), lists(&pair[1])],
            None => [lists(&out["decode"]), lists(&out["prefill"])],
        };
        assert_eq!(paired, Ok(without_unselected(PairedBlocks { decode, prefill })), "{input}");
    }
}

#[test]
fn an_empty_decode_group_selects_nothing() {
    let groups = [GroupKind::Attention, GroupKind::Ssm];
    let blocks = PairedBlocks { decode: vec![vec![], vec![]], prefill: vec![vec![1, 2], vec![3]] };
    let paired = pair_block_ids(&groups, blocks, 1, 1).unwrap();
    assert_eq!(paired.prefill, [vec![], Vec::<u64>::new()]);
}

#[test]
fn regions_are_paired_by_tail_or_by_position() {
    let tails = RegionPairing { known: None, local_dcp: 1, local_dcp_rank: 0, remote_dcp: 1, remote_rank: 0 };
    let decode = [vec![7, 8], vec![]];
    let prefill = [vec![1, 2, 3], vec![4]];
    let paired = pair_by_region(tails, &decode, &prefill).unwrap();
    assert_eq!(paired.prefill, [vec![2, 3], vec![]]);
    let short = pair_by_region(tails, &[vec![7, 8]], &[vec![1]]);
    let error = PairError::RegionUncovered { region: 0, decode: 2, prefill: 1 };
    assert_eq!(short, Err(error));
    assert_eq!(error.kind(), ErrorKind::Value);
    // One of two regions has a cached block; five blocks in all, one of them padding on this side.
    let known = RegionPairing { known: Some((&[1, 0], 3)), ..tails };
    let paired =
        pair_by_region(known, &[vec![11, 12, 13], vec![20, 21, 22, 23]], &[vec![1, 2, 3], vec![4, 5, 6]])
            .unwrap();
    assert_eq!(paired.decode, [vec![11, 12], vec![20, 21, 22]]);
    assert_eq!(paired.prefill, [vec![2, 3], vec![4, 5, 6]]);
    let empty = pair_by_region(known, &[vec![], vec![]], &[vec![1], vec![2]]).unwrap();
    assert_eq!(empty.prefill, [Vec::<u64>::new(), vec![]]);
    assert_eq!(block_ids_by_region(&[vec![1]], &[2]), Err(PairError::NoGroup { group: 2 }));
    assert_eq!(block_ids_by_region(&[vec![1]], &[-2]), Err(PairError::NoGroup { group: -2 }));
}

#[test]
fn v2_pairs_the_tail_of_the_remote_list() {
    assert_eq!(v2::pair_blocks(&[7, 8], &[1, 2, 3], 1), Some((vec![7, 8], vec![2, 3])));
    assert_eq!(
        v2::pair_blocks(&[1, 2], &[1, 2, 3, 4, 5], 4),
        Some((vec![4, 5, 6, 7, 8], vec![1, 2, 3, 4, 5]))
    );
    assert_eq!(v2::pair_blocks(&[1, 2], &[1], 1), None);
}
