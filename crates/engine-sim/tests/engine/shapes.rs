//! Answers have the captures' fields in the captures' order.

use engine_sim::{EngineConfig, Generation};
use serde_json::{Value, json};

use crate::support::{
    Pair, capture, chat, completion, config, events, long_prompt, post, prefill_body, send, set, start,
    with_params,
};

/// Types and keys in order; lists are described by their first element.
fn shape(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "bool".to_owned(),
        Value::Number(_) => "number".to_owned(),
        Value::String(_) => "string".to_owned(),
        Value::Array(items) => format!("[{}]", items.first().map(shape).unwrap_or_default()),
        Value::Object(map) => {
            let fields: Vec<String> =
                map.iter().map(|(key, value)| format!("{key}:{}", shape(value))).collect();
            format!("{{{}}}", fields.join(","))
        }
    }
}

fn captured(name: &str) -> Value {
    serde_json::from_str(&capture(&format!("{name}.resp.json"))).unwrap()
}

async fn pair() -> Pair {
    Pair::start(Generation::V14).await
}

#[tokio::test]
async fn whole_answers_of_both_legs() {
    let pair = pair().await;
    for (name, path, body) in [
        ("completions", "/v1/completions", completion(&long_prompt("s"), 24)),
        ("chat_completions", "/v1/chat/completions", chat(&long_prompt("s"), 24)),
    ] {
        let (_, prefill) = post(&pair.client, &pair.p, path, &prefill_body(&body)).await;
        assert_eq!(shape(&prefill), shape(&captured(&format!("{name}.P"))));
        let params = &prefill["kv_transfer_params"];
        let (_, decode) = post(&pair.client, &pair.d, path, &with_params(&body, params)).await;
        assert_eq!(shape(&decode), shape(&captured(&format!("{name}.D"))));
    }
}

#[tokio::test]
async fn handoff_values() {
    let pair = pair().await;
    let prompt = long_prompt("v");
    let params = pair.prefill("/v1/completions", &completion(&prompt, 1)).await;
    let theirs = &captured("completions.P")["kv_transfer_params"];
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&params), keys(theirs));
    assert_eq!(params["remote_engine_id"], pair.p.engine_id());
    assert_eq!(params["remote_host"], "127.0.0.1");
    assert_eq!(params["remote_port"], pair.p.addr().port());
    assert_eq!(params["remote_num_tokens"], prompt.len());
    assert_eq!(params["remote_block_ids"][0].as_array().unwrap().len(), prompt.len().div_ceil(16));
    assert_eq!(params["transfer_mode"], "pull");
    let both = json!({"max_tokens": 1, "max_completion_tokens": 20});
    let asked = set(&prefill_body(&chat("hi", 1)), both);
    let (_, answer) = post(&pair.client, &pair.p, "/v1/chat/completions", &asked).await;
    assert_eq!(shape(&answer), shape(&captured("P_max_tokens1_and_max_completion_tokens20")));
}

#[tokio::test]
async fn v2_handoff_has_eight_fields() {
    let pair = Pair::start(Generation::V2).await;
    let params = pair.prefill("/v1/completions", &completion(&long_prompt("v2"), 1)).await;
    let keys: Vec<&String> = params.as_object().unwrap().keys().collect();
    assert_eq!(
        keys,
        [
            "do_remote_prefill",
            "do_remote_decode",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
            "remote_host",
            "remote_port",
            "tp_size"
        ]
    );
    assert!(params["remote_block_ids"][0].is_number());
}

#[tokio::test]
async fn batches_and_choices() {
    let pair = pair().await;
    let lists = json!({"prompt": ["one prompt", "another prompt"]});
    let n = json!({"n": 2, "temperature": 1.0});
    for (name, extra) in [("P_batch_prompts", lists), ("P_n2", n)] {
        let body = set(&prefill_body(&completion("a prompt", 1)), extra);
        let (_, answer) = post(&pair.client, &pair.p, "/v1/completions", &body).await;
        assert_eq!(shape(&answer), shape(&captured(name)));
        assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
    }
}

/// Shapes of the first two events, of the last with a choice, and of the rest.
fn event_shapes(all: &[Value]) -> Vec<String> {
    let finish = all.iter().position(|event| !event["choices"][0]["finish_reason"].is_null()).unwrap();
    let mut shapes: Vec<String> = all.iter().take(2).map(shape).collect();
    shapes.extend(all[finish..].iter().map(shape));
    shapes
}

#[tokio::test]
async fn streams_of_both_endpoints() {
    let pair = pair().await;
    let usage = json!({"stream": true, "stream_options": {"include_usage": true}});
    for (name, path, body) in [
        ("completions_stream.D", "/v1/completions", completion(&long_prompt("st"), 24)),
        ("chat_completions_stream.D", "/v1/chat/completions", chat(&long_prompt("st"), 24)),
    ] {
        let params = pair.prefill(path, &body).await;
        let asked = set(&with_params(&body, &params), usage.clone());
        let response = send(&pair.client, &pair.d, path, &asked).await;
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        let (ours, theirs) =
            (events(&response.text().await.unwrap()), events(&capture(&format!("{name}.resp.sse"))));
        assert_eq!(event_shapes(&ours), event_shapes(&theirs));
        assert_eq!(ours.len(), theirs.len());
    }
    for (name, path, body) in [
        ("P_stream_true", "/v1/completions", set(&completion("hi", 1), usage.clone())),
        ("P_stream_true_chat", "/v1/chat/completions", set(&chat("hi", 1), json!({"stream": true}))),
    ] {
        let text = send(&pair.client, &pair.p, path, &body).await.text().await.unwrap();
        let theirs = events(&capture(&format!("{name}.resp.sse")));
        let shapes = |all: &[Value]| all.iter().map(shape).collect::<Vec<_>>();
        assert_eq!(shapes(&events(&text)), shapes(&theirs), "{name}");
    }
}

#[tokio::test]
async fn events_are_separated_and_spelled_as_in_the_capture() {
    let engine = start(EngineConfig { model: "tiny".to_owned(), ..config(Generation::V14) }).await;
    let client = reqwest::Client::new();
    let body = json!({"prompt": "hi", "max_tokens": 1, "stream": true});
    let text = send(&client, &engine, "/v1/completions", &body).await.text().await.unwrap();
    let event = &events(&text)[0];
    let expected = format!(
        "data: {{\"id\":{},\"object\":\"text_completion\",\"created\":{},\"model\":\"tiny\",\"choices\":[{{\"index\":0,\
         \"text\":{},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"prompt_token_ids\":null,\
         \"token_ids\":null}}],\"system_fingerprint\":{}}}\n\ndata: [DONE]\n\n",
        event["id"], event["created"], event["choices"][0]["text"], event["system_fingerprint"]
    );
    assert_eq!(text, expected);
}

#[tokio::test]
async fn log_probabilities_in_both_shapes() {
    let client = reqwest::Client::new();
    let engine = start(config(Generation::V14)).await;
    let body = set(&completion("hi", 3), json!({"logprobs": 2}));
    let (_, answer) = post(&client, &engine, "/v1/completions", &body).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(
        shape(logprobs).split("top_logprobs").next().unwrap(),
        "{text_offset:[number],token_logprobs:[number],tokens:[string],"
    );
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2]));
    let body = set(&chat("hi", 3), json!({"logprobs": true, "top_logprobs": 2}));
    let (_, answer) = post(&client, &engine, "/v1/chat/completions", &body).await;
    let entry = "{token:string,logprob:number,bytes:[number]";
    assert_eq!(
        shape(&answer["choices"][0]["logprobs"]),
        format!("{{content:[{entry},top_logprobs:[{entry}}}]}}]}}")
    );
    let streaming = set(&body, json!({"stream": true}));
    let text = send(&client, &engine, "/v1/chat/completions", &streaming).await.text().await.unwrap();
    assert!(events(&text)[1]["choices"][0]["logprobs"]["content"][0]["token"].is_string());
}
