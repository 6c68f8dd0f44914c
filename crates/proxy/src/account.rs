//! One request's account, from the moment it is read until its answer has gone out or its client has left:
//! counted once, told in one line, and the outermost span of its trace. Holds sizes and ids, never content.

mod leg;
mod told;

use std::sync::Arc;

use http::HeaderMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::admission::Permit;
use crate::metrics::{Example, Metrics, Outcome};
use crate::pool::peer::Peer;
use crate::request_id::RequestId;
use crate::timeline::{Record, Step, Timelines};
use crate::trace::{Span, Trace, Traces};
pub(crate) use told::Told;

/// A request's account; clones share it, and with the last one it is closed. Nobody having said how the
/// request ended, its client has left.
#[derive(Clone, Debug)]
pub struct Account(Arc<Entry>);

#[derive(Debug)]
struct Entry {
    metrics: Arc<Metrics>,
    timelines: Arc<Timelines>,
    record: Arc<Record>,
    permit: Mutex<Option<Permit>>,
    told: Mutex<Told>,
    trace: Trace,
    root: Mutex<Span>,
}

impl Account {
    pub(crate) fn open(
        metrics: Arc<Metrics>,
        timelines: Arc<Timelines>,
        traces: &Traces,
        request_id: RequestId,
        endpoint: &'static str,
        headers: &HeaderMap,
    ) -> Self {
        let trace = traces.begin(headers);
        let record = timelines.open(request_id, endpoint);
        Self(Arc::new(Entry {
            metrics,
            timelines,
            record,
            permit: Mutex::default(),
            told: Mutex::default(),
            root: Mutex::new(trace.root(told::root_name(endpoint))),
            trace,
        }))
    }

    /// When the request's head had been read.
    pub(crate) fn began(&self) -> Instant {
        self.0.record.began()
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
        self.0.record.set_status(status);
        if self.0.record.outcome() == Outcome::Abandoned {
            self.0.record.set_outcome(Outcome::of_status(status));
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
        self.0.record.set_outcome(outcome);
    }

    /// The answer with this status is out, or ends here.
    pub(crate) fn ended(&self, outcome: Outcome, status: u16) {
        self.0.record.set_outcome(outcome);
        self.0.record.set_status(status);
    }

    /// Bytes of the answer's body went out.
    pub(crate) fn sent(&self, bytes: usize) {
        self.0.record.sent(bytes);
    }

    /// Its body was read, and can be served.
    pub(crate) fn read(&self, model: &str, stream: bool, bytes: usize, key: Option<&Arc<str>>) {
        self.0.record.read(model, stream, bytes, key);
    }

    /// Something happened to the request.
    pub(crate) fn step(&self, step: Step) {
        self.0.record.step(step, None);
    }

    /// Something happened to the request with a peer.
    pub(crate) fn step_with(&self, peer: &Peer, step: Step) {
        self.0.record.step(step, Some(&peer.name));
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.timelines.close(&self.record);
        let record = &self.record;
        let (outcome, status, endpoint) = (record.outcome(), record.status(), record.endpoint());
        let told = std::mem::take(self.told.get_mut());
        let took = record.began().elapsed();
        let model = told.of_model.clone().unwrap_or_else(|| self.metrics.other());
        self.metrics.request_ended(endpoint, &model, status, outcome);
        model.request_took(took, self.trace.sampled());
        model.prompt_had(told.prompt_tokens.unwrap_or(0), told.cached_tokens.unwrap_or(0));
        model.generated(told.output_tokens.unwrap_or(0));
        let mut root = std::mem::take(self.root.get_mut());
        if root.is_recorded() {
            told.describe(&mut root, endpoint);
            root.say("http.response.status_code", || status);
            root.say("kvbaton.outcome", || outcome.label());
            root.say("kvbaton.request_id", || record.request_id().as_str());
            if !matches!(outcome, Outcome::Served | Outcome::ClientError) {
                root.failed(outcome.label());
            }
        }
        drop(root);
        told.log(&told::Line {
            request_id: record.request_id().as_str(),
            trace_id: self.trace.id(),
            endpoint,
            status,
            outcome: outcome.label(),
            sent: record.sent_bytes(),
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
            Timelines::new(1),
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
