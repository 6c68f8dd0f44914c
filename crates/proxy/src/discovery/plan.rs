//! From the peers there are and the addresses that sources want to what must change. Pure.
//! One address is one peer in one role: who is named keeps it, then whose source had it already, then
//! the first source that wants it.

use std::collections::HashMap;
use std::sync::Arc;

use crate::pool::origin::Origin;
use crate::pool::peer::{PeerSpec, Role};

/// A peer that a source wants.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Wanted {
    pub(crate) spec: PeerSpec,
    /// Its base URL in canonical spelling.
    pub(crate) place: String,
    /// The source's name.
    pub(crate) source: Arc<str>,
    /// Which process it is, where the source tells.
    pub(crate) instance: Option<Arc<str>>,
}

/// A peer of the fleet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held<'a> {
    pub(crate) place: Option<&'a str>,
    pub(crate) spec: &'a PeerSpec,
    pub(crate) origin: &'a Origin,
}

/// What must change, by positions.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Wanted ones that are new.
    pub(crate) come: Vec<usize>,
    /// (held, wanted): another description, another source or another process.
    pub(crate) change: Vec<(usize, usize)>,
    /// Held ones that are wanted as they are.
    pub(crate) stay: Vec<usize>,
    /// Discovered ones that no source wants.
    pub(crate) leave: Vec<usize>,
}

/// Plans the change; `is_removed` says which ones operators removed.
pub(crate) fn plan(held: &[Held<'_>], wanted: &[Wanted], is_removed: impl Fn(&Wanted) -> bool) -> Plan {
    let mut at: HashMap<(Role, &str), Vec<usize>> = HashMap::new();
    for (position, peer) in held.iter().enumerate() {
        if let Some(place) = peer.place {
            at.entry((peer.spec.role, place)).or_default().push(position);
        }
    }
    let mut table = Table { held, plan: Plan::default(), matched: vec![false; held.len()] };
    let mut taken: HashMap<(Role, &str), Vec<Option<u32>>> = HashMap::new();
    let mut open: Vec<usize> = (0..wanted.len()).filter(|position| !is_removed(&wanted[*position])).collect();
    // First whoever is there already, so that nothing moves without need.
    for match_one in [Table::keep, Table::place] {
        open.retain(|position| {
            let one = &wanted[*position];
            let key = (one.spec.role, one.place.as_str());
            let taken = taken.entry(key).or_default();
            if taken.iter().any(|rank| overlap(*rank, one.spec.dp_rank)) {
                return false;
            }
            let here = at.get(&key).map_or(&[][..], Vec::as_slice);
            let here: Vec<usize> =
                here.iter().copied().filter(|at| overlap(held[*at].spec.dp_rank, one.spec.dp_rank)).collect();
            if here.iter().any(|at| !held[*at].origin.gives_way()) {
                return false;
            }
            let matched = match_one(&mut table, &here, *position, one);
            if matched {
                taken.push(one.spec.dp_rank);
            }
            !matched
        });
    }
    let Table { mut plan, matched, .. } = table;
    let discovered = |at: &usize| held[*at].origin.source().is_some() && !matched[*at];
    plan.leave = (0..held.len()).filter(discovered).collect();
    plan
}

struct Table<'a> {
    held: &'a [Held<'a>],
    plan: Plan,
    matched: Vec<bool>,
}

impl Table<'_> {
    /// Leaves a peer to the source that has it.
    fn keep(&mut self, here: &[usize], position: usize, wanted: &Wanted) -> bool {
        let own = here.iter().copied().find(|at| {
            let peer = &self.held[*at];
            peer.origin.source() == Some(&wanted.source) && peer.spec.dp_rank == wanted.spec.dp_rank
        });
        let Some(own) = own else { return false };
        self.matched[own] = true;
        let instance = match self.held[own].origin {
            Origin::Discovery { instance, .. } => instance.as_ref(),
            _ => None,
        };
        if *self.held[own].spec == wanted.spec && instance == wanted.instance.as_ref() {
            self.plan.stay.push(own);
        } else {
            self.plan.change.push((own, position));
        }
        true
    }

    /// Takes a peer over that another source or a registration has, or makes a new one.
    fn place(&mut self, here: &[usize], position: usize, wanted: &Wanted) -> bool {
        let other = here.iter().copied().find(|at| {
            let peer = &self.held[*at];
            let is_exact = peer.spec.dp_rank == wanted.spec.dp_rank;
            !self.matched[*at] && (is_exact || *peer.origin == Origin::Registration)
        });
        match other {
            Some(other) => {
                self.matched[other] = true;
                self.plan.change.push((other, position));
            }
            None => self.plan.come.push(position),
        }
        true
    }
}

/// Whether both mean one engine; without a rank all of them are meant.
fn overlap(one: Option<u32>, other: Option<u32>) -> bool {
    one.zip(other).is_none_or(|(one, other)| one == other)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spec(at: u8) -> PeerSpec {
        PeerSpec::new(Role::Decode, url(at))
    }

    fn url(at: u8) -> String {
        format!("http://10.0.0.{at}:8000")
    }

    fn wanted(at: u8, source: &str) -> Wanted {
        Wanted { spec: spec(at), place: url(at), source: source.into(), instance: None }
    }

    fn found(source: &str) -> Origin {
        Origin::Discovery { source: source.into(), instance: None }
    }

    /// Plans for peers at these addresses.
    fn plan_for(peers: &[(u8, Origin)], wanted: &[Wanted]) -> Plan {
        let specs: Vec<(String, PeerSpec)> = peers.iter().map(|(at, _)| (url(*at), spec(*at))).collect();
        let held: Vec<Held<'_>> = specs
            .iter()
            .zip(peers)
            .map(|((place, spec), (_, origin))| Held { place: Some(place), spec, origin })
            .collect();
        plan(&held, wanted, |one| one.place == url(99))
    }

    #[test]
    fn what_is_new_comes_what_is_gone_leaves_and_the_rest_stays() {
        let peers = [(1, found("a")), (2, found("a"))];
        let plan = plan_for(&peers, &[wanted(2, "a"), wanted(3, "a"), wanted(99, "a")]);
        assert_eq!(plan, Plan { come: vec![1], stay: vec![1], leave: vec![0], ..Plan::default() });
    }

    #[test]
    fn settings_and_operators_win_and_registrations_give_way() {
        let peers = [(1, Origin::Settings), (2, Origin::Operator), (3, Origin::Registration)];
        let plan = plan_for(&peers, &[wanted(1, "a"), wanted(2, "a"), wanted(3, "a")]);
        assert_eq!(plan, Plan { change: vec![(2, 2)], ..Plan::default() });
        // Nobody of theirs leaves.
        assert_eq!(plan_for(&peers, &[]), Plan::default());
    }

    #[test]
    fn an_address_of_two_sources_is_one_peer_that_stays_with_the_one_that_had_it() {
        let both = [wanted(1, "a"), wanted(1, "b")];
        assert_eq!(plan_for(&[], &both), Plan { come: vec![0], ..Plan::default() });
        assert_eq!(plan_for(&[(1, found("b"))], &both), Plan { stay: vec![0], ..Plan::default() });
        // When its source has lost it, the other one takes it over: nothing leaves.
        let change = Plan { change: vec![(0, 0)], ..Plan::default() };
        assert_eq!(plan_for(&[(1, found("b"))], &both[..1]), change);
    }

    #[test]
    fn another_description_or_process_is_a_change() {
        let mut other = wanted(1, "a");
        other.instance = Some("uid".into());
        let change = Plan { change: vec![(0, 0)], ..Plan::default() };
        assert_eq!(plan_for(&[(1, found("a"))], &[other]), change);
        let mut other = wanted(1, "a");
        other.spec.labels.insert("zone".into(), "x".into());
        assert_eq!(plan_for(&[(1, found("a"))], &[other]), change);
    }

    #[test]
    fn ranks_of_one_address_are_peers_of_their_own() {
        let of_rank = |rank| {
            let mut one = wanted(1, "a");
            one.spec.dp_rank = rank;
            one
        };
        let ranks = [of_rank(Some(0)), of_rank(Some(1)), of_rank(Some(1)), of_rank(None)];
        assert_eq!(plan_for(&[], &ranks), Plan { come: vec![0, 1], ..Plan::default() });
        // Whoever registered for the whole address gives way to the first of them.
        let plan = plan_for(&[(1, Origin::Registration)], &ranks[..2]);
        assert_eq!(plan, Plan { come: vec![1], change: vec![(0, 0)], ..Plan::default() });
    }

    #[test]
    fn one_address_in_two_roles_is_two_peers() {
        let mut prefill = wanted(1, "a");
        prefill.spec.role = Role::Prefill;
        let plan = plan_for(&[(1, Origin::Settings)], &[wanted(1, "a"), prefill]);
        assert_eq!(plan, Plan { come: vec![1], ..Plan::default() });
    }

    fn origins() -> impl Strategy<Value = Origin> {
        prop_oneof![
            Just(Origin::Settings),
            Just(Origin::Operator),
            Just(Origin::Registration),
            Just(found("a")),
            Just(found("b")),
        ]
    }

    proptest! {
        #[test]
        fn after_a_plan_each_wanted_address_is_exactly_one_peer(
            held in proptest::collection::btree_map(0_u8..12, origins(), 0..12),
            names in proptest::collection::vec((0_u8..12, prop_oneof![Just("a"), Just("b")]), 0..20),
        ) {
            let peers: Vec<(u8, Origin)> = held.into_iter().collect();
            let all: Vec<Wanted> = names.iter().map(|(at, source)| wanted(*at, source)).collect();
            let plan = plan_for(&peers, &all);
            let mut after: Vec<u8> = peers.iter().map(|(at, _)| *at).collect();
            for at in &plan.leave {
                prop_assert!(peers[*at].1.source().is_some());
                after.retain(|one| *one != peers[*at].0);
            }
            for (at, one) in &plan.change {
                prop_assert!(peers[*at].1.gives_way());
                prop_assert_eq!(url(peers[*at].0), all[*one].place.clone());
            }
            after.extend(plan.come.iter().map(|at| names[*at].0));
            after.sort_unstable();
            let mut once = after.clone();
            once.dedup();
            prop_assert_eq!(&after, &once, "no address twice");
            for (at, _) in &names {
                prop_assert!(after.contains(at));
            }
            for (at, origin) in &peers {
                let is_wanted = names.iter().any(|(other, _)| other == at);
                prop_assert_eq!(after.contains(at), is_wanted || origin.source().is_none());
            }
        }
    }
}
