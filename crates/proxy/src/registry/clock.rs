//! What an engine's monotonic clock shows, worked out from the exchanges that it starts.
//! Pure arithmetic on bounds: never reads a clock and never guesses inside its error.

use std::collections::VecDeque;

use serde::Serialize;

/// How far two clocks may drift apart, in seconds per second.
const DRIFT: f64 = 200e-6;

/// Rounding of the numbers that travel, in seconds.
const SLACK: f64 = 1e-6;

/// Answers that an engine may still echo; more are only in flight when they overtake each other.
const REMEMBERED_ANSWERS: usize = 4;

/// An engine's clock at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClockReading {
    /// Seconds on the engine's clock.
    pub seconds: f64,
    /// The true value is at most so far away, in seconds. `None`: `seconds` is a lower bound and
    /// nothing is known from above.
    pub error: Option<f64>,
}

/// The answer that an engine saw last, as it tells in its next request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Echo {
    /// The router's clock as that answer carried it, in seconds.
    pub router_clock: f64,
    /// The engine's clock when the answer arrived, in seconds.
    pub received: f64,
}

/// Bounds on the engine's clock minus the router's.
///
/// A request sent at P2 and received at R2 proves an offset of at least P2 - R2 at R2; an answer
/// sent at R1 and received at P1 proves one of at most P1 - R1, at the latest since R1. Bounds
/// widen with their age, all at the same rate, so the tightest stays the tightest and one of each
/// kind is enough. They are kept as they would be at the origin of the router's clock.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClockTrack {
    lower: Option<f64>,
    upper: Option<f64>,
    /// Answers are matched, since one of another router or of an earlier life proves nothing here.
    answers: VecDeque<f64>,
    /// Bounds that another router proved, (lower, upper), likewise.
    told: Option<(f64, f64)>,
}

/// An engine's clock as another router told it.
#[cfg(feature = "etcd")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SharedReading {
    /// Seconds on the engine's clock when it was told.
    pub(crate) seconds: f64,
    /// The true value is at most so far away, the routers' wall clocks included.
    pub(crate) error: f64,
}

impl ClockTrack {
    /// The router's clock as an answer that leaves now carries it; remembers it for the echo.
    pub(crate) fn answer(&mut self, now: f64) -> f64 {
        // Rounded down, so that the bound from above stays one.
        let carried = (now * 1e6).floor() / 1e6;
        if self.answers.len() == REMEMBERED_ANSWERS {
            self.answers.pop_front();
        }
        self.answers.push_back(carried);
        carried
    }

    /// Takes a request that left at `sent` by the engine's clock and arrived at `received` by the
    /// router's.
    pub(crate) fn observe(&mut self, sent: f64, received: f64, echo: Option<Echo>) {
        let lower = sent - received + DRIFT * received;
        let upper = echo.and_then(|echo| self.upper_bound(echo, sent));
        self.merge(lower, upper, received);
    }

    /// Takes what the engine's clock told between `asked` and `answered` by the router's.
    pub(crate) fn sampled(&mut self, told: f64, asked: f64, answered: f64) {
        let lower = told - answered + DRIFT * answered;
        let upper = told - asked - DRIFT * asked;
        self.merge(lower, Some(upper), answered);
    }

    fn merge(&mut self, lower: f64, upper: Option<f64>, received: f64) {
        let merged_lower = self.lower.map_or(lower, |known| known.max(lower));
        let merged_upper = match (self.upper, upper) {
            (Some(known), Some(new)) => Some(known.min(new)),
            (known, new) => known.or(new),
        };
        if self.crossed(merged_lower, merged_upper, received) {
            // The engine's clock jumped: only what this request says is about the new one.
            self.told = None;
            self.lower = Some(lower);
            self.upper = upper.filter(|upper| !self.crossed(lower, Some(*upper), received));
        } else {
            self.lower = Some(merged_lower);
            self.upper = merged_upper;
        }
    }

    fn upper_bound(&self, echo: Echo, sent: f64) -> Option<f64> {
        let answer = self.answers.iter().find(|answer| (**answer - echo.router_clock).abs() <= SLACK)?;
        (echo.received <= sent).then(|| echo.received - answer - DRIFT * answer)
    }

    fn crossed(&self, lower: f64, upper: Option<f64>, now: f64) -> bool {
        upper.is_some_and(|upper| lower - DRIFT * now > upper + DRIFT * now + SLACK)
    }

    /// Takes in what another router told `age` seconds ago by the wall clocks, less than 0 when they
    /// differ, at `now` by this router's clock.
    #[cfg(feature = "etcd")]
    pub(crate) fn share(&mut self, told: SharedReading, age: f64, now: f64) {
        let error = told.error + DRIFT * age.abs();
        let offset = told.seconds + age - now;
        let bounds = (offset - error + DRIFT * now, offset + error - DRIFT * now);
        self.told = [bounds.0, bounds.1].iter().all(|bound| bound.is_finite()).then_some(bounds);
    }

    /// The engine's clock as far as it told this router, when the router's shows `now`.
    #[cfg(feature = "etcd")]
    pub(crate) fn own_reading(&self, now: f64) -> Option<ClockReading> {
        reading(self.lower, self.upper, now)
    }

    /// The engine's clock when the router's shows `now`; `None` when the engine never told it.
    pub(crate) fn reading(&self, now: f64) -> Option<ClockReading> {
        let Some((told_lower, told_upper)) = self.told else { return reading(self.lower, self.upper, now) };
        let lower = self.lower.map_or(told_lower, |own| own.max(told_lower));
        let upper = self.upper.map_or(told_upper, |own| own.min(told_upper));
        // What the engine said itself is worth more than another router's word.
        if self.lower.is_some() && self.crossed(lower, Some(upper), now) {
            return reading(self.lower, self.upper, now);
        }
        reading(Some(lower), Some(upper), now)
    }
}

fn reading(lower: Option<f64>, upper: Option<f64>, now: f64) -> Option<ClockReading> {
    let lower = lower? - DRIFT * now;
    Some(match upper {
        None => ClockReading { seconds: now + lower, error: None },
        Some(upper) => {
            let upper = upper + DRIFT * now;
            let error = ((upper - lower) / 2.0).max(0.0) + SLACK;
            ClockReading { seconds: now + f64::midpoint(lower, upper), error: Some(error) }
        }
    })
}

#[cfg(test)]
mod tests;
