//! Prefill on one engine, decode on another: the text must be the single engine's.

use engine_sim::{ArmedFault, Corrupt, Fault, Generation, Leg, LoadFailurePolicy};
use reqwest::Client;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use crate::support::{
    Pair, Registry, chat, completion, config, events, eventually, long_prompt, post, send, set, start,
    stats_when, streamed_text, text_of, with_params,
};

const ENDPOINTS: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];

fn body_for(path: &str, text: &str, max_tokens: u32) -> Value {
    if path.contains("chat") { chat(text, max_tokens) } else { completion(text, max_tokens) }
}

async fn single_text(generation: Generation, path: &str, body: &Value) -> String {
    let engine = start(config(generation)).await;
    let (status, answer) = post(&Client::new(), &engine, path, body).await;
    assert_eq!(status, 200, "{answer}");
    text_of(&answer)
}

async fn equals_single_engine(generation: Generation) {
    let pair = Pair::start(generation).await;
    for path in ENDPOINTS {
        for (name, length) in [("a", 1), ("b", 15), ("c", 16), ("d", 17), ("e", 333)] {
            let body = body_for(path, &long_prompt(name)[..length], 40);
            let expected = single_text(generation, path, &body).await;
            assert_eq!(text_of(&pair.relay(path, &body).await), expected, "{path} {length}");
            // Again, with the prompt in both prefix caches.
            assert_eq!(text_of(&pair.relay(path, &body).await), expected, "{path} {length} cached");
            let params = pair.prefill(path, &body).await;
            let streaming = set(&with_params(&body, &params), json!({"stream": true}));
            let streamed = send(&pair.client, &pair.d, path, &streaming).await.text().await.unwrap();
            assert_eq!(streamed_text(&events(&streamed)), expected, "{path} {length} streamed");
        }
    }
    pair.settled(&pair.d).await;
    if generation == Generation::V14 {
        pair.settled(&pair.p).await;
        let metrics = pair.client.get(format!("{}/metrics", pair.d.url())).send().await.unwrap();
        let page = metrics.text().await.unwrap();
        assert!(page.contains("vllm:nixl_xfer_time_seconds_count{engine=\"0\",model_name=\"sim\"} 30.0\n"));
    }
    assert_eq!(pair.d.stats().kv_pulls, 30);
    assert_eq!(pair.p.stats().prefill_requests, 30);
    assert_eq!(pair.d.stats().decode_requests, 30);
}

#[tokio::test]
async fn v14_text_equals_a_single_engines() {
    equals_single_engine(Generation::V14).await;
}

#[tokio::test]
async fn v2_text_equals_a_single_engines() {
    equals_single_engine(Generation::V2).await;
}

#[tokio::test]
async fn partial_hit_on_the_decode_side_pulls_the_rest() {
    let pair = Pair::start(Generation::V14).await;
    let warm = completion(&long_prompt("x")[..64], 1);
    post(&pair.client, &pair.d, "/v1/completions", &warm).await;
    let body = completion(&long_prompt("x"), 30);
    let expected = single_text(Generation::V14, "/v1/completions", &body).await;
    assert_eq!(text_of(&pair.relay("/v1/completions", &body).await), expected);
    let page =
        pair.client.get(format!("{}/metrics", pair.d.url())).send().await.unwrap().text().await.unwrap();
    let prompt = long_prompt("x").len();
    let external = format!("source=\"external_kv_transfer\"}} {}.0\n", prompt - 64);
    assert!(page.contains(&external), "{page}");
    assert!(page.contains("source=\"local_cache_hit\"} 64.0\n"), "{page}");
}

#[tokio::test]
async fn falsified_kv_changes_the_text() {
    for (bytes, leg) in [(Corrupt::Written, Leg::Prefill), (Corrupt::Pulled, Leg::Decode)] {
        let pair = Pair::start(Generation::V14).await;
        let body = completion(&long_prompt("lie"), 24);
        let expected = single_text(Generation::V14, "/v1/completions", &body).await;
        let liar = if leg == Leg::Prefill { &pair.p } else { &pair.d };
        liar.faults().arm(ArmedFault { fault: Fault::CorruptKv { bytes }, leg, sticky: false });
        assert_ne!(text_of(&pair.relay("/v1/completions", &body).await), expected, "{bytes:?}");
        // Lies about other engines' bytes stay in the reader's prefix cache, as they would for real.
        let cached = text_of(&pair.relay("/v1/completions", &body).await) == expected;
        assert_eq!(cached, bytes == Corrupt::Pulled, "{bytes:?}");
    }
}

#[tokio::test]
async fn another_prompts_handoff_gives_another_text() {
    let pair = Pair::start(Generation::V14).await;
    let (mine, theirs) = (completion(&long_prompt("mine"), 24), completion(&long_prompt("them"), 24));
    let expected = single_text(Generation::V14, "/v1/completions", &mine).await;
    let params = pair.prefill("/v1/completions", &theirs).await;
    let (status, answer) = post(&pair.client, &pair.d, "/v1/completions", &with_params(&mine, &params)).await;
    assert_eq!(status, 200);
    assert_ne!(text_of(&answer), expected);
}

#[tokio::test]
async fn first_reader_frees_the_blocks() {
    let pair = Pair::start(Generation::V14).await;
    let body = completion(&long_prompt("once"), 4);
    let params = pair.prefill("/v1/completions", &body).await;
    let held = pair.p.stats();
    assert_eq!((held.leases, held.blocks_held), (1, held.blocks_held_for_remote));
    assert_eq!(held.blocks_held, long_prompt("once").len().div_ceil(16));
    post(&pair.client, &pair.d, "/v1/completions", &with_params(&body, &params)).await;
    pair.settled(&pair.p).await;
    // A second reader is served whatever the blocks hold now, and its notification comes too late.
    let other = set(&body, json!({"prompt": long_prompt("twice")}));
    pair.prefill("/v1/completions", &other).await;
    let reader = start(engine_sim::EngineConfig {
        registry: Some(pair.registry.url.clone()),
        ..config(Generation::V14)
    })
    .await;
    let (status, _) = post(&pair.client, &reader, "/v1/completions", &with_params(&body, &params)).await;
    assert_eq!(status, 200);
    stats_when(&pair.p, "the late notification is counted", |stats| stats.late_notifications == 1).await;
}

#[tokio::test]
async fn cached_tokens_are_the_prefill_engines() {
    let pair = Pair::start(Generation::V14).await;
    let body = completion(&"0123456789abcdef".repeat(4), 4);
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!(cached(&pair.relay("/v1/completions", &body).await), 0);
    let again = pair.prefill("/v1/completions", &body).await;
    assert_eq!(again["remote_prefill_cached_tokens"], 48);
    let (_, answer) = post(&pair.client, &pair.d, "/v1/completions", &with_params(&body, &again)).await;
    assert_eq!(cached(&answer), 48);
}

#[tokio::test]
async fn batches_and_choices_hand_over_only_one() {
    let pair = Pair::with(Generation::V14, |p| p.lease = std::time::Duration::from_secs(2), |_| {}).await;
    let lists = json!({"prompt": [long_prompt("one"), long_prompt("two")]});
    for (extra, picks) in [(lists, "0-"), (json!({"n": 2, "temperature": 1.0}), "1_")] {
        let body = set(&completion(&long_prompt("n"), 1), extra);
        let asked = crate::support::prefill_body(&body);
        let (status, answer) = post(&pair.client, &pair.p, "/v1/completions", &asked).await;
        assert_eq!(status, 200);
        let params = &answer["kv_transfer_params"];
        let id = params["remote_request_id"].as_str().unwrap();
        assert!(id.contains(picks), "{id}");
        assert_eq!(pair.p.stats().leases, 2);
        let mine = completion(&long_prompt("one"), 2);
        post(&pair.client, &pair.d, "/v1/completions", &with_params(&mine, params)).await;
        stats_when(&pair.p, "one is read, the other is stranded", |stats| stats.leases == 1).await;
        stats_when(&pair.p, "the lease frees the other", |stats| stats.leases == 0).await;
    }
    assert_eq!(pair.p.stats().kv_expired, 2);
}

#[tokio::test]
async fn end_of_sequence_on_the_prefill_leg_depends_on_the_generation() {
    for (generation, hands_off) in [(Generation::V14, true), (Generation::V2, false)] {
        let pair = Pair::with(generation, |p| p.eos_every = Some(1), |d| d.eos_every = Some(1)).await;
        let body = completion(&long_prompt("eos"), 8);
        assert_eq!(pair.prefill("/v1/completions", &body).await.is_object(), hands_off, "{generation:?}");
        let ignoring = set(&body, json!({"ignore_eos": true}));
        assert!(pair.prefill("/v1/completions", &ignoring).await.is_object());
    }
}

#[tokio::test]
async fn registry_may_come_up_after_the_engines() {
    let tracker = TaskTracker::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let url: url::Url = format!("http://{address}").parse().unwrap();
    let engine = start(engine_sim::EngineConfig { registry: Some(url), ..config(Generation::V14) }).await;
    let (_, answer) = post(&Client::new(), &engine, "/v1/completions", &completion("hi", 2)).await;
    assert_eq!(text_of(&answer).len(), 2);
    let registry = Registry::on(TcpListener::bind(address).await.unwrap(), &tracker);
    registry.knows(engine.engine_id()).await;
}

#[tokio::test]
async fn forgetful_registry_is_told_again() {
    let tracker = TaskTracker::new();
    let registry = Registry::start(&tracker).await;
    let engine = start(engine_sim::EngineConfig {
        registry: Some(registry.url.clone()),
        registry_refresh: std::time::Duration::from_millis(20),
        ..config(Generation::V14)
    })
    .await;
    registry.knows(engine.engine_id()).await;
    registry.payloads.lock().clear();
    registry.knows(engine.engine_id()).await;
}

#[tokio::test]
async fn incompatible_engines_refuse_each_other() {
    let pair = Pair::with(Generation::V14, |p| p.vllm_version = Some("0.31.0".to_owned()), |_| {}).await;
    let body = completion(&long_prompt("hash"), 4);
    let params = pair.prefill("/v1/completions", &body).await;
    let (status, answer) = post(&pair.client, &pair.d, "/v1/completions", &with_params(&body, &params)).await;
    assert_eq!(status, 500);
    assert_eq!(answer.to_string(), crate::support::capture("err_D_wrong_engine_id.resp.json"));
    let lenient = Pair::with(
        Generation::V14,
        |p| p.vllm_version = Some("0.31.0".to_owned()),
        |d| d.enforce_compat = false,
    )
    .await;
    let expected = single_text(Generation::V14, "/v1/completions", &body).await;
    assert_eq!(text_of(&lenient.relay("/v1/completions", &body).await), expected);
}

#[tokio::test]
async fn failed_load_is_recomputed_when_asked_to() {
    let pair =
        Pair::with(Generation::V14, |_| {}, |d| d.load_failure_policy = LoadFailurePolicy::Recompute).await;
    let body = completion(&long_prompt("again"), 20);
    let expected = single_text(Generation::V14, "/v1/completions", &body).await;
    let params = set(&pair.prefill("/v1/completions", &body).await, json!({"remote_engine_id": "nobody"}));
    let (status, answer) = post(&pair.client, &pair.d, "/v1/completions", &with_params(&body, &params)).await;
    assert_eq!((status, text_of(&answer)), (200, expected));
    assert_eq!(pair.d.stats().kv_pulls, 0);
}

#[tokio::test]
async fn failed_load_is_an_error_also_in_a_stream() {
    let pair = Pair::start(Generation::V14).await;
    for path in ENDPOINTS {
        let body = body_for(path, &long_prompt("fail"), 4);
        let params = set(&pair.prefill(path, &body).await, json!({"remote_engine_id": "nobody"}));
        let streaming = set(&with_params(&body, &params), json!({"stream": true}));
        let response = send(&pair.client, &pair.d, path, &streaming).await;
        assert_eq!(response.status(), 200);
        let got = response.text().await.unwrap();
        let name = if path.contains("chat") { "_chat" } else { "" };
        let expected = crate::support::capture(&format!("err_D_wrong_engine_id{name}_stream.resp.sse"));
        let last = |text: &str| text.split("\n\n").filter(|line| line.contains("error")).collect::<String>();
        assert_eq!(last(&got), last(&expected));
        assert_eq!(got.matches("data: ").count(), expected.matches("data: ").count());
    }
    assert_eq!(pair.d.stats().blocks_held, 0);
}

#[tokio::test]
async fn prompt_shorter_than_the_handoff_takes_its_tail() {
    let pair = Pair::start(Generation::V14).await;
    let params = pair.prefill("/v1/completions", &completion(&long_prompt("long"), 4)).await;
    let short = completion(&long_prompt("long")[..50], 4);
    let (status, _) = post(&pair.client, &pair.d, "/v1/completions", &with_params(&short, &params)).await;
    assert_eq!(status, 200);
    pair.settled(&pair.p).await;
}

#[tokio::test]
async fn killed_prefill_engine_fails_the_pull() {
    let pair = Pair::start(Generation::V14).await;
    pair.introduce().await;
    let body = completion(&long_prompt("gone"), 4);
    let params = pair.prefill("/v1/completions", &body).await;
    let Pair { p, d, client, .. } = pair;
    let url = p.url();
    p.kill().await;
    assert!(client.get(format!("{url}/health")).send().await.is_err());
    let (status, answer) = post(&client, &d, "/v1/completions", &with_params(&body, &params)).await;
    assert_eq!(status, 500, "{answer}");
    eventually("nothing is left behind", || d.stats().blocks_held == 0).await;
}
