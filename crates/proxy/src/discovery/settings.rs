//! Which sources of engines' addresses there are, with what cannot be used found before it is tried.

mod dns;
mod kubernetes;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::pool::peer::{PeerSpec, PeerSpecError, Role};
use crate::registry::EngineRole;
pub use dns::{DnsKind, DnsSource};
pub use kubernetes::{KubernetesSource, PortChoice};

/// Longest duration of any of these settings.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Sources of engines' addresses, and what holds for all of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DiscoverySettings {
    /// The DNS servers that are asked; those of the system when empty.
    pub nameservers: Vec<SocketAddr>,
    /// How long one question to a DNS server may take.
    #[serde(with = "humantime_serde")]
    pub dns_timeout: Duration,
    /// The soonest that a name is asked for again, however short its records' time to live is.
    #[serde(with = "humantime_serde")]
    pub min_refresh: Duration,
    /// How long an address stays that an answer leaves out.
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
    /// How long everything stays when a source answers with nothing.
    #[serde(with = "humantime_serde")]
    pub empty_grace: Duration,
    /// Names in DNS.
    pub dns: Vec<DnsSource>,
    /// Services in Kubernetes.
    pub kubernetes: Vec<KubernetesSource>,
}

impl Default for DiscoverySettings {
    fn default() -> Self {
        Self {
            nameservers: Vec::new(),
            dns_timeout: Duration::from_secs(2),
            min_refresh: Duration::from_secs(1),
            grace: Duration::ZERO,
            empty_grace: Duration::from_secs(60),
            dns: Vec::new(),
            kubernetes: Vec::new(),
        }
    }
}

/// How discovered engines are spoken to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerScheme {
    /// Without TLS.
    #[default]
    Http,
    /// With TLS; the engine's certificate names its IP address.
    Https,
}

/// What is said of a peer beside its role and address.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerTemplate(PeerSpec);

impl Default for PeerTemplate {
    fn default() -> Self {
        Self(PeerSpec::new(Role::Decode, ""))
    }
}

impl From<PeerSpec> for PeerTemplate {
    fn from(spec: PeerSpec) -> Self {
        Self(spec)
    }
}

/// What each entry has in place of a template.
const OF_ADDRESSES: [&str; 4] = ["role", "url", "name", "dp_rank"];

impl Serialize for PeerTemplate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut value = serde_json::to_value(&self.0).unwrap_or_default();
        if let Value::Object(map) = &mut value {
            map.retain(|key, _| !OF_ADDRESSES.contains(&key.as_str()));
        }
        value.serialize(serializer)
    }
}

impl PeerTemplate {
    fn read(mut rest: Map<String, Value>) -> Result<Self, String> {
        if let Some(key) = OF_ADDRESSES.iter().find(|key| rest.contains_key(**key)) {
            return Err(format!("`{key}` is not for peers that are discovered"));
        }
        rest.insert("role".to_owned(), "decode".into());
        rest.insert("url".to_owned(), "".into());
        PeerSpec::deserialize(Value::Object(rest)).map(Self).map_err(|error| error.to_string())
    }

    /// The peers at an address, one for each role and rank.
    pub(crate) fn peers(&self, role: EngineRole, url: &str) -> Vec<PeerSpec> {
        let roles: &[Role] = match role {
            EngineRole::Prefill => &[Role::Prefill],
            EngineRole::Decode => &[Role::Decode],
            EngineRole::Both => &[Role::Prefill, Role::Decode],
        };
        let of_role = |role: &Role| PeerSpec { role: *role, url: url.to_owned(), ..self.0.clone() }.ranks();
        roles.iter().flat_map(of_role).collect()
    }

    fn check(&self, role: EngineRole) -> Result<(), PeerSpecError> {
        self.peers(role, "http://127.0.0.1:1").iter().try_for_each(PeerSpec::check)?;
        // As a whole too: `ranks` takes what cannot be split for one peer.
        PeerSpec { url: "http://127.0.0.1:1".to_owned(), role: Role::Prefill, ..self.0.clone() }.check()
    }
}

/// What of a source cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryFault {
    /// A duration out of its range.
    #[error("must be {} and at most a day", if *.may_be_zero { "0 or more" } else { "above 0" })]
    Duration {
        /// Whether zero would do.
        may_be_zero: bool,
    },
    /// The name cannot be one in DNS.
    #[error("{name:?} is no name in DNS")]
    Name {
        /// The name.
        name: String,
    },
    /// A and AAAA records have no port.
    #[error("needs port: A and AAAA records have none")]
    NoPort,
    /// Port 0, or a port where the records have one.
    #[error("has a port that cannot be used")]
    Port,
    /// The peers' description.
    #[error(transparent)]
    Peer(#[from] PeerSpecError),
    /// Two sources find the same.
    #[error("finds the same as another source: {label}")]
    Twice {
        /// The source.
        label: String,
    },
    /// Not in this build.
    #[error("is not in this build: build it with `--features kubernetes`")]
    NotBuilt,
    /// Neither or both of `service` and `selector`.
    #[error("needs either service or selector")]
    ServiceOrSelector,
    /// A name that Kubernetes would not have.
    #[error("{name:?} is no name in Kubernetes")]
    Object {
        /// The name.
        name: String,
    },
    /// Both ways to the API, or a context without its file.
    #[error("api and kubeconfig exclude each other, and context needs kubeconfig")]
    Api,
    /// `api` is no URL.
    #[error("{api:?} is not of the form http://host:port")]
    ApiUrl {
        /// What was given.
        api: String,
    },
}

impl DiscoverySettings {
    /// Whether there is no source.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.dns.is_empty() && self.kubernetes.is_empty()
    }

    /// All faults, each with its key.
    #[must_use]
    pub fn faults(&self) -> Vec<(String, DiscoveryFault)> {
        let mut faults = Vec::new();
        for (key, value, may_be_zero) in [
            ("discovery.dns_timeout", self.dns_timeout, false),
            ("discovery.min_refresh", self.min_refresh, false),
            ("discovery.grace", self.grace, true),
            ("discovery.empty_grace", self.empty_grace, true),
        ] {
            if value > LONGEST || (value.is_zero() && !may_be_zero) {
                faults.push((key.to_owned(), DiscoveryFault::Duration { may_be_zero }));
            }
        }
        let mut known = BTreeSet::new();
        for (at, source) in self.dns.iter().enumerate() {
            let what = (source.label(), role_number(source.role), format!("{:?}", source.port));
            let twice = (!known.insert(what)).then(|| DiscoveryFault::Twice { label: source.label() });
            for fault in source.faults().into_iter().chain(twice) {
                faults.push((format!("discovery.dns[{at}]"), fault));
            }
        }
        for (at, source) in self.kubernetes.iter().enumerate() {
            let what = (source.label(), role_number(source.role), format!("{:?}", source.port));
            let twice = (!known.insert(what)).then(|| DiscoveryFault::Twice { label: source.label() });
            for fault in source.faults().into_iter().chain(twice) {
                faults.push((format!("discovery.kubernetes[{at}]"), fault));
            }
        }
        faults
    }
}

const fn role_number(role: EngineRole) -> u8 {
    match role {
        EngineRole::Prefill => 0,
        EngineRole::Decode => 1,
        EngineRole::Both => 2,
    }
}

impl PeerTemplate {
    fn check_for(&self, role: EngineRole) -> Option<DiscoveryFault> {
        self.check(role).err().map(DiscoveryFault::Peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dns(text: &str) -> Result<DnsSource, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_source_has_the_fields_of_a_peer_beside_its_own() {
        let source = dns(
            r#"{"name":"d.svc","port":8000,"role":"both","labels":{"zone":"a"},"lease":"9s","token":"secret"}"#,
        )
        .unwrap();
        assert_eq!((source.refresh, source.kind), (Duration::from_secs(30), DnsKind::A));
        let peers = source.peer.peers(source.role, "http://10.0.0.1:8000");
        let roles: Vec<Role> = peers.iter().map(|peer| peer.role).collect();
        assert_eq!(roles, [Role::Prefill, Role::Decode]);
        assert_eq!(peers[0].labels["zone"], "a");
        assert_eq!(peers[1].lease, Some(Duration::from_secs(9)));
        let text = serde_json::to_string(&source).unwrap();
        assert!(text.contains(r#""lease":"9s""#) && !text.contains("secret"), "{text}");
        assert_eq!(dns(&text.replacen('{', r#"{"token":"secret","#, 1)).unwrap(), source);
    }

    #[test]
    fn what_is_no_setting_of_a_source_is_refused() {
        let refusal = |text: &str| dns(text).unwrap_err();
        assert!(
            refusal(r#"{"name":"d","port":1,"role":"decode","prot":1}"#).contains("unknown field `prot`")
        );
        assert!(
            refusal(r#"{"name":"d","port":1,"role":"decode","url":"http://a"}"#).contains("`url` is not")
        );
        assert!(refusal(r#"{"name":"d","port":1}"#).contains("missing field `role`"));
    }

    #[test]
    fn faults_are_found_before_anybody_is_asked() {
        let fault = |text: &str| {
            let settings =
                DiscoverySettings { dns: vec![dns(text).unwrap()], ..DiscoverySettings::default() };
            let mut faults = settings.faults();
            assert_eq!(faults.len(), 1, "{text}: {faults:?}");
            faults.remove(0).1
        };
        assert_eq!(fault(r#"{"name":"d","role":"decode"}"#), DiscoveryFault::NoPort);
        assert_eq!(fault(r#"{"name":"d","role":"decode","kind":"srv","port":1}"#), DiscoveryFault::Port);
        assert_eq!(
            fault(r#"{"name":"d","role":"decode","kind":"srv","refresh":"0s"}"#),
            DiscoveryFault::Duration { may_be_zero: false }
        );
        assert_eq!(
            fault(r#"{"name":"a..b","role":"decode","kind":"srv"}"#),
            DiscoveryFault::Name { name: "a..b".into() }
        );
        assert_eq!(
            fault(r#"{"name":"d","port":1,"role":"decode","tp_size":0}"#),
            DiscoveryFault::Peer(PeerSpecError::Size)
        );
    }

    #[test]
    fn one_name_may_stand_for_several_roles_and_ports_but_for_none_twice() {
        let source =
            |role: &str, port: u16| dns(&format!(r#"{{"name":"d","port":{port},"role":"{role}"}}"#)).unwrap();
        let mut settings = DiscoverySettings {
            dns: vec![source("decode", 1), source("prefill", 1), source("decode", 2)],
            ..DiscoverySettings::default()
        };
        assert_eq!(settings.faults(), []);
        settings.dns.push(source("decode", 1));
        let twice = DiscoveryFault::Twice { label: "dns:d".into() };
        assert_eq!(settings.faults(), [("discovery.dns[3]".to_owned(), twice)]);
    }

    #[test]
    fn a_kubernetes_source_names_one_thing_and_one_way() {
        let faults = |text: &str| -> Vec<DiscoveryFault> {
            let source: KubernetesSource = serde_json::from_str(text).unwrap();
            source.faults().into_iter().filter(|fault| *fault != DiscoveryFault::NotBuilt).collect()
        };
        let good = r#"{"namespace":"llm","service":"decode","port":"http","role":"decode"}"#;
        assert_eq!(faults(good), []);
        assert_eq!(faults(r#"{"namespace":"llm","role":"decode"}"#), [DiscoveryFault::ServiceOrSelector]);
        assert_eq!(
            faults(r#"{"namespace":"LLM","selector":"app=x","role":"decode","context":"c"}"#),
            [DiscoveryFault::Object { name: "LLM".into() }, DiscoveryFault::Api]
        );
        assert_eq!(
            faults(r#"{"namespace":"llm","service":"d","port":0,"role":"decode","api":"ftp://a"}"#),
            [DiscoveryFault::Port, DiscoveryFault::ApiUrl { api: "ftp://a".into() }]
        );
        let source: KubernetesSource = serde_json::from_str(good).unwrap();
        assert_eq!(source.label(), "kubernetes:llm/decode");
    }
}
