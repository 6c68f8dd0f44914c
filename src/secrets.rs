//! The secrets of the settings and of the files that they name: who may come in, and with which
//! certificate the listeners answer. Reads them again when the files change.
//! Must never log or show a secret.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use kvbaton_proxy::ModelScope;
use kvbaton_routes::{Access, Credential, Duty, Rules, SecretDigest, SecretError};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::sync::{Mutex, Notify};

use crate::config::{
    ADMIN_TOKEN, Config, ConfigFault, ConfigFaults, CredentialRole, Key, REGISTRY_TOKEN, Source, check_key,
    secret_files,
};
use crate::tls::{ServerTls, TlsError, engine_config};

/// Why the secrets cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    /// A certificate, key or list of authorities.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A file cannot be read.
    #[error("{}: cannot be read: {source}", .file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file of tokens without any.
    #[error("{}: holds no token", .file.display())]
    NoToken {
        /// The file.
        file: PathBuf,
    },
    /// A token of a file that cannot serve.
    #[error("{}: line {line}: {error}", .file.display())]
    Token {
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Why not.
        error: SecretError,
    },
    /// A token or digest of the settings that cannot serve.
    #[error("{place}: {error}")]
    Setting {
        /// Its place in the settings.
        place: String,
        /// Why not.
        error: SecretError,
    },
    /// What is wrong with the file of keys.
    #[error(transparent)]
    Keys(#[from] ConfigFaults),
    /// One secret for two names: nobody could tell who presents it.
    #[error("{one} and {other} have the same secret")]
    Shared {
        /// One name.
        one: String,
        /// The other.
        other: String,
    },
}

/// Everything that is made of secrets, and the files to look at.
pub(crate) struct SecretStore {
    config: ArcSwap<Config>,
    /// The embedded engines' own, which is in no file.
    embedded: Option<Credential>,
    access: Access,
    listeners: Vec<Arc<ServerTls>>,
    engine_tls: kvbaton_proxy::EngineTls,
    seen: Mutex<[u8; 32]>,
    /// The settings are others.
    changed: Notify,
}

impl SecretStore {
    /// Reads everything for the first time.
    ///
    /// # Errors
    /// What cannot be used.
    pub(crate) fn load(
        config: &Config,
        embedded: Option<Credential>,
        listeners: Vec<Arc<ServerTls>>,
    ) -> Result<Self, SecretsError> {
        let seen = fingerprint(config);
        let access = Access::new(rules(config, embedded.as_ref())?);
        let engine_tls =
            engine_config(&config.engine_tls)?.map(kvbaton_proxy::EngineTls::new).unwrap_or_default();
        let config = ArcSwap::from_pointee(config.clone());
        Ok(Self {
            config,
            embedded,
            access,
            listeners,
            engine_tls,
            seen: Mutex::new(seen),
            changed: Notify::new(),
        })
    }

    pub(crate) fn access(&self) -> Access {
        self.access.clone()
    }

    pub(crate) fn engine_tls(&self) -> kvbaton_proxy::EngineTls {
        self.engine_tls.clone()
    }

    /// Reads everything again if a file has changed since; whether one had.
    ///
    /// # Errors
    /// What cannot be used; then everything stays as it was, and is tried again after the next change.
    pub(crate) async fn refresh(&self) -> Result<bool, SecretsError> {
        let mut seen = self.seen.lock().await;
        let config = self.config.load();
        let now = fingerprint(&config);
        if *seen == now {
            return Ok(false);
        }
        *seen = now;
        // All that can fail comes first, so that nothing is exchanged by halves.
        let rules = rules(&config, self.embedded.as_ref())?;
        let engine_tls = engine_config(&config.engine_tls)?;
        let fresh = self.listeners.iter().map(|listener| listener.read_again());
        let fresh: Vec<_> = fresh.collect::<Result<_, _>>()?;
        fresh.into_iter().for_each(crate::tls::Fresh::apply);
        self.access.replace(rules);
        if let Some(engine_tls) = engine_tls {
            self.engine_tls.replace(engine_tls);
        }
        Ok(true)
    }

    /// Takes over other keys, credentials and tokens, with what their files hold now, once `apply` has
    /// done the rest.
    ///
    /// # Errors
    /// What cannot be used, or what `apply` says; then everything stays as it was.
    pub(crate) async fn exchange<T, E: From<SecretsError>>(
        &self,
        config: Config,
        apply: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        // What the files held is left as it was seen, so that the next look takes over what changed in them.
        let seen = self.seen.lock().await;
        let rules = rules(&config, self.embedded.as_ref())?;
        let done = apply()?;
        self.access.replace(rules);
        self.config.store(Arc::new(config));
        drop(seen);
        self.changed.notify_one();
        Ok(done)
    }

    /// Looks at the files again and again, for as long as it is polled.
    pub(crate) async fn follow(&self) {
        loop {
            let config = self.config.load_full();
            let interval = config.secrets.refresh;
            if interval.is_zero() || secret_files(&config).is_empty() {
                self.changed.notified().await;
                continue;
            }
            tokio::select! {
                () = tokio::time::sleep(interval) => {}
                () = self.changed.notified() => continue,
            }
            match self.refresh().await {
                Ok(true) => tracing::info!("certificates, tokens and keys were read again"),
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "changed secrets cannot be used, the old ones stay"),
            }
        }
    }
}

/// What the files hold now, including that they cannot be read.
fn fingerprint(config: &Config) -> [u8; 32] {
    let mut whole = Sha256::new();
    for file in secret_files(config) {
        let contents = std::fs::read(file).map_err(|error| error.kind());
        whole.update(Sha256::digest(format!("{:?}", contents.as_deref().map(Sha256::digest))));
    }
    whole.finalize().into()
}

/// The rules that settings and files make.
fn rules(config: &Config, embedded: Option<&Credential>) -> Result<Rules, SecretsError> {
    let mut all = Vec::new();
    let (admin, registry) = (&config.admin, &config.registry);
    for (name, duty, token, file) in [
        (ADMIN_TOKEN, Duty::Operator, &admin.token, &admin.token_file),
        (REGISTRY_TOKEN, Duty::Engine, &registry.token, &registry.token_file),
    ] {
        let mut secrets = file.as_deref().map(tokens).transpose()?.unwrap_or_default();
        if let Some(token) = token {
            let setting = |error| SecretsError::Setting { place: name.to_owned(), error };
            secrets.push(SecretDigest::of(token).map_err(setting)?);
        }
        if !secrets.is_empty() {
            let name = name.into();
            all.push(Credential { name, duty, secrets, certificates: Vec::new(), models: ModelScope::All });
        }
    }
    for credential in &config.credentials {
        let mut secrets = digests(&credential.name, &credential.sha256)?;
        secrets.extend(credential.token_file.as_deref().map(tokens).transpose()?.unwrap_or_default());
        all.push(Credential {
            name: credential.name.as_str().into(),
            duty: match credential.role {
                CredentialRole::Operator => Duty::Operator,
                CredentialRole::Engine => Duty::Engine,
            },
            secrets,
            certificates: credential.certificates.clone(),
            models: ModelScope::of(&credential.models),
        });
    }
    // Without any other, the registry is for everybody on this host, and so for the embedded engines.
    let guarded = all.iter().any(|credential| credential.duty != Duty::Client);
    all.extend(embedded.filter(|_| guarded).cloned());
    let more = config.keys_file.as_deref().map(keys_of).transpose()?.unwrap_or_default();
    check_keys(config, &more)?;
    for key in config.keys.iter().chain(&more) {
        all.push(Credential {
            name: key.name.as_str().into(),
            duty: Duty::Client,
            secrets: digests(&key.name, &key.sha256)?,
            certificates: key.certificates.clone(),
            models: ModelScope::of(&key.models),
        });
    }
    check_distinct(&all)?;
    let rules = Rules::new(all);
    let closed = !config.keys.is_empty() || config.keys_file.is_some();
    Ok(if closed { rules.with_keys_required() } else { rules })
}

/// A new secret that nobody can guess.
pub(crate) fn random_secret() -> String {
    rand::random::<[u8; 32]>().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Tokens of a file, one a line; empty lines and those that begin with `#` do not count.
fn tokens(file: &Path) -> Result<Vec<SecretDigest>, SecretsError> {
    let text = read(file)?;
    let mut secrets = Vec::new();
    for (number, line) in text.lines().map(str::trim).enumerate() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |error| SecretsError::Token { file: file.to_owned(), line: number + 1, error };
        secrets.push(SecretDigest::of(line).map_err(wrong)?);
    }
    // Without its tokens, an endpoint must not be open to everybody on this host.
    if secrets.is_empty() { Err(SecretsError::NoToken { file: file.to_owned() }) } else { Ok(secrets) }
}

fn digests(name: &str, list: &[String]) -> Result<Vec<SecretDigest>, SecretsError> {
    let wrong = |error| SecretsError::Setting { place: name.to_owned(), error };
    list.iter().map(|text| SecretDigest::from_hex(text).map_err(wrong)).collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeysFile {
    #[serde(default)]
    keys: Vec<Key>,
}

fn keys_of(file: &Path) -> Result<Vec<Key>, SecretsError> {
    let text = read(file)?;
    let fault = |error: toml::de::Error| {
        let line = error.span().map(|span| text[..span.start].lines().count().max(1));
        let place = line.map_or_else(String::new, |line| format!("line {line}"));
        let source = Source::File(file.to_owned());
        ConfigFaults(vec![ConfigFault::new(source, &place, error.message().to_owned(), None)])
    };
    let parsed: KeysFile = toml::from_str(&text).map_err(fault)?;
    Ok(parsed.keys)
}

fn check_keys(config: &Config, more: &[Key]) -> Result<(), ConfigFaults> {
    let Some(file) = &config.keys_file else { return Ok(()) };
    let mut faults = Vec::new();
    let mut wrong = |place: &str, what: String, hint: &str| {
        faults.push(ConfigFault::new(Source::File(file.clone()), place, what, Some(hint.to_owned())));
    };
    let mut names: BTreeSet<&str> = config.keys.iter().map(|key| key.name.as_str()).collect();
    for (position, key) in more.iter().enumerate() {
        check_key(&format!("keys[{position}]"), key, &mut names, &mut wrong);
    }
    if faults.is_empty() { Ok(()) } else { Err(ConfigFaults(faults)) }
}

fn check_distinct(all: &[Credential]) -> Result<(), SecretsError> {
    let mut seen = std::collections::BTreeMap::new();
    for credential in all {
        for secret in &credential.secrets {
            if let Some(one) = seen.insert(secret.to_hex(), &credential.name) {
                let (one, other) = (one.to_string(), credential.name.to_string());
                return Err(SecretsError::Shared { one, other });
            }
        }
    }
    Ok(())
}

fn read(file: &Path) -> Result<String, SecretsError> {
    std::fs::read_to_string(file).map_err(|source| SecretsError::Read { file: file.to_owned(), source })
}
