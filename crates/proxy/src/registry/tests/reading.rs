//! Look-ups that wait, and watching.

use std::sync::atomic::Ordering;

use super::*;

// ---------------------------------------------------------------- look-ups

#[tokio::test(start_paused = true)]
async fn a_look_up_waits_no_longer_than_it_may() {
    let registry = registry();
    registry.register(Registration { state: EngineState::Registering, ..engine("a") }).unwrap();
    let start = Instant::now();
    let look = |registry: &Registry| registry.look_up("a", 0, 0);
    let missing = registry.look_within(Duration::ZERO, look).await;
    assert_eq!((missing.unwrap_err(), start.elapsed()), (Missing::NotReady, Duration::ZERO));
    let missing = registry.look_within(Duration::from_secs(60), look).await;
    assert_eq!(missing.unwrap_err(), Missing::NotReady);
    let longest = RegistryLimits::default().longest_wait;
    assert!((longest..longest + Duration::from_millis(10)).contains(&start.elapsed()));
}

#[tokio::test(start_paused = true)]
async fn a_look_up_ends_when_the_engine_appears() {
    let registry = registry();
    let look = |registry: &Registry| registry.look_up("a", 0, 0);
    let start = Instant::now();
    let appear = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        registry.register(engine("b")).unwrap();
        registry.register(engine("a")).unwrap();
    };
    let (found, ()) = tokio::join!(registry.look_within(Duration::from_secs(3), look), appear);
    assert_eq!(found.unwrap().rank.payload, payload("a", 1));
    assert!(start.elapsed() < Duration::from_millis(1010));
}

#[tokio::test(start_paused = true)]
async fn one_waiter_too_many_is_answered_at_once() {
    let registry = small(|limits| limits.waiters = 1);
    let look = |registry: &Registry| registry.look_up("a", 0, 0);
    let start = Instant::now();
    let second = async {
        let missing = registry.look_within(Duration::from_secs(3), look).await;
        assert_eq!((missing.unwrap_err(), start.elapsed()), (Missing::Unknown, Duration::ZERO));
        registry.close();
    };
    let (first, ()) = tokio::join!(registry.look_within(Duration::from_secs(3), look), second);
    // A router that leaves lets nobody wait.
    assert_eq!((first.unwrap_err(), start.elapsed()), (Missing::Unknown, Duration::ZERO));
    assert_eq!(registry.shared.waiting.load(Ordering::Relaxed), 0);
}

// ---------------------------------------------------------------- watching

async fn next(watcher: &mut Watcher) -> Option<Watched> {
    tokio::time::timeout(Duration::from_secs(1), watcher.next()).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_watcher_begins_with_everything_and_sees_every_change_after_it() {
    let registry = registry();
    registry.register(engine("a")).unwrap();
    let mut watcher = registry.watch(None).unwrap();
    let Some(Watched::Reset(snapshot)) = next(&mut watcher).await else { panic!("no reset") };
    assert!(snapshot.engines.contains_key("a"));
    let change = async { registry.register(engine("b")).unwrap() };
    let (told, receipt) = tokio::join!(next(&mut watcher), change);
    let Some(Watched::Changes(changes)) = told else { panic!("no change") };
    assert_eq!((changes.len(), changes[0].revision), (1, receipt.revision));
    let idle = tokio::time::timeout(Duration::from_secs(9), watcher.next()).await;
    assert!(idle.is_err());
}

#[tokio::test]
async fn a_watcher_resumes_where_it_was_in_bounded_batches() {
    let registry = registry();
    let start = registry.snapshot().revision;
    for number in 0..BATCH + 3 {
        registry.register(engine(&format!("e{number}"))).unwrap();
    }
    let mut watcher = registry.watch(Some(start + 1)).unwrap();
    let mut seen = Vec::new();
    for expected in [BATCH, 2] {
        let Some(Watched::Changes(changes)) = next(&mut watcher).await else { panic!("no changes") };
        assert_eq!(changes.len(), expected);
        seen.extend(changes.iter().map(|change| change.revision));
    }
    let all: Vec<u64> = (start + 2..=start + BATCH as u64 + 3).collect();
    assert_eq!(seen, all);
}

#[tokio::test]
async fn who_resumes_from_elsewhere_gets_everything_and_who_falls_behind_is_cut_off() {
    let registry = small(|limits| limits.past_changes = 4);
    let start = registry.snapshot().revision;
    for number in 0..6 {
        registry.register(engine(&format!("e{number}"))).unwrap();
    }
    // Before what is kept, before this life of the router, after everything.
    for since in [start + 1, 7, start + 1000] {
        let mut watcher = registry.watch(Some(since)).unwrap();
        let Some(Watched::Reset(snapshot)) = next(&mut watcher).await else { panic!("no reset") };
        assert_eq!((snapshot.revision, snapshot.engines.len()), (start + 6, 6));
    }
    let mut slow = registry.watch(Some(start + 2)).unwrap();
    assert!(matches!(next(&mut slow).await, Some(Watched::Changes(changes)) if changes.len() == 4));
    for number in 0..5 {
        registry.remove(&format!("e{number}"));
    }
    assert!(next(&mut slow).await.is_none());
}

#[tokio::test]
async fn watchers_are_bounded_and_those_who_fell_behind_make_room() {
    let registry = small(|limits| (limits.watchers, limits.past_changes) = (2, 2));
    let mut stalled = registry.watch(None).unwrap();
    let mut alive = registry.watch(None).unwrap();
    next(&mut stalled).await.unwrap();
    next(&mut alive).await.unwrap();
    let refused = registry.watch(None).unwrap_err();
    assert_eq!(refused, RegistryError::TooManyWatchers { limit: 2 });
    for number in 0..3 {
        registry.register(engine(&format!("e{number}"))).unwrap();
        next(&mut alive).await.unwrap();
    }
    let third = registry.watch(None).unwrap();
    assert!(registry.watch(None).is_err());
    assert!(next(&mut stalled).await.is_none());
    drop(third);
    registry.watch(None).unwrap();
}

#[tokio::test]
async fn closing_ends_watchers_and_nothing_else() {
    let registry = registry();
    let mut watcher = registry.watch(None).unwrap();
    next(&mut watcher).await.unwrap();
    let (end, ()) = tokio::join!(next(&mut watcher), async { registry.close() });
    assert!(end.is_none());
    let mut late = registry.watch(None).unwrap();
    assert!(next(&mut late).await.is_none());
    registry.register(engine("a")).unwrap();
    assert!(registry.look_up("a", 0, 0).is_ok());
}
