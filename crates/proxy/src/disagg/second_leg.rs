//! The second leg: a decode engine gets the client's request and the hand-off, and what its answer's head says
//! of the blocks is drawn. Decides nothing about another try.

use std::sync::Arc;

use http::{Method, Response};

use super::legs::{Given, blame};
use super::{Exchange, Order};
use crate::Core;
use crate::error::{Broken, ProxyError, Stage, UpstreamFailure};
use crate::flow::{Flow, Waiting};
use crate::lease::Lease;
use crate::pool::peer::{InFlight, Peer};
use crate::relay::decode_headers;
use crate::request_id::X_REQUEST_ID;
use crate::stream::Guards;
use crate::upstream::Leg;
use crate::wire::EngineBody;

impl Core {
    /// One try of the second leg, with a lease, or with what the engine is told where that is held beside the leg.
    ///
    /// # Errors
    /// What broke before the head came, with the lease if its hand-off cannot have been seen.
    pub(super) async fn decode(
        self: &Arc<Self>,
        order: &Order,
        exchange: &Exchange,
        in_flight: InFlight,
        mut lease: Option<Lease>,
        given: Option<&Given>,
        anew: bool,
    ) -> Result<(Response<EngineBody>, Guards), (UpstreamFailure, Option<Lease>)> {
        let peer = Arc::clone(&in_flight.peer);
        let handed_over = lease.as_ref().and_then(waiting);
        let part = lease.as_ref().and_then(Lease::part);
        exchange.account.tell(|told| {
            if given.is_none() {
                told.prefill = lease.as_ref().and_then(Lease::prefill).cloned();
            }
            told.decode = Some(Arc::clone(&peer));
        });
        let mut headers = decode_headers(&order.settings, exchange);
        if let Some(id) = given.and_then(|given| given.id.as_ref()) {
            headers.insert(X_REQUEST_ID, id.header_value());
        }
        let hand_off = match given {
            Some(given) => Some(given.raw.clone()),
            None => lease.as_ref().and_then(|lease| lease.raw_for(&peer)),
        };
        let span = exchange.account.leg(Stage::Decode, &peer, &mut headers);
        let model = exchange.account.of_model();
        let mut flow = Flow::begin(&exchange.account, &self.metrics, model, &peer, span, handed_over);
        let leg = Leg {
            stage: Stage::Decode,
            peer: &peer,
            method: Method::POST,
            path: order.endpoint().path(),
            headers,
            body: order.request.decode_body(hand_off),
        };
        if let Some(lease) = &mut lease {
            lease.dispatched(&peer);
        }
        let head = order.settings.timeouts.decode_head;
        let sent =
            if anew { self.upstream.send_anew(leg, head).await } else { self.upstream.send(leg, head).await };
        let answer = match sent {
            Ok(answer) => answer,
            Err(failure) => {
                flow.failed(failure.broken.label());
                return Err((failure, lease.filter(|_| failure.is_unseen()).map(Lease::unseen)));
            }
        };
        flow.answered(answer.status().as_u16());
        if given.is_none() {
            blame(&peer, answer.status(), lease.as_ref());
        }
        if !answer.status().is_success() {
            // Some refusals reach P by themselves and some do not; telling P twice is harmless.
            lease = None;
        }
        let status = answer.status().as_u16();
        let guards = Guards {
            request_id: exchange.request_id.clone(),
            endpoint: order.endpoint(),
            in_flight,
            lease,
            part,
            model: order.shows.clone(),
            account: exchange.account.clone(),
            status,
            metrics: Arc::clone(&self.metrics),
            flow,
        };
        Ok((answer, guards))
    }

    pub(crate) fn engine_failed(&self, peer: &Peer, failure: UpstreamFailure) -> ProxyError {
        self.metrics.upstream_failed(failure);
        let (stage, kind) = (failure.stage.label(), failure.broken.label());
        if failure.broken.blames_the_engine() {
            peer.failed(kind, failure.broken == Broken::Connect);
            peer.blamed();
        }
        tracing::warn!(peer = %peer.id, url = %peer.spec.url, stage, kind, "an engine failed");
        ProxyError::Upstream(failure)
    }
}

/// Blocks that wait for a decode engine.
pub(super) fn waiting(lease: &Lease) -> Option<Waiting> {
    let (since, prefill) = (lease.granted()?, lease.prefill()?);
    Some(Waiting { since, at: Arc::clone(&prefill.name), from: prefill.routing.key, bytes: lease.bytes() })
}

/// An engine answered that it cannot serve now.
pub(super) fn engine_answered(peer: &Peer, status: u16) {
    let stage = peer.spec.role.stage().label();
    tracing::warn!(peer = %peer.id, url = %peer.spec.url, stage, status, "an engine failed");
    peer.failed(&format!("{stage} answered {status}"), false);
}
