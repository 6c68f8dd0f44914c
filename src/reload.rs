//! Reading the settings again while the program runs: what changed, what of it holds at once and what
//! only after a restart. A reload with faults changes nothing.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use kvbaton_proxy::{PeerSpec, Proxy, Traces};
use kvbaton_routes::{NotReloaded, Reload, Reloaded, SharedLimits};
use serde_json::Value;
use tokio::sync::Mutex;

use crate::SecretsError;
use crate::config::{Config, ConfigFaults};
use crate::secrets::SecretStore;

/// Settings that hold for whatever begins after they changed; a name stands for all below it.
const APPLIED: [&str; 44] = [
    "timeouts.prefill",
    "timeouts.decode_head",
    "timeouts.idle",
    "timeouts.total",
    "timeouts.release",
    "timeouts.client_body",
    "timeouts.client_body_whole",
    "probe",
    "hand_off",
    "pairing",
    "discovery",
    "disaggregation",
    "routing.prefill",
    "routing.decode",
    "routing.models",
    "routing.session_header",
    "routing.load_factor",
    "routing.locality",
    "routing.explain_header",
    "routing.prompt_tokens_per_second",
    "routing.bytes_per_second",
    "routing.sequence_cost",
    "routing.waiting_cost",
    "routing.kv_full_cost",
    "routing.reading_half_life",
    "models",
    "retry",
    "kv_events",
    "breaker",
    "admission",
    "limits.body_bytes",
    "limits.answer_bytes",
    "limits.held_bytes",
    "stream.keep_alive",
    "shutdown",
    "secrets",
    "keys",
    "keys_file",
    "credentials",
    "admin.token",
    "admin.token_file",
    "registry.token",
    "registry.token_file",
    "prefill",
];

/// Where the settings of a running program are read again.
pub(crate) type Source = Box<dyn Fn() -> Result<Config, ConfigFaults> + Send + Sync>;

/// What a program that can reload needs for it.
pub(crate) struct Reloader {
    pub(crate) source: Option<Source>,
    pub(crate) proxy: Proxy,
    pub(crate) secrets: Arc<SecretStore>,
    /// Exported by a task that was started with them.
    pub(crate) traces: Traces,
    pub(crate) limits: SharedLimits,
    /// As the program started.
    pub(crate) started: Config,
    /// As they were read last.
    pub(crate) now: Mutex<Config>,
}

impl fmt::Debug for Reloader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reloader").field("can_read", &self.source.is_some()).finish_non_exhaustive()
    }
}

impl From<SecretsError> for NotReloadedBecause {
    fn from(error: SecretsError) -> Self {
        Self(error.to_string())
    }
}

/// The text of a refusal while it is on its way.
struct NotReloadedBecause(String);

impl Reloader {
    /// Reads the settings again and takes them over.
    ///
    /// # Errors
    /// Every fault; then nothing has changed.
    pub(crate) async fn reload(&self) -> Result<Reloaded, NotReloaded> {
        let outcome = self.take_over().await;
        match &outcome {
            Ok(done) => tracing::info!(
                applied = ?done.applied,
                needs_restart = ?done.needs_restart,
                added = ?done.peers.added,
                updated = ?done.peers.updated,
                removed = ?done.peers.removed,
                "the settings were read again"
            ),
            Err(faults) => tracing::warn!(%faults, "the settings cannot be used, the old ones stay"),
        }
        outcome
    }

    /// How the HTTP surface asks for it.
    pub(crate) fn endpoint(self: &Arc<Self>) -> Reload {
        if self.source.is_none() {
            return Reload::default();
        }
        let reloader = Arc::clone(self);
        Reload::new(move || {
            let reloader = Arc::clone(&reloader);
            Box::pin(async move { reloader.reload().await })
        })
    }

    async fn take_over(&self) -> Result<Reloaded, NotReloaded> {
        let read = self.source.as_ref().ok_or_else(|| NotReloaded("there is nothing to read".to_owned()))?;
        let next = read().map_err(|faults| NotReloaded(faults.to_string()))?;
        let mut now = self.now.lock().await;
        let (old, new) = (peers(&now), peers(&next));
        let gone: Vec<PeerSpec> = old.iter().filter(|spec| !new.contains(spec)).cloned().collect();
        let come: Vec<PeerSpec> = new.iter().filter(|spec| !old.contains(spec)).cloned().collect();
        let mut settings = next.core();
        settings.engine_tls = self.secrets.engine_tls();
        settings.traces = self.traces.clone();
        // These have tasks and libraries that were started with them.
        settings.side_channel = self.started.side_channel.clone();
        settings.nixl = self.started.nixl.clone();
        let exchange = || {
            let because = |error: kvbaton_proxy::PeerChangeError| {
                let lines =
                    error.0.iter().map(|error| format!("a configured engine cannot be used: {error}"));
                NotReloadedBecause(lines.collect::<Vec<_>>().join("\n"))
            };
            self.proxy.reload(settings, &gone, come).map_err(because)
        };
        let exchanged = self.secrets.exchange(next.clone(), exchange).await;
        let peers = exchanged.map_err(|because| NotReloaded(because.0))?;
        self.limits.replace(crate::limits(&next, &self.started));
        let mut applied: Vec<String> =
            changed(&now, &next).into_iter().filter(|key| is_applied(key)).collect();
        let mut needs_restart: Vec<String> =
            changed(&self.started, &next).into_iter().filter(|key| !is_applied(key)).collect();
        let fleet = "fleet".to_owned();
        if next.embeds_fleet() != self.started.embeds_fleet() && !needs_restart.contains(&fleet) {
            needs_restart.push(fleet);
        }
        applied.sort();
        needs_restart.sort();
        *now = next;
        Ok(Reloaded { applied, needs_restart, peers })
    }
}

fn peers(config: &Config) -> Vec<PeerSpec> {
    config.prefill.iter().chain(&config.decode).flat_map(PeerSpec::ranks).collect()
}

fn is_applied(key: &str) -> bool {
    key == "decode"
        || APPLIED
            .iter()
            .any(|name| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// The dotted names of all settings that differ.
fn changed(one: &Config, other: &Config) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let tree = |config: &Config| serde_json::to_value(config).unwrap_or_default();
    compare(&tree(one), &tree(other), "", &mut names);
    // Tokens are not written out, so that the trees may look alike.
    for (list, one, other) in
        [("prefill", &one.prefill, &other.prefill), ("decode", &one.decode, &other.decode)]
    {
        if one != other {
            names.insert(list.to_owned());
        }
    }
    for (list, differ) in [
        ("discovery.dns", one.discovery.dns != other.discovery.dns),
        ("discovery.kubernetes", one.discovery.kubernetes != other.discovery.kubernetes),
    ] {
        if differ {
            names.insert(list.to_owned());
        }
    }
    names
}

fn compare(one: &Value, other: &Value, path: &str, names: &mut BTreeSet<String>) {
    match (one, other) {
        (Value::Object(left), Value::Object(right)) => {
            for key in left.keys().chain(right.keys()).collect::<BTreeSet<_>>() {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                let value = |map: &serde_json::Map<String, Value>| map.get(key).cloned().unwrap_or_default();
                compare(&value(left), &value(right), &path, names);
            }
        }
        (one, other) if one != other => {
            names.insert(path.to_owned());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvbaton_proxy::Role;

    use super::*;

    #[test]
    fn what_changed_is_named_and_sorted_into_now_and_later() {
        let before = Config::default();
        let mut after = before.clone();
        assert!(changed(&before, &after).is_empty());
        after.listen.set_port(1);
        after.timeouts.prefill = Duration::from_secs(1);
        after.timeouts.connect = Duration::from_secs(1);
        after.admin.token = Some("a".to_owned());
        after.limits.registry_engines = 1;
        after.decode = vec![PeerSpec::new(Role::Decode, "http://a")];
        let names = changed(&before, &after);
        let (now, later): (Vec<&str>, Vec<&str>) =
            names.iter().map(String::as_str).partition(|key| is_applied(key));
        assert_eq!(now, ["admin.token", "decode", "timeouts.prefill"]);
        assert_eq!(later, ["limits.registry_engines", "listen", "timeouts.connect"]);
    }

    #[test]
    fn every_name_of_the_list_is_a_setting() {
        let mut all = Config { keys_file: Some("a".into()), ..Config::default() };
        all.admin.token = Some("a".to_owned());
        all.admin.token_file = Some("a".into());
        all.registry.token = Some("a".to_owned());
        all.registry.token_file = Some("a".into());
        let tree = serde_json::to_value(all).unwrap();
        for name in APPLIED {
            assert!(tree.pointer(&format!("/{}", name.replace('.', "/"))).is_some(), "{name}");
        }
    }
}
