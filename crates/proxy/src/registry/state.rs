//! The engines behind the registry's lock, and the only transitions that they make.
//! Never waits and never reads a clock: its caller does both.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::change::{ChangeKind, History, RegistryChange};
use super::error::RegistryError;
use super::limits::RegistryLimits;
use super::record::EngineRecord;

/// Where an engine is: base URL and data-parallel rank.
pub(crate) type Address = (String, u32);

/// Whose lives are counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    /// Those of whoever is at this address.
    Address(Address),
    /// Those of an engine that told no address.
    Engine(String),
}

#[derive(Clone, Copy, Debug)]
struct Lives {
    generation: u64,
    /// For letting go of the places that were quiet longest.
    revision: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) engines: BTreeMap<String, Arc<EngineRecord>>,
    pub(crate) history: History,
    /// Who is at an address.
    addresses: BTreeMap<Address, String>,
    lives: BTreeMap<Place, Lives>,
    /// Where engines were whose address others have now.
    replaced: BTreeMap<String, Address>,
    total_bytes: usize,
}

impl State {
    pub(crate) fn new(limits: &RegistryLimits) -> Self {
        Self {
            engines: BTreeMap::new(),
            history: History::new(limits.past_changes),
            addresses: BTreeMap::new(),
            lives: BTreeMap::new(),
            replaced: BTreeMap::new(),
            total_bytes: 0,
        }
    }

    /// The engines at a base URL, whatever their data-parallel rank.
    pub(crate) fn at(&self, base_url: &str) -> impl Iterator<Item = &Arc<EngineRecord>> {
        let (first, last) = ((base_url.to_owned(), 0), (base_url.to_owned(), u32::MAX));
        self.addresses.range(first..=last).filter_map(|(_, engine_id)| self.engines.get(engine_id))
    }

    /// Where an engine was before another took its address.
    pub(crate) fn replaced(&self, engine_id: &str) -> Option<&Address> {
        self.replaced.get(engine_id)
    }

    /// The generation that an engine starts at a place.
    pub(crate) fn next_generation(&self, place: &Place) -> u64 {
        self.lives.get(place).map_or(1, |lives| lives.generation + 1)
    }

    /// Puts an engine in, or the new record of a known one. Who has its address leaves.
    ///
    /// # Errors
    /// There is no room; nothing has changed then.
    pub(crate) fn put(
        &mut self,
        mut record: EngineRecord,
        limits: &RegistryLimits,
    ) -> Result<Arc<EngineRecord>, RegistryError> {
        let engine_id = record.engine_id.clone();
        let address = record.address();
        let before = self.engines.get(&engine_id).cloned();
        let displaced = self.room_for(&record, limits)?;
        if let Some(displaced) = displaced {
            self.retire(&displaced, ChangeKind::Replaced, Some(engine_id.clone()));
            if self.replaced.len() >= limits.engines {
                self.replaced.clear();
            }
            self.replaced.extend(address.clone().map(|address| (displaced, address)));
        }
        if let Some(before) = &before {
            self.total_bytes -= before.payload_bytes();
            if let Some(old) = before.address().filter(|old| Some(old) != address.as_ref()) {
                self.addresses.remove(&old);
            }
        }
        self.replaced.remove(&engine_id);
        record.revision = self.history.advance();
        self.total_bytes += record.payload_bytes();
        self.count_life(record.place(), record.generation, limits);
        if let Some(address) = address {
            self.addresses.insert(address, engine_id.clone());
        }
        let kind = if before.is_some() { ChangeKind::Updated } else { ChangeKind::Registered };
        let model_before = before.and_then(|before| before.model.clone());
        let change = RegistryChange {
            revision: record.revision,
            kind,
            engine: record.summary(),
            replaced_by: None,
            owner: record.owner.clone(),
            model_before: model_before.filter(|model| Some(model) != record.model.as_ref()),
        };
        self.history.push(change);
        let record = Arc::new(record);
        self.engines.insert(engine_id, Arc::clone(&record));
        Ok(record)
    }

    /// Whether a record can be put; who has to leave for it.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn room_for(
        &self,
        record: &EngineRecord,
        limits: &RegistryLimits,
    ) -> Result<Option<String>, RegistryError> {
        let displaced = self.holder(record).filter(|id| **id != record.engine_id).cloned();
        let before = self.engines.get(&record.engine_id);
        let freed = [before, displaced.as_ref().and_then(|id| self.engines.get(id))];
        let freed_bytes: usize = freed.iter().flatten().map(|gone| gone.payload_bytes()).sum();
        let engines = self.engines.len() + 1 - freed.iter().flatten().count();
        let total_bytes = self.total_bytes - freed_bytes + record.payload_bytes();
        if engines > limits.engines || total_bytes > limits.total_bytes || record.ranks.len() > limits.ranks {
            return Err(RegistryError::Full);
        }
        Ok(displaced)
    }

    /// Who is at a record's address.
    pub(crate) fn holder(&self, record: &EngineRecord) -> Option<&String> {
        self.addresses.get(&record.address()?)
    }

    /// Lets an engine leave; whether it was there.
    pub(crate) fn retire(&mut self, engine_id: &str, kind: ChangeKind, replaced_by: Option<String>) -> bool {
        let Some(record) = self.engines.remove(engine_id) else { return false };
        self.total_bytes -= record.payload_bytes();
        if let Some(address) = record.address() {
            self.addresses.remove(&address);
        }
        let revision = self.history.advance();
        self.history.push(RegistryChange {
            revision,
            kind,
            engine: record.summary(),
            replaced_by,
            owner: record.owner.clone(),
            model_before: None,
        });
        true
    }

    /// Lets everybody leave who was silent for too long; when the next one will be due.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let mut due = Vec::new();
        for record in self.engines.values() {
            match record.pulse.lock().deadline {
                Some(deadline) if deadline <= now => due.push(record.engine_id.clone()),
                Some(deadline) => next = Some(next.map_or(deadline, |next| next.min(deadline))),
                None => {}
            }
        }
        for engine_id in due {
            self.retire(&engine_id, ChangeKind::Expired, None);
        }
        next
    }

    fn count_life(&mut self, place: Place, generation: u64, limits: &RegistryLimits) {
        self.lives.insert(place, Lives { generation, revision: self.history.revision() });
        if self.lives.len() <= limits.engines.saturating_mul(2) {
            return;
        }
        // At least half of them are nobody's any more.
        let quiet = self.lives.iter().filter(|(place, _)| !self.is_taken(place));
        if let Some(place) = quiet.min_by_key(|(_, lives)| lives.revision).map(|(place, _)| place.clone()) {
            self.lives.remove(&place);
        }
    }

    fn is_taken(&self, place: &Place) -> bool {
        match place {
            Place::Address(address) => self.addresses.contains_key(address),
            Place::Engine(engine_id) => self.engines.contains_key(engine_id),
        }
    }
}

impl EngineRecord {
    pub(crate) fn address(&self) -> Option<Address> {
        self.base_url.clone().map(|base_url| (base_url, self.dp_rank))
    }

    pub(crate) fn place(&self) -> Place {
        self.address().map_or_else(|| Place::Engine(self.engine_id.clone()), Place::Address)
    }
}
