//! A histogram for what happens with every token: relaxed atomics, and each stream adds many at once.
//! Has no examples.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::{MetricType, TypedMetric};

/// In seconds; the last bucket has no bound.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0];
const BUCKETS: usize = BOUNDS.len() + 1;

/// How many steps a stream keeps to itself.
const KEPT: u32 = 32;

type NoExamples = HashMap<usize, Exemplar<[(&'static str, &'static str); 0], f64>>;

/// The histogram; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steps(Arc<Totals>);

#[derive(Debug, Default)]
struct Totals {
    counts: [AtomicU64; BUCKETS],
    nanoseconds: AtomicU64,
}

/// The steps of one stream that the histogram does not know yet.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    counts: [u32; BUCKETS],
    nanoseconds: u64,
    kept: u32,
}

impl Batch {
    /// Takes one step, and gives them to the histogram from time to time.
    pub(crate) fn step(&mut self, took: Duration, steps: &Steps) {
        let seconds = took.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.counts[bucket] += 1;
        self.nanoseconds += u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.kept += 1;
        if self.kept >= KEPT {
            self.give(steps);
        }
    }

    /// Gives all to the histogram.
    pub(crate) fn give(&mut self, steps: &Steps) {
        for (count, total) in self.counts.iter().zip(&steps.0.counts) {
            if *count > 0 {
                total.fetch_add(u64::from(*count), Ordering::Relaxed);
            }
        }
        steps.0.nanoseconds.fetch_add(self.nanoseconds, Ordering::Relaxed);
        *self = Self::default();
    }
}

impl TypedMetric for Steps {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Steps {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let counts: Vec<u64> = self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let bounds = BOUNDS.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
        let sum = self.0.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        encoder.encode_histogram(sum, counts.iter().sum(), &buckets, None::<&NoExamples>)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    fn page(steps: &Steps) -> String {
        let mut registry = Registry::default();
        registry.register("steps", "Steps", steps.clone());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn a_stream_gives_its_steps_in_batches_and_the_rest_at_its_end() {
        let (steps, mut batch) = (Steps::default(), Batch::default());
        for _ in 0..KEPT - 1 {
            batch.step(Duration::from_millis(20), &steps);
        }
        assert!(page(&steps).contains("steps_count 0\n"));
        batch.step(Duration::from_secs(9), &steps);
        let text = page(&steps);
        assert!(text.contains("steps_bucket{le=\"0.01\"} 0\n"), "{text}");
        assert!(text.contains("steps_bucket{le=\"0.02\"} 31\n"), "{text}");
        assert!(text.contains("steps_bucket{le=\"5.0\"} 31\n"), "{text}");
        assert!(text.contains("steps_bucket{le=\"+Inf\"} 32\n"), "{text}");
        assert!(text.contains("steps_sum 9.62\n"), "{text}");
        batch.step(Duration::from_millis(1), &steps);
        batch.give(&steps);
        assert!(page(&steps).contains("steps_count 33\n"));
    }
}
