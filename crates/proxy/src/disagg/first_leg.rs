//! The first leg: the prompt is computed on a prefill engine, on another one if that fails, and what it
//! answers becomes a lease. Also the policies for a fleet, or an answer, that has no hand-off to give.

use std::sync::Arc;

use http::StatusCode;
use tokio::time::Instant;

use super::second_leg::engine_answered;
use super::tries::{Stopped, Tries};
use super::{Exchange, Order};
use crate::Core;
use crate::answer::relay_whole;
use crate::error::{HandOffRefusal, ProxyError, Stage};
use crate::lease::Lease;
use crate::made_by::MadeBy;
use crate::metrics::Took;
use crate::pool::peer::{InFlight, Peer};
use crate::prefill::{Answered, PrefillLeg};
use crate::request::BypassReason;
use crate::request_id::RequestId;
use crate::retry::{self, PrefillFault, Verdict};
use crate::settings::OnMissing;
use crate::timeline::Step;
use crate::trace::Span;
use crate::upstream::request_headers;

/// A try of the first leg that is under way.
pub(super) struct SentPrefill {
    pub(super) peer: Arc<Peer>,
    /// The id that the engine was given.
    pub(super) id: RequestId,
    pub(super) leg: PrefillLeg,
    span: Span,
    began: Instant,
    /// Tokens that wait there, with its own prompt.
    waiting: u64,
}

impl Core {
    /// The first leg: has the prompt computed on a prefill engine, on another one if that fails.
    /// None if the decode engine shall compute it itself.
    pub(super) async fn hand_off(
        self: &Arc<Self>,
        order: &Arc<Order>,
        exchange: &Exchange,
        decode: &Peer,
        mut first: Option<InFlight>,
        tries: &mut Tries,
    ) -> Result<Option<Lease>, Stopped> {
        let dialect = (!decode.hands_off_on(order.endpoint())).then_some(BypassReason::Dialect);
        if let Some(reason) = order.bypass().or(dialect) {
            self.metrics.bypassed(reason.label());
            exchange.account.step(Step::Bypassed(reason.label()));
            return Ok(None);
        }
        if let Some(stays) = tries.stays {
            self.metrics.bypassed(stays.label());
            exchange.account.step(Step::Bypassed(stays.label()));
            return Ok(None);
        }
        let choose = |tries: &Tries| self.choose_prefill(order, exchange, decode, tries);
        if self.pool.none_hands_off_on(order.endpoint()) {
            self.metrics.bypassed(BypassReason::Dialect.label());
            exchange.account.step(Step::Bypassed(BypassReason::Dialect.label()));
            return Ok(None);
        }
        let mut failed = None;
        loop {
            let in_flight = match exchange
                .account
                .choosing(Stage::Prefill, || first.take().map_or_else(|| choose(tries), Ok))
            {
                Ok(in_flight) => in_flight,
                Err(nobody) => return self.without_prefill(failed.unwrap_or(nobody), order, exchange),
            };
            let peer = Arc::clone(&in_flight.peer);
            exchange.account.step_with(&peer, Step::PrefillChosen);
            let fault = match self.prefill(order, exchange, in_flight, tries).await {
                Ok(prefilled) => return prefilled,
                Err(fault) => fault,
            };
            if let PrefillFault::Broke(failure) = fault {
                if tries.resend(failure) {
                    continue;
                }
                self.engine_failed(&peer, failure);
            }
            tries.prefill.push(peer);
            let error = fault.into();
            if retry::after_prefill(fault) == Verdict::GiveUp {
                return Err(Stopped::Error(error));
            }
            if choose(tries).is_ok() && !tries.again(self, Stage::Prefill) {
                return Err(Stopped::Error(error));
            }
            failed = Some(error);
        }
    }

    /// One try of the first leg.
    async fn prefill(
        self: &Arc<Self>,
        order: &Arc<Order>,
        exchange: &Exchange,
        in_flight: InFlight,
        tries: &mut Tries,
    ) -> Result<Result<Option<Lease>, Stopped>, PrefillFault> {
        let mut sent = self.send_prefill(order, exchange, in_flight, None, tries);
        let answered = sent.leg.answer().await;
        self.prefilled(order, exchange, sent, answered, tries)
    }

    /// Begins a try of the first leg, under an id that the other leg has too if one is given.
    pub(super) fn send_prefill(
        self: &Arc<Self>,
        order: &Arc<Order>,
        exchange: &Exchange,
        in_flight: InFlight,
        id: Option<&RequestId>,
        tries: &mut Tries,
    ) -> SentPrefill {
        let peer = Arc::clone(&in_flight.peer);
        tries.prefills += 1;
        let request_id = match id {
            Some(id) => id.clone(),
            None if peer.pushes() => exchange.request_id.unique(),
            None => exchange.request_id.of_try(tries.prefills),
        };
        let mut headers = request_headers(&exchange.headers, &request_id);
        exchange.account.tell(|told| told.prefill = Some(Arc::clone(&peer)));
        let span = exchange.account.leg(Stage::Prefill, &peer, &mut headers);
        let began = Instant::now();
        // With its own prompt.
        let waiting = peer.routing.waiting_tokens();
        let ids = (&exchange.request_id, &request_id);
        let trace = exchange.account.trace().clone();
        let leg = PrefillLeg::start(self, in_flight, order, ids, headers, trace, tries.resent);
        exchange.account.step_with(&peer, Step::PrefillSent);
        SentPrefill { peer, id: request_id, leg, span, began, waiting }
    }

    /// What a prefill engine's answer, or its failure, comes to.
    pub(super) fn prefilled(
        self: &Arc<Self>,
        order: &Arc<Order>,
        exchange: &Exchange,
        sent: SentPrefill,
        answered: Answered,
        tries: &Tries,
    ) -> Result<Result<Option<Lease>, Stopped>, PrefillFault> {
        let SentPrefill { peer, id, leg: _leg, mut span, began, waiting } = sent;
        let (head, answer) = match answered {
            Ok(answered) => answered,
            Err(failure) => {
                exchange.account.step_with(&peer, Step::PrefillFailed(failure.broken.label()));
                span.failed(failure.broken.label());
                return Err(PrefillFault::Broke(failure));
            }
        };
        exchange.account.step_with(&peer, Step::PrefillAnswered(head.status().as_u16()));
        let now = Instant::now();
        let took = now - began;
        self.metrics.took(Took::Prefill, took, exchange.account.example());
        exchange.account.tell(|told| told.prefilled = Some(took));
        span.say("http.response.status_code", || head.status().as_u16());
        if head.status().is_client_error() {
            if head.status() != StatusCode::TOO_MANY_REQUESTS {
                peer.succeeded();
            }
            let refusal = relay_whole(head, answer, &exchange.account);
            let made_by = MadeBy::of(&order.settings, Some(&peer), None);
            return Ok(Err(Stopped::Refused(Box::new(made_by.shown_in(refusal)))));
        }
        if !head.status().is_success() {
            let status = head.status().as_u16();
            engine_answered(&peer, status);
            peer.blamed();
            return Err(PrefillFault::Status(status));
        }
        let lease = |hand_off| {
            let lease = Lease::open(self, hand_off, &peer, order, &exchange.request_id);
            lease.sent_as(id).traced(exchange.account.trace().clone())
        };
        let refused = match self.granted_by(&peer, order, &head, &answer) {
            Ok(hand_off) => {
                exchange.account.tell(|told| {
                    told.prompt_tokens = hand_off.prompt_tokens;
                    told.cached_tokens = hand_off.part.cached_tokens;
                });
                span.say("kvbaton.blocks", || hand_off.blocks);
                self.metrics.decided("disaggregated", "pair");
                exchange
                    .account
                    .step_with(&peer, Step::HandedOff(u32::try_from(hand_off.blocks).unwrap_or(u32::MAX)));
                self.side_channel_named(&peer, &hand_off);
                self.learn_prefill(order, &peer, &hand_off, waiting, took, now);
                self.pool.prefixes.record(&tries.chunks, peer.routing.key);
                peer.saw_channel(&hand_off);
                if peer.saw_engine(&hand_off.engine_id)
                    | peer.saw_tp_size(hand_off.channel.tp_size)
                    | peer.saw_mode(hand_off.channel.mode)
                {
                    self.pool.relearn();
                }
                return Ok(Ok(Some(lease(hand_off))));
            }
            Err(refused) => refused,
        };
        span.failed(refused.refusal.label());
        peer.failed(&format!("hand-off {}", refused.refusal.label()), false);
        peer.blamed();
        if let Some(unused) = refused.unused {
            drop(lease(*unused));
        }
        if refused.refusal == HandOffRefusal::ForeignAddress {
            let (request_id, error) = (exchange.request_id.as_str(), refused.refusal);
            tracing::warn!(request_id, peer = %peer.id, %error, "a hand-off names an address that is not its peer's");
            self.metrics.hand_off_refused(&error);
            exchange.account.step_with(&peer, Step::HandOffRefused(error.reason()));
            return Ok(Err(ProxyError::HandOff(error).into()));
        }
        Ok(self.without_hand_off(refused.refusal, order, exchange).map(|()| None))
    }

    /// Applies the policy for a fleet without a prefill engine that can serve.
    fn without_prefill(
        &self,
        error: ProxyError,
        order: &Order,
        exchange: &Exchange,
    ) -> Result<Option<Lease>, Stopped> {
        match order.settings.hand_off.on_no_prefill {
            OnMissing::Fail => Err(Stopped::Error(error)),
            OnMissing::DecodeOnly => {
                self.metrics.bypassed("no_prefill");
                exchange.account.step(Step::Bypassed("no_prefill"));
                let request_id = exchange.request_id.as_str();
                tracing::warn!(request_id, %error, "no prefill engine, the decode engine computes the prompt");
                Ok(None)
            }
        }
    }

    /// Counts a missing, defective or expiring hand-off and applies the policy for it.
    pub(super) fn without_hand_off(
        &self,
        refusal: HandOffRefusal,
        order: &Order,
        exchange: &Exchange,
    ) -> Result<(), Stopped> {
        self.metrics.hand_off_refused(&refusal);
        exchange.account.step(Step::HandOffRefused(refusal.reason()));
        let request_id = exchange.request_id.as_str();
        match order.settings.hand_off.on_missing {
            OnMissing::Fail => {
                tracing::warn!(request_id, %refusal, "no usable hand-off, request failed");
                Err(Stopped::Error(ProxyError::HandOff(refusal)))
            }
            OnMissing::DecodeOnly => {
                self.metrics.decided("decode_only", refusal.reason());
                tracing::warn!(request_id, %refusal, "no usable hand-off, the decode engine computes the prompt");
                Ok(())
            }
        }
    }
}
