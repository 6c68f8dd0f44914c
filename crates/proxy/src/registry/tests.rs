use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::{AgentMetadataV2, AgentMetadataV14};

use super::*;

mod reading;

const AT: &str = "http://10.0.0.1:8000";

/// A payload of an engine's process; the mark tells one process from another.
fn payload(engine_id: &str, mark: u8) -> Bytes {
    let metadata = AgentMetadataV2 {
        engine_id: engine_id.to_owned(),
        agent_metadata: vec![mark],
        ..AgentMetadataV2::default()
    };
    let outer = NixlHandshakePayload {
        compatibility_hash: "h".to_owned(),
        agent_metadata_bytes: NixlAgentMetadata::V2(metadata).encode(),
    };
    outer.encode().into()
}

fn rank(engine_id: &str, tp_rank: u32, mark: u8) -> RankPayload {
    RankPayload { pp_rank: 0, tp_rank, payload: payload(engine_id, mark) }
}

fn engine(engine_id: &str) -> Registration {
    Registration {
        engine_id: engine_id.to_owned(),
        role: Some(EngineRole::Prefill),
        model: Some("m".to_owned()),
        ranks: Some(vec![rank(engine_id, 0, 1), rank(engine_id, 1, 1)]),
        ..Registration::default()
    }
}

fn engine_at(engine_id: &str, base_url: &str) -> Registration {
    Registration { base_url: Some(base_url.to_owned()), ..engine(engine_id) }
}

fn leased(engine_id: &str, ttl_seconds: f64) -> Registration {
    Registration { ttl_seconds: Some(ttl_seconds), ..engine(engine_id) }
}

fn registry() -> Registry {
    Registry::new(RegistryLimits::default())
}

fn small(change: impl FnOnce(&mut RegistryLimits)) -> Registry {
    let mut limits = RegistryLimits::default();
    change(&mut limits);
    Registry::new(limits)
}

fn ids(registry: &Registry) -> Vec<String> {
    registry.snapshot().engines.keys().cloned().collect()
}

/// What happened since a revision, as (kind, engine, generation).
fn story(registry: &Registry, since: u64) -> Vec<(&'static str, String, u64)> {
    let Changes::After(changes) = registry.changes_since(since) else { panic!("forgotten") };
    let about = |change: &RegistryChange| {
        (change.kind.label(), change.engine.about.engine_id.clone(), change.engine.about.generation)
    };
    changes.iter().map(|change| about(change)).collect()
}

fn beat(state: EngineState) -> Heartbeat {
    Heartbeat { state: Some(state), ..Heartbeat::default() }
}

// ---------------------------------------------------------------- registration

#[tokio::test]
async fn an_engine_registers_with_all_its_ranks_and_again_without_a_change() {
    let registry = registry();
    let start = registry.snapshot().revision;
    let receipt = registry.register(engine_at("a", AT)).unwrap();
    assert_eq!((receipt.created, receipt.generation, receipt.ttl), (true, 1, None));
    assert_eq!(receipt.revision, start + 1);
    let again = registry.register(engine_at("a", "HTTP://10.0.0.1:8000/")).unwrap();
    assert_eq!((again.created, again.generation, again.revision), (false, 1, start + 1));
    let snapshot = registry.snapshot();
    assert_eq!(snapshot.revision, start + 1);
    let record = &snapshot.engines["a"];
    assert_eq!(record.base_url.as_deref(), Some(AT));
    assert_eq!(record.ranks.keys().copied().collect::<Vec<_>>(), [(0, 0), (0, 1)]);
    assert_eq!(record.connector(), Some(kv_connector::protocol::Generation::V2));
    assert_eq!(record.compatibility_hash(), Some("h"));
    assert_eq!(registry.get("a", 0, 1).unwrap().payload, payload("a", 1));
    assert_eq!(story(&registry, start), [("registered", "a".to_owned(), 1)]);
}

#[tokio::test]
async fn a_later_registration_replaces_the_ranks_unless_it_names_none() {
    let registry = registry();
    registry.register(engine("a")).unwrap();
    let renamed = Registration { model: Some("n".to_owned()), ranks: None, ..engine("a") };
    registry.register(renamed).unwrap();
    assert_eq!(registry.engine("a").unwrap().ranks.len(), 2);
    assert_eq!(registry.engine("a").unwrap().model.as_deref(), Some("n"));
    let one = Registration { ranks: Some(vec![rank("a", 1, 1)]), ..engine("a") };
    assert_eq!(registry.register(one).unwrap().generation, 1);
    assert!(registry.get("a", 0, 0).is_none());
    assert!(registry.get("a", 0, 1).is_some());
}

#[tokio::test]
async fn ranks_may_come_one_by_one_before_or_after_the_engine() {
    let registry = registry();
    assert_eq!(registry.put("a", 0, 0, payload("a", 1)), Ok(Registered::Created));
    let record = registry.engine("a").unwrap();
    assert_eq!((record.state, record.ttl, record.generation), (EngineState::Ready, None, 1));
    assert_eq!(registry.put("a", 0, 0, payload("a", 1)), Ok(Registered::Unchanged));
    registry.register(Registration { ranks: None, state: EngineState::Registering, ..engine("a") }).unwrap();
    assert_eq!(registry.put("a", 0, 1, payload("a", 1)), Ok(Registered::Created));
    let record = registry.engine("a").unwrap();
    assert_eq!(
        (record.state, record.ranks.len(), record.role),
        (EngineState::Registering, 2, Some(EngineRole::Prefill))
    );
    registry.heartbeat("a", &beat(EngineState::Ready)).unwrap();
    assert_eq!(registry.look_up("a", 0, 1).unwrap().rank.payload, payload("a", 1));
}

#[tokio::test]
async fn what_cannot_be_used_is_refused_and_changes_nothing() {
    let registry = small(|limits| {
        (limits.payload_bytes, limits.ranks, limits.name_bytes) = (1000, 2, 64);
    });
    registry.register(engine("a")).unwrap();
    let before = registry.snapshot().revision;
    let field = |registration: Registration| match registry.register(registration) {
        Err(RegistryError::Invalid { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(field(engine_at("a", "tcp://x")), "base_url");
    assert_eq!(field(leased("a", 0.0)), "ttl_seconds");
    assert_eq!(field(leased("a", f64::NAN)), "ttl_seconds");
    assert_eq!(field(leased("a", 1e9)), "ttl_seconds");
    assert_eq!(field(Registration { clock: Some(f64::INFINITY), ..engine("a") }), "clock");
    assert_eq!(field(Registration { model: Some("m".repeat(65)), ..engine("a") }), "model");
    assert_eq!(field(Registration { engine_id: String::new(), ranks: None, ..engine("a") }), "engine_id");
    let twice = vec![rank("a", 0, 1), rank("a", 0, 1)];
    assert_eq!(field(Registration { ranks: Some(twice), ..engine("a") }), "ranks");
    let other = Registration { ranks: Some(vec![rank("b", 0, 1)]), ..engine("a") };
    assert_eq!(registry.register(other), Err(RegistryError::EngineMismatch { found: "b".to_owned() }));
    let many = (0..3).map(|tp_rank| rank("a", tp_rank, 1)).collect();
    assert_eq!(
        registry.register(Registration { ranks: Some(many), ..engine("a") }),
        Err(RegistryError::Full)
    );
    assert_eq!(registry.put("a", 0, 2, payload("a", 1)), Err(RegistryError::Full));
    let big = RankPayload { payload: Bytes::from(vec![0; 1001]), ..rank("a", 0, 1) };
    let big = Registration { ranks: Some(vec![big]), ..engine("a") };
    assert_eq!(registry.register(big), Err(RegistryError::TooLarge { limit: 1000 }));
    assert_eq!(registry.snapshot().revision, before);
}

#[tokio::test]
async fn room_is_bounded_by_engines_and_bytes_and_comes_back() {
    let bytes = payload("a", 1).len();
    let registry = small(|limits| (limits.engines, limits.total_bytes) = (2, 5 * bytes));
    registry.register(engine_at("a", AT)).unwrap();
    registry.register(engine("b")).unwrap();
    assert_eq!(registry.register(engine("c")), Err(RegistryError::Full));
    assert_eq!(registry.put("c", 0, 0, payload("c", 1)), Err(RegistryError::Full));
    // Whose address it takes makes room.
    registry.register(engine_at("c", AT)).unwrap();
    assert_eq!(ids(&registry), ["b", "c"]);
    registry.put("b", 0, 2, payload("b", 1)).unwrap();
    assert_eq!(registry.put("b", 0, 3, payload("b", 1)), Err(RegistryError::Full));
    assert!(registry.remove("c"));
    registry.put("b", 0, 3, payload("b", 1)).unwrap();
}

// ---------------------------------------------------------------- generations

#[tokio::test]
async fn a_new_engine_at_a_known_address_is_its_next_generation() {
    let registry = registry();
    let start = registry.snapshot().revision;
    registry.register(engine_at("old", AT)).unwrap();
    let receipt = registry.register(engine_at("new", "http://10.0.0.1:8000/")).unwrap();
    assert_eq!((receipt.created, receipt.generation), (true, 2));
    assert_eq!(ids(&registry), ["new"]);
    assert!(registry.get("old", 0, 0).is_none());
    let at: Vec<_> = registry.engines_at(AT).iter().map(|engine| engine.engine_id.clone()).collect();
    assert_eq!(at, ["new"]);
    let told = [
        ("registered", "old".to_owned(), 1),
        ("replaced", "old".to_owned(), 1),
        ("registered", "new".to_owned(), 2),
    ];
    assert_eq!(story(&registry, start), told);
    let Changes::After(changes) = registry.changes_since(start + 1) else { panic!("forgotten") };
    assert_eq!(changes[0].replaced_by.as_deref(), Some("new"));
}

#[tokio::test]
async fn engines_of_one_address_with_different_dp_ranks_live_together() {
    let registry = registry();
    registry.register(engine_at("a", AT)).unwrap();
    registry.register(Registration { dp_rank: 1, ..engine_at("b", AT) }).unwrap();
    registry.register(engine_at("elsewhere", "http://10.0.0.1:80001")).unwrap_err();
    registry.register(engine_at("elsewhere", "http://10.0.0.1:8001")).unwrap();
    let at: Vec<_> = registry.engines_at(AT).iter().map(|engine| engine.engine_id.clone()).collect();
    assert_eq!(at, ["a", "b"]);
    assert_eq!(registry.engine("b").unwrap().generation, 1);
}

#[tokio::test]
async fn lives_at_an_address_are_counted_on_after_it_was_empty() {
    let registry = registry();
    registry.register(engine_at("a", AT)).unwrap();
    registry.remove("a");
    assert!(registry.engines_at(AT).is_empty());
    assert_eq!(registry.register(engine_at("b", AT)).unwrap().generation, 2);
    // The same engine somewhere else is another life there.
    assert_eq!(registry.register(engine_at("b", "http://10.0.0.2:1")).unwrap().generation, 1);
    assert!(registry.engines_at(AT).is_empty());
}

#[tokio::test]
async fn another_payload_of_a_known_rank_is_another_process() {
    let registry = registry();
    registry.register(Registration { clock: Some(100.0), ..engine_at("a", AT) }).unwrap();
    let clock = |registry: &Registry| registry.clock(&registry.engine("a").unwrap());
    assert!(clock(&registry).is_some());
    let restarted = Registration { ranks: Some(vec![rank("a", 0, 2)]), ..engine_at("a", AT) };
    let receipt = registry.register(restarted).unwrap();
    assert_eq!((receipt.created, receipt.generation), (false, 2));
    assert_eq!(clock(&registry), None);
    assert_eq!(registry.put("a", 0, 0, payload("a", 3)), Ok(Registered::Replaced));
    assert_eq!(registry.engine("a").unwrap().generation, 3);
    assert_eq!(registry.put("a", 0, 1, payload("a", 3)), Ok(Registered::Created));
    assert_eq!(registry.engine("a").unwrap().generation, 3);
}

#[tokio::test]
async fn places_that_are_empty_are_forgotten_before_those_that_are_taken() {
    let registry = small(|limits| limits.engines = 2);
    registry.register(engine_at("held", AT)).unwrap();
    for number in 0..20 {
        registry.register(engine_at("passing", &format!("http://10.0.1.{number}:1"))).unwrap();
        registry.remove("passing");
    }
    assert_eq!(registry.register(engine_at("next", AT)).unwrap().generation, 2);
    assert_eq!(registry.register(engine_at("passing", "http://10.0.1.19:1")).unwrap().generation, 2);
    assert_eq!(registry.register(engine_at("passing", "http://10.0.1.0:1")).unwrap().generation, 1);
}

// ---------------------------------------------------------------- leases

#[tokio::test(start_paused = true)]
async fn a_silent_engine_leaves_and_one_that_beats_stays() {
    let registry = registry();
    let start = registry.snapshot().revision;
    registry.register(leased("silent", 3.0)).unwrap();
    registry.register(leased("beating", 3.0)).unwrap();
    registry.register(engine("unleased")).unwrap();
    for _ in 0..4 {
        tokio::time::advance(Duration::from_millis(700)).await;
        registry.heartbeat("beating", &Heartbeat::default()).unwrap();
    }
    assert!(registry.look_up("silent", 0, 0).is_ok());
    tokio::time::advance(Duration::from_millis(200)).await;
    // Each way of reading, without the task that sweeps.
    assert_eq!(registry.look_up("silent", 0, 0).unwrap_err(), Missing::Unknown);
    assert!(registry.get("silent", 0, 0).is_none());
    assert_eq!(ids(&registry), ["beating", "unleased"]);
    let unknown = RegistryError::UnknownEngine { engine_id: "silent".to_owned() };
    assert_eq!(registry.heartbeat("silent", &Heartbeat::default()), Err(unknown));
    assert_eq!(story(&registry, start + 3), [("expired", "silent".to_owned(), 1)]);
    let receipt = registry.register(leased("silent", 3.0)).unwrap();
    assert_eq!((receipt.created, receipt.generation), (true, 2));
}

#[tokio::test(start_paused = true)]
async fn an_expiry_is_told_on_time_though_nobody_reads() {
    let registry = registry();
    let stop = CancellationToken::new();
    let task = tokio_util::task::TaskTracker::new().spawn(registry.clone().expire_until(stop.clone()));
    registry.register(leased("long", 100.0)).unwrap();
    registry.register(leased("short", 2.0)).unwrap();
    let mut revision = registry.subscribe();
    let start = Instant::now();
    revision.changed().await.unwrap();
    let waited = start.elapsed();
    assert!((Duration::from_secs(2)..Duration::from_millis(2010)).contains(&waited), "{waited:?}");
    assert_eq!(ids(&registry), ["long"]);
    stop.cancel();
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_address_whose_engine_is_silent_is_free_without_a_replacement() {
    let registry = registry();
    let start = registry.snapshot().revision;
    registry.register(Registration { ttl_seconds: Some(1.0), ..engine_at("a", AT) }).unwrap();
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(registry.register(engine_at("b", AT)).unwrap().generation, 2);
    let told = [
        ("registered", "a".to_owned(), 1),
        ("expired", "a".to_owned(), 1),
        ("registered", "b".to_owned(), 2),
    ];
    assert_eq!(story(&registry, start), told);
}

#[tokio::test]
async fn a_heartbeat_changes_the_state_and_nothing_else() {
    let registry = registry();
    let first = registry.register(engine("a")).unwrap();
    let same = registry.heartbeat("a", &beat(EngineState::Ready)).unwrap();
    assert_eq!(same.revision, first.revision);
    let draining = registry.heartbeat("a", &beat(EngineState::Draining)).unwrap();
    assert_eq!((draining.revision, draining.generation), (first.revision + 1, 1));
    assert_eq!(registry.engine("a").unwrap().state, EngineState::Draining);
    assert_eq!(story(&registry, first.revision), [("updated", "a".to_owned(), 1)]);
    let bad = Heartbeat { clock: Some(f64::NAN), ..Heartbeat::default() };
    assert!(matches!(registry.heartbeat("a", &bad), Err(RegistryError::Invalid { field: "clock", .. })));
}

#[tokio::test(start_paused = true)]
async fn heartbeats_tell_the_engines_clock() {
    let registry = registry();
    tokio::time::advance(Duration::from_secs(5)).await;
    // The engine's clock is 1000 s ahead.
    let first = registry.register(Registration { clock: Some(1005.0), ..engine("a") }).unwrap();
    assert_eq!(first.router_clock, 5.0);
    let reading = || registry.clock(&registry.engine("a").unwrap()).unwrap();
    assert_eq!(reading().error, None);
    let received = Echo { router_clock: first.router_clock, received: 1005.0 };
    tokio::time::advance(Duration::from_secs(2)).await;
    let beat = Heartbeat { clock: Some(1007.0), echo: Some(received), state: None };
    registry.heartbeat("a", &beat).unwrap();
    tokio::time::advance(Duration::from_secs(1)).await;
    let ClockReading { seconds, error: Some(error) } = reading() else { panic!("no error") };
    assert!((seconds - 1008.0).abs() <= error, "{seconds}");
    assert!(error < 1e-3, "{error}");
}

#[tokio::test]
async fn a_snapshot_is_the_same_until_something_changes() {
    let registry = registry();
    registry.register(leased("a", 100.0)).unwrap();
    let first = registry.snapshot();
    registry.heartbeat("a", &Heartbeat::default()).unwrap();
    assert!(Arc::ptr_eq(&first, &registry.snapshot()));
    registry.register(engine("b")).unwrap();
    let second = registry.snapshot();
    assert_eq!((first.engines.len(), second.engines.len()), (1, 2));
    assert!(Arc::ptr_eq(&first.engines["a"], &second.engines["a"]));
}

#[tokio::test]
async fn shown_is_what_an_engine_said_and_no_payload() {
    let registry = registry();
    let v14 = AgentMetadataV14 { engine_id: "a".to_owned(), ..AgentMetadataV14::default() };
    let outer = NixlHandshakePayload {
        compatibility_hash: "h".to_owned(),
        agent_metadata_bytes: NixlAgentMetadata::V14(Box::new(v14)).encode(),
    };
    let ranks = vec![RankPayload { pp_rank: 0, tp_rank: 0, payload: outer.encode().into() }];
    let registration = Registration {
        ranks: Some(ranks),
        ttl_seconds: Some(30.0),
        vllm_version: Some("0.32.0".to_owned()),
        ..engine_at("a", AT)
    };
    let receipt = registry.register(registration).unwrap();
    let summary = serde_json::to_value(registry.engine("a").unwrap().summary()).unwrap();
    let registered_at = summary["registered_at"].clone();
    let expected = serde_json::json!({
        "engine_id": "a", "base_url": AT, "role": "prefill", "model": "m", "dp_rank": 0,
        "vllm_version": "0.32.0", "state": "ready", "generation": 1, "revision": receipt.revision,
        "registered_at": registered_at, "ttl_seconds": 30.0, "connector_version": 14,
        "compatibility_hash": "h", "ranks": [{"pp_rank": 0, "tp_rank": 0}],
    });
    assert_eq!(summary, expected);
}
