//! Which sources of engines' addresses there are, with what cannot be used found before it is tried.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::pool::peer::{PeerSpec, PeerSpecError, Role};
use crate::registry::EngineRole;

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

/// Which records name the engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DnsKind {
    /// A and AAAA records; the port is in the settings.
    #[default]
    A,
    /// SRV records, which have the port, and the addresses of their targets.
    Srv,
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

/// One name in DNS, and what the peers at its addresses are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "DnsText")]
pub struct DnsSource {
    /// The name.
    pub name: String,
    /// Which records name the engines.
    pub kind: DnsKind,
    /// The engines' port, where the records have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// How the engines are spoken to.
    pub scheme: PeerScheme,
    /// What the engines do.
    pub role: EngineRole,
    /// The longest time between two questions; a shorter time to live is respected.
    #[serde(with = "humantime_serde")]
    pub refresh: Duration,
    /// The peers' further description.
    #[serde(flatten)]
    pub peer: PeerTemplate,
}

/// The EndpointSlices of one Kubernetes Service or label selector, and what the peers at their addresses are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "KubernetesText")]
pub struct KubernetesSource {
    /// The namespace.
    pub namespace: String,
    /// The Service whose slices are watched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// In place of a Service: a label selector of slices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Name or number of the engines' port; the only one of a slice when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<PortChoice>,
    /// How the engines are spoken to.
    pub scheme: PeerScheme,
    /// What the engines do.
    pub role: EngineRole,
    /// URL of the API, spoken to without credentials; the cluster that the router runs in when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api: Option<String>,
    /// A kubeconfig file, whose current context names API and credentials.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// Another context of that file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    /// The peers' further description; zone and node of an endpoint become labels.
    #[serde(flatten)]
    pub peer: PeerTemplate,
}

/// A port by its name or its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PortChoice {
    /// The number that engines listen on, whatever the slices call it.
    Number(u16),
    /// The port's name in the Service.
    Name(String),
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

#[derive(Deserialize)]
struct DnsText {
    name: String,
    #[serde(default)]
    kind: DnsKind,
    port: Option<u16>,
    #[serde(default)]
    scheme: PeerScheme,
    role: EngineRole,
    #[serde(default = "half_a_minute", with = "humantime_serde")]
    refresh: Duration,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

const fn half_a_minute() -> Duration {
    Duration::from_secs(30)
}

impl TryFrom<DnsText> for DnsSource {
    type Error = String;

    fn try_from(text: DnsText) -> Result<Self, String> {
        let DnsText { name, kind, port, scheme, role, refresh, rest } = text;
        Ok(Self { name, kind, port, scheme, role, refresh, peer: PeerTemplate::read(rest)? })
    }
}

#[derive(Deserialize)]
struct KubernetesText {
    namespace: String,
    service: Option<String>,
    selector: Option<String>,
    port: Option<PortChoice>,
    #[serde(default)]
    scheme: PeerScheme,
    role: EngineRole,
    api: Option<String>,
    kubeconfig: Option<PathBuf>,
    context: Option<String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl TryFrom<KubernetesText> for KubernetesSource {
    type Error = String;

    fn try_from(text: KubernetesText) -> Result<Self, String> {
        let KubernetesText {
            namespace,
            service,
            selector,
            port,
            scheme,
            role,
            api,
            kubeconfig,
            context,
            rest,
        } = text;
        let peer = PeerTemplate::read(rest)?;
        Ok(Self { namespace, service, selector, port, scheme, role, api, kubeconfig, context, peer })
    }
}

impl DnsSource {
    /// The source's name for people and metrics.
    #[must_use]
    pub fn label(&self) -> String {
        format!("dns:{}", self.name)
    }
}

impl KubernetesSource {
    /// The source's name for people and metrics.
    #[must_use]
    pub fn label(&self) -> String {
        let what = self.service.as_ref().or(self.selector.as_ref()).map_or("", String::as_str);
        format!("kubernetes:{}/{what}", self.namespace)
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

impl DnsSource {
    fn faults(&self) -> Vec<DiscoveryFault> {
        let mut faults = Vec::new();
        if self.name.is_empty() || self.name.parse::<hickory_resolver::proto::rr::Name>().is_err() {
            faults.push(DiscoveryFault::Name { name: self.name.clone() });
        }
        match (self.kind, self.port) {
            (DnsKind::A, None) => faults.push(DiscoveryFault::NoPort),
            (DnsKind::A, Some(0)) | (DnsKind::Srv, Some(_)) => faults.push(DiscoveryFault::Port),
            _ => {}
        }
        if self.refresh.is_zero() || self.refresh > LONGEST {
            faults.push(DiscoveryFault::Duration { may_be_zero: false });
        }
        faults.extend(self.peer.check_for(self.role));
        faults
    }
}

impl KubernetesSource {
    fn faults(&self) -> Vec<DiscoveryFault> {
        let mut faults = Vec::new();
        if !cfg!(feature = "kubernetes") {
            faults.push(DiscoveryFault::NotBuilt);
        }
        if self.service.is_some() == self.selector.is_some() {
            faults.push(DiscoveryFault::ServiceOrSelector);
        }
        let names = [Some(&self.namespace), self.service.as_ref()];
        for name in names.into_iter().flatten().filter(|name| !is_object_name(name)) {
            faults.push(DiscoveryFault::Object { name: name.clone() });
        }
        if self.port == Some(PortChoice::Number(0)) {
            faults.push(DiscoveryFault::Port);
        }
        let both = self.api.is_some() && self.kubeconfig.is_some();
        if both || (self.context.is_some() && self.kubeconfig.is_none()) {
            faults.push(DiscoveryFault::Api);
        }
        if let Some(api) = self.api.as_ref().filter(|api| crate::registry::canonical_base_url(api).is_none())
        {
            faults.push(DiscoveryFault::ApiUrl { api: api.clone() });
        }
        faults.extend(self.peer.check_for(self.role));
        faults
    }
}

impl PeerTemplate {
    fn check_for(&self, role: EngineRole) -> Option<DiscoveryFault> {
        self.check(role).err().map(DiscoveryFault::Peer)
    }
}

fn is_object_name(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    !name.is_empty() && name.len() <= 253 && name.bytes().all(fits)
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
