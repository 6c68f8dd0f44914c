use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::{AgentMetadataV2, NixlAgentMetadata};

use super::super::{Changes, EngineState, RankPayload, RegistryLimits};
use super::*;

fn payload(engine_id: &str, mark: u8) -> Bytes {
    let metadata = AgentMetadataV2 {
        engine_id: engine_id.to_owned(),
        agent_metadata: vec![mark],
        ..AgentMetadataV2::default()
    };
    let agent_metadata_bytes = NixlAgentMetadata::V2(metadata).encode();
    NixlHandshakePayload { compatibility_hash: "h".to_owned(), agent_metadata_bytes }.encode().into()
}

fn registration(engine_id: &str, host: u8) -> Registration {
    Registration {
        engine_id: engine_id.to_owned(),
        base_url: Some(format!("http://10.0.0.{host}:1")),
        ttl_seconds: Some(8.0),
        ranks: Some(vec![RankPayload { pp_rank: 0, tp_rank: 0, payload: payload(engine_id, 1) }]),
        ..Registration::default()
    }
}

fn registry() -> Registry {
    let registry = Registry::new(RegistryLimits::default());
    registry.follow_store();
    registry
}

/// As a store that takes everything.
fn make_true(registry: &Registry, plan: Plan, revision: i64) {
    registry.store_put(StoredEngine { record: plan.record, revision, lease: 7 });
}

fn ids(registry: &Registry) -> Vec<String> {
    registry.snapshot().engines.keys().cloned().collect()
}

fn kinds(registry: &Registry, since: u64) -> Vec<(&'static str, u64)> {
    let Changes::After(changes) = registry.changes_since(since) else { panic!("forgotten") };
    changes.iter().map(|change| (change.kind.label(), change.revision)).collect()
}

#[tokio::test]
async fn a_plan_changes_nothing_until_the_store_says_so() {
    let registry = registry();
    let plan = registry.plan_registration(registration("a", 1)).unwrap();
    assert!(!plan.is_done() && plan.stored.is_none() && plan.holder.is_none());
    assert_eq!((ids(&registry).len(), registry.revision()), (0, 0));
    make_true(&registry, plan, 5);
    assert_eq!(registry.revision(), 5 * 256 + 255);
    let again = registry.plan_registration(registration("a", 1)).unwrap();
    assert!(again.is_done() && again.same_life());
    assert_eq!(again.stored.map(|stored| (stored.revision, stored.lease)), Some((5, 7)));
    // The same once more is no change.
    make_true(&registry, again, 6);
    assert_eq!(kinds(&registry, 0), [("registered", 5 * 256 + 255)]);
    let beat = Heartbeat { state: Some(EngineState::Draining), ..Heartbeat::default() };
    let plan = registry.plan_heartbeat("a", &beat).unwrap();
    assert!(plan.changes_state() && !plan.is_done());
    assert_eq!(plan.stored.map(|stored| stored.revision), Some(6));
}

#[tokio::test]
async fn who_lives_elsewhere_keeps_its_id_and_who_is_at_an_address_is_named() {
    let registry = registry();
    let plan = registry.plan_registration(registration("a", 1)).unwrap();
    make_true(&registry, plan.clone(), 5);
    let taken = registry.plan_registration(registration("a", 2)).unwrap_err();
    assert_eq!(taken, RegistryError::EngineIdTaken { engine_id: "a".to_owned() });
    let other = registry.plan_registration(registration("b", 1)).unwrap();
    assert_eq!((other.holder.as_deref(), other.record.generation), (Some("a"), 2));
    assert_eq!(other.lost_since(&other), None);
    let earlier = Plan { holder: None, ..other.clone() };
    assert_eq!(other.lost_since(&earlier), Some(RegistryError::AddressTaken { holder: "a".to_owned() }));
    registry.store_delete("a", ChangeKind::Replaced, Some("b".to_owned()), (6, 0));
    make_true(&registry, other, 6);
    let expected = [("registered", 5 * 256 + 255), ("replaced", 6 * 256), ("registered", 6 * 256 + 255)];
    assert_eq!(kinds(&registry, 0), expected);
    let again = registry.plan_registration(registration("a", 1)).unwrap();
    assert_eq!((again.record.generation, again.same_life()), (3, false));
}

#[tokio::test(start_paused = true)]
async fn the_stores_engines_do_not_run_out_of_time_here_unless_it_lost_them() {
    let registry = registry();
    let plan = registry.plan_registration(registration("a", 1)).unwrap();
    make_true(&registry, plan, 5);
    registry.acknowledge(&registry.plan_heartbeat("a", &Heartbeat::default()).unwrap(), None, None);
    tokio::time::advance(Duration::from_secs(100)).await;
    assert_eq!(ids(&registry), ["a"]);
    registry.doubt("a", 9);
    tokio::time::advance(Duration::from_secs(7)).await;
    let plan = registry.plan_heartbeat("a", &Heartbeat::default()).unwrap();
    assert!(plan.stored.is_none() && !plan.is_done() && plan.same_life());
    registry.acknowledge(&plan, None, None);
    tokio::time::advance(Duration::from_secs(7)).await;
    assert_eq!(ids(&registry), ["a"], "its sign of life gave it time");
    make_true(&registry, plan, 11);
    tokio::time::advance(Duration::from_secs(100)).await;
    assert_eq!(ids(&registry), ["a"], "the store has it again");
    registry.doubt("a", 12);
    tokio::time::advance(Duration::from_secs(9)).await;
    assert_eq!(ids(&registry), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_listing_replaces_what_the_store_had_and_leaves_what_only_this_router_knows() {
    let registry = registry();
    registry.register(Registration { ttl_seconds: None, ..registration("own", 9) }).unwrap();
    for (id, host, revision) in [("a", 1, 5), ("b", 2, 6)] {
        let plan = registry.plan_registration(registration(id, host)).unwrap();
        make_true(&registry, plan, revision);
    }
    let c = registry.plan_registration(registration("c", 3)).unwrap().record;
    let b = registry.plan_registration(registration("b", 2)).unwrap().record;
    let stored = |record, revision| StoredEngine { record, revision, lease: 7 };
    registry.store_reset(vec![stored(c, 8), stored(b, 6)], 20);
    assert_eq!(registry.revision(), 20 * 256 + 255);
    assert!(matches!(registry.changes_since(6 * 256 + 255), Changes::Forgotten(_)));
    assert_eq!(ids(&registry), ["a", "b", "c", "own"], "the time of one that is missing is not out yet");
    tokio::time::advance(Duration::from_secs(9)).await;
    assert_eq!(ids(&registry), ["b", "c", "own"]);
    assert_eq!(kinds(&registry, 20 * 256 + 255), [("expired", 20 * 256 + 256)]);
}

#[tokio::test(start_paused = true)]
async fn leases_are_renewed_often_enough_and_no_oftener() {
    let registry = registry();
    let plan = registry.plan_registration(registration("a", 1)).unwrap();
    make_true(&registry, plan, 5);
    let engine = registry.engine("a").unwrap();
    assert_eq!(registry.lease_to_renew(&engine), Some(7));
    let mut renewals = 0;
    for _second in 0..20 {
        tokio::time::advance(Duration::from_secs(1)).await;
        renewals += usize::from(registry.lease_to_renew(&engine).is_some());
    }
    assert_eq!(renewals, 10, "every quarter of 8 s");
    assert_eq!(lease_seconds(Duration::from_secs(8)), 10);
    assert_eq!(lease_seconds(Duration::from_millis(100)), 1);
}

#[tokio::test(start_paused = true)]
async fn a_told_clock_is_answered_within_its_error_and_only_for_the_same_life() {
    let registry = registry();
    let plan = registry.plan_registration(registration("a", 1)).unwrap();
    make_true(&registry, plan, 5);
    let told = SharedReading { seconds: 1000.0, error: 1.25 };
    registry.take_clock("a", 2, told, || 10.0);
    let engine = registry.engine("a").unwrap();
    assert_eq!(registry.clock(&engine), None);
    registry.take_clock("a", 1, told, || 10.0);
    tokio::time::advance(Duration::from_secs(5)).await;
    let clock = registry.clock(&engine).unwrap();
    assert!((clock.seconds - 1015.0).abs() < 0.01, "{clock:?}");
    assert!((1.25..1.27).contains(&clock.error.unwrap()), "{clock:?}");
    // What the engine says itself narrows it from below.
    registry.acknowledge(&registry.plan_heartbeat("a", &Heartbeat::default()).unwrap(), Some(1015.5), None);
    let clock = registry.clock(&engine).unwrap();
    assert!(clock.seconds - clock.error.unwrap() > 1015.49, "{clock:?}");
    // And counts for more where both cannot be true.
    registry.acknowledge(&registry.plan_heartbeat("a", &Heartbeat::default()).unwrap(), Some(2000.0), None);
    let clock = registry.clock(&engine).unwrap();
    assert_eq!(clock.error, None, "{clock:?}");
    assert!(clock.seconds > 1999.9, "{clock:?}");
}
