//! kvbaton's core: it decides which pair serves a request, moves the bytes of both legs, and
//! keeps account of every hand-off. Knows HTTP's types but no web framework.

mod account;
mod address;
mod admission;
mod answer;
mod client;
mod connection;
mod dial;
mod disagg;
mod discovery;
mod error;
mod fleet;
mod flow;
#[cfg(fuzzing)]
pub mod fuzzing;
mod handoff;
mod held;
mod lease;
mod ledger;
mod made_by;
mod metrics;
#[cfg(test)]
mod model;
mod models;
mod notify;
mod pool;
mod prefill;
mod pulse;
mod registry;
mod registry_address;
mod relay;
mod reload;
pub mod request;
mod request_id;
mod retry;
pub mod routing;
mod settings;
mod side_channel;
pub mod simulated;
pub mod splice;
mod store;
mod stream;
mod timeline;
mod trace;
mod trial;
mod upstream;
mod warm_up;
mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Response};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use account::Account;
pub use admission::{AdmissionSettings, Busy, BusyReason, BusyScope, NamedLimits, StageLimits};
pub use client::{Client, ModelScope};
pub use connection::{EngineTls, public_authorities};
pub use disagg::{Exchange, Order};
pub use discovery::{
    DiscoveryFault, DiscoverySettings, DnsKind, DnsSource, KubernetesSource, PeerScheme, PeerTemplate,
    PortChoice, SourceFailure, SourceView,
};
pub use error::{Broken, Fault, HandOffRefusal, Progress, ProxyError, Stage, UpstreamFailure};
pub use fleet::{DrainEnd, Drained};
pub use held::{Held, Share};
pub use kv_connector::fit::EngineTraits;
pub use kv_connector::json;
pub use kv_connector::protocol::params::{Generation, TransferMode};
pub use ledger::{HandOffState, HandOffView};
pub use metrics::{MetricDoc, MetricsFormat, metric_docs, metrics_table};
pub use models::{AnswerName, ModelSettings, ModelTarget, PdRatio};
pub use notify::NotifyView;
pub use pool::{
    Authorization, BreakerSettings, BreakerState, EngineLoadView, HealthView, ModelList, OperatorState,
    PairView, PeerFault, PeerPlace, PeerSpec, PeerSpecError, PeerState, PeerView, QuarantineView, Readiness,
    Restarts, Role, Verdict, Writers, is_host,
};
pub use pulse::{Pulse, PulseFrame, TooManyViewers};
pub use registry::{
    AboutEngine, ChangeKind, Changes, ClockReading, Echo, EngineRecord, EngineRole, EngineState,
    EngineSummary, EngineView, FieldProblem, Found, Heartbeat, Missing, PayloadPart, Rank, RankId,
    RankPayload, RankView, Receipt, Registered, Registration, Registry, RegistryChange, RegistryError,
    RegistryLimits, RegistrySnapshot, Sight, Watched, Watcher, Writer, canonical_base_url,
};
pub use registry_address::{NotAnAddress, RegistryAddress};
pub use reload::{PeerChangeError, PeerChanges};
pub use request::{BadRequest, Endpoint, InjectedHandOff};
pub use request_id::{RequestId, X_REQUEST_ID};
pub use routing::explain::{ExplainAsk, ExplainedChoice, ExplainedPair, Explanation, RuledOut};
pub use routing::kv_events::{CachedPrompt, KvEventsSettings, KvEventsView};
pub use routing::settings::{
    Disaggregation, DisaggregationMode, LabelCost, ModelPolicies, Policy, RoutingSettings,
};
pub use settings::{
    AddressCheck, HandOffPolicy, Limits, Nixl, OnMissing, Pairing, Probe, Retry, Settings, Streaming,
    Timelines as TimelineSettings, Timeouts, UnknownPairs,
};
pub use side_channel::channels::{SideChannelState, SideChannelView};
pub use side_channel::settings::{FrontSettings, NotPorts, PortRange, ReadSideChannels, SideChannelSettings};
pub use store::{StoreFault, StoreKind, StoreSettings, StoreView};
pub use stream::{EventError, RelayBody, RelayError, error_event};
pub use timeline::{RequestFacts, RequestTimeline, RequestView, StepView};
pub use trace::{Sampling, SpanKind, SpanRecord, SpanValue, TraceCounts, Traces};
pub use trial::{Trial, TrialResult, UnknownPeer};

use ledger::Ledger;
use metrics::Metrics;
use pool::Pool;
use pool::origin::Origin;
use side_channel::SideChannels;
use store::Storage;
use timeline::Timelines;
use upstream::Upstream;

/// What every part of the core shares.
struct Core {
    /// Read anew by each step that needs them.
    settings: ArcSwap<Settings>,
    pool: Pool,
    discovery: discovery::Discovery,
    upstream: Upstream,
    held: Held,
    ledger: Ledger,
    registry: Registry,
    store: Box<dyn Storage>,
    notifier: notify::Notifier,
    retries: retry::Budget,
    admission: Arc<admission::Admission>,
    side_channels: SideChannels,
    kv_events: routing::kv_events::KvEvents,
    /// What clients call models.
    models: ArcSwap<models::ModelTable>,
    timelines: Arc<Timelines>,
    viewers: pulse::Viewers,
    metrics: Arc<Metrics>,
    tasks: TaskTracker,
    stop: CancellationToken,
    /// What still runs is to end now.
    cut: CancellationToken,
    draining: AtomicBool,
}

impl Core {
    /// The settings as they are now.
    fn settings(&self) -> Arc<Settings> {
        self.settings.load_full()
    }
}

/// The router's core; clones share it.
#[derive(Clone)]
pub struct Proxy {
    core: Arc<Core>,
}

impl Proxy {
    /// Builds the core and starts watching the fleet, which is empty at first. Needs a tokio
    /// runtime; all tasks run in `tasks` and end with `stop`.
    #[must_use]
    pub fn start(settings: Settings, tasks: TaskTracker, stop: CancellationToken) -> Self {
        let held = Held::new(settings.limits.held_bytes);
        let tls = settings.engine_tls.clone();
        let upstream = Upstream::new(&settings.timeouts, tls, held.clone(), tasks.clone());
        Self::start_over(upstream, held, settings, tasks, stop)
    }

    fn start_over(
        upstream: Upstream,
        held: Held,
        settings: Settings,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let metrics = Metrics::new();
        let registry = Registry::new(RegistryLimits {
            payload_bytes: settings.limits.payload_bytes,
            engines: settings.limits.registry_engines,
            ..RegistryLimits::default()
        });
        let notifier = notify::Notifier::start(settings.nixl.clone(), registry.clone(), &tasks, stop.clone());
        let core = Arc::new(Core {
            admission: admission::Admission::new(&settings.admission, Arc::clone(&metrics)),
            retries: retry::Budget::new(settings.retry.clone()),
            ledger: Ledger::new(Arc::clone(&metrics)),
            store: store::start(&settings.store, registry.clone(), &tasks, &stop),
            registry,
            notifier,
            pool: Pool::new(&settings, upstream.dials().clone()),
            discovery: discovery::Discovery::default(),
            side_channels: SideChannels::default(),
            kv_events: routing::kv_events::KvEvents::default(),
            models: ArcSwap::default(),
            timelines: Timelines::new(settings.timeline.requests),
            viewers: pulse::Viewers::default(),
            upstream,
            held,
            metrics,
            tasks,
            stop,
            cut: CancellationToken::new(),
            draining: AtomicBool::new(false),
            settings: ArcSwap::from_pointee(settings),
        });
        core.pool.set_writers(core.settings().writers.clone());
        core.take_models(&core.settings().models);
        pool::probe::watch(Arc::clone(&core));
        pool::scrape::watch(Arc::clone(&core));
        fleet::follow(Arc::clone(&core));
        discovery::start(&core);
        side_channel::start(&core);
        routing::kv_events::start(&core);
        core.tasks.spawn(core.registry.clone().expire_until(core.stop.clone()));
        let proxy = Self { core };
        proxy.core.store.share_decisions(&proxy, &proxy.core.tasks, &proxy.core.stop);
        proxy
    }

    /// Opens the account of one request with these headers; `endpoint` is its name in metrics and must be one
    /// of few.
    #[must_use]
    pub fn account(&self, request_id: &RequestId, endpoint: &'static str, headers: &HeaderMap) -> Account {
        let (metrics, timelines) = (Arc::clone(&self.core.metrics), Arc::clone(&self.core.timelines));
        let traces = &self.core.settings().traces;
        Account::open(metrics, timelines, traces, request_id.clone(), endpoint, headers)
    }

    /// The last requests, the newest first and at most so many; only running or only ended ones if asked.
    #[must_use]
    pub fn requests(&self, limit: usize, running: Option<bool>) -> Vec<RequestView> {
        self.core.timelines.views(limit, running)
    }

    /// What happened to the newest request of this id, if it is still known.
    #[must_use]
    pub fn request(&self, request_id: &str) -> Option<RequestTimeline> {
        self.core.timelines.view(request_id)
    }

    /// The room for bodies, of requests being read too.
    #[must_use]
    pub fn held(&self) -> &Held {
        &self.core.held
    }

    /// Reads a request for an endpoint with two legs.
    ///
    /// # Errors
    /// It cannot be served by any engine.
    pub fn read(
        &self,
        endpoint: Endpoint,
        exchange: &Exchange,
        body: Bytes,
    ) -> Result<Arc<Order>, ProxyError> {
        self.core.read(endpoint, exchange, body)
    }

    /// How much of a request's prompt those engines have cached that publish their KV events.
    ///
    /// # Errors
    /// No engine could serve the request.
    pub async fn cached(&self, endpoint: Endpoint, body: Bytes) -> Result<Vec<CachedPrompt>, ProxyError> {
        let mut request = request::ClientRequest::parse(endpoint, body, InjectedHandOff::Refuse)?;
        if let Some(served) = self.core.would_serve(request.model(), None) {
            request.serve_as(&served);
        }
        Ok(self.core.cached(&request).await)
    }

    /// Serves a request over both legs. Dropping the future or the body frees everything.
    ///
    /// # Errors
    /// Why no answer could be had; nothing has been sent to the client then.
    pub fn serve<'a>(
        &'a self,
        order: &'a Arc<Order>,
        exchange: &'a Exchange,
    ) -> impl Future<Output = Result<Response<RelayBody>, ProxyError>> + Send + 'a {
        self.core.serve(order, exchange)
    }

    /// Ends what still runs: streams with an error event, other requests with an error.
    pub fn cut(&self) {
        self.core.cut.cancel();
    }

    /// Forwards a request without a prefill leg to a decode engine.
    ///
    /// # Errors
    /// No decode engine could be reached, or the body carries a hand-off.
    pub async fn pass_through(
        &self,
        method: Method,
        path_and_query: PathAndQuery,
        exchange: Exchange,
        body: Bytes,
    ) -> Result<Response<RelayBody>, ProxyError> {
        self.core.pass_through(method, &path_and_query, &exchange, body).await
    }

    /// Whether this router sent a request itself: a peer's address leads back here.
    #[must_use]
    pub fn has_sent(&self, headers: &HeaderMap) -> bool {
        self.core.upstream.has_sent(headers)
    }

    /// The union of the peers' model lists.
    #[must_use]
    pub fn models(&self) -> ModelList {
        self.core.pool.models().with(&self.core.models.load())
    }

    /// All peers.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerView> {
        self.core.pool.learn(&self.core.registry);
        self.core.pool.all().iter().map(|peer| peer.view(&self.core.notifier)).collect()
    }

    /// One peer.
    #[must_use]
    pub fn peer(&self, id: &str) -> Option<PeerView> {
        self.core.pool.learn(&self.core.registry);
        self.core.pool.get(id).map(|peer| peer.view(&self.core.notifier))
    }

    /// Adds a peer and probes it at once; it takes requests after its first good probe.
    ///
    /// # Errors
    /// The description cannot be used, or such a peer exists.
    pub fn add_peer(&self, spec: PeerSpec) -> Result<PeerView, PeerSpecError> {
        self.add_peer_of(Origin::Settings, spec)
    }

    fn add_peer_of(&self, origin: Origin, spec: PeerSpec) -> Result<PeerView, PeerSpecError> {
        let peer = self.core.pool.add_of(origin, spec)?;
        let view = peer.view(&self.core.notifier);
        if peer.spec.notify {
            self.core.notifier.prepare();
        }
        pool::probe::probe_soon(&self.core, peer);
        Ok(view)
    }

    /// The sources of engines' addresses.
    #[must_use]
    pub fn sources(&self) -> Vec<SourceView> {
        self.core.source_views()
    }

    /// The live hand-offs, oldest first.
    #[must_use]
    pub fn hand_offs(&self) -> Vec<HandOffView> {
        self.core.ledger.sweep();
        self.core.ledger.views()
    }

    /// Every pair of a prefill and a decode peer, with what is known of it.
    #[must_use]
    pub fn pairs(&self) -> Vec<PairView> {
        self.core.pool.learn(&self.core.registry);
        self.core.pool.pairs()
    }

    /// Whether new requests can be served.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        self.core.pool.learn(&self.core.registry);
        Readiness {
            pair: self.core.pool.has_pair(),
            prefill_ready: self.core.pool.ready(Stage::Prefill),
            decode_ready: self.core.pool.ready(Stage::Decode),
            draining: self.core.draining.load(Ordering::Relaxed),
        }
    }

    /// From now on the router says that it is not ready; requests are still served.
    pub fn drain(&self) {
        self.core.draining.store(true, Ordering::Relaxed);
        // Watchers never end by themselves, and would be waited for.
        self.core.registry.close();
    }

    /// The handshake registry: what this router knows, to read from. What engines say goes through
    /// the methods below, so that all routers of the store hear it.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.core.registry
    }

    /// Takes an engine with all its ranks, in place of what was known of it, for all routers.
    ///
    /// # Errors
    /// It cannot be used, its id or address is another's, or the store is away.
    pub async fn register_engine(&self, registration: Registration) -> Result<Receipt, RegistryError> {
        let done = match self.core.pool.check_claim(&registration, &self.core.registry) {
            Ok(()) => self.core.store.register(registration).await,
            Err(reserved) => Err(reserved),
        };
        self.core.metrics.registry_called("register", &done);
        done
    }

    /// Takes one rank's payload for all routers.
    ///
    /// # Errors
    /// As [`Self::register_engine`].
    pub async fn put_rank(
        &self,
        writer: &Writer,
        engine_id: &str,
        rank: Rank,
        payload: Bytes,
    ) -> Result<Registered, RegistryError> {
        let done = match self.core.pool.check_change(writer, engine_id, &self.core.registry) {
            Ok(()) => self.core.store.put_rank(writer, engine_id, rank, payload).await,
            Err(reserved) => Err(reserved),
        };
        self.core.metrics.registry_called("rank", &done);
        done
    }

    /// Takes an engine's sign of life for all routers; also while the store is away.
    ///
    /// # Errors
    /// The engine is not known (any more) and has to register, a value cannot be used, or the engine
    /// changes its state and the store is away.
    pub async fn heartbeat(
        &self,
        writer: &Writer,
        engine_id: &str,
        heartbeat: &Heartbeat,
    ) -> Result<Receipt, RegistryError> {
        let done = match self.core.pool.check_change(writer, engine_id, &self.core.registry) {
            Ok(()) => self.core.store.heartbeat(writer, engine_id, heartbeat).await,
            Err(reserved) => Err(reserved),
        };
        self.core.metrics.registry_called("heartbeat", &done);
        done
    }

    /// Lets an engine leave, everywhere; whether it was known.
    ///
    /// # Errors
    /// It is another credential's, or the store is away.
    pub async fn remove_engine(&self, writer: &Writer, engine_id: &str) -> Result<bool, RegistryError> {
        let done = match self.core.pool.check_change(writer, engine_id, &self.core.registry) {
            Ok(()) => self.core.store.remove(writer, engine_id).await,
            Err(reserved) => Err(reserved),
        };
        self.core.metrics.registry_called("remove", &done);
        done
    }

    /// How the store is that routers share.
    #[must_use]
    pub fn store(&self) -> StoreView {
        self.core.store.view()
    }

    /// The metrics page.
    #[must_use]
    pub fn metrics(&self, format: MetricsFormat) -> String {
        self.core.ledger.sweep();
        self.core.metrics.store(&self.core.store.view());
        self.core.metrics.held_bytes(self.core.held.bytes());
        self.core.count_fleet();
        self.core.admission.count();
        if let Some(counts) = self.core.settings().traces.counts() {
            self.core.metrics.traces(counts);
        }
        let (blocks, oldest) = self.core.ledger.held();
        self.core.metrics.leases(blocks, oldest);
        self.core.metrics.registry(&self.core.registry.snapshot());
        self.core.metrics.pairs(self.core.pool.count_pairs());
        self.core.metrics.encode(format)
    }
}
