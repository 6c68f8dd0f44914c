//! Which beginnings of prompts went to which peers: what their engines' prefix caches probably hold.
//!
//! A prompt is cut into chunks whose hashes form a chain, so that one hash stands for everything up to its
//! chunk. The tree is the set of these hashes with the peers that got them. It must never hold prompts, grow
//! beyond its bound, or let clients choose which hashes collide.

mod clock;
mod shard;
#[cfg(test)]
mod tests;

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use ahash::RandomState;
use arc_swap::ArcSwap;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};

use self::clock::{Clock, Clocks};
use self::shard::Shard;
use super::PeerKey;
use crate::request::PromptParts;

/// Most peers that an answer names, those that have seen most.
pub const MAX_MATCHES: usize = 16;

/// After so many chunks of one size the next ones are twice as long: a long prompt is cut more coarsely, in
/// relation to its length no coarser than this.
const CHUNKS_OF_A_SIZE: usize = 64;

/// Parts of the tree that are locked one by one.
const SHARDS: usize = 64;

/// How prompts are cut and how many pieces are remembered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrefixSettings {
    /// Most chunks that are remembered, over all prompts; some 150 bytes of memory each.
    pub entries: usize,
    /// Bytes of the first chunks of a prompt; what is shorter is not told apart.
    pub chunk_bytes: usize,
    /// Most chunks of one prompt; what comes after them is not looked at.
    pub chunks: usize,
}

impl Default for PrefixSettings {
    fn default() -> Self {
        Self { entries: 100_000, chunk_bytes: 256, chunks: 512 }
    }
}

impl PrefixSettings {
    /// Whether a tree can be made of them.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        (1..=100_000_000).contains(&self.entries)
            && (1..=1 << 20).contains(&self.chunk_bytes)
            && (1..=4096).contains(&self.chunks)
    }
}

/// A prompt as the tree sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chunks(Vec<Chunk>);

/// Everything up to the end of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    hash: u64,
    end: u64,
}

impl Chunks {
    /// How many bytes of the prompt they cover.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.last().map_or(0, |chunk| chunk.end)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the prompt is too short to be told apart.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Which peers have seen how much of a prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matched(Vec<(PeerKey, u64)>);

impl Matched {
    /// The peers and the bytes that each has seen, most first.
    pub fn peers(&self) -> impl Iterator<Item = (PeerKey, u64)> {
        self.0.iter().copied()
    }

    /// How many bytes a peer has seen.
    #[must_use]
    pub fn of(&self, peer: PeerKey) -> u64 {
        self.0.iter().find(|(seen_by, _)| *seen_by == peer).map_or(0, |(_, bytes)| *bytes)
    }

    /// What is known of some peers from elsewhere; of many, those that have most.
    pub(crate) fn known(mut peers: Vec<(PeerKey, u64)>) -> Self {
        peers.sort_unstable_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        peers.truncate(MAX_MATCHES);
        Self(peers)
    }

    fn note(&mut self, peer: PeerKey, bytes: u64) {
        if let Some((_, seen)) = self.0.iter_mut().find(|(seen_by, _)| *seen_by == peer) {
            *seen = bytes;
        } else if self.0.len() < MAX_MATCHES {
            self.0.push((peer, bytes));
        } else if let Some(least) = self.0.iter_mut().min_by_key(|(_, bytes)| *bytes) {
            // Chunks come in order, so that what is noted now is at least as long.
            *least = (peer, bytes);
        }
    }
}

/// Which beginnings of prompts went to which peers. Shared by threads; no call waits for long.
#[derive(Debug)]
pub struct PrefixTree {
    /// Drawn for this process: whoever does not know them cannot make prompts whose hashes collide.
    keys: RandomState,
    settings: PrefixSettings,
    shards: Box<[RwLock<Shard>]>,
    clocks: ArcSwap<Clocks>,
}

impl Default for PrefixTree {
    fn default() -> Self {
        Self::new(PrefixSettings::default())
    }
}

impl PrefixTree {
    /// An empty tree.
    #[must_use]
    pub fn new(settings: PrefixSettings) -> Self {
        Self::with_keys(settings, [rand::random(), rand::random(), rand::random(), rand::random()])
    }

    /// An empty tree that keeps the same chunks with the same keys.
    pub(crate) fn with_keys(settings: PrefixSettings, keys: [u64; 4]) -> Self {
        let keys = RandomState::with_seeds(keys[0], keys[1], keys[2], keys[3]);
        let shards = if settings.entries < SHARDS * SHARDS { 1 } else { SHARDS };
        let room = settings.entries / shards;
        let shards = (0..shards).map(|_| RwLock::new(Shard::new(room))).collect();
        Self { keys, settings, shards, clocks: ArcSwap::default() }
    }

    /// Cuts a prompt, in one pass over its bytes.
    #[must_use]
    pub fn chunks_of(&self, prompt: &PromptParts<'_>) -> Chunks {
        self.chunks(self.root(prompt.model, prompt.salt), prompt.closed(), prompt.open)
    }

    /// Where the chains of a model and a cache salt begin. Under another salt nothing is shared.
    fn root(&self, model: &str, salt: Option<&[u8]>) -> u64 {
        self.keys.hash_one((model, salt))
    }

    /// The chunks of the `closed` parts, each to its end, and the whole ones of `open`, which another prompt
    /// may continue.
    fn chunks<'a>(&self, root: u64, closed: impl Iterator<Item = &'a [u8]>, open: &[u8]) -> Chunks {
        let mut cut =
            Cut { keys: &self.keys, settings: &self.settings, chain: root, end: 0, chunks: Vec::new() };
        for part in closed {
            cut.take(part, true);
        }
        cut.take(open, false);
        Chunks(cut.chunks)
    }

    /// Which peers have seen how much of a prompt.
    #[must_use]
    pub fn matched(&self, chunks: &Chunks) -> Matched {
        let clocks = self.clocks.load();
        let mut matched = Matched::default();
        for chunk in &chunks.0 {
            let shard = self.shard(chunk.hash).read();
            let Some(holders) = shard.get(chunk.hash) else { break };
            for (peer, stamp) in holders {
                if clocks.get(peer).is_some_and(|clock| clock.holds(stamp)) {
                    matched.note(peer, chunk.end);
                }
            }
        }
        // The sort is stable: of those that have seen as much, who was noted first stays first.
        matched.0.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        matched
    }

    /// Remembers that a peer got a prompt.
    pub fn record(&self, chunks: &Chunks, peer: PeerKey) {
        if chunks.is_empty() {
            return;
        }
        let clock = self.clock(peer);
        let (now, mut begin, mut missed) = (clock.begin(chunks.bytes()), 0, 0);
        for chunk in &chunks.0 {
            // As in the engines, what comes first in a prompt is forgotten last.
            let stamp = now + (chunks.bytes() - begin);
            if !self.shard(chunk.hash).write().touch(chunk.hash, peer, stamp, &clock) {
                missed += chunk.end - begin;
            }
            begin = chunk.end;
        }
        clock.advance(missed);
    }

    /// Forgets what a peer has seen: it is gone, or its engine has restarted.
    pub fn forget(&self, peer: PeerKey) {
        self.clocks.rcu(|clocks| clocks.without(peer));
    }

    /// How many bytes of prompts a peer's cache holds; what is older is taken for forgotten. None where
    /// that is not known.
    pub fn set_capacity(&self, peer: PeerKey, bytes: Option<u64>) {
        self.clock(peer).set_capacity(bytes);
    }

    /// How many chunks are remembered.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().len()).sum()
    }

    fn shard(&self, hash: u64) -> &RwLock<Shard> {
        // The low and the highest bits are those by which the maps inside find their places.
        &self.shards[(hash >> 40) as usize % self.shards.len()]
    }

    fn clock(&self, peer: PeerKey) -> Arc<Clock> {
        if let Some(clock) = self.clocks.load().get(peer) {
            return Arc::clone(clock);
        }
        self.clocks.rcu(|clocks| clocks.with(peer));
        match self.clocks.load().get(peer) {
            Some(clock) => Arc::clone(clock),
            // Forgotten in this very moment: what is recorded now counts for nothing.
            None => Arc::default(),
        }
    }
}

/// A prompt that is being cut.
struct Cut<'a> {
    keys: &'a RandomState,
    settings: &'a PrefixSettings,
    chain: u64,
    end: u64,
    chunks: Vec<Chunk>,
}

impl Cut<'_> {
    fn take(&mut self, mut part: &[u8], whole: bool) {
        while !part.is_empty() && self.chunks.len() < self.settings.chunks {
            let doublings = u32::try_from(self.chunks.len() / CHUNKS_OF_A_SIZE).unwrap_or(u32::MAX);
            let size = self
                .settings
                .chunk_bytes
                .saturating_mul(1_usize.checked_shl(doublings).unwrap_or(usize::MAX));
            if part.len() < size && !whole {
                return;
            }
            let (chunk, rest) = part.split_at(size.min(part.len()));
            let mut hasher = self.keys.build_hasher();
            hasher.write_u64(self.chain);
            hasher.write(chunk);
            self.chain = hasher.finish();
            self.end += chunk.len() as u64;
            self.chunks.push(Chunk { hash: self.chain, end: self.end });
            part = rest;
        }
    }
}
