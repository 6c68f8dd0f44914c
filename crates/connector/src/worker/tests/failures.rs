use super::*;

/// A decode engine with one receive `r` in flight whose transfers do not end yet.
fn in_flight(local: &[u64]) -> (Engine, Engine) {
    let (p, mut d) = (engine("p"), engine("d"));
    d.faults.hold_transfers(true);
    d.start(&[("r", recv("p", local, &[1, 2, 3], true))], at(1)).unwrap();
    d.shake_hands(&p, at(1)).unwrap();
    assert!(d.worker.poll(at(1)).unwrap().is_empty());
    (p, d)
}

fn failed(request: &str) -> TransferResults {
    TransferResults {
        finished_sending: Vec::new(),
        finished_recving: vec![request.to_owned()],
        failed_recving: vec![request.to_owned()],
        received: Vec::new(),
    }
}

#[test]
fn a_failed_handshake_reports_only_what_is_awaited() {
    for (hma, local, awaiting, invalid) in [
        (false, &[][..], false, vec![]),
        (false, &[], true, vec![]),
        (false, &[1, 2, 3], true, vec![1, 2, 3]),
        (true, &[], false, vec![]),
        (true, &[1, 2, 3], true, vec![]),
    ] {
        let mut d = engine_with(Generation::V14, "d", |config| config.hma_required = hma);
        d.start(&[("r", recv("p", local, &[1, 2, 3], awaiting))], at(1)).unwrap();
        let job = d.worker.take_handshake_jobs().remove(0);
        let failure = Err(HandshakeFailure::Timeout);
        let result = d.worker.complete_handshake(&job.engine_id, failure, at(1));
        assert_eq!(result, Err(HandshakeError::Failure(HandshakeFailure::Timeout)));
        assert!(d.worker.take_invalid_blocks().is_empty(), "blocks show only with the report");
        let results = d.worker.poll(at(1)).unwrap();
        assert_eq!(results, if awaiting { failed("r") } else { TransferResults::default() });
        assert_eq!(d.worker.take_invalid_blocks().into_iter().collect::<Vec<_>>(), invalid);
        let stats = d.worker.take_stats().unwrap();
        assert_eq!((stats.num_failed_handshakes, stats.num_failed_transfers), (vec![1], vec![]));
        assert!(d.worker.poll(at(1)).unwrap().is_empty());
        assert!(!d.worker.has_pending_receives());
    }
}

#[test]
fn a_v2_engine_can_die_of_a_failed_handshake_as_vllm_does() {
    let mut d = engine_with(Generation::V2, "d", |config| config.v2_dies_on_failed_handshake = true);
    d.start(&[("r", recv("p", &[1], &[1], true))], at(1)).unwrap();
    let job = d.worker.take_handshake_jobs().remove(0);
    let failure = Err(HandshakeFailure::Unreachable);
    d.worker.complete_handshake(&job.engine_id, failure, at(1)).unwrap_err();
    let fatal = EngineFatal::PeerNeverRegistered { request: "r".to_owned(), engine_id: "p".to_owned() };
    assert_eq!(d.worker.poll(at(1)), Err(fatal));
    assert_eq!(d.worker.poll(at(1)), Ok(failed("r")));
}

#[test]
fn a_transfer_that_cannot_be_set_up_fails_its_request() {
    for call in [Call::MakeTransfer, Call::Post] {
        let (p, mut d) = (engine("p"), engine("d"));
        d.start(&[("r", recv("p", &[7, 8, 9], &[1, 2, 3], true))], at(1)).unwrap();
        d.faults.fail_next(call, 1);
        d.shake_hands(&p, at(1)).unwrap();
        assert!(d.worker.take_invalid_blocks().is_empty());
        assert_eq!(d.worker.poll(at(1)), Ok(failed("r")));
        assert_eq!(d.worker.take_invalid_blocks(), BTreeSet::from([7, 8, 9]));
        assert_eq!(d.worker.take_stats().unwrap().num_failed_transfers, [1]);
        assert_eq!(d.worker.transport.live_handles(), 2, "only the two lists are left");
    }
}

#[test]
fn a_handle_that_cannot_be_released_keeps_its_request_unreported() {
    let (_p, mut d) = in_flight(&[1, 2, 3]);
    d.faults.fail_next(Call::Poll, 1);
    d.faults.fail_next(Call::ReleaseTransfer, 1);
    assert!(d.worker.poll(at(1)).unwrap().is_empty(), "poll and release fail");
    assert!(d.worker.take_invalid_blocks().is_empty());
    d.faults.hold_transfers(false);
    assert_eq!(report(&mut d, at(1)), failed("r"));
    assert_eq!(d.worker.take_invalid_blocks(), BTreeSet::from([1, 2, 3]));
    assert!(d.worker.poll(at(1)).unwrap().is_empty());
}

#[test]
fn a_failed_transfer_is_reported_without_sending_a_notification() {
    let (mut p, mut d) = (engine("p"), engine("d"));
    p.lease("p-request", at(30));
    d.start(&[("r", recv("p", &[1], &[1], true))], at(1)).unwrap();
    d.faults.fail_next_transfers(1);
    d.shake_hands(&p, at(1)).unwrap();
    assert_eq!(report(&mut d, at(1)), failed("r"));
    assert_eq!(d.worker.take_stats().unwrap().num_failed_transfers, [1]);
    assert!(p.worker.poll(at(1)).unwrap().is_empty());
    assert_eq!(p.worker.leases().count(), 1, "the lease frees it");
}

#[test]
fn a_failure_waits_for_the_sibling_transfer() {
    let (_p, mut d) = in_flight(&[1, 2, 3]);
    // A second read of the same request fails at once while the first one runs.
    d.faults.fail_next(Call::MakeTransfer, 1);
    d.start(&[("r", recv("p", &[1, 2, 3], &[1, 2, 3], true))], at(1)).unwrap();
    for _ in 0..3 {
        assert!(d.worker.poll(at(1)).unwrap().is_empty());
        assert!(d.worker.take_invalid_blocks().is_empty());
    }
    d.faults.hold_transfers(false);
    assert_eq!(report(&mut d, at(1)), failed("r"));
    assert_eq!(d.worker.take_invalid_blocks(), BTreeSet::from([1, 2, 3]));
    assert!(d.worker.poll(at(1)).unwrap().is_empty());
}

#[test]
fn an_exception_while_polling_fails_the_request() {
    let (_p, mut d) = in_flight(&[1]);
    d.faults.fail_next(Call::Poll, 1);
    assert_eq!(d.worker.poll(at(1)), Ok(failed("r")));
    assert_eq!(d.worker.take_stats().unwrap().num_failed_transfers, [1]);
}

#[test]
fn a_source_that_died_fails_the_read() {
    let (p, mut d) = (engine("p"), engine("d"));
    d.start(&[("r", recv("p", &[1], &[1], true))], at(1)).unwrap();
    let payload = p.worker.handshake_payload();
    drop(p);
    let job = d.worker.take_handshake_jobs().remove(0);
    let reply = RankReply { pp_rank: 0, tp_rank: 0, payload, clock: None };
    d.worker.complete_handshake(&job.engine_id, Ok(vec![reply]), at(1)).unwrap();
    d.start(&[], at(1)).unwrap();
    assert_eq!(report(&mut d, at(1)), failed("r"));
}

#[test]
fn states_that_end_a_vllm_engine_are_named_and_survivable() {
    let request = "r".to_owned();
    let mut two_groups = recv("p", &[1], &[1], true);
    two_groups.remote.block_ids = BlockIds::grouped(vec![vec![1], vec![2]]);
    let mut flat = recv("p", &[1], &[1], true);
    flat.remote.block_ids = BlockIds::flat(vec![1]);
    for (bad, fatal) in [
        (
            recv("p", &[1, 2], &[1], true),
            EngineFatal::RemoteBlocksTooFew { request: request.clone(), group: 0, local: 2, remote: 1 },
        ),
        (
            recv("p", &[1], &[], true),
            EngineFatal::RemoteBlocksTooFew { request: request.clone(), group: 0, local: 1, remote: 0 },
        ),
        (two_groups, EngineFatal::GroupCountMismatch { request: request.clone(), local: 1, remote: 2 }),
        (flat, EngineFatal::BlockIdShape { request: request.clone() }),
    ] {
        let (p, mut d) = (engine("p"), engine("d"));
        d.start(&[("first", recv("p", &[0], &[0], true))], at(1)).unwrap();
        d.shake_hands(&p, at(1)).unwrap();
        assert_eq!(report(&mut d, at(1)).finished_recving, ["first"]);
        assert_eq!(d.start(&[("r", bad)], at(1)), Err(fatal));
        assert_eq!(d.worker.poll(at(1)), Ok(failed("r")));
    }
}

#[test]
fn block_ids_beyond_the_memory_fail_instead_of_reading_another_layer() {
    let (p, mut d) = (engine("p"), engine("d"));
    d.start(&[("r", recv("p", &[0], &[BLOCKS], true))], at(1)).unwrap();
    d.shake_hands(&p, at(1)).unwrap();
    assert_eq!(d.worker.poll(at(1)), Ok(failed("r")));
}
