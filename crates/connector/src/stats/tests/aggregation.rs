use std::collections::BTreeSet;

use super::*;
use crate::aggregate::{Aggregator, WorkerReport};
use crate::golden::strings;

fn sorted(value: &Value) -> Vec<String> {
    let mut names = strings(value);
    names.sort();
    names
}

#[test]
fn reports_of_several_workers_equal_vllm() {
    let vectors = vectors("stats.json");
    let cases = list(&vectors["output_aggregator"]);
    assert_eq!(cases.len(), 4);
    for case in cases {
        let expected = usize::try_from(case["expected_finished_count"].as_u64().unwrap()).unwrap();
        let mut aggregator = Aggregator::new(expected);
        for step in list(&case["steps"]) {
            let reports = list(&step["workers"]).iter().map(|worker| {
                let mut report = WorkerReport::default();
                report.results.finished_sending = strings(&worker["sent"]);
                report.results.finished_recving = strings(&worker["recvd"]);
                report.results.failed_recving = strings(&worker["failed"]);
                report.invalid_blocks = blocks(&worker["invalid"]);
                report
            });
            let united = aggregator.combine(reports.collect::<Vec<_>>());
            let (results, out) = (united.results, &step["out"]);
            assert_eq!(results.finished_sending, sorted(&out["finished_sending"]), "{}", case["name"]);
            assert_eq!(results.finished_recving, sorted(&out["finished_recving"]), "{}", case["name"]);
            assert_eq!(results.failed_recving, sorted(&out["failed_recving"]), "{}", case["name"]);
            assert_eq!(united.invalid_blocks, blocks(&out["invalid_block_ids"]), "{}", case["name"]);
        }
    }
}

fn blocks(value: &Value) -> BTreeSet<u64> {
    list(value).iter().map(|id| id.as_u64().unwrap()).collect()
}
