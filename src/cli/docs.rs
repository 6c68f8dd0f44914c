//! `kvbaton docs`: pages of the documentation that are made from the code. A test keeps them fresh.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use kvbaton_proxy::{metric_docs, metrics_table};

use super::say;

const METRICS: &str = "\
# Metrics

`kvbaton docs metrics > docs/metrics.md` makes this page from the code.

`GET /metrics` answers with OpenMetrics where a reader asks for it, as Prometheus does, and with Prometheus' older text
format else. In OpenMetrics, a bucket's last sampled request is its exemplar (`trace_id`). No label holds an address, a
request's id, or a model that no engine of the fleet lists: such requests count as `model=\"other\"`, like those beyond
256 models. The metrics of peers name them by their ids, of the present ones only.

A histogram has `_bucket`, `_sum` and `_count` after its name.

## The router's

";

const OF_ENGINES: &str = "
## The connector's

These are on the engines' own `/metrics`, with `engine` and `model_name`: vLLM has them, and so has the simulated
engine. They say what the blocks of a hand-off took to be read, which no router sees.

| name | kind | what it says |
| --- | --- | --- |
";

/// As vLLM names them; the last two exist in newer versions only.
const NIXL: [[&str; 3]; 8] = [
    ["vllm:nixl_xfer_time_seconds", "histogram", "Duration of one transfer"],
    ["vllm:nixl_post_time_seconds", "histogram", "Time that it took to post one transfer"],
    ["vllm:nixl_bytes_transferred", "histogram", "Bytes of one transfer"],
    ["vllm:nixl_num_descriptors", "histogram", "Descriptors of one transfer"],
    ["vllm:nixl_num_failed_transfers_total", "counter", "Transfers that failed"],
    ["vllm:nixl_num_failed_notifications_total", "counter", "Notifications that could not be sent"],
    [
        "vllm:nixl_num_kv_expired_reqs_total",
        "counter",
        "Requests whose blocks no decode engine had read in time",
    ],
    [
        "vllm:nixl_num_notifications_after_expiry_total",
        "counter",
        "Notifications for requests that were forgotten by then",
    ],
];

#[derive(Debug, Args)]
pub(super) struct DocsArgs {
    /// Which page.
    page: Page,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Page {
    /// `docs/metrics.md`
    Metrics,
    /// `docs/cli.md`
    Cli,
}

pub(super) fn run(args: &DocsArgs) -> anyhow::Result<ExitCode> {
    match args.page {
        Page::Metrics => say(&metrics())?,
        Page::Cli => say(&super::reference::page())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn metrics() -> String {
    let rows = NIXL.map(|[name, kind, help]| format!("| `{name}` | {kind} | {help} |\n"));
    [METRICS, &metrics_table(&metric_docs()), OF_ENGINES, &rows.concat()].concat()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_page_of_metrics_is_fresh() {
        let page = include_str!("../../docs/metrics.md");
        assert!(page == metrics(), "run `kvbaton docs metrics > docs/metrics.md`");
    }

    /// The names of metrics in a text, as they are exposed.
    fn named(text: &str) -> BTreeSet<String> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        let words = text.split(|c| !is_part(c));
        words
            .filter(|word| word.starts_with("kvbaton_") || word.starts_with("vllm:"))
            .map(str::to_owned)
            .collect()
    }

    fn known() -> BTreeSet<String> {
        let mut known = BTreeSet::new();
        let ours = metric_docs().into_iter().map(|doc| (doc.name, doc.kind));
        let theirs = NIXL.iter().map(|[name, kind, _]| ((*name).to_owned(), *kind));
        for (name, kind) in ours.chain(theirs) {
            if kind == "histogram" {
                known.extend(["_bucket", "_sum", "_count"].map(|part| format!("{name}{part}")));
            }
            known.insert(name);
        }
        known
    }

    #[test]
    fn dashboards_and_alerts_name_metrics_that_exist() {
        let known = known();
        for (file, text) in [
            ("the dashboard", include_str!("../../deploy/grafana/kvbaton.json")),
            ("the alerts", include_str!("../../deploy/prometheus/alerts.yaml")),
            ("the alerts' tests", include_str!("../../deploy/prometheus/alerts_test.yaml")),
        ] {
            let named = named(text);
            assert!(named.len() > 8, "{file}: {named:?}");
            let unknown: Vec<&String> = named.difference(&known).collect();
            assert!(unknown.is_empty(), "{file}: {unknown:?}");
        }
    }

    #[test]
    fn guides_name_metrics_that_exist() {
        let mut known = known();
        known.extend(metric_docs().into_iter().map(|doc| doc.name));
        let mut found = 0;
        for page in crate::cli::reference::pages() {
            // Names with a label or of a value; words such as kvbaton_vllm are Python's.
            let named = named(&page.text).into_iter().filter(|name| name.starts_with("kvbaton_"));
            for name in named.filter(|name| !["kvbaton_vllm", "kvbaton_proxy"].contains(&name.as_str())) {
                assert!(known.contains(&name) || name.ends_with('_'), "{}: {name}", page.name);
                found += 1;
            }
        }
        assert!(found > 20, "{found}");
    }

    #[test]
    fn the_dashboard_is_whole() {
        let dashboard: serde_json::Value =
            serde_json::from_str(include_str!("../../deploy/grafana/kvbaton.json")).unwrap();
        assert_eq!(dashboard["uid"], "kvbaton");
        let panels = dashboard["panels"].as_array().unwrap();
        let mut ids = BTreeSet::new();
        for panel in panels {
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
            let place = &panel["gridPos"];
            assert!(place["x"].as_u64().unwrap() + place["w"].as_u64().unwrap() <= 24, "{panel}");
            if panel["type"] != "row" {
                let targets = panel["targets"].as_array().unwrap();
                assert!(targets.iter().all(|target| target["expr"].is_string()), "{panel}");
                assert_eq!(panel["datasource"]["uid"], "${datasource}", "{panel}");
            }
        }
        assert!(panels.len() > 20);
    }
}
