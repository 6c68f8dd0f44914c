use proptest::prelude::*;

use super::*;
use crate::golden::{capture, list, unhex, vectors};

fn generation(version: &serde_json::Value) -> Generation {
    match version.as_u64().unwrap() {
        2 => Generation::V2,
        14 => Generation::V14,
        other => panic!("version {other}"),
    }
}

#[test]
fn requests_equal_vllm_in_both_directions() {
    let vectors = vectors("handshake.json");
    for case in list(&vectors["requests"]) {
        let generation = generation(&case["version"]);
        let rank = |key: &str| case[key].as_u64().map_or(0, |rank| u32::try_from(rank).unwrap());
        let request = HandshakeRequest { pp_rank: rank("pp_rank"), tp_rank: rank("tp_rank") };
        assert_eq!(request.encode(generation), unhex(&case["hex"]));
        assert_eq!(HandshakeRequest::decode(generation, &unhex(&case["hex"])), Ok(request));
    }
    for (file, generation, kind) in [
        ("msgpack_v013.json", Generation::V2, "request_v013"),
        ("msgpack_v032.json", Generation::V14, "request_v032"),
    ] {
        let vectors = crate::golden::vectors(file);
        for case in list(&vectors["cases"]).iter().filter(|case| case["kind"] == kind) {
            let rank = |key: &str| case[key].as_u64().map_or(0, |rank| u32::try_from(rank).unwrap());
            let request = HandshakeRequest { pp_rank: rank("pp_rank"), tp_rank: rank("tp_rank") };
            assert_eq!(request.encode(generation), unhex(&case["hex"]), "{}", case["name"]);
        }
    }
}

#[test]
fn a_request_that_stops_a_vllm_listener_is_refused() {
    let vectors = vectors("handshake.json");
    for case in list(&vectors["malformed_requests"]) {
        let bytes = unhex(&case["hex"]);
        for (generation, key) in [(Generation::V2, "v2"), (Generation::V14, "v14")] {
            let server = &case["server_result"][key];
            // vLLM answers a wrong tag or looks a rank of any type up; we serve neither.
            let served = server["unpack"] == "ok"
                && server["msg_is_get_meta"] == true
                && case["name"] != "rank_as_str";
            let decoded = HandshakeRequest::decode(generation, &bytes);
            assert_eq!(decoded.is_ok(), served, "{} {key}: {decoded:?}", case["name"]);
        }
    }
}

#[test]
fn captured_replies_decode_and_encode_again_byte_for_byte() {
    for side in ["P", "D"] {
        let request = capture(&format!("sidechannel_{side}.request.bin"));
        let asked = HandshakeRequest { pp_rank: 0, tp_rank: 0 };
        assert_eq!(HandshakeRequest::decode(Generation::V14, &request), Ok(asked));
        let frame = capture(&format!("sidechannel_{side}.response.frame0.bin"));
        let payload = NixlHandshakePayload::decode(&frame).unwrap();
        assert_eq!(payload.encode(), frame);
        let clock = capture(&format!("sidechannel_{side}.response.frame1.bin"));
        assert_eq!(encode_clock(decode_clock(&clock).unwrap()), clock);
    }
}

#[test]
fn clock_frames_equal_vllm() {
    for case in list(&vectors("handshake.json")["timestamp_frames"]) {
        let value = &case["value"];
        let seconds = value.as_f64().unwrap_or_else(|| value.as_str().unwrap().parse().unwrap());
        assert_eq!(decode_clock(&unhex(&case["hex"])), Ok(seconds));
        if value.is_string() {
            assert_eq!(encode_clock(seconds), unhex(&case["hex"]));
        }
    }
    let newer = vectors("msgpack_v032.json");
    let frames: Vec<_> = list(&newer["cases"]).iter().filter(|case| case["kind"] == "clock_frame").collect();
    assert_eq!(frames.len(), 4);
    for case in frames {
        assert_eq!(encode_clock(case["value"].as_f64().unwrap()), unhex(&case["hex"]));
    }
}

#[test]
fn payload_decoding_decides_as_msgspec_does() {
    let vectors = vectors("handshake.json");
    let cases = list(&vectors["decode_cases"]).iter().filter(|case| case["layer"] == "payload");
    let mut seen = 0;
    for case in cases {
        seen += 1;
        let decoded = NixlHandshakePayload::decode(&unhex(&case["hex"]));
        let result = &case["result"];
        assert_eq!(decoded.is_ok(), result["ok"].as_bool().unwrap(), "{}: {decoded:?}", case["name"]);
        match decoded {
            Ok(payload) => assert_eq!(payload.compatibility_hash, result["compatibility_hash"]),
            Err(error) => {
                assert_eq!(error.is_malformed(), result["kind"] == "decode", "{}: {error}", case["name"]);
            }
        }
    }
    assert_eq!(seen, 21);
    for case in list(&crate::golden::vectors("msgpack_v032.json")["decode_outcomes"])
        .iter()
        .filter(|case| case["type"] == "NixlHandshakePayload")
    {
        let decoded = NixlHandshakePayload::decode(&unhex(&case["hex"]));
        let outcome = match &decoded {
            Ok(_) => "ok",
            Err(error) if error.is_malformed() => "DecodeError",
            Err(_) => "ValidationError",
        };
        assert_eq!(outcome, case["outcome"], "{}", case["name"]);
    }
}

#[test]
fn a_header_that_claims_more_than_there_is_fails_at_once() {
    for header in [
        &[0xdf, 0xff, 0xff, 0xff, 0xff][..],
        &[0xdd, 0xff, 0xff, 0xff, 0xff],
        &[0xc6, 0xff, 0xff, 0xff, 0xff],
    ] {
        assert_eq!(NixlHandshakePayload::decode(header), Err(DecodeError::Truncated));
    }
    // Nested as an unknown field: the walk over it must not recurse either.
    let mut nested = vec![0x81, 0xa1, b'x'];
    nested.extend(std::iter::repeat_n(0x91, 1 << 20));
    assert_eq!(NixlHandshakePayload::decode(&nested), Err(DecodeError::Truncated));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _decided = NixlHandshakePayload::decode(&bytes);
        let _decided = HandshakeRequest::decode(Generation::V2, &bytes);
        let _decided = HandshakeRequest::decode(Generation::V14, &bytes);
        let _decided = decode_clock(&bytes);
    }

    #[test]
    fn payloads_survive_a_round_trip(
        compatibility_hash in ".{0,300}",
        agent_metadata_bytes in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let payload = NixlHandshakePayload { compatibility_hash, agent_metadata_bytes };
        prop_assert_eq!(NixlHandshakePayload::decode(&payload.encode()), Ok(payload));
    }
}

#[test]
fn a_request_tells_its_generation() {
    let request = HandshakeRequest { pp_rank: 0, tp_rank: 300 };
    for generation in [Generation::V2, Generation::V14] {
        let bytes = request.encode(generation);
        assert_eq!(HandshakeRequest::decode_any(&bytes), Ok((generation, request)));
        assert!(HandshakeRequest::decode_any(&bytes[..bytes.len() - 1]).is_err());
    }
    let four = [&[0x94][..], &request.encode(Generation::V14)[1..], &[0]].concat();
    let error = HandshakeRequest::decode_any(&four);
    assert_eq!(error, Err(RequestError::ItemCount { expected: 3, got: 4 }));
}
