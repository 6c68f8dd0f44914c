//! Which port is whose. A place, which is an engine's address or else its id, keeps its port over
//! restarts of the engine and of the router as long as there are ports enough. Pure bookkeeping.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::settings::PortRange;

/// The ports of one range.
#[derive(Debug)]
pub(crate) struct Ports {
    range: PortRange,
    /// By place; those that left keep a claim until somebody needs the port.
    claims: BTreeMap<String, Claim>,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Claim {
    port: u16,
    taken: bool,
    /// When it was given back.
    since: u64,
}

impl Ports {
    pub(crate) fn new(range: PortRange) -> Self {
        Self { range, claims: BTreeMap::new(), clock: 0 }
    }

    /// Takes a port for a place; `None` when all are taken or refused. With a range of any port, 0.
    pub(crate) fn take(&mut self, place: &str, refused: &[u16]) -> Option<u16> {
        if self.range.is_any() {
            return Some(0);
        }
        let free = |port: &u16| !refused.contains(port);
        let own = self.claims.get(place).map(|claim| claim.port).filter(free);
        let port = own.or_else(|| self.unclaimed(place, refused)).or_else(|| self.reclaim(refused))?;
        self.claims.insert(place.to_owned(), Claim { port, taken: true, since: 0 });
        Some(port)
    }

    /// Gives a place's port back.
    pub(crate) fn give_back(&mut self, place: &str) {
        self.clock += 1;
        if let Some(claim) = self.claims.get_mut(place) {
            (claim.taken, claim.since) = (false, self.clock);
        }
    }

    /// The first port from the place's own starting point on that nobody has a claim to.
    fn unclaimed(&self, place: &str, refused: &[u16]) -> Option<u16> {
        let count = u32::from(self.range.last - self.range.first) + 1;
        let digest = Sha256::digest(place.as_bytes());
        let start = u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]]) % count;
        let candidates = (0..count).map(|step| (start + step) % count);
        let claimed: Vec<u16> = self.claims.values().map(|claim| claim.port).collect();
        candidates
            .map(|offset| self.range.first.saturating_add(offset as u16))
            .find(|port| !claimed.contains(port) && !refused.contains(port))
    }

    /// The port that was given back longest ago.
    fn reclaim(&mut self, refused: &[u16]) -> Option<u16> {
        let left = self.claims.iter().filter(|(_, claim)| !claim.taken && !refused.contains(&claim.port));
        let (place, port) =
            left.min_by_key(|(_, claim)| claim.since).map(|(place, claim)| (place.clone(), claim.port))?;
        self.claims.remove(&place);
        Some(port)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn range(first: u16, last: u16) -> PortRange {
        PortRange { first, last }
    }

    #[test]
    fn a_place_comes_back_to_its_port_in_this_life_and_the_next() {
        let mut ports = Ports::new(range(5700, 5799));
        let first = ports.take("http://p", &[]).unwrap();
        ports.give_back("http://p");
        let other = ports.take("http://q", &[]).unwrap();
        assert_ne!(other, first);
        assert_eq!(ports.take("http://p", &[]), Some(first));
        assert_eq!(Ports::new(range(5700, 5799)).take("http://p", &[]), Some(first));
    }

    #[test]
    fn the_port_longest_unused_is_taken_when_there_is_no_other() {
        let mut ports = Ports::new(range(1, 2));
        let (a, b) = (ports.take("a", &[]).unwrap(), ports.take("b", &[]).unwrap());
        assert_eq!(ports.take("c", &[]), None);
        ports.give_back("b");
        ports.give_back("a");
        assert_eq!(ports.take("c", &[]), Some(b));
        assert_eq!(ports.take("b", &[]), Some(a));
        assert_eq!(ports.take("a", &[]), None);
    }

    #[test]
    fn a_port_that_somebody_else_has_is_passed_over() {
        let mut ports = Ports::new(range(10, 12));
        let first = ports.take("a", &[]).unwrap();
        let second = ports.take("a", &[first]).unwrap();
        assert_ne!(first, second);
        assert_eq!(ports.take("a", &[10, 11, 12]), None);
        assert_eq!(Ports::new(range(0, 0)).take("a", &[]), Some(0));
    }

    proptest! {
        #[test]
        fn no_two_places_have_one_port(steps in prop::collection::vec((0..12u8, any::<bool>()), 1..80)) {
            let mut ports = Ports::new(range(100, 107));
            let mut held = BTreeMap::new();
            for (place, takes) in steps {
                let place = place.to_string();
                if takes {
                    if let Some(port) = ports.take(&place, &[]) {
                        prop_assert!((100..=107).contains(&port));
                        held.insert(place, port);
                    } else {
                        prop_assert_eq!(held.len(), 8);
                    }
                } else if held.remove(&place).is_some() {
                    ports.give_back(&place);
                }
                let distinct: BTreeSet<u16> = held.values().copied().collect();
                prop_assert_eq!(distinct.len(), held.len());
            }
        }
    }
}
