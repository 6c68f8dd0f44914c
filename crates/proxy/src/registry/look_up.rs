//! Reading the registry: at once, or for a bounded time until there is something to read.
//! Never shows an engine whose time ran out, and never waits longer than a consumer does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::Registry;
use super::record::{EngineRecord, EngineState, RankView};

/// Why a look-up found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// No such engine, or no such rank of it.
    Unknown,
    /// The engine is still registering.
    NotReady,
}

impl Registry {
    /// One rank of an engine that serves.
    ///
    /// # Errors
    /// It is not there, or not yet.
    pub fn look_up(&self, engine_id: &str, pp_rank: u32, tp_rank: u32) -> Result<Found, Missing> {
        let engine = self.look_up_engine(engine_id)?;
        let rank = engine.ranks.get(&(pp_rank, tp_rank)).cloned().ok_or(Missing::Unknown)?;
        Ok(Found { engine, rank })
    }

    /// An engine that serves, with all its ranks.
    ///
    /// # Errors
    /// It is not there, or not yet.
    pub fn look_up_engine(&self, engine_id: &str) -> Result<Arc<EngineRecord>, Missing> {
        let engine = self.engine(engine_id).ok_or(Missing::Unknown)?;
        match engine.state {
            EngineState::Registering => Err(Missing::NotReady),
            EngineState::Ready | EngineState::Draining => Ok(engine),
        }
    }

    /// Looks until something is found, for at most `wait` and the registry's own bound; at once
    /// when too many wait already. Dropping the future is safe.
    ///
    /// # Errors
    /// What the last look said.
    pub async fn look_within<T>(
        &self,
        wait: Duration,
        look: impl Fn(&Self) -> Result<T, Missing>,
    ) -> Result<T, Missing> {
        let mut revision = self.subscribe();
        revision.mark_unchanged();
        let first = look(self);
        if first.is_ok() || wait.is_zero() || self.is_closed() {
            return first;
        }
        let Some(_place) = WaitingPlace::take(self) else { return first };
        let deadline = Instant::now() + wait.min(self.shared.limits.longest_wait);
        loop {
            tokio::select! {
                () = self.shared.closing.cancelled() => return look(self),
                () = tokio::time::sleep_until(deadline) => return look(self),
                changed = revision.changed() => {
                    let found = look(self);
                    if found.is_ok() || changed.is_err() {
                        return found;
                    }
                }
            }
        }
    }
}

/// A rank and whose it is.
#[derive(Clone, Debug)]
pub struct Found {
    /// The engine.
    pub engine: Arc<EngineRecord>,
    /// The rank.
    pub rank: Arc<RankView>,
}

struct WaitingPlace<'a>(&'a Registry);

impl<'a> WaitingPlace<'a> {
    fn take(registry: &'a Registry) -> Option<Self> {
        let place = Self(registry);
        let before = registry.shared.waiting.fetch_add(1, Ordering::Relaxed);
        (before < registry.shared.limits.waiters).then_some(place)
    }
}

impl Drop for WaitingPlace<'_> {
    fn drop(&mut self) {
        self.0.shared.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
