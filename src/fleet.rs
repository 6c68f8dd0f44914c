//! The embedded fleet: simulated engines inside this process, each on a free port of its own.
//! They are peers like any other; nothing of the router knows that they are simulated.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use engine_sim::{Engine, EngineConfig};
use kvbaton_proxy::{ModelScope, Role};
use kvbaton_routes::{Credential, Duty, SecretDigest};
use tokio::net::TcpListener;
use url::Url;

use crate::config::{Config, EMBEDDED_FLEET};
use crate::{SecretsError, StartError};

/// One engine of the embedded fleet.
pub struct EmbeddedEngine {
    /// Its role.
    pub role: Role,
    /// The engine.
    pub engine: Engine,
}

/// What the engines present to the registry where one has to.
pub(crate) fn credential(token: &str) -> Result<Credential, SecretsError> {
    let name = EMBEDDED_FLEET;
    let setting = |error| SecretsError::Setting { place: name.to_owned(), error };
    Ok(Credential {
        name: name.into(),
        duty: Duty::Engine,
        secrets: vec![SecretDigest::of(token).map_err(setting)?],
        certificates: Vec::new(),
        models: ModelScope::All,
    })
}

/// Starts the engines; they fetch each other's handshake from the registry at `router`.
pub(crate) async fn start(
    config: &Config,
    router: SocketAddr,
    token: &str,
) -> Result<Vec<EmbeddedEngine>, StartError> {
    let registry = registry_url(router);
    let mut engines = Vec::new();
    let roles = std::iter::repeat_n(Role::Prefill, config.fleet.prefill)
        .chain(std::iter::repeat_n(Role::Decode, config.fleet.decode));
    for role in roles {
        let addr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
        let listener = TcpListener::bind(addr).await.map_err(|source| StartError::Listen { addr, source })?;
        let engine = EngineConfig {
            role: match role {
                Role::Prefill => engine_sim::Role::Prefill,
                Role::Decode => engine_sim::Role::Decode,
            },
            model: config.fleet.model.clone(),
            registry: registry.clone(),
            registry_token: Some(token.to_owned()),
            ..EngineConfig::default()
        };
        engines.push(EmbeddedEngine { role, engine: engine_sim::spawn(engine, listener).await? });
    }
    Ok(engines)
}

/// The registry as this host reaches it: a wildcard address is no destination.
fn registry_url(router: SocketAddr) -> Option<Url> {
    let ip = match router.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    Url::parse(&format!("http://{}", SocketAddr::new(ip, router.port()))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wildcard_listener_is_reached_on_loopback() {
        let url = |addr: &str| registry_url(addr.parse().unwrap()).unwrap().to_string();
        assert_eq!(url("0.0.0.0:8000"), "http://127.0.0.1:8000/");
        assert_eq!(url("[::]:8000"), "http://[::1]:8000/");
        assert_eq!(url("10.0.0.1:1"), "http://10.0.0.1:1/");
    }
}
