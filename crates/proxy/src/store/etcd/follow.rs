//! Following etcd: all that is there once, then every change in etcd's order, for ever. The copy
//! changes here and nowhere else. A break loses nothing: it goes on where it ended, or lists anew
//! when etcd does not keep the changes between any more.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use etcd_client::{EventType, KeyValue, Txn, TxnOp, TxnOpResponse, WatchResponse};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Etcd;
use super::link::LinkFault;
use super::wire::{self, BATCH_BYTES, BATCH_OPERATIONS, ClockValue, EngineValue, Removal, Subject};
use crate::registry::shared::StoredEngine;
use crate::registry::{ChangeKind, Rank, RankView, SharedReading};

/// Pauses between tries to reach etcd, the first and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// How often etcd is asked whether it is still there.
const CHECK: Duration = Duration::from_secs(1);

/// How long after a break an engine that left may have left only because of it.
const DOUBTFUL: Duration = Duration::from_secs(5);

/// The changes of one revision.
#[derive(Default)]
struct Changes {
    revision: i64,
    engines: Vec<KeyValue>,
    gone: Vec<String>,
    clocks: Vec<KeyValue>,
    removed: Option<String>,
    /// Its deletion, too.
    decided: Option<Option<KeyValue>>,
}

impl Etcd {
    pub(super) async fn follow_until(self: Arc<Self>, stop: CancellationToken) {
        let (first_pause, longest_pause) = PAUSES;
        let (mut pause, mut told) = (first_pause, false);
        loop {
            let fault = tokio::select! {
                () = stop.cancelled() => return,
                fault = self.follow() => fault,
            };
            if self.up.send_replace(false) {
                (pause, told) = (first_pause, false);
            }
            if !std::mem::replace(&mut told, true) {
                let fault = tokio::select! {
                    () = stop.cancelled() => return,
                    fault = self.link.explain(fault) => fault,
                };
                tracing::warn!(%fault, "the store cannot be followed; what is known is used on");
            }
            self.link.give_up();
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(longest_pause),
            }
        }
    }

    async fn follow(&self) -> LinkFault {
        match self.try_to_follow().await {
            Ok(never) => match never {},
            Err(fault) => fault,
        }
    }

    async fn try_to_follow(&self) -> Result<Infallible, LinkFault> {
        // Its revisions continue those of before only if it is the same store: one that lost its data
        // counts anew, and may have come further by now.
        let (name, newest) = self.link.value_or(&self.keys.name(), &self.router).await?;
        let applied = *self.applied.borrow();
        let is_first = applied == 0;
        let is_same = self.store_name.lock().as_deref() == Some(name.as_slice());
        if is_first || !is_same || newest < applied {
            self.list().await?;
            *self.store_name.lock() = Some(name);
        }
        let doubtful = if is_first { None } else { Some((newest, Instant::now() + DOUBTFUL)) };
        loop {
            match self.watch(doubtful).await {
                Err(LinkFault::Compacted(revision)) => {
                    tracing::info!(revision, "the store was compacted, listing it anew");
                    self.list().await?;
                }
                ended => return ended,
            }
        }
    }

    async fn list(&self) -> Result<(), LinkFault> {
        let (all, revision) = self.link.list(self.keys.state()).await?;
        let (mut engines, mut clocks, mut decided) = (Vec::new(), Vec::new(), None);
        for value in all {
            match self.keys.subject(value.key()) {
                Subject::Engine(_) => engines.extend(self.read_engine(&value).await?),
                Subject::Clock(_) => clocks.push(value),
                Subject::Decided => decided = Some(value),
                Subject::Removal | Subject::Other => {}
            }
        }
        self.registry.store_reset(engines, revision);
        self.take_decided(decided.as_ref());
        for value in &clocks {
            self.take_clock(value);
        }
        self.applied.send_replace(revision);
        Ok(())
    }

    /// Follows the changes that come after what is applied. What left up to the doubtful revision, or
    /// before the doubtful moment, may have left only because nobody could reach etcd.
    async fn watch(&self, doubtful: Option<(i64, Instant)>) -> Result<Infallible, LinkFault> {
        let from = *self.applied.borrow() + 1;
        let mut stream = self.link.watch(self.keys.state(), from).await?;
        let mut check = tokio::time::interval(CHECK);
        loop {
            let answer = tokio::select! {
                answer = stream.message() => answer?,
                _ = check.tick() => {
                    self.link.newest_revision(self.keys.state()).await?;
                    self.heard();
                    continue;
                }
            };
            let answer = answer.ok_or_else(|| LinkFault::WatchEnded("the stream ended".to_owned()))?;
            self.heard();
            if answer.compact_revision() > 0 {
                return Err(LinkFault::Compacted(answer.compact_revision()));
            }
            if answer.canceled() {
                return Err(LinkFault::WatchEnded(answer.cancel_reason().to_owned()));
            }
            if answer.created() && !self.up.send_replace(true) {
                tracing::info!(from, "following the store");
            }
            for changes in self.by_revision(&answer) {
                let doubts = doubtful.is_some_and(|(revision, moment)| {
                    changes.revision <= revision || Instant::now() < moment
                });
                let revision = changes.revision;
                self.apply(changes, doubts).await?;
                self.applied.send_replace(revision);
            }
        }
    }

    /// The changes of an answer, those of one revision together; etcd never tears one apart.
    fn by_revision(&self, answer: &WatchResponse) -> Vec<Changes> {
        let mut all: Vec<Changes> = Vec::new();
        for event in answer.events() {
            let Some(value) = event.kv() else { continue };
            let revision = value.mod_revision();
            if all.last().is_none_or(|last| last.revision != revision) {
                all.push(Changes { revision, ..Changes::default() });
            }
            let Some(changes) = all.last_mut() else { continue };
            match (self.keys.subject(value.key()), event.event_type()) {
                (Subject::Engine(_), EventType::Put) => changes.engines.push(value.clone()),
                (Subject::Engine(id), EventType::Delete) => changes.gone.push(id),
                (Subject::Clock(_), EventType::Put) => changes.clocks.push(value.clone()),
                (Subject::Removal, EventType::Put) => {
                    changes.removed =
                        wire::read(value.value()).ok().map(|removal: Removal| removal.engine_id);
                }
                (Subject::Decided, EventType::Put) => changes.decided = Some(Some(value.clone())),
                (Subject::Decided, EventType::Delete) => changes.decided = Some(None),
                _ => {}
            }
        }
        all
    }

    async fn apply(&self, changes: Changes, doubts: bool) -> Result<(), LinkFault> {
        let Changes { revision, engines, gone, clocks, removed, decided } = changes;
        let mut come = Vec::new();
        for value in &engines {
            come.extend(self.read_engine(value).await?);
        }
        for (index, engine_id) in gone.iter().enumerate() {
            let left = self.registry.engine(engine_id).and_then(|engine| engine.address());
            let successor = come.iter().find(|engine| left.is_some() && engine.record.address() == left);
            let at = (revision, index);
            match successor.map(|engine| engine.record.engine_id.clone()) {
                Some(id) => self.registry.store_delete(engine_id, ChangeKind::Replaced, Some(id), at),
                None if removed.as_ref() == Some(engine_id) => {
                    self.registry.store_delete(engine_id, ChangeKind::Removed, None, at);
                }
                None if doubts => self.registry.doubt(engine_id, revision),
                None => self.registry.store_delete(engine_id, ChangeKind::Expired, None, at),
            }
            self.places.lock().remove(engine_id);
        }
        for engine in come {
            self.registry.store_put(engine);
        }
        for value in &clocks {
            self.take_clock(value);
        }
        if let Some(decided) = decided {
            self.take_decided(decided.as_ref());
        }
        Ok(())
    }

    /// Reads an engine with its payloads. `None` when it cannot be used, or has changed since so that
    /// a later change tells what to do.
    async fn read_engine(&self, stored: &KeyValue) -> Result<Option<StoredEngine>, LinkFault> {
        let value: EngineValue = match wire::read(stored.value()) {
            Ok(value) => value,
            Err(fault) => {
                let key = String::from_utf8_lossy(stored.key()).into_owned();
                tracing::warn!(key, %fault, "an engine of the store is not used");
                return Ok(None);
            }
        };
        let engine_id = value.engine_id.clone();
        let Some(ranks) = self.read_ranks(&value).await? else { return Ok(None) };
        let revision = stored.mod_revision();
        self.places.lock().insert(engine_id.clone(), (revision, value.ranks.clone()));
        match value.into_record(ranks) {
            Ok(record) => Ok(Some(StoredEngine { record, revision, lease: stored.lease() })),
            Err(fault) => {
                tracing::warn!(engine_id, %fault, "an engine of the store is not used");
                Ok(None)
            }
        }
    }

    async fn read_ranks(
        &self,
        value: &EngineValue,
    ) -> Result<Option<BTreeMap<Rank, Arc<RankView>>>, LinkFault> {
        let engine_id = &value.engine_id;
        let mut ranks = BTreeMap::new();
        let mut missing = Vec::new();
        for rank in &value.ranks {
            match self.registry.known_rank(engine_id, rank.rank(), &rank.sha256) {
                Some(view) => drop(ranks.insert(rank.rank(), view)),
                None => missing.push(rank),
            }
        }
        let keys = missing.iter().flat_map(|rank| {
            let pieces = rank.pieces().enumerate();
            pieces.map(|(index, size)| (self.keys.piece(engine_id, rank, index), size))
        });
        let Some(pieces) = self.read_pieces(keys.collect()).await? else { return Ok(None) };
        let mut pieces = pieces.into_iter();
        for rank in missing {
            let mut payload = Vec::with_capacity(rank.bytes);
            for piece in pieces.by_ref().take(rank.pieces().count()) {
                payload.extend_from_slice(&piece);
            }
            let read = self.registry.read_payload(engine_id, rank.rank(), payload.into(), rank.registered_at);
            match read {
                Ok(view) if view.sha256 == rank.sha256 => drop(ranks.insert(rank.rank(), Arc::new(view))),
                Ok(_) => {
                    tracing::warn!(engine_id, "a payload of the store is not what was put there");
                    return Ok(None);
                }
                Err(error) => {
                    tracing::warn!(engine_id, %error, "a payload of the store cannot be used");
                    return Ok(None);
                }
            }
        }
        Ok(Some(ranks))
    }

    /// The pieces in order; `None` when one is gone.
    async fn read_pieces(&self, keys: Vec<(String, usize)>) -> Result<Option<Vec<Vec<u8>>>, LinkFault> {
        let mut all = Vec::with_capacity(keys.len());
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let mut keys = keys.into_iter().peekable();
        while let Some((key, size)) = keys.next() {
            batch.push(TxnOp::get(key, None));
            bytes += size;
            let is_full = batch.len() == BATCH_OPERATIONS
                || keys.peek().is_none_or(|(_, next)| bytes + next > BATCH_BYTES);
            if !is_full {
                continue;
            }
            let answer = self.link.transact(Txn::new().and_then(std::mem::take(&mut batch))).await?;
            bytes = 0;
            for response in answer.op_responses() {
                let TxnOpResponse::Get(mut found) = response else { return Ok(None) };
                let Some(piece) = found.take_kvs().pop() else { return Ok(None) };
                all.push(piece.into_key_value().1);
            }
        }
        Ok(Some(all))
    }

    fn take_clock(&self, stored: &KeyValue) {
        let Subject::Clock(engine_id) = self.keys.subject(stored.key()) else { return };
        // A clock that cannot be read is one that is not known.
        let Ok(value) = wire::read::<ClockValue>(stored.value()) else { return };
        if value.router == self.router {
            return;
        }
        let told =
            SharedReading { seconds: value.seconds, error: value.error + self.clock_skew.as_secs_f64() };
        self.registry.take_clock(&engine_id, value.generation, told, || unix_now() - value.unix);
    }
}

/// This router's wall clock.
pub(super) fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
