//! The choice among few and many peers that are not there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::candidates::Wanted;
use super::choose::Chosen;
use super::prefix::Matched;
use super::settings::{Disaggregation, DisaggregationMode, Policy, RoutingSettings};
use super::surroundings::Surroundings;
use crate::dial::Dials;
use crate::error::{ProxyError, Stage};
use crate::pool::Pool;
use crate::pool::peer::{Peer, PeerSpec, PeerState, Role, ServedModel};
use crate::registry::{Registry, RegistryLimits};
use crate::request::Endpoint;
use crate::settings::Settings;

fn served(model: &str) -> ServedModel {
    let entry = serde_json::value::to_raw_value(&serde_json::json!({"id": model})).unwrap();
    ServedModel { id: model.to_owned(), entry }
}

/// A fleet of ready peers of each role; every tenth serves `rare`, the others `common`.
fn fleet(count: usize) -> Pool {
    let pool = Pool::new(&Settings::default(), Dials::new(Duration::from_secs(1)));
    for role in [Role::Prefill, Role::Decode] {
        for number in 0..count {
            let peer = pool.add(PeerSpec::new(role, format!("http://{role:?}-{number}:1"))).unwrap();
            peer.observed.change(|observed| {
                observed.state = PeerState::Ready;
                observed.models = [served(if number % 10 == 9 { "rare" } else { "common" })].into();
                observed.models_changed += 1;
            });
        }
    }
    pool.learn(&Registry::new(RegistryLimits::default()));
    pool
}

fn choose(pool: &Pool, model: &str, settings: &RoutingSettings, session: Option<&[u8]>) -> Option<Chosen> {
    let wanted = Wanted {
        model: Some(model),
        endpoint: Endpoint::Completions,
        prompt_tokens: 1000.0,
        settings,
        policies: settings.policies(Some(model)),
        session,
        beginning: b"",
        seen: Matched::default(),
        token_bytes: 4.0,
        tried: [&[], &[]],
    };
    pool.choose_pair(&wanted, &Disaggregation::default())
}

fn lists(peer: &Peer, model: &str) -> bool {
    peer.observed.now().models.iter().any(|served| served.id == model)
}

#[tokio::test]
async fn among_many_a_pair_is_found_that_lists_the_model_and_spreads() {
    let pool = fleet(200);
    let (settings, mut taken) = (RoutingSettings::default(), BTreeMap::<String, usize>::new());
    let mut running = Vec::new();
    for _ in 0..100 {
        let chosen = choose(&pool, "rare", &settings, None).unwrap();
        let prefill = chosen.prefill.as_ref().unwrap();
        assert!(lists(&prefill.peer, "rare") && lists(&chosen.decode.peer, "rare"));
        *taken.entry(prefill.peer.id.clone()).or_default() += 1;
        running.push(chosen);
    }
    // Twenty peers list it, so that five each are fair.
    assert!(taken.values().all(|count| *count <= 10), "{taken:?}");
    assert!(taken.len() >= 15, "{taken:?}");
    let waiting: u64 = pool.all().iter().map(|peer| peer.routing.waiting_tokens()).sum();
    assert_eq!(waiting, 100 * 1000);
    drop(running);
    assert!(pool.all().iter().all(|peer| peer.routing.waiting_tokens() == 0 && peer.in_flight() == 0));
}

/// Ids of the prefill and decode engines of so many rounds of requests that run at the same time and all end well.
fn serve(
    pool: &Pool,
    settings: &RoutingSettings,
    rounds: usize,
    at_once: usize,
) -> [BTreeMap<String, usize>; 2] {
    let mut taken = [BTreeMap::new(), BTreeMap::new()];
    for _ in 0..rounds {
        let running: Vec<_> = (0..at_once).map(|_| choose(pool, "common", settings, None).unwrap()).collect();
        for chosen in running {
            for (taken, entered) in taken.iter_mut().zip([&chosen.prefill.unwrap(), &chosen.decode]) {
                *taken.entry(entered.peer.id.clone()).or_default() += 1;
                entered.peer.succeeded();
            }
        }
    }
    taken
}

#[tokio::test]
async fn many_that_have_little_to_do_leave_it_to_those_that_served_last() {
    let (pool, joint) = (fleet(200), RoutingSettings::default());
    for taken in serve(&pool, &joint, 10 * 256, 1) {
        // Whoever is tried beside has served last then.
        assert!((6..=11).contains(&taken.len()), "{taken:?}");
    }
    for taken in serve(&pool, &joint, 64, 8) {
        assert!(taken.len() <= 8 + 11 + 64 * 8 / 256, "{taken:?}");
        assert!(taken.values().all(|count| *count <= 64 + 8), "hardly ever two at one: {taken:?}");
    }
    let in_turn = RoutingSettings {
        prefill: Policy::LeastLoaded,
        decode: Policy::LeastLoaded,
        ..RoutingSettings::default()
    };
    for taken in serve(&pool, &in_turn, 320, 1) {
        assert!(taken.len() > 100, "{taken:?}");
    }
}

#[tokio::test]
async fn who_served_last_but_works_or_fails_is_not_asked_before_others() {
    let (pool, joint) = (fleet(200), RoutingSettings::default());
    drop(serve(&pool, &joint, 2, 1));
    let first = choose(&pool, "common", &joint, None).unwrap();
    let (prefill, decode) =
        (Arc::clone(&first.prefill.as_ref().unwrap().peer), Arc::clone(&first.decode.peer));
    for _ in 0..20 {
        let second = choose(&pool, "common", &joint, None).unwrap();
        assert!(!Arc::ptr_eq(&second.prefill.as_ref().unwrap().peer, &prefill));
        assert!(!Arc::ptr_eq(&second.decode.peer, &decode));
    }
    drop(first);
    (0..5).for_each(|_| prefill.blamed());
    for _ in 0..20 {
        let next = choose(&pool, "common", &joint, None).unwrap();
        assert!(!Arc::ptr_eq(&next.prefill.as_ref().unwrap().peer, &prefill));
    }
}

#[tokio::test]
async fn among_many_the_only_open_peer_is_found() {
    let pool = fleet(60);
    let only =
        pool.all().into_iter().find(|peer| peer.spec.role == Role::Prefill && lists(peer, "common")).unwrap();
    for peer in pool.all().iter().filter(|peer| peer.spec.role == Role::Prefill) {
        peer.standing.set_drained(!Arc::ptr_eq(peer, &only));
    }
    for _ in 0..20 {
        let chosen = choose(&pool, "common", &RoutingSettings::default(), None).unwrap();
        assert_eq!(chosen.prefill.unwrap().peer.id, only.id);
    }
    only.standing.set_drained(true);
    assert!(choose(&pool, "common", &RoutingSettings::default(), None).is_none());
}

#[tokio::test]
async fn among_many_a_session_keeps_its_engines() {
    let pool = fleet(100);
    let settings =
        RoutingSettings { prefill: Policy::Session, decode: Policy::Session, ..RoutingSettings::default() };
    for session in [&b"one"[..], b"two", b"three"] {
        let pair = |_| {
            let chosen = choose(&pool, "common", &settings, Some(session)).unwrap();
            (chosen.prefill.unwrap().peer.id.clone(), chosen.decode.peer.id.clone())
        };
        let pairs: std::collections::BTreeSet<_> = (0..20).map(pair).collect();
        assert_eq!(pairs.len(), 1, "{pairs:?}");
    }
}

#[tokio::test]
async fn a_slower_or_busier_engine_is_passed_over_and_a_short_prompt_stays() {
    let mut pool = fleet(2);
    pool.surroundings = Surroundings::simulated(1);
    let settings = RoutingSettings::default();
    let slow = pool.all().into_iter().find(|peer| peer.spec.role == Role::Prefill).unwrap();
    for peer in pool.all() {
        let millis = if Arc::ptr_eq(&peer, &slow) { 1000 } else { 100 };
        (0..5).for_each(|_| peer.routing.prefilled(1000, Duration::from_millis(millis), Instant::now()));
    }
    for _ in 0..10 {
        let chosen = choose(&pool, "common", &settings, None).unwrap();
        assert_ne!(chosen.prefill.unwrap().peer.id, slow.id);
    }
    // An engine of which nothing was learnt for long is asked again.
    pool.surroundings.tell(Duration::from_secs(61));
    let later = (0..10).map(|_| choose(&pool, "common", &settings, None).unwrap().prefill.unwrap());
    assert!(later.into_iter().any(|prefill| prefill.peer.id == slow.id));
    pool.surroundings.tell(Duration::ZERO);
    // Ten prompts that wait at the fast one cost as much.
    let waiting: Vec<_> = (0..12).map(|_| choose(&pool, "common", &settings, None).unwrap()).collect();
    assert!(waiting.iter().any(|chosen| chosen.prefill.as_ref().unwrap().peer.id == slow.id));
    drop(waiting);
    let wanted = Wanted {
        model: None,
        endpoint: Endpoint::Completions,
        prompt_tokens: 10.0,
        settings: &settings,
        policies: settings.policies(None),
        session: None,
        beginning: b"",
        seen: Matched::default(),
        token_bytes: 4.0,
        tried: [&[], &[]],
    };
    let auto = Disaggregation { mode: DisaggregationMode::Auto, ..Disaggregation::default() };
    let chosen = pool.choose_pair(&wanted, &auto).unwrap();
    assert!(chosen.prefill.is_none() && chosen.stays.is_some());
}

#[tokio::test]
async fn one_peer_is_chosen_by_its_list_its_health_and_its_turn() {
    let pool = fleet(10);
    let choose = |model, tried: &[Arc<Peer>], fits: &dyn Fn(&Peer) -> bool| {
        pool.choose(Stage::Decode, model, tried, fits).map(|entered| Arc::clone(&entered.peer))
    };
    let turns: std::collections::BTreeSet<_> =
        (0..10).map(|_| choose(None, &[], &|_| true).unwrap().id.clone()).collect();
    assert_eq!(turns.len(), 10, "equally busy peers take turns: {turns:?}");
    let rare = choose(Some("rare"), &[], &|_| true).unwrap();
    assert!(lists(&rare, "rare"));
    // All have told what they serve: where the only one that lists it has failed, or does not fit, there is nobody.
    let tried = [Arc::clone(&rare)];
    assert!(matches!(choose(Some("rare"), &tried, &|_| true), Err(ProxyError::NoCompatiblePair)));
    assert!(matches!(
        choose(Some("rare"), &[], &|peer| peer.id != rare.id),
        Err(ProxyError::NoCompatiblePair)
    ));
    // Who has failed too often comes after the others.
    let failed = choose(Some("common"), &[], &|_| true).unwrap();
    while failed.health.is_sound(Instant::now()) {
        failed.blamed();
    }
    assert!((0..20).all(|_| choose(Some("common"), &[], &|_| true).unwrap().id != failed.id));
    assert_eq!(choose(Some("common"), &[], &|peer| peer.id == failed.id).unwrap().id, failed.id);
    // What nobody lists, somebody may have who has not told what it serves.
    assert!(matches!(choose(Some("new"), &[], &|_| true), Err(ProxyError::NoCompatiblePair)));
    failed.observed.change(|observed| observed.models = [].into());
    pool.relearn();
    pool.learn(&Registry::new(RegistryLimits::default()));
    assert_eq!(choose(Some("new"), &[], &|peer| peer.id == failed.id).unwrap().id, failed.id);
    assert!(matches!(choose(None, &[], &|_| false), Err(ProxyError::NoCompatiblePair)));
    for peer in pool.all() {
        peer.standing.set_drained(true);
    }
    assert!(matches!(choose(None, &[], &|_| true), Err(ProxyError::NoPeer(Stage::Decode))));
}
