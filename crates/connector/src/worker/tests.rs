use std::time::{Duration, Instant};

use super::*;
use crate::golden::{list, strings, unhex, vectors};
use crate::protocol::params::BlockIds;
use crate::scheduler::{Heartbeat, RemoteSide};
use crate::transport::KvMemory;
use crate::transport::loopback::{Call, Faults, LoopbackAgent};

mod failures;
mod peers;

const BLOCK: u64 = 32;
const BLOCKS: u64 = 16;
const LAYERS: usize = 3;

fn at(seconds: u64) -> ClockTime {
    Duration::from_secs(seconds)
}

struct Engine {
    worker: Worker<LoopbackAgent>,
    memory: KvMemory,
    faults: Faults,
}

fn engine_with(generation: Generation, name: &str, change: impl FnOnce(&mut WorkerConfig)) -> Engine {
    let memory = KvMemory::allocate(&[(BLOCK * BLOCKS) as usize; LAYERS]);
    let regions = memory
        .base_addresses()
        .into_iter()
        .enumerate()
        .map(|(layer, base_address)| Region {
            name: format!("model.layers.{layer}"),
            base_address,
            block_len: BLOCK,
            block_stride: BLOCK,
            num_blocks: BLOCKS,
            memory: MemoryType::Dram,
            group: 0,
        })
        .collect();
    let mut config = WorkerConfig::new(generation, name, "hash".to_owned());
    change(&mut config);
    let agent = LoopbackAgent::new(name, memory.clone()).unwrap();
    let faults = agent.faults();
    Engine { worker: Worker::new(config, agent, regions).unwrap(), memory, faults }
}

fn engine(name: &str) -> Engine {
    engine_with(Generation::V14, name, |_| {})
}

impl Engine {
    fn fill(&self, block: u64, value: u8) {
        for base in self.memory.base_addresses() {
            self.memory.write(base + block * BLOCK, &[value; BLOCK as usize]).unwrap();
        }
    }

    fn content(&self, block: u64) -> Vec<u8> {
        let read = |base: u64| self.memory.read(base + block * BLOCK, BLOCK).unwrap();
        let mut bytes: Vec<u8> = self.memory.base_addresses().into_iter().flat_map(read).collect();
        bytes.dedup();
        bytes
    }

    fn start(&mut self, recvs: &[(&str, RecvRequest)], now: ClockTime) -> Result<(), EngineFatal> {
        let reqs_to_recv =
            recvs.iter().map(|(request, recv)| ((*request).to_owned(), recv.clone())).collect();
        self.worker.start_load(&StepMeta { reqs_to_recv, ..StepMeta::default() }, now)
    }

    /// Carries out one pending handshake with `peer` and lets the queued receives start.
    fn shake_hands(&mut self, peer: &Engine, now: ClockTime) -> Result<(), HandshakeError> {
        let [job] = <[_; 1]>::try_from(self.worker.take_handshake_jobs()).unwrap();
        assert_eq!(job.ranks, [(0, 0)]);
        let reply =
            RankReply { pp_rank: 0, tp_rank: 0, payload: peer.worker.handshake_payload(), clock: None };
        let result = self.worker.complete_handshake(&job.engine_id, Ok(vec![reply]), now);
        self.start(&[], now).unwrap();
        result
    }

    fn lease(&mut self, request: &str, deadline: ClockTime) {
        let meta = StepMeta {
            reqs_in_batch: BTreeSet::from([request.to_owned()]),
            reqs_to_send: vec![(request.to_owned(), deadline)],
            ..StepMeta::default()
        };
        self.worker.start_load(&meta, at(0)).unwrap();
    }
}

/// Polls until something is reported; transfers run on other threads.
fn report(engine: &mut Engine, now: ClockTime) -> TransferResults {
    let started = Instant::now();
    loop {
        let results = engine.worker.poll(now).unwrap();
        if !results.is_empty() {
            return results;
        }
        assert!(started.elapsed() < Duration::from_secs(5), "nothing was reported");
        std::thread::yield_now();
    }
}

/// Waits until `count` transfers have moved their bytes, without looking through the worker.
fn settle(reader: &Engine, blocks: &[u64], value: u8) {
    let started = Instant::now();
    while blocks.iter().any(|block| reader.content(*block) != [value]) {
        assert!(started.elapsed() < Duration::from_secs(5), "no bytes arrived");
        std::thread::yield_now();
    }
}

fn recv(engine_id: &str, local: &[u64], remote: &[u64], awaiting_kvs: bool) -> RecvRequest {
    RecvRequest {
        local_block_ids: if local.is_empty() { Vec::new() } else { vec![local.to_vec()] },
        local_cached_blocks: vec![0],
        remote: RemoteSide {
            block_ids: BlockIds::grouped(vec![remote.to_vec()]),
            engine_id: engine_id.to_owned(),
            request_id: format!("{engine_id}-request"),
            host: "127.0.0.1".to_owned(),
            port: 5600,
            blocks_expiry_time: None,
            num_tokens: None,
        },
        tp_size: 1,
        dcp_size: 1,
        pp_size: 1,
        awaiting_kvs,
    }
}

#[test]
fn a_request_is_pulled_reported_and_freed_on_both_sides() {
    let (mut p, mut d) = (engine("p"), engine("d"));
    for block in 0..BLOCKS {
        p.fill(block, block as u8 + 100);
    }
    p.lease("p-request", at(30));
    d.start(&[("r", recv("p", &[4, 5], &[1, 2, 3], true))], at(1)).unwrap();
    assert!(d.worker.has_pending_receives());
    assert_eq!(d.worker.poll(at(1)).unwrap(), TransferResults::default());
    d.shake_hands(&p, at(1)).unwrap();
    let results = report(&mut d, at(1));
    assert_eq!(results.finished_recving, ["r"]);
    assert!(results.failed_recving.is_empty());
    assert_eq!((d.content(4), d.content(5), d.content(6)), (vec![102], vec![103], vec![0]));
    assert_eq!(report(&mut p, at(2)).finished_sending, ["p-request"]);
    assert_eq!(p.worker.leases().count(), 0);
    assert!(!d.worker.has_pending_receives());
    let stats = d.worker.take_stats().unwrap();
    assert_eq!((stats.bytes_transferred, stats.num_descriptors), (vec![2 * 3 * BLOCK], vec![6]));
    assert_eq!(d.worker.take_stats(), None);
    assert_eq!(p.worker.take_stats(), None);
    assert!(d.worker.take_invalid_blocks().is_empty());
}

#[test]
fn v2_reads_flat_block_ids_without_heartbeats() {
    let mut p = engine_with(Generation::V2, "p", |_| {});
    let mut d = engine_with(Generation::V2, "d", |_| {});
    p.fill(9, 7);
    p.lease("p-request", at(480));
    let mut request = recv("p", &[0], &[9], true);
    request.remote.block_ids = BlockIds::flat(vec![9]);
    d.start(&[("r", request)], at(1)).unwrap();
    d.shake_hands(&p, at(1)).unwrap();
    assert_eq!(report(&mut d, at(1)).finished_recving, ["r"]);
    assert_eq!(d.content(0), [7]);
    assert_eq!(report(&mut p, at(1)).finished_sending, ["p-request"]);
}

#[test]
fn requests_to_one_unknown_engine_share_a_handshake() {
    let (p, mut d) = (engine("p"), engine("d"));
    p.fill(1, 1);
    let requests: Vec<(String, RecvRequest)> =
        (0..5).map(|i| (format!("r{i}"), recv("p", &[i], &[1], true))).collect();
    let borrowed: Vec<(&str, RecvRequest)> =
        requests.iter().map(|(id, r)| (id.as_str(), r.clone())).collect();
    d.start(&borrowed, at(1)).unwrap();
    d.shake_hands(&p, at(1)).unwrap();
    let mut seen = Vec::new();
    while seen.len() < 5 {
        seen.extend(report(&mut d, at(1)).finished_recving);
    }
    seen.sort();
    assert_eq!(seen, ["r0", "r1", "r2", "r3", "r4"]);
}

#[test]
fn one_id_may_be_received_in_consecutive_steps() {
    let (p, mut d) = (engine("p"), engine("d"));
    p.fill(1, 9);
    d.start(&[("r", recv("p", &[0], &[1], true))], at(1)).unwrap();
    d.shake_hands(&p, at(1)).unwrap();
    for block in 1..4 {
        d.start(&[("r", recv("p", &[block], &[1], true))], at(1)).unwrap();
    }
    settle(&d, &[0, 1, 2, 3], 9);
    assert_eq!(report(&mut d, at(1)).finished_recving, ["r"]);
}

#[test]
fn a_full_local_hit_only_notifies() {
    for (awaiting, notification_fails) in [(true, false), (true, true), (false, false), (false, true)] {
        let (mut p, mut d) = (engine("p"), engine("d"));
        p.lease("p-request", at(30));
        d.start(&[("r", recv("p", &[], &[1], awaiting))], at(1)).unwrap();
        if notification_fails {
            d.faults.fail_next(Call::SendNotification, 1);
        }
        d.shake_hands(&p, at(1)).unwrap();
        let results = d.worker.poll(at(1)).unwrap();
        assert_eq!(results.finished_recving, if awaiting { vec!["r"] } else { vec![] });
        assert!(results.failed_recving.is_empty());
        assert_eq!(d.worker.take_stats().is_some(), notification_fails);
        if !notification_fails {
            assert_eq!(report(&mut p, at(1)).finished_sending, ["p-request"]);
        }
    }
}

#[test]
fn producers_count_notifications_as_vllm_does() {
    for (generation, key) in [(Generation::V14, "pull_producer_v14"), (Generation::V2, "pull_producer_v2")] {
        let vectors = vectors("notifications.json");
        for case in list(&vectors[key]).iter().filter(|case| case["result"].is_object()) {
            let name = &case["name"];
            let mut p = engine_with(generation, "p", |_| {});
            p.worker.to_process.extend(strings(&case["in_process"]));
            for (i, request) in strings(&case["leased"]).into_iter().enumerate() {
                // One lease of the heartbeat case already reaches further than a renewal.
                let deadline = if name == "heartbeat" && i == 2 { 999 } else { 10 };
                p.worker.leases.insert(request, at(deadline));
            }
            let (mut done, mut failed) = (Vec::new(), false);
            let messages: Vec<Vec<u8>> = match case.get("notifications_hex") {
                Some(hex) => list(hex).iter().map(unhex).collect(),
                // The table writes bytes as Latin-1 characters.
                None => strings(&case["notifications"])
                    .iter()
                    .map(|text| text.chars().map(|c| c as u8).collect())
                    .collect(),
            };
            for message in messages {
                match p.worker.apply_notification(&message, at(0)) {
                    Ok(finished) => done.extend(finished),
                    Err(_) => failed = true,
                }
            }
            let result = &case["result"];
            assert_eq!(failed, !result["error"].is_null(), "{name}");
            if !failed {
                assert_eq!(done, strings(&result["done"]), "{name}");
            }
            check_producer(&p, result, name);
        }
    }
}

fn check_producer(p: &Engine, result: &serde_json::Value, name: &serde_json::Value) {
    let counts = serde_json::to_value(&p.worker.consumer_counts).unwrap();
    if result["error"].is_null() {
        assert_eq!(counts, result["counts"], "{name}");
    }
    if let Some(late) = result["after_expiry"].as_u64() {
        assert_eq!(p.worker.stats.num_notifications_after_expiry.len() as u64, late, "{name}");
    }
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    if result["still_leased"].is_array() {
        let leased = sorted(p.worker.leases.keys().cloned().collect());
        assert_eq!(leased, strings(&result["still_leased"]), "{name}");
        let in_process = sorted(p.worker.to_process.iter().cloned().collect());
        assert_eq!(in_process, strings(&result["still_in_process"]), "{name}");
        for (request, seconds) in result["renewed"].as_object().unwrap() {
            assert_eq!(p.worker.leases[request], at(seconds.as_u64().unwrap()), "{name}");
        }
    }
}

#[test]
fn leases_are_rebased_onto_the_workers_clock() {
    let mut p = engine("p");
    let meta = StepMeta {
        reqs_in_batch: BTreeSet::from(["r".to_owned()]),
        reqs_to_send: vec![("r".to_owned(), at(580)), ("unread".to_owned(), at(580))],
        scheduler_clock: Some(at(100)),
        ..StepMeta::default()
    };
    p.worker.start_load(&meta, at(10_100)).unwrap();
    assert_eq!(p.worker.leases().collect::<Vec<_>>(), [("r", at(10_580))]);
    assert!(p.worker.poll(at(10_579)).unwrap().is_empty());
    assert_eq!(p.worker.poll(at(10_580)).unwrap().finished_sending, ["r"]);
    assert_eq!(p.worker.take_stats().unwrap().num_kv_expired_reqs, [1]);
    assert!(p.worker.poll(at(20_000)).unwrap().is_empty());
}

#[test]
fn a_request_read_before_its_lease_gets_none() {
    let mut p = engine("p");
    p.worker.to_process.insert("r".to_owned());
    assert_eq!(p.worker.apply_notification(b"r:1", at(1)), Ok(Some("r".to_owned())));
    let meta = StepMeta { reqs_to_send: vec![("r".to_owned(), at(30))], ..StepMeta::default() };
    p.worker.start_load(&meta, at(1)).unwrap();
    assert_eq!(p.worker.leases().count(), 0);
}

#[test]
fn an_aborted_request_leaves_the_batch_and_may_hold_no_lease() {
    let mut p = engine("p");
    let withdraw = StepMeta { reqs_not_processed: BTreeSet::from(["r".to_owned()]), ..StepMeta::default() };
    p.worker.to_process.insert("r".to_owned());
    assert_eq!(p.worker.start_load(&withdraw, at(1)), Ok(()));
    assert!(p.worker.to_process.is_empty());
    p.lease("r", at(30));
    let fatal = EngineFatal::WithdrawnWhileLeased { request: "r".to_owned() };
    assert_eq!(p.worker.start_load(&withdraw, at(1)), Err(fatal));
}

#[test]
fn heartbeats_connect_first_and_then_keep_leases_alive() {
    let (mut p, mut d) = (engine("p"), engine("d"));
    p.lease("p-request", at(30));
    let beat = Heartbeat {
        engine_id: "p".to_owned(),
        host: "127.0.0.1".to_owned(),
        port: 5600,
        tp_size: 1,
        dcp_size: 1,
        pp_size: 1,
        request_ids: BTreeSet::from(["p-request".to_owned()]),
    };
    let meta = StepMeta { heartbeats: vec![beat], ..StepMeta::default() };
    d.worker.start_load(&meta, at(1)).unwrap();
    d.worker.start_load(&meta, at(2)).unwrap();
    d.shake_hands(&p, at(2)).unwrap();
    d.worker.start_load(&meta, at(3)).unwrap();
    let started = Instant::now();
    // 20 s from when P sees the message, at 25.
    while p.worker.leases["p-request"] != at(45) {
        assert!(started.elapsed() < Duration::from_secs(5), "no heartbeat arrived");
        assert!(p.worker.poll(at(25)).unwrap().is_empty());
        std::thread::yield_now();
    }
    assert_eq!(p.worker.poll(at(45)).unwrap().finished_sending, ["p-request"]);
}

#[test]
fn shutdown_releases_everything_once() {
    let (p, mut d) = (engine("p"), engine("d"));
    d.start(&[("r", recv("p", &[0], &[1], true))], at(1)).unwrap();
    d.faults.hold_transfers(true);
    d.shake_hands(&p, at(1)).unwrap();
    assert!(d.worker.poll(at(1)).unwrap().is_empty());
    assert_eq!(d.worker.transport.live_handles(), 3);
    for _ in 0..3 {
        d.worker.shutdown();
        assert_eq!(d.worker.transport.live_handles(), 0);
    }
    assert_eq!(d.worker.connected_engines().count(), 0);
}

#[test]
fn impossible_regions_are_refused() {
    let build = |change: fn(&mut Region)| {
        let memory = KvMemory::allocate(&[64]);
        let mut region = Region {
            name: "l".to_owned(),
            base_address: memory.base_addresses()[0],
            block_len: 32,
            block_stride: 32,
            num_blocks: 2,
            memory: MemoryType::Dram,
            group: 0,
        };
        change(&mut region);
        let config = WorkerConfig::new(Generation::V14, "e", String::new());
        Worker::new(config, LoopbackAgent::new("e", memory).unwrap(), vec![region]).map(|_| ())
    };
    assert_eq!(build(|_| {}), Ok(()));
    assert_eq!(build(|r| r.block_stride = 8), Err(WorkerSetupError::BadRegion { region: 0 }));
    assert!(matches!(build(|r| r.num_blocks = 3), Err(WorkerSetupError::Transport(_))));
}
