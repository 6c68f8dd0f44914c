//! Ranks of different numbers, and latent attention: T63, and what T9 prepares, with real bytes.

use kv_connector::protocol::TransferMode;
use kv_connector::topology::{ParallelSizes, consumers, handshake_ranks, tp_ratio};
use kv_connector::transport::TransferOp;
use kv_connector::transport::loopback::Fabric;
use kv_connector::worker::WorkerConfig;

use crate::support::{Engine, at, finished, notifications, recv, transfers, vectors};

#[test]
fn t63_latent_attention_reads_once_and_tells_the_other_ranks() {
    let fabric = Fabric::default();
    let mut p = Engine::new(&fabric, "p").mla(4).ranks();
    p.iter_mut().for_each(|rank| {
        rank.fill(1);
        rank.lease("prefill-id", at(30));
    });
    let mut d = Engine::new(&fabric, "d").mla(1).rank(0);
    d.faults.record();
    let mut request = recv("p", &[5], &[1], true);
    (request.tp_size, request.remote.request_id) = (4, "prefill-id".to_owned());
    d.start(&[("decode-id", request)], at(1));
    d.connect(&p, at(1));
    let journal = d.faults.take_journal();
    let [(op, _, _, notification)] = &transfers(&journal)[..] else { panic!("one read") };
    assert_eq!((*op, notification.as_deref()), (TransferOp::Read, Some("prefill-id:1")));
    let told = notifications(&journal);
    let expected = ["p-1", "p-2", "p-3"].map(|rank| (rank.to_owned(), "prefill-id:1".to_owned()));
    assert_eq!(told, expected);
    assert_eq!(d.poll(at(1)), finished("decode-id"));
    assert!(d.holds(5, 1));
    for rank in &mut p {
        assert_eq!(rank.poll(at(1)).finished_sending, ["prefill-id"]);
    }
}

/// Decode and prefill of any width: every rank gets its heads, and every prefill rank frees.
fn pulls(d_tp: u32, p_tp: u32, heads: u32, mla: bool) {
    let fabric = Fabric::default();
    let build = |name, tp| {
        let engine = Engine::new(&fabric, name);
        if mla { engine.mla(tp).ranks() } else { engine.tp(tp, heads).ranks() }
    };
    let mut p = build("p", p_tp);
    p.iter_mut().for_each(|rank| {
        (0..4).for_each(|block| rank.fill(block));
        rank.lease("p-request", at(30));
    });
    for mut rank in build("d", d_tp) {
        let mut request = recv("p", &[7, 9], &[0, 2, 3], true);
        request.tp_size = p_tp;
        rank.start(&[("r", request)], at(1));
        rank.connect(&p, at(1));
        assert_eq!(rank.poll(at(1)), finished("r"), "{d_tp} {p_tp}");
        assert!(rank.holds(7, 2) && rank.holds(9, 3), "{d_tp} {p_tp}");
        assert_eq!(rank.faults.released_in_progress(), 0);
    }
    for rank in &mut p {
        assert_eq!(rank.poll(at(1)).finished_sending, ["p-request"], "{d_tp} {p_tp}");
        assert_eq!(rank.worker.take_stats(), None);
    }
}

#[test]
fn every_rank_gets_its_heads_and_every_prefill_rank_frees() {
    for d_tp in [1, 2, 4, 8] {
        for p_tp in [1, 2, 4, 8] {
            pulls(d_tp, p_tp, 8, false);
            pulls(d_tp, p_tp, 1, true);
        }
    }
    pulls(1, 3, 12, false);
    pulls(1, 6, 12, false);
    pulls(2, 6, 12, false);
    // More decode ranks than heads: some hold the same head.
    pulls(4, 2, 2, false);
    pulls(8, 2, 4, false);
}

#[test]
fn whom_to_ask_and_whom_to_count_equals_vllm() {
    let vectors = vectors("notifications.json");
    let cases = vectors["topology_v14"].as_array().unwrap();
    assert_eq!(cases.len(), 37);
    for case in cases {
        let size = |key: &str| case[key].as_u64().map_or(1, |size| u32::try_from(size).unwrap());
        let sides =
            |side: &str| ParallelSizes { tp: size(&format!("{side}_tp")), dcp: size(&format!("{side}_dcp")) };
        let (local, remote) = (sides("local"), sides("remote"));
        let rank = u32::try_from(case["local_rank"].as_u64().unwrap()).unwrap();
        if let Some(ratio) = case["tp_ratio"].as_i64() {
            assert_eq!(tp_ratio(local.tp, remote.tp), Ok(ratio), "{case}");
        }
        let ranks = serde_json::to_value(handshake_ranks(rank, local, remote).unwrap()).unwrap();
        assert_eq!(ranks, case["handshake_ranks"], "{case}");
        assert_eq!(consumers(local, remote).unwrap(), case["expected_consumers"], "{case}");
    }
}

#[test]
fn slices_are_shared_by_peers_of_equal_shape() {
    let fabric = Fabric::default();
    let mut d = Engine::new(&fabric, "d").tp(1, 12).rank(0);
    d.faults.record();
    let mut lists = Vec::new();
    for (name, tp) in [("p", 4), ("q", 4), ("s", 6)] {
        let p = Engine::new(&fabric, name).tp(tp, 12).ranks();
        let mut request = recv(name, &[1], &[1], true);
        (request.tp_size, request.remote.host) = (tp, name.to_owned());
        d.start(&[("r", request)], at(1));
        d.connect(&p, at(1));
        d.poll(at(1));
        let prepared = d.faults.take_journal().into_iter().filter(|event| {
            matches!(event, kv_connector::transport::loopback::Event::Prepared { agent: None, .. })
        });
        lists.push(prepared.count());
    }
    assert_eq!(lists, [4, 0, 6]);
}

#[test]
fn pipeline_stages_are_refused_where_blocks_are_read() {
    let fabric = Fabric::default();
    let mut d =
        Engine::new(&fabric, "d").edit(&|config: &mut WorkerConfig| config.mode = TransferMode::Pull).rank(0);
    let mut request = recv("p", &[1], &[1], true);
    request.pp_size = 2;
    d.start(&[("r", request)], at(1));
    assert!(d.worker.take_handshake_jobs().is_empty());
    assert_eq!(d.poll(at(1)).failed_recving, ["r"]);
}
