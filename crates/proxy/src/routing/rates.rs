//! How long work takes, learnt from what it took: a line through the last observations, whose start is the cost of
//! any exchange and whose slope is the cost of one more token or byte. Pure; reads no clock.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// How much of its weight an observation has after the next one.
const KEPT: f64 = 0.95;

/// How many observations a line needs.
const LEAST: f64 = 3.0;

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

/// A line that is read far more often than it learns.
#[derive(Debug)]
pub(crate) struct Learnt {
    line: Mutex<Line>,
    start: AtomicU64,
    /// Not a number while there is none.
    each: AtomicU64,
}

impl Default for Learnt {
    fn default() -> Self {
        let nothing = || AtomicU64::new(f64::NAN.to_bits());
        Self { line: Mutex::default(), start: nothing(), each: nothing() }
    }
}

impl Learnt {
    pub(crate) fn learn(&self, size: f64, seconds: f64) {
        let mut line = self.line.lock();
        line.learn(size, seconds);
        if let Some(rate) = line.rate() {
            self.start.store(rate.start.to_bits(), Ordering::Relaxed);
            self.each.store(rate.each.to_bits(), Ordering::Relaxed);
        }
    }

    /// Both numbers may be of neighbouring moments, which differ little.
    pub(crate) fn rate(&self) -> Option<Rate> {
        let number = |bits: &AtomicU64| f64::from_bits(bits.load(Ordering::Relaxed));
        let rate = Rate { start: number(&self.start), each: number(&self.each) };
        (!rate.each.is_nan() && !rate.start.is_nan()).then_some(rate)
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
            let learnt = Learnt::default();
            for (size, seconds) in seen {
                learnt.learn(size.abs() % 1e12, seconds.abs() % 1e6);
            }
            if let Some(rate) = learnt.rate() {
                prop_assert!(rate.start >= 0.0 && rate.start.is_finite());
                prop_assert!(rate.each >= 0.0 && rate.each.is_finite());
            }
        }
    }

    #[test]
    fn equal_sizes_give_their_mean_and_few_give_nothing() {
        let learnt = Learnt::default();
        for seconds in [0.1, 0.1] {
            learnt.learn(1000.0, seconds);
            assert_eq!(learnt.rate(), None);
        }
        learnt.learn(1000.0, 0.1);
        let rate = learnt.rate().unwrap();
        assert!(rate.start == 0.0 && (rate.each - 1e-4).abs() < 1e-12, "{rate:?}");
    }

    #[test]
    fn what_is_newer_counts_more() {
        let mut line = Line::default();
        (0..100).for_each(|_| line.learn(1000.0, 0.1));
        (0..100).for_each(|_| line.learn(1000.0, 0.2));
        assert!((line.rate().unwrap().each - 2e-4).abs() < 2e-6);
    }
}
