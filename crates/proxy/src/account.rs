//! One request's account, from the moment it is read until its answer has gone out or its client has left:
//! counted once, told in one line, and the outermost span of its trace. Holds sizes and ids, never content.

mod leg;
mod told;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

use http::HeaderMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::admission::Permit;
use crate::metrics::{Example, Metrics, Outcome};
use crate::request_id::RequestId;
use crate::trace::{Span, Trace, Traces};
pub(crate) use told::Told;

/// What is said of a client that left before its answer was complete.
const CLIENT_LEFT: u16 = 499;

/// A request's account; clones share it, and with the last one it is closed. Nobody having said how the
/// request ended, its client has left.
#[derive(Clone, Debug)]
pub struct Account(Arc<Entry>);

#[derive(Debug)]
struct Entry {
    metrics: Arc<Metrics>,
    request_id: RequestId,
    endpoint: &'static str,
    began: Instant,
    outcome: AtomicU8,
    status: AtomicU16,
    sent: AtomicU64,
    permit: Mutex<Option<Permit>>,
    told: Mutex<Told>,
    trace: Trace,
    root: Mutex<Span>,
}

impl Account {
    pub(crate) fn open(
        metrics: Arc<Metrics>,
        traces: &Traces,
        request_id: RequestId,
        endpoint: &'static str,
        headers: &HeaderMap,
    ) -> Self {
        let trace = traces.begin(headers);
        Self(Arc::new(Entry {
            metrics,
            request_id,
            endpoint,
            began: Instant::now(),
            outcome: AtomicU8::new(Outcome::Abandoned as u8),
            status: AtomicU16::new(CLIENT_LEFT),
            sent: AtomicU64::new(0),
            permit: Mutex::default(),
            told: Mutex::default(),
            root: Mutex::new(trace.root(told::root_name(endpoint))),
            trace,
        }))
    }

    /// When the request's head had been read.
    pub(crate) fn began(&self) -> Instant {
        self.0.began
    }

    /// The request's trace.
    pub(crate) fn trace(&self) -> &Trace {
        &self.0.trace
    }

    /// The trace that the request's durations are an example of.
    pub(crate) fn example(&self) -> Example {
        self.0.trace.sampled()
    }

    /// Takes in something that the line about the request is to say.
    pub(crate) fn tell(&self, something: impl FnOnce(&mut Told)) {
        something(&mut self.0.told.lock());
    }

    /// The surface answers with an error of this status. What the core has said of its reason stays.
    pub fn refused(&self, status: u16) {
        self.0.status.store(status, Ordering::Relaxed);
        if self.outcome() == Outcome::Abandoned {
            self.0.outcome.store(Outcome::of_status(status) as u8, Ordering::Relaxed);
        }
    }

    /// Keeps the request's places until the account is closed.
    pub(crate) fn hold(&self, permit: Permit) {
        *self.0.permit.lock() = Some(permit);
    }

    /// The request needs no prefill engine any more.
    pub(crate) fn prefilled(&self) {
        if let Some(permit) = &mut *self.0.permit.lock() {
            permit.prefilled();
        }
    }

    /// Why there is no answer of an engine; the surface knows the status.
    pub(crate) fn failed(&self, outcome: Outcome) {
        self.0.outcome.store(outcome as u8, Ordering::Relaxed);
    }

    /// The answer with this status is out, or ends here.
    pub(crate) fn ended(&self, outcome: Outcome, status: u16) {
        self.0.outcome.store(outcome as u8, Ordering::Relaxed);
        self.0.status.store(status, Ordering::Relaxed);
    }

    /// Bytes of the answer's body went out.
    pub(crate) fn sent(&self, bytes: usize) {
        self.0.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn outcome(&self) -> Outcome {
        Outcome::of_code(self.0.outcome.load(Ordering::Relaxed))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let outcome = Outcome::of_code(*self.outcome.get_mut());
        let (status, sent) = (*self.status.get_mut(), *self.sent.get_mut());
        let told = std::mem::take(self.told.get_mut());
        let took = self.began.elapsed();
        let model = told.of_model.clone().unwrap_or_else(|| self.metrics.other());
        self.metrics.request_ended(self.endpoint, &model, status, outcome);
        model.request_took(took, self.trace.sampled());
        model.prompt_had(told.prompt_tokens.unwrap_or(0), told.cached_tokens.unwrap_or(0));
        model.generated(told.output_tokens.unwrap_or(0));
        let mut root = std::mem::take(self.root.get_mut());
        if root.is_recorded() {
            told.describe(&mut root, self.endpoint);
            root.say("http.response.status_code", || status);
            root.say("kvbaton.outcome", || outcome.label());
            root.say("kvbaton.request_id", || self.request_id.as_str());
            if !matches!(outcome, Outcome::Served | Outcome::ClientError) {
                root.failed(outcome.label());
            }
        }
        drop(root);
        told.log(&told::Line {
            request_id: self.request_id.as_str(),
            trace_id: self.trace.id(),
            endpoint: self.endpoint,
            status,
            outcome: outcome.label(),
            sent,
            took,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::MetricsFormat;

    fn closed(tell: impl FnOnce(&Account)) -> String {
        let metrics = Metrics::new();
        let account = Account::open(
            Arc::clone(&metrics),
            &Traces::default(),
            RequestId::accept(None),
            "completions",
            &HeaderMap::new(),
        );
        let other = account.clone();
        tell(&account);
        drop(account);
        assert!(
            !metrics.encode(MetricsFormat::OpenMetrics).contains("kvbaton_requests_total{"),
            "the other holder may still tell"
        );
        drop(other);
        let page = metrics.encode(MetricsFormat::OpenMetrics);
        let line = page.lines().find(|line| line.starts_with("kvbaton_requests_total{"));
        line.unwrap_or_default().to_owned()
    }

    #[tokio::test]
    async fn a_client_that_left_is_a_499_and_no_engines_error() {
        let line = closed(|_| {});
        assert!(line.contains(r#"outcome="abandoned""#) && line.contains(r#"status="499""#), "{line}");
    }

    #[tokio::test]
    async fn the_first_reason_and_the_surfaces_status_are_counted() {
        let line = closed(|account| {
            account.failed(Outcome::NoPeer);
            account.refused(503);
        });
        assert!(line.contains(r#"outcome="no_peer""#) && line.contains(r#"status="503""#), "{line}");
        let line = closed(|account| account.refused(413));
        assert!(line.contains(r#"outcome="client_error""#) && line.contains(r#"status="413""#), "{line}");
    }
}
