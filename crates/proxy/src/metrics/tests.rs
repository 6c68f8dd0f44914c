use std::collections::BTreeSet;

use super::*;

#[test]
fn only_models_that_the_fleet_knows_get_series() {
    let metrics = Metrics::new();
    for name in ["made-up-1", "made-up-2"] {
        metrics.request_ended("completions", &metrics.of_model(name, || false), 404, Outcome::ClientError);
    }
    metrics.request_ended("completions", &metrics.of_model("m", || true), 200, Outcome::Served);
    metrics.request_ended("completions", &metrics.of_model("m", || panic!("known")), 200, Outcome::Served);
    let page = metrics.encode(MetricsFormat::OpenMetrics);
    assert!(!page.contains("made-up"), "{page}");
    let count = |labels: &str| {
        let line =
            page.lines().find(|line| line.starts_with("kvbaton_requests_total{") && line.contains(labels));
        line.and_then(|line| line.rsplit(' ').next()).map(str::to_owned)
    };
    assert_eq!(count(r#"model="other""#).as_deref(), Some("2"));
    assert_eq!(count(r#"model="m""#).as_deref(), Some("2"));
}

#[test]
fn there_are_no_more_series_than_models_may_have() {
    let metrics = Metrics::new();
    for number in 0..MOST_MODELS + 50 {
        metrics.of_model(&format!("adapter-{number}"), || true);
    }
    let page = metrics.encode(MetricsFormat::OpenMetrics);
    let series = page.lines().filter(|line| line.starts_with("kvbaton_prompt_tokens_total{")).count();
    assert_eq!(series, MOST_MODELS + 1);
}

#[test]
fn a_sampled_duration_is_an_example() {
    let metrics = Metrics::new();
    metrics.took(Took::HandOver, Duration::from_millis(30), Some(0xabc));
    metrics.took(Took::Prefill, Duration::from_millis(30), None);
    let page = metrics.encode(MetricsFormat::OpenMetrics);
    let line = |start: &str| page.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
    let example = line("kvbaton_hand_over_seconds_bucket{le=\"0.05\"}");
    let expected = "kvbaton_hand_over_seconds_bucket{le=\"0.05\"} 1 # {trace_id=\"00000000000000000000000000000abc\"} 0.03 ";
    assert!(example.starts_with(expected), "{example}");
    assert_eq!(
        line("kvbaton_prefill_seconds_bucket{le=\"0.05\"}"),
        "kvbaton_prefill_seconds_bucket{le=\"0.05\"} 1"
    );
    let older = metrics.encode(MetricsFormat::Prometheus);
    assert!(!older.contains("trace_id") && !older.contains("# EOF"), "{older}");
    assert!(older.contains("# TYPE kvbaton_handoffs_total counter\n"), "{older}");
}

/// What the page says is what the list says.
#[test]
fn the_list_names_what_the_page_shows() {
    let metrics = Metrics::new();
    metrics.decided("a", "b");
    let page = metrics.encode(MetricsFormat::OpenMetrics);
    let docs = metric_docs();
    let listed: BTreeSet<String> = docs.iter().map(|doc| doc.name.clone()).collect();
    assert_eq!(listed.len(), docs.len(), "no name stands twice");
    for line in page.lines().filter(|line| line.starts_with("# TYPE ")) {
        let (name, kind) = line["# TYPE ".len()..].split_once(' ').unwrap();
        let name = if kind == "counter" { format!("{name}_total") } else { name.to_owned() };
        let doc = docs.iter().find(|doc| doc.name == name).unwrap_or_else(|| panic!("{name} is not listed"));
        assert_eq!(doc.kind, kind, "{name}");
    }
}
