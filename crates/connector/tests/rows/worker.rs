//! The worker half where all goes well: T7, T8, T11, T18, T19, T23.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kv_connector::scheduler::{Heartbeat, StepMeta};
use kv_connector::transport::TransferState;
use kv_connector::transport::loopback::Fabric;
use kv_connector::worker::{ClockSample, RankReply};

use crate::rows;
use crate::support::{Engine, Rank, at, engine, finished, recv};

/// Far above what starting costs, far below any wait.
const PROMPT: Duration = Duration::from_millis(100);

#[test]
fn t7_one_id_may_be_received_in_consecutive_steps() {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    p[0].fill(1);
    for block in 0..4 {
        let started = Instant::now();
        d.start(&[("r", recv("p", &[block], &[1], true))], at(1));
        assert!(started.elapsed() < PROMPT);
        if block == 0 {
            d.connect(&p, at(1));
        }
    }
    assert_eq!(d.poll(at(1)), finished("r"));
    assert!((0..4).all(|block| d.holds(block, 1)));
    assert!(d.poll(at(1)).is_empty());
}

/// Every decode rank gets its own heads although the handshakes take their time.
fn t8(d_tp: u32, p_tp: u32) {
    let fabric = Fabric::default();
    let p = Engine::new(&fabric, "p").tp(p_tp, 8).ranks();
    p.iter().for_each(|rank| rank.fill(3));
    for mut rank in Engine::new(&fabric, "d").tp(d_tp, 8).ranks() {
        let mut request = recv("p", &[5], &[3], true);
        request.tp_size = p_tp;
        let started = Instant::now();
        rank.start(&[("r", request)], at(1));
        assert!(started.elapsed() < PROMPT, "start_load waits for nothing");
        let job = rank.job();
        for second in 1..3 {
            rank.step(at(second));
            assert!(rank.poll(at(second)).is_empty(), "the handshake is still under way");
        }
        rank.answer(&job, &p, at(3)).unwrap();
        rank.step(at(3));
        assert_eq!(rank.poll(at(3)), finished("r"));
        assert!(rank.holds(5, 3));
    }
}

rows! {
    t8_1_loading_with_decode_tp_1_and_prefill_tp_1 => t8(1, 1);
    t8_2_loading_with_decode_tp_2_and_prefill_tp_1 => t8(2, 1);
    t8_3_loading_with_decode_tp_4_and_prefill_tp_2 => t8(4, 2);
    t8_4_loading_with_decode_tp_4_and_prefill_tp_4 => t8(4, 4);
}

#[test]
fn t11_requests_to_one_unknown_engine_share_a_handshake() {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    let names = ["r0", "r1", "r2", "r3", "r4"];
    for (block, name) in (0..).zip(names) {
        d.start(&[(name, recv("p", &[block], &[1], true))], at(1));
    }
    d.connect(&p, at(1));
    let mut results = d.poll(at(1));
    results.finished_recving.sort();
    assert_eq!(results.finished_recving, names);
    assert!(d.worker.take_handshake_jobs().is_empty());
}

#[test]
fn t18_statistics_are_taken_once() {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    assert_eq!(d.worker.take_stats(), None);
    d.start(&[("r", recv("p", &[4, 5], &[1, 2], true))], at(1));
    d.connect(&p, at(1));
    d.poll(at(1));
    let stats = d.worker.take_stats().unwrap();
    assert_eq!(stats.summary().successful_transfers, 1);
    assert_eq!((stats.bytes_transferred, stats.num_descriptors), (vec![2 * 2 * 8 * 16], vec![4]));
    assert_eq!(d.worker.take_stats(), None);
}

#[test]
fn t19_deadlines_are_rebased_onto_the_workers_clock() {
    let fabric = Fabric::default();
    let mut p = engine(&fabric, "p");
    let meta = StepMeta {
        reqs_in_batch: BTreeSet::from(["r".to_owned()]),
        reqs_to_send: vec![("r".to_owned(), at(100 + 480))],
        scheduler_clock: Some(at(100)),
        ..StepMeta::default()
    };
    p.worker.start_load(&meta, at(10_100)).unwrap();
    assert_eq!(p.worker.leases().collect::<Vec<_>>(), [("r", at(10_580))]);
    assert!(p.poll(at(10_579)).is_empty());
    assert_eq!(p.worker.leases().count(), 1);
    assert_eq!(p.poll(at(10_580)).finished_sending, ["r"]);
}

/// What a peer at `p` is sent.
fn tell(d: &mut Rank, p: &mut [Rank], request: &str) {
    let mut only_tell = recv("p", &[], &[1], false);
    only_tell.remote.request_id = request.to_owned();
    d.start(&[("d", only_tell)], at(1));
    if let Some(job) = d.worker.take_handshake_jobs().pop() {
        d.answer(&job, p, at(1)).unwrap();
        d.step(at(1));
    }
}

#[test]
fn t23_a_notification_after_expiry_is_counted() {
    let fabric = Fabric::default();
    let (mut p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    p[0].lease("known", at(30));
    tell(&mut d, &mut p, "known");
    tell(&mut d, &mut p, "unknown");
    assert_eq!(p[0].poll(at(1)).finished_sending, ["known"]);
    let stats = p[0].worker.take_stats().unwrap();
    assert_eq!((stats.num_notifications_after_expiry, stats.num_kv_expired_reqs), (vec![1], vec![]));
}

#[test]
fn heartbeats_reach_every_rank_and_never_shorten_a_lease() {
    let fabric = Fabric::default();
    let mut p = Engine::new(&fabric, "p").tp(2, 8).ranks();
    p.iter_mut().for_each(|rank| {
        rank.lease("short", at(30));
        rank.lease("long", at(100));
    });
    let mut d = engine(&fabric, "d");
    let beat = Heartbeat {
        engine_id: "p".to_owned(),
        host: "127.0.0.1".to_owned(),
        port: 5600,
        tp_size: 2,
        dcp_size: 1,
        pp_size: 1,
        request_ids: ["short", "long", "unknown"].map(str::to_owned).into(),
    };
    let meta = StepMeta { heartbeats: vec![beat], ..StepMeta::default() };
    d.worker.start_load(&meta, at(20)).unwrap();
    d.connect(&p, at(20));
    d.worker.start_load(&meta, at(20)).unwrap();
    for rank in &mut p {
        assert!(rank.poll(at(25)).is_empty());
        let mut leases: Vec<_> = rank.worker.leases().collect();
        leases.sort_unstable();
        assert_eq!(leases, [("long", at(100)), ("short", at(45))]);
        assert_eq!(rank.poll(at(45)).finished_sending, ["short"], "all leases are looked at");
    }
    d.faults.fail_next(kv_connector::transport::loopback::Call::SendNotification, 2);
    d.worker.start_load(&meta, at(30)).unwrap();
    assert_eq!(d.worker.take_stats(), None, "a lost heartbeat is no failure");
}

#[test]
fn a_readback_that_is_about_to_expire_is_declined() {
    let fabric = Fabric::default();
    let p = [engine(&fabric, "p")];
    for (bidirectional, expiry, declined) in
        [(true, 1005.9, true), (true, 1006.1, false), (false, 1005.9, false)]
    {
        let edit =
            move |config: &mut kv_connector::worker::WorkerConfig| config.bidirectional = bidirectional;
        let mut d = Engine::new(&fabric, "d").edit(&edit).rank(0);
        let mut request = recv("p", &[1, 2], &[1, 2], true);
        request.remote.blocks_expiry_time = Some(expiry);
        d.start(&[("r", request)], at(1));
        let job = d.job();
        // The slower exchange says that the peer's clock is far ahead; the faster one counts.
        let sample = |received, remote_seconds| {
            Some(ClockSample { sent: at(0), received: Duration::from_millis(received), remote_seconds })
        };
        let payload = p[0].worker.handshake_payload();
        let reply = |clock| RankReply { pp_rank: 0, tp_rank: 0, payload: payload.clone(), clock };
        let replies = vec![reply(sample(100, 1000.05)), reply(sample(900, 5000.0))];
        d.worker.complete_handshake(&job.engine_id, Ok(replies), at(1)).unwrap();
        d.step(at(1));
        let results = d.poll(at(1));
        assert_eq!(results.finished_recving, ["r"]);
        assert_eq!(!results.failed_recving.is_empty(), declined, "{bidirectional} {expiry}");
        let stats = d.worker.take_stats().unwrap();
        assert_eq!(stats.num_kv_expired_reqs.len(), usize::from(declined));
        assert!(stats.num_failed_transfers.is_empty());
    }
}

#[test]
fn transfers_in_progress_are_only_looked_at() {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    d.faults.script_transfers([vec![TransferState::InProgress; 3]]);
    d.start(&[("r", recv("p", &[1], &[1], true))], at(1));
    d.connect(&p, at(1));
    for _ in 0..3 {
        assert!(d.poll(at(1)).is_empty());
    }
    assert_eq!(d.poll(at(1)), finished("r"));
    assert_eq!(d.faults.released_in_progress(), 0);
}
