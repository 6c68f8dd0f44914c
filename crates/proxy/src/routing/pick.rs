//! Which of some peers a policy takes. Pure: chance and loads are passed in.

use super::PeerKey;
use super::ring::Ring;
use super::settings::Policy;

/// Costs that differ by less than this part, or by less than [`SLACK`] seconds, are alike.
const TOLERANCE: f64 = 0.05;
const SLACK: f64 = 0.002;

/// One peer that may be taken. They come in the order of their turns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) key: PeerKey,
    /// How busy it counts as.
    pub(crate) load: u64,
    /// What it alone would cost, in seconds.
    pub(crate) cost: f64,
}

/// What policies that name a peer go by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keyed<'a> {
    pub(crate) ring: &'a Ring,
    /// What all peers of the ring carry.
    pub(crate) total: u64,
    pub(crate) factor: f64,
    /// The request's own key, if it has one.
    pub(crate) key: Option<&'a [u8]>,
}

/// The place of the one that a policy takes; none where there is nobody.
pub(crate) fn pick(
    policy: Policy,
    among: &[Candidate],
    keyed: Option<&Keyed<'_>>,
    mut chance: impl FnMut(usize) -> usize,
) -> Option<usize> {
    let least_busy = || (0..among.len()).min_by_key(|place| among[*place].load);
    match policy {
        Policy::Joint | Policy::LeastLoaded => least_busy(),
        Policy::RoundRobin => (!among.is_empty()).then_some(0),
        Policy::Random => (!among.is_empty()).then(|| chance(among.len())),
        Policy::PowerOfTwo => match among.len() {
            0 => None,
            1 => Some(0),
            count => {
                let one = chance(count);
                let other = (one + 1 + chance(count - 1)) % count;
                Some(if among[other].load < among[one].load { other } else { one })
            }
        },
        Policy::PrefixAffinity | Policy::KvEvents => {
            let most = most_alike(among.iter().map(|candidate| candidate.cost));
            (0..among.len()).filter(|place| among[*place].cost <= most).min_by_key(|place| among[*place].load)
        }
        Policy::Session | Policy::ConsistentHash => {
            let Some((keyed, key)) = keyed.and_then(|keyed| Some((keyed, keyed.key?))) else {
                return least_busy();
            };
            let carries = |one: &Candidate| (one.load / WHOLE_LOAD).saturating_sub(1);
            let load = |peer: PeerKey| among.iter().find(|one| one.key == peer).map(carries);
            let named = keyed.ring.bounded(key, load, keyed.total, keyed.factor);
            // A peer that has just come may not be on the ring yet.
            named.and_then(|peer| among.iter().position(|one| one.key == peer)).or_else(least_busy)
        }
    }
}

/// What one exchange counts in a load, in which the request itself is counted.
const WHOLE_LOAD: u64 = 1000;

/// The most that is as good as the least of some costs.
pub(crate) fn most_alike(costs: impl Iterator<Item = f64>) -> f64 {
    let least = costs.fold(f64::INFINITY, f64::min);
    least + (least * TOLERANCE).max(SLACK)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidates(loads: &[u64]) -> Vec<Candidate> {
        let one = |(number, load): (usize, &u64)| Candidate {
            key: PeerKey(number as u32),
            load: (load + 1) * WHOLE_LOAD,
            cost: *load as f64,
        };
        loads.iter().enumerate().map(one).collect()
    }

    fn ring(count: u32) -> Ring {
        let names: Vec<String> = (0..count).map(|number| format!("p{number}")).collect();
        Ring::new(names.iter().zip(0..).map(|(name, number)| (PeerKey(number), name.as_str(), 1.0)))
    }

    #[test]
    fn each_policy_takes_what_its_name_says() {
        let among = candidates(&[3, 1, 2, 1]);
        let take = |policy| pick(policy, &among, None, |_| 0);
        assert_eq!(take(Policy::RoundRobin), Some(0), "who is first in turn");
        assert_eq!(take(Policy::LeastLoaded), Some(1), "the first of the least busy");
        assert_eq!(take(Policy::Joint), Some(1));
        assert_eq!(take(Policy::Random), Some(0));
        assert_eq!(take(Policy::PowerOfTwo), Some(1), "the less busy of the first two");
        assert_eq!(take(Policy::PrefixAffinity), Some(1), "the cheapest");
        assert_eq!(take(Policy::Session), Some(1), "without a key who has least to do");
        assert_eq!(pick(Policy::Random, &[], None, |_| 0), None);
    }

    #[test]
    fn a_key_keeps_its_peer_until_that_has_too_much() {
        let ring = ring(4);
        let keyed = |total| Keyed { ring: &ring, total, factor: 1.25, key: Some(b"one conversation") };
        let first = pick(Policy::Session, &candidates(&[0; 4]), Some(&keyed(0)), |_| 0).unwrap();
        let mut loads = [5; 4];
        assert_eq!(pick(Policy::Session, &candidates(&loads), Some(&keyed(20)), |_| 0), Some(first));
        loads[first] = 40;
        assert_ne!(pick(Policy::Session, &candidates(&loads), Some(&keyed(55)), |_| 0), Some(first));
    }

    proptest! {
        #[test]
        fn power_of_two_never_takes_the_busiest_of_many(
            loads in proptest::collection::vec(0_u64..1000, 2..50),
            one in any::<prop::sample::Index>(), other in any::<prop::sample::Index>(),
        ) {
            let among = candidates(&loads);
            let mut chances = [one, other].into_iter();
            let taken = pick(Policy::PowerOfTwo, &among, None, |count| chances.next().unwrap().index(count)).unwrap();
            let busier = loads.iter().enumerate().filter(|(place, load)| *place != taken && **load >= loads[taken]);
            prop_assert!(busier.count() >= 1);
        }
    }

    #[test]
    fn costs_are_alike_within_a_part_and_a_moment() {
        assert_eq!(most_alike([0.5, 10.0].into_iter()), 0.525);
        assert_eq!(most_alike([0.0, 0.001].into_iter()), 0.002);
        assert!(most_alike(std::iter::empty()).is_infinite());
    }
}
