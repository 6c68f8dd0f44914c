//! What must stay inside: prompts and keys out of the log, engines' addresses out of answers.

use kvbaton::config::{Config, Key};
use kvbaton_proxy::{OnMissing, Role};
use kvbaton_routes::SecretDigest;
use serde_json::{Value, json};

use crate::support::{
    Answer, CHAT, COMPLETIONS, Cluster, FakeEngine, PROMPT, Step, completion, http_answer, listen, sse_head,
};

const CANARY: &str = "canary-8c41";
const SECRET: &str = "sk-canary-key";

fn bodies() -> Vec<(&'static str, String, u16)> {
    let chat = json!({"model": "sim", "max_tokens": 3, "messages": [{"role": "user", "content": CANARY}]});
    let with = |field: &str, value: Value| {
        let mut body = completion(CANARY, 3);
        body[field] = value;
        body.to_string()
    };
    vec![
        (COMPLETIONS, completion(CANARY, 3).to_string(), 200),
        (COMPLETIONS, with("stream", json!(true)), 200),
        (CHAT, chat.to_string(), 200),
        (COMPLETIONS, with("n", json!(2)), 400),
        (COMPLETIONS, with("user", json!(CANARY)), 200),
        (COMPLETIONS, with("max_tokens", json!(CANARY)), 400),
        (COMPLETIONS, with("kv_transfer_params", json!({"x": CANARY})), 400),
        (COMPLETIONS, with("model", json!(CANARY)), 404),
        (COMPLETIONS, with("model", json!([CANARY])), 400),
        (COMPLETIONS, format!(r#"{{"model":"sim","prompt":"{CANARY}""#), 400),
        (COMPLETIONS, format!(r#"{{"model":"sim",{CANARY}:1}}"#), 400),
        ("/tokenize", json!({"model": "sim", "prompt": CANARY}).to_string(), 200),
        ("/nothing", CANARY.to_owned(), 404),
        ("/admin/peers", format!(r#"{{"role":"{CANARY}"}}"#), 400),
    ]
}

fn assert_silent(log: &str) {
    let found = log.lines().find(|line| line.contains(CANARY) || line.contains(SECRET));
    assert_eq!(found, None, "the log tells what it must not");
    assert!(log.contains("span request"), "the log was not kept: {log}");
}

#[tokio::test]
async fn no_prompt_and_no_key_is_ever_logged() {
    let key = Key {
        name: "team".into(),
        sha256: vec![SecretDigest::of(SECRET).unwrap().to_hex()],
        certificates: Vec::new(),
        models: Vec::new(),
    };
    let set = move |config: &mut Config| config.keys = vec![key.clone()];
    let cluster = Cluster::builder().config(set).logs_all().start().await;
    let bearer = format!("Bearer {SECRET}");
    for (path, body, status) in bodies() {
        let answer = cluster.post_bytes(path, body.clone(), &[("authorization", &bearer)]).await;
        assert_eq!(answer.status, status, "{path} {body}: {answer:?}");
        let wrong = format!("Bearer {SECRET}x");
        let answer = cluster.post_bytes(path, body, &[("authorization", &wrong)]).await;
        assert!(answer.status >= 400, "{answer:?}");
    }
    cluster.wait_idle().await;
    assert_silent(&cluster.log());
    cluster.finish().await;
}

/// What a decode engine can do wrong, with the answer's status.
fn faults() -> Vec<(Vec<Step>, u16)> {
    let echo = format!(r#"{{"error":{{"message":"{CANARY}"}}}}"#);
    let mut cut = sse_head();
    cut.extend(b"5\r\ndata:");
    vec![
        (vec![Step::Reset], 502),
        (vec![Step::Send(format!("{CANARY}\r\n\r\n").into_bytes())], 502),
        (vec![Step::Send(http_answer("500 Internal Server Error", "application/json", &echo))], 500),
        (vec![Step::Send(http_answer("200 OK", "application/json", CANARY))], 200),
        (vec![Step::Send(http_answer("302 Found", "text/plain", CANARY))], 502),
        (vec![Step::Send(cut), Step::Reset], 200),
    ]
}

#[tokio::test]
async fn item_25_no_prompt_is_logged_and_no_address_told_when_engines_fail() {
    for role in [Role::Decode, Role::Prefill] {
        for (steps, status) in faults() {
            let engine = FakeEngine::start(steps).await;
            let builder = match role {
                Role::Decode => Cluster::builder().decode(0),
                Role::Prefill => Cluster::builder().prefill(0),
            };
            let set = |config: &mut Config| {
                config.hand_off.on_missing = OnMissing::Fail;
                config.retry.attempts = 0;
            };
            // Whatever it warns of, it must not be the prompt; some faults are only the client's to see.
            let cluster = builder.config(set).peer(role, &engine.url()).logs_all().start().await;
            let answer = cluster.post(COMPLETIONS, &completion(CANARY, 3)).await;
            let expected = if role == Role::Prefill { 502 } else { status };
            assert_eq!(answer.status, expected, "{role:?} {answer:?}");
            cluster.assert_hides_engines(&answer);
            assert!(!answer.everything().contains(&engine.addr.port().to_string()), "{answer:?}");
            assert_silent(&cluster.log());
            cluster.finish_whatever_was_warned().await;
        }
    }
}

#[tokio::test]
async fn item_25_an_engine_that_cannot_be_reached_is_not_named() {
    let cluster = Cluster::builder().unready().prefill(0).decode(0);
    let dead = listen().await;
    let url = format!("http://{}", dead.local_addr().unwrap());
    drop(dead);
    let cluster =
        cluster.peer(Role::Decode, &url).warns(&["an engine is not usable", "no_decode"]).start().await;
    let check = async |answer: Answer, code: &str| {
        cluster.assert_error(&answer, 503, code);
        assert!(!answer.everything().contains(url.rsplit(':').next().unwrap()), "{answer:?}");
    };
    check(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await, "no_decode").await;
    check(cluster.post("/v1/embeddings", &json!({"model": "sim"})).await, "no_decode").await;
    for path in ["/readyz", "/v1/models", "/livez"] {
        cluster.assert_hides_engines(&cluster.get(path).await);
    }
    cluster.wait_for("the probe has failed", async || cluster.log_has("an engine is not usable")).await;
    cluster.finish().await;
}
