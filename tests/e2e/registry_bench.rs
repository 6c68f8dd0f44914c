//! The registry's benchmark runs, with counts that say nothing.

#[allow(dead_code, reason = "the benchmark prints what this only counts")]
#[path = "../../benches/registry/measure.rs"]
mod measure;

use measure::Plan;

#[tokio::test]
async fn the_registry_benchmark_runs() {
    let report = measure::run(Plan::SMOKE, "no-such-python").await;
    let (http, front) = (&report.handshakes.http, &report.handshakes.front);
    assert_eq!((http.kept.len(), http.fresh.len(), http.whole.len()), (8, 3, 3));
    assert_eq!((front.kept.len(), front.fresh.len(), front.whole.len()), (8, 3, 0));
    assert!(report.handshakes.vllm.is_none());
    assert_eq!((report.ranks.among_few.len(), report.ranks.among_many.len()), (20, 20));
    assert_eq!(report.beats.answers.len(), 8);
    let text = report.to_string();
    assert!(
        text.contains("| among 10 ranks |") && text.contains("\n4 engines, a heartbeat each 250ms"),
        "{text}"
    );
}
