//! A part of the tree: two generations of chunks, of which the older is dropped when the younger is full.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use super::super::PeerKey;
use super::clock::Clock;

/// Most peers that are remembered for one chunk, the last ones that got it.
const MAX_HOLDERS: usize = 16;

/// For keys that are hashes already, and for small numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Prehashed(u64);

impl BuildHasher for Prehashed {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        Self(0)
    }
}

impl Hasher for Prehashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0.rotate_left(8) ^ u64::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = u64::from(number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// The peers that got a chunk, the last one last, and when.
type Holders = Vec<(PeerKey, u64)>;

#[derive(Debug)]
pub(super) struct Shard {
    young: HashMap<u64, Holders, Prehashed>,
    old: HashMap<u64, Holders, Prehashed>,
    /// Most chunks of a generation.
    room: usize,
}

impl Shard {
    /// A shard for so many chunks, at least two.
    pub(super) fn new(entries: usize) -> Self {
        Self { young: HashMap::default(), old: HashMap::default(), room: (entries / 2).max(1) }
    }

    pub(super) fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    pub(super) fn get(&self, hash: u64) -> Option<impl Iterator<Item = (PeerKey, u64)>> {
        let holders = self.young.get(&hash).or_else(|| self.old.get(&hash))?;
        Some(holders.iter().copied())
    }

    /// Notes that a peer gets the chunk; whether it still had it.
    pub(super) fn touch(&mut self, hash: u64, peer: PeerKey, stamp: u64, clock: &Clock) -> bool {
        if let Some(holders) = self.young.get_mut(&hash) {
            return note(holders, peer, stamp, clock);
        }
        let mut holders = self.old.remove(&hash).unwrap_or_default();
        let had = note(&mut holders, peer, stamp, clock);
        if self.young.len() >= self.room {
            std::mem::swap(&mut self.young, &mut self.old);
            // Its memory stays for the next generation.
            self.young.clear();
        }
        self.young.insert(hash, holders);
        had
    }
}

fn note(holders: &mut Holders, peer: PeerKey, stamp: u64, clock: &Clock) -> bool {
    let before = holders.iter().position(|(holder, _)| *holder == peer).map(|at| holders.remove(at).1);
    if holders.len() >= MAX_HOLDERS {
        holders.remove(0);
    }
    // A request that began earlier may come later.
    holders.push((peer, before.map_or(stamp, |before| before.max(stamp))));
    before.is_some_and(|before| clock.holds(before))
}
