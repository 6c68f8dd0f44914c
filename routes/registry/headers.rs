//! What an answer with payloads says in its headers, and how long a look-up may wait.

use std::time::Duration;

use http::header::{ETAG, HeaderMap, HeaderName, HeaderValue};
use kvbaton_proxy::{ClockReading, RankView};
use serde::Deserialize;

use crate::error::RouteError;

const COMPATIBILITY_HASH: HeaderName = HeaderName::from_static("kv-compatibility-hash");
const CONNECTOR_VERSION: HeaderName = HeaderName::from_static("kv-connector-version");
const CLOCK: HeaderName = HeaderName::from_static("kv-clock");
const CLOCK_ERROR: HeaderName = HeaderName::from_static("kv-clock-error");
const CLOCK_BOUND: HeaderName = HeaderName::from_static("kv-clock-bound");

/// How long the asker waits for an engine that is not there yet.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Patience {
    /// In seconds; the registry's own bound holds besides.
    wait: Option<f64>,
}

impl Patience {
    pub(super) fn wait(&self) -> Result<Duration, RouteError> {
        let seconds = self.wait.unwrap_or(0.0);
        // An hour is more than the registry's bound already, and no number of seconds overflows.
        let seconds = if seconds > 3600.0 { 3600.0 } else { seconds };
        Duration::try_from_secs_f64(seconds).map_err(|_not_a_duration| RouteError::Query {
            what: "`wait` must be a number of seconds".to_owned(),
        })
    }
}

/// Adds what is known of a payload besides its bytes.
pub(super) fn describe(headers: &mut HeaderMap, rank: &RankView, clock: Option<ClockReading>) {
    // A hash is text that an engine chose: one that is no header's value is not told here.
    if let Ok(hash) = HeaderValue::from_str(&rank.compatibility_hash) {
        headers.insert(COMPATIBILITY_HASH, hash);
    }
    headers.insert(CONNECTOR_VERSION, HeaderValue::from(rank.generation.connector_version()));
    let Some(clock) = clock else { return };
    put_seconds(headers, CLOCK, clock.seconds);
    match clock.error {
        Some(error) => put_seconds(headers, CLOCK_ERROR, error),
        None => {
            headers.insert(CLOCK_BOUND, HeaderValue::from_static("lower"));
        }
    }
}

/// The strong tag of a rank's payload.
pub(super) fn entity_tag(rank: &RankView) -> String {
    format!("\"{}\"", rank.sha256)
}

pub(super) fn put_tag(headers: &mut HeaderMap, tag: &str) {
    if let Ok(tag) = HeaderValue::from_str(tag) {
        headers.insert(ETAG, tag);
    }
}

fn put_seconds(headers: &mut HeaderMap, name: HeaderName, seconds: f64) {
    if let Ok(value) = HeaderValue::from_str(&format!("{seconds:.9}")) {
        headers.insert(name, value);
    }
}
