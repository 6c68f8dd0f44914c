//! Engines that publish what their prefix caches hold: the router knows it to the token.

use std::net::SocketAddr;

use engine_sim::{Engine, EngineConfig};
use serde_json::{Value, json};

use crate::support::{COMPLETIONS, Cluster, engine_config, listen};

const ANY: Option<SocketAddr> = Some(SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0));

/// Twenty blocks and some bytes.
fn prompt(name: &str) -> String {
    format!("{name}: {}", "the quick brown fox jumps over it ".repeat(10))[..325].to_owned()
}

async fn publishing(blocks: usize, replays: bool) -> Engine {
    let kv_events_replay = ANY.filter(|_| replays);
    let config =
        EngineConfig { kv_events: ANY, kv_events_replay, num_blocks: blocks, ..EngineConfig::default() };
    engine_sim::spawn(config, listen().await).await.unwrap()
}

async fn router() -> Cluster {
    // A loaded machine must not make tokens too late.
    let patient = |config: &mut kvbaton::config::Config| {
        config.kv_events.tokenize_within = std::time::Duration::from_secs(10);
    };
    Cluster::builder().prefill(0).decode(1).unready().config(patient).start().await
}

/// Makes a peer of an engine and waits until the router listens to it.
async fn add(cluster: &Cluster, name: &str, engine: &Engine) {
    let [events, replay] = engine.kv_events_addrs();
    let mut spec = json!({"role": "prefill", "url": engine.url(), "name": name});
    spec["kv_events"] = format!("tcp://{}", events.unwrap()).into();
    if let Some(replay) = replay {
        spec["kv_events_replay"] = format!("tcp://{replay}").into();
    }
    let headers = [("content-type", "application/json")];
    let answer = cluster.send("POST", "/admin/peers", &headers, spec.to_string()).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    cluster.wait_for("it is subscribed", async || seen(cluster, name).await["subscribed"] == true).await;
}

async fn seen(cluster: &Cluster, name: &str) -> Value {
    cluster.get(&format!("/admin/peers/{name}")).await.json()["kv_events"][0].clone()
}

/// What the router says that its engines have of a request.
async fn cached(cluster: &Cluster, request: &Value) -> Value {
    let headers = [("content-type", "application/json")];
    let question = json!({"endpoint": "completions", "request": request});
    let answer = cluster.send("POST", "/admin/cached", &headers, question.to_string()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["cached"].clone()
}

async fn knows(cluster: &Cluster, request: &Value, expected: Value) {
    cluster
        .wait_for(&format!("{expected} is known"), async || cached(cluster, request).await == expected)
        .await;
}

fn completion(prompt: &Value) -> Value {
    json!({"model": "sim", "prompt": prompt, "max_tokens": 1, "temperature": 0})
}

/// Has an engine compute a prompt, without the router.
async fn compute(engine: &Engine, request: &Value) {
    let url = format!("{}{COMPLETIONS}", engine.url());
    let answer = crate::support::http_client().post(url).json(request).send().await.unwrap();
    assert_eq!(answer.status(), 200);
}

#[tokio::test]
async fn the_router_knows_which_engine_has_a_prompt() {
    let (one, other) = (publishing(513, true).await, publishing(513, false).await);
    let cluster = router().await;
    let request = completion(&prompt("a").into());
    // Computed before anybody listens: known by the replay alone.
    compute(&one, &request).await;
    add(&cluster, "one", &one).await;
    add(&cluster, "other", &other).await;
    let of = |peer: &str, tokens: usize, of: usize| json!({"peer": peer, "tokens": tokens, "of": of});
    knows(&cluster, &request, json!([of("one", 320, 325), of("other", 0, 325)])).await;
    // A prompt that goes on with it, as text and as tokens.
    let longer = format!("{} and more", prompt("a"));
    let ids: Vec<u32> = longer.bytes().map(u32::from).collect();
    let both = json!([of("one", 320, 334), of("other", 0, 334)]);
    assert_eq!(cached(&cluster, &completion(&longer.clone().into())).await, both);
    assert_eq!(cached(&cluster, &completion(&ids.into())).await, both);
    // Another salt shares nothing.
    let mut salted = request.clone();
    salted["cache_salt"] = "tenant".into();
    assert_eq!(cached(&cluster, &salted).await, json!([of("one", 0, 325), of("other", 0, 325)]));
    compute(&other, &salted).await;
    knows(&cluster, &salted, json!([of("one", 0, 325), of("other", 320, 325)])).await;
    // Computed by the other one while somebody listens.
    compute(&other, &completion(&longer.into())).await;
    knows(&cluster, &request, json!([of("one", 320, 325), of("other", 320, 325)])).await;
    let seen = seen(&cluster, "other").await;
    assert_eq!((&seen["gaps"], &seen["refused"], &seen["block_size"]), (&json!(0), &json!(0), &json!(16)));
    cluster.finish().await;
}

#[tokio::test]
async fn requests_go_where_their_prompt_is_cached() {
    let tune = |config: &mut kvbaton::config::Config| {
        config.kv_events.tokenize_within = std::time::Duration::from_secs(10);
        config.routing.prefill = kvbaton_proxy::Policy::KvEvents;
        config.routing.explain_header = true;
        // The prompt is short: what it costs must outweigh what counts as alike.
        config.routing.prompt_tokens_per_second = 100.0;
    };
    let cluster = Cluster::builder().prefill(0).decode(1).unready().config(tune).start().await;
    // They register, so that the decode engine can read from them.
    let known = async || {
        let mut config = engine_config(cluster.addr);
        (config.kv_events, config.role) = (ANY, engine_sim::Role::Prefill);
        engine_sim::spawn(config, listen().await).await.unwrap()
    };
    let (one, other) = (known().await, known().await);
    add(&cluster, "one", &one).await;
    add(&cluster, "other", &other).await;
    // Neither of them by the router, which has nothing to remember.
    for (name, engine) in [("a", &other), ("b", &one)] {
        let request = completion(&prompt(name).into());
        compute(engine, &request).await;
        let tokens = |engine: &str, of: &str| if engine == of { 320 } else { 0 };
        let holder = if name == "a" { "other" } else { "one" };
        let entry = |peer: &str| json!({"peer": peer, "tokens": tokens(peer, holder), "of": 325});
        knows(&cluster, &request, json!([entry("one"), entry("other")])).await;
        for _ in 0..3 {
            let headers = [("content-type", "application/json"), ("x-kvbaton-explain", "1")];
            let answer = cluster.send("POST", COMPLETIONS, &headers, request.to_string()).await;
            let choice = answer.header("x-kvbaton-choice").to_owned();
            assert!(choice.starts_with(&format!("prefill={holder}; ")), "{name}: {choice}");
        }
    }
    cluster.finish().await;
}

#[tokio::test]
async fn what_an_engine_evicts_is_no_longer_known() {
    // Room for two such prompts.
    let engine = publishing(50, false).await;
    let cluster = router().await;
    add(&cluster, "one", &engine).await;
    let first = completion(&prompt("a").into());
    compute(&engine, &first).await;
    knows(&cluster, &first, json!([{"peer": "one", "tokens": 320, "of": 325}])).await;
    for name in ["b", "c", "d"] {
        compute(&engine, &completion(&prompt(name).into())).await;
    }
    knows(&cluster, &first, json!([{"peer": "one", "tokens": 0, "of": 325}])).await;
    let last = completion(&prompt("d").into());
    assert_eq!(cached(&cluster, &last).await, json!([{"peer": "one", "tokens": 320, "of": 325}]));
    assert!(seen(&cluster, "one").await["blocks"].as_u64().unwrap() <= 49);
    cluster.finish().await;
}
