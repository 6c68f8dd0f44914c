//! The admission of requests that are simulated: the same queue, told the time instead of reading it.

use std::time::Duration;

use tokio::time::Instant;

use super::named::Named;
use super::queue::{Ask, NONE, Offer, Order, Queue, Scopes};
use super::settings::AdmissionSettings;
use super::{BYTES_PER_TOKEN, DECODE, PREFILL, scope_of};
use crate::error::Stage;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entered {
    Runs(Places),
    Waits(Place),
    Refused,
}

/// The places that a request holds, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Places {
    scopes: Scopes,
    since: Instant,
}

/// A place among those who wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    scopes: Scopes,
    order: Order,
}

impl Place {
    /// Its turn has come.
    pub(crate) const fn taken(self, now: Instant) -> Places {
        Places { scopes: self.scopes, since: now }
    }
}

/// All who run and wait, by the numbers of their requests.
#[derive(Debug)]
pub(crate) struct Turns {
    queue: Queue<u64>,
    named: Named,
    longest_wait: Duration,
}

impl Turns {
    pub(crate) fn new(settings: &AdmissionSettings, engines: [usize; 2], now: Instant) -> Self {
        let (named, mut bounds) = Named::default().with(settings);
        for (stage, limits) in [(Stage::Prefill, &settings.prefill), (Stage::Decode, &settings.decode)] {
            let places = limits.places(engines[stage as usize]).unwrap_or_default();
            bounds[usize::from(scope_of(stage))].requests = places;
        }
        let queue = Queue::new(&bounds, settings.waiting, settings.longest_wait, now);
        Self { queue, named, longest_wait: settings.longest_wait }
    }

    /// How long a request waits at most.
    pub(crate) const fn longest_wait(&self) -> Duration {
        self.longest_wait
    }

    pub(crate) fn enter(
        &mut self,
        request: u64,
        two_legs: bool,
        model: &str,
        bytes: usize,
        now: Instant,
    ) -> Entered {
        let mut scopes = [NONE; 4];
        let of = [two_legs.then_some(PREFILL), Some(DECODE), self.named.model(model)];
        for (place, scope) in scopes.iter_mut().zip(of.into_iter().flatten()) {
            *place = scope;
        }
        let tokens = bytes.div_ceil(BYTES_PER_TOKEN) as u64;
        match self.queue.offer(&Ask { scopes, priority: 0, tokens, client: None }, request, now) {
            Offer::Runs => Entered::Runs(Places { scopes, since: now }),
            Offer::Waits(order) => Entered::Waits(Place { scopes, order }),
            Offer::Refused(_) => Entered::Refused,
        }
    }

    /// Whether one still waited, which now has gone.
    pub(crate) fn withdraw(&mut self, place: Place) -> bool {
        self.queue.withdraw(place.scopes, place.order)
    }

    /// The prefill engine has done its part; whose turn it is now.
    pub(crate) fn prefilled(&mut self, places: &mut Places, now: Instant) -> Vec<u64> {
        let mut woken = Vec::new();
        if let Some(place) = places.scopes.iter_mut().find(|scope| **scope == PREFILL) {
            *place = NONE;
            let held = now.saturating_duration_since(places.since);
            self.queue.leave([PREFILL, NONE, NONE, NONE], held, &mut woken);
        }
        woken
    }

    /// A request has ended; whose turn it is now.
    pub(crate) fn leave(&mut self, places: &Places, now: Instant) -> Vec<u64> {
        let mut woken = Vec::new();
        self.queue.leave(places.scopes, now.saturating_duration_since(places.since), &mut woken);
        woken
    }
}
