//! The registry as this router's copy of what a store keeps for several: plans of changes, which the
//! store makes true for all, and the store's own events, which are all that changes the copy.
//! Knows no store; never changes a shared engine by itself.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::change::ChangeKind;
use super::clock::{ClockReading, SharedReading};
use super::error::RegistryError;
use super::life::{compose, continue_life, receipt, unnamed};
use super::ownership::Writer;
use super::record::{EngineRecord, Rank, RankView};
use super::registration::{Heartbeat, Registration, check_payload};
use super::state::State;
use super::{Receipt, Registered, Registry};

/// Departures of one store revision that keep numbers of their own; the engine that came in the same
/// revision is numbered after them.
const NUMBERS: u64 = 256;

/// Where a store has an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// The store's revision of the engine's record.
    pub(crate) revision: i64,
    /// The store's lease; 0 when it has none.
    pub(crate) lease: i64,
    /// The store lost it, perhaps only because nobody could renew its lease.
    pub(crate) lost: bool,
    /// When its lease was renewed from here.
    pub(crate) renewed: Option<Instant>,
    /// When its clock was told to the other routers.
    pub(crate) clock_told: Option<Instant>,
}

/// A change that a store is to make true.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The engine as it is to be.
    pub(crate) record: EngineRecord,
    /// The engine as it is.
    pub(crate) known: Option<Arc<EngineRecord>>,
    /// What the store has of it.
    pub(crate) stored: Option<Stored>,
    /// The engine that the store has at its address.
    pub(crate) holder: Option<String>,
}

impl Plan {
    /// Whether there is nothing to change.
    pub(crate) fn is_done(&self) -> bool {
        self.stored.is_some() && self.known.as_ref().is_some_and(|known| known.says_the_same(&self.record))
    }

    /// Whether the engine goes on with its life.
    pub(crate) fn same_life(&self) -> bool {
        self.known.as_ref().is_some_and(|known| Arc::ptr_eq(&known.pulse, &self.record.pulse))
    }

    /// Whether the engine is to be in another state than it is.
    pub(crate) fn changes_state(&self) -> bool {
        self.known.as_ref().is_none_or(|known| known.state != self.record.state)
    }

    /// What was taken by somebody else while `earlier` was tried.
    pub(crate) fn lost_since(&self, earlier: &Self) -> Option<RegistryError> {
        let engine_id = || self.record.engine_id.clone();
        if earlier.known.is_none() && self.known.is_some() && !self.same_life() {
            return Some(RegistryError::EngineIdTaken { engine_id: engine_id() });
        }
        let holder = self.holder.as_ref().filter(|holder| **holder != self.record.engine_id)?;
        (earlier.holder.as_ref() != Some(holder))
            .then(|| RegistryError::AddressTaken { holder: holder.clone() })
    }
}

/// An engine as a store has it.
#[derive(Clone, Debug)]
pub(crate) struct StoredEngine {
    /// The engine, without a pulse.
    pub(crate) record: EngineRecord,
    /// The store's revision of it.
    pub(crate) revision: i64,
    /// Its lease; 0 when it has none.
    pub(crate) lease: i64,
}

impl Registry {
    // ------------------------------------------------------------ plans

    /// What a registration would change.
    ///
    /// # Errors
    /// It cannot be used, another engine has its id, or there is no room.
    pub(crate) fn plan_registration(&self, registration: Registration) -> Result<Plan, RegistryError> {
        let checked = registration.check(&self.shared.limits)?;
        let state = self.shared.state.read();
        let known = state.engines.get(&registration.engine_id).cloned();
        let record = compose(registration, checked, known.as_deref(), &state)?;
        self.plan(record, known, &state)
    }

    /// What one rank's payload would change, and how that is called.
    ///
    /// # Errors
    /// It cannot be used, or there is no room.
    pub(crate) fn plan_rank(
        &self,
        writer: &Writer,
        engine_id: &str,
        rank: Rank,
        payload: Bytes,
    ) -> Result<(Plan, Registered), RegistryError> {
        let view = Arc::new(check_payload(engine_id, rank, payload, &self.shared.limits)?);
        let state = self.shared.state.read();
        let known = state.engines.get(engine_id).cloned();
        if let Some(known) = &known {
            writer.may_change(known)?;
        }
        let before = known.as_ref().and_then(|known| known.ranks.get(&rank));
        let outcome = match before {
            None => Registered::Created,
            Some(before) if before.payload == view.payload => Registered::Unchanged,
            Some(_) => Registered::Replaced,
        };
        let mut record = known.as_deref().cloned().unwrap_or_else(|| unnamed(engine_id));
        if outcome != Registered::Unchanged {
            record.ranks.insert(rank, view);
            writer.claim(&mut record, &state)?;
        }
        continue_life(&mut record, known.as_deref(), &state);
        Ok((self.plan(record, known, &state)?, outcome))
    }

    /// What a sign of life would change: the engine's state, or that the store lost it.
    ///
    /// # Errors
    /// A value cannot be used, or the engine is not known.
    pub(crate) fn plan_heartbeat(
        &self,
        engine_id: &str,
        heartbeat: &Heartbeat,
    ) -> Result<Plan, RegistryError> {
        heartbeat.check()?;
        self.sweep_if_due();
        let state = self.shared.state.read();
        let known = state.engines.get(engine_id).filter(|known| known.is_live(Instant::now())).cloned();
        let unknown = || RegistryError::UnknownEngine { engine_id: engine_id.to_owned() };
        let mut record = known.as_deref().cloned().ok_or_else(unknown)?;
        record.state = heartbeat.state.unwrap_or(record.state);
        self.plan(record, known, &state)
    }

    fn plan(
        &self,
        record: EngineRecord,
        known: Option<Arc<EngineRecord>>,
        state: &State,
    ) -> Result<Plan, RegistryError> {
        state.room_for(&record, &self.shared.limits)?;
        let in_store = |engine: &Arc<EngineRecord>| engine.pulse.lock().stored.filter(|at| !at.lost);
        let holder = state.holder(&record).and_then(|id| state.engines.get(id));
        let holder = holder.filter(|holder| in_store(holder).is_some());
        let holder = holder.map(|holder| holder.engine_id.clone());
        Ok(Plan { stored: known.as_ref().and_then(in_store), holder, known, record })
    }

    /// Takes an engine's clock in and makes the answer to it.
    pub(crate) fn acknowledge(&self, plan: &Plan, clock: Option<f64>, echo: Option<super::Echo>) -> Receipt {
        let now = self.engine(&plan.record.engine_id);
        let record = now.as_deref().unwrap_or(&plan.record);
        let router_clock = self.beat(record, clock, echo);
        receipt(record, plan.known.is_none(), router_clock)
    }

    // ------------------------------------------------------------ what the store says

    /// From here on all that is shared comes from a store; its numbers count, too.
    pub(crate) fn follow_store(&self) {
        let mut state = self.write();
        state.history.restart(0);
        self.publish(&state);
    }

    /// What the store has of an engine; `None` when it is one that only this router knows.
    pub(crate) fn stored(&self, engine_id: &str) -> Option<Stored> {
        self.shared.state.read().engines.get(engine_id)?.pulse.lock().stored
    }

    /// Takes an engine as the store has it now.
    pub(crate) fn store_put(&self, engine: StoredEngine) {
        let mut state = self.write();
        self.take(&mut state, engine);
        self.publish(&state);
    }

    /// Lets an engine leave, as the `index`th of those that left in a revision of the store.
    pub(crate) fn store_delete(
        &self,
        engine_id: &str,
        kind: ChangeKind,
        replaced_by: Option<String>,
        (revision, index): (i64, usize),
    ) {
        let mut state = self.write();
        let index = u64::try_from(index).unwrap_or(NUMBERS).min(NUMBERS - 2);
        state.history.number_from(first_number(revision) + index);
        state.retire(engine_id, kind, replaced_by);
        self.publish(&state);
    }

    /// The store lost an engine while it could not be reached from here, perhaps only because nobody
    /// could renew its lease. It gets its time once more; its next sign of life puts it back.
    pub(crate) fn doubt(&self, engine_id: &str, revision: i64) {
        let ttl = {
            let state = self.shared.state.read();
            let Some(record) = state.engines.get(engine_id) else { return };
            let mut pulse = record.pulse.lock();
            let Some(stored) = pulse.stored.as_mut() else { return };
            stored.lost = true;
            record.ttl
        };
        match ttl {
            Some(ttl) => self.expire_within(engine_id, ttl),
            None => self.store_delete(engine_id, ChangeKind::Removed, None, (revision, 0)),
        }
    }

    /// Takes everything that the store has at a revision, in place of what it had before.
    pub(crate) fn store_reset(&self, mut engines: Vec<StoredEngine>, revision: i64) {
        engines.sort_by_key(|engine| engine.revision);
        let mut gone = Vec::new();
        {
            let mut state = self.write();
            let is_listed = |id: &str| engines.iter().any(|engine| engine.record.engine_id == id);
            for (id, record) in &state.engines {
                let is_shared = record.pulse.lock().stored.is_some();
                if is_shared && !is_listed(id) {
                    gone.push(id.clone());
                }
            }
            for engine in engines {
                self.take(&mut state, engine);
            }
            // Between the last revision that was followed and this one there may be changes that
            // nobody can tell any more.
            let after = first_number(revision) + NUMBERS - 1;
            let current = state.history.revision();
            state.history.restart(after.max(current + 1));
            self.publish(&state);
        }
        for engine_id in gone {
            self.doubt(&engine_id, revision);
        }
    }

    fn take(&self, state: &mut State, engine: StoredEngine) {
        let StoredEngine { mut record, revision, lease } = engine;
        let stored = Stored { revision, lease, lost: false, renewed: None, clock_told: None };
        let known = state.engines.get(&record.engine_id).cloned();
        let same_life = known.as_ref().filter(|known| {
            known.generation == record.generation
                && known.registered_at == record.registered_at
                && known.place() == record.place()
        });
        if let Some(known) = same_life {
            record.pulse = Arc::clone(&known.pulse);
            let mut pulse = record.pulse.lock();
            let before = pulse.stored;
            pulse.stored = Some(match before {
                Some(before) => Stored { revision, lease, lost: false, ..before },
                None => stored,
            });
            pulse.deadline = None;
            drop(pulse);
            if before.is_some_and(|before| before.revision == revision) || known.says_the_same(&record) {
                return;
            }
        } else {
            record.pulse = Arc::default();
            record.pulse.lock().stored = Some(stored);
        }
        state.history.number_from(first_number(revision) + NUMBERS - 1);
        let engine_id = record.engine_id.clone();
        if let Err(error) = state.put(record, &self.shared.limits) {
            tracing::warn!(engine_id, %error, "an engine of the store has no room here");
        }
    }

    fn expire_within(&self, engine_id: &str, ttl: Duration) {
        let state = self.shared.state.read();
        let Some(record) = state.engines.get(engine_id) else { return };
        let deadline = Instant::now() + ttl;
        record.pulse.lock().deadline = Some(deadline);
        self.expires_at(deadline);
    }

    // ------------------------------------------------------------ leases and clocks

    /// The lease to renew for a sign of life, unless that was done a moment ago.
    pub(crate) fn lease_to_renew(&self, engine: &EngineRecord) -> Option<i64> {
        let pause = renewal_pause(engine.ttl?);
        let mut pulse = engine.pulse.lock();
        let stored = pulse.stored.as_mut().filter(|stored| stored.lease != 0 && !stored.lost)?;
        let now = Instant::now();
        let due = stored.renewed.is_none_or(|renewed| now.duration_since(renewed) >= pause);
        due.then(|| {
            stored.renewed = Some(now);
            stored.lease
        })
    }

    /// An engine's clock as the other routers should know it, unless they were told of late.
    pub(crate) fn clock_to_tell(&self, engine: &EngineRecord, pause: Duration) -> Option<ClockReading> {
        let at = self.now();
        let mut pulse = engine.pulse.lock();
        let reading = pulse.clock.own_reading(at).filter(|reading| reading.error.is_some())?;
        let stored = pulse.stored.as_mut().filter(|stored| !stored.lost)?;
        let now = Instant::now();
        let due = stored.clock_told.is_none_or(|told| now.duration_since(told) >= pause);
        due.then(|| {
            stored.clock_told = Some(now);
            reading
        })
    }

    /// Takes what another router told of an engine's clock in that life of it. `age` asks the wall
    /// clock how many seconds ago that was.
    pub(crate) fn take_clock(
        &self,
        engine_id: &str,
        generation: u64,
        told: SharedReading,
        age: impl FnOnce() -> f64,
    ) {
        let (before, age, after) = (self.now(), age(), self.now());
        // Two clocks cannot be read at once.
        let told = SharedReading { error: told.error + (after - before), ..told };
        let state = self.shared.state.read();
        let Some(record) = state.engines.get(engine_id).filter(|known| known.generation == generation) else {
            return;
        };
        let mut pulse = record.pulse.lock();
        pulse.clock.share(told, age, before);
        if let Some(stored) = pulse.stored.as_mut() {
            stored.clock_told = Some(Instant::now());
        }
    }

    /// What is known of a rank already, by its digest.
    pub(crate) fn known_rank(&self, engine_id: &str, rank: Rank, sha256: &str) -> Option<Arc<RankView>> {
        let state = self.shared.state.read();
        let view = state.engines.get(engine_id)?.ranks.get(&rank)?;
        (view.sha256 == sha256).then(|| Arc::clone(view))
    }

    /// Reads a payload that the store kept.
    ///
    /// # Errors
    /// It is none of that engine.
    pub(crate) fn read_payload(
        &self,
        engine_id: &str,
        rank: Rank,
        payload: Bytes,
        registered_at: u64,
    ) -> Result<RankView, RegistryError> {
        let view = check_payload(engine_id, rank, payload, &self.shared.limits)?;
        Ok(RankView { registered_at, ..view })
    }
}

/// The lease in the store is so much longer than the engine's own that renewals may be this rare.
pub(crate) fn renewal_pause(ttl: Duration) -> Duration {
    ttl / 4
}

/// How long the store's lease is: at least the engine's own from each sign of life on, in whole seconds.
pub(crate) fn lease_seconds(ttl: Duration) -> i64 {
    let seconds = (ttl + renewal_pause(ttl)).as_secs_f64().ceil();
    (seconds as i64).max(1)
}

fn first_number(revision: i64) -> u64 {
    u64::try_from(revision).unwrap_or_default().saturating_mul(NUMBERS)
}

#[cfg(test)]
mod tests;
