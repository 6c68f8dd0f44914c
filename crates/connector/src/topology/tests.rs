use super::*;
use crate::golden::{list, vectors};

#[test]
fn ratios_ranks_and_consumers_equal_vllm() {
    let vectors = vectors("notifications.json");
    let cases = list(&vectors["topology_v14"]);
    assert_eq!(cases.len(), 37);
    for case in cases {
        let number = |key: &str| u32::try_from(case[key].as_u64().unwrap()).unwrap();
        let (local, remote, rank) = (number("local_tp"), number("remote_tp"), number("local_rank"));
        assert_eq!(tp_ratio(local, remote), Ok(case["tp_ratio"].as_i64().unwrap()), "{case}");
        let ranks: Vec<u64> = list(&case["handshake_ranks"]).iter().map(|r| r.as_u64().unwrap()).collect();
        let ours: Vec<u64> =
            handshake_ranks(rank, local, remote).unwrap().into_iter().map(u64::from).collect();
        assert_eq!(ours, ranks, "{case}");
        assert_eq!(consumers(local, remote), Ok(number("expected_consumers")), "{case}");
    }
}

#[test]
fn sizes_that_do_not_divide_are_refused() {
    assert_eq!(tp_ratio(3, 2), Err(TopologyError::NotDivisible { local: 3, remote: 2 }));
    assert_eq!(tp_ratio(0, 2), Err(TopologyError::NotDivisible { local: 0, remote: 2 }));
}
