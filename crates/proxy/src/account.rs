//! One request's account, from the moment it is read until its answer has gone out or its client has left:
//! counted once and told in one line. Holds sizes and ids, never content.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::admission::Permit;
use crate::metrics::{Metrics, Outcome};
use crate::pool::peer::Peer;
use crate::request_id::RequestId;
use crate::timeline::{Record, Step, Timelines};

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
}

impl Account {
    pub(crate) fn open(
        metrics: Arc<Metrics>,
        timelines: Arc<Timelines>,
        request_id: RequestId,
        endpoint: &'static str,
    ) -> Self {
        let record = timelines.open(request_id, endpoint);
        Self(Arc::new(Entry { metrics, timelines, record, permit: Mutex::default() }))
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
        let (outcome, status) = (self.record.outcome(), self.record.status());
        self.metrics.request_ended(self.record.endpoint(), status, outcome);
        tracing::info!(
            request_id = self.record.request_id().as_str(),
            endpoint = self.record.endpoint(),
            status,
            outcome = outcome.label(),
            bytes = self.record.sent_bytes(),
            seconds = self.record.began().elapsed().as_secs_f64(),
            "request ended"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed(tell: impl FnOnce(&Account)) -> String {
        let metrics = Metrics::new();
        let account =
            Account::open(Arc::clone(&metrics), Timelines::new(1), RequestId::accept(None), "completions");
        let other = account.clone();
        tell(&account);
        drop(account);
        assert!(!metrics.encode().contains("kvbaton_requests_total{"), "the other holder may still tell");
        drop(other);
        let page = metrics.encode();
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
