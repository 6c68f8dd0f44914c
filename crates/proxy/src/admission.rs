//! Whether a request may run now, must wait for its turn, or is told when to come again: before any
//! engine has work with it. Holds no lock over an await; whoever stops waiting leaves no trace.

mod named;
mod queue;
mod rate;
mod settings;
pub(crate) mod simulated;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use http::HeaderMap;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::Core;
use crate::disagg::Exchange;
use crate::error::{ProxyError, Stage};
use crate::metrics::{Metrics, Took};
use crate::request::{BadRequest, ClientRequest};
use crate::routing::roster::FEW;
use crate::settings::{OnMissing, Settings};
use crate::trace::SpanKind;

use named::Named;
pub(crate) use queue::Counts;
use queue::{Ask, Full, NONE, Offer, Order, Queue, Refusal, ScopeId, Scopes, ids};
pub use settings::{AdmissionSettings, NamedLimits, StageLimits};

/// Says how urgent a request is: a whole number, lower first, as in vLLM's own `priority`.
const PRIORITY: &str = "x-kvbaton-priority";

/// The least and the most urgent.
const PRIORITIES: std::ops::RangeInclusive<i64> = -1000..=1000;

/// Roughly, for text.
const BYTES_PER_TOKEN: usize = 4;

/// What a request ran against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusyScope {
    /// A stage's limit.
    Stage(Stage),
    /// The model's limit.
    Model,
    /// The API key's limit.
    Key,
}

impl BusyScope {
    /// The name in metrics and texts.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Stage(stage) => stage.label(),
            Self::Model => "model",
            Self::Key => "key",
        }
    }
}

/// Why a request was not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusyReason {
    /// As many run and wait as may.
    Full,
    /// Too many came of late.
    Rate,
    /// Its turn did not come in time.
    Late,
}

impl BusyReason {
    const fn label(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Rate => "rate",
            Self::Late => "late",
        }
    }
}

/// A request that was not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.text())]
pub struct Busy {
    /// What it ran against.
    pub scope: BusyScope,
    /// Why.
    pub reason: BusyReason,
    /// When another try may succeed, by the pace of the last while.
    pub after: Duration,
}

impl Busy {
    fn text(&self) -> String {
        let whose = match self.scope {
            BusyScope::Stage(stage) => format!("the {} engines have", stage.label()),
            BusyScope::Model => "the model has".to_owned(),
            BusyScope::Key => "the API key has".to_owned(),
        };
        match self.reason {
            BusyReason::Full => format!("{whose} as many requests as allowed"),
            BusyReason::Rate => format!("{whose} got more requests of late than allowed"),
            BusyReason::Late => format!("{whose} as many requests as allowed, and no turn came in time"),
        }
    }
}

const PREFILL: ScopeId = 0;
const DECODE: ScopeId = 1;

/// Of many engines not each request counts how many are open.
const RECOUNT: Duration = Duration::from_millis(100);

/// All who run and wait.
#[derive(Debug)]
pub(crate) struct Admission {
    queue: Mutex<Queue<oneshot::Sender<()>>>,
    rules: ArcSwap<Rules>,
    /// How many engines of each stage were open, and when that was counted.
    counted: [Mutex<Option<(usize, Instant)>>; 2],
    metrics: Arc<Metrics>,
}

/// Which limits there are.
#[derive(Debug)]
struct Rules {
    named: Named,
    stages: [StageLimits; 2],
    longest_wait: Duration,
}

impl Rules {
    fn new(settings: &AdmissionSettings, named: Named) -> Self {
        let stages = [settings.prefill.clone(), settings.decode.clone()];
        Self { named, stages, longest_wait: settings.longest_wait }
    }
}

impl Admission {
    pub(crate) fn new(settings: &AdmissionSettings, metrics: Arc<Metrics>) -> Arc<Self> {
        let (named, bounds) = Named::default().with(settings);
        let queue = Queue::new(&bounds, settings.waiting, settings.longest_wait, Instant::now());
        let rules = ArcSwap::from_pointee(Rules::new(settings, named));
        Arc::new(Self { queue: Mutex::new(queue), rules, counted: Default::default(), metrics })
    }

    /// Takes over other limits: for who comes, and for who waits where there are more places now. Who runs
    /// stays counted.
    pub(crate) fn reload(&self, settings: &AdmissionSettings, engines: impl Fn(Stage) -> usize) {
        let (named, mut bounds) = self.rules.load().named.with(settings);
        for stage in [Stage::Prefill, Stage::Decode] {
            let bound = &mut bounds[usize::from(scope_of(stage))];
            let limits = if stage == Stage::Prefill { &settings.prefill } else { &settings.decode };
            bound.requests = limits.places(engines(stage)).unwrap_or_default();
        }
        let mut woken = Vec::new();
        let (waiting, longest_wait) = (settings.waiting, settings.longest_wait);
        self.queue.lock().rebound(&bounds, waiting, longest_wait, Instant::now(), &mut woken);
        self.rules.store(Arc::new(Rules::new(settings, named)));
        tell(woken);
    }

    /// Takes in how many engines of a stage are open to new requests.
    pub(crate) fn resize(&self, stage: Stage, engines: impl FnOnce() -> usize) {
        let rules = self.rules.load();
        let limits = &rules.stages[stage as usize];
        if limits.per_engine == 0 {
            return;
        }
        let (mut counted, now) = (self.counted[stage as usize].lock(), Instant::now());
        // Counting takes as long as there are engines; of many one more or less matters little for so long.
        if counted.is_some_and(|(engines, at)| engines > FEW && now < at + RECOUNT) {
            return;
        }
        let engines = engines();
        *counted = Some((engines, now));
        drop(counted);
        let Some(places) = limits.places(engines) else { return };
        let mut woken = Vec::new();
        self.queue.lock().resize(scope_of(stage), places, &mut woken);
        tell(woken);
    }

    /// Waits for a place, at most as long as one may. Dropping the future gives the turn to others.
    ///
    /// # Errors
    /// There is none, or none came in time.
    async fn enter(self: &Arc<Self>, ask: &Ask, began: Instant) -> Result<Permit, Busy> {
        let (sender, receiver) = oneshot::channel();
        let offer = self.queue.lock().offer(ask, sender, began);
        let mut waiting = match offer {
            Offer::Runs => return Ok(self.permit(ask.scopes, began)),
            Offer::Refused(refusal) => return Err(self.refused(refusal, None)),
            Offer::Waits(order) => Waiting { admission: self, scopes: ask.scopes, order: Some(order) },
        };
        let longest_wait = self.rules.load().longest_wait;
        let came = timeout(longest_wait, receiver).await;
        self.metrics.took(Took::Wait, began.elapsed(), None);
        let mut queue = self.queue.lock();
        let order = waiting.order.take();
        let late = came.is_err() && order.is_some_and(|order| queue.withdraw(ask.scopes, order));
        if !late {
            drop(queue);
            return Ok(self.permit(ask.scopes, Instant::now()));
        }
        let refusal = queue.refusal(queue.blocking(ask.scopes).unwrap_or(DECODE));
        drop(queue);
        Err(self.refused(refusal, Some(BusyReason::Late)))
    }

    fn permit(self: &Arc<Self>, scopes: Scopes, since: Instant) -> Permit {
        Permit { admission: Arc::clone(self), scopes, since }
    }

    fn refused(&self, refusal: Refusal, reason: Option<BusyReason>) -> Busy {
        let scope = match refusal.scope {
            PREFILL => BusyScope::Stage(Stage::Prefill),
            DECODE => BusyScope::Stage(Stage::Decode),
            id if self.rules.load().named.is_model(id) => BusyScope::Model,
            _ => BusyScope::Key,
        };
        let reason = reason.unwrap_or(match refusal.full {
            Full::Places => BusyReason::Full,
            Full::Rate => BusyReason::Rate,
        });
        self.metrics.turned_away(scope.label(), reason.label());
        Busy { scope, reason, after: refusal.after }
    }

    fn leave(&self, scopes: Scopes, held: Duration) {
        let mut woken = Vec::new();
        self.queue.lock().leave(scopes, held, &mut woken);
        tell(woken);
    }

    /// Puts both stages' counts into the metrics.
    pub(crate) fn count(&self) {
        let queue = self.queue.lock();
        for stage in [Stage::Prefill, Stage::Decode] {
            self.metrics.admission(stage, queue.counts(scope_of(stage)));
        }
    }
}

const fn scope_of(stage: Stage) -> ScopeId {
    match stage {
        Stage::Prefill => PREFILL,
        Stage::Decode => DECODE,
    }
}

/// Tells those whose turn it is. One that has just left gives its place back itself.
fn tell(woken: Vec<oneshot::Sender<()>>) {
    for sender in woken {
        let _ = sender.send(());
    }
}

/// One that waits; dropped, it waits no more.
struct Waiting<'a> {
    admission: &'a Admission,
    scopes: Scopes,
    order: Option<Order>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Some(order) = self.order.take() else { return };
        let still_waited = self.admission.queue.lock().withdraw(self.scopes, order);
        if !still_waited {
            // Its turn had just come.
            self.admission.leave(self.scopes, Duration::ZERO);
        }
    }
}

/// A running request's places; given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    admission: Arc<Admission>,
    scopes: Scopes,
    since: Instant,
}

impl Permit {
    /// The prefill engine has done its part.
    pub(crate) fn prefilled(&mut self) {
        if let Some(place) = self.scopes.iter_mut().find(|scope| **scope == PREFILL) {
            *place = NONE;
            self.admission.leave([PREFILL, NONE, NONE, NONE], self.since.elapsed());
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if ids(self.scopes).next().is_some() {
            self.admission.leave(self.scopes, self.since.elapsed());
        }
    }
}

impl AdmissionSettings {
    /// Refuses what asks for more than one request may have.
    ///
    /// # Errors
    /// It does.
    pub(crate) fn check_size(&self, request: &ClientRequest) -> Result<(), BadRequest> {
        let prompt = request.prompt_bytes();
        if self.prompt_bytes != 0 && prompt > self.prompt_bytes {
            return Err(BadRequest::PromptTooLarge { bytes: prompt, limit: self.prompt_bytes });
        }
        match request.max_tokens() {
            Some((field, asked)) if self.max_tokens != 0 && asked > self.max_tokens => {
                Err(BadRequest::TooManyTokens { field, limit: self.max_tokens })
            }
            _ => Ok(()),
        }
    }
}

impl Core {
    /// Waits for the places that a request needs; they are kept until its account is closed.
    ///
    /// # Errors
    /// Nothing can serve it, or there is no place.
    pub(crate) async fn admit(
        &self,
        settings: &Settings,
        request: Option<&ClientRequest>,
        exchange: &Exchange,
    ) -> Result<(), ProxyError> {
        let admission = &self.admission;
        if !self.pool.is_any_ready(Stage::Decode) {
            return Err(ProxyError::NoPeer(Stage::Decode));
        }
        let least = settings.hand_off.min_prompt_bytes;
        let no_prefill = !self.pool.is_any_ready(Stage::Prefill);
        let two_legs = request.is_some_and(|request| request.bypass_below(least).is_none());
        if two_legs && no_prefill && settings.hand_off.on_no_prefill == OnMissing::Fail {
            // Waiting would not help it; what it is answered is decided where the leg would run.
            return Ok(());
        }
        admission.resize(Stage::Prefill, || self.pool.ready(Stage::Prefill));
        admission.resize(Stage::Decode, || self.pool.ready(Stage::Decode));
        let rules = admission.rules.load();
        let model = request.and_then(|request| rules.named.model(request.model()));
        let key = exchange.client.key.as_deref().and_then(|key| rules.named.key(key));
        drop(rules);
        let mut scopes = [NONE; 4];
        let of = [(two_legs && !no_prefill).then_some(PREFILL), Some(DECODE), model, key];
        for (place, scope) in scopes.iter_mut().zip(of.into_iter().flatten()) {
            *place = scope;
        }
        let ask = Ask {
            scopes,
            priority: if settings.admission.client_priority {
                priority(&exchange.headers, request)?
            } else {
                0
            },
            tokens: request.map_or(0, |request| request.prompt_bytes().div_ceil(BYTES_PER_TOKEN) as u64),
            client: exchange.client.key.clone(),
        };
        let (began, mut span) = (Instant::now(), exchange.account.trace().span("queue", SpanKind::Internal));
        let entered = admission.enter(&ask, began).await;
        exchange.account.tell(|told| told.waited = Some(began.elapsed()));
        let permit = entered.map_err(|busy| {
            span.failed(busy.reason.label());
            ProxyError::Busy(busy)
        })?;
        exchange.account.hold(permit);
        Ok(())
    }
}

/// How urgent the client says that it is, in a header or else as vLLM reads it in the body.
fn priority(headers: &HeaderMap, request: Option<&ClientRequest>) -> Result<i32, BadRequest> {
    let Some(value) = headers.get(PRIORITY) else {
        let said = request.and_then(ClientRequest::priority).unwrap_or_default();
        return Ok(said.clamp(*PRIORITIES.start(), *PRIORITIES.end()) as i32);
    };
    let number = value.to_str().ok().and_then(|text| text.trim().parse::<i64>().ok());
    match number.filter(|number| PRIORITIES.contains(number)) {
        Some(number) => Ok(number as i32),
        None => Err(BadRequest::Priority),
    }
}

#[cfg(test)]
mod tests;
