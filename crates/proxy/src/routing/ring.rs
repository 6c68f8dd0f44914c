//! Consistent hashing with bounded load: a key has its peer, whatever router looks it up, and few keys move
//! when peers come and go. Pure; what peers carry is passed in.
//!
//! Places depend on the peers' names alone, so that routers with the same peers agree. Clients can aim at a
//! peer; the bound on its load is what protects it.

#[cfg(test)]
mod tests;

use sha2::{Digest, Sha256};

use super::PeerKey;

/// Points of a peer of weight 1.
const POINTS: f64 = 128.0;

/// Most points of one peer.
const MAX_POINTS: f64 = 4096.0;

/// The 64-bit numbers that one digest gives.
const WORDS: usize = 4;

/// The peers on a ring; made anew when they change.
#[derive(Clone, Debug, Default)]
pub struct Ring {
    /// Where a member's stretch begins, in order.
    points: Vec<(u64, u32)>,
    members: Vec<(PeerKey, f64)>,
    weights: f64,
}

impl Ring {
    /// A ring of peers, each with its lasting name and its weight, a positive number.
    #[must_use]
    pub fn new<'a>(peers: impl IntoIterator<Item = (PeerKey, &'a str, f64)>) -> Self {
        let mut ring = Self::default();
        for (peer, name, weight) in peers {
            let weight = if weight.is_finite() && weight > 0.0 { weight } else { 1.0 };
            let Ok(member) = u32::try_from(ring.members.len()) else { break };
            let count = (POINTS * weight).round().clamp(1.0, MAX_POINTS) as usize;
            ring.points.extend(places(name).take(count).map(|place| (place, member)));
            ring.members.push((peer, weight));
            ring.weights += weight;
        }
        // Where two points fall together the order of the peers decides, which is that of their list.
        ring.points.sort_unstable();
        ring
    }

    /// How many peers there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The peers in the order in which they come for a key, each once.
    pub fn walk(&self, key: &[u8]) -> impl Iterator<Item = PeerKey> {
        self.members_from(place(key)).map(|member| self.members[member].0)
    }

    /// The first peer for a key that carries less than its share: `factor` (more than 1) times what is fair
    /// by its weight, were `total`, what all carry, one more. One that `load` gives none for is passed over.
    pub fn bounded(
        &self,
        key: &[u8],
        load: impl Fn(PeerKey) -> Option<u64>,
        total: u64,
        factor: f64,
    ) -> Option<PeerKey> {
        let share = factor.max(1.0) * (total.saturating_add(1)) as f64 / self.weights;
        let mut least_loaded: Option<(f64, PeerKey)> = None;
        for (peer, weight) in self.members_from(place(key)).map(|member| self.members[member]) {
            let Some(load) = load(peer) else { continue };
            if (load as f64) < (share * weight).ceil() {
                return Some(peer);
            }
            // Only where some peers are passed over can all others be full.
            let relative = load as f64 / weight;
            if least_loaded.is_none_or(|(least, _)| relative < least) {
                least_loaded = Some((relative, peer));
            }
        }
        least_loaded.map(|(_, peer)| peer)
    }

    fn members_from(&self, place: u64) -> impl Iterator<Item = usize> {
        let start = self.points.partition_point(|(point, _)| *point < place);
        let round = self.points[start..].iter().chain(&self.points[..start]);
        let mut met =
            Met { first: None, others: Vec::new(), members: self.members.len(), left: self.members.len() };
        let mut round = round.map(|(_, member)| *member as usize);
        std::iter::from_fn(move || {
            if met.left == 0 {
                return None;
            }
            round.by_ref().find(|member| met.is_new(*member))
        })
    }
}

/// The members that a walk has passed; most walks end with the first.
struct Met {
    first: Option<usize>,
    others: Vec<bool>,
    members: usize,
    left: usize,
}

impl Met {
    fn is_new(&mut self, member: usize) -> bool {
        match self.first {
            None => self.first = Some(member),
            Some(first) if first == member => return false,
            Some(_) => {
                if self.others.is_empty() {
                    self.others = vec![false; self.members];
                }
                if std::mem::replace(&mut self.others[member], true) {
                    return false;
                }
            }
        }
        self.left -= 1;
        true
    }
}

/// Where a key stands.
fn place(key: &[u8]) -> u64 {
    words(Sha256::digest(key).as_slice())[0]
}

/// Where a peer's stretches begin.
fn places(name: &str) -> impl Iterator<Item = u64> {
    let digest = move |number: u32| {
        words(Sha256::new().chain_update(number.to_le_bytes()).chain_update(name).finalize().as_slice())
    };
    (0..).flat_map(digest)
}

fn words(digest: &[u8]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(digest.chunks_exact(8)) {
        *word = bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    }
    words
}
