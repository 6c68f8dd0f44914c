//! What of these settings cannot be used, or does not fit together. Never repeats a secret.

use std::net::{IpAddr, SocketAddr};

use kvbaton_proxy::PeerSpec;
use kvbaton_routes::{Origins, SecretDigest};

use super::{ADMIN_TOKEN, CredentialRole, Key, REGISTRY_TOKEN, Tls};
use crate::config::{Config, LONGEST};

/// More than any host has cores.
const MOST_THREADS: usize = 1024;

/// Longest key or credential name.
const NAME_BYTES: usize = 128;

/// Reports what is wrong with this part of the settings.
pub(in crate::config) fn check(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    check_listeners(config, wrong);
    for (key, tls) in
        [("tls", &config.tls), ("admin.tls", &config.admin.tls), ("registry.tls", &config.registry.tls)]
    {
        if tls.cert.is_some() != tls.key.is_some() {
            wrong(key, "needs both cert and key".into(), "two PEM files");
        }
        if tls.client_ca.is_some() && !tls.is_on() {
            wrong(&format!("{key}.client_ca"), "is of no use without cert and key".into(), "set them too");
        }
    }
    if config.engine_tls.cert.is_some() != config.engine_tls.key.is_some() {
        wrong("engine_tls", "needs both cert and key, or neither".into(), "two PEM files");
    }
    check_credentials(config, wrong);
    if let Err(error) = Origins::new(&config.cors.origins) {
        wrong("cors.origins", error.to_string(), "such as \"https://chat.example.org\", or \"*\"");
    }
    if config.connections.most == 0 {
        wrong("connections.most", "must not be zero".into(), "the default is 16384");
    }
    if config.connections.threads > MOST_THREADS {
        wrong("connections.threads", format!("must be at most {MOST_THREADS}"), "0 is one for each core");
    }
    for (key, value) in [
        ("connections.handshake", config.connections.handshake),
        ("connections.head", config.connections.head),
        ("connections.stall", config.connections.stall),
    ] {
        if value.is_zero() || value > LONGEST {
            wrong(key, "must be more than zero and at most a week".into(), "such as \"10s\"");
        }
    }
    let engines = config.writers().engines;
    for (list, peers) in [("prefill", &config.prefill), ("decode", &config.decode)] {
        for (position, peer) in peers.iter().enumerate() {
            if let Some(name) = peer.registered_by.as_ref().filter(|name| !engines.contains(*name)) {
                let what = format!("{name:?} is no credential of engines");
                wrong(&format!("{list}[{position}].registered_by"), what, "a name of [[credentials]]");
            }
            let own = [Some(config.listen), config.admin.listen, config.registry.listen];
            if own.into_iter().flatten().any(|listen| is_at(peer, listen)) {
                let key = format!("{list}[{position}]");
                wrong(&key, "is this router's own address".into(), "engines listen elsewhere");
            }
        }
    }
}

fn check_listeners(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    let (admin, registry) = (&config.admin, &config.registry);
    for (key, listen, tls) in
        [("admin", admin.listen, &admin.tls), ("registry", registry.listen, &registry.tls)]
    {
        if listen.is_none() && *tls != Tls::default() {
            let key = format!("{key}.tls");
            wrong(&key, "is of no use without a listener of its own".into(), "set listen beside it");
        }
        if listen.is_some_and(|listen| listen == config.listen && listen.port() != 0) {
            wrong(&format!("{key}.listen"), "is the public listener's address".into(), "leave it out");
        }
    }
    if config.shares_listener() && registry.tls != Tls::default() && registry.tls != admin.tls {
        wrong(
            "registry.tls",
            "is another than that of admin, whose listener it shares".into(),
            "leave it out",
        );
    }
    let admin_reachable = admin.listen.is_none() && admin.on_public && !config.listen.ip().is_loopback();
    if admin_reachable && !config.has_operator_credential() {
        let hint = "set admin.token_file, or admin.listen = \"127.0.0.1:8001\"";
        wrong("admin.on_public", "needs an operator's credential".into(), hint);
    }
}

fn check_credentials(config: &Config, wrong: &mut impl FnMut(&str, String, &str)) {
    for (key, token) in
        [("admin.token", config.admin.token.as_deref()), ("registry.token", config.registry.token.as_deref())]
    {
        if let Some(Err(error)) = token.map(SecretDigest::of) {
            wrong(key, error.to_string(), "leave it out to allow only clients on this host");
        }
    }
    let mut names = std::collections::BTreeSet::from([ADMIN_TOKEN, REGISTRY_TOKEN]);
    for (position, credential) in config.credentials.iter().enumerate() {
        let key = format!("credentials[{position}]");
        check_name(&key, &credential.name, &mut names, wrong);
        check_digests(&key, &credential.sha256, wrong);
        let empty = credential.sha256.is_empty() && credential.token_file.is_none();
        if empty && credential.certificates.is_empty() {
            wrong(&key, "has nothing to present".into(), "set sha256, token_file or certificates");
        }
        if credential.role == CredentialRole::Operator && !credential.models.is_empty() {
            wrong(&key, "an operator is not bound to models".into(), "leave models out");
        }
    }
    let mut names = std::collections::BTreeSet::new();
    for (position, api_key) in config.keys.iter().enumerate() {
        let key = format!("keys[{position}]");
        check_key(&key, api_key, &mut names, wrong);
    }
}

/// Reports what is wrong with one key, of the settings or of the file of keys.
pub(crate) fn check_key<'a>(
    place: &str,
    key: &'a Key,
    names: &mut std::collections::BTreeSet<&'a str>,
    wrong: &mut impl FnMut(&str, String, &str),
) {
    check_name(place, &key.name, names, wrong);
    check_digests(place, &key.sha256, wrong);
    if key.sha256.is_empty() && key.certificates.is_empty() {
        wrong(place, "has neither sha256 nor certificates".into(), "kvbaton key new makes one");
    }
}

fn check_name<'a>(
    place: &str,
    name: &'a str,
    names: &mut std::collections::BTreeSet<&'a str>,
    wrong: &mut impl FnMut(&str, String, &str),
) {
    let fits = (1..=NAME_BYTES).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
    if !fits {
        wrong(place, "has a name that is empty, too long or not visible ASCII".into(), "such as \"team-a\"");
    } else if !names.insert(name) {
        wrong(place, format!("the name {name:?} stands twice"), "names are unique");
    }
}

fn check_digests(place: &str, digests: &[String], wrong: &mut impl FnMut(&str, String, &str)) {
    for digest in digests {
        if let Err(error) = SecretDigest::from_hex(digest) {
            // Never the text itself: it may be the secret, put in the wrong place.
            wrong(&format!("{place}.sha256"), error.to_string(), "kvbaton key hash makes one");
        }
    }
}

/// Whether a peer's URL leads to this listener, as far as can be told without resolving names.
fn is_at(peer: &PeerSpec, listen: SocketAddr) -> bool {
    let Ok(url) = url::Url::parse(&peer.url) else { return false };
    if url.port_or_known_default() != Some(listen.port()) || listen.port() == 0 {
        return false;
    }
    let ip = match url.host() {
        Some(url::Host::Ipv4(ip)) => IpAddr::V4(ip),
        Some(url::Host::Ipv6(ip)) => ip.to_canonical(),
        Some(url::Host::Domain(name)) => {
            let here = listen.ip().is_loopback() || listen.ip().is_unspecified();
            return name.eq_ignore_ascii_case("localhost") && here;
        }
        None => return false,
    };
    let listening = listen.ip().to_canonical();
    ip == listening || (listening.is_unspecified() && (ip.is_loopback() || ip.is_unspecified()))
}
