//! Client bodies recorded against real engines, compared with the legs recorded for them.

use bytes::Bytes;
use kvbaton_proxy::request::{ClientRequest, Endpoint, InjectedHandOff};
use kvbaton_proxy::splice::{PrefillAnswer, PromptPart, client_answer};
use serde_json::Value;

macro_rules! capture {
    ($name:literal) => {
        include_bytes!(concat!("../../../../tests/fixtures/captures/", $name))
    };
}

/// One recorded request: the client's body, both legs' bodies, P's answer.
struct Recorded {
    endpoint: Endpoint,
    client: &'static [u8],
    prefill: &'static [u8],
    decode: &'static [u8],
    answer: &'static [u8],
    prompt_tokens: u64,
}

fn recorded() -> [Recorded; 4] {
    [
        Recorded {
            endpoint: Endpoint::Completions,
            client: capture!("completions.single_P.req.json"),
            prefill: capture!("completions.P.req.json"),
            decode: capture!("completions.D.req.json"),
            answer: capture!("completions.P.resp.json"),
            prompt_tokens: 383,
        },
        Recorded {
            endpoint: Endpoint::Completions,
            client: capture!("completions_stream.single_P.req.json"),
            prefill: capture!("completions_stream.P.req.json"),
            decode: capture!("completions_stream.D.req.json"),
            answer: capture!("completions_stream.P.resp.json"),
            prompt_tokens: 383,
        },
        Recorded {
            endpoint: Endpoint::ChatCompletions,
            client: capture!("chat_completions.single_P.req.json"),
            prefill: capture!("chat_completions.P.req.json"),
            decode: capture!("chat_completions.D.req.json"),
            answer: capture!("chat_completions.P.resp.json"),
            prompt_tokens: 394,
        },
        Recorded {
            endpoint: Endpoint::ChatCompletions,
            client: capture!("chat_completions_stream.single_P.req.json"),
            prefill: capture!("chat_completions_stream.P.req.json"),
            decode: capture!("chat_completions_stream.D.req.json"),
            answer: capture!("chat_completions_stream.P.resp.json"),
            prompt_tokens: 394,
        },
    ]
}

fn value(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

#[test]
fn both_legs_are_what_real_engines_were_sent() {
    for case in recorded() {
        let body = Bytes::from_static(case.client);
        let request = ClientRequest::parse(case.endpoint, body, InjectedHandOff::Refuse).unwrap();
        assert_eq!(request.model(), "tiny");
        assert_eq!(request.bypass(), None);
        let streams = value(case.client).get("stream").is_some();
        assert_eq!(request.wants_stream(), streams);

        let mut expected = value(case.prefill);
        if !streams {
            // The recording client spelled the default out.
            assert_eq!(expected.as_object_mut().unwrap().shift_remove("stream"), Some(Value::Bool(false)));
        }
        assert_eq!(value(&request.prefill_body(false).into_bytes()), expected);

        let answer = PrefillAnswer::parse(&Bytes::from_static(case.answer)).unwrap();
        assert_eq!(answer.completion_tokens, Some(1));
        assert_eq!(answer.prompt_tokens, Some(case.prompt_tokens));
        assert_eq!(answer.cached_tokens, Some(0));
        let decode = request.decode_body(answer.hand_off.map(|granted| granted.raw)).into_bytes();
        assert_eq!(value(&decode), value(case.decode));
    }
}

#[test]
fn answers_lose_the_hand_off_and_nothing_else() {
    let answers = [
        &capture!("completions.P.resp.json")[..],
        &capture!("chat_completions.P.resp.json")[..],
        &capture!("completions.D.resp.json")[..],
        &capture!("chat_completions.D.resp.json")[..],
    ];
    for answer in answers {
        let mut expected = value(answer);
        assert!(expected.as_object_mut().unwrap().shift_remove("kv_transfer_params").is_some());
        let left = kvbaton_proxy::splice::answer_without_hand_off(Bytes::from_static(answer)).into_bytes();
        assert_eq!(value(&left), expected);
        assert_eq!(left, serde_json::to_vec(&expected).unwrap(), "order and spelling stay");
    }
}

#[test]
fn item_20_a_recorded_message_counts_cached_tokens_beside_the_others() {
    let prefill = Bytes::from_static(capture!("messages.P.resp.json"));
    let answer = PrefillAnswer::parse(&prefill).unwrap();
    assert_eq!(
        (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens),
        (Some(149), Some(128), Some(1))
    );
    assert!(answer.hand_off.is_some());
    let decode = Bytes::from_static(capture!("messages.D.resp.json"));
    let shown = |cached_tokens| {
        let part = PromptPart { cached_tokens, ..PromptPart::default() };
        client_answer(&decode, Endpoint::Messages, Some(&part)).unwrap().into_bytes()
    };
    assert_eq!(shown(Some(128)), decode, "this engine reports the prefill engine's count by itself");
    let usage = value(&shown(Some(64)))["usage"].clone();
    assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&85.into(), &64.into()));
}

#[test]
fn a_recorded_response_loses_the_hand_off_and_nothing_else() {
    let decode = Bytes::from_static(capture!("responses.D.resp.json"));
    let part = PromptPart { cached_tokens: Some(0), ..PromptPart::default() };
    let shown = client_answer(&decode, Endpoint::Responses, Some(&part)).unwrap().into_bytes();
    let expected = std::str::from_utf8(&decode).unwrap().replace(r#""kv_transfer_params":null,"#, "");
    assert_eq!(shown, expected);
}
