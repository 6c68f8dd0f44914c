use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::golden::{capture, list, unhex, vectors};
use crate::protocol::handshake::{HandshakeRequest, NixlHandshakePayload, decode_clock};

fn blob(fields: &Value) -> Vec<u8> {
    let blob = &fields["agent_metadata"];
    if blob.get("bin_rule").is_some() {
        return (0..=255).cycle().take(76_800).collect();
    }
    unhex(blob.get("bin_hex").or(blob.get("bytes_hex")).unwrap())
}

fn signed(value: &Value) -> Vec<i64> {
    list(value).iter().map(|item| item.as_i64().unwrap()).collect()
}

fn texts(value: &Value) -> Vec<String> {
    crate::golden::strings(value)
}

fn optional<T>(value: &Value, read: impl FnOnce(&Value) -> T) -> Option<T> {
    (!value.is_null()).then(|| read(value))
}

fn metadata(generation: Generation, fields: &Value) -> NixlAgentMetadata {
    let text = |key: &str| fields[key].as_str().unwrap().to_owned();
    let int = |key: &str| fields[key].as_i64().unwrap();
    let addresses = list(&fields["kv_caches_base_addr"]).iter().map(|a| a.as_u64().unwrap()).collect();
    if generation == Generation::V2 {
        return NixlAgentMetadata::V2(AgentMetadataV2 {
            engine_id: text("engine_id"),
            agent_metadata: blob(fields),
            kv_caches_base_addr: addresses,
            device_id: int("device_id"),
            num_blocks: int("num_blocks"),
            block_lens: signed(&fields["block_lens"]),
            kv_cache_layout: text("kv_cache_layout"),
            block_size: int("block_size"),
        });
    }
    NixlAgentMetadata::V14(Box::new(AgentMetadataV14 {
        engine_id: text("engine_id"),
        agent_metadata: blob(fields),
        kv_caches_base_addr: addresses,
        device_id: int("device_id"),
        num_blocks: int("num_blocks"),
        block_lens: signed(&fields["block_lens"]),
        block_strides: signed(&fields["block_strides"]),
        kv_cache_layout: text("kv_cache_layout"),
        block_size: int("block_size"),
        ssm_sizes: signed(&fields["ssm_sizes"]).try_into().unwrap(),
        attn_backend_name: text("attn_backend_name"),
        physical_blocks_per_logical_kv_block: int("physical_blocks_per_logical_kv_block"),
        region_num_blocks: optional(&fields["region_num_blocks"], signed),
        region_group_ids: optional(&fields["region_group_ids"], signed),
        region_names: optional(&fields["region_names"], texts),
        region_mem_types: optional(&fields["region_mem_types"], texts),
        dcp_size: int("dcp_size"),
        pcp_size: int("pcp_size"),
        ple_block_len: fields["ple_block_len"].as_i64(),
        region_members: list(&fields["region_members"]).iter().map(texts).collect(),
        packed_member_layouts: fields["packed_member_layouts"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(layer, layout)| (layer.clone(), signed(layout).try_into().unwrap()))
            .collect(),
    }))
}

fn check(generation: Generation, fields: &Value, hex: &Value, name: &Value) {
    let metadata = metadata(generation, fields);
    assert_eq!(metadata.encode(), unhex(hex), "{name}");
    assert_eq!(NixlAgentMetadata::decode(generation, &unhex(hex)), Ok(metadata), "{name}");
}

#[test]
fn metadata_encodes_and_decodes_as_vllm_does() {
    let handshake = vectors("handshake.json");
    for case in list(&handshake["metadata"]) {
        let generation = if case["version"] == 2 { Generation::V2 } else { Generation::V14 };
        let name = &case["name"];
        if case["metadata_hex"].is_string() && !case["metadata_hex"].as_str().unwrap().contains(' ') {
            check(generation, &case["fields"], &case["metadata_hex"], name);
        } else {
            let encoded = metadata(generation, &case["fields"]).encode();
            let decoded = NixlAgentMetadata::decode(generation, &encoded).unwrap();
            assert_eq!(decoded, metadata(generation, &case["fields"]), "{name}");
        }
    }
    for (file, generation, kind) in [
        ("msgpack_v013.json", Generation::V2, "metadata_v2"),
        ("msgpack_v032.json", Generation::V14, "metadata_v14"),
    ] {
        let vectors = vectors(file);
        let cases = list(&vectors["cases"]).iter().filter(|case| case["kind"] == kind);
        let mut seen = 0;
        for case in cases {
            seen += 1;
            check(generation, &case["fields"], &case["hex"], &case["name"]);
        }
        assert_eq!(seen, 3);
    }
}

#[test]
fn captured_metadata_encodes_again_byte_for_byte() {
    for side in ["P", "D"] {
        let frame = capture(&format!("sidechannel_{side}.response.frame0.bin"));
        let payload = NixlHandshakePayload::decode(&frame).unwrap();
        let metadata = NixlAgentMetadata::decode(Generation::V14, &payload.agent_metadata_bytes).unwrap();
        assert_eq!(metadata.encode(), payload.agent_metadata_bytes);
        assert_eq!(metadata.generation(), Generation::V14);
    }
    for file in ["msgpack_v013.json", "msgpack_v032.json"] {
        let vectors = vectors(file);
        for case in list(&vectors["cases"]).iter().filter(|case| case["kind"] == "payload") {
            let payload = NixlHandshakePayload {
                compatibility_hash: case["compatibility_hash"].as_str().unwrap().to_owned(),
                agent_metadata_bytes: unhex(&case["agent_metadata_bytes_hex"]),
            };
            assert_eq!(payload.encode(), unhex(&case["hex"]), "{}", case["name"]);
        }
    }
}

#[test]
fn replies_of_live_engines_say_what_the_vectors_say() {
    let (older, newer) = (vectors("handshake.json"), vectors("msgpack_v032.json"));
    let older = list(&older["captured_replies"]).iter().map(|reply| {
        let [payload, clock] = list(&reply["frames_hex"]) else { panic!("two frames") };
        (reply, payload, clock, &reply["metadata_fields"], &reply["perf_counter"])
    });
    let newer = list(&newer["live_captures"]).iter().map(|reply| {
        (reply, &reply["reply_frame0_hex"], &reply["reply_frame1_hex"], &reply["metadata"], &reply["clock"])
    });
    let replies: Vec<_> = older.chain(newer).collect();
    assert_eq!(replies.len(), 4);
    for (reply, payload, clock, fields, seconds) in replies {
        let request = HandshakeRequest { pp_rank: 0, tp_rank: 0 };
        assert_eq!(request.encode(Generation::V14), unhex(&reply["request_hex"]));
        let payload = NixlHandshakePayload::decode(&unhex(payload)).unwrap();
        assert_eq!(payload.compatibility_hash, reply["compatibility_hash"]);
        let decoded = NixlAgentMetadata::decode(Generation::V14, &payload.agent_metadata_bytes);
        assert_eq!(decoded, Ok(metadata(Generation::V14, fields)), "{}", reply["name"]);
        assert_eq!(Some(decode_clock(&unhex(clock)).unwrap()), seconds.as_f64());
    }
}

#[test]
fn metadata_decoding_decides_as_msgspec_does() {
    let vectors = vectors("handshake.json");
    let mut seen = 0;
    for case in list(&vectors["decode_cases"]).iter().filter(|case| case["layer"] == "metadata") {
        seen += 1;
        let generation = if case["decoder"] == "v2" { Generation::V2 } else { Generation::V14 };
        let decoded = NixlAgentMetadata::decode(generation, &unhex(&case["hex"]));
        let result = &case["result"];
        assert_eq!(decoded.is_ok(), result["ok"].as_bool().unwrap(), "{}: {decoded:?}", case["name"]);
        if let Err(error) = decoded {
            assert_eq!(error.is_malformed(), result["kind"] == "decode", "{}: {error}", case["name"]);
            assert_eq!(
                matches!(error, DecodeError::MissingField { .. }),
                result["message"].as_str().unwrap().contains("missing required"),
                "{}",
                case["name"]
            );
        }
    }
    assert_eq!(seen, 40);
    let newer = crate::golden::vectors("msgpack_v032.json");
    for case in list(&newer["decode_outcomes"]).iter().filter(|case| case["type"] == "NixlAgentMetadata") {
        let outcome = match NixlAgentMetadata::decode(Generation::V14, &unhex(&case["hex"])) {
            Ok(_) => "ok",
            Err(error) if error.is_malformed() => "DecodeError",
            Err(_) => "ValidationError",
        };
        assert_eq!(outcome, case["outcome"], "{}", case["name"]);
    }
}

#[test]
fn a_reader_of_either_generation_tells_them_apart() {
    let v2 = NixlAgentMetadata::V2(AgentMetadataV2::default());
    let v14 = NixlAgentMetadata::V14(Box::default());
    assert_eq!(NixlAgentMetadata::decode_any(&v2.encode()), Ok(v2));
    assert_eq!(NixlAgentMetadata::decode_any(&v14.encode()), Ok(v14));
    assert_eq!(NixlAgentMetadata::decode_any(&[0x80]), Err(DecodeError::MissingField { field: "engine_id" }));
}

#[test]
fn the_json_view_names_the_blob_in_hex() {
    let metadata = AgentMetadataV14 {
        agent_metadata: vec![0, 255],
        packed_member_layouts: vec![("l".to_owned(), [1, 2])],
        ..AgentMetadataV14::default()
    };
    let json = serde_json::to_value(NixlAgentMetadata::V14(Box::new(metadata))).unwrap();
    assert_eq!(json["agent_metadata"], "00ff");
    assert_eq!(json["packed_member_layouts"]["l"][1], 2);
}

prop_compose! {
    fn any_v14()(
        (engine_id, agent_metadata, kv_caches_base_addr) in
            (".{0,40}", vec(any::<u8>(), 0..300), vec(any::<u64>(), 0..20)),
        (device_id, num_blocks, block_lens, block_strides) in
            (any::<i64>(), any::<i64>(), vec(any::<i64>(), 0..20), vec(any::<i64>(), 0..20)),
        (kv_cache_layout, block_size, ssm_sizes, attn_backend_name) in
            (".{0,8}", any::<i64>(), any::<[i64; 2]>(), ".{0,40}"),
        (physical, region_num_blocks, region_group_ids) in
            (any::<i64>(), option::of(vec(any::<i64>(), 0..20)), option::of(vec(-1..3_i64, 0..20))),
        (region_names, region_mem_types, dcp_size, pcp_size) in
            (option::of(vec(".{0,9}", 0..20)), option::of(vec(".{0,9}", 0..20)), any::<i64>(), any::<i64>()),
        (ple_block_len, region_members, packed) in (
            option::of(any::<i64>()),
            vec(vec(".{0,9}", 0..4), 0..20),
            proptest::collection::btree_map(".{0,9}", any::<[i64; 2]>(), 0..20),
        ),
    ) -> AgentMetadataV14 {
        AgentMetadataV14 {
            engine_id, agent_metadata, kv_caches_base_addr, device_id, num_blocks, block_lens, block_strides,
            kv_cache_layout, block_size, ssm_sizes, attn_backend_name,
            physical_blocks_per_logical_kv_block: physical,
            region_num_blocks, region_group_ids, region_names, region_mem_types, dcp_size, pcp_size,
            ple_block_len, region_members, packed_member_layouts: packed.into_iter().collect(),
        }
    }
}

proptest! {
    #[test]
    fn v14_metadata_survives_a_round_trip(metadata in any_v14()) {
        let metadata = NixlAgentMetadata::V14(Box::new(metadata));
        prop_assert_eq!(NixlAgentMetadata::decode(Generation::V14, &metadata.encode()), Ok(metadata));
    }

    #[test]
    fn v2_metadata_survives_a_round_trip(wide in any_v14()) {
        let metadata = NixlAgentMetadata::V2(AgentMetadataV2 {
            engine_id: wide.engine_id,
            agent_metadata: wide.agent_metadata,
            kv_caches_base_addr: wide.kv_caches_base_addr,
            device_id: wide.device_id,
            num_blocks: wide.num_blocks,
            block_lens: wide.block_lens,
            kv_cache_layout: wide.kv_cache_layout,
            block_size: wide.block_size,
        });
        prop_assert_eq!(NixlAgentMetadata::decode(Generation::V2, &metadata.encode()), Ok(metadata));
    }

    #[test]
    fn damaged_metadata_never_panics(
        metadata in any_v14(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = NixlAgentMetadata::V14(Box::new(metadata)).encode();
        for (index, byte) in damage {
            let at = index.index(bytes.len());
            bytes[at] = byte;
        }
        let _decided = NixlAgentMetadata::decode(Generation::V14, &bytes);
        let _decided = NixlAgentMetadata::decode(Generation::V2, &bytes);
    }
}
