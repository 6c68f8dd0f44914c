//! Any request in: the same request out but for the named fields, order and spelling kept.

use bytes::Bytes;
use kv_connector::protocol::handoff::HandOff;
use kvbaton_proxy::request::{BadRequest, ClientRequest, Endpoint, InjectedHandOff};
use kvbaton_proxy::splice::{PrefillAnswer, answer_without_hand_off, rewrite_address};
use proptest::prelude::*;

use crate::oracle::{Pairs, canonical, is_blank, object, request};
use crate::{PREFILL_HAND_OFF, parse, parse_stripping, text};

const CONTAINERS: [&str; 4] = ["extra_body", "vllm_xargs", "extra_args", "sampling_params"];
const LIMITS: [&str; 3] = ["max_tokens", "max_completion_tokens", "max_output_tokens"];
const REMOVED: [&str; 6] =
    ["kv_transfer_params", "stream_options", "min_tokens", "min_completion_tokens", "stop", "stop_token_ids"];

fn endpoint() -> impl Strategy<Value = Endpoint> {
    prop::sample::select(&crate::BOTH[..])
}

/// What the model of this module says the prefill leg is.
fn expected_prefill(endpoint: Endpoint, given: &Pairs, ignore_eos: bool) -> Vec<(String, String)> {
    let has = |name: &str| given.0.iter().any(|(key, _)| key == name);
    let mut expected: Vec<(String, String)> = given
        .0
        .iter()
        .filter(|(key, _)| !REMOVED.contains(&key.as_str()))
        .map(|(key, value)| {
            let value = match key.as_str() {
                "stream" => "false",
                "ignore_eos" if ignore_eos => "true",
                limit if LIMITS.contains(&limit) => "1",
                _ => value,
            };
            (key.clone(), value.to_owned())
        })
        .collect();
    let mut add = |key: &str, value: &str| expected.push((key.to_owned(), value.to_owned()));
    let chat_limit = endpoint == Endpoint::ChatCompletions && has("max_completion_tokens");
    if !has("max_tokens") && !chat_limit {
        add("max_tokens", "1");
    }
    if ignore_eos && !has("ignore_eos") {
        add("ignore_eos", "true");
    }
    add("kv_transfer_params", PREFILL_HAND_OFF);
    expected
}

fn holds_hand_off(given: &Pairs) -> bool {
    given.0.iter().any(|(key, value)| {
        (key == "kv_transfer_params" && !is_blank(value))
            || (CONTAINERS.contains(&key.as_str()) && canonical(value, true) != canonical(value, false))
    })
}

/// Values of containers lose their hand-offs; their white space is not compared here.
fn normalised(pairs: Vec<(String, String)>, strip: bool) -> Vec<(String, String)> {
    let normal = |(key, value): (String, String)| {
        let value = if CONTAINERS.contains(&key.as_str()) { canonical(&value, strip) } else { value };
        (key, value)
    };
    pairs.into_iter().map(normal).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn the_prefill_leg_changes_the_named_fields_only(
        given in request(), endpoint in endpoint(), ignore_eos: bool,
    ) {
        let pairs = Pairs::read(&given);
        let body = text(parse_stripping(endpoint, &given).unwrap().prefill_body(ignore_eos));
        let expected = expected_prefill(endpoint, &pairs, ignore_eos);
        prop_assert_eq!(normalised(Pairs::read(&body).0, false), normalised(expected, true));
    }

    #[test]
    fn the_decode_leg_changes_the_hand_off_only(given in request(), endpoint in endpoint()) {
        let pairs = Pairs::read(&given);
        let request = parse_stripping(endpoint, &given).unwrap();
        prop_assert_eq!(request.is_stripped(), holds_hand_off(&pairs));
        let mut expected = pairs.0;
        expected.retain(|(key, _)| key != "kv_transfer_params");
        let alone = text(request.decode_body(None));
        prop_assert_eq!(normalised(Pairs::read(&alone).0, false), normalised(expected.clone(), true));
        let from_prefill = request.wanted_of_prefill();
        for (key, value) in &mut expected {
            match key.as_str() {
                "prompt_logprobs" if from_prefill.prompt_logprobs => *value = "null".to_owned(),
                "echo" if from_prefill.echo => *value = "false".to_owned(),
                _ => {}
            }
        }
        expected.push(("kv_transfer_params".to_owned(), "{\"a\": [[1]]}".to_owned()));
        let with = text(request.decode_body(Some(Bytes::from_static(b"{\"a\": [[1]]}"))));
        prop_assert_eq!(normalised(Pairs::read(&with).0, false), normalised(expected, true));
    }

    #[test]
    fn bytes_that_are_not_edited_stay(given in request(), endpoint in endpoint()) {
        let request = parse_stripping(endpoint, &given).unwrap();
        let alone = text(request.decode_body(None));
        let with = request.decode_body(Some(Bytes::from_static(b"{\"a\":1}"))).into_bytes();
        if !request.wanted_of_prefill().any() {
            prop_assert_eq!(&text(answer_without_hand_off(with)), &alone);
        }
        let pairs = Pairs::read(&given);
        if !holds_hand_off(&pairs) && pairs.0.iter().all(|(key, _)| key != "kv_transfer_params") {
            prop_assert_eq!(alone, given);
        }
    }

    #[test]
    fn rewriting_twice_is_rewriting_once(given in request(), endpoint in endpoint(), ignore_eos: bool) {
        let once = text(parse_stripping(endpoint, &given).unwrap().prefill_body(ignore_eos));
        let twice = text(parse_stripping(endpoint, &once).unwrap().prefill_body(ignore_eos));
        prop_assert_eq!(&twice, &once);
        let alone = text(parse_stripping(endpoint, &given).unwrap().decode_body(None));
        let again = parse(endpoint, &alone).unwrap();
        prop_assert_eq!(text(again.decode_body(None)), alone);
    }

    #[test]
    fn refusing_and_stripping_agree(given in request(), endpoint in endpoint()) {
        let refused = matches!(parse(endpoint, &given), Err(BadRequest::InjectedHandOff { .. }));
        prop_assert_eq!(refused, holds_hand_off(&Pairs::read(&given)));
    }

    #[test]
    fn the_model_is_what_serde_reads(given in request()) {
        let last = Pairs::read(&given).0.into_iter().rev().find(|(key, _)| key == "model").unwrap().1;
        let request = parse_stripping(Endpoint::Completions, &given).unwrap();
        // Only serde refuses surrogates without a partner.
        if let Ok(model) = serde_json::from_str::<String>(&last) {
            prop_assert_eq!(request.model(), model);
        } else {
            prop_assert!(request.model().contains(char::REPLACEMENT_CHARACTER), "no replacement");
        }
    }

    #[test]
    fn answers_lose_the_hand_off_only(given in object()) {
        let left = text(answer_without_hand_off(Bytes::from(given.clone())));
        let mut expected = Pairs::read(&given).0;
        let hand_off = expected.iter().rev().find(|(key, _)| key == "kv_transfer_params").cloned();
        expected.retain(|(key, _)| key != "kv_transfer_params");
        prop_assert_eq!(Pairs::read(&left).0, expected);
        let read = PrefillAnswer::parse(&Bytes::from(given)).unwrap().hand_off;
        let hand_off = hand_off.map(|(_, value)| value).filter(|value| value != "null");
        if let Some(granted) = &read {
            prop_assert_eq!(&granted.read, &HandOff::parse(&granted.raw));
        }
        prop_assert_eq!(read.map(|granted| granted.raw), hand_off.map(Bytes::from));
    }

    #[test]
    fn an_address_changes_two_values_only(given in object(), host: String, port: u16) {
        let given = given.replace("\"stop\"", "\"remote_host\"").replace("\"n\"", "\"remote_port\"");
        let rewritten = rewrite_address(&Bytes::from(given.clone()), Some(&host), Some(port)).unwrap();
        let rewritten = Pairs::read(std::str::from_utf8(&rewritten).unwrap()).0;
        let mut expected = Pairs::read(&given).0;
        for (key, value) in &mut expected {
            match key.as_str() {
                "remote_host" => *value = host.clone(),
                "remote_port" => *value = port.to_string(),
                _ => {}
            }
        }
        let read = rewritten.into_iter().map(|(key, value)| match key.as_str() {
            "remote_host" => (key, serde_json::from_str(&value).unwrap()),
            _ => (key, value),
        });
        prop_assert_eq!(read.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>, endpoint in endpoint()) {
        let body = Bytes::from(bytes);
        prop_assert_eq!(answer_without_hand_off(body.clone()).len(), body.len() as u64);
        prop_assert!(PrefillAnswer::parse(&body).is_err());
        prop_assert!(ClientRequest::parse(endpoint, body, InjectedHandOff::Strip).is_err());
    }
}
