use super::*;
use crate::golden::{list, vectors};

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
        let expected: Vec<u64> = list(&case["handshake_ranks"]).iter().map(|r| r.as_u64().unwrap()).collect();
        let ranks = handshake_ranks(rank, local, remote).unwrap();
        assert_eq!(ranks.into_iter().map(u64::from).collect::<Vec<_>>(), expected, "{case}");
        assert_eq!(consumers(local, remote), Ok(number("expected_consumers")), "{case}");
    }
}

#[test]
fn sizes_that_do_not_divide_are_refused() {
    assert_eq!(tp_ratio(3, 2), Err(TopologyError::NotDivisible { local: 3, remote: 2 }));
    assert_eq!(tp_ratio(0, 2), Err(TopologyError::NotDivisible { local: 0, remote: 2 }));
}
