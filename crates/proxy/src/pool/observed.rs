//! What was learnt about a peer: probes, hand-offs and failures write it, every request reads it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::{ArcSwap, Guard};
use kv_connector::protocol::params::{Generation, TransferMode};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::value::RawValue;

/// What was learnt about a peer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observed {
    pub(crate) state: PeerState,
    /// Probes in a row without an answer.
    pub(crate) silent: u32,
    pub(crate) generation: Option<Generation>,
    pub(crate) version: Option<String>,
    pub(crate) models: Arc<[ServedModel]>,
    /// How often the ids in it have changed.
    pub(crate) models_changed: u64,
    pub(crate) engine_ids: BTreeSet<String>,
    /// Which side drives the copy, as its last hand-off said.
    pub(crate) transfer_mode: Option<TransferMode>,
    /// Tensor-parallel size, as its last hand-off said.
    pub(crate) tp_size: Option<u32>,
    pub(crate) last_error: Option<PeerFault>,
}

/// The latest [`Observed`] of a peer. Who reads it never waits, and so may ask the peer anything
/// meanwhile: a lock that is read again by who has it already stands still for ever when a writer
/// asks for it between the two.
#[derive(Debug)]
pub(crate) struct Observations {
    latest: ArcSwap<Observed>,
    /// Whether the state in it is `Ready`: every choice asks that of several peers.
    ready: AtomicBool,
    /// Held by who makes the next one.
    change: Mutex<()>,
}

impl Observations {
    pub(crate) fn new(observed: Observed) -> Self {
        let ready = AtomicBool::new(observed.state == PeerState::Ready);
        Self { latest: ArcSwap::from_pointee(observed), ready, change: Mutex::default() }
    }

    /// As it is now; what changes afterwards does not show in it.
    pub(crate) fn now(&self) -> Guard<Arc<Observed>> {
        self.latest.load()
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Makes the next one, after every change before this; the one before and the one made. The
    /// closure must not change it once more.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Observed)) -> (Arc<Observed>, Arc<Observed>) {
        let _alone = self.change.lock();
        let before = self.latest.load_full();
        let mut next = Observed::clone(&before);
        change(&mut next);
        let next = Arc::new(next);
        self.latest.store(Arc::clone(&next));
        self.ready.store(next.state == PeerState::Ready, Ordering::Release);
        (before, next)
    }
}

/// Whether a peer takes requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerState {
    /// Never answered a probe yet.
    #[default]
    Unknown,
    /// Answered its last probe.
    Ready,
    /// Did not answer, or not healthily.
    Unreachable,
}

/// A model in a peer's list, with the text of its entry.
#[derive(Clone, Debug)]
pub(crate) struct ServedModel {
    pub(crate) id: String,
    pub(crate) entry: Box<RawValue>,
}

impl ServedModel {
    /// Whether it is an adapter of another model.
    pub(super) fn is_adapter(&self) -> bool {
        #[derive(serde::Deserialize)]
        struct Entry {
            parent: Option<String>,
        }
        serde_json::from_str::<Entry>(self.entry.get()).is_ok_and(|entry| entry.parent.is_some())
    }
}

/// The last thing that went wrong with a peer.
#[derive(Clone, Debug, Serialize)]
pub struct PeerFault {
    /// What went wrong, as a code.
    pub kind: String,
    /// When, in seconds of Unix time.
    pub at: u64,
}

impl PeerFault {
    pub(crate) fn now(kind: impl Into<String>) -> Self {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self { kind: kind.into(), at }
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::Proxy;
    use crate::pool::{PeerSpec, Role};
    use crate::settings::Settings;

    #[tokio::test]
    async fn nobody_who_looks_at_a_peer_waits_for_who_changes_it() {
        let proxy = Proxy::start(Settings::default(), TaskTracker::new(), CancellationToken::new());
        let peer = proxy.core.pool.add(PeerSpec::new(Role::Prefill, "http://p:1")).unwrap();
        // Everybody looks between the beginning and the end of a change: whoever took a lock for it
        // would stand still here.
        peer.observed.change(|observed| {
            observed.state = PeerState::Ready;
            assert!(!proxy.peers()[0].accepts && !peer.is_open() && !peer.serves("m"));
            assert!(serde_json::to_string(&peer.glance(|_| 0)).is_ok_and(|seen| seen.contains("unknown")));
            assert!(proxy.models().ids().is_empty());
            assert!(!peer.pushes() && peer.generation().is_none() && !peer.is_bound());
        });
        assert!(proxy.peers()[0].accepts && peer.is_open());
    }

    #[test]
    fn no_change_is_lost_among_many_at_once() {
        let observations = Observations::new(Observed::default());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..500).for_each(|_| drop(observations.change(|o| o.silent += 1))));
            }
        });
        assert_eq!(observations.now().silent, 2000);
    }
}
