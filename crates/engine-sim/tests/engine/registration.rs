//! What the engine tells the registry over its life.

use std::time::Duration;

use engine_sim::{EngineConfig, Generation, Role};
use serde_json::json;
use tokio_util::task::TaskTracker;

use crate::support::{Registry, Told, config, start};

fn quick(registry: &Registry) -> EngineConfig {
    EngineConfig {
        role: Role::Prefill,
        registry: Some(registry.url.clone()),
        registry_refresh: Duration::from_millis(10),
        ..config(Generation::V14)
    }
}

#[tokio::test]
async fn an_engine_says_what_it_is_and_gives_signs_of_life_with_its_clock() {
    let tracker = TaskTracker::new();
    let registry = Registry::start(&tracker).await;
    let engine = start(quick(&registry)).await;
    let told = registry.hears("a registration", |told| matches!(told, Told::Registration(_))).await;
    let Told::Registration(said) = told else { panic!("{told:?}") };
    let first_clock = said["clock"].as_f64().unwrap();
    let expected = json!({
        "base_url": engine.url(), "role": "prefill", "model": "sim", "dp_rank": 0, "vllm_version": "0.32.0",
        "state": "ready", "ttl_seconds": 5.0, "clock": first_clock,
        "tp_size": 1, "pp_size": 1, "dcp_size": 1, "transfer_mode": "pull", "kv_heads": 2, "is_mla": false,
        "permute_received": false, "hma_required": false, "host_buffer": false, "enforce_compat": true,
        "side_channel_host": "127.0.0.1", "side_channel_port": engine.addr().port(),
    });
    assert_eq!(said, expected);
    let told = registry.hears("a heartbeat", |told| matches!(told, Told::Heartbeat(_))).await;
    let Told::Heartbeat(said) = told else { panic!("{told:?}") };
    assert_eq!((&said["state"], &said["echo"]["router_clock"]), (&json!("ready"), &json!(0.5)));
    let (clock, received) = (said["clock"].as_f64().unwrap(), said["echo"]["received"].as_f64().unwrap());
    assert!(first_clock < received && received < clock, "{first_clock} {received} {clock}");
    engine.kill().await;
}

#[tokio::test]
async fn an_engine_that_is_not_known_any_more_registers_again() {
    let tracker = TaskTracker::new();
    let registry = Registry::start(&tracker).await;
    let engine = start(quick(&registry)).await;
    registry.knows(engine.engine_id()).await;
    registry.payloads.lock().clear();
    registry.told.lock().clear();
    registry.hears("a registration", |told| matches!(told, Told::Registration(_))).await;
    registry.knows(engine.engine_id()).await;
    engine.kill().await;
}

#[tokio::test]
async fn an_engine_that_shuts_down_leaves_and_one_that_is_killed_says_nothing() {
    let tracker = TaskTracker::new();
    let registry = Registry::start(&tracker).await;
    let engine = start(quick(&registry)).await;
    registry.knows(engine.engine_id()).await;
    engine.shutdown().await;
    assert_eq!(registry.told.lock().last(), Some(&Told::Departure));
    assert!(registry.payloads.lock().is_empty());
    registry.told.lock().clear();
    let engine = start(quick(&registry)).await;
    registry.knows(engine.engine_id()).await;
    engine.kill().await;
    assert!(!registry.told.lock().contains(&Told::Departure));
}
