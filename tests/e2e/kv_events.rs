//! Engines that publish what their prefix caches hold: the router knows it to the token.

use std::net::SocketAddr;

use engine_sim::{Engine, EngineConfig};
use kv_connector::kv_events::{BlockHash, BlocksStored, EventBatch, EventPublisher, KvEvent};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

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
    add_at(cluster, name, engine, events.unwrap(), replay, json!({})).await;
}

/// The same where the events come from elsewhere.
async fn add_at(
    cluster: &Cluster,
    name: &str,
    engine: &Engine,
    events: SocketAddr,
    replay: Option<SocketAddr>,
    mut spec: Value,
) {
    spec["role"] = "prefill".into();
    spec["url"] = engine.url().into();
    spec["name"] = name.into();
    spec["kv_events"] = format!("tcp://{events}").into();
    if let Some(replay) = replay {
        spec["kv_events_replay"] = format!("tcp://{replay}").into();
    }
    let headers = [("content-type", "application/json")];
    let answer = cluster.send("POST", "/admin/peers", &headers, spec.to_string()).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    cluster.wait_for("it is subscribed", async || seen(cluster, name).await["subscribed"] == true).await;
}

async fn seen(cluster: &Cluster, name: &str) -> Value {
    all_seen(cluster, name).await[0].clone()
}

/// Of each rank of a peer.
async fn all_seen(cluster: &Cluster, name: &str) -> Value {
    cluster.get(&format!("/admin/peers/{name}")).await.json()["kv_events"].clone()
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
    // Each with a router that has routed nothing: how fast engines are, as it learns, is this machine's matter.
    for holder in ["one", "other"] {
        requests_go_to(holder).await;
    }
}

async fn requests_go_to(holder: &str) {
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
    // Not by the router, which has nothing to remember.
    let request = completion(&prompt("a").into());
    compute(if holder == "one" { &one } else { &other }, &request).await;
    let entry = |peer: &str| json!({"peer": peer, "tokens": if peer == holder { 320 } else { 0 }, "of": 325});
    knows(&cluster, &request, json!([entry("one"), entry("other")])).await;
    // An explanation asks the engines' events as the request does.
    let headers = [("content-type", "application/json")];
    let asked = json!({"model": "sim", "prompt": prompt("a")}).to_string();
    let explained = cluster.send("POST", "/admin/explain", &headers, asked).await.json();
    assert_eq!(explained["chosen"]["prefill"], holder, "{explained}");
    let of = |peer: &str| {
        let pairs = explained["pairs"].as_array().unwrap();
        pairs.iter().find(|pair| pair["prefill"] == peer).unwrap()["total"].as_f64().unwrap()
    };
    let idle = if holder == "one" { "other" } else { "one" };
    assert!(of(holder) * 2.0 < of(idle), "{explained}");
    for _ in 0..3 {
        let headers = [("content-type", "application/json"), ("x-kvbaton-explain", "1")];
        let answer = cluster.send("POST", COMPLETIONS, &headers, request.to_string()).await;
        let choice = answer.header("x-kvbaton-choice").to_owned();
        assert!(choice.starts_with(&format!("prefill={holder}; ")), "{choice}");
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

/// A batch that says that the first 320 tokens of a prompt are cached.
fn stored(rank: u32, name: &str) -> Vec<u8> {
    let tokens: Vec<u32> = prompt(name).bytes().take(320).map(u32::from).collect();
    let first = i128::from(name.as_bytes()[0]) * 100;
    let blocks = BlocksStored {
        hashes: (first..first + 20).map(BlockHash::Number).collect(),
        parent: None,
        tokens,
        block_size: 16,
        lora: None,
        medium: Some("GPU".to_owned()),
        extra_keys: None,
        group: Some(0),
    };
    EventBatch { rank: Some(rank), events: vec![KvEvent::Stored(blocks)] }.encode(0.0)
}

/// Publishes at an address while `serving` is there, and keeps so much for replays.
async fn publisher(
    serving: &mut JoinSet<()>,
    listener: TcpListener,
    kept: usize,
) -> (EventPublisher, Option<SocketAddr>) {
    let publisher = EventPublisher::new(kept);
    serving.spawn(publisher.clone().serve(listener));
    if kept == 0 {
        return (publisher, None);
    }
    let replays = listen().await;
    let addr = replays.local_addr().unwrap();
    serving.spawn(publisher.clone().serve_replays(replays));
    (publisher, Some(addr))
}

/// A reader that is too slow misses what a publisher has no more room for. What it missed in the middle it asks
/// for; where it cannot, it forgets everything from before.
#[tokio::test]
async fn what_was_missed_is_replayed_or_everything_before_it_forgotten() {
    // As many as wait for a slow reader, and some.
    const BURST: usize = 1024 + 6;
    let plain = engine_sim::spawn(EngineConfig::default(), listen().await).await.unwrap();
    let mut serving = JoinSet::new();
    for (kept, gaps, before) in [(4096, 0, 320), (0, 1, 0)] {
        let cluster = router().await;
        let listener = listen().await;
        let events = listener.local_addr().unwrap();
        let (publisher, replays) = publisher(&mut serving, listener, kept).await;
        add_at(&cluster, "one", &plain, events, replays, json!({})).await;
        let of = |tokens: usize| json!([{"peer": "one", "tokens": tokens, "of": 325}]);
        let [first, missed, last] = ["a", "b", "c"].map(|name| completion(&prompt(name).into()));
        // The subscription has no answer; what is published before it is seen goes nowhere.
        let mut published = 0;
        cluster
            .wait_for("the first batches are known", async || {
                publisher.publish(stored(0, "a"));
                published += 1;
                seen(&cluster, "one").await["blocks"] == 20
            })
            .await;
        cluster
            .wait_for("all of them are", async || seen(&cluster, "one").await["batches"] == published)
            .await;
        assert_eq!(cached(&cluster, &first).await, of(320));
        // All at once, so that the publisher's task has no turn in between and the first ones are lost.
        publisher.publish(stored(0, "b"));
        for _ in 2..BURST {
            publisher.publish(EventBatch { rank: Some(0), events: Vec::new() }.encode(0.0));
        }
        publisher.publish(stored(0, "c"));
        published += BURST;
        cluster
            .wait_for("the last one is known", async || seen(&cluster, "one").await["batches"] == published)
            .await;
        for (request, tokens) in [(&first, before), (&missed, before), (&last, 320)] {
            assert_eq!(cached(&cluster, request).await, of(tokens), "kept {kept}: {request}");
        }
        let seen = seen(&cluster, "one").await;
        let blocks = 20 + before / 320 * 40;
        assert_eq!(
            (&seen["gaps"], &seen["refused"], &seen["blocks"]),
            (&json!(gaps), &json!(0), &json!(blocks))
        );
        cluster.finish().await;
    }
    plain.shutdown().await;
}

/// Two listeners with ports in a row.
async fn in_a_row() -> [TcpListener; 2] {
    loop {
        let first = listen().await;
        let next = first.local_addr().unwrap().port().checked_add(1);
        if let Some(next) = next
            && let Ok(second) = TcpListener::bind(("127.0.0.1", next)).await
        {
            return [first, second];
        }
    }
}

#[tokio::test]
async fn each_data_parallel_rank_is_followed_at_its_own_port() {
    let plain = engine_sim::spawn(EngineConfig::default(), listen().await).await.unwrap();
    let other = engine_sim::spawn(EngineConfig::default(), listen().await).await.unwrap();
    let cluster = router().await;
    let mut serving = JoinSet::new();
    let [first, second] = in_a_row().await;
    let addr = first.local_addr().unwrap();
    let (zero, _) = publisher(&mut serving, first, 0).await;
    let (one, _) = publisher(&mut serving, second, 0).await;
    // Both ranks behind one URL, and the second alone behind another.
    add_at(&cluster, "both", &plain, addr, None, json!({"dp_size": 2})).await;
    add_at(&cluster, "second", &other, addr, None, json!({"dp_rank": 1})).await;
    cluster
        .wait_for("both ranks are subscribed", async || {
            all_seen(&cluster, "both").await.as_array().unwrap().iter().all(|rank| rank["subscribed"] == true)
        })
        .await;
    let addresses = [0, 1].map(|rank| format!("tcp://127.0.0.1:{}", addr.port() + rank));
    let both = all_seen(&cluster, "both").await;
    assert_eq!([&both[0]["address"], &both[1]["address"]], [&addresses[0], &addresses[1]]);
    assert_eq!(seen(&cluster, "second").await["address"], addresses[1]);
    let request = completion(&prompt("a").into());
    let of = |both: usize, second: usize| {
        let entry = |peer: &str, tokens: usize| json!({"peer": peer, "tokens": tokens, "of": 325});
        json!([entry("both", both), entry("second", second)])
    };
    let publish =
        async |from: &EventPublisher, batch: Vec<u8>, what: &str, peer: &str, rank: usize, to: u64| {
            cluster
                .wait_for(what, async || {
                    from.publish(batch.clone());
                    all_seen(&cluster, peer).await[rank][what].as_u64().unwrap() >= to
                })
                .await;
        };
    // Either rank may get the request, so that what one of them has is not counted on.
    publish(&zero, stored(0, "a"), "blocks", "both", 0, 20).await;
    assert_eq!(cached(&cluster, &request).await, of(0, 0));
    publish(&one, stored(1, "a"), "blocks", "both", 1, 20).await;
    publish(&one, stored(1, "a"), "blocks", "second", 0, 20).await;
    assert_eq!(cached(&cluster, &request).await, of(320, 320));
    // What is not of the rank whose port it is counts for nothing.
    publish(&one, stored(0, "b"), "refused", "both", 1, 1).await;
    publish(&zero, stored(0, "b"), "blocks", "both", 0, 40).await;
    assert_eq!(cached(&cluster, &completion(&prompt("b").into())).await, of(0, 0));
    plain.shutdown().await;
    other.shutdown().await;
    cluster.finish_whatever_was_warned().await;
}
