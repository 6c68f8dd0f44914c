//! One request's life: choose a pair, prefill, hand off, decode, stream.
//! The only place that orders the two legs; everything it calls does one thing.

use std::sync::Arc;

use bytes::Bytes;
use http::header::HeaderMap;
use http::{Method, Response, StatusCode};
use tokio::time::Instant;

use crate::Core;
use crate::account::Account;
use crate::answer::relay_whole;
use crate::client::Client;
use crate::error::{Broken, HandOffRefusal, ProxyError, Stage, UpstreamFailure};
use crate::handoff;
use crate::lease::Lease;
use crate::made_by::MadeBy;
use crate::metrics::Outcome;
use crate::pool::peer::{InFlight, Peer};
use crate::prefill::PrefillLeg;
use crate::request::{BypassReason, ClientRequest, Endpoint};
use crate::request_id::RequestId;
use crate::retry::{self, PrefillFault, Verdict};
use crate::settings::{OnMissing, Retry};
use crate::splice::Spliced;
use crate::stream::{Guards, RelayBody};
use crate::upstream::{Leg, own_headers, request_headers, route};
use crate::wire::EngineBody;

/// What a request brings besides its body.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The id on both legs.
    pub request_id: RequestId,
    /// The client's headers.
    pub headers: HeaderMap,
    /// Who the client is.
    pub client: Client,
    /// Where the end of the request is told.
    pub account: Account,
}

/// A request that has been read and can be served.
#[derive(Debug)]
pub struct Order {
    request: ClientRequest,
}

impl Order {
    /// The endpoint that it was sent to.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.request.endpoint()
    }

    /// The model that it names, escapes resolved.
    #[must_use]
    pub fn model(&self) -> &str {
        self.request.model()
    }

    /// Whether the client wants its answer as a stream of events.
    #[must_use]
    pub fn wants_stream(&self) -> bool {
        self.request.wants_stream()
    }
}

impl Core {
    /// Reads a request for one of the endpoints with two legs.
    pub(crate) fn read(
        &self,
        endpoint: Endpoint,
        exchange: &Exchange,
        body: Bytes,
    ) -> Result<Order, ProxyError> {
        self.retries.deposit();
        let request = ClientRequest::parse(endpoint, body, self.settings().hand_off.client_injected);
        let read = request.map_err(ProxyError::from).and_then(|request| {
            exchange.client.check_model(request.model())?;
            self.check_size(&request)?;
            Ok(Order { request })
        });
        read.inspect_err(|_| exchange.account.failed(Outcome::ClientError))
    }

    /// Serves one request. Dropping the future or the body aborts whatever leg is running and
    /// frees what P holds.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        order: &Order,
        exchange: &Exchange,
    ) -> Result<Response<RelayBody>, ProxyError> {
        let served = tokio::select! {
            served = self.two_legs(&order.request, exchange) => served,
            () = self.cut.cancelled() => Err(ProxyError::ShuttingDown.into()),
        };
        match served {
            Ok(response) => Ok(response),
            Err(Stopped::Refused(response)) => Ok(*response),
            Err(Stopped::Error(error)) => {
                exchange.account.failed(Outcome::of_error(&error));
                Err(error)
            }
        }
    }

    async fn two_legs(
        self: &Arc<Self>,
        request: &ClientRequest,
        exchange: &Exchange,
    ) -> Result<Response<RelayBody>, Stopped> {
        let mut tries = Tries::new(&self.settings().retry);
        self.pool.learn(&self.registry);
        self.admit(Some(request), exchange).await?;
        // D first: without one, a prefill would only strand blocks.
        let mut in_flight = self.choose_decode(request, &tries)?;
        let mut lease = self.hand_off(request, exchange, &in_flight.peer, &mut tries).await?;
        exchange.account.prefilled();
        loop {
            if lease.as_ref().is_some_and(Lease::is_expiring) {
                lease = None;
                self.without_hand_off(HandOffRefusal::Expiring, &exchange.request_id)?;
            }
            if lease.as_ref().is_some_and(Lease::is_orphaned) {
                lease = None;
                self.without_hand_off(HandOffRefusal::EngineGone, &exchange.request_id)?;
            }
            let peer = Arc::clone(&in_flight.peer);
            let made_by = MadeBy::of(&self.settings(), lease.as_ref().and_then(Lease::prefill), Some(&peer));
            let failure = match self.decode(request, exchange, in_flight, lease, tries.resent).await {
                Err((failure, unseen)) => {
                    lease = unseen;
                    failure
                }
                Ok((answer, guards)) => {
                    let status = answer.status().as_u16();
                    if retry::after_decode_status(status) == Verdict::Again {
                        tries.decode.push(Arc::clone(&peer));
                        if let Some(next) = self.another_decode(request, &mut tries) {
                            engine_answered(&peer, status);
                            drop((answer, guards));
                            in_flight = next;
                            lease = self.hand_off(request, exchange, &in_flight.peer, &mut tries).await?;
                            continue;
                        }
                    }
                    match self.relay(answer, guards).await {
                        Ok(response) => return Ok(made_by.shown_in(response)),
                        Err(failure) => {
                            lease = None;
                            failure
                        }
                    }
                }
            };
            in_flight = self.after_failed_decode(request, peer, failure, &mut tries).await?;
            if lease.is_none() {
                lease = self.hand_off(request, exchange, &in_flight.peer, &mut tries).await?;
            }
        }
    }

    /// Why no prefill engine is to see a request.
    fn bypass(&self, request: &ClientRequest) -> Option<BypassReason> {
        request.bypass_below(self.settings().hand_off.min_prompt_bytes)
    }

    /// A decode engine to which some prefill engine can hand off, where that matters.
    fn choose_decode(&self, request: &ClientRequest, tries: &Tries) -> Result<InFlight, ProxyError> {
        let model = Some(request.model());
        let alone = self.bypass(request).is_some();
        let chosen = self
            .pool
            .choose(Stage::Decode, model, &tries.decode, |decode| alone || self.pool.has_partner(decode));
        match chosen {
            Err(ProxyError::NoCompatiblePair) => {
                let no_prefill = self.pool.ready(Stage::Prefill) == 0;
                if no_prefill || self.settings().hand_off.on_no_prefill == OnMissing::DecodeOnly {
                    // The first leg finds nobody, and applies the policy for that.
                    return self.pool.choose(Stage::Decode, model, &tries.decode, |_| true);
                }
                Err(ProxyError::NoCompatiblePair)
            }
            chosen => chosen,
        }
    }

    /// The decode engine to try after one has failed.
    async fn after_failed_decode(
        &self,
        request: &ClientRequest,
        peer: Arc<Peer>,
        failure: UpstreamFailure,
        tries: &mut Tries,
    ) -> Result<InFlight, ProxyError> {
        // A new hand-off for an engine that may be gone would only strand more blocks.
        if tries.resend(failure) && self.is_alive(&peer).await {
            return Ok(peer.enter());
        }
        let error = self.engine_failed(&peer, failure);
        tries.decode.push(peer);
        match retry::after_decode(failure) {
            Verdict::GiveUp => Err(error),
            Verdict::Again | Verdict::AgainWithTheSameHandOff => {
                self.another_decode(request, tries).ok_or(error)
            }
        }
    }

    /// Whether an engine that has just dropped a connection takes a new one.
    async fn is_alive(&self, peer: &Peer) -> bool {
        let settings = self.settings();
        let leg = Leg {
            stage: peer.spec.role.stage(),
            peer,
            method: Method::GET,
            path: &settings.probe.path,
            headers: own_headers(&RequestId::accept(None)),
            body: Spliced::from(Bytes::new()),
        };
        self.upstream.send_anew(leg, self.settings().probe.timeout).await.is_ok()
    }

    /// Another decode engine, if there is one and the budgets allow it.
    fn another_decode(&self, request: &ClientRequest, tries: &mut Tries) -> Option<InFlight> {
        let next = self.choose_decode(request, tries).ok()?;
        tries.again(self, Stage::Decode).then_some(next)
    }

    /// The first leg: has the prompt computed on a prefill engine, on another one if that fails.
    /// None if the decode engine shall compute it itself.
    async fn hand_off(
        self: &Arc<Self>,
        request: &ClientRequest,
        exchange: &Exchange,
        decode: &Peer,
        tries: &mut Tries,
    ) -> Result<Option<Lease>, Stopped> {
        let dialect = (!decode.hands_off_on(request.endpoint())).then_some(BypassReason::Dialect);
        if let Some(reason) = self.bypass(request).or(dialect) {
            self.metrics.bypassed(reason.label());
            return Ok(None);
        }
        let choose = |tries: &Tries| {
            self.pool.choose(Stage::Prefill, Some(request.model()), &tries.prefill, |prefill| {
                prefill.hands_off_on(request.endpoint()) && self.pool.fits(prefill, decode)
            })
        };
        if self.pool.none_hands_off_on(request.endpoint()) {
            self.metrics.bypassed(BypassReason::Dialect.label());
            return Ok(None);
        }
        let mut failed = None;
        loop {
            let in_flight = match choose(tries) {
                Ok(in_flight) => in_flight,
                Err(nobody) => return self.without_prefill(failed.unwrap_or(nobody), exchange),
            };
            let peer = Arc::clone(&in_flight.peer);
            let fault = match self.prefill(request, exchange, in_flight, tries).await {
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
        request: &ClientRequest,
        exchange: &Exchange,
        in_flight: InFlight,
        tries: &mut Tries,
    ) -> Result<Result<Option<Lease>, Stopped>, PrefillFault> {
        let peer = Arc::clone(&in_flight.peer);
        tries.prefills += 1;
        let request_id = exchange.request_id.of_try(tries.prefills);
        let headers = request_headers(&exchange.headers, &request_id);
        let began = Instant::now();
        let mut leg =
            PrefillLeg::start(self, in_flight, request, &exchange.request_id, headers, tries.resent);
        let (head, answer) = match leg.answer().await {
            Ok(answered) => answered,
            Err(failure) => return Err(PrefillFault::Broke(failure)),
        };
        self.metrics.prefill_took(began.elapsed().as_secs_f64());
        if head.status().is_client_error() {
            if head.status() != StatusCode::TOO_MANY_REQUESTS {
                peer.succeeded();
            }
            let refusal = relay_whole(head, answer, &exchange.account);
            let made_by = MadeBy::of(&self.settings(), Some(&peer), None);
            return Ok(Err(Stopped::Refused(Box::new(made_by.shown_in(refusal)))));
        }
        if !head.status().is_success() {
            let status = head.status().as_u16();
            engine_answered(&peer, status);
            peer.blamed();
            return Err(PrefillFault::Status(status));
        }
        let route = route(&head);
        let accepted = handoff::accept(request, &answer, &peer, route.same_host, self.tokens_per_block());
        // Not even a release may go to an address that is not the peer's.
        let named = accepted.as_ref().map_or_else(|refused| refused.unused.as_deref(), Some);
        if let Some(error) = named.and_then(|named| self.foreign_address(&peer, named, route)) {
            peer.failed("hand-off foreign address", false);
            peer.blamed();
            let request_id = exchange.request_id.as_str();
            tracing::warn!(request_id, peer = %peer.id, %error, "a hand-off names an address that is not its peer's");
            self.metrics.hand_off_refused(&error);
            return Ok(Err(ProxyError::HandOff(error).into()));
        }
        let settings = self.settings();
        let by_way_of = settings.hand_off.registry_address.as_ref();
        let accepted = accepted.and_then(|hand_off| Ok(hand_off.by_way_of(by_way_of)?));
        Ok(match accepted {
            Ok(hand_off) => {
                self.metrics.decided("disaggregated", "pair");
                self.side_channel_named(&peer, &hand_off);
                if peer.saw_engine(&hand_off.engine_id) | peer.saw_tp_size(hand_off.channel.tp_size) {
                    self.pool.relearn();
                }
                Ok(Some(Lease::open(self, hand_off, &peer, request, &exchange.request_id)))
            }
            Err(refused) => {
                peer.failed(&format!("hand-off {}", refused.refusal.label()), false);
                peer.blamed();
                if let Some(Ok(unused)) = refused.unused.map(|unused| unused.by_way_of(by_way_of)) {
                    drop(Lease::open(self, unused, &peer, request, &exchange.request_id));
                }
                self.without_hand_off(refused.refusal, &exchange.request_id).map(|()| None)
            }
        })
    }

    /// Applies the policy for a fleet without a prefill engine that can serve.
    fn without_prefill(&self, error: ProxyError, exchange: &Exchange) -> Result<Option<Lease>, Stopped> {
        match self.settings().hand_off.on_no_prefill {
            OnMissing::Fail => Err(Stopped::Error(error)),
            OnMissing::DecodeOnly => {
                self.metrics.bypassed("no_prefill");
                let request_id = exchange.request_id.as_str();
                tracing::warn!(request_id, %error, "no prefill engine, the decode engine computes the prompt");
                Ok(None)
            }
        }
    }

    /// Counts a missing, defective or expiring hand-off and applies the policy for it.
    fn without_hand_off(&self, refusal: HandOffRefusal, request_id: &RequestId) -> Result<(), Stopped> {
        self.metrics.hand_off_refused(&refusal);
        if self.settings().hand_off.on_missing == OnMissing::DecodeOnly {
            self.metrics.decided("decode_only", refusal.reason());
        }
        let request_id = request_id.as_str();
        match self.settings().hand_off.on_missing {
            OnMissing::Fail => {
                tracing::warn!(request_id, %refusal, "no usable hand-off, request failed");
                Err(Stopped::Error(ProxyError::HandOff(refusal)))
            }
            OnMissing::DecodeOnly => {
                tracing::warn!(request_id, %refusal, "no usable hand-off, the decode engine computes the prompt");
                Ok(())
            }
        }
    }

    /// One try of the second leg.
    ///
    /// # Errors
    /// What broke before the head came, with the lease if its hand-off cannot have been seen.
    async fn decode(
        self: &Arc<Self>,
        request: &ClientRequest,
        exchange: &Exchange,
        in_flight: InFlight,
        mut lease: Option<Lease>,
        anew: bool,
    ) -> Result<(Response<EngineBody>, Guards), (UpstreamFailure, Option<Lease>)> {
        let peer = Arc::clone(&in_flight.peer);
        let handed_over = lease.as_ref().and_then(Lease::granted);
        let part = lease.as_ref().and_then(Lease::part);
        let leg = Leg {
            stage: Stage::Decode,
            peer: &peer,
            method: Method::POST,
            path: request.endpoint().path(),
            headers: self.decode_headers(exchange),
            body: request.decode_body(lease.as_ref().and_then(|lease| lease.raw_for(&peer))),
        };
        if let Some(lease) = &mut lease {
            lease.dispatched(&peer);
        }
        let began = Instant::now();
        let head = self.settings().timeouts.decode_head;
        let sent =
            if anew { self.upstream.send_anew(leg, head).await } else { self.upstream.send(leg, head).await };
        let answer = match sent {
            Ok(answer) => answer,
            Err(failure) => {
                let unseen = retry::after_decode(failure) == Verdict::AgainWithTheSameHandOff;
                return Err((failure, lease.filter(|_| unseen).map(Lease::unseen)));
            }
        };
        self.metrics.decode_head_took(began.elapsed().as_secs_f64());
        if answer.status().is_server_error() {
            match &lease {
                // With this status an engine also says that it could not read the blocks.
                Some(lease) if answer.status() == StatusCode::INTERNAL_SERVER_ERROR => {
                    lease.was_not_read_by(&peer)
                }
                _ => peer.blamed(),
            }
        }
        if !answer.status().is_success() {
            // Some refusals reach P by themselves and some do not; telling P twice is harmless.
            lease = None;
        }
        let status = answer.status().as_u16();
        let guards = Guards {
            request_id: exchange.request_id.clone(),
            endpoint: request.endpoint(),
            in_flight,
            lease,
            part,
            account: exchange.account.clone(),
            status,
            metrics: Arc::clone(&self.metrics),
            handed_over,
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

/// An engine answered that it cannot serve now.
fn engine_answered(peer: &Peer, status: u16) {
    let stage = peer.spec.role.stage().label();
    tracing::warn!(peer = %peer.id, url = %peer.spec.url, stage, status, "an engine failed");
    peer.failed(&format!("{stage} answered {status}"), false);
}

/// The engines that have failed one request, and how often it may still be tried again.
struct Tries {
    left: u32,
    resent: bool,
    /// How often a prefill engine was asked.
    prefills: u32,
    prefill: Vec<Arc<Peer>>,
    decode: Vec<Arc<Peer>>,
}

impl Tries {
    fn new(settings: &Retry) -> Self {
        Self { left: settings.attempts, resent: false, prefills: 0, prefill: Vec::new(), decode: Vec::new() }
    }

    /// Whether a kept connection ended under the request, so that the same engine may be asked once
    /// more on a new one; this is nobody's failure.
    fn resend(&mut self, failure: UpstreamFailure) -> bool {
        failure.stale && !std::mem::replace(&mut self.resent, true)
    }

    fn again(&mut self, core: &Core, stage: Stage) -> bool {
        let granted = self.left > 0 && core.retries.withdraw();
        if granted {
            self.left -= 1;
            core.metrics.retried(stage);
        }
        granted
    }
}

/// Why a request ends before a decode engine's answer.
enum Stopped {
    /// P refused it; its answer is the client's.
    Refused(Box<Response<RelayBody>>),
    Error(ProxyError),
}

impl From<ProxyError> for Stopped {
    fn from(error: ProxyError) -> Self {
        Self::Error(error)
    }
}

impl From<PrefillFault> for ProxyError {
    fn from(fault: PrefillFault) -> Self {
        match fault {
            PrefillFault::Broke(failure) => Self::Upstream(failure),
            PrefillFault::Status(status) => Self::PrefillFailed(status),
        }
    }
}
