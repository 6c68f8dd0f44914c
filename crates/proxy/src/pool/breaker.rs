//! One peer's circuit breaker: when its failures keep new requests from it, how it is tried again
//! and how its share grows after that. A peer is one leg's engine, so no leg pays for the other.
//! Pure: time is passed in.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::outcome::Window;

/// A whole share, in thousandths.
pub(crate) const WHOLE: u32 = 1000;

/// The share with which a recovering peer begins.
const FIRST_SHARE: u32 = 100;

/// When failures keep new requests from an engine, and how it comes back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerSettings {
    /// Failures in a row that open the breaker; zero for never.
    pub failures: u32,
    /// Failed part of the requests in `window` that opens it; above 1 for never.
    pub failure_rate: f64,
    /// Over how long the failed part is taken.
    #[serde(with = "humantime_serde")]
    pub window: Duration,
    /// How many requests the window must hold for that.
    pub least_requests: u32,
    /// How long it stays open; doubled each time the trials fail.
    #[serde(with = "humantime_serde")]
    pub pause: Duration,
    /// The longest that it stays open.
    #[serde(with = "humantime_serde")]
    pub longest_pause: Duration,
    /// How many requests try the engine at a time after that.
    pub trials: u32,
    /// How many of them must succeed.
    pub good_trials: u32,
    /// Over how long an engine that came back gets its whole share again; zero for at once.
    #[serde(with = "humantime_serde")]
    pub slow_start: Duration,
    /// Breakers are ignored while fewer than this part of a stage's ready engines would be left.
    pub floor: f64,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self {
            failures: 5,
            failure_rate: 0.5,
            window: Duration::from_secs(30),
            least_requests: 20,
            pause: Duration::from_secs(5),
            longest_pause: Duration::from_secs(60),
            trials: 1,
            good_trials: 2,
            slow_start: Duration::from_secs(10),
            floor: 0.5,
        }
    }
}

/// How a breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BreakerState {
    /// Requests come as they are chosen.
    Closed,
    /// A few requests try the engine.
    HalfOpen,
    /// No request comes.
    Open,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Closed,
    /// Closed, with a share that grows since then.
    Ramping(Instant),
    Open(Instant),
    Trying {
        running: u32,
        good: u32,
    },
}

/// Whether a new request may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    Passes,
    /// As one of the few that try the engine.
    Tries,
    Shut,
}

/// A request's way in; a trial's place is given back with [`Breaker::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// The trial's series; none for a request that is no trial.
    series: Option<u32>,
}

/// A change that operators are told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Opened(Duration),
    Closed,
}

/// One peer's breaker.
#[derive(Debug)]
pub(crate) struct Breaker {
    settings: BreakerSettings,
    phase: Phase,
    in_a_row: u32,
    window: Window,
    /// How often it opened without having been closed for good.
    openings: u32,
    /// How often it ever opened.
    opened: u64,
    series: u32,
}

impl Breaker {
    pub(crate) fn new(settings: BreakerSettings, now: Instant) -> Self {
        let window = Window::new(settings.window, now);
        Self { settings, phase: Phase::Closed, in_a_row: 0, window, openings: 0, opened: 0, series: 0 }
    }

    /// Other settings from now on. What was counted stays, and one that is open opens no later than they say.
    pub(crate) fn tune(&mut self, settings: BreakerSettings, now: Instant) {
        if settings.window != self.settings.window {
            self.window = self.window.resized(settings.window, now);
        }
        if let Phase::Open(until) = &mut self.phase {
            *until = (*until).min(now + settings.longest_pause.max(settings.pause));
        }
        self.settings = settings;
    }

    pub(crate) fn gate(&self, now: Instant) -> Gate {
        match self.phase {
            Phase::Closed | Phase::Ramping(_) => Gate::Passes,
            Phase::Open(until) if now < until => Gate::Shut,
            Phase::Open(_) => Gate::Tries,
            Phase::Trying { running, .. } if running < self.settings.trials => Gate::Tries,
            Phase::Trying { .. } => Gate::Shut,
        }
    }

    /// Lets a request in; one that is `forced` also where the gate is shut.
    pub(crate) fn enter(&mut self, forced: bool, now: Instant) -> Option<Ticket> {
        match self.gate(now) {
            Gate::Passes => return Some(Ticket { series: None }),
            Gate::Shut => return forced.then_some(Ticket { series: None }),
            Gate::Tries => {}
        }
        if let Phase::Open(_) = self.phase {
            self.series = self.series.wrapping_add(1);
            self.phase = Phase::Trying { running: 0, good: 0 };
        }
        if let Phase::Trying { running, .. } = &mut self.phase {
            *running += 1;
        }
        Some(Ticket { series: Some(self.series) })
    }

    /// The request is over, however it ended.
    pub(crate) fn leave(&mut self, ticket: Ticket) {
        if let Phase::Trying { running, .. } = &mut self.phase
            && ticket.series == Some(self.series)
        {
            *running = running.saturating_sub(1);
        }
    }

    pub(crate) fn succeeded(&mut self, now: Instant) -> Option<Turn> {
        self.in_a_row = 0;
        self.window.record(true, now);
        match &mut self.phase {
            Phase::Closed | Phase::Open(_) => None,
            Phase::Ramping(since) => {
                if now.saturating_duration_since(*since) >= self.settings.slow_start {
                    self.phase = Phase::Closed;
                    self.openings = 0;
                }
                None
            }
            Phase::Trying { good, .. } => {
                *good += 1;
                if *good < self.settings.good_trials {
                    return None;
                }
                self.window = Window::new(self.settings.window, now);
                self.phase = Phase::Ramping(now);
                Some(Turn::Closed)
            }
        }
    }

    pub(crate) fn failed(&mut self, now: Instant) -> Option<Turn> {
        self.in_a_row = self.in_a_row.saturating_add(1);
        self.window.record(false, now);
        match self.phase {
            Phase::Open(_) => None,
            Phase::Trying { .. } => Some(self.open(now)),
            Phase::Closed | Phase::Ramping(_) => {
                let settings = &self.settings;
                let (bad, all) = self.window.totals(now);
                let in_a_row = settings.failures > 0 && self.in_a_row >= settings.failures;
                let too_many = all >= u64::from(settings.least_requests.max(1))
                    && bad as f64 >= settings.failure_rate * all as f64;
                (in_a_row || too_many).then(|| self.open(now))
            }
        }
    }

    /// Its probes are good again after they were not.
    pub(crate) fn revived(&mut self, now: Instant) {
        self.in_a_row = 0;
        match &mut self.phase {
            Phase::Closed | Phase::Ramping(_) => self.phase = Phase::Ramping(now),
            // What opened it may have been the death that is over.
            Phase::Open(until) => *until = now,
            Phase::Trying { .. } => {}
        }
    }

    fn open(&mut self, now: Instant) -> Turn {
        let doubled = self.settings.pause.saturating_mul(1 << self.openings.min(16));
        let pause = doubled.min(self.settings.longest_pause.max(self.settings.pause));
        self.openings = self.openings.saturating_add(1);
        self.opened += 1;
        self.in_a_row = 0;
        self.phase = Phase::Open(now + pause);
        Turn::Opened(pause)
    }

    /// The part of a share that it gets, in thousandths, never zero.
    pub(crate) fn share(&self, now: Instant) -> u32 {
        let Phase::Ramping(since) = self.phase else { return WHOLE };
        let (grown, whole) = (now.saturating_duration_since(since), self.settings.slow_start);
        if grown >= whole {
            return WHOLE;
        }
        let share = f64::from(WHOLE) * grown.as_secs_f64() / whole.as_secs_f64();
        (share as u32).clamp(FIRST_SHARE, WHOLE)
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.phase {
            Phase::Closed | Phase::Ramping(_) => BreakerState::Closed,
            Phase::Trying { .. } => BreakerState::HalfOpen,
            Phase::Open(_) => BreakerState::Open,
        }
    }

    pub(crate) fn opened(&self) -> u64 {
        self.opened
    }

    pub(crate) fn in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// How long it stays open still.
    pub(crate) fn opens_in(&self, now: Instant) -> Option<Duration> {
        match self.phase {
            Phase::Open(until) => Some(until.saturating_duration_since(now)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
