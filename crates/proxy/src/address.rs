//! Whether the side channel that a hand-off names belongs to the peer that made it: a decode engine
//! connects to whatever stands there. Names are compared with names and addresses with addresses;
//! nothing is resolved, but the address that the peer's answer came from counts as the peer's.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use crate::Core;
use crate::handoff::HandedOff;
use crate::pool::peer::Peer;
use crate::registry::EngineRecord;
use crate::settings::AddressCheck;
use crate::side_channel::channels::ChannelAddress;
use crate::upstream::Route;

impl Core {
    /// Whether a hand-off's address is not its peer's, as far as that is to be checked.
    pub(crate) fn names_a_stranger(
        &self,
        peer: &Peer,
        hand_off: &HandedOff,
        route: Route,
        check: AddressCheck,
    ) -> bool {
        let engine = self.registry.engine(&hand_off.engine_id).map(|engine| Known {
            port: engine.traits.side_channel_port.filter(|_| !self.side_channels.is_ours(&engine)),
            engine,
        });
        is_foreign(check, peer, engine.as_ref(), &hand_off.channel.address, route)
    }
}

/// A registered engine.
struct Known {
    engine: std::sync::Arc<EngineRecord>,
    /// The port that it told. What this router has only read, because an earlier hand-off of the same peer
    /// named it, is no better than the newest hand-off: an engine that restarts may take another port.
    port: Option<u16>,
}

fn is_foreign(
    check: AddressCheck,
    peer: &Peer,
    known: Option<&Known>,
    named: &ChannelAddress,
    route: Route,
) -> bool {
    let configured = peer.spec.side_channel.as_deref().and_then(ChannelAddress::parse);
    let engine = known.map(|known| &*known.engine);
    let host = engine.and_then(|engine| engine.traits.side_channel_host.as_deref());
    let port = known.and_then(|known| known.port);
    let is_known = configured.is_some() || host.is_some() || port.is_some();
    match check {
        AddressCheck::Off => return false,
        AddressCheck::Known if !is_known => return false,
        AddressCheck::Known | AddressCheck::Strict => {}
    }
    // What the operator has put there is the operator's word.
    let same_port = |ports: Option<RangeInclusive<u16>>| {
        peer.spec.kv_port.is_some() || ports.is_none_or(|ports| ports.contains(&named.port))
    };
    let same_host = |host: &str| peer.spec.kv_host.is_some() || is_same(host, &named.host);
    let registered = port.map(|port| port..=port);
    let configured_ports = configured.as_ref().map(|channel| ports_of(channel, peer, engine));
    let is_own_host = same_host(peer.host())
        || route.remote.is_some_and(|ip| ip_of(&named.host) == Some(ip))
        || route.same_host && crate::handoff::is_private_to_its_host(&named.host);
    let own = is_own_host && same_port(registered.clone().or_else(|| configured_ports.clone()));
    let by_settings =
        configured.as_ref().is_some_and(|channel| same_host(&channel.host) && same_port(configured_ports));
    let by_registration = host.is_some_and(|host| same_host(host) && same_port(registered));
    !(own || by_settings || by_registration)
}

/// The ports that the operator's one stands for: each data-parallel engine has the next one.
fn ports_of(channel: &ChannelAddress, peer: &Peer, engine: Option<&EngineRecord>) -> RangeInclusive<u16> {
    let after = |ranks: u32| channel.port.saturating_add(u16::try_from(ranks).unwrap_or(u16::MAX));
    match engine {
        Some(engine) => after(engine.dp_rank)..=after(engine.dp_rank),
        None => channel.port..=after(peer.spec.dp_size.unwrap_or(1).saturating_sub(1)),
    }
}

fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

fn ip_of(host: &str) -> Option<IpAddr> {
    bare(host).parse().ok().map(|ip: IpAddr| ip.to_canonical())
}

fn is_same(one: &str, other: &str) -> bool {
    match (ip_of(one), ip_of(other)) {
        (Some(one), Some(other)) => one == other,
        (None, None) => one.trim_end_matches('.').eq_ignore_ascii_case(other.trim_end_matches('.')),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::peer::{PeerSpec, Role};
    use crate::registry::{Registration, Registry, RegistryLimits};

    const AWAY: Route = Route { same_host: false, remote: None };

    fn hand_off(host: &str, port: u16) -> ChannelAddress {
        ChannelAddress::new(host, port)
    }

    fn peer(url: &str, tune: impl FnOnce(&mut PeerSpec)) -> Peer {
        let mut spec = PeerSpec::new(Role::Prefill, url);
        tune(&mut spec);
        Peer::new("p".into(), spec).unwrap()
    }

    fn registered(host: Option<&str>, port: Option<u16>, dp_rank: u32) -> Known {
        let registry = Registry::new(RegistryLimits::default());
        let mut registration = Registration { engine_id: "e".into(), dp_rank, ..Registration::default() };
        registration.traits.side_channel_host = host.map(str::to_owned);
        registration.traits.side_channel_port = port;
        registry.register(registration).unwrap();
        Known { engine: registry.engine("e").unwrap(), port }
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
    async fn of_an_engine_that_was_only_read_the_port_may_be_another_one() {
        let peer = peer("http://p.internal:8100", |_| {});
        let engine = Known { port: None, ..registered(Some("10.9.9.9"), Some(5600), 0) };
        let foreign =
            |host, port| is_foreign(AddressCheck::Known, &peer, Some(&engine), &hand_off(host, port), AWAY);
        assert!(!foreign("10.9.9.9", 5601));
        assert!(!foreign("p.internal", 5601));
        assert!(foreign("169.254.169.254", 5600));
    }

    #[tokio::test]
    async fn the_operators_word_counts_for_every_data_parallel_rank() {
        let peer = peer("http://10.0.0.7:8100", |spec| {
            spec.side_channel = Some("10.9.9.9:5600".into());
            spec.dp_size = Some(2);
        });
        let foreign = |engine: Option<&Known>, host, port| {
            is_foreign(AddressCheck::Known, &peer, engine, &hand_off(host, port), AWAY)
        };
        assert!(!foreign(None, "10.9.9.9", 5600));
        assert!(!foreign(None, "10.9.9.9", 5601));
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
