use serde_json::Value;

use super::*;
use crate::golden::{groups, list, vectors};

fn out(case: &Value) -> Vec<u64> {
    list(&case["out"]).iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn v14_attention_ids_equal_vllm() {
    let vectors = vectors("desc_ids_v032.json");
    let mut seen = 0;
    for case in list(&vectors["cases"]) {
        let input = &case["in"];
        // State-space groups and routing by layer name are not part of the attention ids.
        if input.get("_has_mamba").is_some() || input.get("_transfer_layer_group_ids").is_some() {
            continue;
        }
        seen += 1;
        let ratio = input["block_size_ratio"].as_u64().unwrap_or(1);
        let regions = usize::try_from(input["num_regions"].as_u64().unwrap()).unwrap();
        let counts: Vec<u64> = match input.get("_rn") {
            Some(counts) => {
                list(counts).iter().take(regions).map(|count| count.as_u64().unwrap() * ratio).collect()
            }
            None => vec![input["dst_num_blocks"].as_u64().unwrap() * ratio; regions],
        };
        let group_ids = input.get("region_group_ids").or(input.get("_rg")).unwrap();
        let region_groups: Vec<i64> = list(group_ids).iter().map(|group| group.as_i64().unwrap()).collect();
        let counts = if counts.len() < region_groups.len() {
            list(&input["_rn"]).iter().map(|count| count.as_u64().unwrap() * ratio).collect()
        } else {
            counts
        };
        let ids = descriptor_ids(&counts, &region_groups, &groups(&input["block_ids"]));
        assert_eq!(ids, Some(out(case)), "{}", case["name"]);
    }
    assert_eq!(seen, 10);
}

#[test]
fn v2_ids_of_all_regions_equal_vllm() {
    let vectors = vectors("desc_ids_v013.json");
    let mut seen = 0;
    for case in list(&vectors["cases"]).iter().filter(|case| case["in"]["layer_idx"].is_null()) {
        seen += 1;
        let input = &case["in"];
        let ratio = input["block_size_ratio"].as_u64().unwrap_or(1);
        let regions = usize::try_from(input["num_regions"].as_u64().unwrap()).unwrap();
        let counts = vec![input["num_blocks"].as_u64().unwrap() * ratio; regions];
        let block_ids: Vec<u64> = list(&input["block_ids"]).iter().map(|id| id.as_u64().unwrap()).collect();
        assert_eq!(
            descriptor_ids(&counts, &vec![0; regions], &[block_ids]),
            Some(out(case)),
            "{}",
            case["name"]
        );
    }
    assert_eq!(seen, 3);
}

#[test]
fn a_group_without_a_region_is_noticed() {
    assert_eq!(descriptor_ids(&[10, 10], &[0, 1], &[vec![], vec![], vec![3]]), None);
}

#[test]
fn local_descriptors_follow_base_stride_and_sub_blocks() {
    let region = |base_address, block_len, block_stride, num_blocks| Region {
        name: "layer".to_owned(),
        base_address,
        block_len,
        block_stride,
        num_blocks,
        memory: MemoryType::Dram,
        group: 0,
    };
    let pairs = |descriptors: Vec<Descriptor>| -> Vec<(u64, u64)> {
        descriptors.into_iter().map(|descriptor| (descriptor.address, descriptor.len)).collect()
    };
    let dense = [region(4096, 1024, 1024, 3), region(100_000, 1024, 1024, 3)];
    assert_eq!(
        pairs(local_descriptors(&dense, 2, 1)),
        [(4096, 1024), (5120, 1024), (6144, 1024), (100_000, 1024), (101_024, 1024), (102_048, 1024)]
    );
    let strided = [region(4096, 1024, 2048, 2), region(5120, 1024, 2048, 3)];
    assert_eq!(
        pairs(local_descriptors(&strided, 0, 2)),
        [
            (4096, 512),
            (4608, 512),
            (6144, 512),
            (6656, 512),
            (5120, 512),
            (5632, 512),
            (7168, 512),
            (7680, 512),
            (9216, 512),
            (9728, 512)
        ]
    );
    assert_eq!(strided[1].span(), 2 * 2048 + 1024);
}

#[test]
fn logical_ids_expand_to_kernel_ids() {
    assert_eq!(kernel_block_ids(&[2, 3], 2), [4, 5, 6, 7]);
    assert_eq!(kernel_block_ids(&[2, 3], 1), [2, 3]);
}
