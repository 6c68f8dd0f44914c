//! Whole engines in the registry: registration, signs of life, what peers and people read.

use http::Method;
use serde_json::{Value, json};

use crate::registry::{ENGINE, payload, rank_path};
use crate::support::{Answer, Ask, Surface};

const INVALID: &str = "invalid_request_error";

fn path(engine: &str) -> String {
    format!("/registry/v1/engines/{engine}")
}

/// The captured payload in base64.
fn base64() -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(payload())
}

fn registration() -> Value {
    json!({
        "base_url": "http://10.0.0.1:8100/", "role": "prefill", "model": "m", "vllm_version": "0.32.0",
        "state": "ready", "ttl_seconds": 15, "clock": 1000.5,
        "ranks": [{"pp_rank": 0, "tp_rank": 0, "payload": base64()}],
    })
}

async fn put(surface: &Surface, engine: &str, body: &Value) -> Answer {
    surface.ask(Ask::new(Method::PUT, &path(engine)).json(&body.to_string())).await
}

async fn put_msgpack(surface: &Surface, engine: &str, body: Vec<u8>) -> Answer {
    let ask = Ask::new(Method::PUT, &path(engine)).header("content-type", "application/msgpack");
    surface.ask(ask.body(body)).await
}

async fn beat(surface: &Surface, engine: &str, body: &Value) -> Answer {
    surface.ask(Ask::post(&format!("{}/heartbeat", path(engine))).json(&body.to_string())).await
}

/// A map of msgpack with one rank, whose payload is bytes.
fn msgpack_registration() -> Vec<u8> {
    let mut body = vec![0x82, 0xa5];
    body.extend(b"state\xa5ready\xa5ranks\x91\x83\xa7pp_rank\x00\xa7tp_rank\x00\xa7payload\xc5");
    let payload = payload();
    body.extend(u16::try_from(payload.len()).unwrap().to_be_bytes());
    body.extend(payload);
    body
}

#[tokio::test]
async fn an_engine_registers_whole_in_json_and_its_bytes_come_back() {
    let surface = Surface::new();
    let created = put(&surface, ENGINE, &registration()).await;
    assert_eq!(created.status, 201);
    let receipt = created.json();
    let revision = surface.proxy.registry().snapshot().revision;
    let router_clock = receipt["router_clock"].as_f64().unwrap();
    let expected = json!({"engine_id": ENGINE, "revision": revision, "generation": 1, "ttl_seconds": 15.0,
                          "router_clock": router_clock});
    assert_eq!(receipt, expected);
    let again = put(&surface, ENGINE, &registration()).await;
    assert_eq!((again.status.as_u16(), &again.json()["revision"]), (200, &json!(revision)));
    assert_eq!(surface.ask(Ask::get(&rank_path(ENGINE, "0", "0"))).await.body, payload());
}

#[tokio::test]
async fn what_an_engine_says_beyond_its_payloads_is_kept_and_checked() {
    let surface = Surface::new();
    let traits = json!({
        "tp_size": 1, "pp_size": 1, "dcp_size": 1, "transfer_mode": "pull", "kv_heads": 8, "is_mla": false,
        "permute_received": false, "hma_required": false, "host_buffer": true, "enforce_compat": true,
        "nixl_version": "1.3.0", "side_channel_host": "10.0.0.1", "side_channel_port": 5600,
    });
    let with = |traits: &Value| {
        let mut body = registration();
        body.as_object_mut().unwrap().extend(traits.as_object().unwrap().clone());
        body
    };
    assert_eq!(put(&surface, ENGINE, &with(&traits)).await.status, 201);
    let view = surface.ask(Ask::get(&path(ENGINE))).await.json();
    for (name, value) in traits.as_object().unwrap() {
        assert_eq!(&view[name], value, "{name}");
    }
    for (name, value) in [
        ("tp_size", json!(0)),
        ("pp_size", json!(65537)),
        ("kv_heads", json!(0)),
        ("nixl_version", json!("")),
        ("side_channel_host", json!("x".repeat(513))),
        ("side_channel_port", json!(0)),
    ] {
        let refused = put(&surface, ENGINE, &with(&json!({name: value}))).await;
        refused.expect_error(400, "invalid_request_error", Some(name), "invalid_registration");
    }
    assert_eq!(put(&surface, ENGINE, &with(&json!({"transfer_mode": "both"}))).await.status, 400);
    // What is not said any more is not known any more.
    assert_eq!(put(&surface, ENGINE, &registration()).await.status, 200);
    assert_eq!(surface.ask(Ask::get(&path(ENGINE))).await.json().get("tp_size"), None);
}

#[tokio::test]
async fn an_engine_registers_whole_in_msgpack_and_peers_get_all_payloads() {
    let surface = Surface::new();
    let created = put_msgpack(&surface, ENGINE, msgpack_registration()).await;
    assert_eq!((created.status.as_u16(), &created.json()["ttl_seconds"]), (201, &Value::Null));
    let ask = Ask::get(&path(ENGINE)).header("accept", "application/msgpack");
    let all = surface.ask(ask).await;
    assert_eq!((all.status.as_u16(), all.header("content-type")), (200, "application/msgpack"));
    assert_eq!(all.header("kv-connector-version"), "14");
    let payload = payload();
    assert!(all.body.windows(payload.len()).any(|window| window == payload));
    let named = b"\xa9engine_id\xd9\x24";
    assert!(all.body.windows(named.len()).any(|window| window == named));
}

#[tokio::test]
async fn people_see_all_of_an_engine_and_choose_which() {
    let surface = Surface::new();
    put(&surface, ENGINE, &registration()).await;
    let view = surface.ask(Ask::get(&path(ENGINE))).await.json();
    assert_eq!(view["base_url"], "http://10.0.0.1:8100");
    assert_eq!(view["clock"]["error"], Value::Null);
    assert!(view["clock"]["seconds"].as_f64().unwrap() >= 1000.5 - 1e-3);
    assert_eq!(view["ranks"].as_array().unwrap().len(), 1);
    for (query, found) in [
        ("", 1),
        ("?role=prefill&model=m&state=ready", 1),
        ("?role=decode", 0),
        ("?model=other", 0),
        ("?state=draining", 0),
    ] {
        let list = surface.ask(Ask::get(&format!("/registry/v1/engines{query}"))).await.json();
        assert_eq!(list["engines"].as_array().unwrap().len(), found, "{query}");
    }
    for query in ["?rolle=prefill", "?role=none"] {
        let answer = surface.ask(Ask::get(&format!("/registry/v1/engines{query}"))).await;
        answer.expect_error(400, INVALID, None, "invalid_query");
    }
    let unknown = surface.ask(Ask::get(&path("other"))).await;
    unknown.expect_error(404, "not_found_error", Some("engine_id"), "unknown_engine");
}

#[tokio::test]
async fn a_registration_that_does_not_fit_is_refused_by_the_name_of_its_fault() {
    let surface = Surface::new();
    let with = |name: &str, value: Value| {
        let mut body = registration();
        body[name] = value;
        body
    };
    let unknown = put(&surface, ENGINE, &with("rolle", json!(1))).await;
    let message = unknown.expect_error(400, INVALID, Some("rolle"), "invalid_json");
    assert!(message.contains("`rolle`"), "{message}");
    for (name, value) in [("role", json!("none")), ("state", json!("dead")), ("dp_rank", json!(-1))] {
        put(&surface, ENGINE, &with(name, value)).await.expect_error(
            400,
            INVALID,
            Some(name),
            "invalid_json",
        );
    }
    for (name, value) in [
        ("base_url", json!("tcp://x:1")),
        ("ttl_seconds", json!(0)),
        ("ttl_seconds", json!(1e9)),
        ("model", json!("")),
    ] {
        let answer = put(&surface, ENGINE, &with(name, value)).await;
        answer.expect_error(400, INVALID, Some(name), "invalid_registration");
    }
    let garbage = json!([{"pp_rank": 0, "tp_rank": 0, "payload": "AAAA"}]);
    let answer = put(&surface, ENGINE, &with("ranks", garbage)).await;
    answer.expect_error(400, INVALID, None, "malformed_payload");
    let twice = json!([registration()["ranks"][0], registration()["ranks"][0]]);
    let answer = put(&surface, ENGINE, &with("ranks", twice)).await;
    answer.expect_error(400, INVALID, Some("ranks"), "invalid_registration");
    let other = put(&surface, "other", &registration()).await;
    other.expect_error(409, INVALID, Some("engine_id"), "engine_id_mismatch");
    let answer = put_msgpack(&surface, ENGINE, b"\x81\xa5rolle\x01".to_vec()).await;
    let message = answer.expect_error(400, INVALID, Some("rolle"), "invalid_msgpack");
    assert!(message.contains("`rolle`"), "{message}");
    let mut trailing = msgpack_registration();
    trailing.push(0);
    put_msgpack(&surface, ENGINE, trailing).await.expect_error(400, INVALID, None, "invalid_msgpack");
    let untyped = surface.ask(Ask::new(Method::PUT, &path(ENGINE)).body("{}")).await;
    untyped.expect_error(415, INVALID, None, "unsupported_content_type");
    let big = put_msgpack(&surface, ENGINE, vec![0; crate::support::BODY_BYTES + 1]).await;
    big.expect_error(413, INVALID, None, "body_too_large");
    assert!(surface.proxy.registry().list().is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_engine_lives_as_long_as_it_beats() {
    let surface = Surface::new();
    let receipt = put(&surface, ENGINE, &registration()).await.json();
    tokio::time::advance(std::time::Duration::from_secs(14)).await;
    let beaten = beat(&surface, ENGINE, &json!({})).await;
    assert_eq!(beaten.status, 200);
    let expected = json!({"revision": receipt["revision"], "ttl_seconds": 15.0,
                          "router_clock": beaten.json()["router_clock"]});
    assert_eq!(beaten.json(), expected);
    tokio::time::advance(std::time::Duration::from_secs(14)).await;
    assert_eq!(surface.ask(Ask::get(&rank_path(ENGINE, "0", "0"))).await.status, 200);
    tokio::time::advance(std::time::Duration::from_secs(1)).await;
    let gone = surface.ask(Ask::get(&rank_path(ENGINE, "0", "0"))).await;
    gone.expect_error(404, "not_found_error", None, "unknown_rank");
    let unknown = beat(&surface, ENGINE, &json!({})).await;
    unknown.expect_error(404, "not_found_error", Some("engine_id"), "unknown_engine");
    let strict = beat(&surface, ENGINE, &json!({"clok": 1})).await;
    strict.expect_error(400, INVALID, Some("clok"), "invalid_json");
    let body = vec![b' '; 16 * 1024 + 1];
    let ask = Ask::post(&format!("{}/heartbeat", path(ENGINE))).header("content-type", "application/json");
    surface.ask(ask.body(body)).await.expect_error(413, INVALID, None, "body_too_large");
}

#[tokio::test(start_paused = true)]
async fn a_look_up_tells_the_engines_clock_with_its_error() {
    let surface = Surface::new();
    let receipt = put(&surface, ENGINE, &registration()).await.json();
    let ask = || Ask::get(&rank_path(ENGINE, "0", "0"));
    let first = surface.ask(ask()).await;
    assert_eq!((first.header("kv-clock-bound"), first.header("kv-clock-error")), ("lower", ""));
    assert_eq!(first.header("kv-clock").parse::<f64>().unwrap(), 1000.5);
    tokio::time::advance(std::time::Duration::from_secs(2)).await;
    let echo = json!({"router_clock": receipt["router_clock"], "received": 1000.5});
    assert_eq!(beat(&surface, ENGINE, &json!({"clock": 1002.5, "echo": echo})).await.status, 200);
    tokio::time::advance(std::time::Duration::from_secs(3)).await;
    let known = surface.ask(ask()).await;
    assert_eq!(known.header("kv-clock-bound"), "");
    let error: f64 = known.header("kv-clock-error").parse().unwrap();
    let clock: f64 = known.header("kv-clock").parse().unwrap();
    assert!((clock - 1005.5).abs() <= error && error < 2e-3, "{clock} {error}");
}

#[tokio::test]
async fn who_has_a_payload_is_told_so() {
    let surface = Surface::new();
    put(&surface, ENGINE, &registration()).await;
    let rank = rank_path(ENGINE, "0", "0");
    let first = surface.ask(Ask::get(&rank)).await;
    let tag = first.header("etag").to_owned();
    assert_eq!(tag.len(), 66);
    assert_eq!(first.header("kv-connector-version"), "14");
    let hash = "068b5762fa946f5efa342fd67e25daa63a77976468c4e997c5bf384140204883";
    assert_eq!(first.header("kv-compatibility-hash"), hash);
    let same = surface.ask(Ask::get(&rank).header("if-none-match", &tag)).await;
    assert_eq!((same.status.as_u16(), same.body.len(), same.header("etag")), (304, 0, tag.as_str()));
    assert_eq!(same.header("kv-compatibility-hash"), hash);
    let other = surface.ask(Ask::get(&rank).header("if-none-match", "\"0\"")).await;
    assert_eq!((other.status.as_u16(), other.body), (200, payload().into()));
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_is_not_ready_is_a_conflict_at_once_or_after_a_bounded_wait() {
    let surface = Surface::new();
    let mut body = registration();
    body["state"] = json!("registering");
    body["ttl_seconds"] = Value::Null;
    put(&surface, ENGINE, &body).await;
    let start = tokio::time::Instant::now();
    let rank = rank_path(ENGINE, "0", "0");
    let refused = surface.ask(Ask::get(&rank)).await;
    refused.expect_error(409, INVALID, Some("engine_id"), "engine_not_ready");
    let all = surface.ask(Ask::get(&path(ENGINE)).header("accept", "application/msgpack")).await;
    all.expect_error(409, INVALID, Some("engine_id"), "engine_not_ready");
    assert_eq!(surface.ask(Ask::get(&path(ENGINE))).await.json()["state"], "registering");
    assert!(start.elapsed().is_zero());
    let waited = surface.ask(Ask::get(&format!("{rank}?wait=60"))).await;
    waited.expect_error(409, INVALID, Some("engine_id"), "engine_not_ready");
    assert_eq!(start.elapsed().as_secs(), 4);
    let later = async {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        beat(&surface, ENGINE, &json!({"state": "ready"})).await
    };
    let (found, beaten) = tokio::join!(surface.ask(Ask::get(&format!("{rank}?wait=3"))), later);
    assert_eq!((beaten.status.as_u16(), found.status.as_u16()), (200, 200));
    assert_eq!(start.elapsed().as_secs(), 5);
    for wait in ["x", "-1", "NaN"] {
        let answer = surface.ask(Ask::get(&format!("{rank}?wait={wait}"))).await;
        answer.expect_error(400, INVALID, None, "invalid_query");
    }
}

#[tokio::test]
async fn the_watch_tells_what_happened_and_resumes() {
    let surface = Surface::new();
    let start = surface.proxy.registry().snapshot().revision;
    put(&surface, ENGINE, &registration()).await;
    surface.ask(Ask::new(Method::DELETE, &path(ENGINE))).await;
    let watch = async |ask: Ask| {
        // What is there is told before the router leaves; then the watch ends.
        let answer = surface.events(ask, 2).await;
        answer.into_iter().map(|event| (event.name, event.id, event.data)).collect::<Vec<_>>()
    };
    let all = watch(Ask::get(&format!("/registry/v1/watch?since={start}"))).await;
    assert_eq!((all[0].0.as_str(), all[0].1), ("registered", start + 1));
    assert_eq!((all[1].0.as_str(), all[1].1), ("removed", start + 2));
    assert_eq!(all[0].2["engine"]["ranks"], json!([{"pp_rank": 0, "tp_rank": 0}]));
    assert_eq!(all[1].2["kind"], "removed");
    put(&surface, ENGINE, &registration()).await;
    // The header of a client that reconnects counts for more than its URL.
    let resumed = Ask::get(&format!("/registry/v1/watch?since={start}"));
    let resumed = surface.events(resumed.header("last-event-id", &(start + 1).to_string()), 2).await;
    assert_eq!(resumed.iter().map(|event| event.id).collect::<Vec<_>>(), [start + 2, start + 3]);
    let strange = Ask::get("/registry/v1/watch").header("last-event-id", "x");
    let reset = surface.events(strange, 1).await.remove(0);
    assert_eq!((reset.name.as_str(), reset.id), ("reset", start + 3));
    assert_eq!(reset.data["revision"], start + 3);
    assert_eq!(reset.data["engines"][0]["engine_id"], ENGINE);
    let answer = surface.ask(Ask::get("/registry/v1/watch?since=x")).await;
    answer.expect_error(400, INVALID, None, "invalid_query");
    surface.proxy.drain();
    let ended = surface.ask(Ask::get("/registry/v1/watch")).await;
    assert_eq!((ended.status.as_u16(), ended.header("content-type")), (200, "text/event-stream"));
    assert!(ended.body.is_empty());
}
