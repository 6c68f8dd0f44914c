//! The only settings tree, with the only defaults. File < environment < flags.
//! Nothing else in the program reads files or the environment for settings.

mod discovery;
mod faults;
mod health;
mod layers;
mod routing;
mod security;
mod telemetry;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use kvbaton_proxy::{
    AdmissionSettings, BreakerSettings, Disaggregation, DiscoverySettings, HandOffPolicy, KvEventsSettings,
    Limits, ModelSettings, Nixl, Pairing, PeerSpec, PeerSpecError, Probe, Retry, Role, RoutingSettings,
    Settings, SideChannelSettings, StoreSettings, Streaming, TimelineSettings, Timeouts,
};
use serde::{Deserialize, Serialize};

pub use faults::{ConfigFault, ConfigFaults, Source};
pub use layers::{Flags, load, read};
pub(crate) use security::{ADMIN_TOKEN, EMBEDDED_FLEET, REGISTRY_TOKEN, check_key};
pub use security::{
    Admin, ClientAuth, Connections, Cors, Credential, CredentialRole, EngineTls, Key, Registry, Secrets, Tls,
    secret_files,
};

pub use telemetry::{NotAHeader, Telemetry, TraceProtocol, TraceSettings};

/// Longest duration of any setting; also keeps deadlines within what clocks can hold.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Address of the HTTP listener.
    pub listen: SocketAddr,
    /// Prefill engines.
    pub prefill: Vec<PeerSpec>,
    /// Decode engines.
    pub decode: Vec<PeerSpec>,
    /// Where engines' addresses come from beside these lists.
    pub discovery: DiscoverySettings,
    /// The simulated fleet that the program can start by itself.
    pub fleet: Fleet,
    /// TLS of that listener.
    pub tls: Tls,
    /// The operators' endpoints.
    pub admin: Admin,
    /// The engines' endpoints.
    pub registry: Registry,
    /// Operators and engines, beyond the tokens of `admin` and `registry`.
    pub credentials: Vec<Credential>,
    /// Clients; without any, whoever reaches the public listener is one.
    pub keys: Vec<Key>,
    /// A TOML file with more `[[keys]]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys_file: Option<std::path::PathBuf>,
    /// Pages of other origins.
    pub cors: Cors,
    /// Bounds on clients' connections.
    pub connections: Connections,
    /// TLS to engines.
    pub engine_tls: EngineTls,
    /// Files with secrets.
    pub secrets: Secrets,
    /// Log output.
    pub log: Log,
    /// Traces of requests.
    pub telemetry: Telemetry,
    /// Leaving in order.
    pub shutdown: Shutdown,
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
    /// How answers are streamed.
    pub stream: Streaming,
    /// The NIXL library.
    pub nixl: Nixl,
    /// What is kept of past requests.
    pub timeline: TimelineSettings,
    /// How the pair for a request is chosen.
    pub routing: RoutingSettings,
    /// Whether a request is split over two engines.
    pub disaggregation: Disaggregation,
    /// What clients call models.
    pub models: Vec<ModelSettings>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8000),
            prefill: Vec::new(),
            decode: Vec::new(),
            discovery: DiscoverySettings::default(),
            fleet: Fleet::default(),
            tls: Tls::default(),
            admin: Admin::default(),
            registry: Registry::default(),
            credentials: Vec::new(),
            keys: Vec::new(),
            keys_file: None,
            cors: Cors::default(),
            connections: Connections::default(),
            engine_tls: EngineTls::default(),
            secrets: Secrets::default(),
            log: Log::default(),
            telemetry: Telemetry::default(),
            shutdown: Shutdown::default(),
            timeouts: Timeouts::default(),
            probe: Probe::default(),
            hand_off: HandOffPolicy::default(),
            breaker: BreakerSettings::default(),
            admission: AdmissionSettings::default(),
            pairing: Pairing::default(),
            side_channel: SideChannelSettings::default(),
            kv_events: KvEventsSettings::default(),
            retry: Retry::default(),
            limits: Limits::default(),
            store: StoreSettings::default(),
            stream: Streaming::default(),
            nixl: Nixl::default(),
            timeline: TimelineSettings::default(),
            routing: RoutingSettings::default(),
            disaggregation: Disaggregation::default(),
            models: Vec::new(),
        }
    }
}

/// The embedded fleet of simulated engines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fleet {
    /// When it is started.
    pub embedded: Embedded,
    /// How many simulated prefill engines.
    pub prefill: usize,
    /// How many simulated decode engines.
    pub decode: usize,
    /// Name of the model that they serve.
    pub model: String,
}

impl Default for Fleet {
    fn default() -> Self {
        Self { embedded: Embedded::Auto, prefill: 1, decode: 1, model: "sim".to_owned() }
    }
}

/// When the embedded fleet is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Embedded {
    /// When no engine is configured.
    Auto,
    /// Always, beside the configured engines.
    Always,
    /// Never; engines come through the settings or `/admin/peers`.
    Never,
}

/// Log output.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// Lines for people or for machines.
    pub format: LogFormat,
    /// What is logged, as a list of `target=level` directives or one level.
    pub level: String,
    /// Whether each request makes a line (target `kvbaton::access`, level info).
    pub requests: bool,
}

impl Default for Log {
    fn default() -> Self {
        Self { format: LogFormat::Human, level: "info".to_owned(), requests: true }
    }
}

/// The shape of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}

/// Leaving in order: not ready, settle, refuse new connections, finish what runs, all in one budget.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shutdown {
    /// How long requests are still accepted after `/readyz` has turned to 503.
    #[serde(with = "humantime_serde")]
    pub settle: Duration,
    /// The whole budget; what still runs then is cut off.
    #[serde(with = "humantime_serde")]
    pub limit: Duration,
}

impl Default for Shutdown {
    fn default() -> Self {
        Self { settle: Duration::from_secs(1), limit: Duration::from_secs(30) }
    }
}

impl Config {
    /// The part that the core reads.
    #[must_use]
    pub fn core(&self) -> Settings {
        Settings {
            timeouts: self.timeouts.clone(),
            probe: self.probe.clone(),
            hand_off: self.hand_off.clone(),
            breaker: self.breaker.clone(),
            admission: self.admission.clone(),
            pairing: self.pairing.clone(),
            discovery: self.discovery.clone(),
            side_channel: self.side_channel.clone(),
            kv_events: self.kv_events.clone(),
            retry: self.retry.clone(),
            limits: self.limits.clone(),
            store: self.store.clone(),
            engine_tls: kvbaton_proxy::EngineTls::default(),
            writers: self.writers(),
            traces: kvbaton_proxy::Traces::default(),
            stream: self.stream.clone(),
            nixl: self.nixl.clone(),
            timeline: self.timeline.clone(),
            routing: self.routing.clone(),
            disaggregation: self.disaggregation.clone(),
            models: self.models.clone(),
        }
    }

    /// Whether the program starts simulated engines of its own.
    #[must_use]
    pub fn embeds_fleet(&self) -> bool {
        match self.fleet.embedded {
            Embedded::Always => true,
            Embedded::Never => false,
            Embedded::Auto => self.prefill.is_empty() && self.decode.is_empty() && self.discovery.is_empty(),
        }
    }

    /// Checks what types cannot express.
    ///
    /// # Errors
    /// Every fault at once.
    pub fn validate(&self) -> Result<(), ConfigFaults> {
        let mut faults = Vec::new();
        let mut wrong = |key: &str, what: String, hint: &str| {
            faults.push(ConfigFault::new(Source::Settings, key, what, Some(hint.to_owned())));
        };
        let positive = [
            ("timeouts.connect", self.timeouts.connect),
            ("timeouts.slow_connect", self.timeouts.slow_connect),
            ("timeouts.prefill", self.timeouts.prefill),
            ("timeouts.decode_head", self.timeouts.decode_head),
            ("timeouts.idle", self.timeouts.idle),
            ("timeouts.total", self.timeouts.total),
            ("timeouts.release", self.timeouts.release),
            ("timeouts.client_body", self.timeouts.client_body),
            ("timeouts.client_body_whole", self.timeouts.client_body_whole),
            ("probe.interval", self.probe.interval),
            ("probe.timeout", self.probe.timeout),
            ("hand_off.lease", self.hand_off.lease),
            ("hand_off.lease_v2", self.hand_off.lease_v2),
            ("side_channel.interval", self.side_channel.interval),
            ("kv_events.tokenize_within", self.kv_events.tokenize_within),
        ];
        for (key, value) in positive {
            if value.is_zero() {
                wrong(key, "must not be zero".into(), "give a duration such as \"30s\"");
            }
        }
        for (key, value) in
            [("retry.per_request", self.retry.per_request), ("retry.per_second", self.retry.per_second)]
        {
            if !(0.0..=1e6).contains(&value) {
                wrong(key, "must be a number from 0 to 1000000".into(), "the default is 0.2 and 1.0");
            }
        }
        for (key, value) in positive {
            if value > LONGEST {
                wrong(key, "is longer than a week".into(), "give a duration such as \"30s\"");
            }
        }
        for (key, fault) in self.store.faults() {
            wrong(key, fault.to_string(), "see the section `[store]` in the README");
        }
        if self.pairing.quarantine_restarted > LONGEST {
            wrong("pairing.quarantine_restarted", "is longer than a week".into(), "the default is \"0s\"");
        }
        if self.hand_off.min_prompt_bytes > self.limits.body_bytes {
            wrong(
                "hand_off.min_prompt_bytes",
                "is more than any body may have".into(),
                "at most limits.body_bytes; 0 hands everything off",
            );
        }
        if let Err(error) = crate::telemetry::filter(&self.log.level, self.log.requests) {
            wrong("log.level", error.to_string(), "error, warn, info, debug or trace");
        }
        if self.probe.patience == 0 {
            wrong("probe.patience", "must not be zero".into(), "the default is 3");
        }
        if !self.nixl.is_version_readable() {
            wrong("nixl.version", "is not a NIXL version".into(), "such as \"1.5.1\"");
        }
        if self.side_channel.front.enabled && self.side_channel.front.host().is_none() {
            wrong(
                "side_channel.front.advertise",
                "is needed with a wildcard address".into(),
                "the host at which decode engines reach the router",
            );
        }
        if self.side_channel.front.advertise.as_deref().is_some_and(|host| !kvbaton_proxy::is_host(host)) {
            wrong("side_channel.front.advertise", "is no host".into(), "a host name or an IP address");
        }
        if self.limits.body_bytes == 0 {
            wrong("limits.body_bytes", "must not be zero".into(), "the default is 67108864");
        }
        if self.limits.held_bytes < self.limits.body_bytes.max(self.limits.answer_bytes) {
            let least = "is less than one body or answer may have".into();
            wrong("limits.held_bytes", least, "at least limits.body_bytes and limits.answer_bytes");
        }
        if self.stream.keep_alive > LONGEST {
            wrong("stream.keep_alive", "is longer than a week".into(), "\"10s\", or \"0s\" for none");
        }
        if self.shutdown.settle > self.shutdown.limit {
            wrong(
                "shutdown.settle",
                "is longer than shutdown.limit".into(),
                "settling is part of the whole budget",
            );
        }
        security::check(self, &mut wrong);
        health::check(self, &mut wrong);
        routing::check(self, &mut wrong);
        telemetry::check(self, &mut wrong);
        discovery::check(self, &mut wrong);
        if self.embeds_fleet() && (self.fleet.prefill == 0 || self.fleet.decode == 0) {
            wrong("fleet", "needs at least one engine of each role".into(), "set both counts to 1 or more");
        }
        for (list, role, peers) in
            [("prefill", Role::Prefill, &self.prefill), ("decode", Role::Decode, &self.decode)]
        {
            let mut seen = std::collections::BTreeSet::new();
            for (position, peer) in peers.iter().enumerate() {
                let key = format!("{list}[{position}]");
                if peer.role != role {
                    wrong(&key, "has another role than its list".into(), "move it to the other list");
                }
                if let Err(error) = peer.check() {
                    let hint = match error {
                        PeerSpecError::Url { .. } | PeerSpecError::Scheme { .. } => {
                            "an engine's URL looks like http://10.0.0.5:8100"
                        }
                        PeerSpecError::Token => "set token, or authorization = \"forward\"",
                        PeerSpecError::SideChannel => "the port is 5600 unless the engine says otherwise",
                        PeerSpecError::Ranks => {
                            "dp_size with dp_split = true stands for all ranks of the url"
                        }
                        PeerSpecError::SideChannelAddress => "such as \"10.0.0.5:5600\"",
                        PeerSpecError::Size => "leave out what is not known",
                        PeerSpecError::Lease => "the engine's own setting, 30s unless it was changed",
                        PeerSpecError::AbandonGrace => "\"0s\" aborts abandoned prefills at once",
                        PeerSpecError::Notify => "move notify to the prefill engine",
                        PeerSpecError::NixlVersion { .. } => "what `pip show nixl` says there",
                        PeerSpecError::KvEvents => "such as \"tcp://10.0.0.5:5557\"",
                        PeerSpecError::Name { .. } | PeerSpecError::Exists { .. } => "such as \"p1\"",
                    };
                    wrong(&key, error.to_string(), hint);
                }
                if !seen.insert((peer.url.trim_end_matches('/'), peer.dp_rank)) {
                    wrong(&key, format!("{} stands twice in the list", peer.url), "remove one of them");
                }
            }
        }
        if faults.is_empty() { Ok(()) } else { Err(ConfigFaults(faults)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(Config::default().validate(), Ok(()));
        assert!(Config::default().embeds_fleet());
    }

    #[test]
    fn the_guide_to_tuning_names_the_defaults() {
        let defaults = toml::Value::try_from(Config::default()).unwrap();
        let rows = include_str!("../docs/tuning.md").lines().filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.split(" | ");
            let key = cells.next()?.trim_end_matches('`');
            Some((key, cells.next()?.strip_prefix('`')?.strip_suffix('`')?))
        });
        let mut compared = 0;
        for (key, told) in rows {
            let mut value = Some(&defaults);
            for part in key.split('.') {
                value = value.and_then(|value| value.get(part));
            }
            let value = value.unwrap_or_else(|| panic!("{key} is no setting")).to_string();
            assert_eq!(told, value, "{key}");
            compared += 1;
        }
        assert!(compared > 30, "{compared}");
    }

    #[test]
    fn all_faults_are_listed_at_once() {
        let mut config = Config::default();
        config.timeouts.connect = Duration::ZERO;
        config.admin.token = Some(" ".into());
        config.prefill =
            vec![PeerSpec::new(Role::Prefill, "ftp://x"), PeerSpec::new(Role::Decode, "http://y")];
        let faults = config.validate().unwrap_err();
        let keys: Vec<&str> = faults.0.iter().map(|fault| fault.key.as_str()).collect();
        assert_eq!(keys, ["timeouts.connect", "admin.token", "prefill[0]", "prefill[1]"]);
    }
}
