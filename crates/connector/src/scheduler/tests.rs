use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::golden::{groups, list, vectors};
use crate::protocol::params::BlockIds;

const NOW: ClockTime = Duration::from_secs(1000);

fn scheduler(generation: Generation) -> Scheduler {
    Scheduler::new(SchedulerConfig::new(generation, "engine-a", "10.0.0.1", 5600))
}

fn params(json: Value) -> KvTransferParams {
    serde_json::from_value(json).unwrap()
}

fn decode_params() -> KvTransferParams {
    params(json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[7, 8, 9]],
        "remote_engine_id": "p", "remote_request_id": "prefill-42", "remote_host": "h", "remote_port": 5600,
        "tp_size": 1
    }))
}

fn prefill_params() -> KvTransferParams {
    serde_json::from_slice(crate::protocol::params::prefill_request_params()).unwrap()
}

fn allocated(ids: &[u64]) -> AllocatedBlocks {
    AllocatedBlocks { unhashed: vec![ids.to_vec()], cached: vec![0] }
}

#[test]
fn decode_side_outcomes_equal_vllm() {
    let vectors = vectors("kv_transfer_params.json");
    for case in list(&vectors["cases"]) {
        let expected = &case["d_scheduler_v14"];
        if expected.is_null() {
            continue;
        }
        let name = case["name"].as_str().unwrap();
        // The vectors' prompt: 383 tokens, or as many as the case says are external.
        let external = expected["external_tokens"].as_u64().unwrap();
        let prompt = if external == 0 { 383 } else { usize::try_from(external).unwrap() };
        let computed = if name == "full_local_hit" { 383 } else { 0 };
        let mut scheduler = scheduler(Generation::V14);
        scheduler.on_new_request("r", prompt, Some(params(case["kv_transfer_params"].clone())));
        let matched = scheduler.matched_tokens("r", computed);
        assert_eq!(matched.tokens as u64, external, "{name}");
        assert_eq!(matched.asynchronous, expected["async"].as_bool().unwrap(), "{name}");
        let outcome = scheduler.update_after_alloc("r", &allocated(&[1, 2]), matched.tokens);
        let text = expected["outcome"].as_str().unwrap();
        if text.starts_with("ENGINE CRASH") {
            assert!(matches!(outcome, Err(EngineFatal::NoRemoteBlocks { .. })), "{name}: {outcome:?}");
            continue;
        }
        let hangs = matches!(outcome, Ok(AllocOutcome::Stranded { .. }));
        assert_eq!(hangs, text.starts_with("HANG"), "{name}: {outcome:?}");
        let step = scheduler.build_step(NOW).unwrap();
        check_recv(&step, expected, name);
    }
}

#[test]
fn an_abort_before_scheduling_notifies_or_dies_as_vllm_does() {
    let vectors = vectors("kv_transfer_params.json");
    for case in list(&vectors["cases"]) {
        let expected = &case["d_abort_before_scheduling_v14"];
        if expected.is_null() {
            continue;
        }
        let name = case["name"].as_str().unwrap();
        let mut scheduler = scheduler(Generation::V14);
        scheduler.on_new_request("r", 383, Some(params(case["kv_transfer_params"].clone())));
        let finished = scheduler.request_finished("r", FinishStatus::Aborted, &[], 0, NOW);
        assert_eq!(finished, Finished::default(), "{name}");
        let step = scheduler.build_step(NOW);
        match expected["outcome"].as_str().unwrap().strip_prefix("ENGINE CRASH: KeyError: ") {
            Some(key) => {
                let key = key.trim_matches('\'');
                match step {
                    Err(EngineFatal::MissingKey { key: missing, .. }) => assert_eq!(missing, key, "{name}"),
                    other => panic!("{name}: {other:?}"),
                }
                assert_eq!(
                    scheduler.build_step(NOW).unwrap().reqs_to_recv,
                    [],
                    "{name}: the receive is dropped"
                );
            }
            None => check_recv(&step.unwrap(), expected, name),
        }
    }
}

fn check_recv(step: &StepMeta, expected: &Value, name: &str) {
    if expected["recv_enqueued"] != true {
        assert_eq!(step.reqs_to_recv, [], "{name}");
        return;
    }
    let [(request, recv)] = step.reqs_to_recv.as_slice() else { panic!("{name}: one receive") };
    assert_eq!(request, "r");
    assert_eq!(recv.awaiting_kvs, expected["awaiting_kvs"].as_bool().unwrap(), "{name}");
    assert_eq!(recv.local_block_ids.is_empty(), !recv.awaiting_kvs, "{name}");
    let remote = &expected["remote"];
    assert_eq!(recv.remote.engine_id, remote["engine_id"].as_str().unwrap_or_default(), "{name}");
    assert_eq!(recv.remote.request_id, remote["request_id"], "{name}");
    assert_eq!(recv.remote.host, remote["host"], "{name}");
    assert_eq!(recv.remote.port.to_string(), remote["port"].to_string().trim_matches('"'), "{name}");
    let ids = if remote["block_ids"].is_null() { json!([]) } else { remote["block_ids"].clone() };
    assert_eq!(serde_json::to_value(&recv.remote.block_ids).unwrap(), ids, "{name}");
    for (size, key) in [(recv.tp_size, "tp_size"), (recv.dcp_size, "dcp_size"), (recv.pp_size, "pp_size")] {
        assert_eq!(size, remote[key], "{name} {key}");
    }
}

#[test]
fn half_a_block_is_still_read_asynchronously() {
    let mut scheduler = scheduler(Generation::V14);
    scheduler.on_new_request("r", 8, Some(decode_params()));
    assert_eq!(scheduler.matched_tokens("r", 0), Matched { tokens: 8, asynchronous: true });
    assert_eq!(scheduler.matched_tokens("r", 8), Matched::default());
    assert_eq!(scheduler.matched_tokens("unknown", 0), Matched::default());
}

#[test]
fn a_transfer_happens_once_per_request() {
    let mut scheduler = scheduler(Generation::V14);
    scheduler.on_new_request("r", 40, Some(decode_params()));
    let first = scheduler.update_after_alloc("r", &allocated(&[1, 2, 3]), 40);
    assert_eq!(first, Ok(AllocOutcome::Receiving { awaiting_kvs: true }));
    assert_eq!(scheduler.matched_tokens("r", 0), Matched::default());
    assert_eq!(scheduler.update_after_alloc("r", &allocated(&[1, 2, 3]), 0), Ok(AllocOutcome::NoTransfer));
    let step = scheduler.build_step(NOW).unwrap();
    assert_eq!(step.reqs_to_recv[0].1.local_block_ids, [vec![1, 2, 3]]);
    assert!(scheduler.build_step(NOW).unwrap().reqs_to_recv.is_empty());
    let end = scheduler.request_finished("r", FinishStatus::LengthCapped, &[vec![1]], 41, NOW);
    assert_eq!(end, Finished::default());
}

fn finish_prefill(generation: Generation, status: FinishStatus, blocks: &[Vec<u64>]) -> (Finished, StepMeta) {
    let mut scheduler = scheduler(generation);
    scheduler.on_new_request("cmpl-x-0", 40, Some(prefill_params()));
    assert_eq!(scheduler.matched_tokens("cmpl-x-0", 0), Matched::default());
    let outcome = scheduler.update_after_alloc("cmpl-x-0", &allocated(&[1, 2, 3]), 0);
    assert_eq!(outcome, Ok(AllocOutcome::Producing));
    let step = scheduler.build_step(NOW).unwrap();
    assert!(step.reqs_in_batch.contains("cmpl-x-0"));
    let finished = scheduler.request_finished("cmpl-x-0", status, blocks, 40, NOW);
    (finished, scheduler.build_step(NOW).unwrap())
}

#[test]
fn a_finished_prefill_is_leased_and_handed_off() {
    let (finished, step) = finish_prefill(Generation::V14, FinishStatus::LengthCapped, &[vec![1, 2, 3]]);
    assert!(finished.delay_free);
    assert_eq!(step.reqs_to_send, [("cmpl-x-0".to_owned(), NOW + Duration::from_secs(30))]);
    assert_eq!(step.scheduler_clock, Some(NOW));
    assert_eq!(
        serde_json::to_string(&finished.params).unwrap(),
        concat!(
            r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],"#,
            r#""remote_engine_id":"engine-a","remote_request_id":"cmpl-x-0","remote_host":"10.0.0.1","#,
            r#""remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":40,"#,
            r#""remote_blocks_expiry_time":null,"transfer_mode":"pull"}"#
        )
    );
    let (finished, step) = finish_prefill(Generation::V2, FinishStatus::LengthCapped, &[vec![1, 2, 3]]);
    assert!(finished.delay_free);
    assert_eq!(step.reqs_to_send, [("cmpl-x-0".to_owned(), NOW + Duration::from_secs(480))]);
    assert_eq!(step.scheduler_clock, None);
    assert_eq!(
        serde_json::to_string(&finished.params).unwrap(),
        concat!(
            r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1,2,3],"#,
            r#""remote_engine_id":"engine-a","remote_request_id":"cmpl-x-0","remote_host":"10.0.0.1","#,
            r#""remote_port":5600,"tp_size":1}"#
        )
    );
}

#[test]
fn only_some_ends_hand_off() {
    for (generation, status, hands_off) in [
        (Generation::V2, FinishStatus::Stopped, false),
        (Generation::V14, FinishStatus::Stopped, true),
        (Generation::V14, FinishStatus::Aborted, false),
        (Generation::V14, FinishStatus::Failed, false),
    ] {
        let (finished, step) = finish_prefill(generation, status, &[vec![1]]);
        assert_eq!(finished.params.is_some(), hands_off, "{generation:?} {status:?}");
        assert_eq!(finished.delay_free, hands_off);
        assert_eq!(step.reqs_not_processed.contains("cmpl-x-0"), !hands_off);
        assert_eq!(step.reqs_to_send.is_empty(), !hands_off);
    }
}

#[test]
fn a_prefill_without_blocks_answers_but_keeps_nothing() {
    let (finished, step) = finish_prefill(Generation::V14, FinishStatus::LengthCapped, &[vec![]]);
    assert!(!finished.delay_free);
    let params = finished.params.unwrap();
    assert_eq!(params.remote_num_tokens, Presence::Value(0));
    assert_eq!(params.remote_block_ids, Presence::Value(BlockIds::grouped(vec![vec![]])));
    assert!(step.reqs_to_send.is_empty());
}

#[test]
fn heartbeats_run_from_acceptance_to_receipt() {
    let mut scheduler = scheduler(Generation::V14);
    scheduler.on_new_request("r", 40, Some(decode_params()));
    let beats = scheduler.build_step(NOW).unwrap().heartbeats;
    assert_eq!(beats.len(), 1);
    assert!(beats[0].request_ids.contains("prefill-42"));
    assert!(scheduler.build_step(NOW + Duration::from_secs(4)).unwrap().heartbeats.is_empty());
    assert_eq!(scheduler.build_step(NOW + Duration::from_secs(5)).unwrap().heartbeats, beats);
    scheduler.on_received("r");
    assert!(scheduler.build_step(NOW + Duration::from_secs(20)).unwrap().heartbeats.is_empty());
    assert_eq!(scheduler.heartbeating(), 0);
}

#[test]
fn heartbeats_need_a_tp_size_and_v14() {
    for (generation, tp_size) in [(Generation::V14, Presence::Absent), (Generation::V2, Presence::Value(1))] {
        let mut scheduler = scheduler(generation);
        scheduler.on_new_request("r", 40, Some(KvTransferParams { tp_size, ..decode_params() }));
        assert!(scheduler.build_step(NOW).unwrap().heartbeats.is_empty());
    }
}

#[test]
fn one_hand_off_given_to_two_requests_is_renewed_until_both_end() {
    let mut scheduler = scheduler(Generation::V14);
    scheduler.on_new_request("a", 40, Some(decode_params()));
    scheduler.on_new_request("b", 40, Some(decode_params()));
    scheduler.on_received("a");
    assert_eq!(scheduler.build_step(NOW).unwrap().heartbeats.len(), 1);
    scheduler.on_received("b");
    assert!(scheduler.build_step(NOW + Duration::from_secs(60)).unwrap().heartbeats.is_empty());
}

#[test]
fn a_bidirectional_decode_keeps_its_blocks_for_the_next_turn() {
    let mut config = SchedulerConfig::new(Generation::V14, "d", "h", 1);
    config.bidirectional = true;
    let mut scheduler = Scheduler::new(config);
    scheduler.on_new_request("r", 100, Some(decode_params()));
    scheduler.update_after_alloc("r", &allocated(&[1, 2]), 100).unwrap();
    let finished = scheduler.request_finished("r", FinishStatus::Stopped, &[vec![1, 2]], 120, NOW);
    let params = finished.params.unwrap();
    assert!(finished.delay_free && params.do_remote_decode && !params.do_remote_prefill);
    assert_eq!(params.remote_blocks_expiry_time, Presence::Value(1480.0));
    scheduler.on_new_request("next", 200, Some(params));
    assert_eq!(scheduler.matched_tokens("next", 0), Matched { tokens: 120, asynchronous: true });
    assert_eq!(scheduler.matched_tokens("next", 60), Matched::default(), "below the threshold");
}

#[test]
fn sliding_windows_and_state_space_groups_are_clipped() {
    let mut ids = vec![vec![1, 2, 3, 4, 5], vec![0, 0, 6, 7, 8], vec![0, 0, 7, 8], vec![]];
    let clips = [
        GroupClip::Full,
        GroupClip::SlidingWindow { blocks: 3 },
        GroupClip::StateSpace { scratch_blocks: 1 },
        GroupClip::StateSpace { scratch_blocks: 1 },
    ];
    let mut config = SchedulerConfig::new(Generation::V14, "e", "h", 1);
    config.groups = clips.to_vec();
    let clipped = clip(&config, "r", ids.clone()).unwrap();
    assert_eq!(clipped, [vec![1, 2, 3, 4, 5], vec![6, 7, 8], vec![7], vec![]]);
    let step = clip::clip_windows(&config, "r", ids.clone()).unwrap();
    assert_eq!(step, [vec![1, 2, 3, 4, 5], vec![6, 7, 8], vec![0, 0, 7, 8], vec![]]);
    config.hybrid_allocator = false;
    assert_eq!(clip(&config, "r", ids.clone()).unwrap(), ids);
    config.groups[2] = GroupClip::Local;
    ids.remove(2);
    assert_eq!(clip(&config, "r", [&ids[..2], &[vec![9]], &ids[2..]].concat()).unwrap(), ids);
    assert_eq!(GroupClip::sliding_window(32, 16), GroupClip::SlidingWindow { blocks: 3 });
}

#[test]
fn clipping_equals_vllm() {
    let vectors = vectors("topology_v032.json");
    let cases = list(&vectors["descriptor_cases"]).iter();
    let cases: Vec<_> = cases.filter(|case| case["kind"] == "get_exchange_clipped_blocks").collect();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let input = &case["in"];
        let small = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
        let mut config = SchedulerConfig::new(Generation::V14, "e", "h", 1);
        config.hybrid_allocator = input["is_hma_required"].as_bool().unwrap();
        config.groups = list(&input["blocks_per_sw"])
            .iter()
            .zip(list(&input["ssm_spec_blocks"]))
            .map(|(window, scratch)| match (small(window), scratch) {
                (0, Value::Null) => GroupClip::Full,
                (0, scratch) => GroupClip::StateSpace { scratch_blocks: small(scratch) },
                (blocks, _) => GroupClip::SlidingWindow { blocks },
            })
            .collect();
        let ids = groups(&input["block_ids"]);
        assert_eq!(clip::clip_groups(&config, ids.clone()), groups(&case["out"]), "{input}");
        if ids.is_empty() {
            // A step may bring no blocks; a receive without any would load nothing.
            assert_eq!(clip::clip_windows(&config, "r", ids.clone()).unwrap(), groups(&case["out"]));
            assert!(clip(&config, "r", ids).is_err());
        } else {
            assert_eq!(clip(&config, "r", ids).unwrap(), groups(&case["out"]), "{input}");
        }
    }
}

#[test]
fn a_wrong_number_of_groups_is_fatal() {
    let mut scheduler = scheduler(Generation::V14);
    scheduler.on_new_request("r", 40, Some(decode_params()));
    let blocks = AllocatedBlocks { unhashed: vec![vec![1], vec![2]], cached: vec![0, 0] };
    assert_eq!(
        scheduler.update_after_alloc("r", &blocks, 40),
        Err(EngineFatal::GroupCountMismatch { request: "r".to_owned(), local: 1, remote: 2 })
    );
}
