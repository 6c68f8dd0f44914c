//! Runs side by side, for people.

use kvbaton_simulate::{EngineReport, Goal, Percentiles, Report, StageReport};

use super::super::table::{duration, percent};

/// Longest list of engines; of more, those at both ends are shown by their stage's line.
const FEW: usize = 12;

/// All that is told.
pub(super) fn page(reports: &[Report], goal: Goal) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut row = |name: &str, cell: &dyn Fn(&Report) -> String| {
        let cells = reports.iter().map(cell);
        rows.push(std::iter::once(name.to_owned()).chain(cells).collect());
    };
    row("", &|report| report.plan.clone());
    row("requests", &|report| report.requests.to_string());
    row("answered", &|report| report.completed.to_string());
    if reports.iter().any(|report| report.refused > 0) {
        row("refused", &|report| report.refused.to_string());
    }
    if reports.iter().any(|report| report.too_long > 0) {
        row("too long for the engines", &|report| report.too_long.to_string());
    }
    row("in", &|report| duration(report.seconds));
    let kinds: [Part<Percentiles>; 3] = [
        ("first token", |report| &report.ttft),
        ("between tokens", |report| &report.itl),
        ("whole answer", |report| &report.end_to_end),
    ];
    for (kind, of) in kinds {
        row(&format!("{kind} p50"), &|report| duration(of(report).p50));
        row(&format!("{kind} p90"), &|report| duration(of(report).p90));
        row(&format!("{kind} p99"), &|report| duration(of(report).p99));
    }
    if goal != Goal::default() {
        row("good", &|report| percent(Some(report.good_part)));
        row("good a second", &|report| format!("{:.2}", report.goodput));
    }
    row("answered a second", &|report| format!("{:.2}", report.requests_per_second));
    row("tokens a second", &|report| format!("{:.0}", report.output_tokens_per_second));
    row("prompt tokens cached", &|report| format!("{:.1} %", report.hit_rate * 100.0));
    row("KV moved", &|report| format!("{:.1} GB", report.moved_bytes as f64 / 1e9));
    for (name, of) in decisions(reports) {
        row(&name, &|report| of(report).to_string());
    }
    let stages: [Part<StageReport>; 2] =
        [("prefill", |report| &report.prefill), ("decode", |report| &report.decode)];
    for (stage, of) in stages {
        if reports.iter().any(|report| of(report).engines > 0) {
            row(&format!("{stage} busy (least, most)"), &|report| {
                let StageReport { busy, least_busy, most_busy, .. } = of(report);
                let [busy, least, most] = [busy, least_busy, most_busy].map(|part| percent(Some(*part)));
                format!("{busy} ({least}, {most})")
            });
        }
        if reports.iter().any(|report| of(report).preemptions > 0) {
            row(&format!("{stage} preemptions"), &|report| of(report).preemptions.to_string());
        }
    }
    let mut text = aligned(&rows);
    if let [report] = reports
        && report.engines.len() <= FEW
    {
        text.push('\n');
        text.push_str(&engines(&report.engines));
    }
    text
}

/// A part of a run and its name.
type Part<T> = (&'static str, fn(&Report) -> &T);

type Count = Box<dyn Fn(&Report) -> u64>;

/// The kinds of decisions that any run has.
fn decisions(reports: &[Report]) -> Vec<(String, Count)> {
    let mut kinds: Vec<(&'static str, &'static str)> = reports
        .iter()
        .flat_map(|report| report.decisions.iter().map(|told| (told.decision, told.reason)))
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    let of = |(decision, reason): (&'static str, &'static str)| {
        let count: Count = Box::new(move |report| {
            let mut told = report.decisions.iter();
            told.find(|told| (told.decision, told.reason) == (decision, reason)).map_or(0, |told| told.count)
        });
        (format!("{decision}: {reason}"), count)
    };
    kinds.into_iter().map(of).collect()
}

fn engines(engines: &[EngineReport]) -> String {
    let heads = ["engine", "requests", "busy", "computed", "generated", "cached", "KV at most"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    for engine in engines {
        rows.push(vec![
            engine.name.clone(),
            engine.requests.to_string(),
            percent(Some(engine.busy)),
            engine.computed_tokens.to_string(),
            engine.generated_tokens.to_string(),
            percent(Some(engine.hit_rate)),
            percent(Some(engine.highest_kv_usage)),
        ]);
    }
    aligned(&rows)
}

/// Columns of which the first stands left and the others right.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let length = |cell: &String| cell.chars().count();
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(length).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = " ".repeat(width - length(cell));
            let parts = if column == 0 { [cell.as_str(), &gap] } else { [gap.as_str(), cell] };
            text.push_str(if column == 0 { "" } else { "  " });
            parts.iter().for_each(|part| text.push_str(part));
        }
        text.push('\n');
    }
    text
}
