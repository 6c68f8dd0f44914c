//! A name in DNS as a source of peers.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{DiscoveryFault, LONGEST, PeerScheme, PeerTemplate};
use crate::registry::EngineRole;

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

impl DnsSource {
    /// The source's name for people and metrics.
    #[must_use]
    pub fn label(&self) -> String {
        format!("dns:{}", self.name)
    }

    pub(super) fn faults(&self) -> Vec<DiscoveryFault> {
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
