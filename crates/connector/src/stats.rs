//! Transfer statistics of one worker, in vLLM's names and units.
//!
//! One list entry per event between two takes; failures without a success are not lost.

pub mod prometheus;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::protocol::params::Generation;
use crate::transport::Telemetry;

/// What a worker measured since the last take.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Seconds from post to completion, per transfer.
    pub transfer_duration: Vec<f64>,
    /// Seconds spent in posting, per transfer.
    pub post_duration: Vec<f64>,
    /// Bytes moved, per transfer.
    pub bytes_transferred: Vec<u64>,
    /// Descriptor pairs, per transfer.
    pub num_descriptors: Vec<u64>,
    /// One entry per failed transfer.
    pub num_failed_transfers: Vec<u64>,
    /// One entry per notification that could not be sent.
    pub num_failed_notifications: Vec<u64>,
    /// One entry per failed handshake, however many requests waited for it.
    pub num_failed_handshakes: Vec<u64>,
    /// One entry per request whose lease ran out or whose read was declined as too late.
    pub num_kv_expired_reqs: Vec<u64>,
    /// One entry per notification for a request that is no longer kept.
    pub num_notifications_after_expiry: Vec<u64>,
}

/// Summary of [`Stats`], under the labels vLLM logs them with.
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize, serde::Deserialize)]
pub struct Summary {
    /// Transfers that succeeded.
    #[serde(rename = "Num successful transfers")]
    pub successful_transfers: u64,
    /// Mean transfer time in milliseconds.
    #[serde(rename = "Avg xfer time (ms)")]
    pub mean_transfer_ms: f64,
    /// 90th percentile of the transfer time in milliseconds.
    #[serde(rename = "P90 xfer time (ms)")]
    pub p90_transfer_ms: f64,
    /// Mean posting time in milliseconds.
    #[serde(rename = "Avg post time (ms)")]
    pub mean_post_ms: f64,
    /// 90th percentile of the posting time in milliseconds.
    #[serde(rename = "P90 post time (ms)")]
    pub p90_post_ms: f64,
    /// Mean size of a transfer in MiB.
    #[serde(rename = "Avg MB per transfer")]
    pub mean_mebibytes: f64,
    /// MiB per second of transfer time.
    #[serde(rename = "Throughput (MB/s)")]
    pub throughput: f64,
    /// Mean number of descriptor pairs.
    #[serde(rename = "Avg number of descriptors")]
    pub mean_descriptors: f64,
    /// Failed transfers, handshakes and notifications together.
    #[serde(rename = "Num failed transfers")]
    pub failed: u64,
    /// Requests whose lease ran out.
    #[serde(rename = "Num KV expired reqs")]
    pub expired: u64,
    /// Notifications that came too late.
    #[serde(rename = "Num notifs after expiry")]
    pub late_notifications: u64,
}

impl Stats {
    /// Adds one successful transfer.
    pub fn record(&mut self, telemetry: &Telemetry) {
        let seconds = |time: Duration| time.as_nanos() as f64 / 1e3 / 1e6;
        self.transfer_duration.push(seconds(telemetry.transfer));
        self.post_duration.push(seconds(telemetry.post));
        self.bytes_transferred.push(telemetry.bytes);
        self.num_descriptors.push(telemetry.descriptors);
    }

    /// True when nothing succeeded, failed or expired.
    pub fn is_empty(&self) -> bool {
        self.transfer_duration.is_empty()
            && self.num_failed_transfers.is_empty()
            && self.num_failed_notifications.is_empty()
            && self.num_failed_handshakes.is_empty()
            && self.num_kv_expired_reqs.is_empty()
            && self.num_notifications_after_expiry.is_empty()
    }

    /// Whether a host of `generation` is told nothing.
    ///
    /// v2 reports only together with a success, so it loses failures that come alone.
    pub fn is_unreported(&self, generation: Generation) -> bool {
        match generation {
            Generation::V2 => self.transfer_duration.is_empty(),
            Generation::V14 => self.is_empty(),
        }
    }

    /// Takes what is to be reported and starts anew; none, and nothing lost, when there is nothing.
    pub fn take(&mut self, generation: Generation) -> Option<Self> {
        if self.is_unreported(generation) { None } else { Some(std::mem::take(self)) }
    }

    /// Appends the events of another worker.
    pub fn merge(&mut self, other: &Self) {
        self.transfer_duration.extend(&other.transfer_duration);
        self.post_duration.extend(&other.post_duration);
        self.bytes_transferred.extend(&other.bytes_transferred);
        self.num_descriptors.extend(&other.num_descriptors);
        self.num_failed_transfers.extend(&other.num_failed_transfers);
        self.num_failed_notifications.extend(&other.num_failed_notifications);
        self.num_failed_handshakes.extend(&other.num_failed_handshakes);
        self.num_kv_expired_reqs.extend(&other.num_kv_expired_reqs);
        self.num_notifications_after_expiry.extend(&other.num_notifications_after_expiry);
    }

    /// The summary that vLLM logs.
    pub fn summary(&self) -> Summary {
        let failed = self.num_failed_transfers.len()
            + self.num_failed_handshakes.len()
            + self.num_failed_notifications.len();
        let counts = Summary {
            failed: failed as u64,
            expired: self.num_kv_expired_reqs.len() as u64,
            late_notifications: self.num_notifications_after_expiry.len() as u64,
            ..Summary::default()
        };
        let n = self.transfer_duration.len();
        if n == 0 {
            return counts;
        }
        let mebibytes: f64 = self.bytes_transferred.iter().map(|bytes| *bytes as f64 / 1_048_576.0).sum();
        let transfer_seconds: f64 = self.transfer_duration.iter().sum();
        let throughput = if transfer_seconds > 0.0 { mebibytes / transfer_seconds } else { 0.0 };
        let descriptors: u64 = self.num_descriptors.iter().sum();
        Summary {
            successful_transfers: n as u64,
            mean_transfer_ms: round(mean(&self.transfer_duration) * 1e3, 3),
            p90_transfer_ms: round(p90(&self.transfer_duration) * 1e3, 3),
            mean_post_ms: round(mean(&self.post_duration) * 1e3, 3),
            p90_post_ms: round(p90(&self.post_duration) * 1e3, 3),
            mean_mebibytes: round(mebibytes / n as f64, 3),
            throughput: round(throughput, 3),
            mean_descriptors: round(descriptors as f64 / n as f64, 1),
            ..counts
        }
    }
}

/// Statistics of several connectors of one engine, by connector.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct MultiStats {
    /// Statistics by connector name.
    pub by_connector: BTreeMap<String, Stats>,
}

impl MultiStats {
    /// Appends another worker's events, connector by connector; an unknown connector is added.
    pub fn merge(&mut self, other: &Self) {
        for (connector, stats) in &other.by_connector {
            self.by_connector.entry(connector.clone()).or_default().merge(stats);
        }
    }

    /// True when no connector has anything to report.
    pub fn is_empty(&self) -> bool {
        self.by_connector.values().all(Stats::is_empty)
    }

    /// The summary of every connector.
    pub fn summary(&self) -> BTreeMap<String, Summary> {
        self.by_connector.iter().map(|(connector, stats)| (connector.clone(), stats.summary())).collect()
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Linear interpolation at (n - 1) * 0.9, as numpy does it.
fn p90(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let position = sorted.len().saturating_sub(1) as f64 * 0.9;
    let low = position.floor() as usize;
    let (Some(&a), Some(&b)) = (sorted.get(low), sorted.get(low + 1).or(sorted.last())) else { return 0.0 };
    let t = position - position.floor();
    // numpy interpolates from the nearer end, which decides the last bit.
    if t >= 0.5 { b - (b - a) * (1.0 - t) } else { a + (b - a) * t }
}

/// Correct rounding of the exact binary value; the formatter of the standard library does just that.
fn round(value: f64, decimals: usize) -> f64 {
    format!("{value:.decimals$}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests;
