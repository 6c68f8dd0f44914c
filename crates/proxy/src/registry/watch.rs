//! Following the registry: a watcher owns nothing but a position, so a slow one costs no memory;
//! one whose next change is no longer known is cut off.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::change::RegistryChange;
use super::error::RegistryError;
use super::{Changes, Registry, RegistrySnapshot};

/// Changes that are handed out at once.
pub(crate) const BATCH: usize = 64;

/// The positions of those who watch.
#[derive(Debug, Default)]
pub(crate) struct Watchers {
    positions: Mutex<Positions>,
}

#[derive(Debug, Default)]
struct Positions {
    next: u64,
    open: BTreeMap<u64, Arc<AtomicU64>>,
}

impl Watchers {
    /// Takes a place; one that a watcher holds who has lost its position is free.
    fn enter(&self, position: &Arc<AtomicU64>, limit: usize, lost: impl Fn(u64) -> bool) -> Option<u64> {
        let mut positions = self.positions.lock();
        if positions.open.len() >= limit {
            positions.open.retain(|_, position| !lost(position.load(Ordering::Relaxed)));
        }
        if positions.open.len() >= limit {
            return None;
        }
        positions.next += 1;
        let id = positions.next;
        positions.open.insert(id, Arc::clone(position));
        Some(id)
    }

    fn leave(&self, id: u64) {
        self.positions.lock().open.remove(&id);
    }
}

/// What a watcher is told.
#[derive(Clone, Debug)]
pub enum Watched {
    /// Where it wanted to resume is not known any more: everything as it is now.
    Reset(Arc<RegistrySnapshot>),
    /// What happened since, in order; never empty.
    Changes(Vec<Arc<RegistryChange>>),
}

/// Somebody who follows the registry; dropping it frees its place.
#[derive(Debug)]
pub struct Watcher {
    registry: Registry,
    id: u64,
    position: Arc<AtomicU64>,
    may_reset: bool,
}

impl Registry {
    /// Starts to follow the changes after a revision, or with everything as it is now.
    ///
    /// # Errors
    /// There are too many watchers.
    pub fn watch(&self, since: Option<u64>) -> Result<Watcher, RegistryError> {
        let position = Arc::new(AtomicU64::new(since.unwrap_or(0)));
        let limit = self.shared.limits.watchers;
        let id = {
            let state = self.shared.state.read();
            // A place is lost behind the history only; who has not begun is at 0 or anywhere.
            self.shared.watchers.enter(&position, limit, |at| at != 0 && !state.history.reaches(at))
        };
        let id = id.ok_or(RegistryError::TooManyWatchers { limit })?;
        Ok(Watcher { registry: self.clone(), id, position, may_reset: true })
    }
}

impl Watcher {
    /// What happened next. Waits for it; `None` when the watcher fell behind what is kept, or the
    /// router leaves. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Watched> {
        let mut revision = self.registry.subscribe();
        loop {
            if self.registry.is_closed() {
                return None;
            }
            revision.mark_unchanged();
            match self.registry.changes_since(self.position.load(Ordering::Relaxed)) {
                Changes::After(changes) => {
                    self.may_reset = false;
                    if let Some(last) = changes.last() {
                        self.position.store(last.revision, Ordering::Relaxed);
                        return Some(Watched::Changes(changes));
                    }
                }
                Changes::Forgotten(snapshot) => {
                    if !std::mem::take(&mut self.may_reset) {
                        return None;
                    }
                    self.position.store(snapshot.revision, Ordering::Relaxed);
                    return Some(Watched::Reset(snapshot));
                }
            }
            tokio::select! {
                () = self.registry.shared.closing.cancelled() => return None,
                changed = revision.changed() => if changed.is_err() { return None },
            }
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.registry.shared.watchers.leave(self.id);
    }
}
