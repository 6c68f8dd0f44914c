use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;

use super::*;

fn names(count: u32) -> Vec<String> {
    (0..count).map(|number| format!("http://10.0.0.{number}:8000")).collect()
}

fn ring(names: &[String]) -> Ring {
    let key =
        |name: &str| PeerKey(name.bytes().fold(7, |hash: u32, byte| hash.wrapping_mul(31) + u32::from(byte)));
    Ring::new(names.iter().map(|name| (key(name), name.as_str(), 1.0)))
}

fn first(ring: &Ring, key: u32) -> PeerKey {
    ring.walk(&key.to_be_bytes()).next().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A walk meets each peer once, and always in the same order.
    #[test]
    fn a_walk_meets_each_peer_once(count in 1..40_u32, key: Vec<u8>) {
        let ring = ring(&names(count));
        let walk: Vec<_> = ring.walk(&key).collect();
        prop_assert_eq!(walk.len(), count as usize);
        prop_assert_eq!(walk.iter().collect::<BTreeSet<_>>().len(), count as usize);
        prop_assert_eq!(walk, ring.walk(&key).collect::<Vec<_>>());
    }

    /// Keys move to a peer that comes, about its share of them, and to no other; back when it goes.
    #[test]
    fn few_keys_move(count in 2..60_u32, which: prop::sample::Index) {
        let all = names(count);
        let mut fewer = all.clone();
        let gone = which.index(fewer.len());
        let name = fewer.remove(gone);
        let (before, after) = (ring(&fewer), ring(&all));
        let newcomer = ring(&[name]).members[0].0;
        let keys = 4000;
        let mut moved = 0;
        for key in 0..keys {
            let (was, is) = (first(&before, key), first(&after, key));
            prop_assert!(was == is || is == newcomer);
            moved += u32::from(was != is);
        }
        let share = f64::from(keys) / f64::from(count);
        prop_assert!((0.5 * share..1.6 * share).contains(&f64::from(moved)), "{moved} of {keys} moved, not {share}");
    }

    /// Whatever the keys are, no peer gets more than its bound.
    #[test]
    fn no_peer_gets_more_than_its_bound(
        count in 1..30_u32, keys in proptest::collection::vec(0..20_u32, 1..600), factor in 1.05..3.0_f64,
    ) {
        let ring = ring(&names(count));
        let mut loads = HashMap::<PeerKey, u64>::new();
        for (total, key) in (0_u64..).zip(keys) {
            let load = |peer: PeerKey| Some(loads.get(&peer).copied().unwrap_or(0));
            let peer = ring.bounded(&key.to_be_bytes(), load, total, factor).unwrap();
            let now = loads.entry(peer).or_default();
            *now += 1;
            let bound = (factor * (total + 1) as f64 / f64::from(count)).ceil();
            prop_assert!(*now as f64 <= bound, "{now} is more than {bound}");
        }
    }
}

#[test]
fn the_order_of_the_list_does_not_matter() {
    let all = names(20);
    let backwards: Vec<_> = all.iter().rev().cloned().collect();
    let (one, other) = (ring(&all), ring(&backwards));
    assert!((0..1000).all(|key| first(&one, key) == first(&other, key)));
}

#[test]
fn a_peer_gets_keys_by_its_weight() {
    let ring = Ring::new([(PeerKey(1), "a", 1.0), (PeerKey(2), "b", 3.0)]);
    let heavy = (0..10_000).filter(|key| first(&ring, *key) == PeerKey(2)).count();
    assert!((6500..8500).contains(&heavy), "{heavy} of 10000 for three quarters of the weight");
}

#[test]
fn a_key_leaves_a_full_peer_and_passes_over_absent_ones() {
    let ring = ring(&names(4));
    let walk: Vec<_> = ring.walk(b"session").collect();
    let mut loads =
        HashMap::from([(walk[0], Some(10)), (walk[1], None), (walk[2], Some(0)), (walk[3], Some(0))]);
    assert_eq!(ring.bounded(b"session", |peer| loads[&peer], 10, 1.25), Some(walk[2]));
    loads.insert(walk[0], Some(2));
    assert_eq!(ring.bounded(b"session", |peer| loads[&peer], 10, 1.25), Some(walk[0]));
    // All that are left are full: the one with the least.
    let loads = HashMap::from([(walk[0], Some(9)), (walk[1], None), (walk[2], Some(7)), (walk[3], None)]);
    assert_eq!(ring.bounded(b"session", |peer| loads[&peer], 16, 1.0), Some(walk[2]));
    assert_eq!(ring.bounded(b"session", |_| None, 16, 1.0), None);
    assert_eq!(Ring::default().walk(b"session").next(), None);
}

/// Routers of other builds must find the same places.
#[test]
fn places_do_not_change() {
    assert_eq!(place(b"session-1"), 0x8409_7828_fc31_a8c8);
    assert_eq!(
        places("http://10.0.0.1:8000").take(2).collect::<Vec<_>>(),
        [0x4708_bb81_5e1d_06f7, 0x6186_20a4_86f6_6032]
    );
}
