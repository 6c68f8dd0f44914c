//! One request's trace: its context as W3C's `traceparent` carries it, and the spans of a sampled one, which
//! go out together when the last of them has ended. Knows no tracing backend; one that is not sampled costs a
//! number and a header.

mod context;
mod record;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use parking_lot::Mutex;
use tokio::time::Instant;

pub(crate) use context::Parent;
pub use record::{SpanKind, SpanRecord, SpanValue};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Takes the spans of one request; whether there was room for them.
type Sink = Arc<dyn Fn(Vec<SpanRecord>) -> bool + Send + Sync>;

/// What became of traces so far.
#[derive(Debug, Default)]
pub struct TraceCounts {
    /// The collector took them.
    pub exported: AtomicU64,
    /// Too many waited.
    pub dropped: AtomicU64,
    /// The collector did not take them.
    pub failed: AtomicU64,
}

/// Where traces go, and which requests have one. The default is nowhere: a client's context then reaches the
/// engines as it is.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<On>>);

struct On {
    sampling: Sampling,
    counts: Arc<TraceCounts>,
    sink: Sink,
}

/// Which requests are traced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The part of those requests that decide for themselves, from 0 to 1.
    pub ratio: f64,
    /// Whether a request that says so in its `traceparent` is, or is not, traced whatever the ratio.
    pub follow_parent: bool,
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Traces").field(&self.0.as_ref().map(|on| on.sampling)).finish()
    }
}

impl PartialEq for Traces {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        }
    }
}

impl Traces {
    /// Traces that go into `sink`, which must neither block nor wait and says whether it took them.
    #[must_use]
    pub fn new(
        sampling: Sampling,
        counts: Arc<TraceCounts>,
        sink: impl Fn(Vec<SpanRecord>) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(On { sampling, counts, sink: Arc::new(sink) })))
    }

    /// What became of them, if there are any.
    pub(crate) fn counts(&self) -> Option<&TraceCounts> {
        self.0.as_ref().map(|on| &*on.counts)
    }

    /// The trace of a request with these headers.
    pub(crate) fn begin(&self, headers: &HeaderMap) -> Trace {
        let parent = Parent::of(headers);
        let Some(on) = &self.0 else {
            return Trace { id: parent.map(|parent| parent.trace_id), ..Trace::default() };
        };
        let id = parent.map_or_else(new_id, |parent| parent.trace_id);
        let sampled = match parent {
            Some(parent) if on.sampling.follow_parent => parent.sampled,
            _ => is_within(id, on.sampling.ratio),
        };
        let state = || headers.get(TRACESTATE).and_then(|state| state.to_str().ok()).map(str::to_owned);
        let recorder = sampled.then(|| {
            Arc::new(Recorder {
                id,
                root: new_span(),
                parent: parent.map(|parent| parent.span_id),
                state: parent.and_then(|_| state()),
                began: (SystemTime::now(), Instant::now()),
                spans: Mutex::default(),
                on: Arc::clone(on),
            })
        });
        Trace { id: Some(id), on: true, orphan: parent.is_none(), recorder }
    }
}

/// As W3C and OpenTelemetry compare: the lower half of an id is random.
fn is_within(id: u128, ratio: f64) -> bool {
    let random = (id as u64) >> 1;
    ratio >= 1.0 || (random as f64) < ratio * (1_u64 << 63) as f64
}

fn new_id() -> u128 {
    loop {
        let id = rand::random::<u128>();
        if id != 0 {
            return id;
        }
    }
}

fn new_span() -> u64 {
    loop {
        let id = rand::random::<u64>();
        if id != 0 {
            return id;
        }
    }
}

/// One request's trace; clones share it.
#[derive(Clone, Default)]
pub(crate) struct Trace {
    id: Option<u128>,
    /// The router takes part; else the context passes as it is.
    on: bool,
    /// The client has sent no context that can be used.
    orphan: bool,
    recorder: Option<Arc<Recorder>>,
}

struct Recorder {
    id: u128,
    root: u64,
    parent: Option<u64>,
    state: Option<String>,
    began: (SystemTime, Instant),
    spans: Mutex<Vec<SpanRecord>>,
    on: Arc<On>,
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let spans = std::mem::take(self.spans.get_mut());
        if !spans.is_empty() && !(self.on.sink)(spans) {
            self.on.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Recorder {
    fn time(&self, at: Instant) -> SystemTime {
        let (wall, began) = self.began;
        match at.checked_duration_since(began) {
            Some(later) => wall + later,
            None => wall - (began - at),
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").field("id", &self.id).field("sampled", &self.recorder.is_some()).finish()
    }
}

impl Trace {
    /// The trace's id: the client's, or this router's where it traces.
    pub(crate) const fn id(&self) -> Option<u128> {
        self.id
    }

    /// The id if the request is sampled.
    pub(crate) fn sampled(&self) -> Option<u128> {
        self.recorder.as_ref().map(|recorder| recorder.id)
    }

    /// A part of the request that begins now.
    pub(crate) fn span(&self, name: &'static str, kind: SpanKind) -> Span {
        self.recorder.as_ref().map_or_else(Span::default, |recorder| {
            Span::begin(Arc::clone(recorder), Some(recorder.root), new_span(), name, kind, Instant::now())
        })
    }

    /// The span of the whole request, which began when the trace did.
    pub(crate) fn root(&self, name: &'static str) -> Span {
        self.recorder.as_ref().map_or_else(Span::default, |recorder| {
            let (parent, began) = (recorder.parent, recorder.began.1);
            Span::begin(Arc::clone(recorder), parent, recorder.root, name, SpanKind::Server, began)
        })
    }

    /// Puts the context of a leg into its headers, which are the client's so far.
    pub(crate) fn pass(&self, span: &Span, headers: &mut HeaderMap) {
        let Some(id) = self.id.filter(|_| self.on) else { return };
        let (parent, flags) = match &span.0 {
            Some(open) => (open.record.span_id, 1),
            None => (new_span(), 0),
        };
        if self.orphan {
            headers.remove(TRACESTATE);
        }
        if let Ok(value) = HeaderValue::try_from(format!("00-{id:032x}-{parent:016x}-{flags:02x}")) {
            headers.insert(TRACEPARENT, value);
        }
    }
}

/// A part of a request, which ends when it is dropped; nothing in one that is not sampled.
#[derive(Default)]
pub(crate) struct Span(Option<Box<Open>>);

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Span").field(&self.0.as_ref().map(|open| open.record.name)).finish()
    }
}

struct Open {
    recorder: Arc<Recorder>,
    record: SpanRecord,
}

impl Span {
    fn begin(
        recorder: Arc<Recorder>,
        parent: Option<u64>,
        span_id: u64,
        name: &'static str,
        kind: SpanKind,
        at: Instant,
    ) -> Self {
        let began = recorder.time(at);
        let record = SpanRecord {
            trace_id: recorder.id,
            span_id,
            parent,
            is_remote_parent: span_id == recorder.root && recorder.parent.is_some(),
            trace_state: recorder.state.clone(),
            name,
            kind,
            began,
            ended: began,
            error: None,
            attributes: Vec::new(),
        };
        Self(Some(Box::new(Open { recorder, record })))
    }

    /// A part of this part.
    pub(crate) fn child(&self, name: &'static str) -> Self {
        self.0.as_ref().map_or_else(Self::default, |open| {
            let recorder = Arc::clone(&open.recorder);
            let parent = Some(open.record.span_id);
            Self::begin(recorder, parent, new_span(), name, SpanKind::Internal, Instant::now())
        })
    }

    /// It began earlier than it is told.
    pub(crate) fn since(mut self, at: Instant) -> Self {
        if let Some(open) = &mut self.0 {
            open.record.began = open.recorder.time(at);
        }
        self
    }

    pub(crate) const fn is_recorded(&self) -> bool {
        self.0.is_some()
    }

    /// Says something of it; what would have to be made first is only made where it is recorded.
    pub(crate) fn say<V: Into<SpanValue>>(&mut self, name: &'static str, value: impl FnOnce() -> V) {
        if let Some(open) = &mut self.0 {
            open.record.attributes.push((name, value().into()));
        }
    }

    /// It failed, in one word.
    pub(crate) fn failed(&mut self, kind: &'static str) {
        if let Some(open) = &mut self.0 {
            open.record.error = Some(kind);
            open.record.attributes.push(("error.type", kind.into()));
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some(open) = self.0.take() else { return };
        let Open { recorder, mut record } = *open;
        record.ended = recorder.time(Instant::now());
        recorder.spans.lock().push(record);
    }
}

#[cfg(test)]
mod tests;
