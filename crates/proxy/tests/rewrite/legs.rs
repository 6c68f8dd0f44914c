//! What each leg changes, field by field.

use bytes::Bytes;
use kvbaton_proxy::json::JsonFaultKind;
use kvbaton_proxy::request::Endpoint::{self, ChatCompletions, Completions};
use kvbaton_proxy::request::{BadRequest, InjectedHandOff, pass_through_body};

use crate::{BOTH, decode, parse, parse_stripping, prefill, text};

#[test]
fn the_prefill_leg_makes_one_token_and_no_stream() {
    let cases: &[(&[Endpoint], &str, &str)] = &[
        (&BOTH, r#"{"model":"m"}"#, r#"{"model":"m","max_tokens":1}"#),
        (&BOTH, r#"{"model":"m","max_tokens":100,"min_tokens":5}"#, r#"{"model":"m","max_tokens":1}"#),
        (&BOTH, r#"{"model":"m","max_tokens":null}"#, r#"{"model":"m","max_tokens":1}"#),
        (&BOTH, r#"{"max_tokens":"7","model":"m"}"#, r#"{"max_tokens":1,"model":"m"}"#),
        (&BOTH, r#"{"max_tokens":{"a":[2]},"model":"m"}"#, r#"{"max_tokens":1,"model":"m"}"#),
        (
            &[ChatCompletions],
            r#"{"model":"m","max_completion_tokens":500}"#,
            r#"{"model":"m","max_completion_tokens":1}"#,
        ),
        (
            &[Completions],
            r#"{"model":"m","max_completion_tokens":500}"#,
            r#"{"model":"m","max_completion_tokens":1,"max_tokens":1}"#,
        ),
        (
            &BOTH,
            r#"{"model":"m","max_output_tokens":9}"#,
            r#"{"model":"m","max_output_tokens":1,"max_tokens":1}"#,
        ),
        (
            &BOTH,
            r#"{"max_tokens":2,"max_completion_tokens":3,"model":"m","max_tokens":4}"#,
            r#"{"max_tokens":1,"max_completion_tokens":1,"model":"m","max_tokens":1}"#,
        ),
        (
            &BOTH,
            r#"{"stream":true,"stream_options":{"include_usage":true},"model":"m","max_tokens":1}"#,
            r#"{"stream":false,"model":"m","max_tokens":1}"#,
        ),
        (
            &BOTH,
            r#"{"stream" : "on","model":"m","max_tokens":1}"#,
            r#"{"stream" : false,"model":"m","max_tokens":1}"#,
        ),
        (
            &BOTH,
            r#"{"model":"m","max_tokens":9,"stop":["a"],"stop_token_ids":[1],"min_completion_tokens":2}"#,
            r#"{"model":"m","max_tokens":1}"#,
        ),
        (&BOTH, r#"{"stop":"a","stop":"b","model":"m","max_tokens":9}"#, r#"{"model":"m","max_tokens":1}"#),
        (&BOTH, r#"{"max\u005ftokens":9,"model":"m"}"#, r#"{"max\u005ftokens":1,"model":"m"}"#),
        (
            &BOTH,
            r#"{"\u006din_tokens":9,"\u006d\u006f\u0064\u0065\u006C":"m","max_tokens":2}"#,
            r#"{"\u006d\u006f\u0064\u0065\u006C":"m","max_tokens":1}"#,
        ),
        (
            &BOTH,
            r#"{"model":"m","ignore_eos":false,"max_tokens":2}"#,
            r#"{"model":"m","ignore_eos":false,"max_tokens":1}"#,
        ),
    ];
    for (endpoints, given, expected) in cases {
        for endpoint in *endpoints {
            assert_eq!(prefill(*endpoint, given), *expected, "{endpoint:?} {given}");
            assert_eq!(decode(*endpoint, given), *given, "{endpoint:?} {given}");
        }
    }
}

#[test]
fn what_stays_keeps_its_bytes() {
    let given = "\r\n{ \"x\" : {\"z\":1, \"max_tokens\":7,\"stop\":[]} ,\t\"stop\" : \"q\" , \"t\":1.50e+01,\"big\":123456789012345678901234567890,\n \"u\":\"\\u00e9\u{e9}\\ud800\\/\" , \"model\":\"m\",\"max_tokens\":9 ,\"min_tokens\" :0 \n} \n";
    let expected = "\r\n{ \"x\" : {\"z\":1, \"max_tokens\":7,\"stop\":[]} ,\t\"t\":1.50e+01,\"big\":123456789012345678901234567890,\n \"u\":\"\\u00e9\u{e9}\\ud800\\/\" , \"model\":\"m\",\"max_tokens\":1 \n} \n";
    for endpoint in BOTH {
        assert_eq!(prefill(endpoint, given), expected);
        assert_eq!(decode(endpoint, given), given);
    }
}

#[test]
fn members_go_with_one_comma_wherever_they_stand() {
    for (given, expected) in [
        (r#"{"stop":1,"model":"m","max_tokens":1}"#, r#"{"model":"m","max_tokens":1}"#),
        (r#"{"model":"m","stop":1,"max_tokens":1}"#, r#"{"model":"m","max_tokens":1}"#),
        (r#"{"model":"m","max_tokens":1,"stop":1}"#, r#"{"model":"m","max_tokens":1}"#),
        (
            r#"{"stop":1,"stop":2,"model":"m","max_tokens":1,"stop":3,"stop":4}"#,
            r#"{"model":"m","max_tokens":1}"#,
        ),
        (
            r#"{"stop":1,"a":0,"stop":2,"model":"m","stop":3,"max_tokens":1}"#,
            r#"{"a":0,"model":"m","max_tokens":1}"#,
        ),
    ] {
        assert_eq!(prefill(Completions, given), expected, "{given}");
    }
}

#[test]
fn eos_is_ignored_only_where_asked() {
    let cases = [
        (r#"{"model":"m","max_tokens":1}"#, r#"{"model":"m","max_tokens":1,"ignore_eos":true,"#),
        (
            r#"{"model":"m","ignore_eos":false,"max_tokens":1}"#,
            r#"{"model":"m","ignore_eos":true,"max_tokens":1,"#,
        ),
        (
            r#"{"ignore_eos":0,"model":"m","ignore_eos":null,"max_tokens":1}"#,
            r#"{"ignore_eos":true,"model":"m","ignore_eos":true,"max_tokens":1,"#,
        ),
        (r#"{"model":"m"}"#, r#"{"model":"m","max_tokens":1,"ignore_eos":true,"#),
    ];
    for (given, start) in cases {
        let body = text(parse(Completions, given).unwrap().prefill_body(true));
        assert_eq!(body, format!("{start}\"kv_transfer_params\":{}}}", crate::PREFILL_HAND_OFF));
    }
}

#[test]
fn a_decode_body_without_hand_off_is_the_clients_own() {
    for given in ["{\"model\":\"m\"}", " {\"stop\":[1],\"model\":\"m\" , \"stream\":true }\n"] {
        let request = parse(ChatCompletions, given).unwrap();
        assert_eq!(text(request.decode_body(None)), given);
        assert_eq!(request.body(), given);
        assert!(!request.is_stripped());
    }
}

#[test]
fn empty_hand_offs_are_tolerated_and_replaced() {
    for blank in ["null", "{}", "{ \n}"] {
        for endpoint in BOTH {
            let given = format!(
                r#"{{"kv_transfer_params":{blank},"model":"m","max_tokens":3,"kv_transfer_\u0070arams":{blank}}}"#
            );
            assert_eq!(prefill(endpoint, &given), r#"{"model":"m","max_tokens":1}"#);
            assert_eq!(decode(endpoint, &given), r#"{"model":"m","max_tokens":3}"#);
            let alone = text(parse(endpoint, &given).unwrap().decode_body(None));
            assert_eq!(alone, r#"{"model":"m","max_tokens":3}"#);
        }
        let nested =
            format!(r#"{{"model":"m","vllm_xargs":{{"kv_transfer_params":{blank}}},"max_tokens":3}}"#);
        assert_eq!(decode(Completions, &nested), nested);
    }
}

#[test]
fn stripping_removes_a_hand_off_at_any_depth() {
    let cases = [
        (r#"{"model":"m","kv_transfer_params":{"do_remote_prefill":true}}"#, r#"{"model":"m"}"#),
        (r#"{"kv_transfer_params":[],"model":"m"}"#, r#"{"model":"m"}"#),
        (r#"{"model":"m","vllm_xargs":{"kv_transfer_params":"x"}}"#, r#"{"model":"m","vllm_xargs":{}}"#),
        (
            r#"{"model":"m","extra_body":{"a":1, "kv_transfer_params":{"a":{}} , "b" :2},"z":0}"#,
            r#"{"model":"m","extra_body":{"a":1, "b" :2},"z":0}"#,
        ),
        (
            r#"{"model":"m","extra_args":[1,{"a":{"kv_transfer_params":0,"\u006bv_transfer_params":1},"kv_transfer_params":null}]}"#,
            r#"{"model":"m","extra_args":[1,{"a":{},"kv_transfer_params":null}]}"#,
        ),
        (
            r#"{"sampling_params":{"kv_transfer_params":{"kv_transfer_params":{"x":1}},"k":1,"kv_transfer_params":2},"model":"m"}"#,
            r#"{"sampling_params":{"k":1},"model":"m"}"#,
        ),
        (
            r#"{"sampling_params":{"kv_transfer_params":1,"k":{"kv_transfer_params":1,"l":2}},"kv_transfer_params":3,"model":"m"}"#,
            r#"{"sampling_params":{"k":{"l":2}},"model":"m"}"#,
        ),
    ];
    for endpoint in BOTH {
        for (given, expected) in cases {
            let request = parse_stripping(endpoint, given).unwrap();
            assert!(request.is_stripped());
            assert_eq!(text(request.decode_body(None)), expected);
            let hand_off = Bytes::from_static(b"{\"h\":1}");
            let with = format!("{},\"kv_transfer_params\":{{\"h\":1}}}}", &expected[..expected.len() - 1]);
            assert_eq!(text(request.decode_body(Some(hand_off))), with);
            let prefill = format!(
                "{},\"max_tokens\":1,\"kv_transfer_params\":{}}}",
                &expected[..expected.len() - 1],
                crate::PREFILL_HAND_OFF
            );
            assert_eq!(text(request.prefill_body(false)), prefill);
        }
    }
}

#[test]
fn long_parts_are_shared_not_copied() {
    let prompt = "p".repeat(100_000);
    let body = Bytes::from(format!(r#"{{"model":"m","stop":"s","prompt":"{prompt}","stream":true}}"#));
    let request = kvbaton_proxy::request::ClientRequest::parse(
        Completions,
        body.clone(),
        kvbaton_proxy::request::InjectedHandOff::Refuse,
    )
    .unwrap();
    for spliced in [request.prefill_body(true), request.decode_body(Some(Bytes::from_static(b"{\"a\":1}")))] {
        let inside = |segment: &&Bytes| body.as_ptr_range().contains(&segment.as_ptr());
        let shared: usize = spliced.segments().iter().filter(inside).map(Bytes::len).sum();
        assert!(shared >= prompt.len(), "shared {shared}");
        assert!(spliced.segments().len() <= 3, "{}", spliced.segments().len());
    }
}

#[test]
fn a_release_takes_the_hand_off_for_one_token() {
    let given = r#"{"model":"m","stream":true,"max_tokens":9,"min_tokens":3,"stop":"a","prompt":"p"}"#;
    let request = parse(Completions, given).unwrap();
    let body = text(request.release_body(Bytes::from_static(b"{\"remote_port\":1}"), "s-1"));
    let expected = r#"{"model":"m","stream":false,"max_tokens":1,"prompt":"p","kv_transfer_params":{"remote_port":1},"cache_salt":"s-1"}"#;
    assert_eq!(body, expected);
    assert_eq!(request.endpoint(), Completions);
}

#[test]
fn other_endpoints_get_the_clients_bytes_less_a_hand_off() {
    let pass = |body: &'static [u8], on| pass_through_body(Bytes::from_static(body), on);
    for same in [
        &b""[..],
        b" {\"input\":\"a\", \"stop\":1e0}\n",
        b"{}",
        b"{\"kv_transfer_params\":null,\"extra_body\":{\"kv_transfer_params\":{}}}",
        b"--boundary\r\n\xff\xfe",
        b"a=1&b=2",
        b"[{\"a\":1}]",
    ] {
        let body = pass(same, InjectedHandOff::Refuse).unwrap();
        assert_eq!(body.into_bytes(), same);
    }
    for (given, place, stripped) in [
        (&br#"{"kv_transfer_params":{"a":1}}"#[..], "kv_transfer_params", "{}"),
        (br#"{"x":1,"kv_transfer_params":{"a":1},"y":2}"#, "kv_transfer_params", r#"{"x":1,"y":2}"#),
        (
            br#"{"sampling_params":{"extra_args":{"kv_transfer_params":{"a":1}}}}"#,
            "sampling_params",
            r#"{"sampling_params":{"extra_args":{}}}"#,
        ),
    ] {
        let refusal = pass(given, InjectedHandOff::Refuse).unwrap_err();
        assert_eq!(refusal, BadRequest::InjectedHandOff { place });
        assert_eq!(text(pass(given, InjectedHandOff::Strip).unwrap()), stripped);
    }
}

#[test]
fn what_only_an_engine_can_read_is_refused() {
    let hidden = r#"{"x":NaN,"kv_transfer_params":{"a":1}}"#;
    let utf16 = |mark: &[u8], unit: fn(u16) -> [u8; 2]| {
        let units = hidden.encode_utf16().flat_map(unit);
        mark.iter().copied().chain(units).collect::<Vec<u8>>()
    };
    let marked = [b"\xef\xbb\xbf", hidden.as_bytes()].concat();
    for body in [
        hidden.as_bytes().to_vec(),
        marked,
        utf16(b"", u16::to_le_bytes),
        utf16(b"", u16::to_be_bytes),
        utf16(b"\xff\xfe", u16::to_le_bytes),
        utf16(b"\xfe\xff", u16::to_be_bytes),
    ] {
        let refusal = pass_through_body(Bytes::from(body), InjectedHandOff::Strip).unwrap_err();
        let plain = matches!(refusal, BadRequest::Json { kind: JsonFaultKind::UnexpectedByte, .. });
        assert!(plain || matches!(refusal, BadRequest::Utf8 { .. }), "{refusal}");
    }
}

#[test]
fn the_other_dialects_make_one_token_too() {
    use kvbaton_proxy::request::Endpoint::{Messages, Responses};
    for (endpoint, given, expected) in [
        (Responses, r#"{"input":"a"}"#, r#"{"input":"a","max_output_tokens":1,"store":false}"#),
        (
            Responses,
            r#"{"model":"m","store":true,"max_output_tokens":99,"stream":true,"stop":["a"]}"#,
            r#"{"model":"m","store":false,"max_output_tokens":1,"stream":false}"#,
        ),
        (
            Messages,
            r#"{"model":"m","max_tokens":9,"stop_sequences":["a"],"stream":true}"#,
            r#"{"model":"m","max_tokens":1,"stream":false}"#,
        ),
        (Messages, r#"{"model":"m"}"#, r#"{"model":"m"}"#),
    ] {
        assert_eq!(prefill(endpoint, given), expected, "{endpoint:?}");
        assert_eq!(decode(endpoint, given), given, "{endpoint:?}");
    }
}

#[test]
fn item_21_ds_leg_does_not_ask_for_what_p_answers() {
    let given = r#"{"model":"m","prompt":"a","echo" : true,"logprobs":2,"prompt_logprobs":1,"max_tokens":1}"#;
    assert_eq!(prefill(Completions, given), given);
    let read =
        given.replace(r#""echo" : true"#, r#""echo" : false"#).replace(r#"logprobs":1"#, r#"logprobs":null"#);
    assert_eq!(decode(Completions, given), read);
    let request = parse(Completions, given).unwrap();
    assert_eq!(text(request.decode_body(None)), given, "alone it is asked for everything");
    let release = text(request.release_body(Bytes::from_static(b"{}"), "s"));
    assert!(!release.contains(r#""echo" : true"#) && !release.contains(r#"prompt_logprobs":1"#), "{release}");
    // An echo without log-probabilities is the decode engine's own.
    let plain = r#"{"model":"m","prompt":"a","echo":true,"max_tokens":1}"#;
    assert_eq!(decode(Completions, plain), plain);
}
