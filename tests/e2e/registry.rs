//! The handshake registry over HTTP, and the engines that shake hands through it.

use std::time::{Duration, Instant};

use engine_sim::{EngineConfig, Generation};
use serde_json::{Value, json};

use crate::support::{Answer, COMPLETIONS, Cluster, PROMPT, completion, generations, parse, single_text};

const VECTORS: &str = include_str!("../fixtures/vectors/handshake.json");
const MSGPACK: (&str, &str) = ("content-type", "application/msgpack");

fn rank(engine_id: &str) -> String {
    format!("/registry/v1/engines/{engine_id}/ranks/0/0")
}

fn unhex(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

async fn put(cluster: &Cluster, engine_id: &str, payload: Vec<u8>) -> Answer {
    cluster.send("PUT", &rank(engine_id), &[MSGPACK], payload).await
}

/// Engines put their payload once and never again, so that a test may change it.
fn once(config: &mut EngineConfig) {
    config.registry_refresh = Duration::from_secs(3600);
}

/// A cluster whose decode engine cannot load KV; the answer is the engine's own.
async fn assert_pull_fails(cluster: &Cluster) {
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    let expected = json!({"error": {"message": "Internal server error", "type": "InternalServerError",
                                    "param": null, "code": 500}});
    assert_eq!((answer.status, answer.json()), (500, expected));
    assert_eq!(cluster.d().stats().kv_pulls, 0);
    assert!(!cluster.d().stats().dead);
    // Engines that cannot shake hands cannot tell each other to free the blocks either.
    cluster
        .wait_for("the hand-off is known to be stranded", async || {
            let live = cluster.get("/admin/handoffs").await.json();
            live["handoffs"].as_array().unwrap().iter().any(|hand_off| hand_off["state"] == "stranded")
        })
        .await;
}

async fn assert_pull_works(cluster: &Cluster) {
    let body = completion(PROMPT, 6);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    assert_eq!(cluster.d().stats().kv_pulls, 1);
}

#[tokio::test]
async fn item_42_payloads_of_vllm_come_back_to_the_byte() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    let cluster = Cluster::builder().prefill(0).decode(0).unready().start().await;
    let captured = vectors["captured_replies"].as_array().unwrap().iter();
    let captured = captured.map(|reply| (&reply["metadata_fields"]["engine_id"], &reply["frames_hex"][0]));
    let made =
        vectors["metadata"].as_array().unwrap().iter().filter(|made| made.get("payload_hex").is_some());
    let made = made.map(|made| (&made["fields"]["engine_id"], &made["payload_hex"]));
    let mut count = 0;
    for (engine_id, hex) in captured.chain(made) {
        let (engine_id, payload) = (engine_id.as_str().unwrap(), unhex(hex));
        let answer = put(&cluster, engine_id, payload.clone()).await;
        assert!([200, 201].contains(&answer.status), "{engine_id}: {answer:?}");
        let got = cluster.get(&rank(engine_id)).await;
        assert_eq!((got.status, got.header("content-type")), (200, "application/msgpack"));
        assert_eq!(got.body, payload, "{engine_id}");
        count += 1;
    }
    assert_eq!(count, 5);
    cluster.finish().await;
}

#[tokio::test]
async fn every_malformed_payload_is_refused_and_leaves_the_old_one() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    let cluster = Cluster::builder().decode(0).engine(once).unready().start().await;
    cluster.wait_registered().await;
    let id = cluster.p().engine_id();
    let before = cluster.get(&rank(id)).await.body;
    let cases = vectors["decode_cases"].as_array().unwrap().iter();
    let cases: Vec<&Value> =
        cases.filter(|case| case["layer"] == "payload" && case["result"]["ok"] == false).collect();
    assert!(cases.len() > 12);
    for case in cases {
        let answer = put(&cluster, id, unhex(&case["hex"])).await;
        assert_eq!(answer.status, 400, "{}: {answer:?}", case["name"]);
        cluster.assert_error(&answer, 400, "malformed_payload");
    }
    for cut in [1, before.len() / 2, before.len() - 1] {
        let answer = put(&cluster, id, before[..cut].to_vec()).await;
        cluster.assert_error(&answer, 400, "malformed_payload");
    }
    assert_eq!(cluster.get(&rank(id)).await.body, before);
    cluster.finish().await;
}

#[tokio::test]
async fn what_is_wrong_with_a_payload_is_named() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    let case = |name: &str| {
        let cases = vectors["decode_cases"].as_array().unwrap();
        unhex(&cases.iter().find(|case| case["name"] == name).unwrap()["hex"])
    };
    let cluster = Cluster::builder().prefill(0).decode(0).unready().start().await;
    for (name, word) in [("missing_hash", "compatibility_hash"), ("missing_metadata", "agent_metadata_bytes")]
    {
        let answer = put(&cluster, "e", case(name)).await;
        cluster.assert_error(&answer, 400, "malformed_payload");
        let message = answer.json()["error"]["message"].to_string();
        assert!(message.contains(word), "{name}: {message}");
    }
    cluster.finish().await;
}

#[tokio::test]
async fn engines_register_by_themselves_and_people_see_them() {
    let cluster = Cluster::builder().start().await;
    let list = cluster.get("/registry/v1/engines").await.json();
    let mut ids: Vec<&str> =
        list["engines"].as_array().unwrap().iter().map(|e| e["engine_id"].as_str().unwrap()).collect();
    let mut expected = vec![cluster.p().engine_id(), cluster.d().engine_id()];
    ids.sort_unstable();
    expected.sort_unstable();
    assert_eq!(ids, expected);

    let path = rank(cluster.p().engine_id());
    let payload = cluster.get(&path).await;
    assert_eq!(payload.header("content-type"), "application/msgpack");
    let view = cluster.send("GET", &path, &[("accept", "application/json")], "").await;
    assert!(view.header("content-type").starts_with("application/json"));
    let view = view.json();
    assert_eq!((&view["pp_rank"], &view["tp_rank"]), (&json!(0), &json!(0)));
    assert_eq!(view["metadata"]["engine_id"], cluster.p().engine_id());
    assert_eq!(view["metadata"]["block_size"], cluster.p().config().block_size);
    assert_eq!(view["payload_bytes"], payload.body.len());
    let hash = view["compatibility_hash"].as_str().unwrap();
    assert_eq!(hash.len(), 64);
    assert!(payload.body.windows(64).any(|window| window == hash.as_bytes()));
    cluster.finish().await;
}

#[tokio::test]
async fn item_42_an_unknown_rank_is_not_found_at_once() {
    let cluster = Cluster::builder().start().await;
    let start = Instant::now();
    let answer = cluster.get(&rank("no-such-engine")).await;
    cluster.assert_error(&answer, 404, "unknown_rank");
    let other = format!("/registry/v1/engines/{}/ranks/0/1", cluster.p().engine_id());
    cluster.assert_error(&cluster.get(&other).await, 404, "unknown_rank");
    assert!(start.elapsed() < Duration::from_secs(1));
    let answer = cluster.get("/registry/v1/engines/e/ranks/0/first").await;
    cluster.assert_error(&answer, 400, "invalid_rank");
    let answer = cluster.send("DELETE", "/registry/v1/engines/no-such-engine", &[], "").await;
    cluster.assert_error(&answer, 404, "unknown_engine");
    cluster.finish().await;
}

#[tokio::test]
async fn a_payload_says_what_became_of_it() {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    let payload = unhex(&vectors["metadata"][1]["payload_hex"]);
    let other = unhex(&vectors["metadata"][2]["payload_hex"]);
    let cluster = Cluster::builder().prefill(0).decode(0).unready().start().await;
    for (payload, status, result) in
        [(&payload, 201, "created"), (&payload, 200, "unchanged"), (&other, 200, "replaced")]
    {
        let answer = put(&cluster, "eng-p", payload.clone()).await;
        let expected = json!({"engine_id": "eng-p", "pp_rank": 0, "tp_rank": 0, "result": result});
        assert_eq!((answer.status, answer.json()), (status, expected));
    }
    let answer = put(&cluster, "another", payload.clone()).await;
    cluster.assert_error(&answer, 409, "engine_id_mismatch");
    let path = rank("eng-p");
    let answer = cluster.send("PUT", &path, &[("content-type", "application/json")], payload).await;
    cluster.assert_error(&answer, 415, "unsupported_content_type");
    assert_eq!(cluster.send("DELETE", "/registry/v1/engines/eng-p", &[], "").await.status, 204);
    cluster.assert_error(&cluster.get(&path).await, 404, "unknown_rank");
    cluster.finish().await;
}

#[tokio::test]
async fn a_payload_over_the_limit_is_refused() {
    let small = |config: &mut kvbaton::config::Config| config.limits.payload_bytes = 1000;
    let cluster = Cluster::builder().prefill(0).decode(0).config(small).unready().start().await;
    let answer = put(&cluster, "e", vec![0; 1001]).await;
    cluster.assert_error(&answer, 413, "body_too_large");
    cluster.finish().await;
}

#[tokio::test]
async fn without_a_registry_entry_the_pull_fails_and_with_it_works() {
    let cluster = Cluster::builder().engine(once).warns(&["could release"]).start().await;
    let id = cluster.p().engine_id();
    let payload = cluster.get(&rank(id)).await.body;
    let path = format!("/registry/v1/engines/{id}");
    assert_eq!(cluster.send("DELETE", &path, &[], "").await.status, 204);
    assert_pull_fails(&cluster).await;
    assert_eq!(put(&cluster, id, payload.to_vec()).await.status, 201);
    assert_pull_works(&cluster).await;
    cluster.finish().await;
}

/// The pair is known not to fit: nobody is asked to prefill, and decode never sees a hand-off.
async fn assert_no_pair(cluster: &Cluster) {
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_error(&answer, 503, "no_compatible_pair");
    assert_eq!(cluster.p().stats().prefill_requests, 0);
    assert_eq!(generations(cluster.d()).len(), 0);
    assert_eq!(cluster.get("/readyz").await.status, 503);
}

async fn verdict(cluster: &Cluster) -> String {
    let pairs = cluster.get("/admin/compatibility").await.json();
    pairs["pairs"][0]["verdict"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn item_43_engines_whose_hashes_differ_are_no_pair() {
    let cluster = Cluster::builder().engine(once).warns(&["no_compatible_pair"]).start().await;
    let id = cluster.p().engine_id();
    let payload = cluster.get(&rank(id)).await.body.to_vec();
    let view = cluster.send("GET", &rank(id), &[("accept", "application/json")], "").await.json();
    let hash = view["compatibility_hash"].as_str().unwrap().as_bytes();
    let at = payload.windows(64).position(|window| window == hash).unwrap();
    let mut altered = payload.clone();
    altered[at] = if altered[at] == b'0' { b'1' } else { b'0' };
    assert_eq!(verdict(&cluster).await, "compatible");
    assert_eq!(put(&cluster, id, altered).await.json()["result"], "replaced");
    assert_eq!(verdict(&cluster).await, "hashes_differ");
    assert_no_pair(&cluster).await;
    assert_eq!(put(&cluster, id, payload).await.json()["result"], "replaced");
    assert_pull_works(&cluster).await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_44_only_engines_of_one_version_are_paired() {
    let older = |config: &mut EngineConfig| {
        if config.role == engine_sim::Role::Decode {
            config.vllm_version = Some("0.32.1".to_owned());
        }
    };
    let cluster = Cluster::builder().engine(older).unready().warns(&["no_compatible_pair"]).start().await;
    cluster.wait_registered().await;
    cluster
        .wait_for("both engines are ready", async || {
            let ready = cluster.get("/readyz").await.json();
            ready["prefill_ready"] == 1 && ready["decode_ready"] == 1
        })
        .await;
    assert_eq!(verdict(&cluster).await, "hashes_differ");
    assert_no_pair(&cluster).await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_44_generations_never_meet_in_a_rolling_upgrade() {
    let count = std::cell::Cell::new(0);
    let upgrade = move |config: &mut EngineConfig| {
        count.set(count.get() + 1);
        if count.get() % 2 == 0 {
            let (role, registry) = (config.role, config.registry.clone());
            *config = EngineConfig { role, registry, ..EngineConfig::for_generation(Generation::V2) };
        }
    };
    let cluster = Cluster::builder().prefill(2).decode(2).engine(upgrade).start().await;
    let body = completion(PROMPT, 6);
    for _ in 0..12 {
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    }
    assert_eq!(cluster.relayed().await, 12.0);
    assert!(cluster.decode.iter().all(|engine| engine.stats().kv_pulls > 0 && !engine.stats().dead));
    cluster.finish().await;
}

#[tokio::test]
async fn operators_endpoints_answer_only_clients_on_this_host() {
    let cluster = Cluster::builder().start().await;
    let paths = ["/registry/v1/engines", "/admin/peers", "/admin/handoffs"];
    let strangers =
        [("x-forwarded-for", "203.0.113.7"), ("forwarded", "for=203.0.113.7"), ("host", "kvbaton.example")];
    for path in paths {
        assert_eq!(cluster.get(path).await.status, 200);
        for stranger in strangers {
            let answer = cluster.send("GET", path, &[stranger], "").await;
            cluster.assert_error(&answer, 403, "not_local");
        }
    }
    let answer = put_as_stranger(&cluster).await;
    cluster.assert_error(&answer, 403, "not_local");
    for path in ["/livez", "/readyz", "/metrics", "/v1/models"] {
        assert_eq!(cluster.send("GET", path, &[("x-forwarded-for", "203.0.113.7")], "").await.status, 200);
    }
    cluster.finish().await;
}

async fn put_as_stranger(cluster: &Cluster) -> Answer {
    let headers = [MSGPACK, ("x-forwarded-for", "203.0.113.7")];
    cluster.send("PUT", &rank("e"), &headers, vec![0x80]).await
}

#[tokio::test]
async fn with_a_token_everybody_needs_it_and_engines_have_it() {
    let set = |config: &mut kvbaton::config::Config| config.admin.token = Some("s3cret".to_owned());
    let cluster = Cluster::builder().config(set).start().await;
    for path in ["/registry/v1/engines", "/admin/peers", "/admin/handoffs"] {
        let answer = cluster.send("GET", path, &[("authorization", "")], "").await;
        assert_eq!(answer.status, 401, "{answer:?}");
        assert_eq!(answer.header("www-authenticate"), "Bearer");
        let answer = cluster.send("GET", path, &[("authorization", "Bearer wrong!")], "").await;
        cluster.assert_error(&answer, 401, "token_wrong");
        let good = [("authorization", "Bearer s3cret"), ("x-forwarded-for", "203.0.113.7")];
        assert_eq!(cluster.send("GET", path, &good, "").await.status, 200);
    }
    assert_pull_works(&cluster).await;
    let seen = crate::support::generations(cluster.d());
    assert!(parse(&seen[0].body)["kv_transfer_params"].is_object());
    cluster.finish().await;
}
