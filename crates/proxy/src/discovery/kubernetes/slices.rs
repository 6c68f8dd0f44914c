//! From a source's EndpointSlices to engines' addresses. Pure.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};

use super::super::Report;
use super::super::failure::SourceFailure;
use super::super::kept::Found;
use super::super::settings::PortChoice;

/// The slices of a source, by their names.
#[derive(Debug, Default)]
pub(super) struct Slices(BTreeMap<String, EndpointSlice>);

impl Slices {
    pub(super) fn put(&mut self, slice: EndpointSlice) {
        self.0.insert(slice.metadata.name.clone().unwrap_or_default(), slice);
    }

    pub(super) fn remove(&mut self, slice: &EndpointSlice) {
        self.0.remove(slice.metadata.name.as_deref().unwrap_or_default());
    }

    /// All endpoints of all slices. An endpoint may stand in several: once as one that serves is enough. A pod
    /// with addresses of both families is one engine, at its IPv4 address.
    pub(super) fn report(&self, port: Option<&PortChoice>) -> Report {
        let mut by_address: BTreeMap<SocketAddr, Found> = BTreeMap::new();
        let mut failure = None;
        for slice in self.0.values().filter(|slice| !slice.endpoints.is_empty()) {
            let Some(port) = port_of(slice, port) else {
                let name = slice.metadata.name.clone().unwrap_or_default();
                failure = Some(SourceFailure::NoSuchPort { slice: name, ports: names(slice) });
                continue;
            };
            for found in slice.endpoints.iter().filter_map(|endpoint| engine(endpoint, port)) {
                match by_address.get(&found.address) {
                    Some(known) if !known.leaving => {}
                    _ => drop(by_address.insert(found.address, found)),
                }
            }
        }
        // IPv4 comes first in this order.
        let mut pods: HashMap<(String, u16), SocketAddr> = HashMap::new();
        by_address.retain(|address, found| {
            let Some(instance) = &found.instance else { return true };
            *pods.entry((instance.clone(), address.port())).or_insert(*address) == *address
        });
        Report { found: Some(by_address.into_values().collect()), failure }
    }
}

/// The port on which a slice's engines listen; without a choice it must have only one.
fn port_of(slice: &EndpointSlice, choice: Option<&PortChoice>) -> Option<u16> {
    let ports = slice.ports.as_deref().unwrap_or_default();
    let found = match choice {
        Some(PortChoice::Number(number)) => return Some(*number),
        Some(PortChoice::Name(name)) => ports.iter().find(|port| port.name.as_ref() == Some(name)),
        None => ports.first().filter(|_| ports.len() == 1),
    };
    u16::try_from(found?.port?).ok().filter(|port| *port != 0)
}

fn names(slice: &EndpointSlice) -> Vec<String> {
    slice.ports.iter().flatten().map(|port| port.name.clone().unwrap_or_default()).collect()
}

fn engine(endpoint: &Endpoint, port: u16) -> Option<Found> {
    // Several addresses of one endpoint mean the same; names of hosts are none.
    let ip: IpAddr = endpoint.addresses.first()?.parse().ok()?;
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let serves = conditions.serving.or(conditions.ready).unwrap_or(true);
    let labels = [("zone", &endpoint.zone), ("node", &endpoint.node_name)];
    let labels = labels.into_iter().filter_map(|(label, value)| Some((label.to_owned(), value.clone()?)));
    Some(Found {
        address: SocketAddr::new(ip, port),
        labels: labels.collect(),
        instance: endpoint.target_ref.as_ref().and_then(|target| target.uid.clone()),
        leaving: !serves || conditions.terminating == Some(true),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(name: &str, family: &str, endpoints: Value) -> EndpointSlice {
        let value = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": name},
            "addressType": family, "endpoints": endpoints,
            "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
        });
        serde_json::from_value(value).unwrap()
    }

    /// A pod with the conditions ready, serving and terminating.
    fn pod(ip: &str, conditions: [Option<bool>; 3]) -> Value {
        let [ready, serving, terminating] = conditions;
        json!({"addresses": [ip],
               "conditions": {"ready": ready, "serving": serving, "terminating": terminating}})
    }

    const SERVES: [Option<bool>; 3] = [Some(true), Some(true), Some(false)];

    /// The addresses, and whether they leave.
    fn told(slices: Vec<EndpointSlice>, port: Option<PortChoice>) -> (Vec<(String, bool)>, bool) {
        let mut all = Slices::default();
        for slice in slices {
            all.put(slice);
        }
        let report = all.report(port.as_ref());
        let found = report.found.unwrap().into_iter();
        (found.map(|one| (one.address.to_string(), one.leaving)).collect(), report.failure.is_some())
    }

    fn one(ip: &str, leaving: bool) -> (String, bool) {
        (format!("{ip}:8000"), leaving)
    }

    #[test]
    fn conditions_decide_who_serves() {
        let endpoints = json!([
            pod("10.0.0.1", SERVES),
            pod("10.0.0.2", [Some(false), Some(false), Some(false)]),
            pod("10.0.0.3", [Some(false), Some(true), Some(true)]),
            // What is not said counts as ready.
            pod("10.0.0.4", [None, None, None]),
            pod("10.0.0.5", [Some(false), None, None]),
        ]);
        let (found, failed) = told(vec![slice("a", "IPv4", endpoints)], None);
        let leaving = [false, true, true, false, true];
        let expected: Vec<_> =
            (1..=5).map(|last| one(&format!("10.0.0.{last}"), leaving[last - 1])).collect();
        assert_eq!((found, failed), (expected, false));
    }

    #[test]
    fn several_slices_are_one_set_and_an_endpoint_that_serves_in_one_serves() {
        let a = slice("a", "IPv4", json!([pod("10.0.0.1", SERVES), pod("10.0.0.2", SERVES)]));
        let b = slice("b", "IPv4", json!([pod("10.0.0.1", [Some(false), Some(false), Some(true)])]));
        let expected = vec![one("10.0.0.1", false), one("10.0.0.2", false)];
        assert_eq!(told(vec![a.clone(), b.clone()], None).0, expected);
        assert_eq!(told(vec![b, a], None).0, expected);
    }

    #[test]
    fn a_pod_of_two_families_is_one_engine_and_ipv6_alone_does() {
        let of_pod = |ip: &str, uid: &str| {
            let mut pod = pod(ip, SERVES);
            pod["targetRef"] = json!({"kind": "Pod", "name": "d", "uid": uid});
            pod
        };
        let six = slice("a", "IPv6", json!([of_pod("fd00::1", "1"), of_pod("fd00::2", "2")]));
        let four = slice("b", "IPv4", json!([of_pod("10.0.0.1", "1")]));
        let expected = vec![one("10.0.0.1", false), one("[fd00::2]", false)];
        assert_eq!(told(vec![six, four], None).0, expected);
    }

    #[test]
    fn a_port_is_chosen_by_name_or_number_or_is_the_only_one() {
        let mut two = slice("a", "IPv4", json!([pod("10.0.0.1", SERVES)]));
        let mut metrics = two.ports.clone().unwrap()[0].clone();
        (metrics.name, metrics.port) = (Some("metrics".into()), Some(9000));
        two.ports.as_mut().unwrap().push(metrics);
        let choose = |port| told(vec![two.clone()], port);
        let at = |port: u16| vec![(format!("10.0.0.1:{port}"), false)];
        assert_eq!(choose(Some(PortChoice::Name("metrics".into()))), (at(9000), false));
        assert_eq!(choose(Some(PortChoice::Number(7))), (at(7), false));
        assert_eq!(choose(None), (Vec::new(), true), "two to choose from");
        assert_eq!(choose(Some(PortChoice::Name("grpc".into()))), (Vec::new(), true));
        two.ports = None;
        assert_eq!(told(vec![two], None), (Vec::new(), true));
    }

    #[test]
    fn zone_and_node_become_labels_and_the_pod_is_known_by_its_uid() {
        let mut pod = pod("10.0.0.1", SERVES);
        pod["zone"] = "eu-1a".into();
        pod["nodeName"] = "gpu-7".into();
        pod["targetRef"] = json!({"kind": "Pod", "uid": "u"});
        let mut all = Slices::default();
        all.put(slice("a", "IPv4", json!([pod])));
        let found = all.report(None).found.unwrap().remove(0);
        let labels: Vec<(&str, &str)> =
            found.labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(labels, [("node", "gpu-7"), ("zone", "eu-1a")]);
        assert_eq!(found.instance.as_deref(), Some("u"));
    }

    /// As `kubectl get endpointslice -o json` shows one of a minikube: a single port whose name is empty, no zone.
    #[test]
    fn a_slice_of_a_real_cluster_is_read() {
        let recorded = include_str!("../../../../../tests/fixtures/kubernetes/minikube-slice.json");
        let mut all = Slices::default();
        all.put(serde_json::from_str(recorded).unwrap());
        let found = all.report(None).found.unwrap();
        let [one] = &found[..] else { panic!("{found:?}") };
        assert_eq!((one.address.to_string().as_str(), one.leaving), ("10.244.0.12:9090", false));
        assert_eq!(one.labels.iter().collect::<Vec<_>>(), [(&"node".to_owned(), &"minikube".to_owned())]);
        assert_eq!(one.instance.as_deref(), Some("39dc5ba8-df5d-4220-95b4-e887289ebf0a"));
    }

    #[test]
    fn names_of_hosts_and_slices_without_endpoints_give_nothing() {
        let names = slice("a", "FQDN", json!([pod("engine.example.org", SERVES)]));
        let mut empty = slice("b", "IPv4", json!([]));
        empty.ports = None;
        assert_eq!(told(vec![names, empty], None), (Vec::new(), false));
    }
}
