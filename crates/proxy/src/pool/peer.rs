//! One engine of the fleet: what the operator said of it, what was observed, what is in flight.

mod in_flight;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use http::uri::{Authority, Scheme, Uri};
use kv_connector::protocol::params::{Generation, TransferMode};
use parking_lot::{Mutex, RwLock};
use serde::Serialize;
use tokio::time::Instant;

use super::breaker::BreakerSettings;
use super::health::{Health, HealthView};
use super::load::{EngineLoad, EngineLoadView};
pub(crate) use super::observed::ServedModel;
use super::observed::{Observations, Observed};
pub use super::observed::{PeerFault, PeerState};
use super::pairing::Identity;
pub use super::spec::{Authorization, PeerSpec, PeerSpecError, Role, is_host};
use super::standing::{Restarts, Standing};
use super::traffic::Traffic;
use crate::handoff::HandedOff;
use crate::notify::{Notifier, NotifyView};
use crate::registry::{EngineState, canonical_base_url};
use crate::request::Endpoint;
use crate::routing::facts::Facts;
use crate::routing::kv_events::{KvEventsView, PeerEvents};
use crate::side_channel::channels::{Channels, NamedChannel, SideChannelView};
use crate::upstream::X_DATA_PARALLEL_RANK;
use crate::warm_up::Warmth;
use crate::wire::Place;
pub(crate) use in_flight::InFlight;

/// Most engine ids that are remembered of one peer: its data-parallel ranks, and some restarts.
const MAX_ENGINE_IDS: usize = 256;

/// Most engines that are remembered as met; far more than a fleet has at a time.
const MAX_MET: usize = 4096;

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
    pub(crate) observed: Observations,
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
    /// The engine that writes its blocks and its side channel, as its last hand-off told.
    channel_told: ArcSwapOption<(String, NamedChannel)>,
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
            observed: Observations::new(observed),
            identity: ArcSwap::default(),
            channels,
            events,
            load: ArcSwapOption::empty(),
            traffic: Traffic::default(),
            errors: AtomicU64::new(0),
            routing: Facts::default(),
            channel_told: ArcSwapOption::empty(),
        })
    }

    /// Takes over what was seen of the same engines under another description.
    pub(crate) fn learns_from(&self, before: &Self) {
        let mut seen = Observed::clone(&before.observed.now());
        seen.generation = self.spec.generation.or(seen.generation);
        self.observed.change(|observed| *observed = seen);
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
            // There engines do not look at the id by which the two legs find each other.
            (None, Endpoint::Responses) if self.pushes() => false,
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
        self.observed.is_ready()
    }

    /// Whether it answers and may have new requests.
    pub(crate) fn is_open(&self) -> bool {
        self.standing.is_open() && self.is_ready() && self.warmth.is_warm()
    }

    /// The connector generation: the operator's word, else the registry's, else by its version.
    pub(crate) fn generation(&self) -> Option<Generation> {
        self.spec.generation.or(self.identity.load().generation()).or(self.observed.now().generation)
    }

    /// Which side drives the copy: the operator's word, else the registry's, else what its hand-offs told.
    pub(crate) fn transfer_mode(&self) -> Option<TransferMode> {
        self.spec
            .transfer_mode
            .or_else(|| self.identity.load().transfer_mode())
            .or_else(|| self.observed.now().transfer_mode)
    }

    /// Whether prefill engines write its blocks.
    pub(crate) fn pushes(&self) -> bool {
        self.transfer_mode() == Some(TransferMode::Push)
    }

    /// Remembers where decode engines announce themselves to the engine that made a hand-off, if there is but one.
    pub(crate) fn saw_channel(&self, hand_off: &HandedOff) {
        if hand_off.mode != TransferMode::Push
            || self
                .channel_told
                .load()
                .as_ref()
                .is_some_and(|told| told.0 == hand_off.engine_id && told.1 == hand_off.channel)
        {
            return;
        }
        let several = self.spec.dp_size.is_some_and(|size| size > 1) && self.spec.dp_rank.is_none();
        let others = self.observed.now().engine_ids.iter().any(|id| *id != hand_off.engine_id);
        let told = (!several && !others).then(|| (hand_off.engine_id.clone(), hand_off.channel.clone()));
        self.channel_told.store(told.map(Arc::new));
    }

    /// What its hand-offs told may be out of date.
    pub(crate) fn forget_channel(&self) {
        self.channel_told.store(None);
    }

    /// The engine that writes its blocks and its side channel, as its last hand-off told.
    pub(crate) fn channel_told(&self) -> Option<(String, NamedChannel)> {
        self.channel_told.load().as_deref().cloned()
    }

    /// Remembers which side drives the copy, as a hand-off told; whether that is news.
    pub(crate) fn saw_mode(&self, mode: Option<TransferMode>) -> bool {
        if mode.is_none() || self.observed.now().transfer_mode == mode {
            return false;
        }
        self.observed.change(|observed| observed.transfer_mode = mode);
        true
    }

    pub(crate) fn serves(&self, model: &str) -> bool {
        self.observed.now().models.iter().any(|served| served.id == model)
    }

    /// Whether a model is an adapter of another one there.
    pub(crate) fn is_adapter(&self, model: &str) -> bool {
        self.observed.now().models.iter().any(|served| served.id == model && served.is_adapter())
    }

    /// Whether its engines may have requests of a model, by the credential with which they registered. Who
    /// came by registration serves nothing else; a peer that the settings or an operator named is their word.
    pub(crate) fn may_have(&self, model: Option<&str>) -> bool {
        if !self.standing.is_adopted() {
            return true;
        }
        let identity = self.identity.load();
        !identity.engines.is_empty() && identity.engines.iter().all(|engine| engine.bound.covers(model))
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
        if self.observed.now().engine_ids.contains(engine_id) {
            return false;
        }
        let (before, _) = self.observed.change(|observed| {
            if observed.engine_ids.len() >= MAX_ENGINE_IDS {
                observed.engine_ids.clear();
            }
            observed.engine_ids.insert(engine_id.to_owned());
        });
        !before.engine_ids.contains(engine_id)
    }

    /// Remembers that a hand-off named such an address; whether it is the first one.
    pub(crate) fn is_first_private_address(&self) -> bool {
        !self.private_address.swap(true, Ordering::Relaxed)
    }

    /// Remembers the tensor-parallel size that a hand-off of this peer told; whether it is another one.
    pub(crate) fn saw_tp_size(&self, tp_size: u32) -> bool {
        if self.observed.now().tp_size == Some(tp_size) {
            return false;
        }
        self.observed.change(|observed| observed.tp_size = Some(tp_size));
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
        self.observed.change(|observed| {
            observed.last_error = Some(PeerFault::now(kind));
            if unreachable {
                observed.state = PeerState::Unreachable;
            }
        });
        if unreachable {
            self.forget_met();
        }
    }

    /// How many failures requests met with it.
    pub(crate) fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    /// The engine may have restarted: it knows nobody any more.
    pub(crate) fn forget_met(&self) {
        self.forget_channel();
        self.met.write().clear();
    }

    pub(crate) fn view(&self, notifier: &Notifier) -> PeerView {
        let generation = self.generation();
        let observed = self.observed.now();
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
            transfer_mode: self
                .spec
                .transfer_mode
                .or_else(|| self.identity.load().transfer_mode())
                .or(observed.transfer_mode),
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
    /// Which side of a pair drives the copy, once known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_mode: Option<TransferMode>,
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
