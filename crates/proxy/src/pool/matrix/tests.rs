use bytes::Bytes;
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::{AgentMetadataV2, NixlAgentMetadata};
use proptest::prelude::*;

use super::*;
use crate::pool::peer::{PeerState, Role, ServedModel};
use crate::pool::spec::PeerSpec;
use crate::pool::{Pool, pairing};
use crate::registry::{RankPayload, Registration, Registry, RegistryLimits};
use crate::settings::Pairing;

/// What may differ between engines: whether they are registered, their digest, model, ranks and where their
/// memory lies, and whether the other stage has a peer of the same engine.
type Traits = (bool, bool, bool, bool, u8, bool);

fn payload(engine_id: &str, hash: &str, start: u8) -> Bytes {
    let base = 0x7f00_0000_0000 + (u64::from(start) << 20);
    let metadata = AgentMetadataV2 {
        engine_id: engine_id.to_owned(),
        agent_metadata: vec![start],
        kv_caches_base_addr: vec![base, base + 4096],
        num_blocks: 16,
        block_lens: vec![256, 256],
        kv_cache_layout: "HND".to_owned(),
        block_size: 16,
        ..AgentMetadataV2::default()
    };
    let agent_metadata_bytes = NixlAgentMetadata::V2(metadata).encode();
    NixlHandshakePayload { compatibility_hash: hash.to_owned(), agent_metadata_bytes }.encode().into()
}

fn served(model: &str) -> ServedModel {
    let entry = serde_json::value::to_raw_value(&model).unwrap();
    ServedModel { id: model.to_owned(), entry }
}

fn join(pool: &Pool, registry: &Registry, role: Role, number: usize, traits: Traits) {
    let (registered, hash, model, two_ranks, start, shared) = traits;
    let url = format!("http://{}-{number}:1", if role == Role::Prefill { "p" } else { "d" });
    let peer = pool.add(PeerSpec::new(role, url.clone())).unwrap();
    let model = if model { "a" } else { "b" };
    peer.observed.change(|observed| {
        observed.state = PeerState::Ready;
        observed.models = [served(model)].into();
        observed.models_changed += 1;
    });
    if !registered {
        return;
    }
    let engine_id = if shared { "both".to_owned() } else { url.clone() };
    let hash = if hash { "x" } else { "y" };
    let ranks = (0..1 + u32::from(two_ranks)).map(|tp_rank| RankPayload {
        pp_rank: 0,
        tp_rank,
        payload: payload(&engine_id, hash, start),
    });
    // Of an engine id that is taken, the second base URL is refused: then this peer is not registered.
    let _ = registry.register(Registration {
        engine_id: engine_id.clone(),
        base_url: Some(url),
        model: Some(model.to_owned()),
        ranks: Some(ranks.collect()),
        ..Registration::default()
    });
}

/// What each pair gets without classes.
fn one_by_one(pool: &Pool, rules: &Pairing) -> HashMap<(String, String), (&'static str, bool)> {
    let snapshot = pool.snapshot.load();
    let pairs = snapshot.prefill.iter().flat_map(|p| snapshot.decode.iter().map(move |d| (p, d)));
    let judge = |p: &Arc<Peer>, d: &Arc<Peer>| {
        let verdict = pairing::judge(&Facts::of(p), &Facts::of(d), rules);
        (verdict.label(), verdict.allows(rules.unknown))
    };
    pairs.map(|(p, d)| ((p.id.clone(), d.id.clone()), judge(p, d))).collect()
}

fn looked_up(pool: &Pool) -> HashMap<(String, String), (&'static str, bool)> {
    let pairs = pool.pairs().into_iter();
    pairs.map(|pair| ((pair.prefill, pair.decode), (pair.verdict.label(), pair.used))).collect()
}

fn counted(pairs: &HashMap<(String, String), (&'static str, bool)>) -> HashMap<(&'static str, bool), usize> {
    pairs.values().fold(HashMap::new(), |mut counts, pair| {
        *counts.entry(*pair).or_default() += 1;
        counts
    })
}

fn engines() -> impl Strategy<Value = Vec<Traits>> {
    proptest::collection::vec(any::<(bool, bool, bool, bool, u8, bool)>(), 1..7)
}

proptest! {
    /// Classes are only a short cut: each pair has the verdict that it would get by itself, while the fleet
    /// grows and when the rules change.
    #[test]
    fn each_pair_has_its_own_verdict(prefill in engines(), decode in engines(), more in engines()) {
        let (pool, registry) = (Pool::default(), Registry::new(RegistryLimits::default()));
        let rules = Pairing::default();
        for (role, engines) in [(Role::Prefill, &prefill), (Role::Decode, &decode)] {
            for (number, traits) in engines.iter().enumerate() {
                join(&pool, &registry, role, number, *traits);
            }
        }
        pool.learn(&registry);
        prop_assert_eq!(looked_up(&pool), one_by_one(&pool, &rules));
        for (number, traits) in more.iter().enumerate() {
            join(&pool, &registry, Role::Decode, 10 + number, *traits);
        }
        pool.relearn();
        pool.learn(&registry);
        let known = one_by_one(&pool, &rules);
        prop_assert_eq!(&looked_up(&pool), &known);
        prop_assert_eq!(pool.count_pairs(), counted(&known));
        let rules = Pairing { prefill_tp_at_most_decode: true, unknown: UnknownPairs::Deny, ..rules };
        pool.set_pairing(rules.clone());
        pool.learn(&registry);
        prop_assert_eq!(looked_up(&pool), one_by_one(&pool, &rules));
    }
}

/// A fleet of one kind of engines: neither who they are nor where their memory begins makes a class.
#[test]
fn engines_of_one_kind_are_of_one_class() {
    let (pool, registry) = (Pool::default(), Registry::new(RegistryLimits::default()));
    for number in 0..40 {
        for role in [Role::Prefill, Role::Decode] {
            join(&pool, &registry, role, number, (true, true, true, false, number as u8, false));
        }
    }
    pool.learn(&registry);
    let matrix = pool.matrix.load();
    assert_eq!((matrix.prefill.members.len(), matrix.decode.members.len()), (40, 40));
    assert_eq!(matrix.verdicts.len(), 1);
    assert_eq!(pool.count_pairs().into_values().collect::<Vec<_>>(), [1600]);
}

/// What is counted leaves out the pairs that are kept apart, each once.
#[test]
fn pairs_that_are_kept_apart_are_counted_as_not_used() {
    let (pool, registry) = (Pool::default(), Registry::new(RegistryLimits::default()));
    for number in 0..3 {
        for role in [Role::Prefill, Role::Decode] {
            join(&pool, &registry, role, number, (false, true, true, false, 0, false));
        }
    }
    let (p, d) = (pool.snapshot.load().prefill.clone(), pool.snapshot.load().decode.clone());
    let until = Instant::now() + std::time::Duration::from_secs(60);
    pool.quarantined.lock().insert(pair_key(&p[0], &d[0]), until);
    pool.quarantined.lock().insert(pair_key(&p[1], &d[2]), until);
    p[0].standing.set_quarantined(true);
    pool.relearn();
    pool.learn(&registry);
    let counts = pool.count_pairs();
    assert_eq!((counts[&("unknown", true)], counts[&("unknown", false)]), (5, 4));
    assert_eq!(counts, counted(&looked_up(&pool)));
}

#[test]
fn peers_of_different_transfer_modes_are_kept_apart() {
    use kv_connector::protocol::params::TransferMode;

    let (pool, registry) = (Pool::default(), Registry::new(RegistryLimits::default()));
    let add = |role, url: &str, mode| {
        let spec = PeerSpec { transfer_mode: mode, ..PeerSpec::new(role, url) };
        pool.add(spec).unwrap().id.clone()
    };
    let pushes = add(Role::Prefill, "http://p1:1", Some(TransferMode::Push));
    let unknown = add(Role::Prefill, "http://p2:1", None);
    let pulls = add(Role::Decode, "http://d:1", Some(TransferMode::Pull));
    pool.learn(&registry);
    let pairs = looked_up(&pool);
    assert_eq!(pairs[&(pushes, pulls.clone())], ("modes_differ", false));
    assert_eq!(pairs[&(unknown, pulls)], ("unknown", true));
}
