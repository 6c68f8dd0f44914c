//! Matching of finished prefills with the announcements of decode engines (push mode).
//!
//! Pure bookkeeping without I/O: either side of a pair may come first. Ids are compared exactly,
//! then without the digits that engines append to them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use crate::ClockTime;
use crate::protocol::registration::{PushRegistration, base_request_id};

/// Announcements kept for prefills that have not finished; a peer that sends more is not heard.
const MAX_REGISTRATIONS: usize = 1 << 16;

/// A prefill and where its blocks go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Push {
    /// The request at this engine.
    pub request: String,
    /// Its logical block ids per cache group.
    pub local_block_ids: Vec<Vec<u64>>,
    /// The announcement it goes to.
    pub registration: PushRegistration,
}

/// Entries by id, found exactly or by what the id begins with.
#[derive(Debug)]
struct ByRequest<T> {
    entries: HashMap<String, T>,
    /// Ids with the same beginning, oldest first.
    same_base: HashMap<String, VecDeque<String>>,
}

impl<T> Default for ByRequest<T> {
    fn default() -> Self {
        Self { entries: HashMap::new(), same_base: HashMap::new() }
    }
}

impl<T> ByRequest<T> {
    fn insert(&mut self, request: String, entry: T) {
        let base = base_request_id(&request).into_owned();
        if self.entries.insert(request.clone(), entry).is_none() {
            self.same_base.entry(base).or_default().push_back(request);
        }
    }

    fn remove(&mut self, request: &str) -> Option<T> {
        let entry = self.entries.remove(request)?;
        let base = base_request_id(request);
        if let Some(ids) = self.same_base.get_mut(base.as_ref()) {
            ids.retain(|id| id != request);
            if ids.is_empty() {
                self.same_base.remove(base.as_ref());
            }
        }
        Some(entry)
    }

    fn take_match(&mut self, request: &str) -> Option<(String, T)> {
        let id = if self.entries.contains_key(request) {
            request.to_owned()
        } else {
            self.same_base.get(base_request_id(request).as_ref())?.front()?.clone()
        };
        self.remove(&id).map(|entry| (id, entry))
    }
}

/// Both sides of the pairs that are not complete yet.
#[derive(Debug, Default)]
pub struct PushMatcher {
    finished: ByRequest<Vec<Vec<u64>>>,
    registrations: ByRequest<(ClockTime, PushRegistration)>,
    /// Order in which announcements run out.
    arrivals: BTreeMap<(ClockTime, u64), String>,
    next_arrival: u64,
}

impl PushMatcher {
    /// A prefill has finished; returns the pair when its announcement is there.
    pub fn on_finished(&mut self, request: &str, block_ids: Vec<Vec<u64>>) -> Option<Push> {
        match self.registrations.take_match(request) {
            Some((_, (_, registration))) => {
                Some(Push { request: request.to_owned(), local_block_ids: block_ids, registration })
            }
            None => {
                self.finished.insert(request.to_owned(), block_ids);
                None
            }
        }
    }

    /// A decode engine has announced a receive; returns the pair when its prefill has finished.
    pub fn on_registration(&mut self, registration: PushRegistration, now: ClockTime) -> Option<Push> {
        if let Some((request, local_block_ids)) = self.finished.take_match(&registration.request_id) {
            return Some(Push { request, local_block_ids, registration });
        }
        if self.registrations.entries.len() >= MAX_REGISTRATIONS {
            tracing::warn!(request = registration.request_id, "too many announcements, one is dropped");
            return None;
        }
        self.arrivals.insert((now, self.next_arrival), registration.request_id.clone());
        self.next_arrival += 1;
        self.registrations.insert(registration.request_id.clone(), (now, registration));
        None
    }

    /// The blocks of a request are no longer kept: nothing of it may be written any more.
    pub fn evict(&mut self, request: &str) {
        self.finished.remove(request);
        self.registrations.take_match(request);
    }

    /// Forgets announcements that no prefill has claimed in time.
    pub fn forget_stale(&mut self, now: ClockTime, timeout: Duration) {
        while let Some(oldest) = self.arrivals.first_entry() {
            let arrived = oldest.key().0;
            if now.saturating_sub(arrived) < timeout {
                return;
            }
            let request = oldest.remove();
            // The id may have been announced again since.
            if self.registrations.entries.get(&request).is_some_and(|(at, _)| *at <= arrived) {
                self.registrations.remove(&request);
            }
        }
    }

    /// True while a finished prefill waits for an announcement, so notifications must be looked at.
    pub fn awaits_registration(&self) -> bool {
        !self.finished.entries.is_empty()
    }
}

#[cfg(test)]
mod tests;
