//! vLLM's Prometheus page, for what a simulated engine has: the same names, labels and buckets.
//!
//! The core adds, the HTTP layer renders; nothing here counts by itself.

use std::fmt::Write as _;

use kv_connector::stats::Stats;

const XFER_BUCKETS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0];
const POST_BUCKETS: [f64; 13] = [0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0];
const BYTES_BUCKETS: [f64; 12] = [
    2048.0,
    8192.0,
    32768.0,
    131_072.0,
    524_288.0,
    2_097_152.0,
    8_388_608.0,
    33_554_432.0,
    134_217_728.0,
    536_870_912.0,
    2_147_483_648.0,
    8_589_934_592.0,
];
const DESCRIPTOR_BUCKETS: [f64; 14] =
    [10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10000.0, 20000.0, 50000.0];

#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
    total: u64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len()], sum: 0.0, total: 0 }
    }

    fn observe(&mut self, value: f64) {
        self.sum += value;
        self.total += 1;
        for (bound, count) in self.bounds.iter().zip(&mut self.counts) {
            if value <= *bound {
                *count += 1;
            }
        }
    }

    fn render(&self, out: &mut Page<'_>, name: &str, help: &str) {
        out.head(name, help, "histogram");
        let model = out.model;
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            let bound = number(*bound);
            let labels = format!("engine=\"0\",le=\"{bound}\",model_name=\"{model}\"");
            out.line(&format!("{name}_bucket"), &labels, *count as f64);
        }
        let labels = format!("engine=\"0\",le=\"+Inf\",model_name=\"{model}\"");
        out.line(&format!("{name}_bucket"), &labels, self.total as f64);
        out.plain(&format!("{name}_count"), self.total as f64);
        out.plain(&format!("{name}_sum"), self.sum);
    }
}

/// How a finished request counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Stop,
    Length,
    Abort,
    Error,
}

/// Everything that is counted since the engine started.
#[derive(Debug)]
pub(crate) struct Metrics {
    xfer_time: Histogram,
    post_time: Histogram,
    bytes: Histogram,
    descriptors: Histogram,
    failed_transfers: u64,
    failed_notifications: u64,
    expired: u64,
    late_notifications: u64,
    pub(crate) computed_tokens: u64,
    pub(crate) local_hit_tokens: u64,
    pub(crate) external_tokens: u64,
    pub(crate) generation_tokens: u64,
    pub(crate) prefix_queries: u64,
    pub(crate) external_queries: u64,
    pub(crate) preemptions: u64,
    outcomes: [u64; 4],
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            xfer_time: Histogram::new(&XFER_BUCKETS),
            post_time: Histogram::new(&POST_BUCKETS),
            bytes: Histogram::new(&BYTES_BUCKETS),
            descriptors: Histogram::new(&DESCRIPTOR_BUCKETS),
            failed_transfers: 0,
            failed_notifications: 0,
            expired: 0,
            late_notifications: 0,
            computed_tokens: 0,
            local_hit_tokens: 0,
            external_tokens: 0,
            generation_tokens: 0,
            prefix_queries: 0,
            external_queries: 0,
            preemptions: 0,
            outcomes: [0; 4],
        }
    }
}

/// What the gauges show at this moment.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Gauges {
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    pub(crate) deferred: usize,
    pub(crate) cache_usage: f64,
}

impl Metrics {
    /// Takes in what the transfer worker measured.
    pub(crate) fn add_transfers(&mut self, stats: &Stats) {
        for seconds in &stats.transfer_duration {
            self.xfer_time.observe(*seconds);
        }
        for seconds in &stats.post_duration {
            self.post_time.observe(*seconds);
        }
        for bytes in &stats.bytes_transferred {
            self.bytes.observe(*bytes as f64);
        }
        for descriptors in &stats.num_descriptors {
            self.descriptors.observe(*descriptors as f64);
        }
        let notifications = stats.num_failed_notifications.len() as u64;
        self.failed_notifications += notifications;
        self.failed_transfers += notifications
            + stats.num_failed_transfers.len() as u64
            + stats.num_failed_handshakes.len() as u64;
        self.expired += stats.num_kv_expired_reqs.len() as u64;
        self.late_notifications += stats.num_notifications_after_expiry.len() as u64;
    }

    /// Pulls that succeeded.
    pub(crate) fn pulls(&self) -> u64 {
        self.xfer_time.total
    }

    /// Leases that ran out.
    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }

    /// Notifications that came for requests no longer kept.
    pub(crate) fn late_notifications(&self) -> u64 {
        self.late_notifications
    }

    /// Counts the end of a request.
    pub(crate) fn count_outcome(&mut self, outcome: Outcome) {
        self.outcomes[outcome as usize] += 1;
    }

    /// The Prometheus page.
    pub(crate) fn render(&self, model: &str, gauges: Gauges, v14: bool) -> String {
        let mut page = Page { model, out: String::with_capacity(8192) };
        self.xfer_time.render(
            &mut page,
            "vllm:nixl_xfer_time_seconds",
            "Histogram of transfer duration for NIXL KV Cache transfers.",
        );
        self.post_time.render(
            &mut page,
            "vllm:nixl_post_time_seconds",
            "Histogram of transfer post time for NIXL KV Cache transfers.",
        );
        self.bytes.render(
            &mut page,
            "vllm:nixl_bytes_transferred",
            "Histogram of bytes transferred per NIXL KV Cache transfers.",
        );
        self.descriptors.render(
            &mut page,
            "vllm:nixl_num_descriptors",
            "Histogram of number of descriptors per NIXL  KV Cache transfers.",
        );
        self.render_transfer_counters(&mut page, v14);
        render_gauges(&mut page, gauges);
        self.render_tokens(&mut page);
        self.render_outcomes(&mut page);
        page.out
    }

    fn render_transfer_counters(&self, page: &mut Page<'_>, v14: bool) {
        page.counter(
            "vllm:nixl_num_failed_transfers_total",
            "Number of failed NIXL KV Cache transfers.",
            self.failed_transfers,
        );
        page.counter(
            "vllm:nixl_num_failed_notifications_total",
            "Number of failed NIXL KV Cache notifications.",
            self.failed_notifications,
        );
        if v14 {
            page.counter(
                "vllm:nixl_num_kv_expired_reqs_total",
                "Number of requests that had their KV expire.",
                self.expired,
            );
            page.counter(
                "vllm:nixl_num_notifications_after_expiry_total",
                "Number of completion notifications for requests that were no longer tracked.",
                self.late_notifications,
            );
        }
    }

    fn render_tokens(&self, page: &mut Page<'_>) {
        page.counter(
            "vllm:prefix_cache_queries_total",
            "Prefix cache queries, in terms of number of queried tokens.",
            self.prefix_queries,
        );
        page.counter(
            "vllm:prefix_cache_hits_total",
            "Prefix cache hits, in terms of number of cached tokens.",
            self.local_hit_tokens,
        );
        page.counter(
            "vllm:external_prefix_cache_queries_total",
            "External prefix cache queries, in terms of number of queried tokens.",
            self.external_queries,
        );
        page.counter(
            "vllm:external_prefix_cache_hits_total",
            "External prefix cache hits, in terms of number of cached tokens.",
            self.external_tokens,
        );
        page.counter(
            "vllm:num_preemptions_total",
            "Cumulative number of preemption from the engine.",
            self.preemptions,
        );
        let prompt = self.computed_tokens + self.local_hit_tokens + self.external_tokens;
        page.counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", prompt);
        page.head("vllm:prompt_tokens_by_source_total", "Number of prompt tokens by source.", "counter");
        for (source, count) in [
            ("local_compute", self.computed_tokens),
            ("local_cache_hit", self.local_hit_tokens),
            ("external_kv_transfer", self.external_tokens),
        ] {
            page.labelled(
                "vllm:prompt_tokens_by_source_total",
                &format!("source=\"{source}\""),
                count as f64,
            );
        }
        page.counter(
            "vllm:prompt_tokens_cached_total",
            "Number of cached prompt tokens (local + external).",
            self.local_hit_tokens + self.external_tokens,
        );
        page.counter(
            "vllm:generation_tokens_total",
            "Number of generation tokens processed.",
            self.generation_tokens,
        );
    }

    fn render_outcomes(&self, page: &mut Page<'_>) {
        let name = "vllm:request_success_total";
        page.head(name, "Count of successfully processed requests.", "counter");
        let model = page.model;
        for (reason, count) in ["stop", "length", "abort", "error"].iter().zip(self.outcomes) {
            let labels = format!("engine=\"0\",finished_reason=\"{reason}\",model_name=\"{model}\"");
            page.line(name, &labels, count as f64);
        }
    }
}

fn render_gauges(page: &mut Page<'_>, gauges: Gauges) {
    page.gauge(
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
        gauges.running as f64,
    );
    page.gauge(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        gauges.waiting as f64,
    );
    let name = "vllm:num_requests_waiting_by_reason";
    page.head(name, "Number of waiting requests by reason.", "gauge");
    let capacity = gauges.waiting.saturating_sub(gauges.deferred);
    page.labelled(name, "reason=\"capacity\"", capacity as f64);
    page.labelled(name, "reason=\"deferred\"", gauges.deferred as f64);
    page.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", gauges.cache_usage);
}

struct Page<'a> {
    model: &'a str,
    out: String,
}

impl Page<'_> {
    fn head(&mut self, name: &str, help: &str, kind: &str) {
        let family = if kind == "counter" { name } else { name.trim_end_matches("_total") };
        let _infallible = writeln!(self.out, "# HELP {family} {help}\n# TYPE {family} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: f64) {
        let _infallible = writeln!(self.out, "{name}{{{labels}}} {}", number(value));
    }

    fn plain(&mut self, name: &str, value: f64) {
        let labels = format!("engine=\"0\",model_name=\"{}\"", self.model);
        self.line(name, &labels, value);
    }

    fn labelled(&mut self, name: &str, label: &str, value: f64) {
        let labels = format!("engine=\"0\",model_name=\"{}\",{label}", self.model);
        self.line(name, &labels, value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, help, "counter");
        self.plain(name, value as f64);
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, help, "gauge");
        self.plain(name, value);
    }
}

/// A float as Python prints it in metrics.
fn number(value: f64) -> String {
    if value.fract() != 0.0 || value.abs() < 1e6 {
        let text = value.to_string();
        return if text.contains('.') { text } else { format!("{text}.0") };
    }
    let text = format!("{value:e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let mantissa = if mantissa.contains('.') { mantissa.to_owned() } else { format!("{mantissa}.0") };
    format!("{mantissa}e+{exponent:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::time::Duration;

    fn names(page: &str) -> BTreeSet<String> {
        page.lines()
            .filter(|line| line.starts_with("vllm:"))
            .filter_map(|line| line.rsplit_once(' ').map(|(name, _)| name.replace("tiny", "sim")))
            .collect()
    }

    #[test]
    fn every_series_is_one_of_vllms() {
        let theirs = names(include_str!("../../../tests/fixtures/captures/metrics_D.txt"));
        let ours = names(&Metrics::default().render("sim", Gauges::default(), true));
        let unknown: Vec<_> = ours.difference(&theirs).collect();
        assert_eq!(unknown, Vec::<&String>::new());
        assert!(ours.len() > 70);
    }

    #[test]
    fn a_transfer_moves_the_histograms() {
        let mut stats = Stats::default();
        stats.record(&kv_connector::transport::Telemetry {
            transfer: Duration::from_millis(7),
            post: Duration::from_millis(1),
            bytes: 3_276_800,
            descriptors: 16,
        });
        let mut metrics = Metrics::default();
        metrics.add_transfers(&stats);
        let page = metrics.render("sim", Gauges::default(), true);
        assert!(page.contains("vllm:nixl_xfer_time_seconds_count{engine=\"0\",model_name=\"sim\"} 1.0\n"));
        assert!(
            page.contains("vllm:nixl_bytes_transferred_sum{engine=\"0\",model_name=\"sim\"} 3.2768e+06\n")
        );
        assert_eq!(metrics.pulls(), 1);
    }
}
