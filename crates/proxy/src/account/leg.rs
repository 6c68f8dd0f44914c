//! The spans of a request's parts, described as OpenTelemetry's conventions say.

use std::sync::Arc;

use http::HeaderMap;

use super::{Account, told};
use crate::error::Stage;
use crate::metrics::OfModel;
use crate::pool::peer::{InFlight, Peer};
use crate::trace::{Span, SpanKind};

impl Account {
    /// One leg to an engine, whose context is put into the leg's headers.
    pub(crate) fn leg(&self, stage: Stage, peer: &Peer, headers: &mut HeaderMap) -> Span {
        let trace = self.trace();
        let mut span = trace.span(stage.label(), SpanKind::Client);
        if span.is_recorded() {
            if let Some(operation) = told::operation(self.0.record.endpoint()) {
                span.say("gen_ai.operation.name", || operation);
                span.say("gen_ai.provider.name", || "vllm");
            }
            if let Some(model) = &self.0.told.lock().of_model {
                span.say("gen_ai.request.model", || model.name());
            }
            span.say("server.address", || peer.host());
            if let Some(port) = peer.authority().port_u16() {
                span.say("server.port", || port);
            }
            span.say("kvbaton.peer", || peer.id.clone());
        }
        trace.pass(&span, headers);
        span
    }

    /// Choosing a peer of a stage.
    pub(crate) fn choosing<E>(
        &self,
        stage: Stage,
        choose: impl FnOnce() -> Result<InFlight, E>,
    ) -> Result<InFlight, E> {
        let mut span = self.trace().span("choose_pair", SpanKind::Internal);
        let chosen = choose();
        span.say("kvbaton.stage", || stage.label());
        match &chosen {
            Ok(in_flight) => span.say("kvbaton.peer", || in_flight.peer.id.clone()),
            Err(_) => span.failed("no_peer"),
        }
        chosen
    }

    /// The metrics of the request's model.
    pub(crate) fn of_model(&self) -> Arc<OfModel> {
        let known = self.0.told.lock().of_model.clone();
        known.unwrap_or_else(|| self.0.metrics.other())
    }
}
