//! Which store is used and how it is reached, with what cannot be used found before it is tried.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What keeps what routers must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreKind {
    /// This process alone.
    Memory,
    /// etcd, for several routers.
    Etcd,
}

/// Where what several routers must agree on is kept; all but `kind` is for etcd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StoreSettings {
    /// What keeps it.
    pub kind: StoreKind,
    /// etcd's client URLs.
    pub endpoints: Vec<String>,
    /// What all keys begin with; routers that share it share their engines.
    pub prefix: String,
    /// etcd's user, with `password`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The user's password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// Certificates (PEM) of those who may have signed etcd's own; needed for https.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// The router's certificate (PEM) where etcd asks for one, with `key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    /// The certificate's key (PEM).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// TCP connect, TLS and log-in.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// One exchange with etcd; a registration takes a few.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// How far the wall clocks of two routers may be apart. An engine's clock that another router
    /// measured is answered with an error that is wider by so much.
    #[serde(with = "humantime_serde")]
    pub clock_skew: Duration,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            kind: StoreKind::Memory,
            endpoints: vec!["http://127.0.0.1:2379".to_owned()],
            prefix: "/kvbaton".to_owned(),
            user: None,
            password: None,
            ca: None,
            cert: None,
            key: None,
            connect_timeout: Duration::from_secs(2),
            timeout: Duration::from_secs(2),
            clock_skew: Duration::from_secs(1),
        }
    }
}

/// What of the store's settings cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreFault {
    /// This program was built without it.
    #[error("is not in this build: build it with `--features etcd`")]
    NotBuilt,
    /// No endpoint.
    #[error("must name at least one etcd endpoint")]
    NoEndpoint,
    /// An endpoint that is no URL.
    #[error("`{endpoint}` is not of the form http://host:port")]
    Endpoint {
        /// The endpoint.
        endpoint: String,
    },
    /// A prefix that other keys could be taken for.
    #[error("must have 1 to 256 printable characters without blanks")]
    Prefix,
    /// A user without a password, or a certificate without a key, or the other way round.
    #[error("is of use only together with `{missing}`")]
    Half {
        /// The other half.
        missing: &'static str,
    },
    /// A duration out of its range.
    #[error("must be above zero and at most a minute")]
    Duration,
}

impl StoreSettings {
    /// All faults, each with its key.
    #[must_use]
    pub fn faults(&self) -> Vec<(&'static str, StoreFault)> {
        if self.kind == StoreKind::Memory {
            return Vec::new();
        }
        let mut faults = Vec::new();
        if !cfg!(feature = "etcd") {
            faults.push(("store.kind", StoreFault::NotBuilt));
        }
        if self.endpoints.is_empty() {
            faults.push(("store.endpoints", StoreFault::NoEndpoint));
        }
        for endpoint in self.endpoints.iter().filter(|endpoint| !is_endpoint(endpoint)) {
            faults.push(("store.endpoints", StoreFault::Endpoint { endpoint: endpoint.clone() }));
        }
        if !(1..=256).contains(&self.prefix.len()) || !self.prefix.bytes().all(|byte| byte.is_ascii_graphic())
        {
            faults.push(("store.prefix", StoreFault::Prefix));
        }
        let halves = [
            ("store.user", self.user.is_some(), "store.password", self.password.is_some()),
            ("store.cert", self.cert.is_some(), "store.key", self.key.is_some()),
        ];
        for (one, has_one, other, has_other) in halves {
            match (has_one, has_other) {
                (true, false) => faults.push((one, StoreFault::Half { missing: other })),
                (false, true) => faults.push((other, StoreFault::Half { missing: one })),
                _ => {}
            }
        }
        let durations = [
            ("store.connect_timeout", self.connect_timeout),
            ("store.timeout", self.timeout),
            ("store.clock_skew", self.clock_skew),
        ];
        for (key, duration) in durations {
            if duration.is_zero() || duration > Duration::from_secs(60) {
                faults.push((key, StoreFault::Duration));
            }
        }
        faults
    }
}

fn is_endpoint(text: &str) -> bool {
    let Ok(url) = url::Url::parse(text) else { return false };
    matches!(url.scheme(), "http" | "https")
        && url.host_str().is_some_and(|host| !host.is_empty())
        && url.username().is_empty()
        && url.password().is_none()
        && matches!(url.path(), "" | "/")
        && url.query().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(change: impl FnOnce(&mut StoreSettings)) -> Vec<(&'static str, StoreFault)> {
        let mut settings = StoreSettings { kind: StoreKind::Etcd, ..StoreSettings::default() };
        change(&mut settings);
        let mut faults = settings.faults();
        faults.retain(|(_, fault)| *fault != StoreFault::NotBuilt);
        faults
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        assert_eq!(faults(|_| {}), []);
        assert_eq!(faults(|s| s.endpoints.clear()), [("store.endpoints", StoreFault::NoEndpoint)]);
        for endpoint in ["etcd:2379", "http://u:p@etcd:2379", "http://etcd:2379/v3", "unix:///etcd"] {
            let fault = StoreFault::Endpoint { endpoint: endpoint.to_owned() };
            assert_eq!(faults(|s| s.endpoints = vec![endpoint.to_owned()]), [("store.endpoints", fault)]);
        }
        assert_eq!(faults(|s| s.prefix = "a b".to_owned()), [("store.prefix", StoreFault::Prefix)]);
        let half = StoreFault::Half { missing: "store.password" };
        assert_eq!(faults(|s| s.user = Some("root".to_owned())), [("store.user", half)]);
        let half = StoreFault::Half { missing: "store.cert" };
        assert_eq!(faults(|s| s.key = Some("k.pem".into())), [("store.key", half)]);
        assert_eq!(faults(|s| s.timeout = Duration::ZERO), [("store.timeout", StoreFault::Duration)]);
    }

    #[test]
    fn memory_needs_nothing_and_etcd_a_build_with_it() {
        let memory = StoreSettings { endpoints: Vec::new(), ..StoreSettings::default() };
        assert_eq!(memory.faults(), []);
        let etcd = StoreSettings { kind: StoreKind::Etcd, ..StoreSettings::default() };
        assert_eq!(etcd.faults().is_empty(), cfg!(feature = "etcd"));
    }
}
