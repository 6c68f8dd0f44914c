//! Handshakes: T5 over real sockets, T61, T62, and the errors of the client.

use kv_connector::compat::CompatFactors;
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::{Generation, TransferMode};
use kv_connector::transport::loopback::Fabric;
use kv_connector::worker::{HandshakeError, HandshakeFailure, RankReply, WorkerConfig};

use crate::rows;
use crate::support::{Engine, Rank, at, engine, failed, finished, recv, vectors};

#[cfg(feature = "zmq")]
mod over_sockets {
    use std::collections::HashMap;

    use kv_connector::protocol::metadata::NixlAgentMetadata;
    use kv_connector::protocol::{KvTransferParams, Presence};
    use kv_connector::scheduler::{AllocatedBlocks, FinishStatus, Scheduler, SchedulerConfig};
    use kv_connector::side_channel::{SideChannelServer, shake_hands};

    use super::*;

    #[tokio::test]
    async fn t5_a_prefill_is_served_over_the_side_channel_and_shutdown_frees_the_port() {
        let fabric = Fabric::default();
        let (p, mut d) = ([engine(&fabric, "p")], engine(&fabric, "d"));
        let server = SideChannelServer::bind("127.0.0.1:0").await.unwrap();
        let port = server.local_addr().unwrap().port();
        let mut scheduler = Scheduler::new(SchedulerConfig::new(Generation::V14, "p", "127.0.0.1", port));
        let params = KvTransferParams { do_remote_decode: true, ..KvTransferParams::default() };
        scheduler.on_new_request("r", 48, Some(params));
        let blocks = AllocatedBlocks { unhashed: vec![vec![0, 1, 2]], cached: vec![0] };
        scheduler.update_after_alloc("r", &blocks, 0).unwrap();
        let end = scheduler.request_finished("r", FinishStatus::LengthCapped, &[vec![0, 1, 2]], 48, at(0));
        assert!(end.delay_free);
        let params = end.params.unwrap();
        assert_eq!(params.transfer_mode, Presence::Value(TransferMode::Pull));
        let mut request = recv("p", &[4, 5, 6], &[0, 1, 2], true);
        request.remote.port = *params.remote_port.value().unwrap();
        d.start(&[("d", request)], at(1));
        let job = d.job();
        assert_eq!((job.ranks.as_slice(), job.tp_size), (&[(0, 0)][..], 1));
        let payloads = HashMap::from([((0, 0), p[0].worker.published_payload().unwrap())]);
        let serving = server.serve(Generation::V14, payloads, || at(1000));
        let replies = tokio::select! {
            () = serving => panic!("a server does not end by itself"),
            replies = shake_hands(&job, || at(1)) => replies.unwrap(),
        };
        let payload = NixlHandshakePayload::decode(&replies[0].payload).unwrap();
        let metadata = NixlAgentMetadata::decode(Generation::V14, &payload.agent_metadata_bytes).unwrap();
        assert_eq!(metadata, p[0].worker.agent_metadata());
        assert_eq!(replies[0].clock.unwrap().remote_seconds, 1000.0);
        d.worker.complete_handshake("p", Ok(replies), at(1)).unwrap();
        d.step(at(1));
        assert_eq!(d.poll(at(1)), finished("d"));
        let again = SideChannelServer::bind(("127.0.0.1", port)).await;
        assert!(again.is_ok(), "the port is free again");
    }
}

fn factors() -> CompatFactors {
    CompatFactors {
        generation: Generation::V14,
        vllm_version: "0.32.0".to_owned(),
        connector_version: 14,
        model: "facebook/opt-125m".to_owned(),
        dtype: "torch.float16".to_owned(),
        num_kv_heads: 12,
        head_size: 64,
        num_hidden_layers: 12,
        attn_backend_name: "FLASH_ATTN".to_owned(),
        cache_dtype: "auto".to_owned(),
        is_hma_enabled: true,
        speculative_config: None,
        transfer_mode: TransferMode::Pull,
    }
}

fn t61(change: fn(&mut CompatFactors), enforced: bool, connects: bool) {
    let fabric = Fabric::default();
    let mut other = factors();
    change(&mut other);
    let remote = move |config: &mut WorkerConfig| config.compatibility_hash = other.digest();
    let local = move |config: &mut WorkerConfig| {
        config.compatibility_hash = factors().digest();
        config.enforce_compatibility = enforced;
    };
    let p = [Engine::new(&fabric, "p").edit(&remote).rank(0)];
    let mut d = Engine::new(&fabric, "d").edit(&local).rank(0);
    d.start(&[("r", recv("p", &[1], &[1], true))], at(1));
    let job = d.job();
    match d.answer(&job, &p, at(1)) {
        Ok(()) => {
            assert!(connects);
            d.step(at(1));
            assert_eq!(d.connected(), ["p"]);
            assert_eq!(d.poll(at(1)), finished("r"));
        }
        Err(error) => {
            assert!(!connects && error.to_string().contains("compatibility hash mismatch"), "{error}");
            assert_eq!(d.poll(at(1)), failed("r"));
            assert!(d.connected().is_empty());
        }
    }
}

rows! {
    t61_1_another_vllm_version_is_refused => t61(|f| f.vllm_version = "0.6.1".to_owned(), true, false);
    t61_2_another_connector_version_is_refused => t61(|f| f.connector_version = 37, true, false);
    t61_3_another_model_is_refused => t61(|f| f.model = "facebook/opt-350m".to_owned(), true, false);
    t61_4_another_dtype_is_refused => t61(|f| f.dtype = "torch.bfloat16".to_owned(), true, false);
    t61_5_another_cache_dtype_is_refused => t61(|f| f.cache_dtype = "fp8".to_owned(), true, false);
    t61_6_another_number_of_heads_is_refused => t61(|f| f.num_kv_heads = 8, true, false);
    t61_7_another_number_of_layers_is_refused => t61(|f| f.num_hidden_layers = 24, true, false);
    t61_8_another_head_size_is_refused => t61(|f| f.head_size = 1536 / 12, true, false);
    t61_10_equal_factors_connect => t61(|_| {}, true, true);
    t61_11_another_model_connects_when_nothing_is_enforced => t61(|f| f.model = "facebook/opt-350m".to_owned(), false, true);
}

/// The block size is no factor: it is mapped, and only refused where it cannot be.
#[test]
fn t61_9_another_block_size_connects() {
    let fabric = Fabric::default();
    let mut d = engine(&fabric, "d");
    let halved = |config: &mut WorkerConfig| config.block_size = 8;
    // Half the tokens per block, so half the bytes: as many heads on one of two ranks.
    let p = [Engine::new(&fabric, "p").tp(1, 4).edit(&halved).rank(0)];
    d.start(&[("r", recv("p", &[1], &[1, 2], true))], at(1));
    let job = d.job();
    assert_eq!(d.answer(&job, &p, at(1)), Ok(()));
}

fn t62(payload: Vec<u8>, is_expected: fn(&HandshakeError) -> bool) {
    let fabric = Fabric::default();
    let mut d = engine(&fabric, "d");
    d.start(&[("r", recv("p", &[1], &[1], true))], at(1));
    let job = d.job();
    let reply = RankReply { pp_rank: 0, tp_rank: 0, payload, clock: None };
    let error = d.worker.complete_handshake(&job.engine_id, Ok(vec![reply]), at(1)).unwrap_err();
    assert!(is_expected(&error), "{error:?}");
    assert_eq!(d.poll(at(1)), failed("r"));
}

fn wrapped(agent_metadata_bytes: &[u8]) -> Vec<u8> {
    let agent_metadata_bytes = agent_metadata_bytes.to_vec();
    NixlHandshakePayload { compatibility_hash: "hash".to_owned(), agent_metadata_bytes }.encode()
}

rows! {
    t62_1_an_outer_layer_that_is_no_msgpack => t62(b"\xc1garbage".to_vec(), |e| matches!(e, HandshakeError::Payload(e) if e.is_malformed()));
    t62_2_an_outer_layer_with_other_fields => t62(b"\x81\xa3abc\x01".to_vec(), |e| matches!(e, HandshakeError::Payload(e) if !e.is_malformed()));
    t62_3_an_inner_layer_that_is_no_msgpack => t62(wrapped(b"\xc1garbage"), |e| matches!(e, HandshakeError::Metadata(e) if e.is_malformed()));
    t62_4_an_inner_layer_with_other_fields => t62(wrapped(b"\x81\xa3abc\x01"), |e| matches!(e, HandshakeError::Metadata(e) if !e.is_malformed()));
}

/// A decode rank that has asked for engine "p".
fn asking(fabric: &Fabric, enforced: bool) -> Rank {
    let edit = move |config: &mut WorkerConfig| config.enforce_compatibility = enforced;
    let mut d = Engine::new(fabric, "d").edit(&edit).rank(0);
    d.start(&[("r", recv("p", &[1], &[1], true))], at(1));
    d.job();
    d
}

#[test]
fn the_client_fails_where_vllm_does() {
    let fabric = Fabric::default();
    let (p, other) = (engine(&fabric, "p"), engine(&fabric, "other"));
    let unequal = |bytes: Vec<u8>| NixlHandshakePayload {
        compatibility_hash: "unequal".to_owned(),
        agent_metadata_bytes: bytes,
    };
    let metadata = p.worker.agent_metadata().encode();
    let reply = |payload| Ok(vec![RankReply { pp_rank: 0, tp_rank: 0, payload, clock: None }]);
    let vectors = vectors("handshake.json");
    let cases = vectors["client_flow_errors"].as_array().unwrap();
    assert_eq!(cases.len(), 7);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let enforced = name != "hash_mismatch_not_enforced";
        let answer = match name {
            // Undecodable metadata behind it: the hash is compared first.
            "hash_mismatch" => reply(unequal(b"\xc1".to_vec()).encode()),
            "hash_mismatch_not_enforced" => reply(unequal(metadata.clone()).encode()),
            "payload_undecodable" => reply(b"\xc1".to_vec()),
            "metadata_undecodable" => reply(wrapped(b"\xc1")),
            "engine_id_mismatch" => reply(other.worker.handshake_payload()),
            "timeout" => Err(HandshakeFailure::Timeout),
            "v14_single_frame" => Err(HandshakeFailure::BadReply),
            unknown => panic!("{unknown}"),
        };
        let mut d = asking(&fabric, enforced);
        let result = d.worker.complete_handshake("p", answer, at(1));
        assert_eq!(result.is_ok(), case["error"].is_null(), "{name}: {result:?}");
        let text = result.err().map(|error| format!("{error:?}")).unwrap_or_default();
        let kind = match name {
            "hash_mismatch" => "HashMismatch",
            "payload_undecodable" => "Payload",
            "metadata_undecodable" => "Metadata",
            "engine_id_mismatch" => "Peer(EngineId",
            "timeout" => "Failure(Timeout",
            "v14_single_frame" => "Failure(BadReply",
            _ => "",
        };
        assert!(text.starts_with(kind), "{name}: {text}");
    }
}

#[test]
fn every_rank_that_was_asked_has_to_answer() {
    let fabric = Fabric::default();
    let p = Engine::new(&fabric, "p").tp(2, 8).ranks();
    let mut d = engine(&fabric, "d");
    let mut request = recv("p", &[1], &[1], true);
    request.tp_size = 2;
    d.start(&[("r", request)], at(1));
    let job = d.job();
    assert_eq!(job.ranks, [(0, 0), (0, 1)]);
    let payload = p[0].worker.handshake_payload();
    let only_one = Ok(vec![RankReply { pp_rank: 0, tp_rank: 0, payload, clock: None }]);
    let result = d.worker.complete_handshake("p", only_one, at(1));
    assert_eq!(result, Err(HandshakeError::MissingRank { pp_rank: 0, tp_rank: 1 }));
    assert!(d.connected().is_empty());
}
