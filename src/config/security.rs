//! The settings of who may come in and how: listeners, TLS, credentials, clients' keys, CORS.
//! Names files but never reads them: that is `secrets.rs` and `tls.rs`.

mod checks;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvbaton_proxy::Writers;
use serde::{Deserialize, Serialize};

use super::Config;
pub(super) use checks::check;
pub(crate) use checks::check_key;

/// The name of the credential that `admin.token` and `admin.token_file` make.
pub(crate) const ADMIN_TOKEN: &str = "admin.token";
/// The name of the credential that `registry.token` and `registry.token_file` make.
pub(crate) const REGISTRY_TOKEN: &str = "registry.token";
/// The name of the embedded engines' credential, which no other can have.
pub(crate) const EMBEDDED_FLEET: &str = "embedded fleet";

/// The operators' endpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Admin {
    /// A listener of their own; without one they are on the public listener.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// Whether they stay on a public listener that other hosts can reach; needs a credential.
    pub on_public: bool,
    /// With a token, whoever presents it; without any operator's credential, clients on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// A file with such tokens, one a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// TLS of that listener.
    pub tls: Tls,
}

/// The engines' endpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Registry {
    /// A listener of their own; without one they are on the public listener.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// A token of engines; operators' credentials are good here too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// A file with such tokens, one a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// TLS of that listener.
    pub tls: Tls,
}

/// TLS of one listener; off without a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tls {
    /// The certificate chain, in PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    /// Its private key, in PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// The authorities whose client certificates are taken, in PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
    /// Whether a client without a certificate is let in.
    pub client_auth: ClientAuth,
}

impl Tls {
    /// Whether the listener speaks TLS.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.cert.is_some() || self.key.is_some()
    }
}

/// Whether clients must show a certificate, where `client_ca` is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientAuth {
    /// No handshake without one.
    #[default]
    Required,
    /// One that is shown must be good.
    Optional,
}

/// TLS to engines with `https://` URLs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineTls {
    /// The only authorities that are trusted, in PEM; the public ones when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// The certificate chain that the router shows, in PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cert: Option<PathBuf>,
    /// Its private key, in PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
}

/// What the holder of a credential is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CredentialRole {
    /// May use the operators' and the engines' endpoints.
    Operator,
    /// May register engines and look them up.
    Engine,
}

/// One operator or one group of engines. Its secrets can change; its name is what owns engines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credential {
    /// Its name, in logs and as the owner of what it registers.
    pub name: String,
    /// What its holder is.
    pub role: CredentialRole,
    /// SHA-256 digests of its tokens, in hex.
    #[serde(default)]
    pub sha256: Vec<String>,
    /// A file with tokens, one a line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    /// DNS or URI names of client certificates that are as good as a token.
    #[serde(default)]
    pub certificates: Vec<String>,
    /// The models whose engines it may register and see; all when empty.
    #[serde(default)]
    pub models: Vec<String>,
}

/// One client's API key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Its name, in logs and metrics.
    pub name: String,
    /// SHA-256 digests of the key, in hex; several while it is being replaced.
    #[serde(default)]
    pub sha256: Vec<String>,
    /// DNS or URI names of client certificates that are as good as the key.
    #[serde(default)]
    pub certificates: Vec<String>,
    /// The models that it may use; all when empty.
    #[serde(default)]
    pub models: Vec<String>,
}

/// Pages of other origins that may call the inference endpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cors {
    /// Their origins, such as `https://chat.example.org`, or `*`; none when empty.
    pub origins: Vec<String>,
    /// How long a browser may remember the answer.
    #[serde(with = "humantime_serde")]
    pub max_age: Duration,
}

impl Default for Cors {
    fn default() -> Self {
        Self { origins: Vec::new(), max_age: Duration::from_secs(600) }
    }
}

/// Bounds on connections, of each listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Connections {
    /// Most at a time; further ones are closed at once.
    pub most: usize,
    /// Most at a time from one address; 0 is no bound. Behind a proxy all come from one.
    pub per_address: usize,
    /// Threads that answer clients; 0 is one for each core.
    pub threads: usize,
    /// How long a TLS handshake may take.
    #[serde(with = "humantime_serde")]
    pub handshake: Duration,
    /// How long a request's head may take, and how long a kept connection may be idle.
    #[serde(with = "humantime_serde")]
    pub head: Duration,
    /// How long a client may take nothing of its answer.
    #[serde(with = "humantime_serde")]
    pub stall: Duration,
}

impl Default for Connections {
    fn default() -> Self {
        Self {
            most: 16384,
            per_address: 0,
            threads: 0,
            handshake: Duration::from_secs(10),
            head: Duration::from_secs(60),
            stall: Duration::from_secs(60),
        }
    }
}

/// Files with certificates, tokens and keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Secrets {
    /// How often they are looked at for a change; 0 is never.
    #[serde(with = "humantime_serde")]
    pub refresh: Duration,
}

impl Default for Secrets {
    fn default() -> Self {
        Self { refresh: Duration::from_secs(10) }
    }
}

impl Config {
    /// Whether somebody with an operator's credential can exist.
    #[must_use]
    pub fn has_operator_credential(&self) -> bool {
        self.admin.token.is_some()
            || self.admin.token_file.is_some()
            || self.credentials.iter().any(|credential| credential.role == CredentialRole::Operator)
    }

    /// The names of the credentials that write the registry.
    #[must_use]
    pub fn writers(&self) -> Writers {
        let named = |role: CredentialRole| {
            let those = self.credentials.iter().filter(move |credential| credential.role == role);
            those.map(|credential| credential.name.clone())
        };
        let token = |name: &str, is_set: bool| is_set.then(|| name.to_owned());
        let (admin, registry) = (&self.admin, &self.registry);
        let of_operators = token(ADMIN_TOKEN, admin.token.is_some() || admin.token_file.is_some());
        let of_engines = token(REGISTRY_TOKEN, registry.token.is_some() || registry.token_file.is_some());
        let own = [EMBEDDED_FLEET.to_owned()];
        Writers {
            engines: named(CredentialRole::Engine).chain(of_engines).collect(),
            trusted: named(CredentialRole::Operator).chain(of_operators).chain(own).collect(),
        }
    }

    /// Whether operators and engines have one listener together.
    #[must_use]
    pub fn shares_listener(&self) -> bool {
        // Port 0 is another one each time.
        self.admin.listen == self.registry.listen && self.admin.listen.is_some_and(|addr| addr.port() != 0)
    }

    /// Whether the operators' endpoints are on the public listener at this address.
    #[must_use]
    pub fn admin_is_public(&self, listen: SocketAddr) -> bool {
        self.admin.listen.is_none() && (listen.ip().to_canonical().is_loopback() || self.admin.on_public)
    }
}

/// Every file that holds a secret or a certificate, each once.
#[must_use]
pub fn secret_files(config: &Config) -> Vec<&Path> {
    let tls = [&config.tls, &config.admin.tls, &config.registry.tls];
    let mut files: Vec<&Path> = tls
        .into_iter()
        .flat_map(|tls| [&tls.cert, &tls.key, &tls.client_ca])
        .chain([&config.engine_tls.ca, &config.engine_tls.cert, &config.engine_tls.key])
        .chain([&config.admin.token_file, &config.registry.token_file, &config.keys_file])
        .chain(config.credentials.iter().map(|credential| &credential.token_file))
        .flatten()
        .map(PathBuf::as_path)
        .collect();
    files.sort_unstable();
    files.dedup();
    files
}

/// Settings with every optional key present, for the list of keys.
pub(super) fn sample(config: &mut Config) {
    let (path, addr) = (PathBuf::from("file"), SocketAddr::from(([127, 0, 0, 1], 1)));
    let tls = Tls {
        cert: Some(path.clone()),
        key: Some(path.clone()),
        client_ca: Some(path.clone()),
        client_auth: ClientAuth::Required,
    };
    config.tls = tls.clone();
    config.admin = Admin {
        listen: Some(addr),
        on_public: false,
        token: Some("token".into()),
        token_file: Some(path.clone()),
        tls: tls.clone(),
    };
    config.registry =
        Registry { listen: Some(addr), token: Some("token".into()), token_file: Some(path.clone()), tls };
    config.engine_tls =
        EngineTls { ca: Some(path.clone()), cert: Some(path.clone()), key: Some(path.clone()) };
    config.keys_file = Some(path.clone());
    let text = || vec!["text".to_owned()];
    config.credentials = vec![Credential {
        name: "name".into(),
        role: CredentialRole::Engine,
        sha256: text(),
        token_file: Some(path),
        certificates: text(),
        models: text(),
    }];
    config.keys = vec![Key { name: "name".into(), sha256: text(), certificates: text(), models: text() }];
    config.cors.origins = text();
}

#[cfg(test)]
mod tests {
    use super::super::{Flags, load};
    use super::*;

    fn faults(set: &[(&str, &str)], env: &[(&str, &str)]) -> Vec<(String, Option<String>)> {
        let pairs = |list: &[(&str, &str)]| {
            list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect::<Vec<_>>()
        };
        let flags = Flags { set: pairs(set), ..Flags::default() };
        let found = load(&flags, pairs(env)).err().map(|faults| faults.0).unwrap_or_default();
        found.into_iter().map(|fault| (fault.key, fault.hint)).collect()
    }

    fn keys(set: &[(&str, &str)]) -> Vec<String> {
        faults(set, &[]).into_iter().map(|(key, _)| key).collect()
    }

    fn of_file(text: &str) -> Result<Config, super::super::ConfigFaults> {
        let name = format!("kvbaton-security-{}-{}.toml", std::process::id(), text.len());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, text).unwrap();
        let flags = Flags { config: Some(path.clone()), ..Flags::default() };
        let config = load(&flags, Vec::new());
        std::fs::remove_file(path).unwrap();
        config
    }

    #[test]
    fn every_layer_can_set_them() {
        let env = [
            ("KVBATON_CORS__ORIGINS", "https://a.example.org, http://localhost:3000"),
            ("KVBATON_ADMIN__TOKEN", "secret"),
            ("KVBATON_ADMIN__ON_PUBLIC", "true"),
            ("KVBATON_TLS__CERT", "/c.pem"),
            ("KVBATON_TLS__KEY", "/k.pem"),
        ];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let set = vec![("connections.per_address".to_owned(), "7".to_owned())];
        let config = load(&Flags { set, ..Flags::default() }, env).unwrap();
        assert_eq!(config.cors.origins, ["https://a.example.org", "http://localhost:3000"]);
        assert!(config.admin.on_public && config.tls.is_on() && config.has_operator_credential());
        assert_eq!(config.connections.per_address, 7);
        assert_eq!(secret_files(&config), [Path::new("/c.pem"), Path::new("/k.pem")]);
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        assert_eq!(keys(&[("tls.cert", "a")]), ["tls"]);
        assert_eq!(keys(&[("tls.client_ca", "a")]), ["tls.client_ca"]);
        assert_eq!(keys(&[("admin.tls.cert", "a"), ("admin.tls.key", "b")]), ["admin.tls"]);
        assert_eq!(keys(&[("admin.listen", "127.0.0.1:8000")]), ["admin.listen"]);
        assert_eq!(keys(&[("cors.origins", "chat.example.org")]), ["cors.origins"]);
        assert_eq!(keys(&[("connections.head", "0s")]), ["connections.head"]);
        assert_eq!(keys(&[("connections.stall", "0s")]), ["connections.stall"]);
        assert_eq!(keys(&[("connections.threads", "1025")]), ["connections.threads"]);
        assert_eq!(keys(&[("registry.token", "two words")]), ["registry.token"]);
        let unknown = faults(&[("admin.tokn", "a")], &[]);
        assert_eq!(unknown, [("admin.tokn".to_owned(), Some("did you mean admin.token?".to_owned()))]);
    }

    #[test]
    fn faults_of_credentials_and_keys_name_the_place_and_no_secret() {
        let text = "[[credentials]]\nname = \"a\"\nrole = \"engine\"\n\
            [[credentials]]\nname = \"a\"\nrole = \"operator\"\nsha256 = [\"the-secret-itself\"]\nmodels = [\"m\"]\n\
            [[keys]]\nname = \"\"\n";
        let said = of_file(text).unwrap_err();
        let places: Vec<&str> = said.0.iter().map(|fault| fault.key.as_str()).collect();
        let [first, second, digest] = ["credentials[0]", "credentials[1]", "credentials[1].sha256"];
        assert_eq!(places, [first, second, digest, second, "keys[0]", "keys[0]"]);
        assert!(!said.to_string().contains("the-secret-itself"), "{said}");
        let unknown = of_file("[[keys]]\nname = \"a\"\nshs256 = []\n").unwrap_err().0.remove(0);
        assert_eq!(unknown.key, "keys[0].shs256");
        assert_eq!(unknown.hint.as_deref(), Some("did you mean sha256?"));
    }
}
