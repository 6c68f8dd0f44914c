use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::golden::{list, vectors};

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<u32> {
    list(value).iter().map(number).collect()
}

fn kinds(value: &Value) -> Vec<GroupKind> {
    let kind = |group: &Value| match group.as_str().unwrap() {
        "SSM" => GroupKind::Ssm,
        _ => GroupKind::Attention,
    };
    list(value).iter().map(kind).collect()
}

fn is_error(value: &Value) -> bool {
    value.get("error").is_some()
}

#[test]
fn ratios_ranks_and_consumers_equal_vllm() {
    let vectors = vectors("notifications.json");
    let cases = list(&vectors["topology_v14"]);
    assert_eq!(cases.len(), 37);
    for case in cases {
        let number = |key: &str| case[key].as_u64().map_or(1, |n| u32::try_from(n).unwrap());
        let local = ParallelSizes { tp: number("local_tp"), dcp: number("local_dcp") };
        let remote = ParallelSizes { tp: number("remote_tp"), dcp: number("remote_dcp") };
        if let Some(ratio) = case["tp_ratio"].as_i64() {
            assert_eq!(tp_ratio(local.tp, remote.tp), Ok(ratio), "{case}");
        }
        let rank = u32::try_from(case["local_rank"].as_u64().unwrap()).unwrap();
        let ranks = handshake_ranks(rank, local, remote).unwrap();
        assert_eq!(ranks, numbers(&case["handshake_ranks"]), "{case}");
        assert_eq!(consumers(local, remote), Ok(number("expected_consumers")), "{case}");
    }
}

#[test]
fn sizes_that_do_not_divide_are_refused() {
    assert_eq!(tp_ratio(3, 2), Err(TopologyError::NotDivisible { local: 3, remote: 2 }));
    assert_eq!(tp_ratio(0, 2), Err(TopologyError::NotDivisible { local: 0, remote: 2 }));
}

#[test]
fn absurd_sizes_are_refused_before_any_list_is_built() {
    let huge = ParallelSizes::tp(u32::MAX);
    let error = TopologyError::TooManyRanks { size: u32::MAX };
    assert_eq!(handshake_ranks(0, ParallelSizes::tp(1), huge), Err(error));
    assert_eq!(LocalTopology::new(0, 1, 8).tp_mapping(huge, &[]), Err(error));
}

/// Everything that one case says of one rank.
fn check_rank(
    topology: &LocalTopology,
    remote: ParallelSizes,
    groups: &[GroupKind],
    out: &Value,
    name: &Value,
) {
    let ranks = handshake_ranks(topology.rank, topology.sizes, remote);
    let mapping = topology.tp_mapping(remote, groups);
    let ratio = tp_ratio(topology.sizes.tp, remote.tp);
    let expected = &out["mapping"];
    if is_error(&out["tp_ratio"]) {
        let error = TopologyError::NotDivisible { local: topology.sizes.tp, remote: remote.tp };
        assert_eq!(ratio, Err(error), "{name}");
        assert_eq!(ranks, Err(error), "{name}");
        assert_eq!(mapping, Err(error), "{name}");
        return;
    }
    assert_eq!(ratio, Ok(out["tp_ratio"].as_i64().unwrap()), "{name}");
    assert_eq!(ranks, Ok(numbers(&out["handshake_target_ranks"])), "{name}");
    assert_eq!(consumers(topology.sizes, remote), Ok(number(&out["dcp_consumer_count"])), "{name}");
    let mapping = mapping.unwrap();
    let per_group: Vec<Vec<u32>> = list(&expected["source_ranks_per_group"]).iter().map(numbers).collect();
    assert_eq!(mapping.source_ranks_per_group, per_group, "{name}");
    assert_eq!(mapping.source_ranks, numbers(&expected["all_source_ranks"]), "{name}");
    let slots: Vec<(u32, u32)> = expected["rank_to_attention_slot"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(rank, slot)| (rank.parse().unwrap(), number(slot)))
        .collect();
    assert_eq!(mapping.attention_slots, slots.into_iter().collect(), "{name}");
    assert_eq!(mapping.rank_offset_factor, expected["rank_offset_factor"].as_u64().unwrap(), "{name}");
    assert_eq!(mapping.local_consumers, number(&expected["local_consumers"]), "{name}");
    assert_eq!(topology.heads_per_rank(topology.sizes.tp), number(&out["local_physical_heads"]), "{name}");
    let flag = |key: &str| out[key].as_bool().unwrap();
    assert_eq!(topology.replicates(topology.sizes.tp), flag("local_replicates_kv_cache"), "{name}");
    assert_eq!(topology.replicates(remote.tp), flag("replicates_kv_cache"), "{name}");
    let shared = out.get("is_kv_replicated").or(out.get("is_kv_replicated_remote")).unwrap();
    assert_eq!(topology.shares_heads(remote.tp), shared.as_bool().unwrap(), "{name}");
}

#[test]
fn mappings_of_all_ranks_equal_vllm() {
    let vectors = vectors("topology.json");
    let cases = list(&vectors["cases"]);
    assert_eq!(cases.len(), 130);
    for case in cases {
        let sizes = |side: &str| ParallelSizes {
            tp: number(&case[side]["tp_size"]),
            dcp: number(&case[side]["dcp_size"]),
        };
        let name = &case["name"];
        for rank in list(&case["ranks"]) {
            let topology = LocalTopology {
                rank: number(&rank["tp_rank"]),
                sizes: sizes("local"),
                pcp: 1,
                total_kv_heads: number(&case["total_num_kv_heads"]),
                is_mla: case["is_mla"].as_bool().unwrap(),
            };
            check_rank(&topology, sizes("remote"), &kinds(&case["groups"]), rank, name);
            assert_eq!(topology.dcp_rank(), number(&rank["dcp_rank"]), "{name}");
            assert_eq!(
                topology.heads_per_rank(sizes("remote").tp),
                number(&rank["remote_physical_heads"]),
                "{name}"
            );
            let block_size = |side: &str| case[side]["block_size"].as_u64().unwrap();
            let (local, remote) = (block_size("local"), block_size("remote"));
            let ratio = match rank["block_size_ratio"].as_u64() {
                Some(ratio) => Ok(ratio),
                None => Err(TopologyError::BlockSizes { local, remote }),
            };
            assert_eq!(block_size_ratio(local, remote), ratio, "{name}");
        }
    }
}

#[test]
fn mappings_of_single_ranks_equal_vllm() {
    let vectors = vectors("topology_v032.json");
    let cases = list(&vectors["topology_cases"]);
    assert_eq!(cases.len(), 72);
    for case in cases {
        let input = &case["in"];
        let topology = LocalTopology {
            rank: number(&input["tp_rank"]),
            sizes: ParallelSizes { tp: number(&input["tp_size"]), dcp: number(&input["dcp_size"]) },
            pcp: 1,
            total_kv_heads: number(&input["total_num_kv_heads"]),
            is_mla: input["is_mla"].as_bool().unwrap(),
        };
        let remote =
            ParallelSizes { tp: number(&input["remote_tp_size"]), dcp: number(&input["remote_dcp_size"]) };
        check_rank(&topology, remote, &kinds(&input["groups"]), &case["out"], input);
    }
}

#[test]
fn block_size_ratios_equal_vllm() {
    let vectors = vectors("topology_v032.json");
    let cases = list(&vectors["block_size_ratio"]);
    assert_eq!(cases.len(), 5);
    for case in cases {
        let size = |key: &str| case[key].as_u64().unwrap();
        let (local, remote) = (size("local_block_size"), size("remote_block_size"));
        let expected = case["out"].as_u64().ok_or(TopologyError::BlockSizes { local, remote });
        assert_eq!(block_size_ratio(local, remote), expected, "{case}");
    }
}

#[test]
fn v2_ranks_equal_vllm() {
    let golden = vectors("topology_v013.json");
    let cases = list(&golden["topology_cases"]);
    assert_eq!(cases.len(), 8);
    for case in cases {
        let (input, out) = (&case["in"], &case["out"]);
        let (rank, local) = (number(&input["tp_rank"]), number(&input["tp_size"]));
        let remote = number(&input["remote_tp_size"]);
        let error = TopologyError::NotDivisible { local, remote };
        let expected = |key: &str| match is_error(&out[key]) {
            true => Err(error),
            false => Ok(number(&out[key])),
        };
        assert_eq!(v2::tp_ratio(local, remote), expected("tp_ratio"), "{case}");
        assert_eq!(v2::target_rank(rank, local, remote), expected("target_remote_rank"), "{case}");
        let shared = v2::is_replicated(remote, number(&input["total_num_kv_heads"]));
        assert_eq!(shared, out["is_kv_replicated"].as_bool().unwrap(), "{case}");
        let replicates = shared || input["is_mla"].as_bool().unwrap();
        assert_eq!(replicates, out["replicates_kv_cache"].as_bool().unwrap(), "{case}");
    }
    let golden = vectors("topology.json");
    let cases = list(&golden["v2_cases_reimplemented"]);
    assert_eq!(cases.len(), 9);
    for case in cases {
        let (local, remote) = (number(&case["local_tp"]), number(&case["remote_tp"]));
        for rank in list(&case["ranks"]) {
            let index = number(&rank["tp_rank"]);
            if is_error(rank) {
                assert_eq!(v2::tp_ratio(local, remote), Err(TopologyError::NotDivisible { local, remote }));
                continue;
            }
            let replicates = case["is_mla"].as_bool().unwrap()
                || v2::is_replicated(remote, number(&case["total_num_kv_heads"]));
            assert_eq!(replicates, rank["replicated"].as_bool().unwrap(), "{case}");
            assert_eq!(v2::target_rank(index, local, remote), Ok(number(&rank["target_remote_rank"])));
            let factor = v2::rank_offset_factor(index, local, remote, replicates);
            assert_eq!(factor, Ok(number(&rank["rank_offset_factor"])), "{case}");
        }
    }
}

#[test]
fn advertised_sizes_equal_vllm() {
    let vectors = vectors("topology.json");
    let cases = list(&vectors["advertised_transfer_topology_reimplemented"]);
    assert_eq!(cases.len(), 5);
    for case in cases {
        let sizes = advertised_sizes(number(&case["tp"]), number(&case["dcp"]));
        let expected = ParallelSizes {
            tp: number(&case["advertised_tp_size"]),
            dcp: number(&case["advertised_dcp_size"]),
        };
        assert_eq!(sizes, expected, "{case}");
    }
}

#[test]
fn transfer_ranks_equal_vllm() {
    let vectors = vectors("topology.json");
    let cases = list(&vectors["pcp_producer_reimplemented"]);
    assert_eq!(cases.len(), 8);
    for case in cases {
        let worker = WorkerRanks {
            tp_rank: number(&case["tp_rank"]),
            tp_size: number(&case["tp_size"]),
            pcp_rank: number(&case["pcp_rank"]),
            pcp_size: number(&case["pcp_size"]),
            dcp_size: number(&case["dcp_size"]),
        };
        let expected = TransferRank {
            rank: number(&case["transfer_tp_rank"]),
            size: number(&case["transfer_tp_size"]),
            participates: case["participates"].as_bool().unwrap(),
        };
        assert_eq!(transfer_rank(worker), expected, "{case}");
    }
}

macro_rules! t6 {
    ($($name:ident: $pcp_rank:literal of $pcp:literal, dcp $dcp:literal => $rank:literal of $size:literal, $on:literal;)*) => {$(
        #[test]
        fn $name() {
            let worker =
                WorkerRanks { tp_rank: 0, tp_size: 1, pcp_rank: $pcp_rank, pcp_size: $pcp, dcp_size: $dcp };
            assert_eq!(
                transfer_rank(worker),
                TransferRank { rank: $rank, size: $size, participates: $on }
            );
        }
    )*};
}

t6! {
    t6_1_rank_of_the_first_replica: 0 of 2, dcp 1 => 0 of 1, true;
    t6_2_rank_of_the_second_replica: 1 of 2, dcp 1 => 0 of 1, false;
    t6_3_rank_of_the_first_shard: 0 of 2, dcp 2 => 0 of 2, true;
    t6_4_rank_of_the_second_shard: 1 of 2, dcp 2 => 1 of 2, true;
    t6_5_rank_of_shard_0_of_4: 0 of 4, dcp 4 => 0 of 4, true;
    t6_6_rank_of_shard_1_of_4: 1 of 4, dcp 4 => 1 of 4, true;
    t6_7_rank_of_shard_2_of_4: 2 of 4, dcp 4 => 2 of 4, true;
    t6_8_rank_of_shard_3_of_4: 3 of 4, dcp 4 => 3 of 4, true;
}

#[test]
fn t44_an_unregistered_engine_is_unknown_and_unregistering_again_is_fine() {
    let topology =
        EngineTopology { sizes: ParallelSizes::tp(2), pcp: 1, block_size: 16, blocks_per_logical: 1 };
    let mut registry = TopologyRegistry::new("local");
    assert_eq!(registry.register("peer", 0, topology), Ok(topology));
    let later = EngineTopology { block_size: 8, ..topology };
    assert_eq!(registry.register("peer", 0, later), Ok(topology));
    assert_eq!(registry.register("peer", 1, later), Ok(later));
    assert_eq!(registry.get("peer", 0), Ok(topology));
    registry.unregister("peer");
    let unknown = EngineTopologyError::Unknown("peer".to_owned());
    assert_eq!(registry.get("peer", 0), Err(unknown.clone()));
    assert_eq!(registry.get("peer", 1), Err(unknown));
    registry.unregister("peer");
    let own = registry.register("local", 0, topology);
    assert_eq!(own, Err(EngineTopologyError::Local("local".to_owned())));
}

#[test]
fn kernel_blocks_are_the_largest_that_all_backends_accept() {
    use KernelSizes::{Exact, MultipleOf};
    assert_eq!(kernel_block_size(16, &[&[MultipleOf(16)]]), Some(16));
    assert_eq!(kernel_block_size(256, &[&[Exact(16), Exact(64)], &[MultipleOf(16)]]), Some(64));
    assert_eq!(kernel_block_size(48, &[&[Exact(32), Exact(64)]]), None);
    assert_eq!(kernel_block_size(64, &[&[Exact(64)], &[Exact(32)]]), None);
    assert_eq!(logical_block_size(&[16, 24]), Some(48));
    assert_eq!(logical_block_size(&[]), None);
    assert_eq!(logical_block_size(&[u64::MAX, u64::MAX - 1]), None);
}

/// A pair of sizes of which one divides the other, with the local rank and the heads.
fn sizes() -> impl Strategy<Value = (u32, u32, u32, u32)> {
    (1_u32..5, 0_u32..4, any::<bool>(), 0_u32..5).prop_flat_map(|(base, power, local_larger, heads)| {
        let larger = base << power;
        let (local, remote) = if local_larger { (larger, base) } else { (base, larger) };
        // Heads divide the sizes or the sizes divide the heads, as a model needs it.
        let heads = base * (1 << heads);
        (Just(local), Just(remote), Just(heads), 0..local)
    })
}

proptest! {
    #[test]
    fn sources_and_slices_tile_the_heads_of_a_rank((local, remote, heads, rank) in sizes()) {
        let topology = LocalTopology::new(rank, local, heads);
        let mapping = topology.tp_mapping(ParallelSizes::tp(remote), &[GroupKind::Attention]).unwrap();
        // Heads by number: rank r of T holds heads from r*H/T on, H/T or one of them.
        let held = |rank: u32, size: u32| {
            let first = rank * heads / size;
            (first..first + topology.heads_per_rank(size)).collect::<Vec<u32>>()
        };
        let wanted = held(rank, local);
        let slices = u32::try_from(mapping.attention_ranks.len()).unwrap();
        prop_assert_eq!(wanted.len() as u32 % slices, 0);
        let slice = wanted.len() as u32 / slices;
        let mut read = Vec::new();
        for (slot, source) in (0..).zip(&mapping.attention_ranks) {
            prop_assert_eq!(mapping.attention_slots[source], slot);
            let first = usize::try_from(mapping.rank_offset_factor).unwrap() * wanted.len();
            let remote_heads = held(*source, remote);
            read.extend_from_slice(&remote_heads[first..first + slice as usize]);
        }
        prop_assert_eq!(read, wanted);
    }

    #[test]
    fn every_remote_rank_has_as_many_readers_as_it_waits_for(power_l in 0_u32..4, power_r in 0_u32..4, dcp in any::<(bool, bool)>()) {
        let sizes = |power: u32, sharded: bool| ParallelSizes { tp: 1 << power, dcp: if sharded { 1 << power } else { 1 } };
        let (local, remote) = (sizes(power_l, dcp.0), sizes(power_r, dcp.1));
        let mut readers = vec![0_u32; remote.tp as usize];
        for rank in 0..local.tp {
            for source in handshake_ranks(rank, local, remote).unwrap() {
                readers[source as usize] += 1;
            }
        }
        prop_assert!(readers.iter().all(|count| *count == consumers(local, remote).unwrap()), "{:?}", readers);
    }

    #[test]
    fn context_parallel_sources_cover_every_position_once(
        local_power in 0_u32..3, remote_power in 0_u32..3, total in 0_usize..40, cached in 0_usize..5,
    ) {
        let (local_size, remote_size) = (1_u32 << local_power, 1_u32 << remote_power);
        // Block k of the context has id k locally and 1000 + k remotely.
        let positions = |rank: u32, size: u32| (rank as usize..total).step_by(size as usize);
        for local_rank in 0..local_size {
            let local: Vec<u64> = positions(local_rank, local_size).map(|k| k as u64).skip(cached).collect();
            let sizes = |size: u32| ParallelSizes { tp: size, dcp: size };
            let sources = handshake_ranks(local_rank, sizes(local_size), sizes(remote_size)).unwrap();
            let sources = if remote_size == 1 { vec![0] } else { sources };
            let mut read = Vec::new();
            for remote_rank in sources {
                let remote: Vec<u64> = positions(remote_rank, remote_size).map(|k| 1000 + k as u64).collect();
                let pair = DcpPair {
                    local_size, local_rank, remote_size, remote_rank,
                    cached_blocks: cached, total_blocks: Some(total),
                };
                let (into, from) = dcp_pair(pair, &local, &remote).unwrap();
                for (into, from) in into.iter().zip(&from) {
                    prop_assert_eq!(into + 1000, *from);
                }
                read.extend(into);
            }
            read.sort_unstable();
            prop_assert_eq!(read, local);
        }
    }
}
