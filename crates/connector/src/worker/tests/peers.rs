use super::*;
use crate::protocol::handshake::NixlHandshakePayload;
use crate::protocol::metadata::{AgentMetadataV14, NixlAgentMetadata};
use crate::protocol::msgpack::DecodeError;
use crate::regions::PeerError;

fn answer(d: &mut Engine, payload: Vec<u8>) -> Result<(), HandshakeError> {
    let job = d.worker.take_handshake_jobs().remove(0);
    let reply = RankReply { pp_rank: 0, tp_rank: 0, payload, clock: None };
    d.worker.complete_handshake(&job.engine_id, Ok(vec![reply]), at(1))
}

fn ask(d: &mut Engine, engine_id: &str) {
    d.start(&[("r", recv(engine_id, &[0], &[0], true))], at(1)).unwrap();
}

/// P's payload with changed metadata.
fn changed(p: &Engine, change: impl FnOnce(&mut AgentMetadataV14)) -> Vec<u8> {
    let NixlAgentMetadata::V14(mut metadata) = p.worker.agent_metadata() else { panic!("v14") };
    change(&mut metadata);
    let agent_metadata_bytes = NixlAgentMetadata::V14(metadata).encode();
    NixlHandshakePayload { compatibility_hash: "hash".to_owned(), agent_metadata_bytes }.encode()
}

#[test]
fn published_metadata_describes_the_memory() {
    let p = engine("p");
    let payload = NixlHandshakePayload::decode(&p.worker.handshake_payload()).unwrap();
    assert_eq!(payload.compatibility_hash, "hash");
    let decoded = NixlAgentMetadata::decode(Generation::V14, &payload.agent_metadata_bytes).unwrap();
    let NixlAgentMetadata::V14(metadata) = decoded else { panic!("v14") };
    assert_eq!(metadata.kv_caches_base_addr, p.memory.base_addresses());
    assert_eq!(metadata.num_blocks, 16);
    assert_eq!(metadata.region_mem_types.unwrap(), ["DRAM", "DRAM", "DRAM"]);
    assert_eq!(metadata.region_num_blocks.unwrap(), [16, 16, 16]);
}

#[test]
fn undecodable_replies_are_typed() {
    let garbage = b"this is not msgpack".to_vec();
    let wrong_fields = b"\x81\xa3abc\x01".to_vec();
    let wrap = |agent_metadata_bytes: &[u8]| {
        let agent_metadata_bytes = agent_metadata_bytes.to_vec();
        NixlHandshakePayload { compatibility_hash: "hash".to_owned(), agent_metadata_bytes }.encode()
    };
    let not_a_map = DecodeError::WrongType { field: "payload", expected: "object", got: "int" };
    let missing = |field| DecodeError::MissingField { field };
    for (payload, expected) in [
        (wrong_fields.clone(), HandshakeError::Payload(missing("compatibility_hash"))),
        (wrap(&wrong_fields), HandshakeError::Metadata(missing("engine_id"))),
        (garbage, HandshakeError::Payload(not_a_map)),
        (wrap(b""), HandshakeError::Metadata(DecodeError::Truncated)),
    ] {
        let mut d = engine("d");
        ask(&mut d, "p");
        assert_eq!(answer(&mut d, payload), Err(expected));
        assert_eq!(d.worker.poll(at(1)).unwrap().failed_recving, ["r"]);
    }
}

#[test]
fn another_hash_is_refused_before_the_metadata_is_read() {
    let other = NixlHandshakePayload {
        compatibility_hash: "other".to_owned(),
        agent_metadata_bytes: b"nothing to decode".to_vec(),
    };
    let mut d = engine("d");
    ask(&mut d, "p");
    let mismatch = HandshakeError::HashMismatch { local: "hash".to_owned(), remote: "other".to_owned() };
    assert!(mismatch.to_string().contains("compatibility hash mismatch"));
    assert_eq!(answer(&mut d, other.encode()), Err(mismatch));
    let p = engine_with(Generation::V14, "p", |config| config.compatibility_hash = "other".to_owned());
    let mut lenient = engine_with(Generation::V14, "d", |config| config.enforce_compatibility = false);
    ask(&mut lenient, "p");
    assert_eq!(answer(&mut lenient, p.worker.handshake_payload()), Ok(()));
}

#[test]
fn a_peer_that_does_not_fit_leaves_no_trace_and_may_try_again() {
    type Change = fn(&mut AgentMetadataV14);
    let changes: [(&str, Change); 13] = [
        ("Peer(EngineId", |m| m.engine_id = "q".to_owned()),
        ("Peer(Topology(BlockSizes", |m| m.block_size = 32),
        ("Peer(PartialContext", |m| (m.pcp_size, m.dcp_size) = (4, 2)),
        ("Peer(", |m| m.physical_blocks_per_logical_kv_block = 0),
        ("Peer(Layout", |m| m.kv_cache_layout = "LBNHC".to_owned()),
        ("Peer(", |m| m.block_lens[1] = 64),
        ("Peer(", |m| m.block_strides[2] = 31),
        ("Peer(", |m| m.kv_caches_base_addr.truncate(2)),
        ("Peer(", |m| m.region_num_blocks = Some(vec![16, 16, -1])),
        ("Descriptors(TooMany", |m| m.region_num_blocks = Some(vec![16, 16, i64::MAX])),
        ("Peer(", |m| m.region_mem_types = Some(vec![])),
        ("Peer(RegionName", |m| m.region_names.as_mut().unwrap().swap(0, 1)),
        ("Transport", |m| m.agent_metadata = b"of another transport".to_vec()),
    ];
    for (kind, change) in changes {
        let (p, mut d) = (engine("p"), engine("d"));
        ask(&mut d, "p");
        let answered = answer(&mut d, changed(&p, change));
        let Err(error) = answered else { panic!("{kind}: not refused") };
        assert!(format!("{error:?}").starts_with(kind), "{kind}: {error:?}");
        assert_eq!(d.worker.transport.live_handles(), 1, "only the local list");
        assert_eq!(d.worker.connected_engines().count(), 0);
        assert_eq!(d.worker.poll(at(1)).unwrap().failed_recving, ["r"]);
        ask(&mut d, "p");
        assert_eq!(answer(&mut d, p.worker.handshake_payload()), Ok(()));
        d.start(&[], at(1)).unwrap();
        assert_eq!(report(&mut d, at(1)).failed_recving, Vec::<String>::new());
    }
}

#[test]
fn sizes_that_do_not_map_are_not_asked_and_an_engine_does_not_read_from_itself() {
    for (tp_size, pp_size) in [(0, 1), (1, 2)] {
        let mut d = engine("d");
        let mut wide = recv("p", &[0], &[0], true);
        (wide.tp_size, wide.pp_size) = (tp_size, pp_size);
        d.start(&[("r", wide)], at(1)).unwrap();
        assert!(d.worker.take_handshake_jobs().is_empty());
        assert_eq!(d.worker.poll(at(1)).unwrap().failed_recving, ["r"]);
    }
    let mut d = engine("d");
    ask(&mut d, "d");
    let own = d.worker.handshake_payload();
    assert_eq!(answer(&mut d, own), Err(HandshakeError::Peer(PeerError::OwnEngine)));
    let unasked = d.worker.complete_handshake("x", Ok(vec![]), at(1));
    assert_eq!(unasked, Err(HandshakeError::NotPending("x".to_owned())));
}

#[test]
fn a_missing_rank_fails_the_handshake() {
    let mut d = engine("d");
    ask(&mut d, "p");
    let job = d.worker.take_handshake_jobs().remove(0);
    let result = d.worker.complete_handshake(&job.engine_id, Ok(vec![]), at(1));
    assert_eq!(result, Err(HandshakeError::MissingRank { pp_rank: 0, tp_rank: 0 }));
}

fn connected(d: &Engine) -> Vec<&str> {
    let mut engines: Vec<&str> = d.worker.connected_engines().collect();
    engines.sort_unstable();
    engines
}

#[test]
fn an_engine_that_took_over_an_address_replaces_the_old_one() {
    let (old, new, other) = (engine("old"), engine("new"), engine("other"));
    let mut d = engine("d");
    ask(&mut d, "old");
    d.shake_hands(&old, at(1)).unwrap();
    report(&mut d, at(1));
    let mut elsewhere = recv("other", &[1], &[0], true);
    elsewhere.remote.port = 5601;
    d.start(&[("r2", elsewhere)], at(1)).unwrap();
    d.shake_hands(&other, at(1)).unwrap();
    report(&mut d, at(1));
    assert_eq!(connected(&d), ["old", "other"]);
    // A failed handshake changes nothing.
    ask(&mut d, "new");
    d.worker.take_handshake_jobs();
    d.worker.complete_handshake("new", Err(HandshakeFailure::Timeout), at(1)).unwrap_err();
    assert_eq!(report(&mut d, at(1)).failed_recving, ["r"]);
    assert_eq!(connected(&d), ["old", "other"]);
    ask(&mut d, "new");
    d.shake_hands(&new, at(1)).unwrap();
    assert_eq!(report(&mut d, at(1)).finished_recving, ["r"]);
    assert_eq!(connected(&d), ["new", "other"]);
    assert_eq!(d.worker.transport.live_handles(), 3);
}

#[test]
fn a_replaced_engine_stays_until_its_reads_have_ended() {
    let (old, new) = (engine("old"), engine("new"));
    let mut d = engine("d");
    d.faults.hold_transfers(true);
    ask(&mut d, "old");
    d.shake_hands(&old, at(1)).unwrap();
    d.start(&[("r2", recv("new", &[1], &[0], true))], at(1)).unwrap();
    d.shake_hands(&new, at(1)).unwrap();
    assert!(d.worker.poll(at(1)).unwrap().is_empty());
    assert_eq!(connected(&d), ["new", "old"]);
    d.faults.hold_transfers(false);
    let mut seen = Vec::new();
    while seen.len() < 2 {
        seen.extend(report(&mut d, at(1)).finished_recving);
    }
    assert!(d.worker.poll(at(1)).unwrap().is_empty());
    assert_eq!(connected(&d), ["new"]);
}

#[test]
fn idle_engines_are_evicted_when_another_one_connects() {
    for (ttl, busy, stays) in [(10, false, false), (10, true, true), (0, false, true)] {
        let (p, q) = (engine("p"), engine("q"));
        let mut d = engine_with(Generation::V14, "d", |config| config.engine_ttl = at(ttl));
        d.faults.hold_transfers(busy);
        ask(&mut d, "p");
        d.shake_hands(&p, at(1)).unwrap();
        if !busy {
            report(&mut d, at(1));
        }
        let mut elsewhere = recv("q", &[1], &[0], true);
        elsewhere.remote.port = 5601;
        d.start(&[("r2", elsewhere)], at(21)).unwrap();
        d.shake_hands(&q, at(21)).unwrap();
        let expected = if stays { vec!["p", "q"] } else { vec!["q"] };
        assert_eq!(connected(&d), expected, "ttl {ttl}, busy {busy}");
    }
}
