//! Error answers equal vLLM's, byte for byte where there is a capture.

use engine_sim::Generation;
use reqwest::Client;
use serde_json::{Value, json};

use crate::support::{capture, chat, completion, config, post, set, start};

async fn refusal(path: &str, body: &Value) -> (u16, String) {
    let mut settings = config(Generation::V14);
    settings.model = "tiny".to_owned();
    let engine = start(settings).await;
    let (status, answer) = post(&Client::new(), &engine, path, &set(body, json!({}))).await;
    (status, answer.to_string())
}

#[tokio::test]
async fn refusals_equal_the_captures() {
    let completion = set(&completion("hi", 1), json!({"model": "tiny"}));
    let chat = set(&chat("hi", 1), json!({"model": "tiny"}));
    let usage = json!({"stream_options": {"include_usage": true}});
    let cases = [
        ("err_P_bad_model", 404, &completion, json!({"model": "nope"})),
        ("err_P_min_tokens", 400, &completion, json!({"min_tokens": 5})),
        ("err_P_min_tokens_chat", 400, &chat, json!({"min_tokens": 5})),
        ("err_P_stream_options", 400, &completion, usage.clone()),
        ("err_P_stream_options_chat", 400, &chat, usage),
        ("err_P_too_long", 400, &completion, json!({"prompt": "x".repeat(3000)})),
        ("errors2/err_D_too_long", 400, &completion, json!({"prompt": "x".repeat(2049)})),
        ("errors2/err_D_kv_params_string", 400, &completion, json!({"kv_transfer_params": "x"})),
    ];
    for (name, status, body, extra) in cases {
        let path = if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" };
        let got = refusal(path, &set(body, extra)).await;
        assert_eq!(got, (status, capture(&format!("{name}.resp.json"))), "{name}");
    }
}

#[tokio::test]
async fn other_refusals_have_vllms_shape() {
    let base = set(&completion("hi", 4), json!({"model": "tiny"}));
    let message = async |extra: Value| {
        let (status, text) = refusal("/v1/completions", &set(&base, extra)).await;
        let body: Value = serde_json::from_str(&text).unwrap();
        let keys: Vec<&String> = body["error"].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        assert_eq!(body["error"]["code"], status);
        assert_eq!(status, 400);
        body["error"]["message"].as_str().unwrap().to_owned()
    };
    assert_eq!(message(json!({"n": 2})).await, "n must be 1 when using greedy sampling, got 2.");
    assert_eq!(
        message(json!({"max_tokens": 0})).await,
        "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    );
    assert_eq!(
        message(json!({"max_tokens": 5000})).await,
        "max_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer output tokens. \
         (parameter=max_tokens, value=5000)"
    );
    assert_eq!(
        message(json!({"prompt": null})).await,
        "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
    );
    assert_eq!(message(json!({"stop": [""]})).await, "stop cannot contain an empty string.");
    assert_eq!(
        message(json!({"n": null})).await,
        "1 validation error:\n  {'type': 'int_type', 'loc': 'body.n', 'msg': 'Input should be a valid integer', \
         'input': 'None'}"
    );
    assert_eq!(
        message(json!({"max_tokens": "many"})).await,
        "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens', 'msg': 'Input should be a valid \
         integer, unable to parse string as an integer', 'input': 'many'}"
    );
}

#[tokio::test]
async fn missing_messages_and_broken_json() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let (status, answer) = post(&client, &engine, "/v1/chat/completions", &json!({"model": "sim"})).await;
    assert_eq!(status, 400);
    assert_eq!(
        answer["error"]["message"],
        "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': '<dict \
         of 1 items>'}"
    );
    assert_eq!(answer["error"]["type"], "Bad Request");
    let url = format!("{}/v1/completions", engine.url());
    let broken = client.post(&url).header("content-type", "application/json").body("{\"model\": }");
    let response = broken.send().await.unwrap();
    assert_eq!(response.status(), 400);
    let body: Value = response.json().await.unwrap();
    assert_eq!(
        body["error"]["message"],
        "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.10', 'msg': 'JSON decode error', 'input': \
         '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}"
    );
    let untyped = client.post(&url).body("{}").send().await.unwrap();
    assert_eq!(untyped.status(), 400);
    let body: Value = untyped.json().await.unwrap();
    assert!(body["error"]["message"].as_str().unwrap().contains("Unsupported Media Type"), "{body}");
}
