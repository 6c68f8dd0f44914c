use serde_json::{Value, json};

use super::*;
use crate::golden::{capture, list, vectors};

#[test]
fn p_answers_encode_again_as_vllm_wrote_them() {
    for name in ["completions.P.resp.json", "chat_completions.P.resp.json"] {
        let body = capture(name);
        #[derive(serde::Deserialize)]
        struct Body<'a> {
            #[serde(borrow)]
            kv_transfer_params: &'a serde_json::value::RawValue,
        }
        let body: Body<'_> = serde_json::from_slice(&body).unwrap();
        let params: KvTransferParams = serde_json::from_str(body.kv_transfer_params.get()).unwrap();
        let again = serde_json::to_string(&params).unwrap();
        assert_eq!(again, body.kv_transfer_params.get().replace(", ", ",").replace(": ", ":"));
    }
}

#[test]
fn every_object_of_the_vectors_survives_a_round_trip() {
    let vectors = vectors("kv_transfer_params.json");
    let mut seen = 0;
    for case in list(&vectors["cases"]) {
        let json = &case["kv_transfer_params"];
        if json.is_null() {
            continue;
        }
        seen += 1;
        let params: KvTransferParams = serde_json::from_value(json.clone()).unwrap();
        let again = serde_json::to_value(&params).unwrap();
        if case["name"] == "port_as_string" {
            assert_eq!(again["remote_port"], 5600);
            continue;
        }
        assert_eq!(&again, json, "{}", case["name"]);
        // Equality of JSON objects says nothing of the order of their keys.
        let keys = |json: &Value| json.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let same_order = case["name"] != "prefill_request_echoed";
        assert_eq!(keys(&again) == keys(json), same_order, "{}", case["name"]);
    }
    assert_eq!(seen, 27);
}

#[test]
fn unknown_fields_are_carried_on_in_order() {
    let text = r#"{"do_remote_prefill":true,"do_remote_decode":false,"zeta":[1,{"a":null}],"alpha":"x"}"#;
    let params: KvTransferParams = serde_json::from_str(text).unwrap();
    assert_eq!(params.extra.len(), 2);
    assert_eq!(serde_json::to_string(&params).unwrap(), text);
}

#[test]
fn absent_null_and_set_are_kept_apart() {
    let params: KvTransferParams =
        serde_json::from_value(json!({"remote_host": null, "tp_size": 2})).unwrap();
    assert_eq!(params.remote_engine_id, Presence::Absent);
    assert_eq!(params.remote_host, Presence::Null);
    assert_eq!(params.tp_size, Presence::Value(2));
    assert_eq!(params.first_missing_remote_key(), Some("remote_engine_id"));
}

#[test]
fn block_ids_have_the_shape_of_their_generation() {
    let encode = |ids: &BlockIds| serde_json::to_string(ids).unwrap();
    let groups = vec![vec![1, 2], vec![]];
    assert_eq!(encode(&BlockIds::for_generation(Generation::V14, groups)), "[[1,2],[]]");
    assert_eq!(encode(&BlockIds::for_generation(Generation::V2, vec![vec![1, 2]])), "[1,2]");
    assert_eq!(encode(&BlockIds::for_generation(Generation::V2, vec![])), "[]");
    let truthy = |text: &str| serde_json::from_str::<BlockIds>(text).unwrap().is_truthy();
    assert_eq!([truthy("[]"), truthy("[[]]"), truthy("[0]"), truthy("[[],[1]]")], [false, true, true, true]);
    for bad in ["[1,[2]]", "[-1]", "[1.5]", "[[\"1\"]]", "[[[1]]]", "{}", "[null]"] {
        assert!(serde_json::from_str::<BlockIds>(bad).is_err(), "{bad}");
    }
}

#[test]
fn the_prefill_leg_asks_for_a_hand_off() {
    let vectors = vectors("kv_transfer_params.json");
    let echoed = list(&vectors["cases"]).iter().find(|case| case["name"] == "prefill_request_echoed");
    let sent: Value = serde_json::from_slice(prefill_request_params()).unwrap();
    assert_eq!(sent.to_string(), echoed.unwrap()["kv_transfer_params"].to_string());
}
