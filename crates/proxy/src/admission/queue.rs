//! Who runs and who waits. Requests wait in lanes, one for each set of limits that they fall under; a
//! lane whose first cannot run is parked at a limit that is reached, so that whoever ends wakes only who
//! can run, in logarithmic time. Pure: time is passed in, nobody is told here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::rate::{Bucket, Service};
use super::settings::Bounds;

/// What is said of a wait about which there is no experience yet.
const UNKNOWN_WAIT: Duration = Duration::from_secs(1);

/// One limited thing: a stage, a model, an API key.
pub(crate) type ScopeId = u16;

/// The limits that a request falls under, in ascending order, padded with [`NONE`].
pub(crate) type Scopes = [ScopeId; 4];

pub(crate) const NONE: ScopeId = ScopeId::MAX;

/// A place among those who wait: priority, fair turn, number.
pub(crate) type Order = (i32, u64, u64);

/// Why a request may not run, nor wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// As many run as may, and as many wait.
    Places,
    /// Too many came of late.
    Rate,
}

/// A refusal, and when another try may succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) scope: ScopeId,
    pub(crate) full: Full,
    pub(crate) after: Duration,
}

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) scopes: Scopes,
    /// Lower goes first.
    pub(crate) priority: i32,
    pub(crate) tokens: u64,
    /// Among whom turns are shared.
    pub(crate) client: Option<Arc<str>>,
}

#[derive(Debug)]
struct Scope {
    bounds: Bounds,
    places: usize,
    running: usize,
    waiting: usize,
    waiting_tokens: u64,
    bucket: Option<Bucket>,
    service: Service,
    /// Lanes whose first cannot run because of this scope.
    parked: BTreeSet<(Order, Scopes)>,
}

impl Scope {
    fn new(bounds: Bounds, now: Instant) -> Self {
        Self {
            bounds,
            places: bounds.places(),
            running: 0,
            waiting: 0,
            waiting_tokens: 0,
            bucket: Bucket::new(bounds.rate, bounds.burst, now),
            service: Service::default(),
            parked: BTreeSet::new(),
        }
    }

    /// Other bounds for what comes from now on; who runs and who waits stays counted.
    fn rebound(&mut self, bounds: Bounds, now: Instant) {
        if (bounds.rate, bounds.burst) != (self.bounds.rate, self.bounds.burst) {
            let spent = self.bucket.as_mut().map(|bucket| bucket.spent(now));
            self.bucket = Bucket::new(bounds.rate, bounds.burst, now);
            if let (Some(bucket), Some(spent)) = (&mut self.bucket, spent) {
                bucket.spend(spent);
            }
        }
        self.bounds = bounds;
        self.places = bounds.places();
    }

    fn has_room(&self) -> bool {
        self.running < self.places
    }

    fn may_wait(&self, tokens: u64) -> bool {
        let Bounds { waiting, waiting_tokens, .. } = self.bounds;
        (waiting == 0 || self.waiting < waiting)
            && (waiting_tokens == 0 || self.waiting_tokens.saturating_add(tokens) <= waiting_tokens)
    }

    fn turn(&self) -> Option<Duration> {
        self.service.turn_of(self.waiting + 1, self.places)
    }
}

#[derive(Debug)]
struct Waiter<T> {
    tokens: u64,
    tell: T,
}

#[derive(Debug)]
struct Lane<T> {
    queue: BTreeMap<Order, Waiter<T>>,
    parked_at: ScopeId,
}

/// What became of an offer.
#[derive(Debug)]
pub(crate) enum Offer {
    Runs,
    Waits(Order),
    Refused(Refusal),
}

/// The counts of one scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    pub(crate) waiting_tokens: u64,
    /// None for no bound.
    pub(crate) places: Option<usize>,
}

/// All who run and wait; `T` is how one that waits is told.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    scopes: Vec<Scope>,
    lanes: HashMap<Scopes, Lane<T>>,
    waiting: usize,
    most_waiting: usize,
    longest_wait: Duration,
    next: u64,
    /// The fair turn of the last one that ran after waiting, and the last turn of each client.
    turn: u64,
    turns: HashMap<Option<Arc<str>>, u64>,
}

impl<T> Queue<T> {
    pub(crate) fn new(bounds: &[Bounds], most_waiting: usize, longest_wait: Duration, now: Instant) -> Self {
        Self {
            scopes: bounds.iter().map(|bounds| Scope::new(*bounds, now)).collect(),
            lanes: HashMap::new(),
            waiting: 0,
            most_waiting,
            longest_wait,
            next: 0,
            turn: 0,
            turns: HashMap::new(),
        }
    }

    /// Lets a request run, wait or go. `tell` is kept only while it waits.
    pub(crate) fn offer(&mut self, ask: &Ask, tell: T, now: Instant) -> Offer {
        for scope in ids(ask.scopes) {
            let wait = self.scope(scope).bucket.as_mut().map_or(Duration::ZERO, |bucket| bucket.wait(now));
            if !wait.is_zero() {
                return Offer::Refused(Refusal { scope, full: Full::Rate, after: wait });
            }
        }
        let Some(blocking) = self.blocking(ask.scopes) else {
            self.count_rate(ask.scopes);
            self.run(ask.scopes);
            return Offer::Runs;
        };
        let full = ids(ask.scopes).find(|scope| !self.scopes[usize::from(*scope)].may_wait(ask.tokens));
        let over_all = self.most_waiting != 0 && self.waiting >= self.most_waiting;
        let turn = self.scopes[usize::from(blocking)].turn();
        // Whoever would wait in vain is told at once.
        let in_vain = self.longest_wait.is_zero() || turn.is_some_and(|turn| turn > self.longest_wait);
        if full.is_some() || over_all || in_vain {
            return Offer::Refused(self.refusal(full.unwrap_or(blocking)));
        }
        self.count_rate(ask.scopes);
        let order = self.order(ask);
        self.wait(ask, order, tell, blocking);
        Offer::Waits(order)
    }

    /// What one that waits, or has waited too long, is told.
    pub(crate) fn refusal(&self, scope: ScopeId) -> Refusal {
        let after = self.scopes.get(usize::from(scope)).and_then(Scope::turn);
        Refusal { scope, full: Full::Places, after: after.unwrap_or(UNKNOWN_WAIT) }
    }

    /// A scope because of which such a request cannot run now.
    pub(crate) fn blocking(&self, scopes: Scopes) -> Option<ScopeId> {
        ids(scopes).find(|scope| !self.scopes[usize::from(*scope)].has_room())
    }

    /// Takes one out that waits, whether it still did.
    pub(crate) fn withdraw(&mut self, scopes: Scopes, order: Order) -> bool {
        let Some(lane) = self.lanes.get_mut(&scopes) else { return false };
        let first = lane.queue.first_key_value().map(|(order, _)| *order);
        let Some(waiter) = lane.queue.remove(&order) else { return false };
        let parked_at = lane.parked_at;
        self.waits_no_more(scopes, waiter.tokens);
        if first == Some(order) {
            self.scope(parked_at).parked.remove(&(order, scopes));
            self.park(scopes, parked_at);
        }
        true
    }

    /// A request leaves scopes that it held so long; those that may run now are put into `woken`.
    pub(crate) fn leave(&mut self, scopes: Scopes, held: Duration, woken: &mut Vec<T>) {
        for scope in ids(scopes) {
            let scope = self.scope(scope);
            scope.running = scope.running.saturating_sub(1);
            scope.service.took(held);
        }
        for scope in ids(scopes) {
            self.wake(scope, woken);
        }
    }

    /// Takes over other bounds, of more scopes than before too; those that may run now are put into `woken`.
    pub(crate) fn rebound(
        &mut self,
        bounds: &[Bounds],
        most_waiting: usize,
        longest_wait: Duration,
        now: Instant,
        woken: &mut Vec<T>,
    ) {
        (self.most_waiting, self.longest_wait) = (most_waiting, longest_wait);
        for (scope, bounds) in self.scopes.iter_mut().zip(bounds) {
            scope.rebound(*bounds, now);
        }
        let new = bounds.get(self.scopes.len()..).unwrap_or_default();
        self.scopes.extend(new.iter().map(|bounds| Scope::new(*bounds, now)));
        for id in 0..self.scopes.len() {
            self.wake(id as ScopeId, woken);
        }
    }

    /// Changes how many may run.
    pub(crate) fn resize(&mut self, scope: ScopeId, places: usize, woken: &mut Vec<T>) {
        if std::mem::replace(&mut self.scope(scope).places, places) < places {
            self.wake(scope, woken);
        }
    }

    pub(crate) fn counts(&self, scope: ScopeId) -> Counts {
        let scope = &self.scopes[usize::from(scope)];
        Counts {
            running: scope.running,
            waiting: scope.waiting,
            waiting_tokens: scope.waiting_tokens,
            places: (scope.places != usize::MAX).then_some(scope.places),
        }
    }

    fn scope(&mut self, scope: ScopeId) -> &mut Scope {
        &mut self.scopes[usize::from(scope)]
    }

    fn run(&mut self, scopes: Scopes) {
        for scope in ids(scopes) {
            self.scope(scope).running += 1;
        }
    }

    fn count_rate(&mut self, scopes: Scopes) {
        for scope in ids(scopes) {
            if let Some(bucket) = &mut self.scope(scope).bucket {
                bucket.take();
            }
        }
    }

    /// Clients take turns within a priority, however many requests each of them has waiting.
    fn order(&mut self, ask: &Ask) -> Order {
        let last = self.turns.entry(ask.client.clone()).or_default();
        *last = (*last).max(self.turn) + 1;
        self.next += 1;
        (ask.priority, *last, self.next)
    }

    fn wait(&mut self, ask: &Ask, order: Order, tell: T, blocking: ScopeId) {
        for scope in ids(ask.scopes) {
            let scope = self.scope(scope);
            scope.waiting += 1;
            scope.waiting_tokens += ask.tokens;
        }
        self.waiting += 1;
        let waiter = Waiter { tokens: ask.tokens, tell };
        let lane = self
            .lanes
            .entry(ask.scopes)
            .or_insert_with(|| Lane { queue: BTreeMap::new(), parked_at: blocking });
        let first = lane.queue.first_key_value().map(|(order, _)| *order);
        let parked_at = lane.parked_at;
        lane.queue.insert(order, waiter);
        if first.is_none_or(|first| order < first) {
            if let Some(first) = first {
                self.scope(parked_at).parked.remove(&(first, ask.scopes));
            }
            self.scope(parked_at).parked.insert((order, ask.scopes));
        }
    }

    fn waits_no_more(&mut self, scopes: Scopes, tokens: u64) {
        for scope in ids(scopes) {
            let scope = self.scope(scope);
            scope.waiting -= 1;
            scope.waiting_tokens -= tokens;
        }
        self.waiting -= 1;
        if self.waiting == 0 {
            self.turns.clear();
        }
    }

    /// Parks a lane at a scope by its first; one that is empty ends.
    fn park(&mut self, scopes: Scopes, at: ScopeId) {
        let Some(lane) = self.lanes.get_mut(&scopes) else { return };
        match lane.queue.first_key_value().map(|(order, _)| *order) {
            None => drop(self.lanes.remove(&scopes)),
            Some(first) => {
                lane.parked_at = at;
                self.scope(at).parked.insert((first, scopes));
            }
        }
    }

    /// Lets those run that are parked at a scope, as long as it has room.
    fn wake(&mut self, id: ScopeId, woken: &mut Vec<T>) {
        while self.scopes[usize::from(id)].has_room() {
            let Some((order, scopes)) = self.scope(id).parked.pop_first() else { return };
            if let Some(other) = self.blocking(scopes) {
                self.park(scopes, other);
                continue;
            }
            let Some(waiter) = self.lanes.get_mut(&scopes).and_then(|lane| lane.queue.remove(&order)) else {
                continue;
            };
            self.turn = self.turn.max(order.1);
            self.waits_no_more(scopes, waiter.tokens);
            self.run(scopes);
            woken.push(waiter.tell);
            // The next of the lane is looked at in its turn.
            self.park(scopes, id);
        }
    }
}

/// The scopes without the padding.
pub(crate) fn ids(scopes: Scopes) -> impl Iterator<Item = ScopeId> {
    scopes.into_iter().filter(|scope| *scope != NONE)
}

#[cfg(test)]
mod tests;
