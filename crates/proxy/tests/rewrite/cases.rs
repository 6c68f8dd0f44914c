//! Decisions about a request: model, stream, shareability, refusals.

use bytes::Bytes;
use kvbaton_proxy::json::JsonFaultKind;
use kvbaton_proxy::request::BypassReason::{
    self, Background, BeamSearch, BestOf, N, PromptLogprobs, ServerTools, SeveralPrompts, StoredResponse,
    Truncation,
};
use kvbaton_proxy::request::Endpoint::{ChatCompletions, Completions, Messages, Responses};
use kvbaton_proxy::request::{BadRequest, ClientRequest, Endpoint, InjectedHandOff, MAX_EDITS};

use crate::{BOTH, parse, parse_stripping};

fn bypass(endpoint: Endpoint, members: &str) -> Option<BypassReason> {
    parse(endpoint, &format!(r#"{{"model":"m",{members}}}"#)).unwrap().bypass()
}

#[test]
fn only_a_single_plain_sequence_shares_its_hand_off() {
    let cases: &[(&str, Option<BypassReason>)] = &[
        (r#""n":1"#, None),
        (r#""n":null"#, None),
        (r#""n":1.0"#, None),
        (r#""n":1e0"#, None),
        (r#""n":"1""#, None),
        (r#""n":2"#, Some(N)),
        (r#""n":0"#, Some(N)),
        (r#""n":-1"#, Some(N)),
        (r#""n":1.5"#, Some(N)),
        (r#""n":"2""#, Some(N)),
        (r#""n":true"#, Some(N)),
        (r#""n":[1]"#, Some(N)),
        (r#""n":99999999999999999999999"#, Some(N)),
        (r#""n":2,"n":1"#, Some(N)),
        (r#""n":1,"\u006e":2"#, Some(N)),
        (r#""best_of":1"#, None),
        (r#""best_of":null"#, None),
        (r#""best_of":3"#, Some(BestOf)),
        (r#""use_beam_search":false"#, None),
        (r#""use_beam_search":null"#, None),
        (r#""use_beam_search":"off""#, None),
        (r#""use_beam_search":0"#, None),
        (r#""use_beam_search":true"#, Some(BeamSearch)),
        (r#""use_beam_search":"maybe""#, Some(BeamSearch)),
        (r#""use_beam_search":{}"#, Some(BeamSearch)),
        (r#""use_beam_search":true,"n":2"#, Some(BeamSearch)),
        (r#""prompt_logprobs":null"#, None),
        (r#""prompt_logprobs":0"#, None),
        (r#""prompt_logprobs":1"#, None),
        (r#""prompt_logprobs":1,"stream":true"#, Some(PromptLogprobs)),
        (r#""prompt_logprobs":1,"prompt_logprobs":2"#, Some(PromptLogprobs)),
        (r#""truncate_prompt_tokens":-1"#, Some(Truncation)),
        (r#""truncate_prompt_tokens":null"#, None),
        (r#""echo":false,"logprobs":1"#, None),
        (r#""logprobs":5"#, None),
    ];
    for endpoint in BOTH {
        for (members, expected) in cases {
            assert_eq!(bypass(endpoint, members), *expected, "{endpoint:?} {members}");
        }
    }
}

#[test]
fn echo_needs_prompt_logprobs_in_each_dialect() {
    for (members, completions, chat) in [
        (r#""echo":true"#, None, Some(PromptLogprobs)),
        (r#""echo":true,"logprobs":null"#, None, Some(PromptLogprobs)),
        (r#""echo":true,"logprobs":0"#, Some(PromptLogprobs), Some(PromptLogprobs)),
        (r#""logprobs":1,"echo":"yes""#, Some(PromptLogprobs), Some(PromptLogprobs)),
        (r#""logprobs":1,"echo":true,"echo":false"#, Some(PromptLogprobs), Some(PromptLogprobs)),
        (r#""echo":"no","logprobs":1"#, None, None),
        (r#""echo":null,"logprobs":1"#, None, None),
    ] {
        assert_eq!(bypass(Completions, members), completions, "{members}");
        assert_eq!(bypass(ChatCompletions, members), chat, "{members}");
    }
}

#[test]
fn item_21_an_echo_with_logprobs_is_taken_from_p_where_its_text_is_known() {
    let cases = [
        (r#""prompt":"a","echo":true,"logprobs":1"#, None),
        (r#""prompt":"a","echo":true,"logprobs":1,"stream":true"#, Some(PromptLogprobs)),
        (r#""prompt":[1,2],"echo":true,"logprobs":1"#, Some(PromptLogprobs)),
        (r#""prompt":"a","echo":true,"logprobs":1,"max_tokens":0"#, Some(PromptLogprobs)),
        (r#""prompt":"a","echo":true,"logprobs":1,"return_token_ids":true"#, Some(PromptLogprobs)),
        (r#""prompt":"a","echo":true,"echo":false,"logprobs":1"#, Some(PromptLogprobs)),
    ];
    for (members, expected) in cases {
        assert_eq!(bypass(Completions, members), expected, "{members}");
    }
}

#[test]
fn a_response_that_needs_one_engine_goes_to_one() {
    let cases = [
        (r#""input":"a","truncation":"disabled","tools":[],"background":false"#, None),
        (r#""tools":[{"type":"function","name":"f"},{"name":"g","type":"custom"}]"#, None),
        (r#""tools":[{"type":"function"},{"type":"web_search_preview"}]"#, Some(ServerTools)),
        (r#""tools":[{"type":"mcp","x":[1,{"type":"function"}]}]"#, Some(ServerTools)),
        (r#""tools":[{}]"#, Some(ServerTools)),
        (r#""truncation":"auto""#, Some(Truncation)),
        (r#""previous_response_id":"resp_1""#, Some(StoredResponse)),
        (r#""previous_response_id":null"#, None),
        (r#""background":true"#, Some(Background)),
    ];
    for (members, expected) in cases {
        assert_eq!(bypass(Responses, members), expected, "{members}");
        assert_eq!(bypass(Messages, members), None, "{members}");
    }
    assert_eq!(parse(Responses, "{}").unwrap().model(), "", "there the model may be left out");
}

#[test]
fn one_prompt_is_a_text_or_a_list_of_token_ids() {
    let one = [
        r#""a""#,
        r#""""#,
        "[1]",
        "[1,2,3]",
        "[ 1 , 2 ]",
        r#"["a"]"#,
        r#"[ "a\"b\\" ]"#,
        "[[1,2]]",
        "[ [ 1 ] ]",
        r#"["a]b,[c"]"#,
        "null",
    ];
    let several = [
        r#"["a","b"]"#,
        "[[1],[2]]",
        "[[1,2],[3]]",
        "[]",
        "[[]]",
        r#"[["a"]]"#,
        r#"[1,"a"]"#,
        r#"["a",1]"#,
        "[true]",
        "[null]",
        "[[null]]",
        "7",
        "{}",
        "true",
        "[{}]",
        "[[[1]]]",
        r#"["a" , "b"]"#,
    ];
    for prompt in one {
        assert_eq!(bypass(Completions, &format!(r#""prompt":{prompt}"#)), None, "{prompt}");
    }
    for prompt in several {
        assert_eq!(bypass(Completions, &format!(r#""prompt":{prompt}"#)), Some(SeveralPrompts), "{prompt}");
        assert_eq!(bypass(ChatCompletions, &format!(r#""prompt":{prompt}"#)), None, "{prompt}");
    }
}

#[test]
fn prompt_embeddings_count_as_a_prompt() {
    for (members, expected) in [
        (r#""prompt_embeds":"b64""#, None),
        (r#""prompt_embeds":["b64"]"#, None),
        (r#""prompt":null,"prompt_embeds":"b64""#, None),
        (r#""prompt_embeds":["a","b"]"#, Some(SeveralPrompts)),
        (r#""prompt_embeds":"b64","prompt":"a""#, Some(SeveralPrompts)),
        (r#""prompt":"a","prompt_embeds":null"#, None),
    ] {
        assert_eq!(bypass(Completions, members), expected, "{members}");
    }
}

#[test]
fn stream_is_read_as_leniently_as_by_the_engines() {
    for yes in
        ["true", r#""true""#, r#""TRUE""#, "1", "1.0", r#""1""#, r#""on""#, r#""yes""#, r#""Y""#, r#""t""#]
    {
        let body = format!(r#"{{"model":"m","stream":false,"stream":{yes}}}"#);
        assert!(parse(Completions, &body).unwrap().wants_stream(), "{yes}");
    }
    for no in ["false", "null", "0", "-0", "0.0", r#""off""#, r#""no""#, "2", r#""maybe""#, "[]", "{}"] {
        let body = format!(r#"{{"model":"m","stream":true,"stream":{no}}}"#);
        assert!(!parse(Completions, &body).unwrap().wants_stream(), "{no}");
    }
    assert!(!parse(Completions, r#"{"model":"m"}"#).unwrap().wants_stream());
}

#[test]
fn the_model_is_unescaped_and_the_last_one_counts() {
    for (body, model) in [
        (r#"{"model":"tiny"}"#, "tiny"),
        (r#"{"model":"a\u002fb\n\"\ud83d\ude00"}"#, "a/b\n\"\u{1f600}"),
        (r#"{"model":"\ud83d\u0041"}"#, "\u{fffd}A"),
        (r#"{"model":"a","mod\u0065l":"b"}"#, "b"),
        (r#"{"model":7,"model":"b"}"#, "b"),
        (r#"{"model":""}"#, ""),
    ] {
        assert_eq!(parse(ChatCompletions, body).unwrap().model(), model);
    }
}

#[test]
fn bad_bodies_are_refused_with_their_place() {
    let cases: &[(&[u8], BadRequest)] = &[
        (b"{}", BadRequest::MissingModel),
        (br#"{"Model":"m"}"#, BadRequest::MissingModel),
        (br#"{"model":null}"#, BadRequest::WrongType { field: "model", expected: "a string" }),
        (br#"{"model":"m","model":1}"#, BadRequest::WrongType { field: "model", expected: "a string" }),
        (b"[1]", BadRequest::NotAnObject),
        (b"\"x\"", BadRequest::NotAnObject),
        (b" null", BadRequest::NotAnObject),
        (b"{\"model\":\"\xff\"}", BadRequest::Utf8 { offset: 10 }),
        (b"", BadRequest::Json { offset: 0, kind: JsonFaultKind::UnexpectedEnd }),
        (b"\xef\xbb\xbf{}", BadRequest::Json { offset: 0, kind: JsonFaultKind::UnexpectedByte }),
        (br#"{"model":"m",}"#, BadRequest::Json { offset: 13, kind: JsonFaultKind::UnexpectedByte }),
        (br#"{"model":"m"} x"#, BadRequest::Json { offset: 14, kind: JsonFaultKind::TrailingBytes }),
        (br#"{"model":NaN}"#, BadRequest::Json { offset: 9, kind: JsonFaultKind::UnexpectedByte }),
        (br#"{"model":-Infinity}"#, BadRequest::Json { offset: 10, kind: JsonFaultKind::Number }),
        (br#"{"a":01}"#, BadRequest::Json { offset: 6, kind: JsonFaultKind::UnexpectedByte }),
        (br#"{"a":1.}"#, BadRequest::Json { offset: 7, kind: JsonFaultKind::Number }),
        (br#"{"a":"\x"}"#, BadRequest::Json { offset: 6, kind: JsonFaultKind::Escape }),
        (b"{\"a\":\"b\n\"}", BadRequest::Json { offset: 7, kind: JsonFaultKind::ControlCharacter }),
        (br#"{"a":tru"#, BadRequest::Json { offset: 8, kind: JsonFaultKind::UnexpectedEnd }),
    ];
    for (body, expected) in cases {
        let body = Bytes::from_static(body);
        let refusal = ClientRequest::parse(Completions, body, InjectedHandOff::Strip).unwrap_err();
        assert_eq!(refusal, *expected);
    }
    assert_eq!(BadRequest::MissingModel.param(), Some("model"));
    assert_eq!(BadRequest::NotAnObject.param(), None);
}

#[test]
fn lists_of_token_ids_are_checked_too() {
    for (prompt, offset, kind) in [
        ("[1,2,03,4]", 6, JsonFaultKind::UnexpectedByte),
        ("[1, 2, 03, 4]", 8, JsonFaultKind::UnexpectedByte),
        ("[1,2,-,4]", 6, JsonFaultKind::Number),
        ("[1,2,4,]", 7, JsonFaultKind::UnexpectedByte),
        ("[00,1]", 2, JsonFaultKind::UnexpectedByte),
        ("[1,2 3]", 5, JsonFaultKind::UnexpectedByte),
        ("[1,2,3}", 6, JsonFaultKind::UnexpectedByte),
    ] {
        let body = format!(r#"{{"prompt":{prompt}}}"#);
        let refusal = parse(Completions, &body).unwrap_err();
        assert_eq!(refusal, BadRequest::Json { offset: 10 + offset, kind }, "{prompt}");
    }
}

#[test]
fn nesting_has_a_limit_and_costs_no_stack() {
    let nested = |depth: usize| {
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        format!(r#"{{"model":"m","extra_body":{open}{close}}}"#)
    };
    assert!(parse(Completions, &nested(511)).is_ok());
    let refusal = parse(Completions, &nested(512)).unwrap_err();
    assert_eq!(refusal, BadRequest::Json { offset: 26 + 511, kind: JsonFaultKind::TooDeep });
    assert!(parse(Completions, &nested(1_000_000)).is_err());
}

#[test]
fn a_hand_off_of_the_client_is_refused_on_both_endpoints() {
    let cases = [
        ("kv_transfer_params", r#""kv_transfer_params":{"do_remote_prefill":true}"#),
        ("kv_transfer_params", r#""kv_transfer_params":[]"#),
        ("kv_transfer_params", r#""kv_transfer_params":false"#),
        ("kv_transfer_params", r#""kv\u005ftransfer_params":{"a":null}"#),
        ("kv_transfer_params", r#""kv_transfer_params":{"a":1},"kv_transfer_params":null"#),
        ("extra_body", r#""extra_body":{"kv_transfer_params":{"a":1}}"#),
        ("vllm_xargs", r#""vllm_xargs":{"x":[{"kv_\u0074ransfer_params":1}]}"#),
        ("extra_args", r#""extra_args":{"kv_transfer_params":"s"}"#),
        ("sampling_params", r#""sampling_params":{"extra_args":{"kv_transfer_params":{"a":1}}}"#),
    ];
    for endpoint in BOTH {
        for (place, members) in cases {
            let body = format!(r#"{{"model":"m",{members}}}"#);
            let refusal = parse(endpoint, &body).unwrap_err();
            assert_eq!(refusal, BadRequest::InjectedHandOff { place }, "{members}");
            assert_eq!(refusal.param(), Some("kv_transfer_params"));
        }
        let harmless = r#"{"model":"m","messages":[{"kv_transfer_params":{"a":1}}],"prompt":"\"kv_transfer_params\":{\"a\":1}"}"#;
        assert!(parse(endpoint, harmless).is_ok());
    }
}

#[test]
fn edits_are_bounded() {
    let body = |repeats: usize| format!(r#"{{"model":"m"{}}}"#, r#","stream":true"#.repeat(repeats));
    // The model's name is one of them: it may have to be another one for the engines.
    assert!(parse(Completions, &body(MAX_EDITS - 1)).is_ok());
    let refusal = parse(Completions, &body(MAX_EDITS)).unwrap_err();
    assert_eq!(refusal, BadRequest::TooManyEdits { limit: MAX_EDITS });
    let hidden = format!(
        r#"{{"model":"m","extra_body":[{}0]}}"#,
        r#"{"kv_transfer_params":1},"#.repeat(MAX_EDITS + 1)
    );
    assert_eq!(parse_stripping(Completions, &hidden).unwrap_err(), refusal);
}

#[test]
fn endpoints_and_reasons_have_names() {
    assert_eq!(BOTH.map(Endpoint::path), ["/v1/completions", "/v1/chat/completions"]);
    assert_eq!(BOTH.map(Endpoint::label), ["completions", "chat_completions"]);
    let labels = [N, BestOf, BeamSearch, SeveralPrompts, PromptLogprobs].map(BypassReason::label);
    assert_eq!(labels, ["n", "best_of", "beam_search", "several_prompts", "prompt_logprobs"]);
}
