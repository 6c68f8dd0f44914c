use serde_json::Value;

use super::*;
use crate::golden::{list, vectors};

fn assert_same_numbers(ours: &Value, theirs: &Value, name: &Value) {
    let ours = ours.as_object().unwrap();
    let theirs = theirs.as_object().unwrap();
    assert_eq!(ours.len(), theirs.len(), "{name}");
    for (key, value) in theirs {
        // Python mixes 0 and 0.0; JSON numbers compare by value here.
        assert_eq!(ours[key].as_f64().unwrap(), value.as_f64().unwrap(), "{name}: {key}");
    }
}

fn microseconds(micros: f64) -> Duration {
    Duration::from_nanos((micros * 1e3).round() as u64)
}

#[test]
fn recording_and_summary_equal_vllm() {
    for (file, telemetry_key) in
        [("stats_v032.json", "telemetry_us"), ("stats.json", "telemetry_us_us_bytes_descs")]
    {
        let vectors = vectors(file);
        let cases = list(&vectors["cases"]);
        assert!(cases.len() >= 8);
        for case in cases {
            let name = &case["name"];
            if case["data"].is_null() {
                // Without telemetry there is nothing to record.
                assert_eq!(name, "None telemetry is skipped");
                assert!(Stats::default().is_empty());
                continue;
            }
            let expected: Stats = serde_json::from_value(case["data"].clone()).unwrap();
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
            assert_eq!(expected.is_empty(), case["is_empty"].as_bool().unwrap(), "{file} {name}");
            let summary = serde_json::to_value(expected.summary()).unwrap();
            assert_same_numbers(&summary, &case["reduce"], name);
        }
    }
}

#[test]
fn merging_concatenates_the_lists() {
    let vectors = vectors("stats.json");
    let read = |key: &str| -> Stats { serde_json::from_value(vectors["aggregate"][key].clone()).unwrap() };
    let mut merged = read("a");
    merged.merge(&read("b_empty"));
    merged.merge(&read("c"));
    assert_eq!(merged, read("out"));
    let summary = serde_json::to_value(merged.summary()).unwrap();
    assert_same_numbers(&summary, &vectors["aggregate"]["out_reduce"], &Value::Null);
}
