//! One request's life: choose a pair, prefill, hand off, decode, stream.
//! The only place that orders the two legs; everything it calls does one thing.

mod first_leg;
mod legs;
mod push;
mod second_leg;
mod tries;
mod wanted;

use std::sync::Arc;

use bytes::Bytes;
use http::header::HeaderMap;
use http::{Method, Response};

use crate::Core;
use crate::account::Account;
use crate::client::Client;
use crate::error::{HandOffRefusal, ProxyError, Stage, UpstreamFailure};
use crate::lease::Lease;
use crate::made_by::MadeBy;
use crate::metrics::Outcome;
use crate::pool::peer::{InFlight, Peer};
use crate::request::{BypassReason, ClientRequest, Endpoint};
use crate::request_id::RequestId;
use crate::retry::{self, Verdict};
use crate::routing::settings::{DisaggregationMode, Policy};
use crate::settings::Settings;
use crate::splice::Spliced;
use crate::stream::RelayBody;
use crate::timeline::Step;
use crate::upstream::{Leg, own_headers};
use push::Both;
use second_leg::engine_answered;
use tries::{Stopped, Tries};
use wanted::FirstChoice;

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
    pub(crate) request: ClientRequest,
    /// The client's name for the model (raw JSON), where it is shown in the place of the engine's.
    pub(crate) shows: Option<Bytes>,
    /// As they were when the request was read: a reload does not change them under it.
    pub(crate) settings: Arc<Settings>,
    /// How its prefill and its decode engine are chosen.
    pub(crate) policies: [Policy; 2],
}

impl Order {
    /// The endpoint that it was sent to.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.request.endpoint()
    }

    /// The model as engines call it, escapes resolved.
    #[must_use]
    pub fn model(&self) -> &str {
        self.request.model()
    }

    /// Whether the client wants its answer as a stream of events.
    #[must_use]
    pub fn wants_stream(&self) -> bool {
        self.request.wants_stream()
    }

    /// Why no prefill engine is to see the request.
    fn bypass(&self) -> Option<BypassReason> {
        let never = self.settings.disaggregation.mode == DisaggregationMode::Never;
        let bypass = self.request.bypass_below(self.settings.hand_off.min_prompt_bytes);
        bypass.or(never.then_some(BypassReason::Never))
    }
}

/// What a request does next.
enum Next {
    /// Its decode leg, with the hand-off if there is one.
    Send(InFlight, Option<Lease>),
    /// It looks at what became of that.
    Sent(Arc<Peer>, Box<Sent>),
}

/// A decode leg, and whose blocks it was to have.
struct Sent {
    prefill: Option<Arc<Peer>>,
    answer: legs::Sent,
}

/// What a decode leg came to.
enum Answered {
    Client(Box<Response<RelayBody>>, MadeBy),
    Next(Next),
}

impl Core {
    /// Reads a request for one of the endpoints with two legs.
    pub(crate) fn read(
        &self,
        endpoint: Endpoint,
        exchange: &Exchange,
        body: Bytes,
    ) -> Result<Arc<Order>, ProxyError> {
        self.retries.deposit();
        let bytes = body.len();
        exchange.account.tell(|told| {
            told.received = bytes;
            told.key.clone_from(&exchange.client.key);
        });
        let settings = self.settings();
        let models = self.models.load();
        let default = models.default_name().map(|name| &**name);
        let request = ClientRequest::parse_or(endpoint, body, settings.hand_off.client_injected, default);
        let read = request.map_err(ProxyError::from).and_then(|mut request| {
            exchange.client.check_model(request.model())?;
            let shows = self.name_model(&models, &mut request, &settings, exchange)?;
            let of_model = self.metrics.of_model(request.model(), || self.pool.serves(request.model()));
            exchange.account.tell(|told| {
                told.of_model = Some(of_model);
                told.is_stream = request.wants_stream();
            });
            settings.admission.check_size(&request)?;
            let (model, stream) = (request.model(), request.wants_stream());
            exchange.account.read(model, stream, bytes, exchange.client.key.as_ref());
            let policies = settings.routing.policies(Some(model));
            Ok(Arc::new(Order { request, shows, settings, policies }))
        });
        read.inspect_err(|_| exchange.account.failed(Outcome::ClientError))
    }

    /// Serves one request. Dropping the future or the body aborts whatever leg is running and
    /// frees what P holds.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        order: &Arc<Order>,
        exchange: &Exchange,
    ) -> Result<Response<RelayBody>, ProxyError> {
        // A future is moved with each one around it that it becomes part of; so this one never is, and what is seldom
        // needed is no part of it.
        let legs = Box::pin(self.two_legs(order, exchange));
        let served = tokio::select! {
            served = legs => served,
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
        order: &Arc<Order>,
        exchange: &Exchange,
    ) -> Result<Response<RelayBody>, Stopped> {
        let settings = &order.settings;
        let mut tries = Tries::new(&settings.retry, exchange.account.clone());
        self.pool.learn(&self.registry);
        self.admit(settings, Some(&order.request), exchange).await?;
        exchange.account.step(Step::Admitted);
        tries.chunks = self.chunks_of(order);
        tries.cached = self.cached_by_events(&order.request, order.policies).await;
        // Both at once: without a D, a prefill would only strand blocks.
        let mut first = FirstChoice::default();
        let choose = || self.choose_both(order, exchange, &tries, &mut first);
        let in_flight = exchange.account.choosing(Stage::Decode, choose)?;
        tries.stays = first.stays;
        let explained = first.shown(order, exchange, &in_flight.peer);
        exchange.account.step_with(&in_flight.peer, Step::DecodeChosen);
        let mut next = self.first_try(order, exchange, in_flight, first.prefill, &mut tries).await?;
        loop {
            let (in_flight, mut lease) = match next {
                Next::Send(in_flight, lease) => (in_flight, lease),
                Next::Sent(peer, sent) => {
                    match self.answered(order, exchange, peer, sent, &mut tries).await? {
                        Answered::Client(response, made_by) => {
                            return Ok(wanted::explained_in(made_by.shown_in(*response), explained));
                        }
                        Answered::Next(again) => next = again,
                    }
                    continue;
                }
            };
            if lease.as_ref().is_some_and(Lease::is_expiring) {
                lease = None;
                self.without_hand_off(HandOffRefusal::Expiring, order, exchange)?;
            }
            if lease.as_ref().is_some_and(Lease::is_orphaned) {
                lease = None;
                self.without_hand_off(HandOffRefusal::EngineGone, order, exchange)?;
            }
            let peer = Arc::clone(&in_flight.peer);
            self.pool.prefixes.record(&tries.chunks, peer.routing.key);
            let prefill = lease.as_ref().and_then(Lease::prefill).cloned();
            let answer = match lease {
                Some(lease) if lease.is_followed() => {
                    self.followed(order, exchange, in_flight, lease, tries.resent).await
                }
                lease => self.decode(order, exchange, in_flight, lease, None, tries.resent).await,
            };
            next = Next::Sent(peer, Box::new(Sent { prefill, answer }));
        }
    }

    /// The first leg, or both where the engines push.
    async fn first_try(
        self: &Arc<Self>,
        order: &Arc<Order>,
        exchange: &Exchange,
        decode: InFlight,
        prefill: Option<InFlight>,
        tries: &mut Tries,
    ) -> Result<Next, Stopped> {
        let peer = Arc::clone(&decode.peer);
        let pushed =
            prefill.as_ref().and_then(|in_flight| self.push_of(order, exchange, &in_flight.peer, &peer));
        let (decode, prefill) = match (prefill, pushed) {
            (Some(prefill), Some(pushed)) => {
                exchange.account.step_with(&prefill.peer, Step::PrefillChosen);
                self.pool.prefixes.record(&tries.chunks, peer.routing.key);
                let by = Some(Arc::clone(&prefill.peer));
                match Box::pin(self.both_legs(order, exchange, (prefill, decode), pushed, tries)).await? {
                    Both::Sent(answer) => {
                        return Ok(Next::Sent(peer, Box::new(Sent { prefill: by, answer: *answer })));
                    }
                    Both::Again(lease) => {
                        exchange.account.prefilled();
                        return Ok(Next::Send(peer.enter(), lease));
                    }
                    Both::AnotherPrefill(prefill) => (peer.enter(), prefill),
                }
            }
            (prefill, _) => (decode, prefill),
        };
        let lease = self.hand_off(order, exchange, &decode.peer, prefill, tries).await?;
        exchange.account.prefilled();
        Ok(Next::Send(decode, lease))
    }

    /// What comes of a decode engine's answer, or of its failure.
    async fn answered(
        self: &Arc<Self>,
        order: &Arc<Order>,
        exchange: &Exchange,
        peer: Arc<Peer>,
        sent: Box<Sent>,
        tries: &mut Tries,
    ) -> Result<Answered, Stopped> {
        let settings = &order.settings;
        let Sent { prefill, answer } = *sent;
        let mut lease = None;
        let failure = match answer {
            Err((failure, unseen)) => {
                lease = unseen;
                failure
            }
            Ok((answer, guards)) => {
                let status = answer.status().as_u16();
                if retry::after_decode_status(status) == Verdict::Again {
                    tries.decode.push(Arc::clone(&peer));
                    if let Some(next) = self.another_decode(order, exchange, tries) {
                        engine_answered(&peer, status);
                        drop((answer, guards));
                        let lease = self.hand_off(order, exchange, &next.peer, None, tries).await?;
                        return Ok(Answered::Next(Next::Send(next, lease)));
                    }
                }
                match self.relay(settings, answer, guards).await {
                    Ok(response) => {
                        let made_by = MadeBy::of(settings, prefill.as_ref(), Some(&peer));
                        return Ok(Answered::Client(Box::new(response), made_by));
                    }
                    Err(failure) => failure,
                }
            }
        };
        let next = Box::pin(self.after_failed_decode(order, exchange, peer, failure, tries)).await?;
        if lease.is_none() {
            lease = self.hand_off(order, exchange, &next.peer, None, tries).await?;
        }
        Ok(Answered::Next(Next::Send(next, lease)))
    }

    /// The decode engine to try after one has failed.
    async fn after_failed_decode(
        &self,
        order: &Order,
        exchange: &Exchange,
        peer: Arc<Peer>,
        failure: UpstreamFailure,
        tries: &mut Tries,
    ) -> Result<InFlight, ProxyError> {
        // A new hand-off for an engine that may be gone would only strand more blocks.
        if tries.resend(failure) && self.is_alive(&peer, &order.settings).await {
            return Ok(peer.enter());
        }
        let error = self.engine_failed(&peer, failure);
        tries.decode.push(peer);
        match retry::after_decode(failure) {
            Verdict::GiveUp => Err(error),
            Verdict::Again | Verdict::AgainWithTheSameHandOff => {
                self.another_decode(order, exchange, tries).ok_or(error)
            }
        }
    }

    /// Whether an engine that has just dropped a connection takes a new one.
    async fn is_alive(&self, peer: &Peer, settings: &Settings) -> bool {
        let leg = Leg {
            stage: peer.spec.role.stage(),
            peer,
            method: Method::GET,
            path: &settings.probe.path,
            headers: own_headers(&RequestId::accept(None)),
            body: Spliced::from(Bytes::new()),
        };
        self.upstream.send_anew(leg, settings.probe.timeout).await.is_ok()
    }

    /// Another decode engine, if there is one and the budgets allow it.
    fn another_decode(&self, order: &Order, exchange: &Exchange, tries: &mut Tries) -> Option<InFlight> {
        let next = self.choose_decode(order, exchange, tries).ok()?;
        tries.again(self, Stage::Decode).then_some(next)
    }
}
