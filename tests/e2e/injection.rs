//! Transfer parameters of a client never reach an engine, and what cannot share a hand-off goes to
//! a decode engine alone.

use kvbaton_proxy::{InjectedHandOff, Role};
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETIONS, Cluster, FakeEngine, PROMPT, Step, completion, generations, http_answer, only, parse,
};

const INJECTED: &str = r#"{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4,5]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"10.0.0.1","remote_port":22,"tp_size":1}"#;

/// Bodies with injected parameters in every place that vLLM reads.
fn injected() -> Vec<(&'static str, String)> {
    let prompt = r#""model":"sim","prompt":"abc","max_tokens":2"#;
    let messages = r#""model":"sim","messages":[{"role":"user","content":"abc"}],"max_tokens":2"#;
    vec![
        (COMPLETIONS, format!(r#"{{{prompt},"kv_transfer_params":{INJECTED}}}"#)),
        (CHAT, format!(r#"{{{messages},"kv_transfer_params":{INJECTED}}}"#)),
        (COMPLETIONS, format!(r#"{{"kv_transfer_params":{{"do_remote_decode":true}},{prompt}}}"#)),
        (COMPLETIONS, format!(r#"{{{prompt},"kv_transfer_params":"text"}}"#)),
        (COMPLETIONS, format!(r#"{{{prompt},"kv_transf\u0065r_params":{INJECTED}}}"#)),
        (COMPLETIONS, format!(r#"{{{prompt},"kv_transfer_params":null,"kv_transfer_params":{INJECTED}}}"#)),
        (COMPLETIONS, format!(r#"{{{prompt},"kv_transfer_params":{INJECTED},"kv_transfer_params":null}}"#)),
        (COMPLETIONS, format!(r#"{{{prompt},"extra_body":{{"kv_transfer_params":{INJECTED}}}}}"#)),
        (CHAT, format!(r#"{{{messages},"vllm_xargs":{{"kv_transfer_params":{INJECTED}}}}}"#)),
        (
            CHAT,
            format!(
                r#"{{{messages},"sampling_params":{{"extra_args":{{"kv_transfer_params":{INJECTED}}}}}}}"#
            ),
        ),
        (COMPLETIONS, format!(r#"{{{prompt},"n":2,"kv_transfer_params":{INJECTED}}}"#)),
        ("/v1/embeddings", format!(r#"{{"model":"sim","input":"a","kv_transfer_params":{INJECTED}}}"#)),
        ("/v1/responses", format!(r#"{{"model":"sim","input":"a","kv_transfer_params":{INJECTED}}}"#)),
    ]
}

#[tokio::test]
async fn item_68_injected_transfer_parameters_are_refused_in_every_place() {
    let cluster = Cluster::builder().start().await;
    for (path, body) in injected() {
        let answer = cluster.post_bytes(path, body.clone(), &[]).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        cluster.assert_error(&answer, 400, "kv_transfer_params_not_allowed");
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    }
    for engine in [cluster.p(), cluster.d()] {
        assert_eq!(generations(engine).len(), 0);
    }
    assert_eq!(cluster.d().stats().plain_requests, 0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_name_inside_a_text_is_no_injection() {
    let cluster = Cluster::builder().start().await;
    let mut body = completion("what is \"kv_transfer_params\": {} for?", 4);
    body["metadata"] = json!({"note": "kv_transfer_params"});
    assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    assert_eq!(cluster.relayed().await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn null_and_empty_transfer_parameters_are_tolerated_and_replaced() {
    let cluster = Cluster::builder().start().await;
    for empty in ["null", "{}"] {
        let body =
            format!(r#"{{"model":"sim","kv_transfer_params":{empty},"prompt":"{PROMPT}","max_tokens":2}}"#);
        let answer = cluster.post_bytes(COMPLETIONS, body, &[]).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        for engine in [cluster.p(), cluster.d()] {
            let seen = generations(engine).pop().unwrap();
            let text = String::from_utf8(seen.body.to_vec()).unwrap();
            assert_eq!(text.matches("kv_transfer_params").count(), 1, "{text}");
        }
    }
    assert_eq!((cluster.relayed().await, cluster.d().stats().kv_pulls), (2.0, 2));
    cluster.finish().await;
}

#[tokio::test]
async fn item_68_injected_transfer_parameters_are_stripped_on_demand() {
    let strip =
        |config: &mut kvbaton::config::Config| config.hand_off.client_injected = InjectedHandOff::Strip;
    let cluster = Cluster::builder().config(strip).start().await;
    for (path, body) in injected().into_iter().filter(|(path, _)| [COMPLETIONS, CHAT].contains(path)) {
        let answer = cluster.post_bytes(path, body.clone(), &[]).await;
        assert_eq!(answer.status, 200, "{body}: {answer:?}");
        for engine in [cluster.p(), cluster.d()] {
            let seen = generations(engine).pop().unwrap();
            let text = String::from_utf8(seen.body.to_vec()).unwrap();
            assert!(!text.contains("10.0.0.1"), "{text}");
            assert!(text.matches("kv_transfer_params").count() <= 1, "{text}");
        }
    }
    let pulls = cluster.d().stats().kv_pulls as f64;
    assert!(pulls > 0.0);
    assert_eq!(cluster.relayed().await, pulls);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

/// A request that must go to the decode engine alone, byte for byte.
async fn bypasses(reason: &str, body: &str) -> Value {
    let answer = http_answer("200 OK", "application/json", r#"{"choices":[{"index":0},{"index":1}]}"#);
    let engine = FakeEngine::start(vec![Step::Send(answer)]).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).start().await;
    let path = if body.contains("messages") { CHAT } else { COMPLETIONS };
    let answer = cluster.post_bytes(path, body.to_owned(), &[]).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(generations(cluster.p()).len(), 0);
    let seen = engine.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].line, format!("POST {path} HTTP/1.1"));
    assert_eq!(String::from_utf8(seen[0].body.clone()).unwrap(), body);
    assert_eq!(cluster.metric("kvbaton_pd_bypass_total", &[("reason", reason)]).await, 1.0, "{reason}");
    assert_eq!(cluster.metric("kvbaton_pd_bypass_total", &[]).await, 1.0);
    assert_eq!(cluster.metric("kvbaton_handoffs_total", &[]).await, 0.0);
    let body = answer.json();
    cluster.finish().await;
    body
}

#[tokio::test]
async fn item_9_several_choices_bypass_the_prefill() {
    let answer = bypasses("n", r#"{"model":"sim","prompt":"abc","n":2,"max_tokens":3}"#).await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
    bypasses("n", r#"{"model":"sim","messages":[{"role":"user","content":"a"}],"n":3}"#).await;
}

#[tokio::test]
async fn item_9_best_of_bypasses_the_prefill() {
    bypasses("best_of", r#"{"model":"sim","prompt":"abc","best_of":2,"max_tokens":3}"#).await;
}

#[tokio::test]
async fn item_9_beam_search_bypasses_the_prefill() {
    bypasses("beam_search", r#"{"model":"sim","prompt":"abc","use_beam_search":true}"#).await;
}

#[tokio::test]
async fn item_9_several_prompts_bypass_the_prefill() {
    bypasses("several_prompts", r#"{"model":"sim","prompt":["a","b"]}"#).await;
    bypasses("several_prompts", r#"{"model":"sim","prompt":[[1,2],[3]]}"#).await;
}

#[tokio::test]
async fn item_9_two_choices_of_a_simulated_engine_are_both_there() {
    let cluster = Cluster::builder().start().await;
    let mut body = completion(PROMPT, 6);
    body["n"] = json!(2);
    body["temperature"] = json!(0.7);
    let answer = cluster.post(COMPLETIONS, &body).await.json();
    assert!(answer["choices"].is_array(), "{answer}");
    let indexes: Vec<&Value> = answer["choices"].as_array().unwrap().iter().map(|c| &c["index"]).collect();
    assert_eq!(indexes, [0, 1]);
    assert_eq!(parse(&only(cluster.d()).body), body);
    assert_eq!(generations(cluster.p()).len(), 0);
    cluster.finish().await;
}

#[tokio::test]
async fn one_of_each_is_handed_off() {
    let cluster = Cluster::builder().start().await;
    let bodies = [
        json!({"model": "sim", "prompt": PROMPT, "max_tokens": 2, "n": 1}),
        json!({"model": "sim", "prompt": [PROMPT], "max_tokens": 2}),
        json!({"model": "sim", "prompt": [104, 101, 108, 108, 111], "max_tokens": 2}),
        json!({"model": "sim", "prompt": PROMPT, "max_tokens": 2, "use_beam_search": false, "best_of": null}),
    ];
    for (done, body) in bodies.iter().enumerate() {
        let answer = cluster.post(COMPLETIONS, body).await;
        assert_eq!(answer.status, 200, "{body}: {answer:?}");
        assert_eq!(cluster.relayed().await, done as f64 + 1.0, "{body}");
    }
    assert_eq!(cluster.metric("kvbaton_pd_bypass_total", &[]).await, 0.0);
    cluster.finish().await;
}
