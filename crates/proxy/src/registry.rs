//! Who the engines are and what a peer must know to read from them: registrations with a lease,
//! handshake payloads kept byte for byte, every change numbered. Decides about no pair.

mod address;
mod change;
mod clock;
mod error;
mod expiry;
mod life;
mod limits;
mod look_up;
mod ownership;
mod record;
mod registration;
mod sampled;
#[cfg(feature = "etcd")]
pub(crate) mod shared;
mod state;
mod watch;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use kv_connector::protocol::metadata::NixlAgentMetadata;
use parking_lot::RwLock;
use tokio::sync::{Notify, watch as watch_channel};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use address::canonical_base_url;
pub use change::{ChangeKind, RegistryChange};
#[cfg(feature = "etcd")]
pub(crate) use clock::SharedReading;
pub use clock::{ClockReading, Echo};
pub use error::{FieldProblem, PayloadPart, RegistryError};
pub use limits::RegistryLimits;
pub use look_up::{Found, Missing};
pub use ownership::{Sight, Writer};
pub use record::{
    AboutEngine, EngineRecord, EngineRole, EngineState, EngineSummary, EngineView, Rank, RankId, RankView,
};
pub use registration::{Heartbeat, RankPayload, Registration};
pub use watch::{Watched, Watcher};

use life::{compose, continue_life, receipt, unnamed};
use registration::check_payload;
use state::State;
use watch::{BATCH, Watchers};

/// What a rank's payload changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registered {
    /// The rank was not known.
    Created,
    /// The rank had another payload.
    Replaced,
    /// The rank had the same payload.
    Unchanged,
}

/// What an engine is told about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Receipt {
    /// Whether the engine was not known before.
    pub created: bool,
    /// The revision of the engine's last change.
    pub revision: u64,
    /// Which life at its address this is.
    pub generation: u64,
    /// After how long a silence the engine leaves.
    pub ttl: Option<Duration>,
    /// The router's monotonic clock as this answer leaves, in seconds, for the echo.
    pub router_clock: f64,
}

/// All engines at one revision.
#[derive(Clone, Debug, Default)]
pub struct RegistrySnapshot {
    /// The revision.
    pub revision: u64,
    /// The engines by their ids, in whatever state.
    pub engines: BTreeMap<String, Arc<EngineRecord>>,
}

/// The changes after a revision.
#[derive(Clone, Debug)]
pub enum Changes {
    /// The first of them, in order; none when nothing happened.
    After(Vec<Arc<RegistryChange>>),
    /// Not all of them are known any more: everything as it is now.
    Forgotten(Arc<RegistrySnapshot>),
}

/// The engines that registered; clones share them.
#[derive(Clone, Debug)]
pub struct Registry {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: RwLock<State>,
    limits: RegistryLimits,
    /// As old as the newest read; made anew by the first reader after a change.
    snapshot: ArcSwap<RegistrySnapshot>,
    revision: watch_channel::Sender<u64>,
    /// The origin of the router's clock.
    origin: Instant,
    /// Microseconds after the origin before which nobody's time runs out.
    next_expiry: AtomicU64,
    expiry_moved: Notify,
    watchers: Watchers,
    waiting: AtomicUsize,
    closing: CancellationToken,
}

impl Registry {
    pub(crate) fn new(limits: RegistryLimits) -> Self {
        let state = State::new(&limits);
        let revision = state.history.revision();
        let shared = Shared {
            state: RwLock::new(state),
            limits,
            snapshot: ArcSwap::from_pointee(RegistrySnapshot { revision, engines: BTreeMap::new() }),
            revision: watch_channel::Sender::new(revision),
            origin: Instant::now(),
            next_expiry: AtomicU64::new(u64::MAX),
            expiry_moved: Notify::new(),
            watchers: Watchers::default(),
            waiting: AtomicUsize::new(0),
            closing: CancellationToken::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    // ------------------------------------------------------------ what engines do

    /// Takes an engine with all its ranks, in place of what was known of it. Whoever else is at
    /// its address leaves.
    ///
    /// # Errors
    /// It cannot be used or there is no room; nothing has changed then.
    pub fn register(&self, registration: Registration) -> Result<Receipt, RegistryError> {
        let checked = registration.check(&self.shared.limits)?;
        let mut state = self.write();
        let known = state.engines.get(&registration.engine_id).cloned();
        let clock = registration.clock;
        let record = compose(registration, checked, known.as_deref(), &state)?;
        let unchanged = known.clone().filter(|known| known.says_the_same(&record));
        let record = match unchanged {
            Some(known) => known,
            None => state.put(record, &self.shared.limits)?,
        };
        self.publish(&state);
        let router_clock = self.beat(&record, clock, None);
        drop(state);
        Ok(receipt(&record, known.is_none(), router_clock))
    }

    /// Takes one rank's payload; an engine that is not known yet is then one without a lease.
    ///
    /// # Errors
    /// It cannot be decoded, is another engine's, is too large, or the registry is full.
    pub fn put(
        &self,
        engine_id: &str,
        pp_rank: u32,
        tp_rank: u32,
        payload: Bytes,
    ) -> Result<Registered, RegistryError> {
        self.put_as(&Writer::Trusted, engine_id, (pp_rank, tp_rank), payload)
    }

    /// As [`Registry::put`] on somebody's behalf.
    ///
    /// # Errors
    /// As there, or the engine is another's.
    pub fn put_as(
        &self,
        writer: &Writer,
        engine_id: &str,
        rank: Rank,
        payload: Bytes,
    ) -> Result<Registered, RegistryError> {
        let view = Arc::new(check_payload(engine_id, rank, payload, &self.shared.limits)?);
        let mut state = self.write();
        let known = state.engines.get(engine_id).cloned();
        if let Some(known) = &known {
            writer.may_change(known)?;
        }
        let before = known.as_ref().and_then(|known| known.ranks.get(&rank)).cloned();
        if let (Some(known), Some(before)) = (&known, &before)
            && before.payload == view.payload
        {
            self.beat(known, None, None);
            return Ok(Registered::Unchanged);
        }
        let mut record = known.as_deref().cloned().unwrap_or_else(|| unnamed(engine_id));
        record.ranks.insert(rank, view);
        writer.claim(&mut record, &state)?;
        continue_life(&mut record, known.as_deref(), &state);
        let record = state.put(record, &self.shared.limits)?;
        self.publish(&state);
        self.beat(&record, None, None);
        Ok(if before.is_none() { Registered::Created } else { Registered::Replaced })
    }

    /// Takes a sign of life, which renews the engine's lease.
    ///
    /// # Errors
    /// The engine is not known (any more) and has to register; or a value cannot be used.
    pub fn heartbeat(&self, engine_id: &str, heartbeat: &Heartbeat) -> Result<Receipt, RegistryError> {
        heartbeat.check()?;
        self.sweep_if_due();
        let Heartbeat { state: new_state, clock, echo } = *heartbeat;
        let unknown = || RegistryError::UnknownEngine { engine_id: engine_id.to_owned() };
        {
            let state = self.shared.state.read();
            let record = state.engines.get(engine_id).ok_or_else(unknown)?;
            if !record.is_live(Instant::now()) {
                return Err(unknown());
            }
            if new_state.is_none_or(|new_state| new_state == record.state) {
                let router_clock = self.beat(record, clock, echo);
                return Ok(receipt(record, false, router_clock));
            }
        }
        let mut state = self.write();
        let known = state.engines.get(engine_id).cloned().ok_or_else(unknown)?;
        let mut record = (*known).clone();
        record.state = new_state.unwrap_or(record.state);
        let record = state.put(record, &self.shared.limits)?;
        self.publish(&state);
        let router_clock = self.beat(&record, clock, echo);
        Ok(receipt(&record, false, router_clock))
    }

    /// Forgets an engine; whether it was known.
    pub fn remove(&self, engine_id: &str) -> bool {
        let mut state = self.write();
        let known = state.retire(engine_id, ChangeKind::Removed, None);
        self.publish(&state);
        known
    }

    // ------------------------------------------------------------ what readers see

    /// All engines at the current revision; cheap while nothing changes.
    #[must_use]
    pub fn snapshot(&self) -> Arc<RegistrySnapshot> {
        self.sweep_if_due();
        let made = self.shared.snapshot.load_full();
        if made.revision == *self.shared.revision.borrow() {
            return made;
        }
        let state = self.shared.state.read();
        let engines = state.engines.clone();
        let made = Arc::new(RegistrySnapshot { revision: state.history.revision(), engines });
        // Under the lock, so that nobody puts an older one in its place.
        self.shared.snapshot.store(Arc::clone(&made));
        made
    }

    /// The current revision.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.sweep_if_due();
        *self.shared.revision.borrow()
    }

    /// The current revision, and every later one; ends with the registry.
    #[must_use]
    pub fn subscribe(&self) -> watch_channel::Receiver<u64> {
        self.shared.revision.subscribe()
    }

    /// What changed after a revision, at most a batch of it.
    #[must_use]
    pub fn changes_since(&self, revision: u64) -> Changes {
        self.sweep_if_due();
        let changes = self.shared.state.read().history.since(revision, BATCH);
        changes.map_or_else(|| Changes::Forgotten(self.snapshot()), Changes::After)
    }

    /// One engine in whatever state.
    #[must_use]
    pub fn engine(&self, engine_id: &str) -> Option<Arc<EngineRecord>> {
        let engine = self.shared.state.read().engines.get(engine_id).cloned()?;
        engine.is_live(Instant::now()).then_some(engine)
    }

    /// The engines at a base URL, in whatever spelling: one per data-parallel rank.
    #[must_use]
    pub fn engines_at(&self, base_url: &str) -> Vec<Arc<EngineRecord>> {
        let Some(base_url) = canonical_base_url(base_url) else { return Vec::new() };
        let now = Instant::now();
        let state = self.shared.state.read();
        state.at(&base_url).filter(|engine| engine.is_live(now)).cloned().collect()
    }

    /// Whether another engine is where an engine was.
    pub(crate) fn is_replaced(&self, engine: &EngineRecord) -> bool {
        let Some(base_url) = &engine.base_url else { return false };
        let state = self.shared.state.read();
        state.at(base_url).any(|now| now.dp_rank == engine.dp_rank && now.engine_id != engine.engine_id)
    }

    /// Whether an engine was at this address until another took it.
    pub(crate) fn is_former(&self, engine_id: &str, base_url: &str) -> bool {
        self.shared.state.read().replaced(engine_id).is_some_and(|address| address.0 == base_url)
    }

    /// Ends when nothing new is begun any more.
    pub(crate) fn closing(&self) -> &CancellationToken {
        &self.shared.closing
    }

    /// One rank of an engine in whatever state.
    #[must_use]
    pub fn get(&self, engine_id: &str, pp_rank: u32, tp_rank: u32) -> Option<Arc<RankView>> {
        self.engine(engine_id)?.ranks.get(&(pp_rank, tp_rank)).cloned()
    }

    /// An engine's clock now; `None` when it never told it.
    #[must_use]
    pub fn clock(&self, engine: &EngineRecord) -> Option<ClockReading> {
        engine.pulse.lock().clock.reading(self.now())
    }

    /// An engine as people see it.
    #[must_use]
    pub fn view(&self, engine: &EngineRecord) -> EngineView {
        engine.view(self.clock(engine))
    }

    /// All engines as people see them.
    #[must_use]
    pub fn list(&self) -> Vec<EngineView> {
        self.snapshot().engines.values().map(|engine| self.view(engine)).collect()
    }

    /// Tokens per block of an engine's block ids. Known for the newest generation only: an older
    /// one tells the size of its kernel's blocks, of which a named block may hold several.
    pub(crate) fn tokens_per_block(&self, engine_id: &str) -> Option<u64> {
        let engine = self.engine(engine_id)?;
        let NixlAgentMetadata::V14(metadata) = engine.metadata()? else { return None };
        let tokens = metadata.block_size.checked_mul(metadata.physical_blocks_per_logical_kv_block)?;
        u64::try_from(tokens).ok().filter(|tokens| *tokens > 0)
    }
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
