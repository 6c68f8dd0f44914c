//! How much each peer has been given since: the age of what it has seen, against what its cache holds.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::PeerKey;
use super::shard::Prehashed;

/// A peer's clock. It counts bytes of prompts that were new to the peer.
#[derive(Debug)]
pub(super) struct Clock {
    now: AtomicU64,
    /// What bears this stamp or an older one was seen by another life of the peer.
    floor: u64,
    highest: AtomicU64,
    capacity: AtomicU64,
}

impl Default for Clock {
    fn default() -> Self {
        Self::starting(0)
    }
}

impl Clock {
    fn starting(floor: u64) -> Self {
        Self {
            now: AtomicU64::new(floor),
            floor,
            highest: AtomicU64::new(floor),
            capacity: AtomicU64::new(u64::MAX),
        }
    }

    /// The time at which a prompt of so many bytes is seen.
    pub(super) fn begin(&self, bytes: u64) -> u64 {
        let now = self.now.load(Ordering::Relaxed);
        self.highest.fetch_max(now + bytes, Ordering::Relaxed);
        now
    }

    pub(super) fn advance(&self, bytes: u64) {
        self.now.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether what was seen then is still in the cache.
    pub(super) fn holds(&self, stamp: u64) -> bool {
        let age = self.now.load(Ordering::Relaxed).saturating_sub(stamp);
        stamp > self.floor && age <= self.capacity.load(Ordering::Relaxed)
    }

    pub(super) fn set_capacity(&self, bytes: Option<u64>) {
        self.capacity.store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// The clocks of all peers.
#[derive(Clone, Debug, Default)]
pub(super) struct Clocks {
    by_peer: HashMap<PeerKey, Arc<Clock>, Prehashed>,
    /// The latest stamp of those that were forgotten.
    floor: u64,
}

impl Clocks {
    pub(super) fn get(&self, peer: PeerKey) -> Option<&Arc<Clock>> {
        self.by_peer.get(&peer)
    }

    pub(super) fn with(&self, peer: PeerKey) -> Self {
        let mut clocks = self.clone();
        clocks.by_peer.entry(peer).or_insert_with(|| Arc::new(Clock::starting(self.floor)));
        clocks
    }

    pub(super) fn without(&self, peer: PeerKey) -> Self {
        let mut clocks = self.clone();
        if let Some(clock) = clocks.by_peer.remove(&peer) {
            clocks.floor = clocks.floor.max(clock.highest.load(Ordering::Relaxed));
        }
        clocks
    }
}
