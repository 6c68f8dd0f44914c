//! Whatever kills a real engine core kills this one, for good.

use std::time::Duration;

use engine_sim::{Generation, LoadFailurePolicy};
use serde_json::{Value, json};

use crate::support::{
    Pair, capture, completion, events, long_prompt, post, send, set, stats_when, with_params,
};

async fn assert_dead(pair: &Pair) {
    stats_when(&pair.d, "the engine core is dead", |stats| stats.dead).await;
    let health = pair.client.get(format!("{}/health", pair.d.url())).send().await.unwrap();
    assert_eq!(health.status(), 503);
    let (status, answer) = post(&pair.client, &pair.d, "/v1/completions", &completion("hi", 1)).await;
    assert_eq!(status, 500);
    assert_eq!(answer.to_string(), capture("errors2/D_prompt_longer_than_P.resp.json"));
}

async fn dies_of(params: impl FnOnce(Value) -> Value) {
    let pair = Pair::start(Generation::V14).await;
    let body = completion(&long_prompt("deadly"), 4);
    let params = params(pair.prefill("/v1/completions", &body).await);
    let (status, answer) = post(&pair.client, &pair.d, "/v1/completions", &with_params(&body, &params)).await;
    assert_eq!(status, 500);
    assert_eq!(answer.to_string(), capture("errors2/D_prompt_longer_than_P.resp.json"));
    assert_dead(&pair).await;
}

fn without(mut params: Value, key: &str) -> Value {
    params.as_object_mut().unwrap().remove(key);
    params
}

#[tokio::test]
async fn no_block_ids() {
    dies_of(|params| without(params, "remote_block_ids")).await;
}

#[tokio::test]
async fn null_block_ids() {
    dies_of(|params| set(&params, json!({"remote_block_ids": null}))).await;
}

#[tokio::test]
async fn empty_block_ids() {
    dies_of(|params| set(&params, json!({"remote_block_ids": []}))).await;
}

#[tokio::test]
async fn a_group_without_blocks() {
    dies_of(|params| set(&params, json!({"remote_block_ids": [[]]}))).await;
}

#[tokio::test]
async fn too_few_blocks() {
    dies_of(|params| set(&params, json!({"remote_block_ids": [[1, 2]]}))).await;
}

#[tokio::test]
async fn block_ids_of_the_other_generation() {
    dies_of(|params| set(&params, json!({"remote_block_ids": params["remote_block_ids"][0]}))).await;
}

#[tokio::test]
async fn values_of_the_wrong_type() {
    dies_of(|params| set(&params, json!({"remote_block_ids": "abc"}))).await;
}

#[tokio::test]
async fn missing_key_parks_for_ever_and_the_abort_kills() {
    for key in ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"] {
        let pair = Pair::start(Generation::V14).await;
        let body = completion(&long_prompt("parked"), 4);
        let params = without(pair.prefill("/v1/completions", &body).await, key);
        let deadly = with_params(&body, &params);
        let asked = post(&pair.client, &pair.d, "/v1/completions", &deadly);
        let hangs = tokio::time::timeout(Duration::from_millis(300), asked);
        assert!(hangs.await.is_err(), "{key}: it must not be answered");
        assert_dead(&pair).await;
    }
}

#[tokio::test]
async fn parked_request_leaves_others_alone_until_its_abort() {
    let pair = Pair::start(Generation::V14).await;
    let body = completion(&long_prompt("parked"), 4);
    let params = without(pair.prefill("/v1/completions", &body).await, "remote_request_id");
    let deadly = with_params(&body, &params);
    let parked = post(&pair.client, &pair.d, "/v1/completions", &deadly);
    let other = async {
        stats_when(&pair.d, "it is parked", |stats| stats.waiting_for_remote_kv == 1).await;
        post(&pair.client, &pair.d, "/v1/completions", &completion("hi", 2)).await
    };
    tokio::select! {
        _ = parked => panic!("it must not be answered"),
        (status, _) = other => assert_eq!(status, 200),
    }
    assert_dead(&pair).await;
}

#[tokio::test]
async fn one_handoff_for_two_prompts() {
    let pair = Pair::start(Generation::V14).await;
    let short = completion("short", 4);
    let params = pair.prefill("/v1/completions", &short).await;
    let both = set(&with_params(&short, &params), json!({"prompt": ["short", long_prompt("two")]}));
    let (status, _) = post(&pair.client, &pair.d, "/v1/completions", &both).await;
    assert_eq!(status, 500);
    assert_dead(&pair).await;
}

#[tokio::test]
async fn streams_in_progress_end_with_the_error() {
    let pair =
        Pair::with(Generation::V14, |_| {}, |d| d.decode_time_per_token = Duration::from_millis(20)).await;
    let params = pair.prefill("/v1/completions", &completion(&long_prompt("s"), 1)).await;
    let streaming = set(&completion("going on", 500), json!({"stream": true}));
    let response = send(&pair.client, &pair.d, "/v1/completions", &streaming).await;
    let deadly = set(
        &completion(&long_prompt("s"), 4),
        json!({
            "kv_transfer_params": set(&params, json!({"remote_block_ids": []})),
        }),
    );
    post(&pair.client, &pair.d, "/v1/completions", &deadly).await;
    let text = response.text().await.unwrap();
    let last = events(&text).pop().unwrap();
    assert_eq!(last["error"]["type"], "InternalServerError");
}

#[tokio::test]
async fn failed_handshake_kills_only_v2() {
    for (generation, dies) in [(Generation::V2, true), (Generation::V14, false)] {
        let pair =
            Pair::with(generation, |_| {}, |d| d.load_failure_policy = LoadFailurePolicy::Recompute).await;
        let body = completion(&long_prompt("hs"), 4);
        let params =
            set(&pair.prefill("/v1/completions", &body).await, json!({"remote_engine_id": "nobody"}));
        let (status, _) = post(&pair.client, &pair.d, "/v1/completions", &with_params(&body, &params)).await;
        assert_eq!(status, if dies { 500 } else { 200 });
        assert_eq!(pair.d.stats().dead, dies);
    }
}
