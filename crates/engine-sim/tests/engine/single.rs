//! One engine alone.

use std::time::Duration;

use engine_sim::{EngineConfig, Generation};
use reqwest::Client;
use serde_json::{Value, json};

use crate::support::{
    chat, completion, config, events, eventually, long_prompt, post, send, set, start, stats_when,
    streamed_text, text_of,
};

#[tokio::test]
async fn same_prompt_same_text_and_other_prompt_other_text() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let (_, one) = post(&client, &engine, "/v1/completions", &completion("alpha beta gamma", 24)).await;
    let (_, two) = post(&client, &engine, "/v1/completions", &completion("alpha beta gamma", 24)).await;
    let (_, other) = post(&client, &engine, "/v1/completions", &completion("alpha beta gammb", 24)).await;
    assert_eq!(text_of(&one), text_of(&two));
    assert_ne!(text_of(&one), text_of(&other));
    assert_eq!(text_of(&one).len(), 24);
    let fresh = start(config(Generation::V14)).await;
    let (_, again) = post(&client, &fresh, "/v1/completions", &completion("alpha beta gamma", 24)).await;
    assert_eq!(text_of(&one), text_of(&again));
}

#[tokio::test]
async fn prefix_hit_changes_the_count_and_not_the_text() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let body = completion(&"0123456789abcdef".repeat(4), 20);
    let (_, cold) = post(&client, &engine, "/v1/completions", &body).await;
    let (_, warm) = post(&client, &engine, "/v1/completions", &body).await;
    assert_eq!(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    // A hit never covers the last prompt token, so of four full blocks three count.
    assert_eq!(warm["usage"]["prompt_tokens_details"]["cached_tokens"], 48);
    assert_eq!(text_of(&cold), text_of(&warm));
}

#[tokio::test]
async fn small_batches_and_eviction_do_not_change_the_text() {
    let client = Client::new();
    let roomy = start(config(Generation::V14)).await;
    let tight = start(EngineConfig {
        num_blocks: 40,
        max_num_batched_tokens: 33,
        max_num_seqs: 4,
        ..config(Generation::V14)
    })
    .await;
    let bodies: Vec<Value> = (0..12).map(|n| completion(&long_prompt(&format!("t{n}"))[..200], 60)).collect();
    let ask = |engine| {
        let client = &client;
        futures_util::future::join_all(
            bodies.iter().map(move |body| post(client, engine, "/v1/completions", body)),
        )
    };
    let (expected, got) = (ask(&roomy).await, ask(&tight).await);
    for (one, other) in expected.iter().zip(&got) {
        assert_eq!(text_of(&one.1), text_of(&other.1));
    }
    stats_when(&tight, "all blocks are free", |stats| stats.blocks_held == 0).await;
}

#[tokio::test]
async fn stream_says_the_same() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    for (path, body) in
        [("/v1/completions", completion("tell me", 12)), ("/v1/chat/completions", chat("tell me", 12))]
    {
        let (_, whole) = post(&client, &engine, path, &body).await;
        let streamed =
            send(&client, &engine, path, &set(&body, json!({"stream": true}))).await.text().await.unwrap();
        assert_eq!(streamed_text(&events(&streamed)), text_of(&whole));
    }
}

#[tokio::test]
async fn stop_string_ends_before_itself() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let (_, free) = post(&client, &engine, "/v1/completions", &completion("say it", 30)).await;
    let text = text_of(&free);
    let stop = &text[10..13];
    let body = set(&completion("say it", 30), json!({"stop": [stop]}));
    let (_, stopped) = post(&client, &engine, "/v1/completions", &body).await;
    let expected = &text[..text.find(stop).unwrap()];
    assert_eq!(text_of(&stopped), expected);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["choices"][0]["stop_reason"], stop);
    let streamed = send(&client, &engine, "/v1/completions", &set(&body, json!({"stream": true}))).await;
    assert_eq!(streamed_text(&events(&streamed.text().await.unwrap())), expected);
    stats_when(&engine, "the stopped request is gone", |stats| stats.blocks_held == 0).await;
}

#[tokio::test]
async fn stop_token_ends_after_the_minimum() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let all: Vec<u32> = (32..127).collect();
    let body = set(&completion("go", 9), json!({"stop_token_ids": all, "min_tokens": 0}));
    let (_, stopped) = post(&client, &engine, "/v1/completions", &body).await;
    assert_eq!(stopped["usage"]["completion_tokens"], 1);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(stopped["choices"][0]["stop_reason"].is_number());
    assert_eq!(text_of(&stopped), "");
}

#[tokio::test]
async fn end_of_sequence_obeys_ignore_and_minimum() {
    let client = Client::new();
    let engine = start(EngineConfig { eos_every: Some(1), ..config(Generation::V14) }).await;
    let ask = async |extra: Value| {
        let (_, answer) = post(&client, &engine, "/v1/completions", &set(&completion("go", 5), extra)).await;
        let choice = &answer["choices"][0];
        (
            answer["usage"]["completion_tokens"].as_u64().unwrap(),
            choice["finish_reason"].as_str().unwrap().to_owned(),
        )
    };
    assert_eq!(ask(json!({})).await, (1, "stop".to_owned()));
    assert_eq!(ask(json!({"min_tokens": 3})).await, (4, "stop".to_owned()));
    assert_eq!(ask(json!({"ignore_eos": true})).await, (5, "length".to_owned()));
}

#[tokio::test]
async fn output_limits_follow_the_endpoint() {
    let client = Client::new();
    let engine = start(EngineConfig { max_model_len: 64, ..config(Generation::V14) }).await;
    let count = async |path: &str, body: Value| {
        let (status, answer) = post(&client, &engine, path, &body).await;
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["completion_tokens"].as_u64().unwrap()
    };
    let messages = json!([{"role": "user", "content": "hi"}]);
    assert_eq!(count("/v1/completions", json!({"prompt": "hi"})).await, 16);
    // The template adds four tokens around the two of the text.
    assert_eq!(count("/v1/chat/completions", json!({"messages": messages})).await, 64 - 6);
    let both = json!({"messages": messages, "max_tokens": 1, "max_completion_tokens": 20});
    assert_eq!(count("/v1/chat/completions", both).await, 20);
}

#[tokio::test]
async fn choices_of_one_prompt_share_its_full_blocks() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let prompt = "0123456789abcdef".repeat(4) + "tail";
    let body =
        set(&crate::support::prefill_body(&completion(&prompt, 1)), json!({"n": 2, "temperature": 1.0}));
    let (_, answer) = post(&client, &engine, "/v1/completions", &body).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 64);
    // Four shared blocks and one more for each choice.
    assert_eq!(engine.stats().blocks_held, 6);
}

#[tokio::test]
async fn several_choices_differ_and_are_repeatable() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let body = set(&completion("draw", 20), json!({"n": 3, "temperature": 0.7, "seed": 5}));
    let (_, one) = post(&client, &engine, "/v1/completions", &body).await;
    let (_, two) = post(&client, &engine, "/v1/completions", &body).await;
    let texts = |answer: &Value| -> Vec<String> {
        answer["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(texts(&one), texts(&two));
    assert_eq!(texts(&one).len(), 3);
    assert_ne!(texts(&one)[0], texts(&one)[1]);
    assert_eq!(one["usage"]["completion_tokens"], 60);
}

#[tokio::test]
async fn prompts_come_as_text_ids_or_lists() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let ask = async |prompt: Value| {
        let (_, answer) = post(
            &client,
            &engine,
            "/v1/completions",
            &json!({"prompt": prompt, "max_tokens": 8, "temperature": 0}),
        )
        .await;
        answer
    };
    let text = text_of(&ask(json!("hi")).await);
    assert_eq!(text_of(&ask(json!([104, 105])).await), text);
    assert_eq!(text_of(&ask(json!(["hi"])).await), text);
    let both = ask(json!([[104, 105], [104, 105, 106]])).await;
    assert_eq!(both["choices"][0]["text"], text);
    assert_eq!(both["choices"][1]["index"], 1);
    assert_eq!(both["usage"]["prompt_tokens"], 5);
}

#[tokio::test]
async fn echo_repeats_the_prompt() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let plain = text_of(&post(&client, &engine, "/v1/completions", &completion("abc", 4)).await.1);
    let body = set(&completion("abc", 4), json!({"echo": true, "logprobs": 2}));
    let (_, echoed) = post(&client, &engine, "/v1/completions", &body).await;
    assert_eq!(text_of(&echoed), format!("abc{plain}"));
    let logprobs = &echoed["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 7);
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4, 5, 6]));
    assert_eq!(logprobs["top_logprobs"][3].as_object().unwrap().len(), 2);
    let only = set(&completion("abc", 0), json!({"echo": true}));
    assert_eq!(text_of(&post(&client, &engine, "/v1/completions", &only).await.1), "abc");
}

#[tokio::test]
async fn client_that_leaves_frees_the_blocks() {
    let client = Client::new();
    let slow = EngineConfig { decode_time_per_token: Duration::from_millis(20), ..config(Generation::V14) };
    let engine = start(slow).await;
    let body = completion(&long_prompt("leaver"), 1000);
    for body in [body.clone(), set(&body, json!({"stream": true}))] {
        let pending = tokio::time::timeout(Duration::from_secs(5), async {
            let asked = async {
                let response = send(&client, &engine, "/v1/completions", &body).await;
                response.text().await
            };
            tokio::select! {
                _ = asked => panic!("1000 tokens take 20 s"),
                () = eventually("it runs", || engine.stats().running == 1) => {}
            }
        });
        pending.await.unwrap();
        stats_when(&engine, "the request is aborted", |stats| stats.running == 0 && stats.blocks_held == 0)
            .await;
    }
    assert_eq!(engine.stats().aborted, 2);
}

#[tokio::test]
async fn other_endpoints_answer_like_vllm() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let get = async |path: &str| {
        let response = client.get(format!("{}{path}", engine.url())).send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    assert_eq!(get("/health").await, (200, String::new()));
    assert_eq!(get("/version").await.1, r#"{"version":"0.32.0"}"#);
    assert_eq!(get("/nope").await, (404, r#"{"detail":"Not Found"}"#.to_owned()));
    assert_eq!(get("/v1/completions").await, (405, r#"{"detail":"Method Not Allowed"}"#.to_owned()));
    let models: Value = serde_json::from_str(&get("/v1/models").await.1).unwrap();
    assert_eq!(models["data"][0]["id"], "sim");
    assert_eq!(models["data"][0]["max_model_len"], 2048);
    let (_, tokens) = post(&client, &engine, "/tokenize", &json!({"prompt": "hi"})).await;
    assert_eq!(tokens, json!({"count": 2, "max_model_len": 2048, "tokens": [104, 105], "token_strs": null}));
    let (_, vector) = post(&client, &engine, "/v1/embeddings", &json!({"input": "hi"})).await;
    assert_eq!(vector["data"][0]["embedding"].as_array().unwrap().len(), 8);
    let v2 = start(config(Generation::V2)).await;
    let version = client.get(format!("{}/version", v2.url())).send().await.unwrap().text().await.unwrap();
    assert_eq!(version, r#"{"version":"0.13.0"}"#);
}

#[tokio::test]
async fn request_ids_and_log() {
    let (client, engine) = (Client::new(), start(config(Generation::V14)).await);
    let url = format!("{}/v1/completions", engine.url());
    let body = completion("hi", 1).to_string();
    let response = client
        .post(url)
        .header("x-request-id", "abc")
        .header("content-type", "application/json; charset=utf-8")
        .body(body.clone())
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["x-request-id"], "abc");
    assert_eq!(response.headers()["server"], "uvicorn");
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["id"], "cmpl-abc");
    let seen = engine.requests();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].path, "/v1/completions");
    assert_eq!(seen[0].headers["x-request-id"], "abc");
    assert_eq!(seen[0].body, body.as_bytes());
}

#[tokio::test(start_paused = true)]
async fn computing_takes_the_configured_time() {
    let timed = EngineConfig {
        prefill_time_per_token: Duration::from_millis(2),
        decode_time_per_token: Duration::from_millis(10),
        ..config(Generation::V14)
    };
    let engine = start(timed).await;
    let client = Client::new();
    let began = tokio::time::Instant::now();
    post(&client, &engine, "/v1/completions", &completion(&"x".repeat(100), 11)).await;
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(300), "{took:?}");
}
