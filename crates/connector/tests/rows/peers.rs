//! Peers that come and go: T33 to T43, and those the transport loses.

use kv_connector::scheduler::{Heartbeat, RecvRequest, StepMeta};
use kv_connector::transport::TransferState::{self, Done, Failed, InProgress};
use kv_connector::transport::loopback::{Call, Event, Fabric};
use kv_connector::worker::WorkerConfig;

use crate::rows;
use crate::support::{BLOCKS, Engine, Rank, at, engine, failed, finished, notifications, recv, releases};

fn removed_agents(journal: &[Event]) -> Vec<String> {
    let removed = journal.iter().filter_map(|event| match event {
        Event::RemovedAgent(agent) => Some(agent.0.split('#').next().unwrap().to_owned()),
        _ => None,
    });
    removed.collect()
}

fn released_lists(journal: &[Event]) -> usize {
    journal.iter().filter(|event| matches!(event, Event::ReleasedList(_))).count()
}

#[test]
fn t33_shutdown_releases_everything_once() {
    let fabric = Fabric::default();
    let p = Engine::new(&fabric, "p").tp(2, 8).ranks();
    let mut d = engine(&fabric, "d");
    d.faults.hold_transfers(true);
    d.faults.fail_after(Call::Post, 1, 1);
    let mut request = recv("p", &[7], &[1], true);
    request.tp_size = 2;
    d.start(&[("r", request)], at(1));
    d.connect(&p, at(1));
    d.faults.record();
    for round in 0..3 {
        d.worker.shutdown();
        let journal = d.faults.take_journal();
        let expected = if round == 0 { (1, 5, 2, 1) } else { (0, 0, 0, 0) };
        let deregistered = journal.iter().filter(|event| matches!(event, Event::Deregistered(_))).count();
        let counts =
            (releases(&journal), released_lists(&journal), removed_agents(&journal).len(), deregistered);
        assert_eq!(counts, expected, "transfers, lists (1 whole, 2 slices, 2 remote), agents, registrations");
        if round == 0 {
            let at = |wanted: fn(&Event) -> bool| journal.iter().position(wanted).unwrap();
            let transfer = at(|event| matches!(event, Event::Released(_)));
            let list = at(|event| matches!(event, Event::ReleasedList(_)));
            let agent = at(|event| matches!(event, Event::RemovedAgent(_)));
            let memory = at(|event| matches!(event, Event::Deregistered(_)));
            assert!(transfer < list && list < agent && agent < memory, "{journal:?}");
        }
    }
    assert!(d.connected().is_empty());
}

#[test]
fn t33_shutdown_goes_on_after_a_failed_step() {
    let fabric = Fabric::default();
    let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
    d.faults.hold_transfers(true);
    d.start(&[("r", recv("p", &[7], &[1], true))], at(1));
    d.connect(&p, at(1));
    for call in [Call::ReleaseTransfer, Call::ReleaseList, Call::RemoveRemoteAgent] {
        d.faults.fail_next(call, 1);
    }
    d.faults.record();
    d.worker.shutdown();
    let journal = d.faults.take_journal();
    assert_eq!(released_lists(&journal), 1, "the remote list");
    assert!(journal.iter().any(|event| matches!(event, Event::Deregistered(_))));
}

/// A decode rank with a TTL, connected to "old" by a receive that has ended unless `scripted`.
fn with_peer(fabric: &Fabric, old: &[Rank], ttl: u64, scripted: &[TransferState]) -> Rank {
    let edit = move |config: &mut WorkerConfig| config.engine_ttl = at(ttl);
    let mut d = Engine::new(fabric, "d").edit(&edit).rank(0);
    if !scripted.is_empty() {
        d.faults.script_transfers([scripted.to_vec()]);
    }
    let mut request = recv("old", &[1], &[1], true);
    request.tp_size = old.len() as u32;
    d.start(&[("r", request)], at(0));
    d.connect(old, at(0));
    if scripted.is_empty() {
        assert_eq!(d.poll(at(0)), finished("r"));
    }
    d.faults.record();
    d
}

/// Asks for an engine elsewhere, which is when idle ones are looked for.
fn ask_elsewhere(d: &mut Rank, now: u64) {
    let mut elsewhere = recv("elsewhere", &[2], &[1], false);
    elsewhere.remote.port = 1;
    d.start(&[("e", elsewhere)], at(now));
    if d.worker.take_handshake_jobs().pop().is_some() {
        let failure = kv_connector::worker::HandshakeFailure::Timeout;
        d.worker.complete_handshake("elsewhere", Err(failure), at(now)).unwrap_err();
    }
    d.poll(at(now));
}

#[test]
fn t34_idle_engines_are_evicted() {
    let fabric = Fabric::default();
    let old = Engine::new(&fabric, "old").tp(2, 8).ranks();
    let mut d = with_peer(&fabric, &old, 10, &[]);
    ask_elsewhere(&mut d, 10);
    assert_eq!(d.connected(), ["old"]);
    ask_elsewhere(&mut d, 20);
    assert!(d.connected().is_empty());
    let journal = d.faults.take_journal();
    assert_eq!((released_lists(&journal), removed_agents(&journal).len()), (2, 2));
    // The next receive shakes hands anew.
    let mut request = recv("old", &[3], &[1], true);
    request.tp_size = 2;
    d.start(&[("again", request)], at(21));
    d.connect(&old, at(21));
    assert_eq!(d.poll(at(21)), finished("again"));
}

#[test]
fn t35_an_engine_with_a_transfer_in_flight_is_not_evicted() {
    let fabric = Fabric::default();
    let mut d = with_peer(&fabric, &[engine(&fabric, "old")], 10, &[InProgress, InProgress]);
    ask_elsewhere(&mut d, 20);
    assert_eq!(d.connected(), ["old"]);
    assert!(d.poll(at(20)).is_empty());
    assert_eq!(d.poll(at(20)).finished_recving, ["r"]);
    ask_elsewhere(&mut d, 20);
    assert!(d.connected().is_empty());
}

#[test]
fn t36_without_a_ttl_nothing_is_evicted() {
    let fabric = Fabric::default();
    let mut d = with_peer(&fabric, &[engine(&fabric, "old")], 0, &[]);
    ask_elsewhere(&mut d, 1_000_000);
    assert_eq!(d.connected(), ["old"]);
}

/// Also connects a peer at another address, which must never be touched.
fn connect_other(fabric: &Fabric, d: &mut Rank) -> Rank {
    let other = [engine(fabric, "other")];
    let mut request = recv("other", &[4], &[1], true);
    request.remote.port = 5601;
    d.start(&[("o", request)], at(0));
    d.connect(&other, at(0));
    d.poll(at(0));
    let [other] = other;
    other
}

#[test]
fn t37_an_engine_that_took_over_an_address_replaces_the_old_one() {
    let fabric = Fabric::default();
    let new = [engine(&fabric, "new")];
    let mut d = with_peer(&fabric, &[engine(&fabric, "old")], 0, &[]);
    let _other = connect_other(&fabric, &mut d);
    d.start(&[("n", recv("new", &[2], &[1], true))], at(1));
    assert!(d.poll(at(1)).is_empty());
    assert_eq!(d.connected(), ["old", "other"], "not before the new one is confirmed");
    d.connect(&new, at(1));
    assert_eq!(d.poll(at(1)), finished("n"));
    assert_eq!(d.connected(), ["new", "other"]);
    d.poll(at(2));
    assert_eq!(removed_agents(&d.faults.take_journal()), ["old-0"], "once");
}

fn t38(change: fn(&mut RecvRequest)) {
    let fabric = Fabric::default();
    let new = [engine(&fabric, "new")];
    let mut d = with_peer(&fabric, &[engine(&fabric, "old")], 0, &[]);
    let mut request = recv("new", &[2], &[1], true);
    change(&mut request);
    d.start(&[("n", request)], at(1));
    d.connect(&new, at(1));
    d.poll(at(1));
    assert_eq!(d.connected(), ["new", "old"]);
    assert!(removed_agents(&d.faults.take_journal()).is_empty());
}

rows! {
    t38_1_an_engine_on_another_host_replaces_nothing => t38(|request| request.remote.host = "10.0.0.9".to_owned());
    t38_2_an_engine_on_another_port_replaces_nothing => t38(|request| request.remote.port = 5700);
}

#[test]
fn t39_a_failed_handshake_leaves_the_old_engine() {
    let fabric = Fabric::default();
    let mut d = with_peer(&fabric, &[engine(&fabric, "old")], 0, &[]);
    d.start(&[("n", recv("new", &[2], &[1], true))], at(1));
    d.fail_handshake(at(1));
    assert_eq!(d.poll(at(1)), failed("n"));
    assert_eq!(d.connected(), ["old"]);
    assert!(d.faults.take_journal().is_empty());
}

/// A receive from the old engine by two reads, while a new engine takes over the address.
fn t40(scripts: &[&[TransferState]], fails: bool) {
    let fabric = Fabric::default();
    let (old, new) = ([engine(&fabric, "old")], [engine(&fabric, "new")]);
    let mut d = engine(&fabric, "d");
    d.faults.script_transfers(scripts.iter().map(|script| script.to_vec()));
    d.start(&[("r", recv("old", &[1], &[1], true))], at(0));
    d.connect(&old, at(0));
    for _ in 1..scripts.len() {
        d.start(&[("r", recv("old", &[1], &[1], true))], at(0));
    }
    d.start(&[("n", recv("new", &[], &[1], false))], at(0));
    d.connect(&new, at(0));
    d.faults.record();
    assert!(d.poll(at(1)).is_empty());
    assert!(d.invalid_blocks().is_empty());
    let journal = d.faults.take_journal();
    assert!(removed_agents(&journal).is_empty() && d.connected() == ["new", "old"]);
    assert_eq!(d.poll(at(2)), if fails { failed("r") } else { finished("r") });
    assert_eq!(d.invalid_blocks(), if fails { vec![1] } else { vec![] });
    let all: usize = releases(&journal) + releases(&d.faults.take_journal());
    assert_eq!(all, scripts.len());
    assert!(d.poll(at(3)).is_empty());
    assert_eq!(d.connected(), ["new"]);
    assert_eq!(d.faults.released_in_progress(), 0);
}

rows! {
    t40_1_a_replaced_engine_stays_for_its_read => t40(&[&[InProgress, Done]], false);
    t40_2_a_failure_waits_for_the_sibling_that_completes => t40(&[&[Failed], &[InProgress, Done]], true);
    t40_3_a_failure_waits_for_the_sibling_that_fails => t40(&[&[Failed], &[InProgress, Failed]], true);
}

/// Shakes hands with "old", for whom `request` waits, and with "new" at the same address.
fn queued_for_a_replaced_engine(fabric: &Fabric, request: RecvRequest) -> (Rank, [Rank; 2]) {
    let (old, new) = (engine(fabric, "old"), engine(fabric, "new"));
    let mut d = engine(fabric, "d");
    d.faults.record();
    let beat = Heartbeat {
        engine_id: "new".to_owned(),
        host: request.remote.host.clone(),
        port: request.remote.port,
        tp_size: 1,
        dcp_size: 1,
        pp_size: 1,
        request_ids: ["x".to_owned()].into(),
    };
    let meta = StepMeta {
        reqs_to_recv: vec![("t".to_owned(), request)],
        heartbeats: vec![beat],
        ..StepMeta::default()
    };
    d.worker.start_load(&meta, at(1)).unwrap();
    let peers = [old, new];
    for (index, job) in d.worker.take_handshake_jobs().iter().enumerate() {
        d.answer(job, &peers[index..], at(1)).unwrap();
    }
    (d, peers)
}

#[test]
fn t41_a_queued_notification_keeps_the_replaced_engine() {
    let fabric = Fabric::default();
    let mut tell = recv("old", &[], &[1], true);
    tell.remote.request_id = "old-prefill".to_owned();
    let (mut d, _peers) = queued_for_a_replaced_engine(&fabric, tell);
    assert!(d.poll(at(1)).is_empty());
    assert_eq!(d.connected(), ["new", "old"]);
    d.step(at(2));
    let told = notifications(&d.faults.take_journal());
    assert_eq!(told, [("old-0".to_owned(), "old-prefill:1".to_owned())]);
    assert_eq!(d.poll(at(2)), finished("t"));
    assert_eq!(d.connected(), ["new"]);
}

#[test]
fn t42_open_handshakes_put_off_all_releases() {
    let fabric = Fabric::default();
    let new = [engine(&fabric, "new")];
    let mut d = with_peer(&fabric, &[engine(&fabric, "old")], 0, &[]);
    let mut elsewhere = recv("third", &[3], &[1], false);
    elsewhere.remote.port = 5700;
    d.start(&[("t", elsewhere), ("n", recv("new", &[2], &[1], true))], at(1));
    let jobs = d.worker.take_handshake_jobs();
    let job = jobs.iter().find(|job| job.engine_id == "new").unwrap();
    d.answer(job, &new, at(1)).unwrap();
    d.step(at(1));
    assert_eq!(d.poll(at(1)), finished("n"));
    assert_eq!(d.connected(), ["new", "old"]);
    let failure = kv_connector::worker::HandshakeFailure::Timeout;
    d.worker.complete_handshake("third", Err(failure), at(1)).unwrap_err();
    d.poll(at(1));
    assert_eq!(d.connected(), ["new"]);
}

#[test]
fn t43_a_queued_request_of_a_released_engine_shakes_hands_again() {
    let fabric = Fabric::default();
    // Nobody awaits it, so it does not hold the engine back.
    let (mut d, _peers) = queued_for_a_replaced_engine(&fabric, recv("old", &[], &[1], false));
    assert!(d.poll(at(1)).is_empty());
    assert_eq!(d.connected(), ["new"]);
    d.step(at(2));
    assert!(notifications(&d.faults.take_journal()).is_empty(), "nothing is sent");
    assert_eq!(d.job().engine_id, "old");
}

/// One receive from "p" that fails although the transport has lost what it knew of its peers.
fn lose(d: &mut Rank, now: u64) {
    d.faults.script_transfers([vec![Failed]]);
    d.start(&[("r", recv("p", &[1], &[1], true))], at(now));
    d.faults.lose_agents(true);
    assert_eq!(d.poll(at(now)), failed("r"));
    d.faults.lose_agents(false);
}

#[test]
fn a_peer_the_transport_has_lost_is_connected_anew_after_longer_and_longer_times() {
    let fabric = Fabric::default();
    let p = [engine(&fabric, "p")];
    let mut d = engine(&fabric, "d");
    d.start(&[("first", recv("p", &[1], &[1], true))], at(0));
    d.connect(&p, at(0));
    assert_eq!(d.poll(at(0)), finished("first"));
    let mut now = 0;
    for backoff in [0, 1, 2, 4, 8, 16, 32, 60, 60] {
        lose(&mut d, now);
        if backoff > 0 {
            assert_eq!(d.connected(), ["p"], "kept for {backoff} s");
            d.start(&[("early", recv("p", &[1], &[1], true))], at(now + backoff - 1));
            assert!(d.worker.take_stats().unwrap().num_failed_transfers.len() <= 1);
            assert_eq!(d.poll(at(now + backoff - 1)), failed("early"), "fails at once");
            assert_eq!(d.worker.take_stats(), None, "and is no failure of the transport");
        } else {
            d.worker.take_stats();
        }
        now += backoff;
        d.poll(at(now));
        assert!(d.connected().is_empty(), "released after {backoff} s");
        d.start(&[("again", recv("p", &[1], &[1], true))], at(now));
        d.connect(&p, at(now));
        assert_eq!(d.poll(at(now)), finished("again"));
    }
    // Healthy for long enough: forgotten.
    now += 61;
    lose(&mut d, now);
    d.poll(at(now));
    assert!(d.connected().is_empty());
}

#[test]
fn a_lost_peer_is_kept_until_its_transfers_have_ended() {
    let fabric = Fabric::default();
    let p = [engine(&fabric, "p")];
    let mut d = engine(&fabric, "d");
    d.faults.script_transfers([vec![InProgress, InProgress], vec![Failed]]);
    d.start(&[("slow", recv("p", &[1], &[1], true)), ("r", recv("p", &[2], &[1], true))], at(0));
    d.connect(&p, at(0));
    d.faults.lose_agents(true);
    assert_eq!(d.poll(at(0)), failed("r"));
    assert_eq!(d.connected(), ["p"]);
    assert!(d.poll(at(0)).is_empty());
    assert_eq!(d.poll(at(0)), finished("slow"));
    assert!(d.connected().is_empty());
}

#[test]
fn a_failure_with_a_peer_that_is_still_known_changes_nothing() {
    let fabric = Fabric::default();
    let p = [engine(&fabric, "p")];
    let mut d = engine(&fabric, "d");
    d.faults.script_transfers([vec![Failed]]);
    d.start(&[("r", recv("p", &[BLOCKS - 1], &[1], true))], at(0));
    d.connect(&p, at(0));
    assert_eq!(d.poll(at(0)), failed("r"));
    assert_eq!(d.connected(), ["p"]);
}
