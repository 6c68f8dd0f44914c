//! The part of the settings tree that the core reads; the program embeds it whole.
//! Owns the defaults of these values; reads no file and no environment.

use std::path::PathBuf;
use std::time::Duration;

use kv_connector::transport::NixlVersion;
use serde::{Deserialize, Serialize};

use crate::admission::AdmissionSettings;
use crate::connection::EngineTls;
use crate::discovery::DiscoverySettings;
use crate::models::ModelSettings;
use crate::pool::{BreakerSettings, Writers};
use crate::registry_address::RegistryAddress;
use crate::request::InjectedHandOff;
use crate::routing::kv_events::KvEventsSettings;
use crate::routing::settings::{Disaggregation, RoutingSettings};
use crate::side_channel::settings::SideChannelSettings;
use crate::store::StoreSettings;
use crate::trace::Traces;

/// What the core needs to know to serve requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Deadlines of the exchanges with engines.
    pub timeouts: Timeouts,
    /// How engines' health is watched.
    pub probe: Probe,
    /// What happens around the hand-off.
    pub hand_off: HandOffPolicy,
    /// When failures keep new requests from an engine.
    pub breaker: BreakerSettings,
    /// Limits on requests.
    pub admission: AdmissionSettings,
    /// Which engines are paired.
    pub pairing: Pairing,
    /// Where engines' addresses come from beside the settings.
    pub discovery: DiscoverySettings,
    /// The engines' ZMQ side channels.
    pub side_channel: SideChannelSettings,
    /// What engines tell of their prefix caches.
    pub kv_events: KvEventsSettings,
    /// Trying again on another engine.
    pub retry: Retry,
    /// Bounds on memory.
    pub limits: Limits,
    /// Where what several routers must agree on is kept.
    pub store: StoreSettings,
    /// TLS to engines, made of files that the core does not read.
    #[serde(skip)]
    pub engine_tls: EngineTls,
    /// The credentials that write the registry, of which the core knows the names only.
    #[serde(skip)]
    pub writers: Writers,
    /// Where traces go.
    #[serde(skip)]
    pub traces: Traces,
    /// How answers are streamed.
    pub stream: Streaming,
    /// The NIXL library.
    pub nixl: Nixl,
    /// What is kept of past requests.
    pub timeline: Timelines,
    /// How the pair for a request is chosen.
    pub routing: RoutingSettings,
    /// Whether a request is split over two engines.
    pub disaggregation: Disaggregation,
    /// What clients call models.
    pub models: Vec<ModelSettings>,
}

/// What is kept of past requests, for operators.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timelines {
    /// Of how many requests it is kept what happened to them; zero for none.
    pub requests: usize,
}

impl Default for Timelines {
    fn default() -> Self {
        Self { requests: 2000 }
    }
}

/// How answers are streamed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Streaming {
    /// How often a client that asked for a stream gets a comment while it waits for the first event; zero
    /// for never. The first comment commits the answer to status 200.
    #[serde(with = "humantime_serde")]
    pub keep_alive: Duration,
    /// Whether a client may close its sending side and still get its answer. Such a client cannot be told
    /// from one that has left, so that abandoned requests then run to their end.
    pub half_close: bool,
}

/// The NIXL library, with which the router notifies prefill engines that ask for it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nixl {
    /// The library's file, or the folder that a wheel of it was installed in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub library: Option<PathBuf>,
    /// Its version, where the wheel beside it does not tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

impl Nixl {
    /// Whether the version, if one is given, can be read.
    #[must_use]
    pub fn is_version_readable(&self) -> bool {
        self.version.as_deref().is_none_or(|version| NixlVersion::parse(version).is_some())
    }
}

/// Which engines are paired.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pairing {
    /// What becomes of pairs of which too little is known.
    #[serde(alias = "unknown_compat")]
    pub unknown: UnknownPairs,
    /// Whether a client's own data-parallel rank reaches a decode engine that is configured without one.
    pub client_dp_rank: bool,
    /// How long a pair is kept apart whose engines have talked when one of them restarts; zero does
    /// not keep them apart.
    #[serde(with = "humantime_serde")]
    pub quarantine_restarted: Duration,
    /// Whether engines that register with a base URL and a role become peers.
    pub adopt_registered: bool,
    /// Whether a prefill engine of more tensor-parallel ranks than the decode engine's is left out, where
    /// both numbers are known: older engines cannot read from one.
    pub prefill_tp_at_most_decode: bool,
    /// Whether each pair makes one small hand-off before the later of the two engines gets requests.
    pub warm_up: bool,
}

impl Default for Pairing {
    fn default() -> Self {
        Self {
            unknown: UnknownPairs::Allow,
            quarantine_restarted: Duration::ZERO,
            adopt_registered: true,
            client_dp_rank: false,
            prefill_tp_at_most_decode: false,
            warm_up: false,
        }
    }
}

/// What becomes of pairs of which too little is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnknownPairs {
    /// They are used.
    Allow,
    /// They are not.
    Deny,
}

/// Trying a failed leg again on another engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Retry {
    /// Most tries beyond the first, over both legs of one request.
    pub attempts: u32,
    /// Retries that each request adds to the fleet's budget.
    pub per_request: f64,
    /// Retries that each second adds to it.
    pub per_second: f64,
    /// Most retries that it holds.
    pub burst: u32,
}

impl Default for Retry {
    fn default() -> Self {
        Self { attempts: 2, per_request: 0.2, per_second: 1.0, burst: 100 }
    }
}

/// Deadlines; each one ends in its own kind of failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// TCP connect to an engine.
    #[serde(with = "humantime_serde")]
    pub connect: Duration,
    /// How long connecting may take before other requests avoid the engine; only one waits on.
    #[serde(with = "humantime_serde")]
    pub slow_connect: Duration,
    /// Whole answer of a prefill leg, from sending to the last byte.
    #[serde(with = "humantime_serde")]
    pub prefill: Duration,
    /// From sending the decode leg to its response head.
    #[serde(with = "humantime_serde")]
    pub decode_head: Duration,
    /// Longest silence inside an answer that has begun.
    #[serde(with = "humantime_serde")]
    pub idle: Duration,
    /// Whole answer of a decode leg, from its head to its end.
    #[serde(with = "humantime_serde")]
    pub total: Duration,
    /// Whole release dispatch for a hand-off that no decode engine took.
    #[serde(with = "humantime_serde")]
    pub release: Duration,
    /// Longest silence of a client that is sending its request body.
    #[serde(with = "humantime_serde")]
    pub client_body: Duration,
    /// Whole request body of a client, from its head to its last byte.
    #[serde(with = "humantime_serde")]
    pub client_body_whole: Duration,
    /// How long an unused kept connection to an engine stays open. Below 5 s, since vLLM's HTTP
    /// server closes at 5 s and a request sent into that close is lost.
    #[serde(with = "humantime_serde")]
    pub pool_idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            slow_connect: Duration::from_millis(300),
            prefill: Duration::from_secs(300),
            decode_head: Duration::from_secs(600),
            idle: Duration::from_secs(300),
            total: Duration::from_secs(7200),
            release: Duration::from_secs(5),
            client_body: Duration::from_secs(30),
            client_body_whole: Duration::from_secs(300),
            pool_idle: Duration::from_secs(4),
        }
    }
}

/// Health probing: `GET` of `path`, `/v1/models` and, once, `/version` of each peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Probe {
    /// Pause between two rounds.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// Deadline of one probe.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// How many probes in a row a ready engine may leave unanswered; a refused connection or a bad
    /// answer counts at once.
    pub patience: u32,
    /// By which part of itself an interval is longer or shorter, so that not all engines are probed at once.
    pub jitter: f64,
    /// The engines' health endpoint.
    pub path: String,
    /// Pause between two readings of the engines' metrics pages; zero does not read them.
    #[serde(with = "humantime_serde")]
    pub metrics_interval: Duration,
}

impl Default for Probe {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(2),
            timeout: Duration::from_secs(2),
            patience: 3,
            jitter: 0.1,
            path: "/health".to_owned(),
            metrics_interval: Duration::from_secs(5),
        }
    }
}

/// Policies around the hand-off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HandOffPolicy {
    /// What to do when a prefill engine answers without a usable hand-off.
    pub on_missing: OnMissing,
    /// What to do when no prefill engine can be had.
    pub on_no_prefill: OnMissing,
    /// What to do with a hand-off that a client sends.
    pub client_injected: InjectedHandOff,
    /// Lease of a prefill engine of vLLM's current generation, as configured there.
    #[serde(with = "humantime_serde")]
    pub lease: Duration,
    /// Lease of a prefill engine that speaks connector version 2.
    #[serde(with = "humantime_serde")]
    pub lease_v2: Duration,
    /// How much of the lease must be left when the decode leg is sent: a read after the end of the
    /// lease silently fetches other requests' KV.
    #[serde(with = "humantime_serde")]
    pub lease_margin: Duration,
    /// How long a prefill that nobody waits for any more may still end by itself; then it is aborted. One
    /// that ends in that very moment keeps its blocks until the lease ends, so a short grace saves work of
    /// prefill engines and costs blocks.
    #[serde(with = "humantime_serde")]
    pub abandon_grace: Duration,
    /// Whether a hand-off must name enough blocks for its tokens where the registry knows the
    /// engine's block size. Turn it off for models whose every layer has a sliding window.
    pub check_block_count: bool,
    /// Which addresses a hand-off may name.
    pub address_check: AddressCheck,
    /// Below so many bytes of prompt (its JSON, tools and all) the decode engine computes it itself: a
    /// hand-off would cost more than it saves. Zero hands everything off.
    pub min_prompt_bytes: usize,
    /// Whether answers say which peers made them, in `x-pd-prefill` and `x-pd-decode`. The names are those
    /// of `/admin/peers`, which for engines that became peers by registering are made of their addresses.
    pub show_peers: bool,
    /// Address of the registry that takes the place of the prefill engine's in every hand-off, for
    /// decode engines that shake hands over HTTP with what their hand-off names. Others would fail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub registry_address: Option<RegistryAddress>,
}

/// Which side channel addresses a prefill engine's hand-offs may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AddressCheck {
    /// The peer's own host, and what is known of its side channel.
    Strict,
    /// The same where something is known of the side channel, by `side_channel` in the settings or
    /// by the engine's registration; anything elsewhere.
    Known,
    /// Any.
    Off,
}

impl Default for HandOffPolicy {
    fn default() -> Self {
        Self {
            on_missing: OnMissing::DecodeOnly,
            on_no_prefill: OnMissing::Fail,
            client_injected: InjectedHandOff::Refuse,
            lease: Duration::from_secs(30),
            lease_v2: Duration::from_secs(480),
            lease_margin: Duration::from_secs(5),
            abandon_grace: Duration::from_secs(300),
            check_block_count: true,
            address_check: AddressCheck::Known,
            min_prompt_bytes: 0,
            show_peers: false,
            registry_address: None,
        }
    }
}

/// What follows when there is no usable hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnMissing {
    /// Answer with an error.
    Fail,
    /// Let the decode engine compute the prompt itself, with a warning.
    DecodeOnly,
}

/// Bounds on memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Largest request body, in bytes.
    pub body_bytes: usize,
    /// Largest answer that is held whole (prefill answers, non-streamed decode answers), in bytes.
    pub answer_bytes: usize,
    /// Most bytes of requests and answers that are held at a time, over all requests.
    pub held_bytes: usize,
    /// Largest handshake payload that the registry takes, in bytes.
    pub payload_bytes: usize,
    /// Most engines that the registry keeps.
    pub registry_engines: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 64 << 20,
            answer_bytes: 64 << 20,
            held_bytes: 1 << 30,
            payload_bytes: 4 << 20,
            registry_engines: 4096,
        }
    }
}
