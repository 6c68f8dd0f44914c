//! Hand-offs of engines that are bound to models: neither a release nor a warm-up asks a peer for a model
//! that is not its own; and whom releases ask in general.

use std::time::Duration;

use engine_sim::{ArmedFault, Engine, EngineConfig, Fault, Leg, Role};
use kvbaton::config::{Config, CredentialRole};
use serde_json::{Value, json};

use crate::support::{
    COMPLETIONS, Cluster, PROMPT, completion, credential, engine_config, generations, listen, parse,
};

const REFUSED: &str = "kvbaton/release-by-rejection";

/// Two credentials of engines, one of them for one model; configured peers are of the other.
fn teams(config: &mut Config) {
    config.admin.token = Some("ops".into());
    config.credentials = vec![
        credential("team", CredentialRole::Engine, &["theirs"]),
        credential("fleet", CredentialRole::Engine, &[]),
    ];
    for peer in config.prefill.iter_mut().chain(&mut config.decode) {
        peer.registered_by = Some("fleet".into());
    }
}

fn of_fleet(config: &mut EngineConfig) {
    config.registry_token = Some("fleet".into());
}

/// An engine that registers by itself, and so becomes a peer.
async fn engine(cluster: &Cluster, token: &str, role: Role, model: &str) -> Engine {
    let own = EngineConfig {
        role,
        model: model.to_owned(),
        registry_token: Some(token.to_owned()),
        ..engine_config(cluster.addr)
    };
    engine_sim::spawn(own, listen().await).await.unwrap()
}

/// A decode engine of the team that names no model and lists one of others.
async fn liar(cluster: &Cluster) -> Engine {
    let config = EngineConfig { role: Role::Decode, ..EngineConfig::default() };
    let engine = engine_sim::spawn(config, listen().await).await.unwrap();
    let body = json!({"base_url": engine.url(), "role": "decode"}).to_string();
    let headers = [("content-type", "application/json"), ("authorization", "Bearer team")];
    assert_eq!(cluster.send("PUT", "/registry/v1/engines/liar", &headers, body).await.status, 201);
    engine
}

async fn wait_open(cluster: &Cluster, count: usize) {
    cluster
        .wait_for("all engines are open peers", async || {
            let peers = cluster.get("/admin/peers").await.json()["peers"].as_array().unwrap().clone();
            peers.len() == count && peers.iter().all(|peer| peer["accepts"] == true)
        })
        .await;
}

async fn wait_stranded(cluster: &Cluster) {
    cluster
        .wait_for("nobody could release the hand-off", async || {
            let live = cluster.get("/admin/handoffs").await.json();
            live["handoffs"].as_array().unwrap().iter().any(|hand_off| hand_off["state"] == "stranded")
        })
        .await;
}

fn fails(engine: &Engine) {
    let body = json!({"error": {"message": "no", "type": "t", "param": null, "code": 500}});
    let fault = Fault::Refuse { status: 500, body };
    engine.faults().arm(ArmedFault { fault, leg: Leg::Any, sticky: true });
}

/// The models that an engine was asked for.
fn asked(engine: &Engine) -> Vec<Value> {
    generations(engine).iter().map(|seen| parse(&seen.body)["model"].clone()).collect()
}

#[tokio::test]
async fn a_hand_off_is_not_released_at_an_engine_that_is_bound_to_another_model() {
    let cluster = Cluster::builder().config(teams).engine(of_fleet).start().await;
    let liar = liar(&cluster).await;
    wait_open(&cluster, 3).await;
    fails(cluster.d());
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 500);
    wait_stranded(&cluster).await;
    assert!(cluster.p().stats().blocks_held > 0);
    assert_eq!(asked(&liar), Vec::<Value>::new());
    cluster.d().faults().clear();
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    assert_eq!((asked(&liar).len(), cluster.p().stats().kv_expired), (0, 0));
    liar.shutdown().await;
    cluster.finish_whatever_was_warned().await;
}

#[tokio::test]
async fn pairs_of_one_model_are_warmed_up_and_released_with_that_model() {
    let warm = |config: &mut Config| {
        teams(config);
        config.pairing.warm_up = true;
    };
    let cluster = Cluster::builder().prefill(0).decode(0).config(warm).unready().start().await;
    let liar = liar(&cluster).await;
    wait_open(&cluster, 1).await;
    let others = engine(&cluster, "fleet", Role::Prefill, "sim").await;
    wait_open(&cluster, 2).await;
    let p = engine(&cluster, "team", Role::Prefill, "theirs").await;
    wait_open(&cluster, 3).await;
    let d = engine(&cluster, "team", Role::Decode, "theirs").await;
    wait_open(&cluster, 4).await;
    assert_eq!((asked(&p), asked(&d)), (vec![json!("theirs")], vec![json!("theirs")]), "the pair is warm");

    let body = json!({"error": {"message": "no", "type": "t", "param": null, "code": 400}});
    let fault = Fault::Refuse { status: 400, body };
    d.faults().arm(ArmedFault { fault, leg: Leg::Decode, sticky: false });
    let mut body = completion(PROMPT, 6);
    body["model"] = json!("theirs");
    assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 400);
    cluster.wait_idle().await;
    cluster.wait_for("the blocks are free", async || p.stats().blocks_held == 0).await;
    assert_eq!(p.stats().kv_expired, 0);
    assert!(asked(&d).iter().all(|model| *model == "theirs" || *model == REFUSED), "{:?}", asked(&d));
    assert_eq!((asked(&liar).len(), asked(&others).len()), (0, 0), "they have no model in common");
    for engine in [liar, others, p, d] {
        engine.shutdown().await;
    }
    tokio::time::timeout(Duration::from_secs(60), cluster.finish_whatever_was_warned()).await.unwrap();
}

#[tokio::test]
async fn a_hand_off_is_not_released_at_an_engine_that_cannot_read_from_its_prefill_engine() {
    let cluster = Cluster::builder().start().await;
    let older = EngineConfig {
        role: Role::Decode,
        vllm_version: Some("0.31.0".to_owned()),
        ..engine_config(cluster.addr)
    };
    let unfit = engine_sim::spawn(older, listen().await).await.unwrap();
    wait_open(&cluster, 3).await;
    cluster
        .wait_for("both pairs are judged", async || {
            let pairs = cluster.get("/admin/compatibility").await.json();
            let used =
                |used: bool| pairs["pairs"].as_array().unwrap().iter().any(|pair| pair["used"] == used);
            used(true) && used(false)
        })
        .await;
    fails(cluster.d());
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 500);
    wait_stranded(&cluster).await;
    assert_eq!(asked(&unfit), Vec::<Value>::new());
    cluster.d().faults().clear();
    cluster.wait_no_blocks().await;
    assert_eq!((asked(&unfit).len(), cluster.p().stats().kv_expired), (0, 0));
    unfit.shutdown().await;
    cluster.finish_whatever_was_warned().await;
}

#[tokio::test]
async fn an_engine_that_comes_is_asked_to_release_what_nobody_could() {
    let cluster = Cluster::builder().start().await;
    fails(cluster.d());
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 500);
    wait_stranded(&cluster).await;
    let own = EngineConfig { role: Role::Decode, ..engine_config(cluster.addr) };
    let fresh = engine_sim::spawn(own, listen().await).await.unwrap();
    cluster.wait_for("the blocks are free", async || cluster.p().stats().blocks_held == 0).await;
    cluster.wait_idle().await;
    assert_eq!(cluster.p().stats().kv_expired, 0, "freed before the lease ended");
    assert_eq!(fresh.stats().kv_pulls, 1);
    fresh.shutdown().await;
    cluster.finish_whatever_was_warned().await;
}
