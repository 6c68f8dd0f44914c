//! The prefill leg in flight. One that nobody waits for any more is heard out and its blocks are
//! released: what P has finished cannot be aborted, and only its answer names the blocks.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::header::HeaderMap;
use http::{Method, Response};
use kv_connector::protocol::params::Generation;
use tokio::time::timeout;

use crate::Core;
use crate::disagg::Order;
use crate::error::{Broken, HandOffRefusal, Progress, Stage, UpstreamFailure};
use crate::handoff::{self, HandedOff, Refused};
use crate::lease::{DecodeLeg, Lease, Showed};
use crate::metrics::AbandonedPrefill;
use crate::pool::peer::{InFlight, Peer};
use crate::request_id::RequestId;
use crate::settings::Settings;
use crate::trace::Trace;
use crate::upstream::{Leg, route};

pub(crate) type Answered = Result<(Response<()>, Bytes), UpstreamFailure>;

/// One prefill request on its way. Dropped before its answer, it is abandoned.
pub(crate) struct PrefillLeg {
    running: Option<Running>,
}

struct Running {
    answer: Pin<Box<dyn Future<Output = Answered> + Send>>,
    core: Arc<Core>,
    in_flight: InFlight,
    order: Arc<Order>,
    request_id: RequestId,
    /// The id that the prefill engine was given.
    sent_as: RequestId,
    /// What is still done for it after its end has a span there too.
    trace: Trace,
    /// In push mode, the leg to which its blocks are written.
    decode: Option<DecodeLeg>,
}

impl PrefillLeg {
    /// Prepares the leg; it is sent when its answer is first awaited, `anew` on a connection of its own.
    pub(crate) fn start(
        core: &Arc<Core>,
        in_flight: InFlight,
        order: &Arc<Order>,
        (request_id, sent_as): (&RequestId, &RequestId),
        headers: HeaderMap,
        trace: Trace,
        anew: bool,
    ) -> Self {
        let peer = Arc::clone(&in_flight.peer);
        // That generation hands off only what ended by length.
        let ignore_eos = peer.generation() == Some(Generation::V2);
        let (body, path) = (order.request.prefill_body(ignore_eos), order.endpoint().path());
        let (exchange, settings) = (Arc::clone(core), Arc::clone(&order.settings));
        let answer = Box::pin(async move {
            let leg = Leg { stage: Stage::Prefill, peer: &peer, method: Method::POST, path, headers, body };
            exchange.whole_answer(leg, &settings, anew).await
        });
        let (order, request_id) = (Arc::clone(order), request_id.clone());
        let (core, sent_as) = (Arc::clone(core), sent_as.clone());
        let running = Running { answer, core, in_flight, order, request_id, sent_as, trace, decode: None };
        Self { running: Some(running) }
    }

    /// The whole answer of the prefill engine. One that is late has its leg heard out like one whose
    /// client has left.
    pub(crate) async fn answer(&mut self) -> Answered {
        let lost = UpstreamFailure::new(Stage::Prefill, Broken::Reset, Progress::Answering);
        let running = self.running.as_mut().ok_or(lost)?;
        let deadline = running.order.settings.timeouts.prefill;
        let silent = UpstreamFailure::new(Stage::Prefill, Broken::Timeout, Progress::Sent);
        let answered = timeout(deadline, running.answer.as_mut()).await.map_err(|_late| silent)?;
        self.running = None;
        answered
    }
}

impl PrefillLeg {
    /// Nobody waits for it any more, nor for the decode leg to which its blocks are to be written. Both engines
    /// are let come that far: neither would know that the other has been told to end.
    pub(crate) fn abandon_with(mut self, decode: DecodeLeg) {
        if let Some(running) = &mut self.running {
            running.core.metrics.pushed("abandoned");
            running.decode = Some(decode);
        }
    }

    /// Aborts it: its blocks would be written to nobody.
    pub(crate) fn abort(&mut self) {
        if let Some(running) = self.running.take() {
            running.core.metrics.prefill_abandoned(AbandonedPrefill::Aborted);
        }
    }
}

impl Drop for PrefillLeg {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            let tasks = running.core.tasks.clone();
            tasks.spawn(running.abandon());
        }
    }
}

impl Running {
    /// Closing the connection would abort a prefill that still computes, but not one that has ended:
    /// its blocks could then be named by nobody until the lease ends.
    async fn abandon(self) {
        let Self { answer, core, in_flight, order, request_id, sent_as, trace, mut decode } = self;
        let mut showed = None;
        let of_peer = in_flight.peer.spec.abandon_grace;
        let grace = of_peer.unwrap_or(order.settings.hand_off.abandon_grace);
        // A decode engine that will not have the blocks ends the prefill; one that has them cannot come first.
        let useless = async {
            if let Some(decode) = &mut decode {
                showed = Some(decode.shows.as_mut().await);
            }
            match showed {
                Some(Showed::Refused | Showed::Failed) => {}
                _ => std::future::pending().await,
            }
        };
        let heard = tokio::select! {
            heard = timeout(grace, answer) => heard.ok(),
            () = core.leaves() => None,
            () = useless => None,
        };
        let fate = match heard {
            None => AbandonedPrefill::Aborted,
            Some(Err(_)) => AbandonedPrefill::Failed,
            Some(Ok((head, _))) if !head.status().is_success() => AbandonedPrefill::KeptNone,
            Some(Ok((head, answer))) => {
                let granted = core.granted_by(&in_flight.peer, &order, &head, &answer);
                match granted.map_or_else(|refused| refused.unused.map(|unused| *unused), Some) {
                    None => AbandonedPrefill::KeptNone,
                    Some(unread) => {
                        let lease = Lease::open(&core, unread, &in_flight.peer, &order, &request_id);
                        let mut lease = lease.sent_as(sent_as).traced(trace);
                        if let Some(decode) = decode {
                            lease.dispatched(&decode.peer);
                            match showed {
                                Some(showed) => lease.showed(showed),
                                None => lease.follow(decode),
                            }
                        }
                        AbandonedPrefill::Released
                    }
                }
            }
        };
        core.metrics.prefill_abandoned(fate);
    }
}

impl Core {
    /// The hand-off in a prefill engine's whole answer, as decode engines are to get it.
    ///
    /// # Errors
    /// Why no request may use it. What is unused may still be sent to free its blocks, but nothing may go to
    /// an address that is not the peer's.
    pub(crate) fn granted_by(
        &self,
        peer: &Peer,
        order: &Order,
        head: &Response<()>,
        answer: &Bytes,
    ) -> Result<HandedOff, Refused> {
        let policy = &order.settings.hand_off;
        let route = route(head);
        let per_block =
            |id: &str| if policy.check_block_count { self.registry.tokens_per_block(id) } else { None };
        let accepted = handoff::accept(&order.request, answer, peer, route.same_host, per_block);
        let named = accepted.as_ref().map_or_else(|refused| refused.unused.as_deref(), Some);
        if named.is_some_and(|named| self.names_a_stranger(peer, named, route, policy.address_check)) {
            return Err(HandOffRefusal::ForeignAddress.into());
        }
        let by_way_of = policy.registry_address.as_ref();
        match accepted {
            Ok(hand_off) => Ok(hand_off.by_way_of(by_way_of)?),
            Err(Refused { refusal, unused }) => {
                let unused = unused.and_then(|unused| unused.by_way_of(by_way_of).ok());
                Err(Refused { refusal, unused: unused.map(Box::new) })
            }
        }
    }

    /// As long as it takes: whoever waits for it, or hears it out, has a deadline.
    async fn whole_answer(&self, leg: Leg<'_>, settings: &Settings, anew: bool) -> Answered {
        let stage = leg.stage;
        let (head, body) = self.upstream.send_without_end(leg, anew).await?.into_parts();
        let answer = self.upstream.collect(stage, body, settings.limits.answer_bytes).await?;
        Ok((Response::from_parts(head, ()), answer))
    }
}
