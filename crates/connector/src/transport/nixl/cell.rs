//! What the transport's thread and its callers share: transfer states, notifications, metadata.

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use parking_lot::Mutex;

use crate::transport::{AgentName, Telemetry, TransferState};

/// Notifications kept until they are taken; what comes on top is dropped, as a lost one costs
/// no more than a lease's time.
const MAX_NOTIFICATIONS: usize = 1 << 16;

const IDLE: u8 = 0;
const IN_PROGRESS: u8 = 1;
const DONE: u8 = 2;
const FAILED: u8 = 3;
/// In progress, but to fail whatever NIXL says of it.
const DOOMED: u8 = 4;

/// The state of one transfer.
#[derive(Debug)]
pub(super) struct TransferCell {
    phase: AtomicU8,
    telemetry: Mutex<Option<Telemetry>>,
    /// Descriptor pairs; NIXL counts what is left after it has merged neighbours.
    pub(super) pairs: u64,
}

impl TransferCell {
    pub(super) fn new(pairs: u64) -> Self {
        Self { phase: AtomicU8::new(IDLE), telemetry: Mutex::new(None), pairs }
    }

    /// Notes that it is about to be posted; false while an earlier post has not ended.
    pub(super) fn begin(&self) -> bool {
        let begun = self.phase.fetch_update(Ordering::AcqRel, Ordering::Acquire, |phase| {
            (!matches!(phase, IN_PROGRESS | DOOMED)).then_some(IN_PROGRESS)
        });
        if begun.is_ok() {
            *self.telemetry.lock() = None;
        }
        begun.is_ok()
    }

    /// Takes back [`begin`](Self::begin), when posting was refused.
    pub(super) fn withdraw(&self) {
        self.phase.store(IDLE, Ordering::Release);
    }

    /// Makes a transfer in progress fail once it has ended, as its peer was removed.
    pub(super) fn doom(&self) {
        let _ended = self.phase.compare_exchange(IN_PROGRESS, DOOMED, Ordering::AcqRel, Ordering::Acquire);
    }

    pub(super) fn fail(&self) {
        self.phase.store(FAILED, Ordering::Release);
    }

    pub(super) fn complete(&self, telemetry: Option<Telemetry>) {
        *self.telemetry.lock() = telemetry;
        // Whoever sees the new phase also sees the bytes and the measurements.
        if self.phase.compare_exchange(IN_PROGRESS, DONE, Ordering::AcqRel, Ordering::Acquire).is_err() {
            *self.telemetry.lock() = None;
            self.fail();
        }
    }

    pub(super) fn is_in_progress(&self) -> bool {
        matches!(self.phase.load(Ordering::Acquire), IN_PROGRESS | DOOMED)
    }

    pub(super) fn state(&self) -> TransferState {
        match self.phase.load(Ordering::Acquire) {
            DONE => TransferState::Done,
            FAILED => TransferState::Failed,
            _ => TransferState::InProgress,
        }
    }

    pub(super) fn telemetry(&self) -> Option<Telemetry> {
        *self.telemetry.lock()
    }
}

/// What the thread leaves for its callers.
#[derive(Debug, Default)]
pub(super) struct Shared {
    metadata: Mutex<Vec<u8>>,
    notifications: Mutex<VecDeque<(AgentName, Vec<u8>)>>,
    /// Agents to which a connection broke: NIXL never mends it by itself.
    broken: Mutex<HashSet<AgentName>>,
    stopped: AtomicBool,
}

impl Shared {
    pub(super) fn set_metadata(&self, metadata: Vec<u8>) {
        *self.metadata.lock() = metadata;
    }

    pub(super) fn metadata(&self) -> Vec<u8> {
        self.metadata.lock().clone()
    }

    pub(super) fn deliver(&self, agent: &str, message: Vec<u8>) {
        let mut notifications = self.notifications.lock();
        if notifications.len() < MAX_NOTIFICATIONS {
            notifications.push_back((AgentName(agent.to_owned()), message));
        } else {
            tracing::warn!(agent, "notification dropped: too many wait to be taken");
        }
    }

    pub(super) fn take_notifications(&self) -> Vec<(AgentName, Vec<u8>)> {
        self.notifications.lock().drain(..).collect()
    }

    pub(super) fn set_broken(&self, agent: &str) {
        self.broken.lock().insert(AgentName(agent.to_owned()));
    }

    pub(super) fn set_whole(&self, agent: &AgentName) {
        self.broken.lock().remove(agent);
    }

    pub(super) fn is_broken(&self, agent: &AgentName) -> bool {
        self.broken.lock().contains(agent)
    }

    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    pub(super) fn has_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_whose_peer_is_removed_fails_unless_it_has_ended() {
        let cell = TransferCell::new(1);
        cell.doom();
        assert!(cell.begin() && !cell.begin());
        cell.doom();
        assert!(cell.is_in_progress() && !cell.begin(), "its bytes may still arrive");
        assert_eq!(cell.state(), TransferState::InProgress);
        cell.complete(None);
        assert_eq!(cell.state(), TransferState::Failed);
        assert!(cell.begin());
        cell.complete(None);
        cell.doom();
        assert_eq!(cell.state(), TransferState::Done);
    }

    #[test]
    fn notifications_beyond_the_limit_are_dropped() {
        let shared = Shared::default();
        for _ in 0..=MAX_NOTIFICATIONS {
            shared.deliver("p", Vec::new());
        }
        assert_eq!(shared.take_notifications().len(), MAX_NOTIFICATIONS);
        shared.deliver("p", vec![1]);
        assert_eq!(shared.take_notifications(), [(AgentName("p".to_owned()), vec![1])]);
    }
}
