//! The metrics page in the two formats that Prometheus reads. Owns the choice between them.

use super::MetricDoc;

/// A format of the metrics page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    /// With units and examples of traces.
    OpenMetrics,
    /// Prometheus' older text format, which every reader knows.
    Prometheus,
}

impl MetricsFormat {
    /// What a reader wants, by its `Accept` header: OpenMetrics for those that name it and do not like the
    /// older one better.
    #[must_use]
    pub fn accepted(accept: Option<&str>) -> Self {
        let weight = |media_type: &str| {
            let ranges = accept.unwrap_or_default().split(',');
            let mut range = ranges.filter(|range| range.split(';').next().map(str::trim) == Some(media_type));
            range.next().map(|range| {
                let quality = range.split(';').find_map(|part| part.trim().strip_prefix("q="));
                quality.map_or(1.0, |quality| quality.trim().parse::<f64>().unwrap_or(0.0))
            })
        };
        let plain = weight("text/plain").unwrap_or(0.0);
        match weight("application/openmetrics-text") {
            Some(open) if open > 0.0 && open >= plain => Self::OpenMetrics,
            _ => Self::Prometheus,
        }
    }

    /// The media type.
    #[must_use]
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// An OpenMetrics page in the older format: counters are named by their samples, and there are no units,
/// examples and end mark.
pub(super) fn in_older_format(page: &str) -> String {
    let mut older = String::with_capacity(page.len());
    let mut help = ("", "");
    for line in page.lines() {
        if line.starts_with("# UNIT ") || line == "# EOF" {
            continue;
        }
        if let Some(said) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            help = said;
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if help.0 == name {
                older.push_str(&format!("# HELP {name}{suffix} {}\n", help.1));
            }
            older.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
        } else {
            older.push_str(without_example(line));
            older.push('\n');
        }
    }
    older
}

/// A sample without what follows its value.
fn without_example(line: &str) -> &str {
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in line.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'#' if !quoted && at > 0 => return line[..at].trim_end(),
            _ => {}
        }
    }
    line
}

/// The metrics as the table of `docs/metrics.md`.
#[must_use]
pub fn metrics_table(docs: &[MetricDoc]) -> String {
    let mut table = String::from("| name | kind | labels | what it says |\n| --- | --- | --- | --- |\n");
    for doc in docs {
        let labels: Vec<String> = doc.labels.iter().map(|label| format!("`{label}`")).collect();
        let help = doc.help.replace('|', "\\|");
        table.push_str(&format!("| `{}` | {} | {} | {help} |\n", doc.name, doc.kind, labels.join(", ")));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_gets_what_it_asks_for() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        for (accept, format) in [
            (Some(prometheus), MetricsFormat::OpenMetrics),
            (Some("application/openmetrics-text"), MetricsFormat::OpenMetrics),
            (Some("application/openmetrics-text; q=0"), MetricsFormat::Prometheus),
            (Some("text/plain, application/openmetrics-text;q=0.5"), MetricsFormat::Prometheus),
            (Some("*/*"), MetricsFormat::Prometheus),
            (None, MetricsFormat::Prometheus),
        ] {
            assert_eq!(MetricsFormat::accepted(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn the_older_format_is_what_older_readers_expect() {
        let page = "# HELP a_seconds Time.\n# TYPE a_seconds histogram\n# UNIT a_seconds seconds\na_seconds_bucket{le=\"1.0\",m=\"x\\\" # y\"} 1 # {trace_id=\"00\"} 0.5 1.0\n# HELP b Things.\n# TYPE b counter\nb_total{k=\"#\"} 2\n# HELP c Now.\n# TYPE c gauge\nc 3\n# EOF\n";
        let older = "# HELP a_seconds Time.\n# TYPE a_seconds histogram\na_seconds_bucket{le=\"1.0\",m=\"x\\\" # y\"} 1\n# HELP b_total Things.\n# TYPE b_total counter\nb_total{k=\"#\"} 2\n# HELP c Now.\n# TYPE c gauge\nc 3\n";
        assert_eq!(in_older_format(page), older);
    }
}
