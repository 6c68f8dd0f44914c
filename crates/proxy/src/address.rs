//! Whether the side channel that a hand-off names belongs to the peer that made it: a decode engine
//! connects to whatever stands there. Names are compared with names and addresses with addresses;
//! nothing is resolved, but the address that the peer's answer came from counts as the peer's.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Core;
use crate::error::HandOffRefusal;
use crate::handoff::HandedOff;
use crate::pool::peer::Peer;
use crate::registry::EngineRecord;
use crate::settings::AddressCheck;
use crate::upstream::Route;

/// A side channel as an operator writes it: `host`, which stands for every port, or `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SideChannel {
    host: String,
    /// That of data-parallel rank 0; the others follow.
    port: Option<u16>,
}

/// The text is neither `host` nor `host:port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a host or host:port, an IPv6 address with a port in brackets")]
pub struct NotASideChannel;

impl FromStr for SideChannel {
    type Err = NotASideChannel;

    fn from_str(text: &str) -> Result<Self, NotASideChannel> {
        if text.parse::<Ipv6Addr>().is_ok() {
            return Ok(Self { host: text.to_owned(), port: None });
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            _ => (text, None),
        };
        let port = port.map(str::parse::<u16>).transpose().map_err(|_| NotASideChannel)?;
        let host = bare(host);
        if port == Some(0) || !crate::pool::peer::is_host(host) {
            return Err(NotASideChannel);
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl TryFrom<String> for SideChannel {
    type Error = NotASideChannel;

    fn try_from(text: String) -> Result<Self, NotASideChannel> {
        text.parse()
    }
}

impl From<SideChannel> for String {
    fn from(channel: SideChannel) -> Self {
        channel.to_string()
    }
}

impl fmt::Display for SideChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) if self.host.contains(':') => write!(f, "[{}]:{port}", self.host),
            Some(port) => write!(f, "{}:{port}", self.host),
            None => f.write_str(&self.host),
        }
    }
}

impl Core {
    /// The refusal of a hand-off whose address is not its peer's, as far as that is to be checked.
    pub(crate) fn foreign_address(
        &self,
        peer: &Peer,
        hand_off: &HandedOff,
        route: Route,
    ) -> Option<HandOffRefusal> {
        let check = self.settings.hand_off.address_check;
        let engine = self.registry.engine(&hand_off.engine_id);
        is_foreign(check, peer, engine.as_deref(), hand_off, route).then_some(HandOffRefusal::ForeignAddress)
    }
}

fn is_foreign(
    check: AddressCheck,
    peer: &Peer,
    engine: Option<&EngineRecord>,
    hand_off: &HandedOff,
    route: Route,
) -> bool {
    let configured = peer.spec.side_channel.as_ref();
    let traits = engine.map(|engine| &engine.traits);
    let (host, port) =
        traits.map_or((None, None), |traits| (traits.side_channel_host.as_deref(), traits.side_channel_port));
    let is_known = configured.is_some() || host.is_some() || port.is_some();
    match check {
        AddressCheck::Off => return false,
        AddressCheck::Known if !is_known => return false,
        AddressCheck::Known | AddressCheck::Strict => {}
    }
    let dp_rank = engine.map_or(0, |engine| engine.dp_rank);
    let configured_port = configured
        .and_then(|channel| channel.port)
        .map(|port| u16::try_from(dp_rank).ok().and_then(|rank| port.checked_add(rank)).unwrap_or(0));
    // What the operator has put there is the operator's word.
    let same_port =
        |port: Option<u16>| peer.spec.kv_port.is_some() || port.is_none_or(|port| port == hand_off.port);
    let named = |host: &str| peer.spec.kv_host.is_some() || is_same(host, &hand_off.host);
    let is_own_host = named(peer.host())
        || route.remote.is_some_and(|ip| hand_off_ip(hand_off) == Some(ip))
        || route.same_host && crate::handoff::is_private_to_its_host(&hand_off.host);
    let own = is_own_host && same_port(port.or(configured_port));
    let by_settings = configured.is_some_and(|channel| named(&channel.host) && same_port(configured_port));
    let by_registration = host.is_some_and(|host| named(host) && same_port(port));
    !(own || by_settings || by_registration)
}

fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

fn hand_off_ip(hand_off: &HandedOff) -> Option<IpAddr> {
    bare(&hand_off.host).parse().ok().map(|ip: IpAddr| ip.to_canonical())
}

fn is_same(one: &str, other: &str) -> bool {
    let ip = |host: &str| bare(host).parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
    match (ip(one), ip(other)) {
        (Some(one), Some(other)) => one == other,
        (None, None) => one.trim_end_matches('.').eq_ignore_ascii_case(other.trim_end_matches('.')),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use kv_connector::protocol::params::{Generation, TransferMode};

    use super::*;
    use crate::pool::peer::{PeerSpec, Role};
    use crate::registry::{Registration, Registry, RegistryLimits};

    const AWAY: Route = Route { same_host: false, remote: None };

    fn hand_off(host: &str, port: u16) -> HandedOff {
        HandedOff {
            raw: Bytes::new(),
            engine_id: "e".into(),
            remote_request_id: "r".into(),
            blocks: 1,
            generation: Generation::V14,
            mode: TransferMode::Pull,
            host: host.into(),
            port,
            sound: true,
        }
    }

    fn peer(url: &str, tune: impl FnOnce(&mut PeerSpec)) -> Peer {
        let mut spec = PeerSpec::new(Role::Prefill, url);
        tune(&mut spec);
        Peer::new("p".into(), spec).unwrap()
    }

    fn registered(host: Option<&str>, port: Option<u16>, dp_rank: u32) -> std::sync::Arc<EngineRecord> {
        let registry = Registry::new(RegistryLimits::default());
        let mut registration = Registration { engine_id: "e".into(), dp_rank, ..Registration::default() };
        registration.traits.side_channel_host = host.map(str::to_owned);
        registration.traits.side_channel_port = port;
        registry.register(registration).unwrap();
        registry.engine("e").unwrap()
    }

    #[test]
    fn side_channels_are_read_and_written() {
        for (text, host, port) in [
            ("host", "host", None),
            ("host:5600", "host", Some(5600)),
            ("10.0.0.1:5600", "10.0.0.1", Some(5600)),
            ("::1", "::1", None),
            ("[::1]:5600", "::1", Some(5600)),
        ] {
            let read: SideChannel = text.parse().unwrap();
            assert_eq!((read.host.as_str(), read.port), (host, port), "{text}");
            assert_eq!(read.to_string(), text);
        }
        for text in ["", ":5600", "host:", "host:0", "host:70000", "tcp://host:1", "a b"] {
            assert_eq!(text.parse::<SideChannel>(), Err(NotASideChannel), "{text}");
        }
    }

    #[tokio::test]
    async fn where_nothing_is_known_only_strict_refuses() {
        let peer = peer("http://10.0.0.7:8100", |_| {});
        let foreign = |check, host| is_foreign(check, &peer, None, &hand_off(host, 5600), AWAY);
        assert!(!foreign(AddressCheck::Known, "192.168.0.7"));
        assert!(!foreign(AddressCheck::Off, "192.168.0.7"));
        assert!(foreign(AddressCheck::Strict, "192.168.0.7"));
        assert!(!foreign(AddressCheck::Strict, "10.0.0.7"));
        assert!(!foreign(AddressCheck::Strict, "::ffff:10.0.0.7"));
        assert!(foreign(AddressCheck::Strict, "p.internal"));
    }

    #[tokio::test]
    async fn what_an_engine_registered_binds_its_hand_offs() {
        let peer = peer("http://p.internal:8100", |_| {});
        let engine = registered(Some("10.9.9.9"), Some(5600), 0);
        let foreign =
            |host, port| is_foreign(AddressCheck::Known, &peer, Some(&engine), &hand_off(host, port), AWAY);
        assert!(!foreign("10.9.9.9", 5600));
        assert!(foreign("10.9.9.9", 5601));
        assert!(!foreign("P.internal.", 5600), "the peer's own host");
        assert!(foreign("p.internal", 22));
        assert!(foreign("169.254.169.254", 5600));
        let away = hand_off("169.254.169.254", 5600);
        assert!(!is_foreign(AddressCheck::Off, &peer, Some(&engine), &away, AWAY));
        let remote = Route { same_host: false, remote: Some("10.1.1.1".parse().unwrap()) };
        let own = hand_off("10.1.1.1", 5600);
        assert!(!is_foreign(AddressCheck::Known, &peer, Some(&engine), &own, remote));
        let here = Route { same_host: true, remote: None };
        let local = hand_off("localhost", 5600);
        assert!(!is_foreign(AddressCheck::Known, &peer, Some(&engine), &local, here));
        assert!(is_foreign(AddressCheck::Known, &peer, Some(&engine), &local, AWAY));
    }

    #[tokio::test]
    async fn the_operators_word_counts_for_every_data_parallel_rank() {
        let peer = peer("http://10.0.0.7:8100", |spec| spec.side_channel = "10.9.9.9:5600".parse().ok());
        let foreign = |engine: Option<&EngineRecord>, host, port| {
            is_foreign(AddressCheck::Known, &peer, engine, &hand_off(host, port), AWAY)
        };
        assert!(!foreign(None, "10.9.9.9", 5600));
        assert!(foreign(None, "10.9.9.9", 5602));
        let third = registered(None, None, 2);
        assert!(!foreign(Some(&third), "10.9.9.9", 5602));
        assert!(foreign(Some(&third), "10.8.8.8", 5602));
    }

    #[tokio::test]
    async fn what_the_operator_rewrites_is_not_asked_about() {
        let peer = peer("http://10.0.0.7:8100", |spec| {
            spec.kv_host = Some("kv.internal".into());
            spec.kv_port = Some(7000);
        });
        let engine = registered(Some("10.9.9.9"), Some(5600), 0);
        let rewritten = hand_off("kv.internal", 7000);
        assert!(!is_foreign(AddressCheck::Strict, &peer, Some(&engine), &rewritten, AWAY));
    }
}
