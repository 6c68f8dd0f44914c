//! The fleet at run time, readiness, model lists, pass-through, and the shapes of small answers.

use std::time::Duration;

use engine_sim::Engine;
use kvbaton_proxy::Role;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::{
    Answer, COMPLETIONS, Cluster, FakeEngine, PROMPT, Step, completion, engine_config, generations,
    http_answer, listen, single_text,
};

const JSON: (&str, &str) = ("content-type", "application/json");

async fn engine(cluster: &Cluster, role: engine_sim::Role, listener: TcpListener) -> Engine {
    let mut config = engine_config(cluster.addr);
    config.role = role;
    engine_sim::spawn(config, listener).await.unwrap()
}

async fn add(cluster: &Cluster, spec: Value) -> Answer {
    cluster.send("POST", "/admin/peers", &[JSON], spec.to_string()).await
}

async fn wait_state(cluster: &Cluster, id: &str, state: &str) -> Value {
    let path = format!("/admin/peers/{id}");
    let what = format!("{id} is {state}");
    cluster.wait_for(&what, async || cluster.get(&path).await.json()["state"] == state).await;
    cluster.get(&path).await.json()
}

#[tokio::test]
async fn a_fleet_can_be_built_and_taken_down_at_run_time() {
    let by_hand = |config: &mut kvbaton::config::Config| config.pairing.adopt_registered = false;
    let empty = Cluster::builder().prefill(0).decode(0).config(by_hand);
    let cluster = empty.warns(&["no_prefill"]).unready().start().await;
    let ready = cluster.get("/readyz").await;
    let nothing = json!({"ready": false, "prefill_ready": 0, "decode_ready": 0, "draining": false, "store": {"kind": "memory", "up": true, "age_seconds": 0.0}});
    assert_eq!((ready.status, ready.json()), (503, nothing));
    assert_eq!(cluster.get("/admin/peers").await.json()["peers"], json!([]));
    assert_eq!(cluster.get("/v1/models").await.json(), json!({"object": "list", "data": []}));
    let head = cluster.send("HEAD", "/livez", &[], "").await;
    assert_eq!((head.status, head.body.len()), (200, 0));

    let prefill = engine(&cluster, engine_sim::Role::Prefill, listen().await).await;
    let decode = engine(&cluster, engine_sim::Role::Decode, listen().await).await;
    let answer = add(&cluster, json!({"role": "prefill", "url": prefill.url()})).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    let prefill_id = answer.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(answer.header("location"), format!("/admin/peers/{prefill_id}"));
    assert_eq!((&answer.json()["role"], &answer.json()["url"]), (&json!("prefill"), &json!(prefill.url())));
    let half = json!({"ready": false, "prefill_ready": 1, "decode_ready": 0, "draining": false, "store": {"kind": "memory", "up": true, "age_seconds": 0.0}});
    cluster.wait_for("one is ready", async || cluster.get("/readyz").await.json() == half).await;
    let answer = add(&cluster, json!({"role": "decode", "url": decode.url(), "name": "d-one"})).await;
    assert_eq!((answer.status, &answer.json()["id"]), (201, &json!("d-one")));
    cluster.wait_ready().await;
    assert_eq!(cluster.get("/admin/peers").await.json()["peers"].as_array().unwrap().len(), 2);

    let registered = async || cluster.get("/registry/v1/engines").await.json()["engines"][1].is_object();
    cluster.wait_for("both are registered", registered).await;
    let body = completion(PROMPT, 6);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    assert_eq!((prefill.stats().prefill_requests, decode.stats().kv_pulls), (1, 1));

    let path = format!("/admin/peers/{prefill_id}");
    let removed = cluster.send("DELETE", &path, &[], "").await;
    assert_eq!((removed.status, &removed.json()["id"]), (200, &json!(prefill_id)));
    cluster.assert_error(&cluster.send("DELETE", &path, &[], "").await, 404, "unknown_peer");
    cluster.assert_error(&cluster.get(&path).await, 404, "unknown_peer");
    assert_eq!(cluster.get("/readyz").await.status, 503);
    cluster.assert_error(&cluster.post(COMPLETIONS, &body).await, 503, "no_prefill");
    assert_eq!(prefill.stats().prefill_requests, 1);
    cluster.finish().await;
}

#[tokio::test]
async fn a_removed_peer_finishes_what_it_has() {
    let cluster = Cluster::builder().start().await;
    let gate = cluster.d().faults().hold(engine_sim::Stage::BeforeHead, engine_sim::Leg::Decode);
    let body = completion(PROMPT, 6);
    let peers = cluster.get("/admin/peers").await.json();
    let paths: Vec<String> = peers["peers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| format!("/admin/peers/{}", p["id"].as_str().unwrap()))
        .collect();
    let remove = async {
        gate.arrived(1).await;
        for path in &paths {
            assert_eq!(cluster.send("DELETE", path, &[], "").await.status, 200);
        }
        gate.release();
    };
    let (answer, ()) = tokio::join!(cluster.post(COMPLETIONS, &body), remove);
    assert_eq!(answer.generated(), single_text(COMPLETIONS, &body).await);
    cluster.finish().await;
}

#[tokio::test]
async fn a_peer_that_cannot_be_used_is_refused() {
    let cluster = Cluster::builder().start().await;
    let url = cluster.p().url();
    for (status, code, spec) in [
        (400, "invalid_json", json!({"role": "prefill"})),
        (400, "invalid_json", json!({"role": "both", "url": "http://10.0.0.1:1"})),
        (400, "invalid_json", json!({"rolle": "prefill", "url": "http://10.0.0.1:1"})),
        (400, "invalid_json", json!([])),
        (400, "invalid_peer", json!({"role": "prefill", "url": "ftp://10.0.0.1"})),
        (400, "invalid_peer", json!({"role": "prefill", "url": "10.0.0.1:1"})),
        (
            400,
            "invalid_peer",
            json!({"role": "prefill", "url": "http://10.0.0.1:1", "authorization": "replace"}),
        ),
        (409, "peer_exists", json!({"role": "prefill", "url": url})),
    ] {
        let answer = add(&cluster, spec.clone()).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["code"]),
            (status, &json!(code)),
            "{spec}: {answer:?}"
        );
    }
    assert_eq!(cluster.get("/admin/peers").await.json()["peers"].as_array().unwrap().len(), 2);
    cluster.finish().await;
}

#[tokio::test]
async fn a_peer_is_shown_with_what_it_is() {
    let cluster = Cluster::builder().start().await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    let peers = cluster.get("/admin/peers").await.json();
    for (peer, (engine, role)) in
        peers["peers"].as_array().unwrap().iter().zip([(cluster.p(), "prefill"), (cluster.d(), "decode")])
    {
        assert_eq!((&peer["role"], &peer["url"]), (&json!(role), &json!(engine.url())));
        assert_eq!(
            (&peer["state"], &peer["in_flight"], &peer["last_error"]),
            (&json!("ready"), &json!(0), &Value::Null)
        );
        assert_eq!((&peer["version"], &peer["generation"]), (&json!("0.32.0"), &json!("v14")));
        assert_eq!(peer["models"], json!(["sim"]));
    }
    assert_eq!(peers["peers"][0]["engine_ids"], json!([cluster.p().engine_id()]));
    cluster.finish().await;
}

#[tokio::test]
async fn an_engine_that_goes_is_noticed_and_one_that_comes_back_too() {
    let mut cluster = Cluster::builder().warns(&["no_decode", "by its probes"]).start().await;
    let decode = cluster.decode.remove(0);
    let addr = decode.addr();
    let peers = cluster.get("/admin/peers").await.json();
    let id = peers["peers"][1]["id"].as_str().unwrap().to_owned();
    decode.kill().await;
    let gone = wait_state(&cluster, &id, "unreachable").await;
    assert!(gone["last_error"]["kind"].is_string() && gone["last_error"]["at"].is_u64(), "{gone}");
    assert_eq!(cluster.get("/readyz").await.status, 503);
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_error(&answer, 503, "no_decode");
    assert_eq!(generations(cluster.p()).len(), 0);

    let listener = TcpListener::bind(addr).await.unwrap();
    cluster.decode.push(engine(&cluster, engine_sim::Role::Decode, listener).await);
    wait_state(&cluster, &id, "ready").await;
    cluster.wait_ready().await;
    cluster.wait_registered().await;
    let body = completion(PROMPT, 6);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    cluster.finish().await;
}

#[tokio::test]
async fn part_of_the_fleet_may_be_down_at_the_start() {
    let reserved = listen().await;
    let addr = reserved.local_addr().unwrap();
    drop(reserved);
    let mut cluster = Cluster::builder()
        .decode(0)
        .peer(Role::Decode, &format!("http://{addr}"))
        .warns(&["by its probes"])
        .unready()
        .start()
        .await;
    let half = json!({"ready": false, "prefill_ready": 1, "decode_ready": 0, "draining": false, "store": {"kind": "memory", "up": true, "age_seconds": 0.0}});
    cluster
        .wait_for("the prefill engine is ready", async || cluster.get("/readyz").await.json() == half)
        .await;
    assert_eq!(cluster.get("/readyz").await.status, 503);
    assert_eq!(cluster.get("/livez").await.json(), json!({"status": "ok"}));
    let late = engine(&cluster, engine_sim::Role::Decode, TcpListener::bind(addr).await.unwrap()).await;
    cluster.decode.push(late);
    cluster.wait_ready().await;
    cluster.wait_registered().await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    cluster.finish().await;
}

#[tokio::test]
async fn an_engine_that_is_down_does_not_stop_the_others() {
    let reserved = listen().await;
    let down = format!("http://{}", reserved.local_addr().unwrap());
    drop(reserved);
    let cluster = Cluster::builder()
        .peer(Role::Prefill, &down)
        .peer(Role::Decode, &down)
        .warns(&["by its probes"])
        .start()
        .await;
    for _ in 0..6 {
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    }
    assert_eq!(cluster.relayed().await, 6.0);
    cluster.finish().await;
}

#[tokio::test]
async fn model_lists_are_united_with_every_field() {
    let one = r#"{"object":"list","data":[{"id":"sim","object":"model","created":17,"max_model_len":8192,"permission":[{"x":1.50}]}]}"#;
    let two = r#"{"object":"list","data":[{"id":"other/model","object":"model","root":"r","parent":null}]}"#;
    let answer = vec![Step::Send(http_answer("200 OK", "application/json", "{}"))];
    let first = FakeEngine::with_models(one, answer.clone()).await;
    let second = FakeEngine::with_models(two, answer).await;
    let cluster = Cluster::builder()
        .prefill(0)
        .decode(0)
        .peer(Role::Prefill, &first.url())
        .peer(Role::Decode, &first.url())
        .peer(Role::Decode, &second.url())
        .unready()
        .start()
        .await;
    let sim = json!({"id": "sim", "object": "model", "created": 17, "max_model_len": 8192, "permission": [{"x": 1.50}]});
    let other = json!({"id": "other/model", "object": "model", "root": "r", "parent": null});
    let united = json!({"object": "list", "data": [other, sim]});
    cluster
        .wait_for("both lists are known", async || {
            cluster.get("/v1/models").await.text().contains("other/model")
        })
        .await;
    assert_eq!(cluster.get("/v1/models").await.json(), united);
    assert!(cluster.get("/v1/models").await.text().contains("1.50"));
    assert_eq!(cluster.get("/v1/models/sim").await.json(), united["data"][1]);
    assert_eq!(cluster.get("/v1/models/other/model").await.json(), united["data"][0]);
    cluster.assert_error(&cluster.get("/v1/models/none").await, 404, "model_not_found");
    cluster.finish().await;
}

#[tokio::test]
async fn other_endpoints_pass_to_a_decode_engine_as_they_are() {
    let answer = http_answer("207 Multi-Status", "application/x-odd", "\u{0}raw");
    let decode = FakeEngine::start(vec![Step::Send(answer)]).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &decode.url()).start().await;
    let body = "{ \"input\" :[1.50] , \"model\":\"sim\"}";
    for path in ["/v1/embeddings", "/tokenize?a=b%20c&d", "/v1/score", "/rerank", "/v1/messages/count_tokens"]
    {
        let answer = cluster.post_bytes(path, body, &[("x-request-id", "pass-1")]).await;
        assert_eq!((answer.status, answer.text().as_str()), (207, "\u{0}raw"), "{path}");
        assert_eq!(
            (answer.header("content-type"), answer.header("x-request-id")),
            ("application/x-odd", "pass-1")
        );
        let seen = decode.seen().pop().unwrap();
        assert_eq!(seen.line, format!("POST {path} HTTP/1.1"));
        assert_eq!(String::from_utf8(seen.body.clone()).unwrap(), body);
        assert_eq!(seen.values("x-request-id"), ["pass-1"]);
    }
    let own = ["/health", "/v1/models", "/version"];
    assert!(cluster.p().requests().iter().all(|seen| own.contains(&seen.path.as_str())));
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn embeddings_and_tokens_of_a_simulated_engine_pass() {
    let cluster = Cluster::builder().start().await;
    let tokens = cluster.post("/tokenize", &json!({"model": "sim", "prompt": "abc"})).await;
    assert_eq!((tokens.status, &tokens.json()["tokens"]), (200, &json!([97, 98, 99])));
    let vector = cluster.post("/v1/embeddings", &json!({"model": "sim", "input": "abc"})).await;
    assert_eq!((vector.status, &vector.json()["object"]), (200, &json!("list")));
    cluster.finish().await;
}

#[tokio::test]
async fn unknown_paths_and_methods_have_openais_error_shape() {
    let cluster = Cluster::builder().start().await;
    for path in
        ["/", "/v1", "/v1/nothing", "/admin", "/v1/completions/x", "/sim/stats", "/v1/load_lora_adapter"]
    {
        let answer = cluster.post_bytes(path, "{}", &[]).await;
        cluster.assert_error(&answer, 404, "unknown_endpoint");
        assert_ne!(answer.header("x-request-id"), "");
    }
    for (method, path, allow) in [
        ("GET", COMPLETIONS, "POST"),
        ("PUT", COMPLETIONS, "POST"),
        ("POST", "/v1/models", "GET,HEAD"),
        ("GET", "/v1/embeddings", "POST"),
        ("POST", "/metrics", "GET,HEAD"),
    ] {
        let answer = cluster.send(method, path, &[], "").await;
        cluster.assert_error(&answer, 405, "method_not_allowed");
        let allowed = answer.header("allow").replace(' ', "");
        assert_eq!(allowed, allow, "{method} {path}");
    }
    assert_eq!((generations(cluster.p()).len(), generations(cluster.d()).len()), (0, 0));
    cluster.finish().await;
}

#[tokio::test]
async fn the_metrics_page_is_for_prometheus() {
    let cluster = Cluster::builder().start().await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    let accept = [("accept", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")];
    let page = cluster.send("GET", "/metrics", &accept, "").await;
    assert!(page.header("content-type").starts_with("application/openmetrics-text"), "{page:?}");
    let text = page.text();
    assert!(text.ends_with("# EOF\n"), "{text}");
    assert!(text.contains("# TYPE kvbaton_handoffs counter\n"), "{text}");
    assert!(text.contains("kvbaton_handoffs_total{result=\"relayed\"} 1\n"), "{text}");
    assert!(!text.contains(PROMPT) && !text.contains("127.0.0.1"), "{text}");
    let older = cluster.get("/metrics").await;
    assert_eq!(older.header("content-type"), "text/plain; version=0.0.4; charset=utf-8");
    assert!(older.text().contains("# TYPE kvbaton_handoffs_total counter\n"), "{older:?}");
    cluster.finish().await;
}

#[tokio::test]
async fn the_router_turns_unready_before_it_leaves() {
    let settle = |config: &mut kvbaton::config::Config| config.shutdown.settle = Duration::from_millis(600);
    let cluster = Cluster::builder().config(settle).start().await;
    let (addr, url) = (cluster.addr, cluster.url("/readyz"));
    let leave = cluster.finish();
    let look = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut wire =
            crate::support::Wire::open(addr, b"GET /readyz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").await;
        wire.head().await.0
    };
    let ((), status) = tokio::join!(leave, look);
    assert_eq!(status, 503, "{url}");
    assert!(tokio::net::TcpStream::connect(addr).await.is_err());
}
