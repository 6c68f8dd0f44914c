//! Routers that come back, and an etcd that goes away: what was known is used on, and what was
//! missed is caught up with.

use std::time::Duration;

use engine_sim::EngineConfig;
use serde_json::{Value, json};

use super::routers::{Engines, Routers, spawn_pair};
use crate::support::{COMPLETIONS, PROMPT, completion, single_text};

const AWAY: &str = "the store cannot be followed";
const REFUSED: &str = "store_unavailable";

fn path(engine_id: &str) -> String {
    format!("/registry/v1/engines/{engine_id}")
}

async fn register(routers: &Routers, router: usize, engine_id: &str) -> u16 {
    routers.send(router, "PUT", &path(engine_id), &json!({"ttl_seconds": 60, "model": "m"})).await.status
}

/// Longer than the leases of the engines below.
const LONGER: Duration = Duration::from_secs(6);

fn short_leases(config: &mut EngineConfig) {
    config.registry_ttl = Some(Duration::from_secs(3));
}

async fn serves(routers: &Routers, expected: &str) {
    let body = completion(PROMPT, 6);
    for router in 0..3 {
        assert_eq!(routers.send(router, "POST", COMPLETIONS, &body).await.generated(), expected);
    }
}

#[tokio::test]
async fn a_router_that_is_ended_and_started_loses_nothing() {
    let Some(mut routers) = Routers::start(Engines::Used, &[]).await else { return };
    let rarely = |config: &mut EngineConfig| {
        (config.registry_refresh, config.registry_ttl) =
            (Duration::from_secs(600), Some(Duration::from_secs(1800)));
    };
    // They speak to the registry once and then not for ten minutes: whatever a router that starts
    // anew knows of them it has from etcd.
    let engines = spawn_pair(routers.addrs[0], rarely).await;
    for engine in &engines {
        routers.all_know(engine.engine_id(), true).await;
    }
    let before = routers.engine(2, engines[0].engine_id()).await.json();
    routers.stop(2).await;
    assert_eq!(register(&routers, 1, "meanwhile").await, 201);
    routers.restart(2).await;
    routers.wait_up(2, true).await;
    let after = routers.engine(2, engines[0].engine_id()).await.json();
    for field in ["revision", "generation", "registered_at", "ranks", "ttl_seconds"] {
        assert_eq!(after[field], before[field], "{field}");
    }
    routers.all_know("meanwhile", true).await;
    routers.all("a pair is known", async |router| routers.get(router, "/readyz").await.status == 200).await;
    serves(&routers, &single_text(COMPLETIONS, &completion(PROMPT, 6)).await).await;
    routers.finish(engines).await;
}

#[tokio::test]
async fn without_etcd_routers_serve_on_and_catch_up_when_it_is_back() {
    let Some(mut routers) = Routers::start(Engines::Used, &[AWAY, REFUSED]).await else {
        return;
    };
    let engines = spawn_pair(routers.addrs[0], short_leases).await;
    routers.all("a pair is known", async |router| routers.get(router, "/readyz").await.status == 200).await;
    let expected = single_text(COMPLETIONS, &completion(PROMPT, 6)).await;

    routers.etcd.kill();
    for router in 0..3 {
        routers.wait_up(router, false).await;
    }
    // Longer than the engines' leases.
    tokio::time::sleep(LONGER).await;
    serves(&routers, &expected).await;
    for router in 0..3 {
        let ready = routers.get(router, "/readyz").await;
        assert_eq!((ready.status, &ready.json()["store"]["up"]), (200, &json!(false)));
        assert!(ready.json()["store"]["age_seconds"].as_f64().unwrap() > 2.0);
        let metrics = routers.get(router, "/metrics").await.text();
        assert!(metrics.contains("\nkvbaton_store_up 0\n"), "{metrics}");
        assert!(metrics.contains("\nkvbaton_store_age_seconds "), "{metrics}");
    }
    let refused = routers.send(1, "PUT", &path("new"), &json!({"ttl_seconds": 60})).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, "1"));
    assert_eq!(refused.json()["error"]["code"], REFUSED);
    let id = engines[0].engine_id();
    let beat = format!("{}/heartbeat", path(id));
    assert_eq!(routers.send(0, "POST", &beat, &json!({})).await.status, 200);
    assert_eq!(routers.send(0, "POST", &beat, &json!({"state": "draining"})).await.status, 503);
    assert_eq!(routers.send(0, "DELETE", &path(id), &Value::Null).await.status, 503);

    routers.etcd.launch().await;
    for router in 0..3 {
        routers.wait_up(router, true).await;
    }
    assert_eq!(register(&routers, 1, "new").await, 201);
    routers.all_know("new", true).await;
    serves(&routers, &expected).await;
    // Beyond the leases again: they are renewed as before.
    tokio::time::sleep(LONGER).await;
    serves(&routers, &expected).await;
    routers.finish(engines).await;
}

#[tokio::test]
async fn a_router_cut_off_during_a_compaction_lists_anew() {
    let Some(routers) = Routers::start(Engines::Known, &[AWAY]).await else { return };
    assert_eq!(register(&routers, 0, "goes").await, 201);
    assert_eq!(register(&routers, 0, "stays").await, 201);
    routers.all_know("stays", true).await;
    routers.gates[2].cut();
    routers.wait_up(2, false).await;
    assert_eq!(routers.send(0, "DELETE", &path("goes"), &Value::Null).await.status, 204);
    assert_eq!(register(&routers, 1, "comes").await, 201);
    routers.etcd.compact().await;
    assert_eq!(routers.engine(2, "goes").await.status, 200);
    assert_eq!(routers.engine(2, "comes").await.status, 404);
    routers.gates[2].mend();
    routers.wait_up(2, true).await;
    routers.all_know("comes", true).await;
    routers.all_know("stays", true).await;
    // And follows from there.
    assert_eq!(register(&routers, 0, "later").await, 201);
    routers.all_know("later", true).await;
    routers.finish(Vec::new()).await;
}

#[tokio::test]
async fn leases_that_nobody_could_renew_cost_no_engine_its_place() {
    let Some(routers) = Routers::start(Engines::Used, &[AWAY]).await else { return };
    let engines = spawn_pair(routers.addrs[0], short_leases).await;
    routers.all("a pair is known", async |router| routers.get(router, "/readyz").await.status == 200).await;
    let expected = single_text(COMPLETIONS, &completion(PROMPT, 6)).await;
    for gate in &routers.gates {
        gate.cut();
    }
    for router in 0..3 {
        routers.wait_up(router, false).await;
    }
    // etcd lets the engines go, since it hears nothing of them.
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !routers.etcd.engines_keys().await.is_empty() {
        assert!(std::time::Instant::now() < end, "the leases do not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    serves(&routers, &expected).await;
    for gate in &routers.gates {
        gate.mend();
    }
    for router in 0..3 {
        routers.wait_up(router, true).await;
    }
    serves(&routers, &expected).await;
    tokio::time::sleep(LONGER).await;
    serves(&routers, &expected).await;
    assert!(!routers.etcd.engines_keys().await.is_empty(), "they are back in etcd");
    routers.finish(engines).await;
}

#[tokio::test]
async fn an_etcd_that_lost_everything_learns_it_from_the_engines() {
    let Some(mut routers) = Routers::start(Engines::Used, &[AWAY]).await else { return };
    let engines = spawn_pair(routers.balancer.address(), |_| {}).await;
    routers.all("a pair is known", async |router| routers.get(router, "/readyz").await.status == 200).await;
    let expected = single_text(COMPLETIONS, &completion(PROMPT, 6)).await;
    routers.etcd.kill();
    routers.etcd.wipe();
    routers.etcd.launch().await;
    for router in 0..3 {
        routers.wait_up(router, true).await;
    }
    serves(&routers, &expected).await;
    // Longer than what the engines are kept without a sign of life.
    tokio::time::sleep(Duration::from_secs(8)).await;
    serves(&routers, &expected).await;
    routers.finish(engines).await;
}

#[tokio::test]
async fn a_router_starts_without_etcd_and_finds_it_later() {
    let Some(mut routers) = Routers::start(Engines::Known, &[AWAY, REFUSED]).await else {
        return;
    };
    assert_eq!(register(&routers, 0, "known").await, 201);
    routers.stop(1).await;
    routers.gates[1].cut();
    routers.restart(1).await;
    assert_eq!(routers.store(1).await, json!({"kind": "etcd", "up": false, "age_seconds": null}));
    assert_eq!(routers.engine(1, "known").await.status, 404);
    assert_eq!(register(&routers, 1, "other").await, 503);
    routers.gates[1].mend();
    routers.all_know("known", true).await;
    assert_eq!(register(&routers, 1, "other").await, 201);
    routers.finish(Vec::new()).await;
}
