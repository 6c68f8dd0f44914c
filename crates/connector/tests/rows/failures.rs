//! Failures and what they leave behind: T46 to T54.

use kv_connector::transport::TransferState::{self, Done, Failed, InProgress};
use kv_connector::transport::loopback::{Call, Fabric};
use kv_connector::worker::{TransferResults, WorkerConfig};

use crate::rows;
use crate::support::{
    Engine, Rank, at, engine, failed, finished, logged, notifications, recv, releases, transfers,
};

fn decode(fabric: &Fabric, hma: bool) -> Rank {
    let edit = move |config: &mut WorkerConfig| config.hma_required = hma;
    Engine::new(fabric, "d").edit(&edit).rank(0)
}

fn t46(awaiting: bool, notification_fails: bool) {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    d.faults.fail_next(Call::SendNotification, usize::from(notification_fails));
    d.start(&[("r", recv("p", &[], &[1], awaiting))], at(1));
    d.connect(&p, at(1));
    let expected = if awaiting { finished("r") } else { TransferResults::default() };
    assert_eq!(d.poll(at(1)), expected);
    let failures = d.worker.take_stats().map_or(0, |stats| stats.num_failed_notifications.len());
    assert_eq!(failures, usize::from(notification_fails));
    assert!(d.poll(at(1)).is_empty());
    assert!(!d.worker.has_pending_receives());
}

rows! {
    t46_1_an_awaited_empty_receive_is_reported => t46(true, false);
    t46_2_an_awaited_empty_receive_is_reported_although_the_notification_fails => t46(true, true);
    t46_3_an_empty_receive_nobody_awaits_is_not_reported => t46(false, false);
    t46_4_an_empty_receive_nobody_awaits_is_not_reported_when_the_notification_fails => t46(false, true);
}

fn t47(hma: bool, local: Vec<Vec<u64>>, awaiting: bool) {
    let fabric = Fabric::default();
    let mut d = decode(&fabric, hma);
    let blocks: Vec<u64> = local.concat();
    let mut request = recv("p", &[], &[1, 2, 3], awaiting);
    request.local_block_ids = local;
    d.start(&[("r", request)], at(1));
    d.fail_handshake(at(1));
    let expected = if awaiting { failed("r") } else { TransferResults::default() };
    assert_eq!(d.poll(at(1)), expected);
    assert_eq!(d.invalid_blocks(), if hma { Vec::new() } else { blocks });
    assert!(d.poll(at(1)).is_empty());
    assert!(!d.worker.has_pending_receives());
}

rows! {
    t47_1_failed_handshake_without_groups_not_awaited => t47(false, vec![], false);
    t47_2_failed_handshake_without_blocks_not_awaited => t47(false, vec![vec![]], false);
    t47_3_failed_handshake_without_blocks_awaited => t47(false, vec![vec![]], true);
    t47_4_failed_handshake_with_blocks_awaited => t47(false, vec![vec![1, 2, 3]], true);
    t47_5_failed_handshake_without_groups_not_awaited_hybrid => t47(true, vec![], false);
    t47_6_failed_handshake_without_blocks_not_awaited_hybrid => t47(true, vec![vec![]], false);
    t47_7_failed_handshake_without_blocks_awaited_hybrid => t47(true, vec![vec![]], true);
    t47_8_failed_handshake_with_blocks_awaited_hybrid => t47(true, vec![vec![1, 2, 3]], true);
}

/// Ways for one receive to fail.
#[derive(Clone, Copy, PartialEq)]
enum Failure {
    Setup,
    Handshake,
    Notification,
    State,
    Exception,
}

/// A receive of blocks 1, 2, 3 that fails in that way, up to but without the poll that shows it.
fn failing(fabric: &Fabric, p: &[Rank], failure: Failure, hma: bool) -> Rank {
    let mut d = decode(fabric, hma);
    d.faults.record();
    match failure {
        Failure::Setup => d.faults.fail_next(Call::MakeTransfer, 1),
        Failure::Notification => d.faults.fail_next(Call::SendNotification, 1),
        Failure::State => d.faults.script_transfers([vec![Failed]]),
        Failure::Exception => d.faults.fail_next(Call::Poll, 1),
        Failure::Handshake => {}
    }
    let local: &[u64] = if failure == Failure::Notification { &[] } else { &[1, 2, 3] };
    d.start(&[("r", recv("p", local, &[1, 2, 3], true))], at(1));
    if failure == Failure::Handshake {
        d.fail_handshake(at(1));
    } else {
        d.connect(p, at(1));
    }
    d
}

fn t48(failure: Failure, hma: bool, names: &[&str]) {
    let fabric = Fabric::default();
    let p = [engine(&fabric, "p")];
    let log = logged(|| {
        failing(&fabric, &p, failure, hma).poll(at(1));
    });
    let line = log
        .lines()
        .find(|line| line.contains("ERROR") && names.iter().any(|name| line.contains(name)))
        .unwrap_or_else(|| panic!("{log}"));
    for part in ["NIXL transfer failure", "failure_type", "Context:"] {
        assert!(line.contains(part), "{line}");
    }
    let context: serde_json::Value = serde_json::from_str(
        line.split_once("Context: ")
            .unwrap()
            .1
            .split("} failure_type")
            .next()
            .map(|json| if json.ends_with('}') { json.to_owned() } else { format!("{json}}}") })
            .unwrap()
            .as_str(),
    )
    .unwrap();
    assert_eq!(context["engine_id"], "d");
    assert_eq!(context["remote_engine_id"], "p");
}

rows! {
    t48_1_a_failed_setup_is_logged => t48(Failure::Setup, false, &["transfer_setup_failed"]);
    t48_2_a_failed_handshake_is_logged => t48(Failure::Handshake, false, &["handshake_failed", "handshake_setup_failed"]);
    t48_3_a_failed_notification_is_logged => t48(Failure::Notification, false, &["notification_failed"]);
    t48_4_a_failed_transfer_is_logged => t48(Failure::State, false, &["transfer_failed"]);
    t48_5_an_exception_is_logged => t48(Failure::Exception, false, &["transfer_exception"]);
    t48_6_a_failed_setup_is_logged_hybrid => t48(Failure::Setup, true, &["transfer_setup_failed"]);
    t48_7_a_failed_handshake_is_logged_hybrid => t48(Failure::Handshake, true, &["handshake_failed", "handshake_setup_failed"]);
    t48_8_a_failed_notification_is_logged_hybrid => t48(Failure::Notification, true, &["notification_failed"]);
    t48_9_a_failed_transfer_is_logged_hybrid => t48(Failure::State, true, &["transfer_failed"]);
    t48_10_an_exception_is_logged_hybrid => t48(Failure::Exception, true, &["transfer_exception"]);
}

#[test]
fn t49_a_failed_handshake_is_reported_as_finished_and_failed() {
    let fabric = Fabric::default();
    let mut d = failing(&fabric, &[], Failure::Handshake, false);
    assert!(d.invalid_blocks().is_empty(), "nothing shows before the report");
    assert_eq!(d.poll(at(1)), failed("r"));
    assert_eq!(d.invalid_blocks(), [1, 2, 3]);
    let stats = d.worker.take_stats().unwrap();
    assert_eq!((stats.num_failed_handshakes, stats.num_failed_transfers), (vec![1], vec![]));
}

fn t50(hma: bool, invalid: &[u64]) {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], decode(&fabric, hma));
    d.faults.fail_next(Call::MakeTransfer, 1);
    d.start(&[("r", recv("p", &[7, 8, 9], &[1, 2, 3], true))], at(1));
    d.connect(&p, at(1));
    assert!(d.invalid_blocks().is_empty());
    assert_eq!(d.poll(at(1)), failed("r"));
    assert_eq!(d.invalid_blocks(), invalid);
    assert_eq!(d.worker.take_stats().unwrap().num_failed_transfers, [1]);
}

rows! {
    t50_1_a_failed_setup_is_reported_with_its_blocks => t50(false, &[7, 8, 9]);
    t50_2_a_failed_setup_is_reported_without_blocks_when_hybrid => t50(true, &[]);
}

/// A decode rank that reads from two prefill ranks, whose transfers follow the scripts.
fn split_read(fabric: &Fabric, scripts: [Vec<TransferState>; 2]) -> (Vec<Rank>, Rank) {
    let p = Engine::new(fabric, "p").tp(2, 8).ranks();
    let mut d = engine(fabric, "d");
    d.faults.record();
    d.faults.script_transfers(scripts);
    let mut request = recv("p", &[7, 8, 9], &[1, 2, 3], true);
    request.tp_size = 2;
    d.start(&[("r", request)], at(1));
    d.connect(&p, at(1));
    (p, d)
}

#[test]
fn t51_a_failed_half_is_reported_with_the_last_handle() {
    let fabric = Fabric::default();
    let (_p, mut d) = split_read(&fabric, [vec![Failed], vec![InProgress, InProgress]]);
    d.faults.take_journal();
    for _ in 0..2 {
        assert!(d.poll(at(1)).is_empty());
        assert!(d.invalid_blocks().is_empty());
    }
    assert_eq!(releases(&d.faults.take_journal()), 1, "the failed half");
    assert_eq!(d.poll(at(1)), failed("r"));
    assert_eq!(d.invalid_blocks(), [7, 8, 9]);
    assert_eq!(releases(&d.faults.take_journal()), 1, "the other half");
    assert!(d.poll(at(1)).is_empty());
    assert_eq!(d.faults.released_in_progress(), 0);
}

fn t52(failure: Failure) {
    let fabric = Fabric::default();
    let p = [engine(&fabric, "p")];
    let edit = |config: &mut WorkerConfig| config.hma_required = false;
    let geometry = |rank: &Rank| rank.worker.geometry().clone();
    // A worker with a host buffer would have copies to make after a good receive.
    let plain = Engine::new(&fabric, "d").edit(&edit).rank(0);
    let host_buffer = kv_connector::regions::LocalGeometry { host_buffer: true, ..geometry(&plain) };
    let agent =
        kv_connector::transport::loopback::LoopbackAgent::in_fabric("d", plain.memory.clone(), &fabric);
    let faults = agent.faults();
    let ranges = host_buffer.regions.iter().map(|region| {
        let range = kv_connector::transport::Descriptor {
            address: region.base_address,
            len: region.span(),
            device: 0,
        };
        (region.memory, range)
    });
    let ranges = ranges.collect();
    let worker = kv_connector::worker::Worker::with_geometry(
        plain.worker.config().clone(),
        agent,
        host_buffer,
        ranges,
    )
    .unwrap();
    let mut d = Rank { worker, memory: plain.memory.clone(), faults, heads: plain.heads };
    d.start(&[("good", recv("p", &[5], &[1], true))], at(1));
    d.connect(&p, at(1));
    assert_eq!(d.poll(at(1)).received[0].copy_to_device, [5]);
    match failure {
        Failure::Setup => d.faults.fail_next(Call::MakeTransfer, 1),
        Failure::State => d.faults.script_transfers([vec![Failed]]),
        Failure::Exception => d.faults.fail_next(Call::Poll, 1),
        _ => {}
    }
    let engine_id = if failure == Failure::Handshake { "elsewhere" } else { "p" };
    d.start(&[("r", recv(engine_id, &[1, 2, 3], &[1, 2, 3], true))], at(1));
    if failure == Failure::Handshake {
        d.fail_handshake(at(1));
    }
    assert_eq!(d.poll(at(1)), failed("r"), "nothing is left to be done with the blocks");
    assert_eq!(d.invalid_blocks(), [1, 2, 3]);
    assert!(!d.worker.has_pending_receives());
}

rows! {
    t52_1_a_failed_handshake_skips_post_processing => t52(Failure::Handshake);
    t52_2_a_failed_setup_skips_post_processing => t52(Failure::Setup);
    t52_3_a_failed_transfer_skips_post_processing => t52(Failure::State);
    t52_4_an_exception_skips_post_processing => t52(Failure::Exception);
}

fn t53(sibling: TransferState) {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    d.faults.script_transfers([vec![Failed], vec![InProgress, sibling]]);
    d.start(&[("r", recv("p", &[1, 2, 3], &[1, 2, 3], true))], at(1));
    d.connect(&p, at(1));
    d.start(&[("r", recv("p", &[1, 2, 3], &[1, 2, 3], true))], at(1));
    d.faults.record();
    assert!(d.poll(at(1)).is_empty());
    assert!(d.invalid_blocks().is_empty());
    assert_eq!(releases(&d.faults.take_journal()), 1);
    assert_eq!(d.poll(at(1)), failed("r"));
    assert_eq!(d.invalid_blocks(), [1, 2, 3]);
    assert!(notifications(&d.faults.take_journal()).is_empty());
    assert!(d.poll(at(1)).is_empty());
}

rows! {
    t53_1_a_failure_waits_for_a_sibling_that_fails => t53(Failed);
    t53_2_a_failure_waits_for_a_sibling_that_succeeds => t53(Done);
}

#[test]
fn t54_a_handle_that_can_neither_be_polled_nor_released_is_kept() {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    d.start(&[("r", recv("p", &[1, 2, 3], &[1, 2, 3], true))], at(1));
    d.connect(&p, at(1));
    d.faults.fail_next(Call::Poll, 1);
    d.faults.fail_next(Call::ReleaseTransfer, 1);
    assert!(d.poll(at(1)).is_empty());
    assert!(d.invalid_blocks().is_empty());
    d.faults.record();
    assert_eq!(d.poll(at(1)), failed("r"));
    assert_eq!(releases(&d.faults.take_journal()), 1);
    assert_eq!(d.invalid_blocks(), [1, 2, 3]);
}

#[test]
fn after_a_failed_start_no_further_rank_is_read_or_told() {
    let fabric = Fabric::default();
    let p = Engine::new(&fabric, "p").tp(4, 8).ranks();
    let mut d = engine(&fabric, "d");
    d.faults.record();
    d.faults.fail_after(Call::Post, 1, 1);
    let mut request = recv("p", &[7], &[1], true);
    request.tp_size = 4;
    d.start(&[("r", request)], at(1));
    d.connect(&p, at(1));
    let journal = d.faults.take_journal();
    assert_eq!(transfers(&journal).len(), 2, "the third and fourth are not made");
    assert!(notifications(&journal).is_empty());
    assert_eq!(d.poll(at(1)), failed("r"));
}

#[test]
fn the_prefill_is_not_told_of_a_failed_read() {
    let fabric = Fabric::default();
    let mut p = [engine(&fabric, "p")];
    p[0].lease("p-request", at(30));
    let mut d = failing(&fabric, &p, Failure::State, false);
    assert_eq!(d.poll(at(1)), failed("r"));
    assert!(p[0].poll(at(29)).is_empty());
    assert_eq!(p[0].poll(at(30)).finished_sending, ["p-request"]);
}
