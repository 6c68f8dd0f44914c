//! Unmodified engines, which know nothing but ZMQ: the router reads their side channels without ever
//! harming one, and lets their decode engines shake hands with its registry. The simulated listeners die
//! of every request that vLLM's would die of.

use std::net::SocketAddr;

use engine_sim::{Engine, EngineConfig};
use kv_connector::protocol::handshake::HandshakeRequest;
use kv_connector::side_channel::SideChannelClient;
use kvbaton::config::Config;
use kvbaton_proxy::{Generation, PortRange, ReadSideChannels};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::support::{COMPLETIONS, Cluster, listen, only, parse, single_with};

const PROMPT: &str =
    "a prompt that is long enough to fill some blocks, so that a wrong one would show at once";

fn completion() -> Value {
    json!({"model": "sim", "prompt": PROMPT, "max_tokens": 12, "temperature": 0})
}

/// An engine without a registry, with a side channel and with more than one rank.
fn unmodified(generation: Generation) -> EngineConfig {
    EngineConfig {
        side_channel: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        tp_size: 2,
        request_log: 4096,
        ..EngineConfig::for_generation(generation)
    }
}

async fn start(config: EngineConfig) -> Engine {
    engine_sim::spawn(config, listen().await).await.unwrap()
}

/// A router that looks often, without any engine.
async fn router(tune: impl Fn(&mut Config) + 'static) -> Cluster {
    router_that_warns(&[], tune).await
}

async fn router_that_warns(texts: &[&'static str], tune: impl Fn(&mut Config) + 'static) -> Cluster {
    let often = |config: &mut Config| {
        config.side_channel.interval = std::time::Duration::from_millis(100);
    };
    Cluster::builder().prefill(0).decode(0).unready().config(often).config(tune).warns(texts).start().await
}

fn with_front(config: &mut Config) {
    config.side_channel.front.enabled = true;
    config.side_channel.front.listen = [127, 0, 0, 1].into();
    config.side_channel.front.ports = PortRange { first: 0, last: 0 };
}

async fn add(cluster: &Cluster, role: &str, engine: &Engine, more: Value) {
    let mut spec = json!({"role": role, "url": engine.url()});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let headers = [("content-type", "application/json")];
    let answer = cluster.send("POST", "/admin/peers", &headers, spec.to_string()).await;
    assert_eq!(answer.status, 201, "{answer:?}");
}

fn at(engine: &Engine) -> Value {
    json!({"side_channel": engine.side_channel_addr().unwrap().to_string(), "tp_size": 2})
}

async fn ranks(cluster: &Cluster, engine_id: &str) -> usize {
    let list = cluster.get("/registry/v1/engines").await.json();
    let found = list["engines"].as_array().unwrap().iter().find(|engine| engine["engine_id"] == engine_id);
    found.map_or(0, |engine| engine["ranks"].as_array().unwrap().len())
}

async fn wait_read(cluster: &Cluster, engine: &Engine) {
    let read = async || ranks(cluster, engine.engine_id()).await == 2;
    cluster.wait_for("an engine's two ranks are read", read).await;
}

async fn wait_ready_peers(cluster: &Cluster, count: usize) {
    let ready = async || {
        let peers = cluster.get("/admin/peers").await.json();
        peers["peers"].as_array().unwrap().iter().filter(|peer| peer["state"] == "ready").count() == count
    };
    cluster.wait_for("the peers are ready", ready).await;
}

async fn verdict(cluster: &Cluster) -> Value {
    cluster.get("/admin/compatibility").await.json()["pairs"][0]["verdict"].clone()
}

/// The side channels of a role's first peer.
async fn channels(cluster: &Cluster, role: &str) -> Value {
    let peers = cluster.get("/admin/peers").await.json();
    let mut of_role = peers["peers"].as_array().unwrap().iter().filter(|peer| peer["role"] == role);
    of_role.next().unwrap()["side_channels"].clone()
}

async fn assert_same_text_as_alone(cluster: &Cluster, generation: Generation) {
    let answer = cluster.post(COMPLETIONS, &completion()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let alone = single_with(COMPLETIONS, &completion(), move |config| {
        *config = EngineConfig { side_channel: None, ..unmodified(generation) };
    })
    .await;
    assert_eq!(answer.generated(), alone.generated());
}

async fn finish(cluster: Cluster, engines: Vec<Engine>) {
    for engine in &engines {
        assert!(!engine.side_channel().is_dead(), "a listener has been ended");
        assert!(!engine.stats().dead, "an engine died");
    }
    cluster.finish().await;
    for engine in engines {
        engine.shutdown().await;
    }
}

async fn engines_are_read(generation: Generation) {
    let cluster = router(|_| {}).await;
    let (p, d) = (start(unmodified(generation)).await, start(unmodified(generation)).await);
    // P's side channel is learnt from its first hand-off, D has none.
    add(&cluster, "prefill", &p, json!({})).await;
    add(&cluster, "decode", &d, at(&d)).await;
    wait_ready_peers(&cluster, 2).await;
    wait_read(&cluster, &d).await;
    assert_eq!(verdict(&cluster).await, "unknown");
    assert_same_text_as_alone(&cluster, generation).await;
    wait_read(&cluster, &p).await;
    assert_eq!(verdict(&cluster).await, "compatible");
    let handed = parse(&only(&d).body)["kv_transfer_params"].clone();
    assert_eq!(handed["remote_port"], p.side_channel_addr().unwrap().port(), "there is no front");

    let path = format!("/registry/v1/engines/{}/ranks/0/1", p.engine_id());
    let payload = cluster.get(&path).await;
    let mut client =
        SideChannelClient::connect("127.0.0.1", p.side_channel_addr().unwrap().port()).await.unwrap();
    let own = client.ask(generation, HandshakeRequest { pp_rank: 0, tp_rank: 1 }).await.unwrap();
    assert_eq!(payload.body, own.0, "served byte for byte");
    if let Some(clock) = own.1 {
        let estimate: f64 = payload.header("kv-clock").parse().unwrap();
        let error: f64 = payload.header("kv-clock-error").parse().unwrap();
        assert!(estimate - error <= clock, "{estimate} {error} {clock}");
        assert!(error < 5.0, "{error}");
    }
    let of_p = channels(&cluster, "prefill").await;
    let address = p.side_channel_addr().unwrap().to_string();
    assert_eq!(
        (&of_p[0]["state"], &of_p[0]["configured"], &of_p[0]["address"], &of_p[0]["ranks"]),
        (&json!("read"), &json!(false), &json!(address), &json!(2))
    );
    assert_eq!(of_p[0]["engine_id"], p.engine_id());
    finish(cluster, vec![p, d]).await;
}

#[tokio::test]
async fn engines_of_the_newest_generation_are_read() {
    engines_are_read(Generation::V14).await;
}

#[tokio::test]
async fn engines_of_the_older_generation_are_read() {
    engines_are_read(Generation::V2).await;
}

async fn decode_shakes_hands_at_the_front(generation: Generation) {
    let cluster = router(with_front).await;
    let (p, d) = (start(unmodified(generation)).await, start(unmodified(generation)).await);
    add(&cluster, "prefill", &p, at(&p)).await;
    add(&cluster, "decode", &d, at(&d)).await;
    wait_ready_peers(&cluster, 2).await;
    wait_read(&cluster, &p).await;
    wait_read(&cluster, &d).await;
    // P's own listener ends, which nobody notices but who asks it.
    let own = p.side_channel_addr().unwrap().port();
    let mut client = SideChannelClient::connect("127.0.0.1", own).await.unwrap();
    let unserved = HandshakeRequest { pp_rank: 0, tp_rank: 7 };
    assert!(client.ask(generation, unserved).await.is_err());
    assert!(p.side_channel().is_dead());
    assert_same_text_as_alone(&cluster, generation).await;
    let handed = parse(&only(&d).body)["kv_transfer_params"].clone();
    assert_eq!(handed["remote_host"], "127.0.0.1");
    assert_ne!(handed["remote_port"], own);
    assert_eq!(d.stats().kv_pulls, 2, "each rank has read");
    assert_eq!(cluster.metric("kvbaton_front_requests_total", &[("result", "answered")]).await, 2.0);
    // The engine is well by its probes, so what was read of it stays.
    let failed = async || channels(&cluster, "prefill").await[0]["state"] == "failed";
    cluster.wait_for("the ended listener shows", failed).await;
    assert_eq!(ranks(&cluster, p.engine_id()).await, 2);
    finish(cluster, vec![d]).await;
    p.shutdown().await;
}

#[tokio::test]
async fn decode_of_the_newest_generation_shakes_hands_at_the_front() {
    decode_shakes_hands_at_the_front(Generation::V14).await;
}

#[tokio::test]
async fn decode_of_the_older_generation_shakes_hands_at_the_front() {
    decode_shakes_hands_at_the_front(Generation::V2).await;
}

#[tokio::test]
async fn a_restarted_prefill_engine_is_noticed_and_keeps_its_front() {
    let cluster = router_that_warns(&["not usable by its probes"], with_front).await;
    let (p, d) = (start(unmodified(Generation::V14)).await, start(unmodified(Generation::V14)).await);
    add(&cluster, "prefill", &p, at(&p)).await;
    add(&cluster, "decode", &d, at(&d)).await;
    wait_ready_peers(&cluster, 2).await;
    wait_read(&cluster, &p).await;
    let ports = async || {
        let answer = cluster.post(COMPLETIONS, &completion()).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let seen = crate::support::generations(&d);
        parse(&seen.last().unwrap().body)["kv_transfer_params"]["remote_port"].clone()
    };
    let front = ports().await;
    let (http, side_channel, old) = (p.addr(), p.side_channel_addr(), p.engine_id().to_owned());
    p.shutdown().await;
    let away = async || cluster.get("/admin/peers").await.text().contains("unreachable");
    cluster.wait_for("the router sees that it is away", away).await;
    let listener = tokio::net::TcpListener::bind(http).await.unwrap();
    let config = EngineConfig { side_channel, ..unmodified(Generation::V14) };
    let p = engine_sim::spawn(config, listener).await.unwrap();
    wait_read(&cluster, &p).await;
    assert_eq!(ranks(&cluster, &old).await, 0, "the old one has left");
    wait_ready_peers(&cluster, 2).await;
    assert_eq!(ports().await, front);
    let list = cluster.get("/registry/v1/engines").await.json();
    let engine =
        list["engines"].as_array().unwrap().iter().find(|e| e["engine_id"] == p.engine_id()).unwrap();
    assert_eq!(engine["generation"], 2);
    finish(cluster, vec![p, d]).await;
}

#[tokio::test]
async fn a_hand_off_of_an_unknown_engine_has_it_read_at_once() {
    // Neither a look nor a probe can tell of the restart.
    let rarely = |config: &mut Config| {
        config.side_channel.interval = std::time::Duration::from_secs(3600);
        config.probe.interval = std::time::Duration::from_secs(3600);
    };
    let cluster = router(rarely).await;
    let (p, d) = (start(unmodified(Generation::V14)).await, start(unmodified(Generation::V14)).await);
    add(&cluster, "prefill", &p, json!({})).await;
    add(&cluster, "decode", &d, at(&d)).await;
    wait_ready_peers(&cluster, 2).await;
    assert_eq!(cluster.post(COMPLETIONS, &completion()).await.status, 200);
    wait_read(&cluster, &p).await;
    let (http, side_channel, old) = (p.addr(), p.side_channel_addr(), p.engine_id().to_owned());
    p.shutdown().await;
    let listener = tokio::net::TcpListener::bind(http).await.unwrap();
    let config = EngineConfig { side_channel, ..unmodified(Generation::V14) };
    let p = engine_sim::spawn(config, listener).await.unwrap();
    let served = async || cluster.post(COMPLETIONS, &completion()).await.status == 200;
    cluster.wait_for("the new engine serves", served).await;
    wait_read(&cluster, &p).await;
    assert_eq!(ranks(&cluster, &old).await, 0);
    finish(cluster, vec![p, d]).await;
}

#[tokio::test]
async fn an_engine_of_a_fixed_id_may_come_back_at_another_side_channel() {
    let rarely = |config: &mut Config| {
        config.side_channel.interval = std::time::Duration::from_secs(3600);
        config.probe.interval = std::time::Duration::from_secs(3600);
    };
    let cluster = router(rarely).await;
    let fixed = || EngineConfig { engine_id: Some("fixed".to_owned()), ..unmodified(Generation::V14) };
    let (p, d) = (start(fixed()).await, start(unmodified(Generation::V14)).await);
    add(&cluster, "prefill", &p, json!({})).await;
    add(&cluster, "decode", &d, at(&d)).await;
    wait_ready_peers(&cluster, 2).await;
    assert_eq!(cluster.post(COMPLETIONS, &completion()).await.status, 200);
    wait_read(&cluster, &p).await;
    let record = async || cluster.get("/registry/v1/engines/fixed").await.json();
    let before = record().await;
    // A decode engine that has met the process of before reads from nobody else of that id.
    let next = start(unmodified(Generation::V14)).await;
    add(&cluster, "decode", &next, at(&next)).await;
    wait_ready_peers(&cluster, 3).await;
    assert_eq!(cluster.send("DELETE", "/admin/peers/decode-1", &[], "").await.status, 200);
    let http = p.addr();
    p.shutdown().await;
    let p = engine_sim::spawn(fixed(), tokio::net::TcpListener::bind(http).await.unwrap()).await.unwrap();
    let port = u64::from(p.side_channel_addr().unwrap().port());
    assert_ne!(before["side_channel_port"], port);
    assert_same_text_as_alone(&cluster, Generation::V14).await;
    let read = async || record().await["side_channel_port"] == port;
    cluster.wait_for("the new process is read", read).await;
    let after = record().await;
    assert_eq!((&before["generation"], &after["generation"]), (&json!(1), &json!(2)));
    assert_eq!((&before["dp_rank"], &after["dp_rank"]), (&json!(0), &json!(0)));
    assert_eq!(channels(&cluster, "prefill").await.as_array().unwrap().len(), 1, "the old one is forgotten");
    finish(cluster, vec![p, d, next]).await;
}

#[tokio::test]
async fn who_is_not_sure_does_not_ask() {
    let cluster = router(|_| {}).await;
    let unknown = EngineConfig { vllm_version: Some("0.20.1".to_owned()), ..unmodified(Generation::V14) };
    let (p, d) = (start(unknown.clone()).await, start(unknown).await);
    add(&cluster, "prefill", &p, at(&p)).await;
    // The operator says v2, the engine's version says otherwise.
    let contradicted = start(unmodified(Generation::V14)).await;
    let mut spec = at(&contradicted);
    spec["generation"] = json!("v2");
    add(&cluster, "prefill", &contradicted, spec).await;
    add(&cluster, "decode", &d, json!({})).await;
    let not_asked = async || {
        let peers = cluster.get("/admin/peers").await.json();
        let states = |id: &str| {
            let peer = peers["peers"].as_array().unwrap().iter().find(|peer| peer["id"] == id).unwrap();
            (
                peer["side_channels"][0]["state"].clone(),
                peer["side_channels"][0]["problem"]["kind"].to_string(),
            )
        };
        let (unknown, reason) = states("prefill-1");
        let (other, contradiction) = states("prefill-2");
        unknown == "not_asked"
            && reason.contains("dialect of the engine's version is not known")
            && other == "not_asked"
            && contradiction.contains("contradicts the peer's generation")
    };
    cluster.wait_for("both are left alone, and it is said why", not_asked).await;
    assert_eq!(p.side_channel().answered() + contradicted.side_channel().answered(), 0);
    finish(cluster, vec![p, d, contradicted]).await;
}

#[tokio::test]
async fn a_hand_off_of_another_shape_than_the_version_has_is_not_asked_about() {
    // The version is that of a generation whose hand-offs look otherwise: two engines behind one URL.
    let cluster = router(|_| {}).await;
    let mixed = EngineConfig { vllm_version: Some("0.13.0".to_owned()), ..unmodified(Generation::V14) };
    let (p, d) = (start(mixed.clone()).await, start(mixed).await);
    add(&cluster, "prefill", &p, json!({})).await;
    add(&cluster, "decode", &d, json!({})).await;
    wait_ready_peers(&cluster, 2).await;
    assert_eq!(cluster.post(COMPLETIONS, &completion()).await.status, 200);
    let not_asked = async || channels(&cluster, "prefill").await[0]["state"] == "not_asked";
    cluster.wait_for("the engine is left alone", not_asked).await;
    assert_eq!(p.side_channel().answered(), 2, "D's two ranks have asked, nobody else");
    finish(cluster, vec![p, d]).await;
}

#[tokio::test]
async fn reading_can_be_limited_to_configured_addresses_or_turned_off() {
    for (read, expected) in [(ReadSideChannels::Configured, 1), (ReadSideChannels::Off, 0)] {
        let cluster = router(move |config| config.side_channel.read = read).await;
        let (p, d) = (start(unmodified(Generation::V14)).await, start(unmodified(Generation::V14)).await);
        add(&cluster, "prefill", &p, json!({})).await;
        add(&cluster, "decode", &d, at(&d)).await;
        wait_ready_peers(&cluster, 2).await;
        if expected == 1 {
            wait_read(&cluster, &d).await;
        }
        assert_eq!(cluster.post(COMPLETIONS, &completion()).await.status, 200);
        assert_eq!(p.side_channel().answered(), 2, "D's two ranks have asked, nobody else");
        let list = cluster.get("/registry/v1/engines").await.json();
        assert_eq!(list["engines"].as_array().unwrap().len(), expected);
        finish(cluster, vec![p, d]).await;
    }
}

#[tokio::test]
async fn a_removed_peer_leaves_the_registry_and_its_front_closes() {
    let cluster = router(with_front).await;
    let p = start(unmodified(Generation::V14)).await;
    add(&cluster, "prefill", &p, at(&p)).await;
    wait_read(&cluster, &p).await;
    assert_eq!(cluster.send("DELETE", "/admin/peers/prefill-1", &[], "").await.status, 200);
    assert_eq!(ranks(&cluster, p.engine_id()).await, 0);
    finish(cluster, vec![p]).await;
}

#[tokio::test]
async fn the_front_survives_whatever_is_sent_to_it() {
    let cluster = router(with_front).await;
    let (p, d) = (start(unmodified(Generation::V14)).await, start(unmodified(Generation::V14)).await);
    add(&cluster, "prefill", &p, at(&p)).await;
    add(&cluster, "decode", &d, at(&d)).await;
    wait_ready_peers(&cluster, 2).await;
    wait_read(&cluster, &p).await;
    wait_read(&cluster, &d).await;
    assert_same_text_as_alone(&cluster, Generation::V14).await;
    let port = parse(&only(&d).body)["kv_transfer_params"]["remote_port"].as_u64().unwrap() as u16;
    let first = HandshakeRequest { pp_rank: 0, tp_rank: 0 };

    let mut lost = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    lost.write_all(b"GET / HTTP/1.1\r\nhost: somewhere else\r\nuser-agent: a browser that got lost\r\n\r\n")
        .await
        .unwrap();
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
    }
    let mut unserved = SideChannelClient::connect("127.0.0.1", port).await.unwrap();
    let asked = unserved.ask(Generation::V14, HandshakeRequest { pp_rank: 3, tp_rank: 9 });
    let dropped =
        async || cluster.metric("kvbaton_front_requests_total", &[("result", "dropped")]).await == 1.0;
    tokio::select! {
        answer = asked => panic!("{answer:?}"),
        () = cluster.wait_for("the request is dropped", dropped) => {}
    }
    let mut older = SideChannelClient::connect("127.0.0.1", port).await.unwrap();
    let (payload, clock) = older.ask(Generation::V2, first).await.unwrap();
    assert_eq!(clock, None);
    let mut newest = SideChannelClient::connect("127.0.0.1", port).await.unwrap();
    let (same, clock) = newest.ask(Generation::V14, first).await.unwrap();
    assert_eq!(same, payload);
    let own_port = p.side_channel_addr().unwrap().port();
    let mut own = SideChannelClient::connect("127.0.0.1", own_port).await.unwrap();
    let (exact, own_clock) = own.ask(Generation::V14, first).await.unwrap();
    assert_eq!(exact, payload);
    // The estimate came first; it may be wrong by the slowness of one exchange.
    let difference = own_clock.unwrap() - clock.unwrap();
    assert!((-5.0..20.0).contains(&difference), "{difference}");
    finish(cluster, vec![p, d]).await;
}

#[tokio::test]
async fn engines_that_register_by_themselves_are_left_alone() {
    let cluster = Cluster::builder()
        .config(with_front)
        .config(|config| config.side_channel.interval = std::time::Duration::from_millis(50))
        .start()
        .await;
    let answer = cluster.post(COMPLETIONS, &completion()).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let left_alone = async || channels(&cluster, "prefill").await[0]["state"] == "registers_itself";
    cluster.wait_for("it is known to register by itself", left_alone).await;
    let handed = parse(&only(cluster.d()).body)["kv_transfer_params"].clone();
    assert_eq!(handed["remote_port"], cluster.p().addr().port(), "D needs no front");
    cluster.finish().await;
}
