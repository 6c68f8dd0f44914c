//! Push mode: the decode engine announces, the prefill engine writes.

use std::collections::BTreeSet;

use kv_connector::protocol::TransferMode;
use kv_connector::protocol::registration::PushRegistration;
use kv_connector::scheduler::{Heartbeat, RecvRequest, StepMeta};
use kv_connector::transport::TransferOp;
use kv_connector::transport::TransferState::{Done, Failed, InProgress};
use kv_connector::transport::loopback::{Call, Fabric};
use kv_connector::worker::{HandshakeFailure, WorkerConfig};

use crate::support::{
    Engine, Rank, at, failed, finished, logged, notifications, recv, releases, transfers, vectors,
};

fn ranks(fabric: &Fabric, name: &str, tp: u32, mla: bool) -> Vec<Rank> {
    let push = |config: &mut WorkerConfig| config.mode = TransferMode::Push;
    let engine = Engine::new(fabric, name).edit(&push);
    let ranks = if mla { engine.mla(tp).ranks() } else { engine.tp(tp, 8).ranks() };
    ranks.iter().for_each(|rank| rank.faults.record());
    ranks
}

fn awaited(local: &[u64], p_tp: u32) -> RecvRequest {
    let mut request = recv("p", local, &[], false);
    request.tp_size = p_tp;
    request
}

fn registration(request: &str, local: &[u64], d_tp: u32, p_tp: u32) -> PushRegistration {
    PushRegistration {
        request_id: request.to_owned(),
        decode_engine_id: "d".to_owned(),
        decode_host: "127.0.0.1".to_owned(),
        decode_port: 5700,
        decode_tp_size: d_tp,
        local_block_ids: vec![local.to_vec()],
        remote_engine_id: "p".to_owned(),
        remote_host: "127.0.0.1".to_owned(),
        remote_port: 5600,
        remote_tp_size: p_tp,
        remote_pp_size: 1,
    }
}

/// The decode side of a step that awaits and announces `request`.
fn announce(d: &mut [Rank], p: &[Rank], request: &str, local: &[u64]) {
    let (d_tp, p_tp) = (d.len() as u32, p.len() as u32);
    for rank in d {
        let meta = StepMeta {
            reqs_to_recv: vec![(request.to_owned(), awaited(local, p_tp))],
            push_registrations: vec![(request.to_owned(), registration(request, local, d_tp, p_tp))],
            ..StepMeta::default()
        };
        rank.worker.start_load(&meta, at(1)).unwrap();
        shake(rank, p);
    }
}

fn shake(rank: &mut Rank, peer: &[Rank]) {
    for job in rank.worker.take_handshake_jobs() {
        rank.answer(&job, peer, at(1)).unwrap();
        rank.step(at(1));
    }
}

/// The prefill side of a step in which `request` has finished.
fn finish(p: &mut [Rank], request: &str, blocks: &[u64], deadline: u64) {
    for rank in p {
        let meta = StepMeta {
            reqs_in_batch: BTreeSet::from([request.to_owned()]),
            reqs_to_send: vec![(request.to_owned(), at(deadline))],
            push_finished: vec![(request.to_owned(), vec![blocks.to_vec()])],
            ..StepMeta::default()
        };
        rank.worker.start_load(&meta, at(1)).unwrap();
    }
}

/// Whole pushes between engines of any width, in either order of the two sides.
fn pushes(d_tp: u32, p_tp: u32, mla: bool, announced_first: bool) {
    let fabric = Fabric::default();
    let (mut p, mut d) = (ranks(&fabric, "p", p_tp, mla), ranks(&fabric, "d", d_tp, mla));
    p.iter().for_each(|rank| (1..4).for_each(|block| rank.fill(block)));
    if announced_first {
        announce(&mut d, &p, "cmpl-x-0-11111111", &[7, 8]);
        p.iter_mut().for_each(|rank| assert!(rank.poll(at(1)).is_empty()));
        finish(&mut p, "cmpl-x-0-22222222", &[1, 2, 3], 30);
    } else {
        finish(&mut p, "cmpl-x-0-22222222", &[1, 2, 3], 30);
        announce(&mut d, &p, "cmpl-x-0-11111111", &[7, 8]);
    }
    for rank in &mut p {
        rank.poll(at(1));
        shake(rank, &d);
    }
    for rank in &mut p {
        assert_eq!(rank.poll(at(1)).finished_sending, ["cmpl-x-0-22222222"], "{d_tp} {p_tp}");
        assert_eq!(rank.worker.leases().count(), 0);
        assert_eq!(rank.faults.released_in_progress(), 0);
    }
    for rank in &mut d {
        assert_eq!(rank.poll(at(1)), finished("cmpl-x-0-11111111"), "{d_tp} {p_tp} {mla}");
        assert!(rank.holds(7, 2) && rank.holds(8, 3), "{d_tp} {p_tp} {mla}");
        assert!(!rank.worker.has_pending_receives());
    }
}

#[test]
fn every_decode_rank_is_written_whatever_the_widths_and_the_order() {
    for (d_tp, p_tp) in [(1, 1), (2, 2), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)] {
        for mla in [false, true] {
            for announced_first in [false, true] {
                pushes(d_tp, p_tp, mla, announced_first);
            }
        }
    }
}

#[test]
fn writes_carry_the_decode_request_and_the_width_of_the_prefill() {
    let fabric = Fabric::default();
    let (mut p, mut d) = (ranks(&fabric, "p", 2, false), ranks(&fabric, "d", 1, false));
    announce(&mut d, &p, "d-1", &[7, 8]);
    let announced: Vec<String> =
        notifications(&d[0].faults.take_journal()).into_iter().map(|(to, _)| to).collect();
    assert_eq!(announced, ["p-0", "p-1"]);
    finish(&mut p, "d-1", &[1, 2, 3], 30);
    for (index, rank) in p.iter_mut().enumerate() {
        rank.poll(at(1));
        shake(rank, &d);
        let made = transfers(&rank.faults.take_journal());
        let [(op, local, _, notification)] = made.as_slice() else { panic!("one write") };
        assert_eq!((*op, notification.as_deref()), (TransferOp::Write, Some("d-1:2")));
        assert_eq!(local, &[2, 3, 18, 19], "the last two blocks of both regions");
        rank.poll(at(1));
        let results = d[0].poll(at(1));
        assert_eq!(results.is_empty(), index == 0, "both ranks have to write");
    }
}

#[test]
fn consumers_count_notifications_as_vllm_does() {
    let vectors = vectors("notifications.json");
    let cases = vectors["push_consumer_v14"].as_array().unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let fabric = Fabric::default();
        let local_tp = u32::try_from(case["local_tp"].as_u64().unwrap()).unwrap();
        let mut d = ranks(&fabric, "d", local_tp, false);
        let d = &mut d[0];
        for (request, pp_size) in case["recving_pp"].as_object().unwrap() {
            let mut request_of = awaited(&[1], 1);
            request_of.pp_size = u32::try_from(pp_size.as_u64().unwrap()).unwrap();
            d.start(&[(request, request_of)], at(1));
        }
        let mut sender = Sender::new(&fabric, d);
        for text in case["notifications"].as_array().unwrap() {
            sender.send(text.as_str().unwrap().as_bytes());
        }
        let results = d.poll(at(1));
        let result = &case["result"];
        assert_eq!(
            serde_json::to_value(&results.finished_recving).unwrap(),
            result["recv_complete"],
            "{name}"
        );
        assert_eq!(serde_json::to_value(&results.finished_sending).unwrap(), result["sent_done"], "{name}");
        let late = d.worker.take_stats().map_or(0, |stats| stats.num_notifications_after_expiry.len());
        assert_eq!(late as u64, result["after_expiry"], "{name}");
        // What is still counted shows in how many more are needed.
        if let Some(seen) = result["counts"].get("d") {
            let missing = if name.starts_with("tp2") { 4 } else { 2 } - seen.as_u64().unwrap();
            (0..missing).for_each(|_| sender.send(if name.starts_with("tp2") { b"d:4" } else { b"d:2" }));
            assert_eq!(d.poll(at(1)).finished_recving, ["d"], "{name}");
        }
    }
}

/// An agent that only sends notifications.
struct Sender {
    agent: kv_connector::transport::loopback::LoopbackAgent,
    peer: kv_connector::transport::AgentName,
}

impl Sender {
    fn new(fabric: &Fabric, to: &Rank) -> Self {
        use kv_connector::protocol::metadata::NixlAgentMetadata;
        use kv_connector::transport::{KvMemory, Transport, loopback::LoopbackAgent};
        let mut agent = LoopbackAgent::in_fabric("sender", KvMemory::allocate(&[1]), fabric);
        let NixlAgentMetadata::V14(metadata) = to.worker.agent_metadata() else { panic!("v14") };
        let peer = agent.add_remote_agent(&metadata.agent_metadata).unwrap();
        Self { agent, peer }
    }

    fn send(&mut self, message: &[u8]) {
        use kv_connector::transport::Transport;
        self.agent.send_notification(&self.peer, message).unwrap();
    }
}

#[test]
fn malformed_notifications_are_ignored() {
    let fabric = Fabric::default();
    let mut p = ranks(&fabric, "p", 2, false).remove(0);
    p.lease("r", at(30));
    let mut sender = Sender::new(&fabric, &p);
    for message in
        [&b"PUSH_REG:"[..], b"PUSH_REG:\xc1", b"r", b"r:x", b"\xff:1", b"", b"r:3", b"HB:", b"r:-1"]
    {
        sender.send(message);
    }
    assert!(p.poll(at(1)).is_empty());
    assert_eq!(p.worker.leases().collect::<Vec<_>>(), [("r", at(30))]);
}

/// An announced receive and a finished prefill, up to the write, whose transfer follows `script`.
fn written(fabric: &Fabric, script: Vec<kv_connector::transport::TransferState>) -> (Vec<Rank>, Vec<Rank>) {
    let (mut p, mut d) = (ranks(fabric, "p", 1, false), ranks(fabric, "d", 1, false));
    p[0].faults.script_transfers([script]);
    announce(&mut d, &p, "r", &[7]);
    finish(&mut p, "r", &[1], 30);
    p[0].poll(at(1));
    shake(&mut p[0], &d);
    (p, d)
}

#[test]
fn a_lease_that_runs_out_waits_for_the_write_that_reads_the_blocks() {
    let fabric = Fabric::default();
    let (mut p, mut d) = written(&fabric, vec![InProgress, InProgress, Done]);
    assert!(p[0].poll(at(29)).is_empty());
    assert!(p[0].poll(at(31)).is_empty(), "the lease is over, the write is not");
    assert_eq!(p[0].poll(at(31)).finished_sending, ["r"]);
    assert_eq!(p[0].worker.take_stats().unwrap().num_kv_expired_reqs, Vec::<u64>::new());
    assert_eq!(d[0].poll(at(31)), finished("r"));
    assert!(p[0].poll(at(40)).is_empty(), "reported once");
}

#[test]
fn a_failed_write_is_left_to_the_lease() {
    let fabric = Fabric::default();
    let (mut p, mut d) = written(&fabric, vec![Failed]);
    assert!(p[0].poll(at(1)).is_empty());
    let stats = p[0].worker.take_stats().unwrap();
    assert_eq!((stats.num_failed_transfers, stats.num_failed_handshakes), (vec![1], vec![]));
    assert_eq!(releases(&p[0].faults.take_journal()), 1);
    assert!(d[0].poll(at(1)).is_empty());
    assert_eq!(p[0].poll(at(30)).finished_sending, ["r"]);
}

#[test]
fn a_failed_sibling_keeps_the_request_from_being_reported_as_sent() {
    let fabric = Fabric::default();
    let (mut p, mut d) = (ranks(&fabric, "p", 1, false), ranks(&fabric, "d", 2, false));
    p[0].faults.script_transfers([vec![Failed], vec![InProgress, InProgress]]);
    announce(&mut d, &p, "r", &[7]);
    finish(&mut p, "r", &[1], 30);
    p[0].poll(at(1));
    shake(&mut p[0], &d);
    for _ in 0..4 {
        assert!(p[0].poll(at(1)).is_empty());
    }
    assert_eq!(p[0].poll(at(30)).finished_sending, ["r"]);
}

#[test]
fn a_write_that_cannot_be_set_up_is_left_to_the_lease() {
    for (call, handles_kept) in [(Call::MakeTransfer, false), (Call::Post, false), (Call::Post, true)] {
        let fabric = Fabric::default();
        let (mut p, mut d) = (ranks(&fabric, "p", 1, false), ranks(&fabric, "d", 1, false));
        announce(&mut d, &p, "r", &[7]);
        finish(&mut p, "r", &[1], 30);
        p[0].poll(at(1));
        p[0].faults.fail_next(call, 1);
        p[0].faults.fail_next(Call::ReleaseTransfer, usize::from(handles_kept));
        let log = logged(|| shake(&mut p[0], &d));
        assert!(log.contains("transfer_setup_failed"), "{log}");
        p[0].faults.script_transfers([]);
        assert_eq!(p[0].worker.take_stats().unwrap().num_failed_transfers, [1]);
        p[0].poll(at(29));
        p[0].faults.fail_next(Call::Poll, 1);
        assert_eq!(p[0].poll(at(31)).finished_sending, ["r"], "{call:?}");
    }
}

#[test]
fn a_push_whose_blocks_are_gone_is_not_started() {
    let fabric = Fabric::default();
    let (mut p, mut d) = (ranks(&fabric, "p", 1, false), ranks(&fabric, "d", 1, false));
    finish(&mut p, "r", &[1], 30);
    announce(&mut d, &p, "r", &[7]);
    assert!(p[0].poll(at(1)).is_empty());
    let job = p[0].job();
    // The handshake takes longer than the lease.
    assert_eq!(p[0].poll(at(30)).finished_sending, ["r"]);
    p[0].answer(&job, &d, at(31)).unwrap();
    p[0].step(at(31));
    assert!(transfers(&p[0].faults.take_journal()).is_empty());
    announce(&mut d, &p, "r", &[8]);
    assert!(p[0].poll(at(32)).is_empty());
    assert!(transfers(&p[0].faults.take_journal()).is_empty(), "nor by a late announcement");
}

#[test]
fn failed_handshakes_fail_the_receive_but_only_delay_the_prefill() {
    let fabric = Fabric::default();
    let (mut p, mut d) = (ranks(&fabric, "p", 1, false), ranks(&fabric, "d", 1, false));
    let log = logged(|| {
        let meta = StepMeta {
            reqs_to_recv: vec![("r".to_owned(), awaited(&[7], 1))],
            push_registrations: vec![("r".to_owned(), registration("r", &[7], 1, 1))],
            ..StepMeta::default()
        };
        d[0].worker.start_load(&meta, at(1)).unwrap();
        d[0].fail_handshake(at(1));
    });
    assert!(log.contains("push_reg_handshake_failed"), "{log}");
    assert_eq!(d[0].poll(at(1)), failed("r"));
    announce(&mut d, &p, "q", &[7]);
    finish(&mut p, "q", &[1], 30);
    let log = logged(|| {
        p[0].poll(at(1));
        let job = p[0].job();
        p[0].worker.complete_handshake(&job.engine_id, Err(HandshakeFailure::Timeout), at(1)).unwrap_err();
    });
    assert!(log.contains("push_handshake_failed"), "{log}");
    assert_eq!(p[0].poll(at(30)).finished_sending, ["q"]);
}

#[test]
fn an_announcement_that_reaches_only_some_ranks_fails_nothing() {
    let fabric = Fabric::default();
    let (p, mut d) = (ranks(&fabric, "p", 2, false), ranks(&fabric, "d", 1, false));
    d[0].faults.fail_next(Call::SendNotification, 1);
    let log = logged(|| announce(&mut d, &p, "r", &[7]));
    assert!(log.contains("push_reg_notif_failed"), "{log}");
    assert!(d[0].poll(at(1)).is_empty());
    assert_eq!(d[0].worker.take_stats().unwrap().num_failed_notifications, [1]);
}

#[test]
fn a_prefill_that_nobody_needs_is_told_so() {
    for (d_tp, p_tp) in [(1, 1), (2, 1), (1, 2)] {
        let fabric = Fabric::default();
        let (mut p, mut d) = (ranks(&fabric, "p", p_tp, false), ranks(&fabric, "d", d_tp, false));
        finish(&mut p, "p-request", &[1], 30);
        for rank in &mut d {
            rank.start(&[("d-request", awaited(&[], p_tp))], at(1));
            shake(rank, &p);
            assert!(rank.poll(at(1)).is_empty(), "it is not awaited");
        }
        for rank in &mut p {
            assert_eq!(rank.poll(at(1)).finished_sending, ["p-request"], "{d_tp} {p_tp}");
        }
    }
}

#[test]
fn stages_of_a_prefill_are_only_notified_and_all_of_them_write() {
    let fabric = Fabric::default();
    let mut d = ranks(&fabric, "d", 1, false);
    let stage = ranks(&fabric, "p", 1, false);
    let beat = Heartbeat {
        engine_id: "p".to_owned(),
        host: "127.0.0.1".to_owned(),
        port: 5600,
        tp_size: 1,
        dcp_size: 1,
        pp_size: 2,
        request_ids: ["p-request".to_owned()].into(),
    };
    let meta = StepMeta { heartbeats: vec![beat], ..StepMeta::default() };
    d[0].worker.start_load(&meta, at(1)).unwrap();
    let job = d[0].job();
    assert_eq!(job.ranks, [(0, 0), (1, 0)]);
    d[0].answer(&job, &stage, at(1)).unwrap();
    d[0].worker.start_load(&meta, at(1)).unwrap();
    assert_eq!(notifications(&d[0].faults.take_journal()).len(), 2);
}

/// One pipeline stage of a prefill engine: a worker with one of the model's layers.
fn stage(fabric: &Fabric, layer: usize) -> Rank {
    use kv_connector::regions::{LocalGeometry, RegionRouting};
    use kv_connector::transport::Descriptor;
    use kv_connector::transport::loopback::LoopbackAgent;
    use kv_connector::worker::Worker;
    let push = |config: &mut WorkerConfig| config.mode = TransferMode::Push;
    let whole = Engine::new(fabric, "p").edit(&push).rank(0);
    let region = whole.worker.geometry().regions[layer].clone();
    let range = Descriptor { address: region.base_address, len: region.span(), device: 0 };
    let geometry = LocalGeometry {
        routing: RegionRouting::Window { first: layer },
        regions: vec![region],
        replicated: vec![false],
        ..whole.worker.geometry().clone()
    };
    let agent = LoopbackAgent::in_fabric("p", whole.memory.clone(), fabric);
    let faults = agent.faults();
    let memory = (kv_connector::transport::MemoryType::Dram, range);
    let worker = Worker::with_geometry(whole.worker.config().clone(), agent, geometry, vec![memory]).unwrap();
    Rank { worker, memory: whole.memory.clone(), faults, heads: whole.heads }
}

#[test]
fn every_stage_writes_its_own_layers_and_the_receive_waits_for_all() {
    let fabric = Fabric::default();
    let mut p = [stage(&fabric, 0), stage(&fabric, 1)];
    p.iter().for_each(|stage| stage.fill(1));
    let mut d = ranks(&fabric, "d", 1, false);
    let mut request = awaited(&[7], 1);
    request.pp_size = 2;
    let mut announced = registration("r", &[7], 1, 1);
    announced.remote_pp_size = 2;
    let meta = StepMeta {
        reqs_to_recv: vec![("r".to_owned(), request)],
        push_registrations: vec![("r".to_owned(), announced)],
        ..StepMeta::default()
    };
    d[0].worker.start_load(&meta, at(1)).unwrap();
    let job = d[0].job();
    assert_eq!(job.ranks, [(0, 0), (1, 0)]);
    let replies = job.ranks.iter().map(|&(pp_rank, tp_rank)| kv_connector::worker::RankReply {
        pp_rank,
        tp_rank,
        payload: p[pp_rank as usize].worker.handshake_payload(),
        clock: None,
    });
    let replies = Ok(replies.collect());
    d[0].worker.complete_handshake("p", replies, at(1)).unwrap();
    d[0].step(at(1));
    for (index, stage) in p.iter_mut().enumerate() {
        finish(std::slice::from_mut(stage), "r", &[1], 30);
        stage.poll(at(1));
        shake(stage, &d);
        assert_eq!(stage.poll(at(1)).finished_sending, ["r"]);
        let results = d[0].poll(at(1));
        assert_eq!(results, if index == 1 { finished("r") } else { Default::default() });
    }
    assert!(d[0].holds(7, 1));
}
