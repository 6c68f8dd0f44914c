//! The cases that a peer's hand-off adapter pins (ai-dynamo/dynamo#15057), as far as bodies decide them.

use bytes::Bytes;
use kv_connector::protocol::handoff::HandOff;
use kvbaton_proxy::request::{BypassReason, Endpoint};
use kvbaton_proxy::splice::{AnswerDefect, PrefillAnswer};

use crate::{BOTH, decode, parse, prefill, text};

fn hand_off(answer: &'static str) -> Option<Bytes> {
    PrefillAnswer::parse(&Bytes::from_static(answer.as_bytes())).unwrap().hand_off.map(|granted| granted.raw)
}

#[test]
fn item_8_without_a_prefill_leg_the_body_passes_byte_for_byte() {
    let given = "{ \"model\" : \"m\",\n\"max_tokens\":1e2, \"stop\":[\"a\"]\n}\n";
    for endpoint in BOTH {
        assert_eq!(text(parse(endpoint, given).unwrap().decode_body(None)), given);
    }
}

#[test]
fn item_8_min_tokens_and_stream_options_change_on_the_prefill_leg_only() {
    let given = r#"{"model":"m","max_tokens":9,"min_tokens":5,"stream":true,"stream_options":{"include_usage":true}}"#;
    for endpoint in BOTH {
        assert_eq!(prefill(endpoint, given), r#"{"model":"m","max_tokens":1,"stream":false}"#);
        assert_eq!(decode(endpoint, given), given);
    }
}

#[test]
fn item_8_unknown_fields_and_tools_survive_on_both_legs() {
    let given = r#"{"model":"m","tools":[{"type":"function","function":{"name":"f","parameters":{"max_tokens":{"n":2},"stop":1}}}],"chat_template_kwargs":{"enable_thinking":false},"x":{"z":1},"max_tokens":1,"return_token_ids":true}"#;
    for endpoint in BOTH {
        assert_eq!(prefill(endpoint, given), given);
        assert_eq!(decode(endpoint, given), given);
    }
}

#[test]
fn item_8_several_choices_never_share_a_hand_off() {
    for endpoint in BOTH {
        let request = parse(endpoint, r#"{"model":"m","n":2}"#).unwrap();
        assert_eq!(request.bypass(), Some(BypassReason::N));
    }
    let request = parse(Endpoint::Completions, r#"{"model":"m","prompt":["a","b"]}"#).unwrap();
    assert_eq!(request.bypass(), Some(BypassReason::SeveralPrompts));
}

#[test]
fn item_8_a_missing_or_null_hand_off_is_none() {
    assert_eq!(hand_off(r#"{"usage":{"completion_tokens":1}}"#), None);
    assert_eq!(hand_off(r#"{"kv_transfer_params":null}"#), None);
    assert_eq!(hand_off(r#"{"kv_transfer_params":{"a":1},"kv_transfer_params":null}"#), None);
    assert_eq!(hand_off(r#"{"choices":[{"kv_transfer_params":{"a":1}}]}"#), None);
}

#[test]
fn item_8_a_hand_off_of_another_type_is_shown_as_it_is() {
    assert_eq!(hand_off(r#"{"kv_transfer_params":[1]}"#).unwrap(), "[1]");
    assert_eq!(hand_off(r#"{"kv_transfer_params":"s"}"#).unwrap(), "\"s\"");
}

#[test]
fn item_8_blocks_and_unknown_fields_reach_the_decode_leg_intact() {
    for raw in [
        r#"{"remote_block_ids":[[1,2],[3]],"remote_port":5600}"#,
        r#"{"remote_block_ids":[[]],"new":{"deep":[1.0e3,"\u00e9"]} }"#,
        r#"{"remote_block_ids":[] , "first_token_ids":[7]}"#,
    ] {
        let answer =
            format!(r#"{{"id":"x","kv_transfer_params": {raw} ,"usage":{{"completion_tokens":1}}}}"#);
        let answer = PrefillAnswer::parse(&Bytes::from(answer)).unwrap();
        let granted = answer.hand_off.unwrap();
        assert_eq!(granted.raw, raw);
        assert_eq!(granted.read, HandOff::parse(raw.as_bytes()));
        let body = parse(Endpoint::Completions, r#"{"model":"m"}"#).unwrap().decode_body(Some(granted.raw));
        assert_eq!(text(body), format!(r#"{{"model":"m","kv_transfer_params":{raw}}}"#));
    }
}

#[test]
fn item_8_garbage_under_a_200_is_a_defect() {
    for garbage in
        ["", "<html>", "[1]", r#"{"kv_transfer_params":{"a":1}"#, r#"{"usage":{"completion_tokens":1,}}"#]
    {
        let body = Bytes::from_static(garbage.as_bytes());
        assert!(matches!(PrefillAnswer::parse(&body), Err(AnswerDefect::Json(_))), "{garbage}");
    }
}
