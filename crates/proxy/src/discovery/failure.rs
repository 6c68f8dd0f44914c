//! Why a source could not be asked, as data; each says what an operator can do.

use std::sync::Arc;

/// Why a source gave no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SourceFailure {
    /// The system's DNS servers are not known.
    #[error("the system's DNS configuration cannot be read: {error}")]
    NoSystemDns {
        /// What is wrong.
        error: Arc<hickory_resolver::net::NetError>,
    },
    /// No DNS server gave a usable answer.
    #[error("no answer from DNS for {name} ({record}): {error}")]
    Dns {
        /// The name.
        name: String,
        /// Which records.
        record: &'static str,
        /// What became of the question.
        error: Arc<hickory_resolver::net::NetError>,
    },
    /// The access to the Kubernetes API cannot be had.
    #[cfg(feature = "kubernetes")]
    #[error("there is no access to a Kubernetes API: {why}")]
    NoKubernetes {
        /// What is wrong with it.
        why: String,
    },
    /// The API does not let the router read.
    #[cfg(feature = "kubernetes")]
    #[error(
        "the Kubernetes API forbids to {verb} endpointslices in namespace {namespace} ({message}): give the \
         router's service account a Role there with apiGroups [discovery.k8s.io], resources [endpointslices] and \
         verbs [get, list, watch]"
    )]
    Forbidden {
        /// `list` or `watch`.
        verb: &'static str,
        /// The namespace.
        namespace: String,
        /// What the API says.
        message: String,
    },
    /// A slice's port is not known.
    #[cfg(feature = "kubernetes")]
    #[error("the EndpointSlice {slice} has no such port, or several without a choice: it has {ports:?}")]
    NoSuchPort {
        /// The slice.
        slice: String,
        /// The names of its ports.
        ports: Vec<String>,
    },
    /// The API did not answer as it should.
    #[cfg(feature = "kubernetes")]
    #[error("the Kubernetes API could not {verb} endpointslices in namespace {namespace}: {error}")]
    Kubernetes {
        /// `list` or `watch`.
        verb: &'static str,
        /// The namespace.
        namespace: String,
        /// What went wrong.
        error: Arc<kube::Error>,
    },
}
