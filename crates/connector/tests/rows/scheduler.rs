//! The scheduler half: T1 to T4, T26, T45, T60, T64, T65, and what its settings refuse.

use std::time::Duration;

use kv_connector::aggregate::{Aggregator, WorkerReport};
use kv_connector::protocol::registration::PushRegistration;
use kv_connector::protocol::{BlockIds, Generation, KvTransferParams, Presence, TransferMode};
use kv_connector::scheduler::{
    Accepted, AllocOutcome, AllocatedBlocks, FinishStatus, GroupClip, KvRole, Matched, Scheduler,
    SchedulerConfig, SchedulerConfigError,
};
use kv_connector::transport::loopback::Fabric;

use crate::rows;
use crate::support::{Engine, at, engine, logged};

const BLOCK_TOKENS: usize = 16;

fn scheduler_with(change: impl FnOnce(&mut SchedulerConfig)) -> Scheduler {
    let mut config = SchedulerConfig::new(Generation::V14, "engine", "127.0.0.1", 5600);
    change(&mut config);
    Scheduler::new(config)
}

fn scheduler() -> Scheduler {
    scheduler_with(|_| {})
}

fn decode_params(remote_blocks: &[u64]) -> KvTransferParams {
    KvTransferParams {
        do_remote_prefill: true,
        remote_block_ids: BlockIds::grouped(vec![remote_blocks.to_vec()]).into(),
        remote_engine_id: "prefill".to_owned().into(),
        remote_request_id: "prefill-42".to_owned().into(),
        remote_host: "10.0.0.1".to_owned().into(),
        remote_port: 5600.into(),
        tp_size: 1.into(),
        ..KvTransferParams::default()
    }
}

fn prefill_params() -> KvTransferParams {
    KvTransferParams { do_remote_decode: true, ..KvTransferParams::default() }
}

fn blocks(unhashed: &[u64], cached: usize) -> AllocatedBlocks {
    AllocatedBlocks { unhashed: vec![unhashed.to_vec()], cached: vec![cached] }
}

#[test]
fn t1_a_remote_prefill_is_one_receive_into_the_allocated_blocks() {
    let mut scheduler = scheduler();
    let tokens = BLOCK_TOKENS * 5 / 2;
    scheduler.on_new_request("r", tokens, Some(decode_params(&[1, 2, 3])));
    assert_eq!(scheduler.matched_tokens("r", 0), Matched { tokens, asynchronous: true });
    scheduler.update_after_alloc("r", &blocks(&[7, 8, 9], 0), tokens).unwrap();
    let step = scheduler.build_step(at(0)).unwrap();
    assert_eq!(step.reqs_to_recv.len(), 1);
    assert_eq!(step.reqs_to_recv[0].1.local_block_ids, [vec![7, 8, 9]]);
}

#[test]
fn t2_half_a_block_is_still_received_asynchronously() {
    let mut scheduler = scheduler();
    scheduler.on_new_request("r", BLOCK_TOKENS / 2, Some(decode_params(&[1])));
    let matched = scheduler.matched_tokens("r", 0);
    assert_eq!(matched, Matched { tokens: BLOCK_TOKENS / 2, asynchronous: true });
    let outcome = scheduler.update_after_alloc("r", &blocks(&[4], 0), matched.tokens);
    assert_eq!(outcome, Ok(AllocOutcome::Receiving { awaiting_kvs: true }), "the host parks it");
    assert_eq!(scheduler.build_step(at(0)).unwrap().reqs_to_recv.len(), 1);
}

#[test]
fn t3_an_abort_before_scheduling_leaves_an_empty_receive() {
    let mut scheduler = scheduler();
    scheduler.on_new_request("r", 40, Some(decode_params(&[1, 2, 3])));
    let finished = scheduler.request_finished("r", FinishStatus::Aborted, &[], 0, at(0));
    assert!(!finished.delay_free && finished.params.is_none());
    let step = scheduler.build_step(at(0)).unwrap();
    let [(request, recv)] = step.reqs_to_recv.as_slice() else { panic!("one receive") };
    assert_eq!(request, "r");
    assert!(recv.local_block_ids.is_empty() && !recv.awaiting_kvs);
    assert_eq!(recv.remote.request_id, "prefill-42");
    assert!(step.heartbeats.is_empty(), "nothing is left to keep alive");
}

#[test]
fn t4_the_answer_exports_the_prefills_own_cache_hits() {
    let mut scheduler = scheduler();
    scheduler.on_new_request("r", 3 * BLOCK_TOKENS, Some(prefill_params()));
    scheduler.update_after_alloc("r", &blocks(&[2], 2), 0).unwrap();
    let finished = scheduler.request_finished("r", FinishStatus::LengthCapped, &[vec![0, 1, 2]], 48, at(0));
    let mut params = finished.params.unwrap();
    params.export_prefill_cached_tokens(2 * BLOCK_TOKENS as u64);
    assert_eq!(params.remote_prefill_cached_tokens, Presence::Value(2 * BLOCK_TOKENS as u64));
    let mut readback = KvTransferParams { do_remote_prefill: false, ..params };
    readback.remote_prefill_cached_tokens = Presence::Absent;
    readback.export_prefill_cached_tokens(1);
    assert!(readback.remote_prefill_cached_tokens.is_absent(), "only a prefill's answer has them");
}

/// A prefill engine of `tp` workers and the requests whose blocks its host still holds.
fn t26(tp: u32) {
    let fabric = Fabric::default();
    let mut ranks = Engine::new(&fabric, "p").tp(tp, 8).ranks();
    let mut aggregator = Aggregator::new(ranks.len());
    let mut scheduler = scheduler_with(|config| config.lease = at(6));
    let mut step = |scheduler: &mut Scheduler, now: u64, held: &mut Vec<String>| {
        let meta = scheduler.build_step(at(now)).unwrap();
        let reports: Vec<WorkerReport> = ranks
            .iter_mut()
            .map(|rank| {
                rank.worker.start_load(&meta, at(now)).unwrap();
                WorkerReport { results: rank.poll(at(now)), ..WorkerReport::default() }
            })
            .collect();
        let sent = aggregator.combine(reports).results.finished_sending;
        held.retain(|request| !sent.contains(request));
    };
    let mut held = Vec::new();
    for (request, block, start) in [("r0", 1, 0), ("r1", 2, 3)] {
        scheduler.on_new_request(request, 16, Some(prefill_params()));
        scheduler.update_after_alloc(request, &blocks(&[block], 0), 0).unwrap();
        step(&mut scheduler, start, &mut held);
        let capped = FinishStatus::LengthCapped;
        assert!(scheduler.request_finished(request, capped, &[vec![block]], 16, at(start)).delay_free);
        held.push(request.to_owned());
    }
    step(&mut scheduler, 5, &mut held);
    assert_eq!(held, ["r0", "r1"]);
    step(&mut scheduler, 6, &mut held);
    assert_eq!(held, ["r1"], "r0's lease has ended, r1's has not");
    step(&mut scheduler, 9, &mut held);
    assert!(held.is_empty());
}

rows! {
    t26_1_several_workers_keep_unread_blocks_for_the_lease => t26(2);
    t26_2_one_worker_keeps_unread_blocks_for_the_lease => t26(1);
}

#[test]
fn t45_an_aborted_prefill_leaves_the_batch() {
    let fabric = Fabric::default();
    let mut rank = engine(&fabric, "p");
    let mut scheduler = scheduler();
    scheduler.on_new_request("r", 40, Some(prefill_params()));
    scheduler.update_after_alloc("r", &blocks(&[1, 2, 3], 0), 0).unwrap();
    let step = scheduler.build_step(at(0)).unwrap();
    assert!(step.reqs_in_batch.contains("r"));
    rank.worker.start_load(&step, at(0)).unwrap();
    let end = scheduler.request_finished("r", FinishStatus::Aborted, &[vec![1, 2, 3]], 16, at(0));
    assert!(!end.delay_free && end.params.is_none());
    let step = scheduler.build_step(at(1)).unwrap();
    assert!(step.reqs_in_batch.is_empty() && step.reqs_not_processed.contains("r"));
    rank.worker.start_load(&step, at(1)).unwrap();
    // No longer tracked: a lease that came now would not be taken.
    let late = kv_connector::scheduler::StepMeta {
        reqs_to_send: vec![("r".to_owned(), at(30))],
        ..Default::default()
    };
    rank.worker.start_load(&late, at(1)).unwrap();
    assert_eq!(rank.worker.leases().count(), 0);
}

fn t60(mode: TransferMode, (tp, pcp, dcp): (u32, u32, u32), advertised: u32) {
    let mut scheduler = scheduler_with(|config| {
        (config.tp_size, config.pcp_size, config.dcp_size, config.mode) = (tp, pcp, dcp, mode);
    });
    scheduler.on_new_request("r", 48, Some(prefill_params()));
    scheduler.update_after_alloc("r", &blocks(&[0, 1, 2], 0), 0).unwrap();
    let end = scheduler.request_finished("r", FinishStatus::LengthCapped, &[vec![0, 1, 2]], 48, at(0));
    assert!(end.delay_free);
    let params = end.params.unwrap();
    assert_eq!(params.transfer_mode, Presence::Value(mode));
    assert_eq!((params.tp_size, params.dcp_size), (advertised.into(), dcp.into()));
    assert_eq!(params.remote_blocks_expiry_time.is_absent(), mode == TransferMode::Push);
}

rows! {
    t60_1_pull_advertises_tp_1 => t60(TransferMode::Pull, (1, 1, 1), 1);
    t60_2_push_advertises_tp_1 => t60(TransferMode::Push, (1, 1, 1), 1);
    t60_3_pull_advertises_tp_4 => t60(TransferMode::Pull, (4, 1, 1), 4);
    t60_4_push_advertises_tp_4 => t60(TransferMode::Push, (4, 1, 1), 4);
    t60_5_pull_advertises_decode_context_within_tp => t60(TransferMode::Pull, (4, 1, 4), 4);
    t60_6_push_advertises_decode_context_within_tp => t60(TransferMode::Push, (4, 1, 4), 4);
    t60_7_pull_advertises_a_replicated_prefill_context => t60(TransferMode::Pull, (1, 4, 1), 1);
    t60_8_push_advertises_a_replicated_prefill_context => t60(TransferMode::Push, (1, 4, 1), 1);
    t60_9_pull_advertises_a_sharded_prefill_context => t60(TransferMode::Pull, (1, 4, 4), 4);
    t60_10_push_advertises_a_sharded_prefill_context => t60(TransferMode::Push, (1, 4, 4), 4);
}

#[test]
fn t64_the_role_of_both_is_deprecated() {
    let log = logged(|| drop(scheduler_with(|config| config.role = Some(KvRole::Both))));
    assert_eq!(log.lines().count(), 1);
    assert!(log.contains("kv_role='kv_both'") && log.contains("deprecated"), "{log}");
}

#[test]
fn t65_explicit_roles_are_not_warned_about() {
    for role in [KvRole::Consumer, KvRole::Producer] {
        assert_eq!(logged(|| drop(scheduler_with(|config| config.role = Some(role)))), "");
    }
}

#[test]
fn prompts_are_cut_once_for_models_whose_last_tokens_decode_computes() {
    let recurrent = GroupClip::StateSpace { scratch_blocks: 0 };
    for (groups, lookahead_tokens, backoff) in [
        (vec![GroupClip::Full], 0, 0),
        (vec![GroupClip::Full], 1, 0),
        (vec![GroupClip::Full, recurrent], 0, 1),
        (vec![GroupClip::Full], 4, 3),
        (vec![GroupClip::Full, recurrent], 4, 3),
    ] {
        let config = |config: &mut SchedulerConfig| {
            (config.groups, config.lookahead_tokens) = (groups.clone(), lookahead_tokens);
        };
        let mut p = scheduler_with(config);
        let dropped = |accepted: Accepted| accepted.dropped_prompt_tokens;
        assert_eq!(dropped(p.on_new_request("r", 40, Some(prefill_params()))), backoff);
        assert_eq!(dropped(p.on_new_request("r", 40 - backoff, Some(prefill_params()))), 0, "once");
        assert_eq!(dropped(p.on_new_request("short", backoff, Some(prefill_params()))), 0);
        assert_eq!(dropped(p.on_new_uncached_request("u", 40, Some(prefill_params()))), 0);
        let mut marked = prefill_params();
        marked.extra.insert("_p_side_truncated".to_owned(), true.into());
        assert_eq!(dropped(p.on_new_request("m", 40, Some(marked))), 0);
        let mut d = scheduler_with(config);
        assert_eq!(dropped(d.on_new_request("r", 40, Some(decode_params(&[1])))), 0);
        assert_eq!(d.matched_tokens("r", 8).tokens, 32 - backoff);
        d.on_new_request("short", backoff.max(1), Some(decode_params(&[1])));
        assert_eq!(d.matched_tokens("short", 0).tokens, backoff.max(1));
    }
}

#[test]
fn host_buffer_prefills_are_saved_until_their_prompt_is_scheduled() {
    let mut scheduler = scheduler_with(|config| config.host_buffer = true);
    scheduler.on_new_request("r", 40, Some(prefill_params()));
    assert_eq!(scheduler.update_after_alloc("r", &blocks(&[1, 2, 3], 0), 0), Ok(AllocOutcome::Producing));
    scheduler.on_scheduled("r", &[vec![1, 2]], 0, 32).unwrap();
    scheduler.on_scheduled("other", &[vec![9]], 0, 32).unwrap();
    let step = scheduler.build_step(at(0)).unwrap();
    assert_eq!(step.reqs_to_save, [("r".to_owned(), vec![vec![1, 2]])]);
    assert!(step.reqs_in_batch.contains("r"));
    scheduler.on_scheduled("r", &[vec![3]], 32, 8).unwrap();
    assert_eq!(scheduler.build_step(at(0)).unwrap().reqs_to_save, [("r".to_owned(), vec![vec![3]])]);
    scheduler.on_scheduled("r", &[vec![4]], 40, 1).unwrap();
    assert!(scheduler.build_step(at(0)).unwrap().reqs_to_save.is_empty(), "the prompt is complete");
    scheduler.on_new_request("a", 40, Some(prefill_params()));
    scheduler.update_after_alloc("a", &blocks(&[5], 0), 0).unwrap();
    scheduler.request_finished("a", FinishStatus::Aborted, &[], 0, at(0));
    scheduler.on_scheduled("a", &[vec![5]], 0, 16).unwrap();
    assert!(scheduler.build_step(at(0)).unwrap().reqs_to_save.is_empty(), "aborted");
}

#[test]
fn settings_that_do_not_go_together_are_named() {
    let refused = |change: fn(&mut SchedulerConfig)| {
        let mut config = SchedulerConfig::new(Generation::V14, "e", "h", 1);
        change(&mut config);
        config.validate()
    };
    assert_eq!(refused(|_| {}), Ok(()));
    let push = TransferMode::Push;
    for (result, error) in [
        (
            refused(|c| (c.mode, c.bidirectional) = (TransferMode::Push, true)),
            SchedulerConfigError::BidirectionalPush,
        ),
        (
            refused(|c| (c.pcp_size, c.bidirectional) = (2, true)),
            SchedulerConfigError::BidirectionalContextParallel,
        ),
        (
            refused(|c| (c.pcp_size, c.role) = (2, Some(KvRole::Both))),
            SchedulerConfigError::ContextParallelRole,
        ),
        (
            refused(|c| (c.pcp_size, c.dcp_size, c.tp_size, c.role) = (2, 2, 2, Some(KvRole::Producer))),
            SchedulerConfigError::ContextParallelSizes,
        ),
        (
            refused(|c| (c.pp_size, c.role) = (2, Some(KvRole::Consumer))),
            SchedulerConfigError::PipelineConsumer,
        ),
        (
            refused(|c| (c.mode, c.dcp_size) = (TransferMode::Push, 2)),
            SchedulerConfigError::ContextParallelPush,
        ),
    ] {
        assert_eq!(result, Err(error), "{push:?}");
    }
}

fn push_scheduler() -> Scheduler {
    scheduler_with(|config| {
        config.mode = TransferMode::Push;
        config.push_registration_timeout = Duration::from_secs(100);
    })
}

#[test]
fn a_push_receive_is_announced_once_with_its_blocks() {
    let mut scheduler = push_scheduler();
    scheduler.on_new_request("r", 40, Some(decode_params(&[])));
    assert_eq!(scheduler.matched_tokens("r", 0).tokens, 40);
    let outcome = scheduler.update_after_alloc("r", &blocks(&[7, 8, 9], 0), 40);
    assert_eq!(outcome, Ok(AllocOutcome::Receiving { awaiting_kvs: true }));
    assert!(scheduler.has_pending_push_work());
    let step = scheduler.build_step(at(0)).unwrap();
    let registration = PushRegistration {
        request_id: "r".to_owned(),
        decode_engine_id: "engine".to_owned(),
        decode_host: "127.0.0.1".to_owned(),
        decode_port: 5600,
        decode_tp_size: 1,
        local_block_ids: vec![vec![7, 8, 9]],
        remote_engine_id: "prefill".to_owned(),
        remote_host: "10.0.0.1".to_owned(),
        remote_port: 5600,
        remote_tp_size: 1,
        remote_pp_size: 1,
    };
    assert_eq!(step.push_registrations, [("r".to_owned(), registration)]);
    let [(_, recv)] = step.reqs_to_recv.as_slice() else { panic!("one receive") };
    assert!(!recv.awaiting_kvs && recv.local_block_ids == [vec![7, 8, 9]]);
    assert_eq!(recv.remote.block_ids.total(), 0, "the prefill knows its blocks");
    assert!(!scheduler.has_pending_push_work());
    assert_eq!(scheduler.update_after_alloc("r", &blocks(&[7, 8, 9], 0), 40), Ok(AllocOutcome::NoTransfer));
    assert!(scheduler.build_step(at(99)).unwrap().push_registrations.is_empty());
    assert!(scheduler.take_overdue_registrations().is_empty());
    scheduler.build_step(at(100)).unwrap();
    assert_eq!(scheduler.take_overdue_registrations(), ["r"]);
}

#[test]
fn blocks_that_were_announced_for_an_aborted_request_are_free_when_nobody_can_write_them() {
    let mut scheduler = push_scheduler();
    scheduler.on_new_request("r", 40, Some(decode_params(&[])));
    scheduler.update_after_alloc("r", &blocks(&[7, 8, 9], 0), 40).unwrap();
    scheduler.build_step(at(0)).unwrap();
    scheduler.request_finished("r", FinishStatus::Aborted, &[vec![7, 8, 9]], 0, at(10));
    scheduler.build_step(at(209)).unwrap();
    assert!(
        scheduler.take_overdue_registrations().is_empty(),
        "the prefill engine may know of it until then"
    );
    scheduler.build_step(at(210)).unwrap();
    assert_eq!(scheduler.take_overdue_registrations(), ["r"]);
    assert!(scheduler.take_overdue_registrations().is_empty());
}

#[test]
fn a_push_that_arrived_is_not_overdue() {
    let mut scheduler = push_scheduler();
    scheduler.on_new_request("r", 40, Some(decode_params(&[])));
    scheduler.update_after_alloc("r", &blocks(&[7], 0), 40).unwrap();
    scheduler.build_step(at(0)).unwrap();
    scheduler.on_received("r");
    scheduler.build_step(at(500)).unwrap();
    assert!(scheduler.take_overdue_registrations().is_empty());
}

#[test]
fn a_push_prefill_is_offered_and_pending_until_it_is_sent() {
    let mut scheduler = push_scheduler();
    scheduler.on_new_request("r", 40, Some(prefill_params()));
    assert_eq!(scheduler.matched_tokens("r", 0), Matched::default());
    scheduler.update_after_alloc("r", &blocks(&[1, 2], 0), 0).unwrap();
    assert!(scheduler.request_finished("r", FinishStatus::Stopped, &[vec![1, 2]], 40, at(0)).delay_free);
    let step = scheduler.build_step(at(0)).unwrap();
    assert_eq!(step.push_finished, [("r".to_owned(), vec![vec![1, 2]])]);
    assert!(scheduler.build_step(at(1)).unwrap().push_finished.is_empty());
    assert!(scheduler.has_pending_push_work());
    scheduler.on_sent("r");
    assert!(!scheduler.has_pending_push_work());
}

/// vLLM leaves the prefill waiting in both cases; see the two gaps of its push mode.
#[test]
fn a_push_receive_that_needs_nothing_tells_a_finished_prefill_and_keeps_no_lease_alive() {
    for (aborted, remote_blocks, tells) in
        [(true, &[1, 2][..], true), (false, &[1, 2], true), (true, &[], false), (false, &[], false)]
    {
        let mut scheduler = push_scheduler();
        let mut params = decode_params(remote_blocks);
        if remote_blocks.is_empty() {
            params.remote_block_ids = Presence::Null;
        }
        scheduler.on_new_request("r", 40, Some(params));
        assert_eq!(scheduler.heartbeating(), 1);
        if aborted {
            scheduler.request_finished("r", FinishStatus::Aborted, &[], 0, at(0));
        } else {
            let outcome = scheduler.update_after_alloc("r", &blocks(&[], 3), 0).unwrap();
            let expected = if tells {
                AllocOutcome::Receiving { awaiting_kvs: false }
            } else {
                AllocOutcome::NoTransfer
            };
            assert_eq!(outcome, expected);
        }
        assert_eq!(scheduler.heartbeating(), 0, "the prefill's lease is not renewed for nothing");
        let step = scheduler.build_step(at(0)).unwrap();
        assert_eq!(step.reqs_to_recv.len(), usize::from(tells));
        assert!(step.push_registrations.is_empty());
        if let Some((_, recv)) = step.reqs_to_recv.first() {
            assert!(recv.local_block_ids.is_empty() && !recv.awaiting_kvs);
            assert_eq!(recv.remote.request_id, "prefill-42");
        }
        if !aborted {
            scheduler.request_finished("r", FinishStatus::Stopped, &[vec![1]], 50, at(9));
            assert!(scheduler.build_step(at(9)).unwrap().reqs_to_recv.is_empty(), "told once");
        }
    }
}
