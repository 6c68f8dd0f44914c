use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::golden::{list, strings, vectors};
use crate::protocol::params::KvTransferParams;

fn valid() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "e", "remote_request_id": "cmpl-x-0-1a2b3c4d", "remote_host": "h",
        "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 383,
        "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0
    })
}

fn parse(json: &Value) -> Result<HandOff, HandOffDefect> {
    HandOff::parse(json.to_string().as_bytes())
}

fn with(field: &str, value: Value) -> Value {
    let mut json = valid();
    json[field] = value;
    json
}

fn without(field: &str) -> Value {
    let mut json = valid();
    json.as_object_mut().unwrap().shift_remove(field);
    json
}

#[test]
fn the_router_accepts_and_refuses_what_the_vectors_say() {
    let vectors = vectors("kv_transfer_params.json");
    let cases = list(&vectors["cases"]);
    assert_eq!(cases.len(), 28);
    for case in cases {
        let action = case["router_action"].as_str().unwrap();
        // A count of generated tokens is in the answer's usage, not in this object.
        let accepted = action.starts_with("forward") || action.contains("remote_num_tokens");
        let parsed = parse(&case["kv_transfer_params"]);
        assert_eq!(parsed.is_ok(), accepted, "{}: {parsed:?}", case["name"]);
        if let Ok(handoff) = parsed {
            let json = &case["kv_transfer_params"];
            assert_eq!(serde_json::to_value(&handoff.remote_block_ids).unwrap(), json["remote_block_ids"]);
            assert_eq!(handoff.remote_num_tokens, json["remote_num_tokens"].as_u64());
            assert_eq!(handoff.generation == Generation::V2, case["name"] == "v2_shape_flat_block_ids");
        }
    }
}

#[test]
fn what_a_dialect_requires_is_required_and_every_known_field_has_its_type() {
    let vectors = vectors("kv_transfer_params.json");
    for dialect in ["v2_pull", "v14_pull", "v14_push"] {
        let required = strings(&vectors["required_by_dialect"][dialect]);
        assert!(required.len() >= 6, "{dialect}");
        for field in required {
            assert!(parse(&without(&field)).is_err(), "{dialect}: {field}");
        }
    }
    let types = vectors["types"].as_object().unwrap();
    assert_eq!(types.len(), 14);
    for (field, spec) in types {
        assert!(parse(&with(field, json!({"of": "another type"}))).is_err(), "{field}");
        if spec.as_str().unwrap().contains("optional") {
            assert!(parse(&without(field)).is_ok(), "{field}");
        }
    }
}

#[test]
fn each_remote_field_may_be_neither_absent_null_empty_nor_of_another_type() {
    for field in ["remote_engine_id", "remote_request_id", "remote_host"] {
        assert_eq!(parse(&without(field)), Err(HandOffDefect::Missing { field }));
        assert_eq!(parse(&with(field, Value::Null)), Err(HandOffDefect::NullField { field }));
        assert_eq!(parse(&with(field, json!(""))), Err(HandOffDefect::Empty { field }));
        for wrong in [json!(1), json!(true), json!(["e"]), json!({"e": 1}), json!(1.5)] {
            assert_eq!(
                parse(&with(field, wrong)),
                Err(HandOffDefect::WrongType { field, expected: "a string" })
            );
        }
    }
}

#[test]
fn the_port_is_an_integer_from_1_to_65535() {
    let field = "remote_port";
    assert_eq!(parse(&without(field)), Err(HandOffDefect::Missing { field }));
    assert_eq!(parse(&with(field, Value::Null)), Err(HandOffDefect::NullField { field }));
    for wrong in [json!("5600"), json!(5600.5), json!(5600.0), json!(true), json!([5600])] {
        assert_eq!(
            parse(&with(field, wrong)),
            Err(HandOffDefect::WrongType { field, expected: "an integer" })
        );
    }
    for outside in [json!(0), json!(-1), json!(65_536), json!(u64::MAX)] {
        assert_eq!(parse(&with(field, outside)), Err(HandOffDefect::OutOfRange { field }));
    }
    assert_eq!(parse(&with(field, json!(65_535))).unwrap().remote_port, 65_535);
}

#[test]
fn every_defect_of_the_block_ids_has_its_name() {
    let field = "remote_block_ids";
    assert_eq!(parse(&without(field)), Err(HandOffDefect::Missing { field }));
    assert_eq!(parse(&with(field, Value::Null)), Err(HandOffDefect::NullField { field }));
    for (value, defect) in [
        (json!([]), HandOffDefect::NoBlocks),
        (json!([[]]), HandOffDefect::AllGroupsEmpty),
        (json!([[], []]), HandOffDefect::AllGroupsEmpty),
        (json!([[1, -2]]), HandOffDefect::BlockIdNegative),
        (json!([-1]), HandOffDefect::BlockIdNegative),
        (json!([[1.0]]), HandOffDefect::BlockIdNotInteger),
        (json!([["1"]]), HandOffDefect::BlockIdNotInteger),
        (json!(["1"]), HandOffDefect::BlockIdNotInteger),
        (json!([null]), HandOffDefect::BlockIdNotInteger),
        (json!([true]), HandOffDefect::BlockIdNotInteger),
        (json!([[[1]]]), HandOffDefect::BlockIdNotInteger),
        (json!([{}]), HandOffDefect::BlockIdNotInteger),
        (json!([1, [2]]), HandOffDefect::BlockIdsMixed),
        (json!("1"), HandOffDefect::WrongType { field, expected: "a list" }),
        (json!({"0": [1]}), HandOffDefect::WrongType { field, expected: "a list" }),
        (json!(7), HandOffDefect::WrongType { field, expected: "a list" }),
    ] {
        assert_eq!(parse(&with(field, value.clone())), Err(defect), "{value}");
    }
    let some_empty = parse(&with(field, json!([[], [4, 5]]))).unwrap();
    assert_eq!(some_empty.remote_block_ids.groups(), [vec![], vec![4, 5]]);
}

#[test]
fn sizes_are_at_least_one() {
    for field in ["tp_size", "dcp_size", "pp_size"] {
        for outside in [json!(0), json!(-1), json!(1_u64 << 40)] {
            assert_eq!(parse(&with(field, outside)), Err(HandOffDefect::OutOfRange { field }));
        }
        assert_eq!(parse(&with(field, Value::Null)), Err(HandOffDefect::NullField { field }));
        let wrong = HandOffDefect::WrongType { field, expected: "an integer" };
        assert_eq!(parse(&with(field, json!("1"))), Err(wrong));
    }
    assert_eq!(parse(&without("tp_size")), Err(HandOffDefect::Missing { field: "tp_size" }));
    assert_eq!(parse(&without("dcp_size")).unwrap().dcp_size, 1);
    assert_eq!(parse(&without("pp_size")).unwrap().pp_size, 1);
}

#[test]
fn flags_and_modes_must_ask_for_a_transfer() {
    assert_eq!(parse(&with("do_remote_prefill", json!(false))), Err(HandOffDefect::NotRemotePrefill));
    assert_eq!(parse(&with("do_remote_prefill", Value::Null)), Err(HandOffDefect::NotRemotePrefill));
    assert_eq!(parse(&without("do_remote_prefill")), Err(HandOffDefect::NotRemotePrefill));
    let wrong = HandOffDefect::WrongType { field: "do_remote_prefill", expected: "a boolean" };
    assert_eq!(parse(&with("do_remote_prefill", json!(1))), Err(wrong));
    assert_eq!(parse(&with("do_remote_decode", json!(true))), Err(HandOffDefect::RemoteDecode));
    assert!(parse(&without("do_remote_decode")).is_ok());
    assert_eq!(parse(&with("transfer_mode", json!("pul"))), Err(HandOffDefect::UnknownTransferMode));
    assert_eq!(parse(&with("transfer_mode", json!("push"))).unwrap().transfer_mode, Some(TransferMode::Push));
}

#[test]
fn what_is_no_object_is_refused_by_kind() {
    assert_eq!(HandOff::parse(b"null"), Err(HandOffDefect::Null));
    for other in ["1", "-1", "1.5", "true", "\"x\"", "[]", "[[1],{}]"] {
        assert_eq!(HandOff::parse(other.as_bytes()), Err(HandOffDefect::NotAnObject), "{other}");
    }
    for broken in ["", "{", "{}{}", "{\"a\":}", "nul", "\u{feff}{}"] {
        assert_eq!(HandOff::parse(broken.as_bytes()), Err(HandOffDefect::NotJson), "{broken}");
    }
    assert_eq!(HandOff::parse(b"{\"a\":\"\xff\"}"), Err(HandOffDefect::NotJson));
    let nested = |depth: usize| {
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        valid().to_string().replacen('{', &format!("{{\"x\":{open}{close},"), 1)
    };
    assert!(HandOff::parse(nested(100).as_bytes()).is_ok());
    assert_eq!(HandOff::parse(nested(100_000).as_bytes()), Err(HandOffDefect::NotJson));
    let half_a_character = valid().to_string().replacen('{', "{\"x\":\"\\ud800\",", 1);
    assert_eq!(HandOff::parse(half_a_character.as_bytes()), Err(HandOffDefect::NotJson));
}

#[test]
fn unknown_keys_are_legal_and_internal_ones_are_noticed() {
    assert!(!parse(&with("foo", json!({"deep": [1, 2]}))).unwrap().has_internal_keys);
    assert!(parse(&with("_remote_blocks_processed", json!(true))).unwrap().has_internal_keys);
}

#[test]
fn escaped_keys_and_the_last_of_two_equal_keys_count() {
    let text = valid().to_string().replace("\"tp_size\":1", "\"tp_size\":0,\"tp\\u005fsize\":2");
    assert_eq!(HandOff::parse(text.as_bytes()).unwrap().tp_size, 2);
    let engine_side: KvTransferParams = serde_json::from_str(&text).unwrap();
    assert_eq!(engine_side.tp_size.value(), Some(&2));
}

proptest! {
    #[test]
    fn how_a_list_of_ids_is_spelled_says_nothing(
        groups in proptest::collection::vec(proptest::collection::vec(any::<u64>(), 1..40), 1..4),
        flat in any::<bool>(),
        between in proptest::sample::select(vec![",", ", ", " ,\n"]),
    ) {
        let list = |ids: &[u64]| {
            format!("[{}]", ids.iter().map(u64::to_string).collect::<Vec<_>>().join(between))
        };
        let list = if flat {
            list(&groups[0])
        } else {
            format!("[{}]", groups.iter().map(|ids| list(ids)).collect::<Vec<_>>().join(between))
        };
        let ids = with("remote_block_ids", Value::Null).to_string().replace(r#""remote_block_ids":null"#, &format!(r#""remote_block_ids":{list}"#));
        let expected = if flat { BlockIds::flat(groups[0].clone()) } else { BlockIds::grouped(groups) };
        prop_assert_eq!(HandOff::parse(ids.as_bytes()).unwrap().remote_block_ids, expected.clone());
        let answer = format!(r#"{{"a":[{{}}], "kv":{ids} ,"b":1}}"#);
        let mut fields = Fields::open(&answer).unwrap();
        let first = fields.key().unwrap().unwrap();
        fields.pass(first).unwrap();
        prop_assert!(fields.key().unwrap().unwrap().is("kv"));
        let read = HandOff::parse_next(&mut fields).unwrap().unwrap();
        prop_assert_eq!(read.remote_block_ids, expected);
        prop_assert!(fields.key().unwrap().unwrap().is("b"));
        prop_assert_eq!(fields.rest(), "1}");
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _decided = HandOff::parse(&bytes);
        let _decided = serde_json::from_slice::<KvTransferParams>(&bytes);
    }

    #[test]
    fn any_value_in_any_field_is_decided_without_panic(
        field in proptest::sample::select(vec![
            "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id",
            "remote_request_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size",
            "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode", "remote_block_size", "transfer_id", "x",
        ]),
        value in proptest::sample::select(vec![
            json!(null), json!(0), json!(-1), json!(1e300), json!(u64::MAX), json!(""), json!("pull"), json!([]),
            json!([[]]), json!([0]), json!([[i64::MIN]]), json!({}), json!(true),
        ]),
    ) {
        let json = with(field, value);
        // What the router lets through, an engine must be able to read.
        if parse(&json).is_ok() {
            prop_assert!(serde_json::from_value::<KvTransferParams>(json).is_ok());
        }
    }
}
