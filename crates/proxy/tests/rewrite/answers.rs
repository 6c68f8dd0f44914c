//! Reading engines' answers, taking the hand-off out, rewriting its address, and sending bodies.

use bytes::Bytes;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use kvbaton_proxy::request::Endpoint;
use kvbaton_proxy::splice::{
    PrefillAnswer, PromptPart, Spliced, answer_without_hand_off, client_answer, rewrite_address,
};

use crate::{parse, text};

fn read(answer: &'static str) -> PrefillAnswer {
    PrefillAnswer::parse(&Bytes::from_static(answer.as_bytes())).unwrap()
}

#[test]
fn usage_is_read_from_the_top_level_only() {
    let answer = read(
        r#"{"x":{"usage":{"completion_tokens":9}},"usage":{"prompt_tokens":10,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}"#,
    );
    let expected = PrefillAnswer {
        hand_off: None,
        completion_tokens: Some(1),
        prompt_tokens: Some(10),
        cached_tokens: Some(4),
        ..PrefillAnswer::default()
    };
    assert_eq!(answer, expected);
}

#[test]
fn counts_that_are_no_integers_are_none() {
    for usage in [
        "null",
        "[]",
        "{}",
        r#"{"completion_tokens":1.0}"#,
        r#"{"completion_tokens":-1}"#,
        r#"{"completion_tokens":"1"}"#,
    ] {
        let body = Bytes::from(format!(r#"{{"usage":{{"completion_tokens":1}},"usage":{usage}}}"#));
        assert_eq!(PrefillAnswer::parse(&body).unwrap(), PrefillAnswer::default(), "{usage}");
    }
    assert_eq!(read(r#"{"usage":{"prompt_tokens":1,"prompt_tokens_details":null}}"#).prompt_tokens, Some(1));
}

#[test]
fn the_hand_off_is_a_slice_of_the_answer() {
    let body = Bytes::from_static(br#"{"kv_transfer_params":{"a":1}}"#);
    let hand_off = PrefillAnswer::parse(&body).unwrap().hand_off.unwrap();
    assert!(body.as_ptr_range().contains(&hand_off.raw.as_ptr()));
}

#[test]
fn answers_lose_every_top_level_hand_off() {
    for (given, expected) in [
        (r#"{"kv_transfer_params":null}"#, "{}"),
        (r#"{ "kv_transfer_params" : {"a":[1]} }"#, "{  }"),
        (r#"{"kv_transfer_params":1,"kv_transfer_\u0070arams":2}"#, "{}"),
        (r#"{"a":1,"kv_transfer_params":{"a":{}}, "b":2}"#, r#"{"a":1,"b":2}"#),
        (r#"{"a":1 , "kv_transfer_params":{}}"#, r#"{"a":1}"#),
        (r#"{"a":{"kv_transfer_params":1}}"#, r#"{"a":{"kv_transfer_params":1}}"#),
        (r#"{"a":1e5}"#, r#"{"a":1e5}"#),
        ("not json", "not json"),
        (r#"{"kv_transfer_params":1"#, r#"{"kv_transfer_params":1"#),
        ("", ""),
    ] {
        assert_eq!(text(answer_without_hand_off(Bytes::from_static(given.as_bytes()))), expected);
    }
}

#[test]
fn an_address_is_rewritten_in_place() {
    let raw =
        r#"{ "remote_host" : "localhost","remote_port":5600 ,"x":{"remote_host":"a"},"remote_host":null}"#;
    let raw = Bytes::from_static(raw.as_bytes());
    let both = rewrite_address(&raw, Some("10.0.0.7"), Some(7000)).unwrap();
    let expected = r#"{ "remote_host" : "10.0.0.7","remote_port":7000 ,"x":{"remote_host":"a"},"remote_host":"10.0.0.7"}"#;
    assert_eq!(both, expected);
    let host = rewrite_address(&raw, Some("a\"\\\u{1}\u{e9}"), None).unwrap();
    let quoted = r#""a\"\\\u0001é""#;
    let expected = format!(
        r#"{{ "remote_host" : {quoted},"remote_port":5600 ,"x":{{"remote_host":"a"}},"remote_host":{quoted}}}"#
    );
    assert_eq!(host, expected);
    assert_eq!(rewrite_address(&raw, None, None).unwrap(), raw);
    assert_eq!(rewrite_address(&Bytes::from_static(b"{}"), Some("h"), Some(1)).unwrap(), "{}");
    assert!(rewrite_address(&Bytes::from_static(b"[]"), Some("h"), Some(1)).is_err());
}

#[tokio::test]
async fn a_spliced_body_states_its_length_and_can_be_sent_again() {
    let prompt = "p".repeat(5000);
    let given = format!(r#"{{"model":"m","stop":1,"prompt":"{prompt}","stream":true}}"#);
    let body = parse(Endpoint::Completions, &given).unwrap().prefill_body(true);
    let again = body.clone();
    let length = body.size_hint().exact().unwrap();
    assert_eq!(length, body.len());
    let first = body.collect().await.unwrap().to_bytes();
    assert_eq!(first.len() as u64, length);
    assert_eq!(again.into_bytes(), first);
}

#[tokio::test]
async fn what_is_left_shrinks_with_each_frame() {
    let mut body = Spliced::from(Bytes::from_static(b"abc"));
    assert!(!body.is_end_stream());
    let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(frame, "abc");
    assert!(body.is_end_stream() && body.is_empty());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(body.frame().await.is_none());
    let nothing = Spliced::from(Bytes::new());
    assert!(nothing.is_end_stream() && nothing.segments().is_empty());
    assert_eq!(nothing.into_bytes(), "");
}

fn shown(endpoint: Endpoint, part: &PromptPart, answer: &str) -> String {
    text(client_answer(&Bytes::copy_from_slice(answer.as_bytes()), endpoint, Some(part)).unwrap())
}

#[test]
fn item_20_ps_cached_tokens_replace_ds_on_every_dialect() {
    let part = |cached_tokens| PromptPart { cached_tokens, ..PromptPart::default() };
    let openai = r#"{"id":"x","usage":{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":10,"a":1.0}},"kv_transfer_params":null,"b":2}"#;
    for endpoint in crate::BOTH {
        let expected = r#"{"id":"x","usage":{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":4,"a":1.0}},"b":2}"#;
        assert_eq!(shown(endpoint, &part(Some(4)), openai), expected);
        assert_eq!(shown(endpoint, &part(None), openai), expected.replace(r#""cached_tokens":4,"#, ""));
    }
    let response =
        r#"{"usage":{"input_tokens":10,"input_tokens_details":{"cache_write_tokens":0,"cached_tokens":10}}}"#;
    let expected = response.replace(r#""cached_tokens":10"#, r#""cached_tokens":4"#);
    assert_eq!(shown(Endpoint::Responses, &part(Some(4)), response), expected);
    let message = r#"{"usage":{"input_tokens":1,"output_tokens":3,"cache_creation_input_tokens":0,"cache_read_input_tokens":9}}"#;
    let expected = r#"{"usage":{"input_tokens":6,"output_tokens":3,"cache_creation_input_tokens":0,"cache_read_input_tokens":4}}"#;
    assert_eq!(shown(Endpoint::Messages, &part(Some(4)), message), expected);
    let expected = r#"{"usage":{"input_tokens":10,"output_tokens":3,"cache_creation_input_tokens":0}}"#;
    assert_eq!(shown(Endpoint::Messages, &part(None), message), expected);
    // Nothing is invented where the engine says nothing, nor outside of the usage.
    for silent in [
        r#"{"usage":{"prompt_tokens":10,"prompt_tokens_details":null}}"#,
        r#"{"usage":null,"choices":[{"usage":{"prompt_tokens_details":{"cached_tokens":7}}}]}"#,
        r#"{"metadata":{"cached_tokens":1},"cached_tokens":2}"#,
    ] {
        assert_eq!(shown(Endpoint::ChatCompletions, &part(Some(4)), silent), silent);
    }
}

#[test]
fn the_prompts_tokens_are_counted_alike_in_every_dialect() {
    let counts = |answer| {
        let answer = read(answer);
        (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
    };
    let expected = (Some(10), Some(4), Some(1));
    assert_eq!(
        counts(
            r#"{"usage":{"input_tokens":10,"output_tokens":1,"input_tokens_details":{"cached_tokens":4}}}"#
        ),
        expected
    );
    assert_eq!(
        counts(
            r#"{"usage":{"input_tokens":1,"output_tokens":1,"cache_read_input_tokens":4,"cache_creation_input_tokens":5}}"#
        ),
        expected
    );
}

#[test]
fn item_21_prompt_logprobs_come_from_p() {
    let list = r#"[null,{"7":{"logprob":-1.50,"rank":1}}]"#;
    let part = PromptPart { prompt_logprobs: Some(Bytes::from(list)), ..PromptPart::default() };
    let expected = format!(r#"{{"a":1,"prompt_logprobs":{list},"b":2}}"#);
    let given = r#"{"a":1,"prompt_logprobs":null,"b":2}"#;
    assert_eq!(shown(Endpoint::ChatCompletions, &part, given), expected);
    let absent = r#"{"a":1,"kv_transfer_params":null}"#;
    let expected = format!(r#"{{"a":1,"prompt_logprobs":{list}}}"#);
    assert_eq!(shown(Endpoint::ChatCompletions, &part, absent), expected);
    let completion = r#"{"choices":[{"index":0,"prompt_logprobs":null}],"prompt_logprobs":null}"#;
    let expected =
        format!(r#"{{"choices":[{{"index":0,"prompt_logprobs":{list}}}],"prompt_logprobs":null}}"#);
    assert_eq!(shown(Endpoint::Completions, &part, completion), expected);
}

#[test]
fn item_21_an_echoed_prompt_and_its_logprobs_come_from_p() {
    use kvbaton_proxy::splice::EchoedPrompt;
    let echo = EchoedPrompt {
        text: Bytes::from_static(br#""q\u00e9\n""#),
        width: 3,
        lists: [&b"0,1,2"[..], b"null,-1.0,-2.50", br#""q","a","b""#, br#"null,{"a":-1.0},{}"#]
            .map(Bytes::from_static),
    };
    let part = PromptPart { echo: Some(echo), ..PromptPart::default() };
    let given = r#"{"choices":[{"text":"xy","logprobs":{"text_offset":[0, 1],"token_logprobs":[-3,-4],"tokens":["x","y"],"top_logprobs":[{"x":-3},{"y":-4}]}}]}"#;
    let expected = r#"{"choices":[{"text":"q\u00e9\nxy","logprobs":{"text_offset":[0,1,2,3,4],"token_logprobs":[null,-1.0,-2.50,-3,-4],"tokens":["q","a","b","x","y"],"top_logprobs":[null,{"a":-1.0},{},{"x":-3},{"y":-4}]}}]}"#;
    let got = shown(Endpoint::Completions, &part, given);
    assert_eq!(got, expected);
}
