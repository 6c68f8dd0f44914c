//! The settings of traces and logs.

use std::path::PathBuf;
use std::time::Duration;

use http::header::{HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use url::Url;

use super::{Config, LONGEST};

/// Traces of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Telemetry {
    /// What the router is called there.
    pub service_name: String,
    /// Where traces go.
    pub traces: TraceSettings,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { service_name: "kvbaton".to_owned(), traces: TraceSettings::default() }
    }
}

/// Where traces go, and which requests have one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TraceSettings {
    /// The collector, such as `http://127.0.0.1:4317`; without it there are no traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// How the collector is spoken to.
    pub protocol: TraceProtocol,
    /// The part of requests that are traced, from 0 to 1, of those whose client does not decide it.
    pub sample: f64,
    /// Whether the client decides it by its `traceparent`.
    pub follow_parent: bool,
    /// Headers for the collector, as `name=value`.
    pub headers: Vec<String>,
    /// Certificates (PEM) of who signs the collector's; public ones without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// Traces that may wait for the collector; further ones are dropped and counted.
    pub queue: usize,
    /// How long traces are gathered for one call.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// How long one call may take.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
}

impl Default for TraceSettings {
    fn default() -> Self {
        Self {
            endpoint: None,
            protocol: TraceProtocol::Grpc,
            sample: 0.01,
            follow_parent: true,
            headers: Vec::new(),
            ca: None,
            queue: 2048,
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(5),
        }
    }
}

/// How a collector is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TraceProtocol {
    /// OTLP over gRPC; port 4317 by custom.
    Grpc,
    /// OTLP as protobuf over HTTP; port 4318 by custom, path `/v1/traces` unless the endpoint has another.
    Http,
}

/// A header of the settings that cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is no name=value of a header")]
pub struct NotAHeader;

impl TraceSettings {
    /// The collector's URL.
    pub(crate) fn url(&self) -> Option<Url> {
        let url = Url::parse(self.endpoint.as_deref()?).ok()?;
        (matches!(url.scheme(), "http" | "https") && url.has_host()).then_some(url)
    }

    /// The headers for the collector.
    ///
    /// # Errors
    /// One is none.
    pub(crate) fn header_map(&self) -> Result<http::HeaderMap, NotAHeader> {
        let mut headers = http::HeaderMap::new();
        for line in &self.headers {
            let (name, value) = line.split_once('=').ok_or(NotAHeader)?;
            let name = HeaderName::try_from(name.trim()).map_err(|_| NotAHeader)?;
            let mut value = HeaderValue::try_from(value.trim()).map_err(|_| NotAHeader)?;
            value.set_sensitive(true);
            headers.append(name, value);
        }
        Ok(headers)
    }
}

/// Every key with a value of its type.
pub(super) fn sample(config: &mut Config) {
    config.telemetry.traces.endpoint = Some("http://127.0.0.1:4317".into());
    config.telemetry.traces.ca = Some("file.pem".into());
}

pub(super) fn check(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    let traces = &config.telemetry.traces;
    if traces.endpoint.is_some() && traces.url().is_none() {
        wrong(
            "telemetry.traces.endpoint",
            "is no http or https URL".into(),
            "such as \"http://127.0.0.1:4317\"",
        );
    }
    if !(0.0..=1.0).contains(&traces.sample) {
        wrong("telemetry.traces.sample", "must be a number from 0 to 1".into(), "the default is 0.01");
    }
    if let Err(error) = traces.header_map() {
        wrong("telemetry.traces.headers", error.to_string(), "such as \"authorization=Bearer SECRET\"");
    }
    if traces.queue == 0 || traces.queue > 1 << 20 {
        wrong("telemetry.traces.queue", "must be from 1 to 1048576".into(), "the default is 2048");
    }
    let durations =
        [("telemetry.traces.interval", traces.interval), ("telemetry.traces.timeout", traces.timeout)];
    for (key, value) in durations {
        if value.is_zero() || value > LONGEST {
            wrong(key, "must be more than nothing and at most a week".into(), "such as \"5s\"");
        }
    }
    if config.telemetry.service_name.trim().is_empty() {
        wrong("telemetry.service_name", "must not be empty".into(), "the default is \"kvbaton\"");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(tune: impl Fn(&mut Config)) -> Vec<String> {
        let mut config = Config::default();
        tune(&mut config);
        let faults = config.validate().map_or_else(|faults| faults.0, |()| Vec::new());
        faults.into_iter().map(|fault| fault.key).collect()
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let endpoint = |text: &str| {
            let text = text.to_owned();
            faults(move |config| config.telemetry.traces.endpoint = Some(text.clone()))
        };
        assert!(endpoint("http://collector:4317").is_empty());
        assert!(endpoint("https://collector/otlp/v1/traces").is_empty());
        for bad in ["collector:4317", "", "grpc://collector", "http://"] {
            assert_eq!(endpoint(bad), ["telemetry.traces.endpoint"], "{bad}");
        }
        let all = faults(|config| {
            let traces = &mut config.telemetry.traces;
            (traces.sample, traces.queue, traces.interval) = (1.5, 0, Duration::ZERO);
            traces.headers = vec!["authorization".into()];
            config.telemetry.service_name.clear();
        });
        let expected =
            ["sample", "headers", "queue", "interval"].map(|key| format!("telemetry.traces.{key}"));
        assert_eq!(all[..4], expected);
        assert_eq!(all[4], "telemetry.service_name");
    }

    #[test]
    fn headers_of_the_settings_are_never_shown() {
        let traces = TraceSettings { headers: vec!["x-token = a=b".into()], ..TraceSettings::default() };
        let headers = traces.header_map().unwrap();
        assert_eq!(headers["x-token"], "a=b");
        assert!(!format!("{headers:?}").contains("a=b"));
    }
}
