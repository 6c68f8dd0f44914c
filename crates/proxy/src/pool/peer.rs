//! One engine of the fleet: what the operator said of it, what was observed, what is in flight.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::{ArcSwap, ArcSwapOption};
use http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use http::uri::{Authority, Scheme, Uri};
use kv_connector::protocol::params::Generation;
use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::breaker::{BreakerSettings, Ticket};
use super::health::{Health, HealthView};
use super::load::{EngineLoad, EngineLoadView};
use super::pairing::Identity;
pub use super::spec::{Authorization, PeerSpec, PeerSpecError, Role, is_host};
use super::standing::{Restarts, Standing};
use super::traffic::Traffic;
use crate::notify::{Notifier, NotifyView};
use crate::registry::{EngineState, canonical_base_url};
use crate::request::Endpoint;
use crate::routing::facts::Facts;
use crate::routing::kv_events::{KvEventsView, PeerEvents};
use crate::side_channel::channels::{Channels, SideChannelView};
use crate::upstream::X_DATA_PARALLEL_RANK;
use crate::warm_up::Warmth;
use crate::wire::Place;

/// Most engine ids that are remembered of one peer: its data-parallel ranks, and some restarts.
const MAX_ENGINE_IDS: usize = 256;

/// Most engines that are remembered as met; far more than a fleet has at a time.
const MAX_MET: usize = 4096;

/// What was learnt about a peer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observed {
    pub(crate) state: PeerState,
    /// Probes in a row without an answer.
    pub(crate) silent: u32,
    pub(crate) generation: Option<Generation>,
    pub(crate) version: Option<String>,
    pub(crate) models: Arc<[ServedModel]>,
    /// How often the ids in it have changed.
    pub(crate) models_changed: u64,
    pub(crate) engine_ids: BTreeSet<String>,
    /// Tensor-parallel size, as its last hand-off said.
    pub(crate) tp_size: Option<u32>,
    pub(crate) last_error: Option<PeerFault>,
}

/// Whether a peer takes requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerState {
    /// Never answered a probe yet.
    #[default]
    Unknown,
    /// Answered its last probe.
    Ready,
    /// Did not answer, or not healthily.
    Unreachable,
}

/// A model in a peer's list, with the text of its entry.
#[derive(Clone, Debug)]
pub(crate) struct ServedModel {
    pub(crate) id: String,
    pub(crate) entry: Box<RawValue>,
}

impl ServedModel {
    /// Whether it is an adapter of another model.
    fn is_adapter(&self) -> bool {
        #[derive(serde::Deserialize)]
        struct Entry {
            parent: Option<String>,
        }
        serde_json::from_str::<Entry>(self.entry.get()).is_ok_and(|entry| entry.parent.is_some())
    }
}

/// The last thing that went wrong with a peer.
#[derive(Clone, Debug, Serialize)]
pub struct PeerFault {
    /// What went wrong, as a code.
    pub kind: String,
    /// When, in seconds of Unix time.
    pub at: u64,
}

impl PeerFault {
    pub(crate) fn now(kind: impl Into<String>) -> Self {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self { kind: kind.into(), at }
    }
}

/// One engine of the fleet.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) id: String,
    /// The id, for whoever keeps it.
    pub(crate) name: Arc<str>,
    pub(crate) spec: PeerSpec,
    wire_place: Place,
    authority: Authority,
    prefix: String,
    replaced_authorization: Option<HeaderValue>,
    /// Its URL in canonical spelling.
    pub(crate) address: Option<String>,
    in_flight: AtomicUsize,
    pub(crate) health: Arc<Health>,
    /// Whether a hand-off of it has named an address that only its own host can use.
    private_address: AtomicBool,
    pub(crate) standing: Standing,
    pub(crate) warmth: Warmth,
    probed: Mutex<Option<Instant>>,
    /// Prefill engines that this decode engine has read from; emptied when it may have restarted.
    met: RwLock<HashSet<String>>,
    pub(crate) observed: RwLock<Observed>,
    /// What the registry says of it; made anew when the registry changes.
    pub(crate) identity: ArcSwap<Identity>,
    /// Its side channels as the router reads them.
    pub(crate) channels: Channels,
    /// What its engines' KV events said.
    pub(crate) events: PeerEvents,
    /// What its metrics page said last.
    pub(crate) load: ArcSwapOption<EngineLoad>,
    /// What this decode peer was handed off of late.
    pub(crate) traffic: Traffic,
    /// Failures that requests met.
    errors: AtomicU64,
    /// What routing knows of it.
    pub(crate) routing: Facts,
}

impl Peer {
    pub(crate) fn new(id: String, spec: PeerSpec) -> Result<Self, PeerSpecError> {
        let bad_url = || PeerSpecError::Url { url: spec.url.clone() };
        let uri: Uri = spec.url.parse().map_err(|_| bad_url())?;
        let scheme = uri.scheme().cloned().ok_or_else(bad_url)?;
        if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
            return Err(PeerSpecError::Scheme { url: spec.url.clone() });
        }
        let authority = uri.authority().cloned().ok_or_else(bad_url)?;
        if authority.host().is_empty() || authority.as_str().contains('@') || uri.query().is_some() {
            return Err(bad_url());
        }
        let replaced_authorization = match spec.authorization {
            Authorization::Replace => {
                let token = spec.token.as_deref().filter(|t| !t.is_empty()).ok_or(PeerSpecError::Token)?;
                let mut value =
                    HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| PeerSpecError::Token)?;
                value.set_sensitive(true);
                Some(value)
            }
            Authorization::Forward | Authorization::None => None,
        };
        spec.check_details()?;
        let prefix = uri.path().trim_end_matches('/').to_owned();
        let observed = Observed { generation: spec.generation, ..Observed::default() };
        let channels = Channels::of(&spec);
        let events = PeerEvents::of(&spec);
        Ok(Self {
            name: id.as_str().into(),
            id,
            address: canonical_base_url(&spec.url),
            spec,
            wire_place: Place::new(scheme == Scheme::HTTPS, authority.clone()),
            authority,
            prefix,
            replaced_authorization,
            in_flight: AtomicUsize::new(0),
            health: Arc::new(Health::new(BreakerSettings::default(), None)),
            private_address: AtomicBool::new(false),
            standing: Standing::default(),
            warmth: Warmth::default(),
            probed: Mutex::default(),
            met: RwLock::default(),
            observed: RwLock::new(observed),
            identity: ArcSwap::default(),
            channels,
            events,
            load: ArcSwapOption::empty(),
            traffic: Traffic::default(),
            errors: AtomicU64::new(0),
            routing: Facts::default(),
        })
    }

    /// Takes over what was seen of the same engines under another description.
    pub(crate) fn learns_from(&self, before: &Self) {
        let seen = before.observed.read().clone();
        let generation = self.spec.generation.or(seen.generation);
        *self.observed.write() = Observed { generation, ..seen };
        *self.met.write() = before.met.read().clone();
    }

    /// Where its connections lead.
    pub(crate) const fn wire_place(&self) -> &Place {
        &self.wire_place
    }

    /// What comes before each path on it, without a slash at the end.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Host part of the URL, without brackets.
    pub(crate) fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    /// A common mistake: the engines' API paths already begin with `/v1`.
    pub(crate) fn ends_in_v1(&self) -> bool {
        self.prefix.ends_with("/v1")
    }

    /// Applies the peer's policy to the client's `Authorization`.
    pub(crate) fn authorize(&self, headers: &mut HeaderMap) {
        match self.spec.authorization {
            Authorization::Forward => {}
            Authorization::None => {
                headers.remove(AUTHORIZATION);
            }
            Authorization::Replace => {
                if let Some(value) = &self.replaced_authorization {
                    headers.insert(AUTHORIZATION, value.clone());
                }
            }
        }
    }

    /// Names the rank that shall serve the request, if this peer is one of several.
    pub(crate) fn place(&self, headers: &mut HeaderMap) {
        if let Some(rank) = self.spec.dp_rank {
            headers.insert(X_DATA_PARALLEL_RANK, HeaderValue::from(rank));
        }
    }

    /// Whether it takes hand-offs on an endpoint. Version 2 and what came before the current generation
    /// read `kv_transfer_params` in OpenAI's older two dialects only.
    pub(crate) fn hands_off_on(&self, endpoint: Endpoint) -> bool {
        match (&self.spec.hand_offs, endpoint) {
            (Some(endpoints), _) => endpoints.contains(&endpoint),
            (None, Endpoint::Completions | Endpoint::ChatCompletions) => true,
            (None, Endpoint::Responses | Endpoint::Messages) => self.generation() == Some(Generation::V14),
        }
    }

    /// Remembers when it was probed last.
    pub(crate) fn probed_at(&self, now: Instant) {
        *self.probed.lock() = Some(now);
    }

    /// Whether its last probe is so long ago.
    pub(crate) fn is_due(&self, now: Instant, interval: Duration) -> bool {
        self.probed.lock().is_none_or(|last| now.saturating_duration_since(last) >= interval)
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.observed.read().state == PeerState::Ready
    }

    /// Whether it answers and may have new requests.
    pub(crate) fn is_open(&self) -> bool {
        self.standing.is_open() && self.is_ready() && self.warmth.is_warm()
    }

    /// The connector generation: the operator's word, else the registry's, else by its version.
    pub(crate) fn generation(&self) -> Option<Generation> {
        self.spec.generation.or(self.identity.load().generation()).or(self.observed.read().generation)
    }

    pub(crate) fn serves(&self, model: &str) -> bool {
        self.observed.read().models.iter().any(|served| served.id == model)
    }

    /// Whether a model is an adapter of another one there.
    pub(crate) fn is_adapter(&self, model: &str) -> bool {
        self.observed.read().models.iter().any(|served| served.id == model && served.is_adapter())
    }

    /// Whether its engines may have requests of a model, by the credential with which they registered. Who
    /// came by registration serves nothing else; a peer that the settings or an operator named is their word.
    pub(crate) fn may_have(&self, model: Option<&str>) -> bool {
        let identity = self.identity.load();
        let allow = || identity.engines.iter().all(|engine| engine.bound.covers(model));
        !self.standing.is_adopted() || (!identity.engines.is_empty() && allow())
    }

    /// Whether its engines may have requests of some models only.
    pub(crate) fn is_bound(&self) -> bool {
        !self.may_have(None)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// Remembers the engine id that a hand-off of this peer named; whether it is a new one.
    pub(crate) fn saw_engine(&self, engine_id: &str) -> bool {
        if self.observed.read().engine_ids.contains(engine_id) {
            return false;
        }
        let mut observed = self.observed.write();
        if observed.engine_ids.len() >= MAX_ENGINE_IDS {
            observed.engine_ids.clear();
        }
        observed.engine_ids.insert(engine_id.to_owned())
    }

    /// Remembers that a hand-off named such an address; whether it is the first one.
    pub(crate) fn is_first_private_address(&self) -> bool {
        !self.private_address.swap(true, Ordering::Relaxed)
    }

    /// Remembers the tensor-parallel size that a hand-off of this peer told; whether it is another one.
    pub(crate) fn saw_tp_size(&self, tp_size: u32) -> bool {
        if self.observed.read().tp_size == Some(tp_size) {
            return false;
        }
        self.observed.write().tp_size = Some(tp_size);
        true
    }

    /// Remembers that this decode engine has read from that prefill engine.
    pub(crate) fn knows_engine(&self, engine_id: &str) {
        if !self.has_met(engine_id) {
            let mut met = self.met.write();
            if met.len() >= MAX_MET {
                met.clear();
            }
            met.insert(engine_id.to_owned());
        }
    }

    /// Whether this decode engine has read from that prefill engine before.
    pub(crate) fn has_met(&self, engine_id: &str) -> bool {
        self.met.read().contains(engine_id)
    }

    /// Records a failure that a request met; a lost connection makes the peer unreachable until
    /// its next good probe.
    pub(crate) fn failed(&self, kind: &str, unreachable: bool) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        let mut observed = self.observed.write();
        observed.last_error = Some(PeerFault::now(kind));
        if unreachable {
            observed.state = PeerState::Unreachable;
            drop(observed);
            self.forget_met();
        }
    }

    /// How many failures requests met with it.
    pub(crate) fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// The engine may have restarted: it knows nobody any more.
    pub(crate) fn forget_met(&self) {
        self.met.write().clear();
    }

    /// Counts one exchange until the guard is dropped.
    pub(crate) fn enter(self: &Arc<Self>) -> InFlight {
        let ticket = self.health.enter(true);
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        InFlight { peer: Arc::clone(self), ticket, tokens: 0 }
    }

    /// As [`Peer::enter`], unless its breaker is shut.
    pub(crate) fn try_enter(self: &Arc<Self>) -> Option<InFlight> {
        let ticket = self.health.enter(false)?;
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        Some(InFlight { peer: Arc::clone(self), ticket: Some(ticket), tokens: 0 })
    }

    pub(crate) fn view(&self, notifier: &Notifier) -> PeerView {
        let generation = self.generation();
        let observed = self.observed.read();
        let mut engine_ids = self.identity.load().engine_ids();
        engine_ids.extend(observed.engine_ids.iter().cloned());
        let engines = &self.identity.load().engines;
        let notify = notifier.view(self.spec.notify, self.spec.nixl_version.as_deref(), engines);
        PeerView {
            id: self.id.clone(),
            role: self.spec.role,
            url: self.spec.url.clone(),
            dp_rank: self.spec.dp_rank,
            state: observed.state,
            generation,
            version: observed.version.clone(),
            models: observed.models.iter().map(|served| served.id.clone()).collect(),
            engine_ids: engine_ids.into_iter().collect(),
            in_flight: self.in_flight(),
            accepts: self.is_open(),
            health: self.health.view(),
            source: self.standing.origin().to_string(),
            adopted: self.standing.is_adopted(),
            leaving: self.standing.is_leaving(),
            drained: self.standing.is_drained(),
            quarantined: self.standing.is_quarantined(),
            engine_state: self.identity.load().state(),
            restarted: self.standing.restarts(),
            authorization: self.spec.authorization,
            last_error: observed.last_error.clone(),
            side_channels: self.channels.views(),
            kv_events: self.events.views(),
            errors: self.errors(),
            load: self.load.load().as_ref().map(|load| load.view()),
            notify,
        }
    }
}

/// One exchange in flight with a peer; ends when dropped.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) peer: Arc<Peer>,
    ticket: Option<Ticket>,
    /// Prompt tokens that wait with it.
    tokens: u64,
}

impl InFlight {
    /// The peer computes a prompt of so many tokens.
    pub(crate) fn with_prompt(mut self, tokens: f64) -> Self {
        let tokens = tokens as u64;
        self.peer.routing.enter(tokens);
        self.tokens += tokens;
        self
    }

    /// The prompt that the peer had to compute is computed.
    pub(crate) fn prompt_is_done(&mut self) {
        self.peer.routing.leave(std::mem::take(&mut self.tokens));
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.peer.health.leave(ticket);
        }
        self.peer.routing.leave(self.tokens);
        self.peer.in_flight.fetch_sub(1, Ordering::SeqCst);
        self.peer.standing.moved.notify_waiters();
    }
}

/// A peer as operators see it.
#[derive(Clone, Debug, Serialize)]
pub struct PeerView {
    /// Stable id, usable in a path.
    pub id: String,
    /// Its role.
    pub role: Role,
    /// Its base URL.
    pub url: String,
    /// Its data-parallel rank, if it is one of several behind its URL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dp_rank: Option<u32>,
    /// Whether it takes requests.
    pub state: PeerState,
    /// Connector generation, once known.
    pub generation: Option<Generation>,
    /// The version that the engine reports, once known.
    pub version: Option<String>,
    /// Ids of the models that it lists.
    pub models: Vec<String>,
    /// Engine ids that the registry or its hand-offs named.
    pub engine_ids: Vec<String>,
    /// Exchanges in flight.
    pub in_flight: usize,
    /// Whether it gets new requests.
    pub accepts: bool,
    /// What its own exchanges tell of it.
    pub health: HealthView,
    /// Where it comes from: `settings`, `operator`, `registration`, or the name of the source that found it.
    pub source: String,
    /// Whether it came by its engines' registration.
    pub adopted: bool,
    /// Whether its engines are gone and it goes when what it has has ended.
    pub leaving: bool,
    /// Whether an operator keeps new requests from it.
    pub drained: bool,
    /// Whether an operator keeps it from hand-offs.
    pub quarantined: bool,
    /// The state of its registered engines, that of the one furthest from serving.
    pub engine_state: Option<EngineState>,
    /// How often its engines restarted, if they did.
    pub restarted: Option<Restarts>,
    /// What becomes of the client's `Authorization`.
    pub authorization: Authorization,
    /// The last failure, if there was one.
    pub last_error: Option<PeerFault>,
    /// Its ZMQ side channels as the router reads them.
    pub side_channels: Vec<SideChannelView>,
    /// Its engines' KV events, where the router is told of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kv_events: Vec<KvEventsView>,
    /// Failures that requests met with it.
    pub errors: u64,
    /// How busy the engine says that it is, if its metrics page is read.
    pub load: Option<EngineLoadView>,
    /// Whether it is told over NIXL of hand-offs that will not be read.
    pub notify: NotifyView,
}
