//! Every hand-off that a prefill engine granted, until its blocks are free again.
//! Pure bookkeeping: sends nothing and sets no timer.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use foldhash::fast::RandomState;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::metrics::{HandOffResult, Metrics};

/// Where a live hand-off is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HandOffState {
    /// Granted by the prefill engine, not yet sent to a decode engine.
    Granted,
    /// Sent to a decode engine, which has not shown that it read the blocks.
    Dispatched,
    /// No decode engine took it; the router is making the prefill engine free the blocks.
    Releasing,
    /// The release has failed so far; another try or the end of the lease frees the blocks.
    Stranded,
}

/// What is known of a hand-off when it is granted.
#[derive(Clone, Debug)]
pub(crate) struct Granted {
    pub(crate) request_id: String,
    pub(crate) prefill: String,
    pub(crate) engine_id: String,
    pub(crate) remote_request_id: String,
    pub(crate) blocks: usize,
    pub(crate) lease: Duration,
}

#[derive(Debug)]
struct Entry {
    granted: Granted,
    since: Instant,
    state: HandOffState,
    decode: Option<String>,
}

/// All live hand-offs.
#[derive(Debug)]
pub(crate) struct Ledger {
    entries: Mutex<HashMap<u64, Entry, RandomState>>,
    next: AtomicU64,
    /// Told when a hand-off has ended.
    pub(crate) moved: Notify,
    metrics: Arc<Metrics>,
}

impl Ledger {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        Self { entries: Mutex::default(), next: AtomicU64::new(0), moved: Notify::new(), metrics }
    }

    /// Opens an entry; its key closes it.
    pub(crate) fn open(&self, granted: Granted) -> u64 {
        let key = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = Entry { granted, since: Instant::now(), state: HandOffState::Granted, decode: None };
        let live = {
            let mut entries = self.entries.lock();
            entries.insert(key, entry);
            entries.len()
        };
        self.metrics.hand_offs_live(live);
        key
    }

    /// The hand-off went to a decode engine.
    pub(crate) fn dispatched(&self, key: u64, decode: &str) {
        if let Some(entry) = self.entries.lock().get_mut(&key) {
            entry.state = HandOffState::Dispatched;
            entry.decode = Some(decode.to_owned());
        }
    }

    /// The hand-off's way to freedom changed.
    pub(crate) fn enter(&self, key: u64, state: HandOffState) {
        if let Some(entry) = self.entries.lock().get_mut(&key) {
            entry.state = state;
        }
    }

    /// The blocks are free, or on their way to be.
    pub(crate) fn close(&self, key: u64, result: HandOffResult) {
        let (closed, live) = {
            let mut entries = self.entries.lock();
            (entries.remove(&key), entries.len())
        };
        if let Some(Entry { granted: Granted { request_id, remote_request_id, .. }, decode, since, .. }) =
            closed
        {
            tracing::debug!(request_id, remote_request_id, decode, ?result, "a hand-off has ended");
            self.metrics.hand_off_ended(result, since.elapsed());
            self.metrics.hand_offs_live(live);
            self.moved.notify_waiters();
        }
    }

    /// Drops the stranded entries whose lease has ended and returns how many there were.
    pub(crate) fn sweep(&self) -> usize {
        let now = Instant::now();
        let mut held = Vec::new();
        let live = {
            let mut entries = self.entries.lock();
            entries.retain(|_, entry| {
                let stays = entry.state != HandOffState::Stranded || now < entry.since + entry.granted.lease;
                if !stays {
                    held.push(now - entry.since);
                }
                stays
            });
            entries.len()
        };
        let expired = held.len();
        for held in held {
            self.metrics.hand_off_ended(HandOffResult::Expired, held);
        }
        self.metrics.hand_offs_live(live);
        if expired > 0 {
            self.moved.notify_waiters();
        }
        expired
    }

    /// How many blocks the live hand-offs hold, and how old the oldest one is.
    pub(crate) fn held(&self) -> (usize, Duration) {
        let entries = self.entries.lock();
        let oldest = entries.values().map(|entry| entry.since).min();
        let blocks = entries.values().map(|entry| entry.granted.blocks).sum();
        (blocks, oldest.map(|since| since.elapsed()).unwrap_or_default())
    }

    /// How many live hand-offs a peer granted or was sent.
    pub(crate) fn of_peer(&self, id: &str) -> usize {
        let entries = self.entries.lock();
        let of_peer = |entry: &&Entry| entry.granted.prefill == id || entry.decode.as_deref() == Some(id);
        entries.values().filter(of_peer).count()
    }

    /// How many there are, and the oldest of them, at most so many; `millis` puts a moment on the router's
    /// clock.
    pub(crate) fn glance(
        &self,
        limit: usize,
        millis: impl Fn(Instant) -> u64,
    ) -> (usize, Vec<HandOffGlance>) {
        let entries = self.entries.lock();
        let mut keys: Vec<u64> = entries.keys().copied().collect();
        let live = keys.len();
        keys.sort_unstable();
        let glance = |key: u64| {
            let entry = entries.get(&key)?;
            let granted = &entry.granted;
            Some(HandOffGlance {
                key,
                request_id: granted.request_id.clone(),
                state: entry.state,
                prefill: granted.prefill.clone(),
                decode: entry.decode.clone(),
                blocks: granted.blocks,
                granted_ms: millis(entry.since),
                ends_ms: millis(entry.since + granted.lease),
            })
        };
        (live, keys.into_iter().take(limit).filter_map(glance).collect())
    }

    pub(crate) fn views(&self) -> Vec<HandOffView> {
        let now = Instant::now();
        let mut views: Vec<(u64, HandOffView)> = self
            .entries
            .lock()
            .iter()
            .map(|(key, entry)| {
                let left = (entry.since + entry.granted.lease).saturating_duration_since(now);
                let view = HandOffView {
                    request_id: entry.granted.request_id.clone(),
                    state: entry.state,
                    prefill: entry.granted.prefill.clone(),
                    decode: entry.decode.clone(),
                    engine_id: entry.granted.engine_id.clone(),
                    remote_request_id: entry.granted.remote_request_id.clone(),
                    blocks: entry.granted.blocks,
                    age_seconds: (now - entry.since).as_secs_f64(),
                    lease_left_seconds: left.as_secs_f64(),
                };
                (*key, view)
            })
            .collect();
        views.sort_unstable_by_key(|(key, _)| *key);
        views.into_iter().map(|(_, view)| view).collect()
    }
}

/// A live hand-off as operators see it.
#[derive(Clone, Debug, Serialize)]
pub struct HandOffView {
    /// The request it belongs to.
    pub request_id: String,
    /// Where it is.
    pub state: HandOffState,
    /// Id of the prefill peer that granted it.
    pub prefill: String,
    /// Id of the decode peer that it was sent to.
    pub decode: Option<String>,
    /// Engine that holds the blocks.
    pub engine_id: String,
    /// That engine's own id of the request.
    pub remote_request_id: String,
    /// How many blocks it holds.
    pub blocks: usize,
    /// Seconds since the grant.
    pub age_seconds: f64,
    /// Seconds until the lease ends unless a decode engine renews it.
    pub lease_left_seconds: f64,
}

/// A live hand-off among others, on the router's own clock.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct HandOffGlance {
    pub(crate) key: u64,
    pub(crate) request_id: String,
    pub(crate) state: HandOffState,
    pub(crate) prefill: String,
    pub(crate) decode: Option<String>,
    pub(crate) blocks: usize,
    pub(crate) granted_ms: u64,
    pub(crate) ends_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn granted(lease: Duration) -> Granted {
        Granted {
            request_id: "r".into(),
            prefill: "prefill-1".into(),
            engine_id: "e".into(),
            remote_request_id: "cmpl-r-0".into(),
            blocks: 3,
            lease,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_stranded_entries_expire() {
        let ledger = Ledger::new(Metrics::new());
        let lease = Duration::from_secs(30);
        let stranded = ledger.open(granted(lease));
        let read = ledger.open(granted(lease));
        ledger.dispatched(read, "decode-1");
        ledger.enter(stranded, HandOffState::Stranded);
        tokio::time::advance(Duration::from_secs(29)).await;
        assert_eq!(ledger.sweep(), 0);
        assert!((ledger.views()[0].lease_left_seconds - 1.0).abs() < 0.01);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(ledger.sweep(), 1);
        let left = ledger.views();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].state, HandOffState::Dispatched);
        assert_eq!(left[0].decode.as_deref(), Some("decode-1"));
        ledger.close(read, HandOffResult::Relayed);
        assert!(ledger.views().is_empty());
    }
}
