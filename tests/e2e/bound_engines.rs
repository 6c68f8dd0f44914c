//! Engines that register with a credential for certain models: whatever they say that they serve, they
//! get requests of those models only.

use std::time::Duration;

use engine_sim::{Engine, EngineConfig, Role};
use kvbaton::config::{Config, CredentialRole};
use kvbaton_proxy::OnMissing;
use serde_json::{Value, json};

use crate::support::{Answer, COMPLETIONS, Cluster, PROMPT, completion, credential, generations, listen};

const JSON: (&str, &str) = ("content-type", "application/json");

async fn router() -> Cluster {
    let set = |config: &mut Config| {
        config.hand_off.on_no_prefill = OnMissing::DecodeOnly;
        config.credentials = vec![
            credential("ops", CredentialRole::Operator, &[]),
            credential("team", CredentialRole::Engine, &["theirs"]),
            credential("fleet", CredentialRole::Engine, &[]),
        ];
    };
    Cluster::builder().prefill(0).decode(0).config(set).unready().may_warn(&["no_decode"]).start().await
}

/// An engine that serves a model and registers nowhere.
async fn engine(model: &str) -> Engine {
    let config = EngineConfig { role: Role::Decode, model: model.to_owned(), ..EngineConfig::default() };
    engine_sim::spawn(config, listen().await).await.unwrap()
}

async fn send(cluster: &Cluster, token: &str, method: &str, path: &str, body: Value) -> Answer {
    let bearer = format!("Bearer {token}");
    let headers = [JSON, ("authorization", bearer.as_str())];
    let body = if body.is_null() { String::new() } else { body.to_string() };
    cluster.send(method, path, &headers, body).await
}

async fn register(cluster: &Cluster, token: &str, id: &str, engine: &Engine, model: Value) -> u16 {
    let body = json!({"base_url": engine.url(), "role": "decode", "model": model});
    send(cluster, token, "PUT", &format!("/registry/v1/engines/{id}"), body).await.status
}

async fn wait_ready(cluster: &Cluster, count: usize) {
    cluster
        .wait_for("the engines are peers and ready", async || {
            let peers = send(cluster, "ops", "GET", "/admin/peers", Value::Null).await.json();
            let peers = peers["peers"].as_array().unwrap().clone();
            peers.len() == count && peers.iter().all(|peer| peer["accepts"] == true)
        })
        .await;
}

fn asks_for(model: &str) -> Value {
    let mut body = completion(PROMPT, 3);
    body["model"] = model.into();
    body
}

#[tokio::test]
async fn a_credential_for_one_model_gets_no_request_of_another() {
    let cluster = router().await;
    let (liar, silent) = (engine("sim").await, engine("sim").await);
    assert_eq!(register(&cluster, "team", "frank", &liar, json!("sim")).await, 403);
    assert_eq!(register(&cluster, "team", "liar", &liar, json!("theirs")).await, 201);
    assert_eq!(register(&cluster, "team", "silent", &silent, Value::Null).await, 201);
    wait_ready(&cluster, 2).await;
    // Nobody else is there, and still they are not asked: not by a name that they list, not by one that
    // nobody lists, not on an endpoint without hand-offs, and not without a name.
    let list = cluster.get("/v1/models").await.json();
    assert_eq!(list["data"], json!([]));
    for model in ["sim", "unheard-of"] {
        let answer = cluster.post(COMPLETIONS, &asks_for(model)).await;
        cluster.assert_error(&answer, 503, "no_decode");
    }
    for body in [json!({"model": "sim", "prompt": "a"}), json!({"prompt": "a"})] {
        cluster.assert_error(&cluster.post("/tokenize", &body).await, 503, "no_decode");
    }
    assert_eq!(
        liar.requests().iter().chain(&silent.requests()).filter(|seen| !seen.body.is_empty()).count(),
        0
    );
    // What is theirs they get, whatever becomes of it there.
    let before = generations(&liar).len() + generations(&silent).len();
    cluster.post(COMPLETIONS, &asks_for("theirs")).await;
    assert_eq!(generations(&liar).len() + generations(&silent).len(), before + 1);

    let honest = engine("sim").await;
    assert_eq!(register(&cluster, "fleet", "honest", &honest, json!("sim")).await, 201);
    wait_ready(&cluster, 3).await;
    for _ in 0..4 {
        assert_eq!(cluster.post(COMPLETIONS, &asks_for("sim")).await.status, 200);
    }
    assert_eq!(cluster.post("/tokenize", &json!({"model": "sim", "prompt": "a"})).await.status, 200);
    assert_eq!(generations(&honest).len(), 4);
    assert_eq!(generations(&liar).len() + generations(&silent).len(), before + 1);
    for engine in [liar, silent, honest] {
        engine.shutdown().await;
    }
    cluster.finish_whatever_was_warned().await;
}

#[tokio::test]
async fn an_engine_of_the_right_model_is_a_peer_like_any_other() {
    let cluster = router().await;
    let own = engine("theirs").await;
    assert_eq!(register(&cluster, "team", "own", &own, json!("theirs")).await, 201);
    wait_ready(&cluster, 1).await;
    let list = cluster.get("/v1/models").await.json();
    assert_eq!(list["data"][0]["id"], "theirs");
    assert_eq!(cluster.post(COMPLETIONS, &asks_for("theirs")).await.status, 200);
    assert_eq!(cluster.post("/tokenize", &json!({"model": "theirs", "prompt": "a"})).await.status, 200);
    own.shutdown().await;
    tokio::time::timeout(Duration::from_secs(60), cluster.finish_whatever_was_warned()).await.unwrap();
}
