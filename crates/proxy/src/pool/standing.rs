//! How a peer stands in the fleet apart from its health: whether operators and its engines let it
//! have new requests, and which lives of its engines there were.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Notify;

use super::origin::Origin;
use super::pairing::Identity;
use crate::registry::{EngineRecord, EngineState};

/// Restarts of a peer's engines that the registry saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Restarts {
    /// How many.
    pub count: u64,
    /// When the last one was seen, in seconds of Unix time.
    pub last_at: u64,
}

/// One peer's standing.
#[derive(Debug, Default)]
pub(crate) struct Standing {
    origin: Origin,
    leaving: AtomicBool,
    drained: AtomicBool,
    quarantined: AtomicBool,
    /// An engine of it is registering or draining.
    closed: AtomicBool,
    /// The last known life at each data-parallel rank.
    lives: Mutex<BTreeMap<u32, Arc<EngineRecord>>>,
    restarts: Mutex<Option<Restarts>>,
    /// Told when an exchange ends or the standing changes.
    pub(crate) moved: Notify,
}

impl Standing {
    pub(crate) fn of(origin: Origin) -> Self {
        Self { origin, ..Self::default() }
    }

    pub(crate) const fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Whether it came by its engines' registration, and leaves with them.
    pub(crate) const fn is_adopted(&self) -> bool {
        matches!(self.origin, Origin::Registration)
    }

    /// Whether it may have new requests.
    pub(crate) fn is_open(&self) -> bool {
        !self.is_leaving() && !self.is_drained() && !self.closed.load(Ordering::SeqCst)
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::SeqCst)
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.drained.load(Ordering::SeqCst)
    }

    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantined.load(Ordering::SeqCst)
    }

    /// Whether that is news.
    pub(crate) fn set_leaving(&self, leaving: bool) -> bool {
        self.set(&self.leaving, leaving)
    }

    pub(crate) fn set_drained(&self, drained: bool) -> bool {
        self.set(&self.drained, drained)
    }

    pub(crate) fn set_quarantined(&self, quarantined: bool) -> bool {
        self.set(&self.quarantined, quarantined)
    }

    fn set(&self, flag: &AtomicBool, value: bool) -> bool {
        let news = flag.swap(value, Ordering::SeqCst) != value;
        if news {
            self.moved.notify_waiters();
        }
        news
    }

    pub(crate) fn restarts(&self) -> Option<Restarts> {
        *self.restarts.lock()
    }

    /// Takes over what the registry says now; the ids of engines whose life has ended by another's
    /// beginning at their place.
    pub(crate) fn learn(&self, identity: &Identity) -> Vec<String> {
        let closed = !matches!(identity.state(), None | Some(EngineState::Ready));
        self.set(&self.closed, closed);
        if !identity.at_address {
            return Vec::new();
        }
        let mut lives = self.lives.lock();
        let mut ended = Vec::new();
        for engine in &identity.engines {
            let before = lives.insert(engine.dp_rank, Arc::clone(engine));
            if let Some(before) = before.filter(|before| engine.is_another_life(before)) {
                ended.push(before.engine_id.clone());
            }
        }
        if !ended.is_empty() {
            let last_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            let mut restarts = self.restarts.lock();
            let count = restarts.map_or(0, |restarts| restarts.count) + ended.len() as u64;
            *restarts = Some(Restarts { count, last_at });
        }
        ended
    }
}
