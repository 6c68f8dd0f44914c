//! Durations, counted in cells whose width is a fixed part of what they hold, so that millions take no room.

use std::time::Duration;

use serde::Serialize;

/// How much wider a cell begins than the one before it.
const STEP: f64 = 1.005;

/// Where the first cell begins, in seconds.
const FIRST: f64 = 1e-6;

/// Durations of one kind.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    cells: Vec<u64>,
    count: u64,
    sum: f64,
    most: f64,
}

/// What is said of durations, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// How many there are.
    pub count: u64,
    /// Their mean.
    pub mean: f64,
    /// Half of them are no longer.
    pub p50: f64,
    /// 90 % of them are no longer.
    pub p90: f64,
    /// 99 % of them are no longer.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

impl Histogram {
    /// Counts one more.
    pub fn add(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let cell = if seconds <= FIRST { 0 } else { ((seconds / FIRST).ln() / STEP.ln()) as usize };
        if cell >= self.cells.len() {
            self.cells.resize(cell + 1, 0);
        }
        self.cells[cell] += 1;
        self.count += 1;
        self.sum += seconds;
        self.most = self.most.max(seconds);
    }

    /// The duration that such a part is no longer than, within half a percent.
    #[must_use]
    pub fn quantile(&self, part: f64) -> f64 {
        let wanted = (part * self.count as f64).ceil().max(1.0) as u64;
        let mut before = 0;
        for (cell, count) in self.cells.iter().enumerate() {
            before += count;
            if before >= wanted {
                return (FIRST * STEP.powf(cell as f64 + 0.5)).min(self.most);
            }
        }
        self.most
    }

    /// What is said of them.
    #[must_use]
    pub fn percentiles(&self) -> Percentiles {
        if self.count == 0 {
            return Percentiles::default();
        }
        Percentiles {
            count: self.count,
            mean: self.sum / self.count as f64,
            p50: self.quantile(0.5),
            p90: self.quantile(0.9),
            p99: self.quantile(0.99),
            max: self.most,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn quantiles_are_those_of_the_sorted_list(
            mut micros in proptest::collection::vec(2_u64..100_000_000, 1..300), part in 0.01_f64..1.0,
        ) {
            let mut histogram = Histogram::default();
            micros.iter().for_each(|micros| histogram.add(Duration::from_micros(*micros)));
            micros.sort_unstable();
            let place = (part * micros.len() as f64).ceil() as usize - 1;
            let exact = micros[place] as f64 * 1e-6;
            prop_assert!((histogram.quantile(part) / exact - 1.0).abs() < 0.006);
        }
    }

    #[test]
    fn nothing_says_nothing() {
        assert_eq!(Histogram::default().percentiles(), Percentiles::default());
    }
}
