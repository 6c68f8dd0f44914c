//! How the list of metrics is written down once: from it come the fields, their registration and the rows of
//! `docs/metrics.md`. Owns no metric itself.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::steps::Steps;

/// Before every name.
pub(super) const PREFIX: &str = "kvbaton";

const SECONDS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
    600.0,
];

/// What is said of one metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricDoc {
    /// The name on the metrics page; a histogram's without `_bucket`, `_sum` and `_count`.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// What it counts in; nothing for plain numbers.
    pub unit: Option<&'static str>,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// What it says.
    pub help: &'static str,
}

impl MetricDoc {
    pub(super) fn of<M: Described>(name: &str, unit: Option<&Unit>, help: &'static str) -> Self {
        let unit = unit.map(|unit| match unit {
            Unit::Seconds => "seconds",
            Unit::Bytes => "bytes",
            _ => "other",
        });
        let mut full = format!("{PREFIX}_{name}");
        if let Some(unit) = unit {
            full.push('_');
            full.push_str(unit);
        }
        if M::KIND == "counter" {
            full.push_str("_total");
        }
        Self { name: full, kind: M::KIND, unit, labels: M::LABELS, help }
    }
}

/// The id of the trace that an example belongs to.
#[derive(Clone, Debug, Hash, PartialEq, Eq, prometheus_client::encoding::EncodeLabelSet)]
pub(crate) struct TraceLabel {
    pub(super) trace_id: String,
}

/// Durations, with an example of a sampled trace for each bucket.
pub(super) type Durations = HistogramWithExemplars<TraceLabel>;

/// Durations by label.
pub(super) type DurationsBy<L> = Family<L, Durations, fn() -> Durations>;

/// A kind of metric.
pub(super) trait Described {
    const KIND: &'static str;
    const LABELS: &'static [&'static str];
    fn empty() -> Self;
}

/// A set of labels.
pub(super) trait Named {
    const NAMES: &'static [&'static str];
}

impl Described for Counter {
    const KIND: &'static str = "counter";
    const LABELS: &'static [&'static str] = &[];
    fn empty() -> Self {
        Self::default()
    }
}

impl Described for Gauge {
    const KIND: &'static str = "gauge";
    const LABELS: &'static [&'static str] = &[];
    fn empty() -> Self {
        Self::default()
    }
}

impl Described for Gauge<f64, AtomicU64> {
    const KIND: &'static str = "gauge";
    const LABELS: &'static [&'static str] = &[];
    fn empty() -> Self {
        Self::default()
    }
}

impl Described for Durations {
    const KIND: &'static str = "histogram";
    const LABELS: &'static [&'static str] = &[];
    fn empty() -> Self {
        Self::new(SECONDS.into_iter())
    }
}

impl<L: Named + Clone + std::hash::Hash + Eq> Described for DurationsBy<L> {
    const KIND: &'static str = "histogram";
    const LABELS: &'static [&'static str] = L::NAMES;
    fn empty() -> Self {
        Self::new_with_constructor(Durations::empty)
    }
}

macro_rules! plain_families {
    ($($metric:ty => $kind:literal),* $(,)?) => { $(
        impl<L: Named + Clone + std::hash::Hash + Eq> Described for Family<L, $metric> {
            const KIND: &'static str = $kind;
            const LABELS: &'static [&'static str] = L::NAMES;
            fn empty() -> Self {
                Self::default()
            }
        }
    )* };
}

plain_families! {
    Counter => "counter",
    Gauge => "gauge",
    Gauge<f64, AtomicU64> => "gauge",
    Steps => "histogram",
}

/// Labels: the set, and its names for the documentation.
macro_rules! labels {
    ($($set:ident { $($label:ident: $type:ty),* $(,)? })*) => { $(
        #[derive(Clone, Debug, Hash, PartialEq, Eq, prometheus_client::encoding::EncodeLabelSet)]
        pub(super) struct $set {
            $(pub(super) $label: $type,)*
        }

        impl $crate::metrics::table::Named for $set {
            const NAMES: &'static [&'static str] = &[$(stringify!($label)),*];
        }
    )* };
}

/// The list: `field: type, "name" unit, "help";`. The name on the page has the prefix, the unit and, for
/// counters, `_total` added.
macro_rules! metrics {
    ($(#[$doc:meta])* $table:ident { $($field:ident: $type:ty, $name:literal $($unit:ident)?, $help:literal;)* }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(super) struct $table {
            $(pub(super) $field: $type,)*
        }

        impl $table {
            pub(super) fn new(registry: &mut prometheus_client::registry::Registry) -> Self {
                let table = Self { $($field: <$type as $crate::metrics::table::Described>::empty(),)* };
                $($crate::metrics::table::register(
                    registry,
                    $name,
                    $crate::metrics::table::metrics!(@unit $($unit)?),
                    $help,
                    table.$field.clone(),
                );)*
                table
            }

            pub(super) fn docs() -> Vec<$crate::metrics::table::MetricDoc> {
                vec![$($crate::metrics::table::MetricDoc::of::<$type>(
                    $name,
                    $crate::metrics::table::metrics!(@unit $($unit)?).as_ref(),
                    $help,
                )),*]
            }
        }
    };
    (@unit) => { None::<prometheus_client::registry::Unit> };
    (@unit $unit:ident) => { Some(prometheus_client::registry::Unit::$unit) };
}

pub(super) use {labels, metrics};

pub(super) fn register(
    registry: &mut Registry,
    name: &str,
    unit: Option<Unit>,
    help: &str,
    metric: impl prometheus_client::registry::Metric,
) {
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, metric),
        None => registry.register(name, help, metric),
    }
}
