//! The gauges and counters of admission, per stage.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::{SECONDS, StageLabel};
use crate::admission::Counts;
use crate::error::Stage;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RefusalLabels {
    limit: &'static str,
    reason: &'static str,
}

#[derive(Debug)]
pub(super) struct AdmissionMetrics {
    running: Family<StageLabel, Gauge>,
    waiting: Family<StageLabel, Gauge>,
    waiting_tokens: Family<StageLabel, Gauge>,
    limit: Family<StageLabel, Gauge>,
    refused: Family<RefusalLabels, Counter>,
    wait: Histogram,
}

impl Default for AdmissionMetrics {
    fn default() -> Self {
        Self {
            running: Family::default(),
            waiting: Family::default(),
            waiting_tokens: Family::default(),
            limit: Family::default(),
            refused: Family::default(),
            wait: Histogram::new(SECONDS),
        }
    }
}

impl AdmissionMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let gauges = [
            ("admission_running", "Requests that hold a place of a stage", &self.running),
            ("admission_waiting", "Requests that wait and will need a stage", &self.waiting),
            (
                "admission_waiting_tokens",
                "Their prompt tokens, as far as can be estimated",
                &self.waiting_tokens,
            ),
            ("admission_limit", "Places of a stage; absent without a limit", &self.limit),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        registry.register(
            "admission_refused",
            "Requests answered with 429, by limit (prefill, decode, model, key) and reason (full, rate, late)",
            self.refused.clone(),
        );
        registry.register_with_unit(
            "admission_wait",
            "Time that requests waited for their turn",
            Unit::Seconds,
            self.wait.clone(),
        );
    }

    pub(super) fn set(&self, stage: Stage, counts: Counts) {
        let label = StageLabel { stage: stage.label() };
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        self.running.get_or_create(&label).set(number(counts.running as u64));
        self.waiting.get_or_create(&label).set(number(counts.waiting as u64));
        self.waiting_tokens.get_or_create(&label).set(number(counts.waiting_tokens));
        match counts.places {
            Some(places) => drop(self.limit.get_or_create(&label).set(number(places as u64))),
            None => drop(self.limit.remove(&label)),
        }
    }

    pub(super) fn refused(&self, limit: &'static str, reason: &'static str) {
        self.refused.get_or_create(&RefusalLabels { limit, reason }).inc();
    }

    pub(super) fn waited(&self, seconds: f64) {
        self.wait.observe(seconds);
    }
}
