//! One request's life: choose a pair, prefill, hand off, decode, stream.
//! The only place that orders the two legs; everything it calls does one thing.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap};
use http::uri::PathAndQuery;
use http::{Method, Response};
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::Core;
use crate::error::{Broken, HandOffRefusal, ProxyError, Stage, UpstreamFailure};
use crate::handoff;
use crate::lease::Lease;
use crate::metrics::Outcome;
use crate::pool::peer::{InFlight, Peer};
use crate::prefill::PrefillLeg;
use crate::request::{ClientRequest, Endpoint, pass_through_body};
use crate::request_id::RequestId;
use crate::settings::OnMissing;
use crate::splice::{Spliced, answer_without_hand_off};
use crate::stream::{Guards, RelayBody, Tally};
use crate::upstream::{Leg, request_headers, response_headers, route};

/// What a request brings besides its body.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The id on both legs.
    pub request_id: RequestId,
    /// The client's headers.
    pub headers: HeaderMap,
}

/// What the prefill leg led to.
enum Prefilled {
    /// P holds the blocks for a decode engine.
    HandedOff(Lease),
    /// There is no usable hand-off; the decode engine computes the prompt.
    ComputeOnDecode,
    /// P refused the request; its answer is the client's.
    Refused(Response<RelayBody>),
}

impl Core {
    /// Serves one completion. Dropping the future or the body aborts whatever leg is running and
    /// frees what P holds.
    pub(crate) async fn complete(
        self: &Arc<Self>,
        endpoint: Endpoint,
        exchange: &Exchange,
        body: Bytes,
    ) -> Result<Response<RelayBody>, ProxyError> {
        let tally = Tally::new(Arc::clone(&self.metrics), endpoint);
        let served = self.two_legs(endpoint, exchange, body).await;
        match served {
            Ok((answer, guards)) => {
                self.relay(answer, Guards { tally: Some(tally), ..guards }, endpoint).await
            }
            Err(Stopped::Answer(response)) => {
                tally.ended(Outcome::of_status(response.status().as_u16()));
                Ok(response)
            }
            Err(Stopped::Error(error)) => {
                tally.ended(Outcome::of_error(&error));
                Err(error)
            }
        }
    }

    async fn two_legs(
        self: &Arc<Self>,
        endpoint: Endpoint,
        exchange: &Exchange,
        body: Bytes,
    ) -> Result<(Response<Incoming>, Guards), Stopped> {
        let request = ClientRequest::parse(endpoint, body, self.settings.hand_off.client_injected.into())
            .map_err(ProxyError::from)?;
        // D first: without one, a prefill would only strand blocks.
        let decode = self.pool.choose(Stage::Decode, Some(request.model()))?;
        let lease = match request.bypass() {
            Some(reason) => {
                self.metrics.bypassed(reason);
                None
            }
            None => match self.prefill(&request, exchange).await? {
                Prefilled::HandedOff(lease) => Some(lease),
                Prefilled::ComputeOnDecode => None,
                Prefilled::Refused(response) => return Err(Stopped::Answer(response)),
            },
        };
        Ok(self.decode(&request, exchange, decode, lease).await?)
    }

    async fn prefill(
        self: &Arc<Self>,
        request: &ClientRequest,
        exchange: &Exchange,
    ) -> Result<Prefilled, ProxyError> {
        let in_flight = self.pool.choose(Stage::Prefill, Some(request.model()))?;
        let peer = Arc::clone(&in_flight.peer);
        let headers = request_headers(&exchange.headers, &exchange.request_id);
        let began = Instant::now();
        let mut leg = PrefillLeg::start(self, in_flight, request, &exchange.request_id, headers);
        let (head, answer) = match leg.answer().await {
            Ok(answered) => answered,
            Err(failure) => return Err(self.engine_failed(&peer, failure)),
        };
        self.metrics.prefill_took(began.elapsed().as_secs_f64());
        if head.status().is_client_error() {
            return Ok(Prefilled::Refused(relay_whole(head, answer)));
        }
        if !head.status().is_success() {
            peer.failed(&format!("prefill answered {}", head.status().as_u16()), false);
            return Err(ProxyError::PrefillFailed(head.status().as_u16()));
        }
        match handoff::accept(&answer, &peer, route(&head).same_host, self.tokens_per_block()) {
            Ok(hand_off) => {
                peer.saw_engine(&hand_off.engine_id);
                let lease = Lease::open(self, hand_off, &peer, request, &exchange.request_id);
                Ok(Prefilled::HandedOff(lease))
            }
            Err(refused) => {
                peer.failed(&format!("hand-off {}", refused.refusal.label()), false);
                if let Some(unused) = refused.unused {
                    drop(Lease::open(self, *unused, &peer, request, &exchange.request_id));
                }
                self.without_hand_off(refused.refusal, &exchange.request_id)
            }
        }
    }

    /// Counts a missing, defective or expiring hand-off and applies the policy for it.
    fn without_hand_off(
        &self,
        refusal: HandOffRefusal,
        request_id: &RequestId,
    ) -> Result<Prefilled, ProxyError> {
        self.metrics.hand_off_refused(&refusal);
        let request_id = request_id.as_str();
        match self.settings.hand_off.on_missing {
            OnMissing::Fail => {
                tracing::warn!(request_id, %refusal, "no usable hand-off, request failed");
                Err(ProxyError::HandOff(refusal))
            }
            OnMissing::DecodeOnly => {
                tracing::warn!(request_id, %refusal, "no usable hand-off, the decode engine computes the prompt");
                Ok(Prefilled::ComputeOnDecode)
            }
        }
    }

    async fn decode(
        self: &Arc<Self>,
        request: &ClientRequest,
        exchange: &Exchange,
        in_flight: InFlight,
        mut lease: Option<Lease>,
    ) -> Result<(Response<Incoming>, Guards), ProxyError> {
        if lease.as_ref().is_some_and(Lease::is_expiring) {
            self.without_hand_off(HandOffRefusal::Expiring, &exchange.request_id)?;
            lease = None;
        }
        let peer = Arc::clone(&in_flight.peer);
        let handed_over = lease.as_ref().and_then(Lease::granted);
        let leg = Leg {
            stage: Stage::Decode,
            peer: &peer,
            method: Method::POST,
            path: request.endpoint().path(),
            headers: request_headers(&exchange.headers, &exchange.request_id),
            body: request.decode_body(lease.as_ref().and_then(Lease::raw)),
        };
        if let Some(lease) = &mut lease {
            lease.dispatched(&peer);
        }
        let began = Instant::now();
        let answered = self.upstream.send(leg, self.settings.timeouts.decode_head).await;
        let answer = match answered {
            Ok(answer) => answer,
            Err(failure) => return Err(self.engine_failed(&peer, failure)),
        };
        self.metrics.decode_head_took(began.elapsed().as_secs_f64());
        if !answer.status().is_success() {
            // Some refusals reach P by themselves and some do not; telling P twice is harmless.
            lease = None;
        }
        let metrics = Arc::clone(&self.metrics);
        Ok((answer, Guards { in_flight, lease, tally: None, metrics, handed_over }))
    }

    /// Turns D's answer into the client's: JSON is held whole, so that it arrives complete or not
    /// at all and without the hand-off; everything else passes as it comes.
    async fn relay(
        self: &Arc<Self>,
        answer: Response<Incoming>,
        mut guards: Guards,
        endpoint: Endpoint,
    ) -> Result<Response<RelayBody>, ProxyError> {
        let (mut head, body) = answer.into_parts();
        response_headers(&mut head.headers);
        if !is_type(&head.headers, b"application/json") {
            let events = is_type(&head.headers, b"text/event-stream").then_some(endpoint);
            let body = RelayBody::live(body, guards, events, self.upstream.idle());
            return Ok(Response::from_parts(head, body));
        }
        let limit = self.settings.limits.answer_bytes;
        let whole = match self.upstream.collect(Stage::Decode, body, limit).await {
            Ok(whole) => whole,
            Err(failure) => {
                guards.broke();
                return Err(self.engine_failed(&guards.in_flight.peer, failure));
            }
        };
        if let Some(since) = guards.handed_over {
            self.metrics.hand_over_took(since.elapsed().as_secs_f64());
        }
        if head.status.is_success() {
            guards.was_read();
        }
        let tally = guards.tally.take().map(|tally| tally.ended(Outcome::of_status(head.status.as_u16())));
        Ok(Response::from_parts(head, RelayBody::whole(answer_without_hand_off(whole), tally)))
    }

    /// Forwards a request that has no prefill leg to a decode engine as it is.
    pub(crate) async fn pass_through(
        self: &Arc<Self>,
        method: Method,
        path_and_query: &PathAndQuery,
        exchange: &Exchange,
        body: Bytes,
    ) -> Result<Response<RelayBody>, ProxyError> {
        let body = pass_through_body(body, self.settings.hand_off.client_injected.into())?;
        let in_flight = self.pool.choose(Stage::Decode, None)?;
        let peer = Arc::clone(&in_flight.peer);
        let leg = Leg {
            stage: Stage::Decode,
            peer: &peer,
            method,
            path: path_and_query.as_str(),
            headers: request_headers(&exchange.headers, &exchange.request_id),
            body,
        };
        let answer = self
            .upstream
            .send(leg, self.settings.timeouts.decode_head)
            .await
            .map_err(|failure| self.engine_failed(&peer, failure))?;
        let metrics = Arc::clone(&self.metrics);
        let guards = Guards { in_flight, lease: None, tally: None, metrics, handed_over: None };
        self.relay(answer, guards, Endpoint::Completions).await
    }

    fn engine_failed(&self, peer: &Peer, failure: UpstreamFailure) -> ProxyError {
        self.metrics.upstream_failed(failure);
        let (stage, kind) = (failure.stage.label(), failure.broken.label());
        peer.failed(kind, failure.broken == Broken::Connect);
        tracing::warn!(peer = %peer.id, url = %peer.spec.url, stage, kind, "an engine failed");
        ProxyError::Upstream(failure)
    }
}

/// Why there is no decode answer to relay.
enum Stopped {
    Answer(Response<RelayBody>),
    Error(ProxyError),
}

impl From<ProxyError> for Stopped {
    fn from(error: ProxyError) -> Self {
        Self::Error(error)
    }
}

fn relay_whole(head: Response<()>, answer: Bytes) -> Response<RelayBody> {
    let (mut head, ()) = head.into_parts();
    response_headers(&mut head.headers);
    let body = if is_type(&head.headers, b"application/json") {
        answer_without_hand_off(answer)
    } else {
        Spliced::from(answer)
    };
    Response::from_parts(head, RelayBody::whole(body, None))
}

fn is_type(headers: &HeaderMap, media_type: &[u8]) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|value| {
        let value = value.as_bytes();
        value.len() >= media_type.len()
            && value[..media_type.len()].eq_ignore_ascii_case(media_type)
            && !value.get(media_type.len()).is_some_and(u8::is_ascii_alphanumeric)
    })
}

#[cfg(test)]
mod tests {
    use http::header::HeaderValue;

    use super::*;

    #[test]
    fn media_types_are_compared_without_parameters() {
        let of =
            |value: &'static str| HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(value))]);
        assert!(is_type(&of("application/json"), b"application/json"));
        assert!(is_type(&of("Application/JSON; charset=utf-8"), b"application/json"));
        assert!(is_type(&of("text/event-stream; charset=utf-8"), b"text/event-stream"));
        assert!(!is_type(&of("application/jsonl"), b"application/json"));
        assert!(!is_type(&HeaderMap::new(), b"application/json"));
    }
}
