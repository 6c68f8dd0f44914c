//! Whatever engines do, whoever follows the changes knows what the registry knows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::{AgentMetadataV2, NixlAgentMetadata};
use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Act {
    Register { engine: u8, address: Option<u8>, mark: u8, ttl: Option<u8> },
    PutRank { engine: u8, mark: u8 },
    Beat { engine: u8, draining: bool },
    Remove { engine: u8 },
    Wait { seconds: u8 },
}

fn act() -> impl Strategy<Value = Act> {
    let engine = || 0..5_u8;
    let (address, ttl) = (prop::option::of(0..3_u8), prop::option::of(1..9_u8));
    prop_oneof![
        4 => (engine(), address, 0..2_u8, ttl)
            .prop_map(|(engine, address, mark, ttl)| Act::Register { engine, address, mark, ttl }),
        2 => (engine(), 0..2_u8).prop_map(|(engine, mark)| Act::PutRank { engine, mark }),
        3 => (engine(), any::<bool>()).prop_map(|(engine, draining)| Act::Beat { engine, draining }),
        1 => engine().prop_map(|engine| Act::Remove { engine }),
        2 => (0..6_u8).prop_map(|seconds| Act::Wait { seconds }),
    ]
}

fn name(engine: u8) -> String {
    format!("e{engine}")
}

fn payload(engine: u8, mark: u8) -> Bytes {
    let metadata =
        AgentMetadataV2 { engine_id: name(engine), agent_metadata: vec![mark], ..AgentMetadataV2::default() };
    let agent_metadata_bytes = NixlAgentMetadata::V2(metadata).encode();
    NixlHandshakePayload { compatibility_hash: "h".to_owned(), agent_metadata_bytes }.encode().into()
}

async fn perform(registry: &Registry, act: &Act) {
    match *act {
        Act::Register { engine, address, mark, ttl } => {
            let rank = RankPayload { pp_rank: 0, tp_rank: 0, payload: payload(engine, mark) };
            // Refused for want of room at times.
            let _ = registry.register(Registration {
                engine_id: name(engine),
                base_url: address.map(|address| format!("http://10.0.0.{address}:1")),
                ttl_seconds: ttl.map(f64::from),
                ranks: Some(vec![rank]),
                ..Registration::default()
            });
        }
        Act::PutRank { engine, mark } => {
            let _ = registry.put(&name(engine), 0, 0, payload(engine, mark));
        }
        Act::Beat { engine, draining } => {
            let state = if draining { EngineState::Draining } else { EngineState::Ready };
            let _ =
                registry.heartbeat(&name(engine), &Heartbeat { state: Some(state), ..Heartbeat::default() });
        }
        Act::Remove { engine } => {
            registry.remove(&name(engine));
        }
        Act::Wait { seconds } => tokio::time::advance(Duration::from_secs(seconds.into())).await,
    }
}

/// The state of somebody who only follows.
#[derive(Default)]
struct Follower {
    revision: u64,
    engines: BTreeMap<String, EngineSummary>,
    /// The newest generation seen at each base URL.
    generations: BTreeMap<String, u64>,
}

impl Follower {
    fn follow(&mut self, registry: &Registry) {
        loop {
            match registry.changes_since(self.revision) {
                Changes::Forgotten(snapshot) => {
                    self.revision = snapshot.revision;
                    let engines = snapshot.engines.iter();
                    self.engines = engines.map(|(id, engine)| (id.clone(), engine.summary())).collect();
                }
                Changes::After(changes) if changes.is_empty() => return,
                Changes::After(changes) => changes.iter().for_each(|change| self.apply(change)),
            }
        }
    }

    fn apply(&mut self, change: &RegistryChange) {
        assert_eq!(change.revision, self.revision + 1, "no change is left out");
        self.revision = change.revision;
        let about = &change.engine.about;
        let known = self.engines.contains_key(&about.engine_id);
        assert_eq!(known, change.kind != ChangeKind::Registered, "{change:?}");
        if change.kind.is_departure() {
            self.engines.remove(&about.engine_id);
            return;
        }
        assert_eq!(about.revision, change.revision);
        if let Some(base_url) = &about.base_url {
            let newest = self.generations.entry(base_url.clone()).or_default();
            assert!(about.generation >= *newest, "generations only grow: {change:?}");
            *newest = about.generation;
        }
        self.engines.insert(about.engine_id.clone(), change.engine.clone());
    }
}

fn check(registry: &Registry, follower: &Follower) {
    let snapshot = registry.snapshot();
    assert_eq!(follower.revision, snapshot.revision);
    let shown = snapshot.engines.iter().map(|(id, engine)| (id.clone(), engine.summary()));
    assert_eq!(follower.engines, shown.collect());
    let mut addresses = BTreeSet::new();
    for engine in snapshot.engines.values() {
        assert!(registry.look_up(&engine.engine_id, 0, 0).is_ok());
        let Some(base_url) = &engine.base_url else { continue };
        assert!(addresses.insert(base_url.clone()), "two engines at one address");
        let at: Vec<_> = registry.engines_at(base_url).iter().map(|at| at.engine_id.clone()).collect();
        assert_eq!(at, std::slice::from_ref(&engine.engine_id));
    }
    let bytes: usize = snapshot.engines.values().map(|engine| engine.payload_bytes()).sum();
    assert!(bytes <= registry.shared.limits.total_bytes && snapshot.engines.len() <= 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn who_follows_the_changes_knows_the_registry(acts in prop::collection::vec(act(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.unwrap().block_on(async {
            // Little room and a short history, so that both ends are met.
            let limits = RegistryLimits { engines: 4, past_changes: 8, ..RegistryLimits::default() };
            let registry = Registry::new(limits);
            let mut follower = Follower::default();
            for (step, act) in acts.iter().enumerate() {
                perform(&registry, act).await;
                if step % 3 == 0 {
                    follower.follow(&registry);
                    check(&registry, &follower);
                }
            }
            follower.follow(&registry);
            check(&registry, &follower);
        });
    }
}
