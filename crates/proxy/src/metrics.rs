//! The counters and histograms of the router, in one handle that is passed in.
//! Few labels, each from a closed set; never an address or a request id.

mod admission;
mod health;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::admission::Counts;
use crate::error::{HandOffRefusal, ProxyError, Stage, UpstreamFailure};
use crate::pool::HealthView;
use crate::side_channel::channels::SideChannelState;
use crate::store::StoreView;
use admission::AdmissionMetrics;
use health::PeerHealth;

/// Content type of the metrics page.
pub const METRICS_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const SECONDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    outcome: &'static str,
    status: u32,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DecisionLabels {
    decision: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FailureLabels {
    stage: &'static str,
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct WayLabel {
    way: &'static str,
}

/// How the router made a prefill engine free blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// It told the engine itself.
    Notification,
    /// A decode engine refused the hand-off and told it.
    Rejection,
    /// A decode engine read the blocks for nothing.
    Read,
}

impl Way {
    const ALL: [Self; 3] = [Self::Notification, Self::Rejection, Self::Read];

    const fn label(self) -> &'static str {
        match self {
            Self::Notification => "notification",
            Self::Rejection => "rejection",
            Self::Read => "read",
        }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PeerLabels {
    stage: &'static str,
    condition: &'static str,
}

/// How a hand-off ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandOffResult {
    /// A decode engine took it.
    Relayed,
    /// The router made the prefill engine free the blocks.
    Released(Way),
    /// The prefill engine ended, and its blocks with it.
    EngineGone,
    /// The prefill engine's own timer had to free the blocks.
    Expired,
}

/// What became of a prefill that nobody waited for any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AbandonedPrefill {
    /// It was heard out, and its blocks were released.
    Released,
    /// It was heard out, and named no blocks.
    KeptNone,
    /// Its answer never came whole.
    Failed,
    /// It took too long and its connection was closed.
    Aborted,
}

impl AbandonedPrefill {
    const ALL: [Self; 4] = [Self::Released, Self::KeptNone, Self::Failed, Self::Aborted];

    const fn label(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::KeptNone => "kept_none",
            Self::Failed => "failed",
            Self::Aborted => "aborted",
        }
    }
}

/// The router's metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    hand_offs: Family<ResultLabel, Counter>,
    hand_offs_live: Gauge,
    releases: Family<WayLabel, Counter>,
    abandoned_prefills: Family<ResultLabel, Counter>,
    notification_failures: Family<ReasonLabel, Counter>,
    bypass: Family<ReasonLabel, Counter>,
    upstream_failures: Family<FailureLabels, Counter>,
    stream_errors: Counter,
    streams_cut: Counter,
    decisions: Family<DecisionLabels, Counter>,
    held_bytes: Gauge,
    retries: Family<StageLabel, Counter>,
    peers: Family<PeerLabels, Gauge>,
    restarts: Family<StageLabel, Gauge>,
    health: PeerHealth,
    admission: AdmissionMetrics,
    side_channel_looks: Family<ResultLabel, Counter>,
    front_requests: Family<ResultLabel, Counter>,
    prefill_seconds: Histogram,
    decode_head_seconds: Histogram,
    hand_over_seconds: Histogram,
    store_up: Gauge,
    store_age_seconds: Gauge<f64, AtomicU64>,
}

impl Metrics {
    pub(crate) fn new() -> Arc<Self> {
        let mut registry = Registry::with_prefix("kvbaton");
        let seconds = || Histogram::new(SECONDS);
        let metrics = Self {
            requests: Family::default(),
            hand_offs: Family::default(),
            hand_offs_live: Gauge::default(),
            releases: Family::default(),
            abandoned_prefills: Family::default(),
            notification_failures: Family::default(),
            bypass: Family::default(),
            upstream_failures: Family::default(),
            stream_errors: Counter::default(),
            streams_cut: Counter::default(),
            decisions: Family::default(),
            held_bytes: Gauge::default(),
            retries: Family::default(),
            peers: Family::default(),
            restarts: Family::default(),
            health: PeerHealth::default(),
            admission: AdmissionMetrics::default(),
            side_channel_looks: Family::default(),
            front_requests: Family::default(),
            prefill_seconds: seconds(),
            decode_head_seconds: seconds(),
            hand_over_seconds: seconds(),
            store_up: Gauge::default(),
            store_age_seconds: Gauge::default(),
            registry: Registry::default(),
        };
        registry.register(
            "peers",
            "Peers by stage and condition: open to new requests, unready, closed by their engine, drained, \
             leaving, cold while they make their first hand-offs; those kept from hand-offs also as quarantined",
            metrics.peers.clone(),
        );
        registry.register(
            "peer_restarts",
            "Restarts of the present peers' engines that the registry saw",
            metrics.restarts.clone(),
        );
        metrics.health.register(&mut registry);
        metrics.admission.register(&mut registry);
        registry.register("requests", "Requests by endpoint, outcome and status; 499 where the client left before its answer was complete", metrics.requests.clone());
        registry.register(
            "handoffs",
            "Hand-offs by what became of them: relayed to a decode engine, missing from the prefill \
             answer, refused as defective, released by the router, gone with their engine, expired",
            metrics.hand_offs.clone(),
        );
        registry.register(
            "handoffs_live",
            "Hand-offs whose blocks a prefill engine still holds, as far as the router knows",
            metrics.hand_offs_live.clone(),
        );
        registry.register(
            "releases",
            "Hand-offs that the router released, by the way that worked",
            metrics.releases.clone(),
        );
        registry.register(
            "abandoned_prefills",
            "Prefills that nobody waited for any more by what became of them: heard out and released, heard \
             out without blocks to free, failed by themselves, aborted",
            metrics.abandoned_prefills.clone(),
        );
        registry.register(
            "notification_failures",
            "Unread hand-offs of which a prefill engine could not be notified, by reason",
            metrics.notification_failures.clone(),
        );
        registry.register(
            "pd_bypass",
            "Requests sent to a decode engine alone, by reason",
            metrics.bypass.clone(),
        );
        registry.register(
            "upstream_failures",
            "Failed exchanges with engines by leg and kind",
            metrics.upstream_failures.clone(),
        );
        registry.register(
            "stream_errors",
            "Streams that an engine broke off after their head",
            metrics.stream_errors.clone(),
        );
        registry.register(
            "streams_cut",
            "Streams that the router ended because it was shutting down",
            metrics.streams_cut.clone(),
        );
        registry.register(
            "pd_decisions",
            "Requests by whether their prompt went to a prefill engine, and why",
            metrics.decisions.clone(),
        );
        registry.register(
            "held_bytes",
            "Bytes of requests and answers that the router holds",
            metrics.held_bytes.clone(),
        );
        registry.register("retries", "Legs that were tried again on another engine", metrics.retries.clone());
        registry.register(
            "side_channel_looks",
            "Looks at engines' side channels by result: read, failed, not_asked, registers_itself",
            metrics.side_channel_looks.clone(),
        );
        registry.register(
            "front_requests",
            "Messages at the router's own side channels: answered or dropped",
            metrics.front_requests.clone(),
        );
        registry.register_with_unit(
            "prefill",
            "Time from sending the prefill leg to its whole answer",
            Unit::Seconds,
            metrics.prefill_seconds.clone(),
        );
        registry.register_with_unit(
            "decode_head",
            "Time from sending the decode leg to its response head",
            Unit::Seconds,
            metrics.decode_head_seconds.clone(),
        );
        registry.register_with_unit(
            "hand_over",
            "Time from the prefill answer to the first body byte of the decode answer",
            Unit::Seconds,
            metrics.hand_over_seconds.clone(),
        );
        registry.register(
            "store_up",
            "Whether the store that routers share can be reached; 1 with the store in memory",
            metrics.store_up.clone(),
        );
        registry.register_with_unit(
            "store_age",
            "Time since the store was heard of; since the start it is infinite until then",
            Unit::Seconds,
            metrics.store_age_seconds.clone(),
        );
        // Results that have not happened yet still show as zero, so that alerts can be written.
        for result in ["relayed", "missing", "refused", "released", "engine_gone", "expired"] {
            let _ = metrics.hand_offs.get_or_create(&ResultLabel { result });
        }
        for way in Way::ALL {
            let _ = metrics.releases.get_or_create(&WayLabel { way: way.label() });
        }
        for fate in AbandonedPrefill::ALL {
            let _ = metrics.abandoned_prefills.get_or_create(&ResultLabel { result: fate.label() });
        }
        Arc::new(Self { registry, ..metrics })
    }

    pub(crate) fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail; an encoder fault would show as a truncated page.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        text
    }

    pub(crate) fn store(&self, view: &StoreView) {
        self.store_up.set(view.up.into());
        self.store_age_seconds.set(view.age_seconds.unwrap_or(f64::INFINITY));
    }

    /// Takes the fleet in as it is now: (stage, condition) of every peer, and restarts by stage.
    pub(crate) fn fleet(
        &self,
        conditions: impl Iterator<Item = (Stage, &'static str)>,
        restarts: impl Iterator<Item = (Stage, u64)>,
    ) {
        self.peers.clear();
        for (stage, condition) in conditions {
            self.peers.get_or_create(&PeerLabels { stage: stage.label(), condition }).inc();
        }
        self.restarts.clear();
        for (stage, count) in restarts {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.restarts.get_or_create(&StageLabel { stage: stage.label() }).inc_by(count);
        }
    }

    /// Takes in who runs and waits for a stage.
    pub(crate) fn admission(&self, stage: Stage, counts: Counts) {
        self.admission.set(stage, counts);
    }

    pub(crate) fn turned_away(&self, limit: &'static str, reason: &'static str) {
        self.admission.refused(limit, reason);
    }

    pub(crate) fn waited(&self, seconds: f64) {
        self.admission.waited(seconds);
    }

    /// Takes in how each peer's requests went.
    pub(crate) fn health(&self, peers: impl Iterator<Item = (Stage, String, HealthView)>) {
        self.health.set(peers);
    }

    pub(crate) fn request_ended(&self, endpoint: &'static str, status: u16, outcome: Outcome) {
        let labels = RequestLabels { endpoint, outcome: outcome.label(), status: u32::from(status) };
        self.requests.get_or_create(&labels).inc();
    }

    pub(crate) fn hand_off_refused(&self, refusal: &HandOffRefusal) {
        self.hand_offs.get_or_create(&ResultLabel { result: refusal.label() }).inc();
    }

    pub(crate) fn hand_off_ended(&self, result: HandOffResult) {
        let result = match result {
            HandOffResult::Relayed => "relayed",
            HandOffResult::Released(way) => {
                self.releases.get_or_create(&WayLabel { way: way.label() }).inc();
                "released"
            }
            HandOffResult::EngineGone => "engine_gone",
            HandOffResult::Expired => "expired",
        };
        self.hand_offs.get_or_create(&ResultLabel { result }).inc();
    }

    pub(crate) fn prefill_abandoned(&self, fate: AbandonedPrefill) {
        self.abandoned_prefills.get_or_create(&ResultLabel { result: fate.label() }).inc();
    }

    pub(crate) fn not_notified(&self, reason: &'static str) {
        self.notification_failures.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(crate) fn hand_offs_live(&self, count: usize) {
        self.hand_offs_live.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The decode engine computes the prompt itself.
    pub(crate) fn bypassed(&self, reason: &'static str) {
        self.bypass.get_or_create(&ReasonLabel { reason }).inc();
        self.decided("decode_only", reason);
    }

    /// Whose work the prompt is, and why.
    pub(crate) fn decided(&self, decision: &'static str, reason: &'static str) {
        self.decisions.get_or_create(&DecisionLabels { decision, reason }).inc();
    }

    pub(crate) fn held_bytes(&self, bytes: usize) {
        self.held_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    pub(crate) fn upstream_failed(&self, failure: UpstreamFailure) {
        let labels = FailureLabels { stage: failure.stage.label(), kind: failure.broken.label() };
        self.upstream_failures.get_or_create(&labels).inc();
    }

    pub(crate) fn stream_broken(&self) {
        self.stream_errors.inc();
    }

    pub(crate) fn stream_cut(&self) {
        self.streams_cut.inc();
    }

    pub(crate) fn retried(&self, stage: Stage) {
        self.retries.get_or_create(&StageLabel { stage: stage.label() }).inc();
    }

    pub(crate) fn side_channel_looked(&self, state: SideChannelState) {
        let result = match state {
            SideChannelState::Unread => "unread",
            SideChannelState::Read => "read",
            SideChannelState::NotAsked => "not_asked",
            SideChannelState::Failed => "failed",
            SideChannelState::RegistersItself => "registers_itself",
        };
        self.side_channel_looks.get_or_create(&ResultLabel { result }).inc();
    }

    pub(crate) fn front_asked(&self, answered: bool) {
        let result = if answered { "answered" } else { "dropped" };
        self.front_requests.get_or_create(&ResultLabel { result }).inc();
    }

    pub(crate) fn prefill_took(&self, seconds: f64) {
        self.prefill_seconds.observe(seconds);
    }

    pub(crate) fn decode_head_took(&self, seconds: f64) {
        self.decode_head_seconds.observe(seconds);
    }

    pub(crate) fn hand_over_took(&self, seconds: f64) {
        self.hand_over_seconds.observe(seconds);
    }
}

/// How a client's request ended, seen from the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Outcome {
    Served,
    /// An engine's 4xx was relayed, or the router refused the body.
    ClientError,
    EngineError,
    NoPeer,
    /// The client left before its answer was complete.
    Abandoned,
    /// The router was shutting down, or had no room.
    Cut,
    /// A limit on requests.
    Limited,
}

impl Outcome {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::ClientError => "client_error",
            Self::EngineError => "engine_error",
            Self::NoPeer => "no_peer",
            Self::Abandoned => "abandoned",
            Self::Cut => "cut",
            Self::Limited => "limited",
        }
    }

    pub(crate) const fn of_code(code: u8) -> Self {
        const ALL: [Outcome; 7] = [
            Outcome::Served,
            Outcome::ClientError,
            Outcome::EngineError,
            Outcome::NoPeer,
            Outcome::Abandoned,
            Outcome::Cut,
            Outcome::Limited,
        ];
        if (code as usize) < ALL.len() { ALL[code as usize] } else { Self::Abandoned }
    }

    pub(crate) const fn of_error(error: &ProxyError) -> Self {
        match error {
            ProxyError::BadRequest(_) | ProxyError::ModelDenied { .. } => Self::ClientError,
            ProxyError::NoPeer(_) | ProxyError::NoCompatiblePair => Self::NoPeer,
            ProxyError::ShuttingDown => Self::Cut,
            ProxyError::Busy(_) => Self::Limited,
            ProxyError::Upstream(failure) if !failure.broken.blames_the_engine() => Self::Cut,
            ProxyError::Upstream(_) | ProxyError::PrefillFailed(_) | ProxyError::HandOff(_) => {
                Self::EngineError
            }
        }
    }

    pub(crate) const fn of_status(status: u16) -> Self {
        match status {
            0..400 => Self::Served,
            400..500 => Self::ClientError,
            _ => Self::EngineError,
        }
    }
}
