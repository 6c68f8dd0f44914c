//! A fleet that changes under traffic: engines that register, restart, drain and leave.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use engine_sim::{ArmedFault, Engine, EngineConfig, Fault, Generation, Leg, Role as SimRole, Stage};
use kvbaton::config::Config;
use kvbaton_proxy::{AddressCheck, OnMissing, Policy};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::malformed_handoff::sound;
use crate::support::{
    COMPLETIONS, Cluster, PROMPT, completion, engine_config, generations, listen, single_text,
};

const JSON: (&str, &str) = ("content-type", "application/json");

/// What a probe says of an engine that has just ended.
const GONE: &str = "not usable by its probes";

fn once(config: &mut EngineConfig) {
    config.registry_refresh = Duration::from_secs(3600);
}

async fn spawn(router: SocketAddr, role: SimRole, tune: impl FnOnce(&mut EngineConfig)) -> Engine {
    spawn_on(listen().await, router, role, tune).await
}

async fn spawn_on(
    listener: TcpListener,
    router: SocketAddr,
    role: SimRole,
    tune: impl FnOnce(&mut EngineConfig),
) -> Engine {
    let mut config = engine_config(router);
    config.role = role;
    tune(&mut config);
    engine_sim::spawn(config, listener).await.unwrap()
}

/// The peer of an engine, by its address.
async fn peer_of(cluster: &Cluster, engine: &Engine) -> Option<Value> {
    let all = cluster.get("/admin/peers").await.json();
    all["peers"].as_array().unwrap().iter().find(|peer| peer["url"] == engine.url()).cloned()
}

async fn wait_accepting(cluster: &Cluster, engine: &Engine) -> String {
    cluster
        .wait_for("the engine is a peer that gets requests", async || {
            peer_of(cluster, engine).await.is_some_and(|peer| peer["accepts"] == true)
        })
        .await;
    peer_of(cluster, engine).await.unwrap()["id"].as_str().unwrap().to_owned()
}

async fn act(cluster: &Cluster, id: &str, action: &str) -> Value {
    let answer = cluster.send("POST", &format!("/admin/peers/{id}/{action}"), &[], "").await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

async fn the_pair(cluster: &Cluster) -> Value {
    cluster.get("/admin/compatibility").await.json()["pairs"][0].clone()
}

#[tokio::test]
async fn engines_that_register_are_peers_as_long_as_they_are_registered() {
    let cluster = Cluster::builder().prefill(0).decode(0).unready().may_warn(&[GONE]).start().await;
    let prefill = spawn(cluster.addr, SimRole::Prefill, |_| {}).await;
    let decode = spawn(cluster.addr, SimRole::Decode, |_| {}).await;
    cluster.wait_ready().await;
    let id = wait_accepting(&cluster, &prefill).await;
    assert_eq!(id, format!("prefill-127.0.0.1-{}", prefill.addr().port()));
    let peer = peer_of(&cluster, &prefill).await.unwrap();
    assert_eq!((&peer["adopted"], &peer["engine_state"]), (&json!(true), &json!("ready")));
    let body = completion(PROMPT, 6);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    assert_eq!((cluster.relayed().await, decode.stats().kv_pulls), (1.0, 1));
    assert_eq!(cluster.metric("kvbaton_peers", &[("stage", "prefill"), ("condition", "open")]).await, 1.0);

    prefill.shutdown().await;
    let path = format!("/admin/peers/{id}");
    cluster.wait_for("the peer has left", async || cluster.get(&path).await.status == 404).await;
    decode.shutdown().await;
    cluster.finish().await;
}

#[tokio::test]
async fn an_engine_of_both_roles_serves_both_stages_but_never_hands_off_to_itself() {
    let cluster = Cluster::builder().prefill(0).decode(0).unready().may_warn(&[GONE]).start().await;
    let one = spawn(cluster.addr, SimRole::Both, |_| {}).await;
    let other = spawn(cluster.addr, SimRole::Both, |_| {}).await;
    cluster.wait_ready().await;
    cluster
        .wait_for("there are four pairs that are judged", async || {
            let pairs = cluster.get("/admin/compatibility").await.json();
            let verdicts = pairs["pairs"].as_array().unwrap().iter().map(|pair| pair["verdict"].clone());
            let mut verdicts: Vec<_> = verdicts.map(|verdict| verdict.as_str().unwrap().to_owned()).collect();
            verdicts.sort();
            verdicts == ["compatible", "compatible", "own_engine", "own_engine"]
        })
        .await;
    for _ in 0..4 {
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await.status, 200);
    }
    assert_eq!(cluster.relayed().await, 4.0);
    assert_eq!(one.stats().kv_pulls + other.stats().kv_pulls, 4);
    one.shutdown().await;
    other.shutdown().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_peer_of_the_settings_is_not_there_twice_and_a_removed_one_stays_away() {
    let cluster = Cluster::builder().start().await;
    let peers = cluster.get("/admin/peers").await.json();
    assert_eq!(peers["peers"].as_array().unwrap().len(), 2, "{peers}");
    assert!(peers["peers"].as_array().unwrap().iter().all(|peer| peer["adopted"] == false));
    assert_eq!(cluster.send("DELETE", "/admin/peers/prefill-1", &[], "").await.status, 200);
    // The registry changes, and the engine is still in it.
    let body = json!({"model": "other"}).to_string();
    assert_eq!(cluster.send("PUT", "/registry/v1/engines/x", &[JSON], body).await.status, 201);
    let proxy_sees = cluster.get("/admin/peers").await.json();
    assert_eq!(proxy_sees["peers"].as_array().unwrap().len(), 1, "{proxy_sees}");
    let spec = json!({"role": "prefill", "url": cluster.p().url()}).to_string();
    assert_eq!(cluster.send("POST", "/admin/peers", &[JSON], spec).await.status, 201);
    cluster.wait_ready().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_44_a_rolling_upgrade_under_traffic_fails_no_request() {
    // Who has cached the prompt, or was slow at first on a busy machine, is not to decide here.
    let in_turn = |config: &mut Config| {
        (config.routing.prefill, config.routing.decode) = (Policy::RoundRobin, Policy::RoundRobin);
    };
    let builder = Cluster::builder().prefill(0).decode(0).unready().may_warn(&[GONE]);
    let cluster = builder.config(in_turn).start().await;
    let version = |version: &'static str| {
        move |config: &mut EngineConfig| {
            config.vllm_version = Some(version.to_owned());
            config.decode_time_per_token = Duration::from_millis(2);
        }
    };
    let (p1, d1) = (
        spawn(cluster.addr, SimRole::Prefill, version("0.32.0")).await,
        spawn(cluster.addr, SimRole::Decode, version("0.32.0")).await,
    );
    let old = [wait_accepting(&cluster, &p1).await, wait_accepting(&cluster, &d1).await];
    cluster.wait_ready().await;
    let stop = AtomicBool::new(false);
    let body = completion(PROMPT, 8);
    let expected = single_text(COMPLETIONS, &body).await;
    let client = async || {
        let mut served = 0;
        while !stop.load(Ordering::Relaxed) {
            let answer = cluster.post(COMPLETIONS, &body).await;
            assert_eq!((answer.status, answer.generated()), (200, expected.clone()));
            served += 1;
        }
        served
    };
    let upgrade = async {
        let p2 = spawn(cluster.addr, SimRole::Prefill, version("0.32.1")).await;
        wait_accepting(&cluster, &p2).await;
        // One new prefill engine that fits nobody: only the old pair serves.
        let d2 = spawn(cluster.addr, SimRole::Decode, version("0.32.1")).await;
        wait_accepting(&cluster, &d2).await;
        let pairs = cluster.get("/admin/compatibility").await.json();
        let used = pairs["pairs"].as_array().unwrap().iter().filter(|pair| pair["used"] == true).count();
        assert_eq!((used, pairs["pairs"].as_array().unwrap().len()), (2, 4), "{pairs}");
        cluster.wait_for("the new pair serves", async || d2.stats().kv_pulls > 3).await;
        for id in &old {
            let drained = act(&cluster, id, "drain?timeout=60").await;
            assert_eq!(drained["ended"], "drained", "{drained}");
        }
        let (pulls, prefills) = (d1.stats().kv_pulls, p1.stats().prefill_requests);
        let before = d2.stats().kv_pulls;
        cluster.wait_for("only the new pair serves", async || d2.stats().kv_pulls > before + 3).await;
        assert_eq!((d1.stats().kv_pulls, p1.stats().prefill_requests), (pulls, prefills));
        assert!(pulls > 0 && !d1.stats().dead);
        p1.shutdown().await;
        d1.shutdown().await;
        cluster
            .wait_for("the old peers have left", async || {
                cluster.get("/admin/peers").await.json()["peers"].as_array().unwrap().len() == 2
            })
            .await;
        stop.store(true, Ordering::Relaxed);
        (p2, d2)
    };
    let (a, b, c, (p2, d2)) = tokio::join!(client(), client(), client(), upgrade);
    assert_eq!(cluster.relayed().await, f64::from(a + b + c), "every answer came over a hand-off");
    p2.shutdown().await;
    d2.shutdown().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_44_an_upgrade_across_generations_fails_no_request() {
    let cluster = Cluster::builder().prefill(0).decode(0).unready().may_warn(&[GONE]).start().await;
    let v2 = |config: &mut EngineConfig| {
        let (role, registry) = (config.role, config.registry.clone());
        *config = EngineConfig {
            role,
            registry,
            registry_refresh: config.registry_refresh,
            ..EngineConfig::for_generation(Generation::V2)
        };
    };
    let old =
        [spawn(cluster.addr, SimRole::Prefill, v2).await, spawn(cluster.addr, SimRole::Decode, v2).await];
    cluster.wait_ready().await;
    let body = completion(PROMPT, 4);
    for _ in 0..3 {
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    }
    let new = [
        spawn(cluster.addr, SimRole::Decode, |_| {}).await,
        spawn(cluster.addr, SimRole::Prefill, |_| {}).await,
    ];
    for engine in &new {
        wait_accepting(&cluster, engine).await;
    }
    for engine in &old {
        let id = wait_accepting(&cluster, engine).await;
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
        assert_eq!(act(&cluster, &id, "drain?timeout=60").await["ended"], "drained");
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    }
    assert_eq!(cluster.relayed().await, 7.0);
    for engine in old.into_iter().chain(new) {
        assert!(!engine.stats().dead);
        engine.shutdown().await;
    }
    cluster.finish().await;
}

#[tokio::test]
async fn item_46_a_hand_off_of_an_engine_that_restarts_meanwhile_reaches_nobody() {
    let fail = |config: &mut Config| config.hand_off.on_missing = OnMissing::Fail;
    let cluster = Cluster::builder().engine(once).config(fail).warns(&["hand-off"]).start().await;
    let gate = cluster.p().faults().hold(Stage::BeforeHead, Leg::Prefill);
    let body = completion(PROMPT, 6);
    let restart = async {
        gate.arrived(1).await;
        let next = json!({"base_url": cluster.p().url(), "role": "prefill", "model": "sim"}).to_string();
        assert_eq!(cluster.send("PUT", "/registry/v1/engines/next", &[JSON], next).await.status, 201);
        gate.release();
    };
    let (answer, ()) = tokio::join!(cluster.post(COMPLETIONS, &body), restart);
    cluster.assert_error(&answer, 502, "bad_handoff");
    assert!(
        generations(cluster.d())
            .iter()
            .all(|seen| !String::from_utf8_lossy(&seen.body).contains("\"max_tokens\":6"))
    );
    let peer = peer_of(&cluster, cluster.p()).await.unwrap();
    assert_eq!(peer["restarted"]["count"], 1, "{peer}");
    assert_eq!(cluster.metric("kvbaton_peer_restarts", &[("stage", "prefill")]).await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_46_pairs_that_had_talked_are_quarantined_after_a_restart() {
    let quarantine = |config: &mut Config| {
        config.pairing.quarantine_restarted = Duration::from_secs(600);
    };
    let cluster = Cluster::builder()
        .prefill(0)
        .config(quarantine)
        .unready()
        .warns(&["no_compatible_pair"])
        .may_warn(&[GONE, "no_prefill"])
        .start()
        .await;
    let listener = listen().await;
    let addr = listener.local_addr().unwrap();
    let first = spawn_on(listener, cluster.addr, SimRole::Prefill, |_| {}).await;
    cluster.wait_ready().await;
    let body = completion(PROMPT, 6);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    first.kill().await;

    let second =
        spawn_on(TcpListener::bind(addr).await.unwrap(), cluster.addr, SimRole::Prefill, |_| {}).await;
    let id = wait_accepting(&cluster, &second).await;
    cluster
        .wait_for("the restart is seen", async || {
            peer_of(&cluster, &second).await.unwrap()["restarted"]["count"] == 1
        })
        .await;
    let pair = the_pair(&cluster).await;
    assert_eq!((&pair["verdict"], &pair["used"]), (&json!("compatible"), &json!(false)), "{pair}");
    assert_eq!(pair["quarantine"]["reason"], "restarted", "{pair}");
    assert!(pair["quarantine"]["seconds_left"].as_f64().unwrap() > 60.0, "{pair}");
    // A probe of the moment in which nobody listened there may still say so.
    let refused = async || {
        let answer = cluster.post(COMPLETIONS, &body).await;
        assert_eq!(answer.status, 503, "{answer:?}");
        answer.json()["error"]["code"] == "no_compatible_pair"
    };
    cluster.wait_for("its pair is refused", refused).await;
    act(&cluster, &id, "resume").await;
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    assert_eq!(second.stats().prefill_requests, 1);
    second.shutdown().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_quarantined_peer_takes_part_in_no_hand_off() {
    let cluster = Cluster::builder().warns(&["no_compatible_pair"]).start().await;
    let shown = act(&cluster, "decode-1", "quarantine").await;
    assert_eq!(shown["quarantined"], true);
    let pair = the_pair(&cluster).await;
    assert_eq!(pair["quarantine"], json!({"reason": "operator", "seconds_left": null}));
    cluster.assert_error(&cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await, 503, "no_compatible_pair");
    let alone = json!({"model": "sim", "input": "abc"});
    assert_eq!(cluster.post("/v1/embeddings", &alone).await.status, 200);
    act(&cluster, "decode-1", "resume").await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await.status, 200);
    cluster.assert_error(
        &cluster.send("POST", "/admin/peers/nobody/quarantine", &[], "").await,
        404,
        "unknown_peer",
    );
    cluster.finish().await;
}

#[tokio::test]
async fn item_57_a_drain_ends_with_the_last_request_and_hand_off() {
    let cluster = Cluster::builder().decode(2).start().await;
    let gates = cluster.decode.iter().map(|d| d.faults().hold(Stage::BeforeHead, Leg::Decode));
    let gates: Vec<_> = gates.collect();
    let body = completion(PROMPT, 6);
    let drain = async {
        for gate in &gates {
            gate.arrived(1).await;
        }
        let early = act(&cluster, "decode-1", "drain?timeout=0.05").await;
        assert_eq!((&early["ended"], &early["in_flight"]), (&json!("timeout"), &json!(1)), "{early}");
        assert_eq!(early["handoffs"], 1, "a hand-off that was sent to it and not read yet");
        assert_eq!(early["peer"]["accepts"], false);
        let wait = act(&cluster, "decode-1", "drain?timeout=60");
        let finish = async {
            for gate in &gates {
                gate.release();
            }
        };
        tokio::join!(wait, finish).0
    };
    let (one, two, drained) =
        tokio::join!(cluster.post(COMPLETIONS, &body), cluster.post(COMPLETIONS, &body), drain);
    assert_eq!((one.status, two.status), (200, 200));
    assert_eq!((&drained["ended"], &drained["in_flight"]), (&json!("drained"), &json!(0)), "{drained}");
    assert_eq!(drained["handoffs"], 0);
    let seen = generations(&cluster.decode[0]).len();
    for _ in 0..4 {
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    }
    assert_eq!(generations(&cluster.decode[0]).len(), seen, "a drained peer gets nothing new");
    let condition = [("stage", "decode"), ("condition", "drained")];
    assert_eq!(cluster.metric("kvbaton_peers", &condition).await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn with_its_only_peer_drained_the_router_says_so_at_once() {
    let cluster = Cluster::builder().warns(&["no_prefill", "no_decode"]).start().await;
    let body = completion(PROMPT, 3);
    for (id, code) in [("decode-1", "no_decode"), ("prefill-1", "no_prefill")] {
        assert_eq!(act(&cluster, id, "drain").await["ended"], "drained");
        cluster.assert_error(&cluster.post(COMPLETIONS, &body).await, 503, code);
        assert_eq!(cluster.get("/readyz").await.status, 503);
        act(&cluster, id, "resume").await;
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    }
    for query in ["timeout=-1", "timeout=x", "timeout=86401", "limit=1"] {
        let path = format!("/admin/peers/decode-1/drain?{query}");
        cluster.assert_error(&cluster.send("POST", &path, &[], "").await, 400, "invalid_query");
    }
    assert_eq!(peer_of(&cluster, cluster.d()).await.unwrap()["drained"], false);
    cluster.finish().await;
}

#[tokio::test]
async fn a_drain_ends_when_the_peer_is_resumed() {
    let cluster = Cluster::builder().start().await;
    let gate = cluster.d().faults().hold(Stage::BeforeHead, Leg::Decode);
    let body = completion(PROMPT, 6);
    let resume = async {
        gate.arrived(1).await;
        let drain = act(&cluster, "decode-1", "drain?timeout=60");
        let resume = async {
            cluster
                .wait_for("it is drained", async || {
                    peer_of(&cluster, cluster.d()).await.unwrap()["drained"] == true
                })
                .await;
            act(&cluster, "decode-1", "resume").await
        };
        let (drained, _) = tokio::join!(drain, resume);
        assert_eq!((&drained["ended"], &drained["in_flight"]), (&json!("resumed"), &json!(1)), "{drained}");
        gate.release();
    };
    let (answer, ()) = tokio::join!(cluster.post(COMPLETIONS, &body), resume);
    assert_eq!(answer.status, 200);
    cluster.finish().await;
}

#[tokio::test]
async fn item_49_engines_that_are_not_ready_get_no_new_requests() {
    let cluster = Cluster::builder().engine(once).warns(&["no_prefill"]).start().await;
    let path = format!("/registry/v1/engines/{}/heartbeat", cluster.p().engine_id());
    let say = async |state: &str| {
        let body = json!({"state": state}).to_string();
        assert_eq!(cluster.send("POST", &path, &[JSON], body).await.status, 200);
        peer_of(&cluster, cluster.p()).await.unwrap()
    };
    for state in ["draining", "registering"] {
        let peer = say(state).await;
        assert_eq!((&peer["engine_state"], &peer["accepts"]), (&json!(state), &json!(false)));
        cluster.assert_error(&cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await, 503, "no_prefill");
    }
    assert_eq!(cluster.p().stats().prefill_requests, 0);
    assert_eq!(say("ready").await["accepts"], true);
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await.status, 200);
    cluster.finish().await;
}

/// Sends one request whose hand-off names this address.
async fn named(cluster: &Cluster, host: &str, port: u64) -> crate::support::Answer {
    let mut params = sound(cluster, Generation::V14);
    (params["remote_host"], params["remote_port"]) = (json!(host), json!(port));
    let fault = Fault::HandoffOverride { params };
    cluster.p().faults().arm(ArmedFault { fault, leg: Leg::Prefill, sticky: false });
    cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await
}

#[tokio::test]
async fn item_68_a_hand_off_that_names_anothers_address_is_sent_to_nobody() {
    let cluster = Cluster::builder().warns(&["hand-off names an address"]).start().await;
    let port = u64::from(cluster.p().addr().port());
    let other = u64::from(cluster.d().addr().port());
    for (host, port) in [("169.254.169.254", port), ("metadata.internal", port), ("127.0.0.1", other)] {
        let answer = named(&cluster, host, port).await;
        cluster.assert_error(&answer, 502, "bad_handoff");
    }
    assert_eq!(generations(cluster.d()).len(), 0, "not even a release");
    assert_eq!(cluster.metric("kvbaton_handoffs_total", &[("result", "refused")]).await, 3.0);
    cluster.finish().await;
}

#[tokio::test]
async fn what_is_not_checked_is_sent_on() {
    let off = |config: &mut Config| config.hand_off.address_check = AddressCheck::Off;
    let cluster =
        Cluster::builder().config(off).may_warn(&["could release", "an engine failed"]).start().await;
    named(&cluster, "192.0.2.1", 9).await;
    let told =
        generations(cluster.d()).iter().any(|seen| String::from_utf8_lossy(&seen.body).contains("192.0.2.1"));
    assert!(told);
    cluster.finish().await;
}
