//! The changes of the registry, numbered; the newest are kept for those who resume.
//! Never keeps payloads: what is past must not hold memory that engines decide about.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::record::EngineSummary;

/// What happened to an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// It is new.
    Registered,
    /// Something about it is different now.
    Updated,
    /// It deregistered or was removed.
    Removed,
    /// It was silent for longer than it promised.
    Expired,
    /// Another engine has its address now.
    Replaced,
}

impl ChangeKind {
    /// The name on the wire.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Updated => "updated",
            Self::Removed => "removed",
            Self::Expired => "expired",
            Self::Replaced => "replaced",
        }
    }

    /// Whether the engine is gone after it.
    #[must_use]
    pub const fn is_departure(self) -> bool {
        matches!(self, Self::Removed | Self::Expired | Self::Replaced)
    }
}

/// One change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RegistryChange {
    /// Its number; later ones are higher, also across restarts of the router.
    pub revision: u64,
    /// What happened.
    pub kind: ChangeKind,
    /// The engine, as it is after the change or was before it left.
    pub engine: EngineSummary,
    /// Who has the address now, when the engine was replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced_by: Option<String>,
    /// The credential that owns the engine.
    #[serde(skip)]
    pub(crate) owner: Option<Arc<str>>,
    /// The model that it had before, where the change is of that.
    #[serde(skip)]
    pub(crate) model_before: Option<String>,
}

/// The newest changes in order.
#[derive(Debug)]
pub(crate) struct History {
    revision: u64,
    /// The revision after which everything is kept.
    complete_after: u64,
    changes: VecDeque<Arc<RegistryChange>>,
    kept: usize,
    /// What the next change is to be numbered at least.
    floor: u64,
}

impl History {
    pub(crate) fn new(kept: usize) -> Self {
        // Microseconds since 1970 at the start: a restarted router counts on above its earlier
        // life, so that nobody resumes into another history unnoticed. Fits a JSON number.
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let revision = u64::try_from(start).unwrap_or_default().saturating_mul(1000);
        Self { revision, complete_after: revision, changes: VecDeque::new(), kept, floor: 0 }
    }

    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// The number of the next change.
    pub(crate) fn advance(&mut self) -> u64 {
        self.revision = (self.revision + 1).max(self.floor);
        self.revision
    }

    /// Numbers the next change at least so high: a shared store's numbers are the same everywhere.
    #[cfg(feature = "etcd")]
    pub(crate) fn number_from(&mut self, floor: u64) {
        self.floor = floor;
    }

    /// Forgets all changes; what follows is numbered above `revision`. Never counts back, unless it
    /// has not begun to count for a shared store.
    #[cfg(feature = "etcd")]
    pub(crate) fn restart(&mut self, revision: u64) {
        self.changes.clear();
        (self.revision, self.complete_after, self.floor) = (revision, revision, 0);
    }

    pub(crate) fn push(&mut self, change: RegistryChange) {
        if self.changes.len() >= self.kept
            && let Some(oldest) = self.changes.pop_front()
        {
            self.complete_after = oldest.revision;
        }
        self.changes.push_back(Arc::new(change));
    }

    /// Whether everything after a revision is still there.
    pub(crate) fn reaches(&self, revision: u64) -> bool {
        (self.complete_after..=self.revision).contains(&revision)
    }

    /// At most `limit` changes after a revision, `None` when some are no longer known.
    pub(crate) fn since(&self, revision: u64, limit: usize) -> Option<Vec<Arc<RegistryChange>>> {
        if !self.reaches(revision) {
            return None;
        }
        let start = self.changes.partition_point(|change| change.revision <= revision);
        Some(self.changes.range(start..).take(limit).cloned().collect())
    }
}
