mod aggregation;

use proptest::prelude::*;
use serde_json::Value;

use super::prometheus::{METRICS, Metric, Unit, metrics};
use super::*;
use crate::golden::{list, vectors};

/// Every number of `theirs` is in `ours`, by value: Python mixes 0 and 0.0.
fn assert_same_numbers(ours: &Value, theirs: &Value, name: &Value) {
    let ours = ours.as_object().unwrap();
    let theirs = theirs.as_object().unwrap();
    for (key, value) in theirs {
        assert_eq!(ours[key].as_f64().unwrap(), value.as_f64().unwrap(), "{name}: {key}");
    }
}

fn microseconds(micros: f64) -> Duration {
    Duration::from_nanos((micros * 1e3).round() as u64)
}

/// Recorded lists; 0.13 counts failures in floating-point numbers.
fn read(data: &Value) -> Stats {
    let mut data = data.clone();
    for key in ["num_failed_transfers", "num_failed_notifications"] {
        for event in data[key].as_array_mut().unwrap() {
            *event = Value::from(event.as_f64().unwrap() as u64);
        }
    }
    serde_json::from_value(data).unwrap()
}

fn telemetry(seconds: u64, bytes: u64) -> Telemetry {
    Telemetry {
        transfer: Duration::from_secs(seconds),
        post: Duration::from_secs(seconds),
        bytes,
        descriptors: bytes,
    }
}

/// Statistics of `count` transfers of one second.
fn transfers(count: usize) -> Stats {
    let mut stats = Stats::default();
    (0..count).for_each(|_| stats.record(&telemetry(1, 1)));
    stats
}

fn check_case(file: &str, telemetry_key: &str, case: &Value) {
    let (name, generation) = (&case["name"], generation_of(file));
    if case["data"].is_null() {
        // Without telemetry there is nothing to record.
        assert_eq!(name, "None telemetry is skipped");
        assert!(Stats::default().is_empty());
        return;
    }
    let expected = read(&case["data"]);
    let mut recorded = expected.clone();
    recorded.transfer_duration.clear();
    recorded.post_duration.clear();
    recorded.bytes_transferred.clear();
    recorded.num_descriptors.clear();
    for entry in list(&case[telemetry_key]) {
        let fields = ["xferDuration", "postDuration", "totalBytes", "descCount"];
        let [transfer, post, bytes, descriptors] = std::array::from_fn(|i| {
            let field = if entry.is_array() { &entry[i] } else { &entry[fields[i]] };
            field.as_f64().unwrap()
        });
        recorded.record(&Telemetry {
            transfer: microseconds(transfer),
            post: microseconds(post),
            bytes: bytes as u64,
            descriptors: descriptors as u64,
        });
    }
    if name == "rounding" {
        // Fractions of a nanosecond exist in this case alone, and in no clock.
        assert_eq!(recorded.bytes_transferred, expected.bytes_transferred);
    } else {
        assert_eq!(recorded, expected, "{file} {name}");
    }
    assert_eq!(expected.is_unreported(generation), case["is_empty"].as_bool().unwrap(), "{file} {name}");
    let summary = serde_json::to_value(expected.summary()).unwrap();
    assert_same_numbers(&summary, &case["reduce"], name);
    let keys = if generation == Generation::V2 { 8 } else { 11 };
    assert_eq!(case["reduce"].as_object().unwrap().len(), keys);
}

fn generation_of(file: &str) -> Generation {
    if file == "stats_v013.json" { Generation::V2 } else { Generation::V14 }
}

#[test]
fn recording_and_summary_equal_vllm() {
    for (file, telemetry_key, cases) in [
        ("stats_v013.json", "telemetry_us", 5),
        ("stats_v032.json", "telemetry_us", 8),
        ("stats.json", "telemetry_us_us_bytes_descs", 9),
    ] {
        let vectors = vectors(file);
        assert_eq!(list(&vectors["cases"]).len(), cases);
        list(&vectors["cases"]).iter().for_each(|case| check_case(file, telemetry_key, case));
    }
}

#[test]
fn merging_concatenates_the_lists() {
    let vectors = vectors("stats.json");
    let aggregate = |key: &str| read(&vectors["aggregate"][key]);
    let mut merged = aggregate("a");
    merged.merge(&aggregate("b_empty"));
    merged.merge(&aggregate("c"));
    assert_eq!(merged, aggregate("out"));
    let summary = serde_json::to_value(merged.summary()).unwrap();
    assert_same_numbers(&summary, &vectors["aggregate"]["out_reduce"], &Value::Null);
}

#[test]
fn taking_leaves_nothing_behind() {
    let vectors = vectors("stats.json");
    assert_eq!(vectors["record_none_leaves_empty"], true);
    let old = read(&vectors["clone_and_reset"]["old"]);
    let mut stats = transfers(1);
    assert_eq!(stats.take(Generation::V14), Some(old));
    assert_eq!(stats.is_empty(), vectors["clone_and_reset"]["new_is_empty"].as_bool().unwrap());
    assert_eq!(stats.take(Generation::V14), None);
}

#[test]
fn v2_keeps_failures_until_a_success_takes_them_along() {
    let mut stats = Stats { num_failed_transfers: vec![1], ..Stats::default() };
    assert_eq!(stats.take(Generation::V2), None);
    stats.record(&telemetry(1, 1));
    assert_eq!(stats.take(Generation::V2).unwrap().num_failed_transfers, [1]);
}

#[test]
fn t20_three_workers_add_up_to_plain_numbers() {
    let mut all = transfers(2);
    all.merge(&transfers(1));
    let mut third = Stats::default();
    (0..3).for_each(|_| third.record(&telemetry(2, 2)));
    all.merge(&third);
    let summary = all.summary();
    assert_eq!(summary.successful_transfers, 6);
    assert_eq!((summary.mean_transfer_ms, summary.mean_post_ms), (1500.0, 1500.0));
    assert_eq!(summary.mean_descriptors, 1.5);
    for (key, value) in serde_json::to_value(summary).unwrap().as_object().unwrap() {
        assert!(value.is_number(), "{key}");
    }
}

/// One failure of each kind, one expiry, one late notification.
fn failures() -> Stats {
    Stats {
        num_failed_transfers: vec![1],
        num_failed_handshakes: vec![1],
        num_failed_notifications: vec![1],
        num_kv_expired_reqs: vec![1],
        num_notifications_after_expiry: vec![1],
        ..Stats::default()
    }
}

#[test]
fn t21_failures_of_the_transport_are_counted_together() {
    let stats = failures();
    assert!(!stats.is_empty());
    let summary = stats.summary();
    assert_eq!((summary.failed, summary.expired, summary.late_notifications), (3, 1, 1));
    assert_eq!(summary.successful_transfers, 0);
}

fn metric(name: &str) -> &'static Metric {
    METRICS.iter().find(|metric| metric.name == name).unwrap()
}

#[test]
fn t22_counters_count_failures_together() {
    let raised = |name: &str| metric(name).increment(Generation::V14, &failures());
    assert_eq!(raised("vllm:nixl_num_failed_transfers_total"), 3);
    assert_eq!(raised("vllm:nixl_num_kv_expired_reqs_total"), 1);
    assert_eq!(raised("vllm:nixl_num_notifications_after_expiry_total"), 1);
    assert_eq!(metric("vllm:nixl_num_failed_transfers_total").increment(Generation::V2, &failures()), 1);
}

#[test]
fn t24_connectors_are_summed_apart_over_workers() {
    let worker = |nixl: usize, other: usize| {
        let named = [("NixlConnector", nixl), ("FooConnector", other)];
        let by_connector = named
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| (name.to_owned(), transfers(count)))
            .collect();
        MultiStats { by_connector }
    };
    let mut all = worker(2, 1);
    all.merge(&worker(3, 0));
    all.merge(&worker(0, 5));
    assert_eq!(all.summary()["NixlConnector"].successful_transfers, 5);
    assert_eq!(all.summary()["FooConnector"].successful_transfers, 6);
}

#[test]
fn t25_events_of_the_scheduler_and_of_the_worker_are_joined() {
    let mut stats = transfers(1);
    let mut scheduler = Stats::default();
    scheduler.record(&telemetry(2, 2));
    stats.merge(&scheduler);
    assert_eq!(stats.transfer_duration, [1.0, 2.0]);
}

#[test]
fn several_connectors_equal_vllm() {
    let vectors = vectors("stats.json");
    let multi = &vectors["multi"];
    let mut stats = MultiStats::default();
    assert!(stats.is_empty());
    let count = usize::try_from(multi["nixl_count"].as_u64().unwrap()).unwrap();
    stats.by_connector.insert("Nixl".to_owned(), transfers(count));
    let expired = Stats { num_kv_expired_reqs: vec![1], ..Stats::default() };
    stats.by_connector.insert("Other".to_owned(), expired);
    assert!(!stats.is_empty());
    let summary = serde_json::to_value(stats.summary()).unwrap();
    let expected = multi["reduce"].as_object().unwrap();
    assert_eq!(expected.len(), 2);
    for (connector, numbers) in expected {
        assert_same_numbers(&summary[connector], numbers, &Value::from(connector.as_str()));
    }
}

/// The samples of one metric as (name with labels, value).
fn samples(metric: &Metric, stats: &Stats) -> Vec<(String, f64)> {
    let engine = "engine=\"engine-0\"";
    if metric.is_counter() {
        let value = metric.increment(Generation::V14, stats) as f64;
        return vec![(format!("{}{{{engine}}}", metric.name), value)];
    }
    let values = metric.observations(stats);
    let bucket = |bound: f64| values.iter().filter(|value| **value <= bound).count() as f64;
    let mut samples: Vec<_> = metric
        .buckets
        .iter()
        .map(|bound| (format!("{}_bucket{{{engine},le={bound}}}", metric.name), bucket(*bound)))
        .collect();
    samples.push((format!("{}_bucket{{{engine},le=inf}}", metric.name), bucket(f64::INFINITY)));
    samples.push((format!("{}_count{{{engine}}}", metric.name), values.len() as f64));
    samples.push((format!("{}_sum{{{engine}}}", metric.name), values.iter().sum()));
    samples
}

/// A line of the page with its bucket bound as a plain number.
fn parse(line: &str) -> (String, f64) {
    let (name, value) = line.rsplit_once(' ').unwrap();
    let name = match name.split_once("le=\"") {
        None => name.to_owned(),
        Some((head, tail)) => {
            let bound: f64 = tail.trim_end_matches("\"}").parse().unwrap();
            format!("{head}le={bound}}}")
        }
    };
    (name, value.parse().unwrap())
}

#[test]
fn the_prometheus_page_equals_vllms() {
    let vectors = vectors("stats.json");
    let stats = read(&vectors["prometheus"]["observed"]);
    let lines = crate::golden::strings(&vectors["prometheus"]["exposition"]);
    let types: Vec<String> = METRICS
        .iter()
        .map(|metric| {
            format!("# TYPE {} {}", metric.name, if metric.is_counter() { "counter" } else { "histogram" })
        })
        .collect();
    let expected_types: Vec<&String> = lines.iter().filter(|line| line.starts_with("# TYPE")).collect();
    assert_eq!(types.iter().collect::<Vec<_>>(), expected_types);
    let expected: Vec<_> =
        lines.iter().filter(|line| !line.starts_with('#')).map(|line| parse(line)).collect();
    let ours: Vec<_> = METRICS.iter().flat_map(|metric| samples(metric, &stats)).collect();
    assert_eq!(ours, expected);
}

#[test]
fn names_tell_units_and_v2_lacks_two_counters() {
    assert_eq!(metrics(Generation::V2).count(), 6);
    assert_eq!(metrics(Generation::V14).count(), 8);
    for metric in &METRICS {
        assert_eq!(metric.name.ends_with("_total"), metric.is_counter(), "{}", metric.name);
        assert_eq!(metric.name.ends_with("_seconds"), metric.unit == Unit::Seconds, "{}", metric.name);
        assert_eq!(metric.unit == Unit::Events, metric.is_counter(), "{}", metric.name);
        assert!(metric.buckets.windows(2).all(|pair| pair[0] < pair[1]), "{}", metric.name);
    }
}

proptest! {
    #[test]
    fn summaries_are_finite(lists in proptest::collection::vec((0_u64..1 << 40, 0_u64..1 << 40, any::<u32>()), 0..20)) {
        let mut stats = Stats::default();
        for (transfer, post, bytes) in lists {
            stats.record(&Telemetry {
                transfer: Duration::from_nanos(transfer),
                post: Duration::from_nanos(post),
                bytes: u64::from(bytes),
                descriptors: 1,
            });
        }
        let summary = stats.summary();
        prop_assert!(summary.throughput.is_finite() && summary.mean_mebibytes.is_finite());
        prop_assert!(summary.p90_transfer_ms >= 0.0);
    }
}
