//! Checks of the sources of engines' addresses, and samples of them for looking keys up.

use kvbaton_proxy::{
    DiscoveryFault, DnsKind, DnsSource, EngineRole, KubernetesSource, PeerScheme, PeerSpec, PortChoice,
};
use toml::{Table, Value};

use super::Config;

/// The lists of sources.
const LISTS: [&str; 2] = ["dns", "kubernetes"];

/// Fills the lists in which keys are looked up that settings may have; `peer` has every key of a peer.
pub(super) fn sample(config: &mut Config, peer: &PeerSpec) {
    config.discovery.nameservers = vec![([127, 0, 0, 1], 53).into()];
    config.discovery.dns = vec![DnsSource {
        name: "name".into(),
        kind: DnsKind::A,
        port: Some(1),
        scheme: PeerScheme::Http,
        role: EngineRole::Decode,
        refresh: std::time::Duration::from_secs(1),
        peer: peer.clone().into(),
    }];
    let text = || Some("text".to_owned());
    config.discovery.kubernetes = vec![KubernetesSource {
        namespace: "name".into(),
        service: text(),
        selector: text(),
        port: Some(PortChoice::Number(1)),
        scheme: PeerScheme::Http,
        role: EngineRole::Decode,
        api: text(),
        kubeconfig: Some("file".into()),
        context: text(),
        peer: peer.clone().into(),
    }];
}

/// Adds the keys that are never written out.
pub(super) fn complete(sample: &mut Table) {
    let Some(Value::Table(discovery)) = sample.get_mut("discovery") else { return };
    for list in LISTS {
        if let Some(Value::Array(sources)) = discovery.get_mut(list) {
            for source in sources.iter_mut().filter_map(Value::as_table_mut) {
                source.insert("token".into(), Value::String(String::new()));
            }
        }
    }
}

/// Tells every fault of these settings.
pub(super) fn check(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    for (key, fault) in config.discovery.faults() {
        let hint = match &fault {
            DiscoveryFault::Duration { .. } => "give a duration such as \"30s\"",
            DiscoveryFault::Name { .. } => "such as \"decode.llm.svc.cluster.local\"",
            DiscoveryFault::NoPort => "port = 8000, or kind = \"srv\"",
            DiscoveryFault::Port => "port = 8000 for kind = \"a\"; SRV records have the port themselves",
            DiscoveryFault::Peer(_) => "what holds for [[prefill]] and [[decode]] holds here",
            DiscoveryFault::Twice { .. } => "remove one of them",
            DiscoveryFault::NotBuilt => "or use [[discovery.dns]] with a headless Service",
            DiscoveryFault::ServiceOrSelector => "service = \"decode\"",
            DiscoveryFault::Object { .. } => "lower-case letters, digits, '-' and '.'",
            DiscoveryFault::Api => "leave all three out inside of the cluster",
            DiscoveryFault::ApiUrl { .. } => {
                "such as \"http://127.0.0.1:8001\", where `kubectl proxy` listens"
            }
        };
        wrong(&key, fault.to_string(), hint);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::read;

    #[test]
    fn sources_are_read_with_the_fields_of_peers_and_start_no_fleet() {
        let config = read(
            r#"
            [discovery]
            nameservers = ["127.0.0.1:5353"]
            [[discovery.dns]]
            name = "decode.svc"
            port = 8000
            role = "decode"
            labels = { zone = "a" }
            token = "t"
            authorization = "replace"
            [[discovery.dns]]
            name = "_http._tcp.prefill.svc"
            kind = "srv"
            role = "prefill"
            refresh = "5s"
            "#,
        )
        .unwrap();
        assert_eq!(config.discovery.dns.len(), 2);
        assert!(!config.embeds_fleet());
    }

    #[test]
    fn faults_name_their_entry_and_the_nearest_name() {
        let faults = |text: &str| -> Vec<(String, Option<String>)> {
            let faults = read(text).unwrap_err().0;
            faults.into_iter().map(|fault| (fault.key, fault.hint)).collect()
        };
        let near = Some("did you mean refresh?".to_owned());
        let text = "[[discovery.dns]]\nname = \"d\"\nport = 1\nrole = \"decode\"\nrefrsh = \"1s\"";
        assert!(faults(text).contains(&("discovery.dns[0].refrsh".to_owned(), near)), "{:?}", faults(text));
        let text = "[[discovery.dns]]\nname = \"d\"\nrole = \"decode\"";
        let hint = Some("port = 8000, or kind = \"srv\"".to_owned());
        assert_eq!(faults(text), [("discovery.dns[0]".to_owned(), hint)]);
        assert_eq!(faults("[discovery]\ndns_timeout = \"0s\"")[0].0, "discovery.dns_timeout");
    }
}
