//! A span as it goes out: plain data for whoever exports it.

use std::time::SystemTime;

/// One part of a request, ended.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanRecord {
    /// The trace that it belongs to.
    pub trace_id: u128,
    /// Its own id; engines get a leg's in their `traceparent`.
    pub span_id: u64,
    /// The span that it is a part of.
    pub parent: Option<u64>,
    /// Whether that is the client's.
    pub is_remote_parent: bool,
    /// The client's `tracestate`.
    pub trace_state: Option<String>,
    /// What was done.
    pub name: &'static str,
    /// Who it was done with.
    pub kind: SpanKind,
    /// When it began.
    pub began: SystemTime,
    /// When it ended.
    pub ended: SystemTime,
    /// Why it failed, in one word.
    pub error: Option<&'static str>,
    /// What is said of it.
    pub attributes: Vec<(&'static str, SpanValue)>,
}

/// Who a part of a request was done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// The client asked.
    Server,
    /// An engine was asked.
    Client,
    /// Nobody.
    Internal,
}

/// A value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum SpanValue {
    /// A text.
    Text(String),
    /// A number.
    Number(i64),
    /// A measure.
    Real(f64),
    /// Yes or no.
    Flag(bool),
}

impl From<&str> for SpanValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for SpanValue {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<u64> for SpanValue {
    fn from(number: u64) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<usize> for SpanValue {
    fn from(number: usize) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<u32> for SpanValue {
    fn from(number: u32) -> Self {
        Self::Number(i64::from(number))
    }
}

impl From<u16> for SpanValue {
    fn from(number: u16) -> Self {
        Self::Number(i64::from(number))
    }
}

impl From<f64> for SpanValue {
    fn from(measure: f64) -> Self {
        Self::Real(measure)
    }
}

impl From<bool> for SpanValue {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}
