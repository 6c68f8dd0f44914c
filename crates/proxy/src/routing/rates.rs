//! How long work takes, learnt from what it took: a line through the last observations, whose start is the cost of
//! any exchange and whose slope is the cost of one more token or byte. Pure but for the first date.
//!
//! Whoever was slow once is not asked again while others are faster, so that nothing more would be learnt of them:
//! what nobody has confirmed for a while is not known any more, and weighs little in what is learnt next.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::time::Instant;

/// How much of its weight an observation has after the next one.
const KEPT: f64 = 0.95;

/// How many observations a line needs.
const LEAST: f64 = 3.0;

/// Seconds that a line is believed after its last observation.
const LASTS: u64 = 60;

/// Below this spread of the sizes, relative to their mean, their slope is noise.
const LEAST_SPREAD: f64 = 0.1;

/// What work costs, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Of any exchange, however small.
    pub start: f64,
    /// Of one more token or byte.
    pub each: f64,
}

/// Observations, of which older ones weigh less.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line {
    count: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Line {
    /// Work of such a size took so many seconds. What is no number is not counted.
    pub fn learn(&mut self, size: f64, seconds: f64) {
        if !(size.is_finite() && seconds.is_finite() && size > 0.0 && seconds > 0.0) {
            return;
        }
        self.count = self.count * KEPT + 1.0;
        self.x = self.x * KEPT + size;
        self.y = self.y * KEPT + seconds;
        self.xx = self.xx * KEPT + size * size;
        self.xy = self.xy * KEPT + size * seconds;
    }

    /// All of them count as one from now on.
    fn fade(&mut self) {
        let part = self.count.max(1.0).recip();
        for sum in [&mut self.count, &mut self.x, &mut self.y, &mut self.xx, &mut self.xy] {
            *sum *= part;
        }
    }

    /// What they say; none while there are too few.
    #[must_use]
    pub fn rate(&self) -> Option<Rate> {
        // Weights fall, so that even many observations of the past count as a few.
        if self.count < (1.0 - KEPT.powf(LEAST)) / (1.0 - KEPT) - 1e-9 {
            return None;
        }
        let (x, y) = (self.x / self.count, self.y / self.count);
        let variance = self.xx / self.count - x * x;
        let each = (self.xy / self.count - x * y) / variance;
        let start = y - each * x;
        let is_line = variance > (LEAST_SPREAD * x).powi(2) && each > 0.0 && start >= 0.0;
        let rate = if is_line { Rate { start, each } } else { Rate { start: 0.0, each: y / x } };
        (rate.start.is_finite() && rate.each.is_finite()).then_some(rate)
    }
}

/// A moment as lines keep it, in seconds since the first of all: one is compared with many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Date(u64);

impl Date {
    pub(crate) fn of(now: Instant) -> Self {
        static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);
        Self(now.saturating_duration_since(*FIRST).as_secs())
    }

    /// Whether what was confirmed last then is still believed now.
    const fn believes(self, last: Self) -> bool {
        self.0 < last.0 + LASTS
    }
}

/// A line and the date of its last observation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dated {
    line: Line,
    last: Date,
}

impl Dated {
    pub(crate) fn learn(&mut self, size: f64, seconds: f64, now: Date) {
        if !now.believes(self.last) {
            self.line.fade();
        }
        self.line.learn(size, seconds);
        self.last = now;
    }

    pub(crate) fn rate(&self, now: Date) -> Option<Rate> {
        if now.believes(self.last) { self.line.rate() } else { None }
    }
}

/// A dated line that is read far more often than it learns.
#[derive(Debug)]
pub(crate) struct Learnt {
    line: Mutex<Dated>,
    start: AtomicU64,
    /// Not a number while there is none.
    each: AtomicU64,
    /// The last observation's date.
    last: AtomicU64,
}

impl Default for Learnt {
    fn default() -> Self {
        let nothing = || AtomicU64::new(f64::NAN.to_bits());
        Self { line: Mutex::default(), start: nothing(), each: nothing(), last: AtomicU64::new(0) }
    }
}

impl Learnt {
    pub(crate) fn learn(&self, size: f64, seconds: f64, now: Date) {
        let mut line = self.line.lock();
        line.learn(size, seconds, now);
        let rate = line.rate(now).unwrap_or(Rate { start: f64::NAN, each: f64::NAN });
        self.start.store(rate.start.to_bits(), Ordering::Relaxed);
        self.each.store(rate.each.to_bits(), Ordering::Relaxed);
        self.last.store(now.0, Ordering::Relaxed);
    }

    /// The numbers may be of neighbouring moments, which differ little.
    pub(crate) fn rate(&self, now: Date) -> Option<Rate> {
        let number = |bits: &AtomicU64| f64::from_bits(bits.load(Ordering::Relaxed));
        let rate = Rate { start: number(&self.start), each: number(&self.each) };
        let is_known = now.believes(Date(self.last.load(Ordering::Relaxed)));
        (is_known && !rate.each.is_nan() && !rate.start.is_nan()).then_some(rate)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_line_is_found_again(
            start in 0.001_f64..0.5,
            each in 1e-6_f64..1e-3,
            sizes in proptest::collection::vec(1.0_f64..100_000.0, 3..60),
        ) {
            let mut line = Line::default();
            for size in &sizes {
                line.learn(*size, start + each * size);
            }
            let rate = line.rate().unwrap();
            prop_assert!(rate.start >= 0.0 && rate.each > 0.0);
            let spread = sizes.iter().fold(0.0_f64, |most, size| most.max(*size))
                / sizes.iter().fold(f64::MAX, |least, size| least.min(*size));
            if spread > 100.0 && sizes.len() > 10 {
                prop_assert!((rate.each / each - 1.0).abs() < 0.05, "{rate:?}");
            }
        }

        #[test]
        fn whatever_is_learnt_a_rate_is_a_number_above_zero(
            seen in proptest::collection::vec((any::<f64>(), any::<f64>()), 0..30),
        ) {
            let (learnt, now) = (Learnt::default(), Date::default());
            for (size, seconds) in seen {
                learnt.learn(size.abs() % 1e12, seconds.abs() % 1e6, now);
            }
            if let Some(rate) = learnt.rate(now) {
                prop_assert!(rate.start >= 0.0 && rate.start.is_finite());
                prop_assert!(rate.each >= 0.0 && rate.each.is_finite());
            }
        }
    }

    #[test]
    fn equal_sizes_give_their_mean_and_few_give_nothing() {
        let (learnt, now) = (Learnt::default(), Date::default());
        for seconds in [0.1, 0.1] {
            learnt.learn(1000.0, seconds, now);
            assert_eq!(learnt.rate(now), None);
        }
        learnt.learn(1000.0, 0.1, now);
        let rate = learnt.rate(now).unwrap();
        assert!(rate.start == 0.0 && (rate.each - 1e-4).abs() < 1e-12, "{rate:?}");
    }

    #[test]
    fn what_nobody_confirms_is_forgotten_and_soon_outweighed() {
        let learnt = Learnt::default();
        (0..100).for_each(|_| learnt.learn(1000.0, 10.0, Date(0)));
        assert!((learnt.rate(Date(LASTS - 1)).unwrap().each - 1e-2).abs() < 1e-9);
        let now = Date(LASTS);
        assert_eq!(learnt.rate(now), None);
        learnt.learn(1000.0, 0.1, now);
        assert_eq!(learnt.rate(now), None, "one of then and one of now");
        learnt.learn(1000.0, 0.1, now);
        let rate = learnt.rate(now).unwrap();
        assert!(rate.each < 0.36e-2, "{rate:?}");
    }

    #[test]
    fn what_is_newer_counts_more() {
        let mut line = Line::default();
        (0..100).for_each(|_| line.learn(1000.0, 0.1));
        (0..100).for_each(|_| line.learn(1000.0, 0.2));
        assert!((line.rate().unwrap().each - 2e-4).abs() < 2e-6);
    }
}
