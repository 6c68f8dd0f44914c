//! The Prometheus metrics of a connector: names, buckets and units, and what a step adds to each.
//!
//! Data for whatever registry the engine has; nothing is counted here.

use crate::protocol::params::Generation;

use super::Stats;

/// What a metric measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Measure {
    /// Seconds from post to completion.
    TransferSeconds,
    /// Seconds spent in posting.
    PostSeconds,
    /// Bytes of a transfer.
    Bytes,
    /// Descriptor pairs of a transfer.
    Descriptors,
    /// Failed transfers; since v14 with failed handshakes and notifications.
    FailedTransfers,
    /// Failed notifications, which v14 counts among the failed transfers as well.
    FailedNotifications,
    /// Requests whose lease ran out.
    ExpiredRequests,
    /// Notifications for requests that are no longer kept.
    LateNotifications,
}

/// Unit of a metric's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// Descriptor pairs.
    Descriptors,
    /// Events.
    Events,
}

/// One metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metric {
    /// Name on the page; counters end in `_total`.
    pub name: &'static str,
    /// One sentence for the page.
    pub help: &'static str,
    /// What it measures.
    pub measure: Measure,
    /// Unit of its values.
    pub unit: Unit,
    /// Upper bounds of a histogram, without infinity; empty for a counter.
    pub buckets: &'static [f64],
    /// The first generation that has it.
    pub since: Generation,
}

/// Bounds of the posting time; transfer times leave out the first.
const TIME_BUCKETS: [f64; 13] = [0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0];

/// 2 KiB to 8 GiB in factors of four.
const BYTE_BUCKETS: [f64; 12] = {
    let mut buckets = [2048.0; 12];
    let mut index = 1;
    while index < buckets.len() {
        buckets[index] = buckets[index - 1] * 4.0;
        index += 1;
    }
    buckets
};

const DESCRIPTOR_BUCKETS: [f64; 14] =
    [10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10_000.0, 20_000.0, 50_000.0];

/// All metrics, in the order of vLLM's page.
pub const METRICS: [Metric; 8] = [
    Metric {
        name: "vllm:nixl_xfer_time_seconds",
        help: "Time a KV transfer over NIXL took.",
        measure: Measure::TransferSeconds,
        unit: Unit::Seconds,
        buckets: TIME_BUCKETS.split_at(1).1,
        since: Generation::V2,
    },
    Metric {
        name: "vllm:nixl_post_time_seconds",
        help: "Time it took to post a KV transfer over NIXL.",
        measure: Measure::PostSeconds,
        unit: Unit::Seconds,
        buckets: &TIME_BUCKETS,
        since: Generation::V2,
    },
    Metric {
        name: "vllm:nixl_bytes_transferred",
        help: "Bytes moved by a KV transfer over NIXL.",
        measure: Measure::Bytes,
        unit: Unit::Bytes,
        buckets: &BYTE_BUCKETS,
        since: Generation::V2,
    },
    Metric {
        name: "vllm:nixl_num_descriptors",
        help: "Descriptor pairs of a KV transfer over NIXL.",
        measure: Measure::Descriptors,
        unit: Unit::Descriptors,
        buckets: &DESCRIPTOR_BUCKETS,
        since: Generation::V2,
    },
    Metric {
        name: "vllm:nixl_num_failed_transfers_total",
        help: "KV transfers over NIXL that failed, and the handshakes and notifications for them.",
        measure: Measure::FailedTransfers,
        unit: Unit::Events,
        buckets: &[],
        since: Generation::V2,
    },
    Metric {
        name: "vllm:nixl_num_failed_notifications_total",
        help: "Notifications over NIXL that could not be sent.",
        measure: Measure::FailedNotifications,
        unit: Unit::Events,
        buckets: &[],
        since: Generation::V2,
    },
    Metric {
        name: "vllm:nixl_num_kv_expired_reqs_total",
        help: "Requests whose KV blocks were given up because nobody read them in time.",
        measure: Measure::ExpiredRequests,
        unit: Unit::Events,
        buckets: &[],
        since: Generation::V14,
    },
    Metric {
        name: "vllm:nixl_num_notifications_after_expiry_total",
        help: "Completion notifications for requests whose KV blocks may have been reused already.",
        measure: Measure::LateNotifications,
        unit: Unit::Events,
        buckets: &[],
        since: Generation::V14,
    },
];

/// The metrics that an engine of `generation` has.
pub fn metrics(generation: Generation) -> impl Iterator<Item = &'static Metric> {
    METRICS.iter().filter(move |metric| metric.since == Generation::V2 || generation == Generation::V14)
}

impl Metric {
    /// Whether it counts events; otherwise it is a histogram.
    pub fn is_counter(&self) -> bool {
        self.buckets.is_empty()
    }

    /// Values that a histogram observes; none for a counter.
    pub fn observations(&self, stats: &Stats) -> Vec<f64> {
        match self.measure {
            Measure::TransferSeconds => stats.transfer_duration.clone(),
            Measure::PostSeconds => stats.post_duration.clone(),
            Measure::Bytes => stats.bytes_transferred.iter().map(|bytes| *bytes as f64).collect(),
            Measure::Descriptors => stats.num_descriptors.iter().map(|count| *count as f64).collect(),
            _ => Vec::new(),
        }
    }

    /// What a counter is raised by; 0 for a histogram.
    pub fn increment(&self, generation: Generation, stats: &Stats) -> u64 {
        let sum = |events: &[u64]| events.iter().fold(0_u64, |sum, event| sum.saturating_add(*event));
        match self.measure {
            Measure::FailedTransfers if generation == Generation::V2 => sum(&stats.num_failed_transfers),
            Measure::FailedTransfers => sum(&stats.num_failed_transfers)
                .saturating_add(sum(&stats.num_failed_handshakes))
                .saturating_add(sum(&stats.num_failed_notifications)),
            Measure::FailedNotifications => sum(&stats.num_failed_notifications),
            Measure::ExpiredRequests => sum(&stats.num_kv_expired_reqs),
            Measure::LateNotifications => sum(&stats.num_notifications_after_expiry),
            _ => 0,
        }
    }
}
