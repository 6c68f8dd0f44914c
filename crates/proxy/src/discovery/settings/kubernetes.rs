//! The EndpointSlices of a Kubernetes cluster as a source of peers.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{DiscoveryFault, PeerScheme, PeerTemplate};
use crate::registry::EngineRole;

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

impl KubernetesSource {
    /// The source's name for people and metrics.
    #[must_use]
    pub fn label(&self) -> String {
        let what = self.service.as_ref().or(self.selector.as_ref()).map_or("", String::as_str);
        format!("kubernetes:{}/{what}", self.namespace)
    }

    pub(super) fn faults(&self) -> Vec<DiscoveryFault> {
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

fn is_object_name(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    !name.is_empty() && name.len() <= 253 && name.bytes().all(fits)
}
