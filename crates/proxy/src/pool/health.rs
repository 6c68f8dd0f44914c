//! What a peer's own exchanges tell of it, beside its probes. A peer has one leg, so nothing that
//! the other leg's engine does wrong is counted here.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

use super::breaker::{Breaker, BreakerSettings, BreakerState, Gate, Ticket, Turn, WHOLE};
use super::outcome::{Blame, Reads, blame};
use super::peer::Peer;
use crate::dial::Dial;
use crate::routing::lately;

/// One peer's health as its requests see it.
#[derive(Debug)]
pub(crate) struct Health {
    breaker: Mutex<Breaker>,
    reads: Mutex<Reads>,
    dial: Option<Arc<Dial>>,
}

impl Health {
    pub(crate) fn new(settings: BreakerSettings, dial: Option<Arc<Dial>>) -> Self {
        let breaker = Mutex::new(Breaker::new(settings, Instant::now()));
        Self { breaker, reads: Mutex::default(), dial }
    }

    /// Other settings of its breaker from now on.
    pub(crate) fn tune(&self, settings: BreakerSettings) {
        self.breaker.lock().tune(settings, Instant::now());
    }

    /// Whether nothing speaks against sending it one more request.
    pub(crate) fn is_sound(&self, now: Instant) -> bool {
        self.breaker.lock().gate(now) != Gate::Shut && !self.is_silent(now)
    }

    pub(crate) fn enter(&self, forced: bool) -> Option<Ticket> {
        self.breaker.lock().enter(forced, Instant::now())
    }

    pub(crate) fn leave(&self, ticket: Ticket) {
        self.breaker.lock().leave(ticket);
    }

    /// Whether it is sound, and how busy it counts as with so many exchanges in flight: more while its share is
    /// growing.
    pub(crate) fn look(&self, in_flight: usize, now: Instant) -> (bool, u64) {
        let breaker = self.breaker.lock();
        let (passes, share) = (breaker.gate(now) != Gate::Shut, breaker.share(now));
        drop(breaker);
        (passes && !self.is_silent(now), weight(in_flight, share))
    }

    fn is_silent(&self, now: Instant) -> bool {
        self.dial.as_ref().is_some_and(|dial| dial.is_silent(now))
    }

    /// The part of its share that it gets.
    pub(crate) fn share(&self, now: Instant) -> f64 {
        f64::from(self.breaker.lock().share(now)) / f64::from(WHOLE)
    }

    pub(crate) fn revived(&self) {
        self.breaker.lock().revived(Instant::now());
    }

    pub(crate) fn view(&self) -> HealthView {
        let now = Instant::now();
        let breaker = self.breaker.lock();
        let seconds = |wait: Duration| wait.as_secs_f64();
        HealthView {
            breaker: breaker.state(),
            opened: breaker.opened(),
            opens_in: breaker.opens_in(now).map(seconds),
            failures_in_a_row: breaker.in_a_row(),
            share: f64::from(breaker.share(now)) / f64::from(WHOLE),
            connecting_slowly: self.dial.as_ref().is_some_and(|dial| dial.is_silent(now)),
        }
    }
}

impl Peer {
    /// An exchange with it came to a good end.
    pub(crate) fn succeeded(&self) {
        let turn = self.health.breaker.lock().succeeded(Instant::now());
        self.told(turn);
        lately::served(self.spec.role.stage(), self.routing.key);
    }

    /// An exchange with it failed by its fault.
    pub(crate) fn blamed(&self) {
        let turn = self.health.breaker.lock().failed(Instant::now());
        self.told(turn);
    }

    fn told(&self, turn: Option<Turn>) {
        let stage = self.spec.role.stage().label();
        match turn {
            None => {}
            Some(Turn::Opened(pause)) => {
                tracing::warn!(peer = %self.id, url = %self.spec.url, stage, ?pause, "an engine failed too often and gets no requests for a while");
            }
            Some(Turn::Closed) => {
                tracing::info!(peer = %self.id, url = %self.spec.url, stage, "an engine works again and gets requests");
            }
        }
    }
}

/// How busy a peer counts as that gets such a share of requests.
fn weight(in_flight: usize, share: u32) -> u64 {
    (in_flight as u64 + 1).saturating_mul(u64::from(WHOLE) * u64::from(WHOLE)) / u64::from(share)
}

/// A decode engine has read a prefill engine's blocks: only now the prefill engine's part has gone well.
pub(crate) fn was_read(prefill: &Peer, decode: &Peer) {
    let now = Instant::now();
    prefill.health.reads.lock().record(decode.routing.key, true, now);
    decode.health.reads.lock().record(prefill.routing.key, true, now);
    prefill.succeeded();
}

/// A decode engine that had a hand-off failed, most likely because it could not read the blocks;
/// whoever of the two works with others is not blamed.
pub(crate) fn was_not_read(prefill: &Peer, decode: &Peer) {
    let now = Instant::now();
    let told = |peer: &Peer, partner: &Peer| {
        let mut reads = peer.health.reads.lock();
        reads.record(partner.routing.key, false, now);
        reads.clone()
    };
    let (of_prefill, of_decode) = (told(prefill, decode), told(decode, prefill));
    match blame((prefill.routing.key, &of_prefill), (decode.routing.key, &of_decode), now) {
        Blame::Prefill => prefill.blamed(),
        Blame::Decode => decode.blamed(),
        Blame::Nobody => {}
    }
}

/// A peer's health as operators see it.
#[derive(Clone, Debug, Serialize)]
pub struct HealthView {
    /// How its breaker stands.
    pub breaker: BreakerState,
    /// How often it has opened.
    pub opened: u64,
    /// Seconds that it stays open still.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opens_in: Option<f64>,
    /// Failures since the last success.
    pub failures_in_a_row: u32,
    /// The part of its share of requests that it gets, below 1 while it recovers.
    pub share: f64,
    /// Whether an attempt to connect to it takes so long that others avoid it.
    pub connecting_slowly: bool,
}
