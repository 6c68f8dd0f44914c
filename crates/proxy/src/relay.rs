//! From a decode engine's answer to the client's, for both kinds of request: those with two legs and those
//! that one engine answers alone.

use std::sync::Arc;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Response};
use tokio::time::{Instant, timeout_at};

use crate::Core;
use crate::answer::{for_client, is_binary, is_type};
use crate::disagg::Exchange;
use crate::error::{Broken, Progress, ProxyError, Stage, UpstreamFailure};
use crate::flow::Flow;
use crate::metrics::Outcome;
use crate::request::{Endpoint, pass_through_as};
use crate::settings::Settings;
use crate::splice::Told;
use crate::stream::{Bounds, Events, Guards, RelayBody};
use crate::timeline::Step;
use crate::upstream::{Leg, X_DATA_PARALLEL_RANK, request_headers, response_headers};
use crate::wire::EngineBody;

impl Core {
    /// Turns D's answer into the client's: JSON is held whole, so that it arrives complete or not
    /// at all and without the hand-off; everything else passes as it comes.
    pub(crate) async fn relay(
        &self,
        settings: &Settings,
        answer: Response<EngineBody>,
        mut guards: Guards,
    ) -> Result<Response<RelayBody>, UpstreamFailure> {
        let (mut head, body) = answer.into_parts();
        response_headers(&mut head.headers);
        let ends = Instant::now() + settings.timeouts.total;
        let limit = settings.limits.answer_bytes;
        let is_stream = is_type(&head.headers, b"text/event-stream");
        if is_stream || is_binary(&head.headers) {
            if is_stream {
                guards.flow.streams();
            }
            let share = self.held.share();
            let events = is_stream.then(|| {
                Events::new(guards.endpoint, guards.part.take(), share, limit).naming(guards.model.take())
            });
            let bounds = Bounds { idle: self.upstream.idle(), ends, cut: self.cut.clone() };
            return Ok(Response::from_parts(head, RelayBody::live(body, guards, events, bounds)));
        }
        let failure = |broken| UpstreamFailure::new(Stage::Decode, broken, Progress::Answering);
        let whole = timeout_at(ends, self.upstream.collect(Stage::Decode, body, limit)).await;
        let whole = whole.map_err(|_late| failure(Broken::Total))??;
        guards.flow.whole(&whole);
        guards.engine_served();
        let part = guards.part.take().filter(|_| head.status.is_success());
        if head.status.is_success() {
            guards.was_read();
        }
        let told = Told { part: part.as_ref(), model: guards.model.as_ref() };
        let body = for_client(whole, guards.endpoint, told).ok_or(failure(Broken::Protocol))?;
        let status = head.status.as_u16();
        Ok(Response::from_parts(head, RelayBody::whole(body, guards.account.clone(), status)))
    }

    /// Forwards a request that has no prefill leg to a decode engine as it is.
    pub(crate) async fn pass_through(
        self: &Arc<Self>,
        method: Method,
        path_and_query: &PathAndQuery,
        exchange: &Exchange,
        body: Bytes,
    ) -> Result<Response<RelayBody>, ProxyError> {
        let passed = tokio::select! {
            passed = self.pass(method, path_and_query, exchange, body) => passed,
            () = self.cut.cancelled() => Err(ProxyError::ShuttingDown),
        };
        passed.inspect_err(|error| exchange.account.failed(Outcome::of_error(error)))
    }

    async fn pass(
        self: &Arc<Self>,
        method: Method,
        path_and_query: &PathAndQuery,
        exchange: &Exchange,
        body: Bytes,
    ) -> Result<Response<RelayBody>, ProxyError> {
        exchange.account.tell(|told| {
            told.received = body.len();
            told.key.clone_from(&exchange.client.key);
        });
        exchange.client.check_body(&body)?;
        let settings = self.settings();
        let named = self.named_in(&body, &settings, exchange);
        let renamed = named.as_ref().and_then(|named| named.served_as.as_ref());
        let body = pass_through_as(body, settings.hand_off.client_injected, renamed)?;
        self.admit(&settings, None, exchange).await?;
        exchange.account.step(Step::Admitted);
        self.pool.learn(&self.registry);
        let model = named.as_ref().map(|named| &*named.model);
        let choose = || self.pool.choose(Stage::Decode, model, &[], |_| true);
        let in_flight = exchange.account.choosing(Stage::Decode, choose)?;
        let peer = Arc::clone(&in_flight.peer);
        exchange.account.tell(|told| told.decode = Some(Arc::clone(&peer)));
        let mut headers = decode_headers(&settings, exchange);
        let span = exchange.account.leg(Stage::Decode, &peer, &mut headers);
        let mut flow = Flow::begin(&exchange.account, &self.metrics, self.metrics.other(), &peer, span, None);
        let leg = |body| Leg {
            stage: Stage::Decode,
            peer: &peer,
            method: method.clone(),
            path: path_and_query.as_str(),
            headers: headers.clone(),
            body,
        };
        let head = settings.timeouts.decode_head;
        let sent = match self.upstream.send(leg(body.clone()), head).await {
            Err(failure) if failure.stale => self.upstream.send_anew(leg(body), head).await,
            sent => sent,
        };
        let answer = sent.map_err(|failure| {
            flow.failed(failure.broken.label());
            self.engine_failed(&peer, failure)
        })?;
        let status = answer.status().as_u16();
        flow.answered(status);
        // What else an engine answers on an endpoint that is not known here may be the request's fault.
        if status == 503 {
            peer.blamed();
        }
        let guards = Guards {
            request_id: exchange.request_id.clone(),
            endpoint: Endpoint::Completions,
            in_flight,
            lease: None,
            part: None,
            model: named.and_then(|named| named.asked_as),
            account: exchange.account.clone(),
            status,
            metrics: Arc::clone(&self.metrics),
            flow,
        };
        self.relay(&settings, answer, guards).await.map_err(|failure| self.engine_failed(&peer, failure))
    }
}

/// The client's headers for a decode engine; the peer's own rank, if it has one, is set later.
pub(crate) fn decode_headers(settings: &Settings, exchange: &Exchange) -> HeaderMap {
    let mut headers = request_headers(&exchange.headers, &exchange.request_id);
    if settings.pairing.client_dp_rank
        && let Some(rank) = exchange.headers.get(X_DATA_PARALLEL_RANK)
    {
        headers.insert(X_DATA_PARALLEL_RANK, rank.clone());
    }
    headers
}
