//! File, environment and flags laid over one another, key by key, so that every wrong key of every
//! layer is named with its place and the nearest right name.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use kvbaton_proxy::{PeerSpec, Role};
use serde::Deserialize;
use toml::{Table, Value};

use super::{Config, ConfigFault, ConfigFaults, Source};

/// The prefix of the environment's settings; levels are joined by two underscores.
const ENV_PREFIX: &str = "KVBATON_";

/// The lists of engines, whose names are their roles.
const PEER_LISTS: [&str; 2] = ["prefill", "decode"];

/// The settings that have a flag of their own.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--config`
    pub config: Option<PathBuf>,
    /// `--listen`
    pub listen: Option<SocketAddr>,
    /// `--prefill`, repeated
    pub prefill: Vec<String>,
    /// `--decode`, repeated
    pub decode: Vec<String>,
    /// `--set key=value`, repeated
    pub set: Vec<(String, String)>,
}

/// One layer's settings, with where each came from.
struct Entry {
    source: Source,
    path: Vec<String>,
    value: Value,
}

/// Reads all layers.
///
/// # Errors
/// Every wrong setting of every layer.
pub fn load(flags: &Flags, env: impl IntoIterator<Item = (String, String)>) -> Result<Config, ConfigFaults> {
    let schema = schema();
    let mut faults = Vec::new();
    let mut entries = Vec::new();
    let path_in_env = |(name, value): &(String, String)| {
        (name.as_str() == "KVBATON_CONFIG" && !value.is_empty()).then(|| PathBuf::from(value))
    };
    let env: Vec<(String, String)> =
        env.into_iter().filter(|(name, _)| name.starts_with(ENV_PREFIX)).collect();
    if let Some(path) = flags.config.clone().or_else(|| env.iter().find_map(path_in_env)) {
        file_entries(&path, &mut entries, &mut faults);
    }
    env_entries(&env, &schema, &mut entries);
    flag_entries(flags, &schema, &mut entries);
    merged(entries, &schema, faults)
}

/// Reads the text of a settings file alone.
///
/// # Errors
/// Every wrong setting.
pub fn read(text: &str) -> Result<Config, ConfigFaults> {
    let (mut entries, mut faults) = (Vec::new(), Vec::new());
    text_entries(Source::Settings, text, &mut entries, &mut faults);
    merged(entries, &schema(), faults)
}

/// Lays entries over one another, the later over the earlier.
fn merged(entries: Vec<Entry>, schema: &Table, mut faults: Vec<ConfigFault>) -> Result<Config, ConfigFaults> {
    let mut merged = Table::new();
    for entry in entries {
        match check(&entry, schema) {
            Ok(()) => set(&mut merged, &entry.path, entry.value),
            Err(found) => faults.extend(found),
        }
    }
    // What is sound by itself is still checked as a whole, so that nothing is found only next time.
    let config = match Config::deserialize(Value::Table(merged)) {
        Ok(config) => {
            if let Err(more) = config.validate() {
                faults.extend(more.0);
            }
            config
        }
        Err(error) => {
            faults.push(ConfigFault::new(Source::Settings, "", error.message().to_owned(), None));
            Config::default()
        }
    };
    if faults.is_empty() { Ok(config) } else { Err(ConfigFaults(faults)) }
}

/// Every key that exists, with a value of its type.
fn schema() -> Table {
    let mut peer = PeerSpec::new(Role::Prefill, "http://127.0.0.1:1");
    peer.name = Some("name".into());
    peer.generation = Some(kvbaton_proxy::Generation::V14);
    peer.kv_host = Some("host".into());
    peer.kv_port = Some(1);
    peer.side_channel = Some("host:1".into());
    peer.kv_events = Some("tcp://host:1".into());
    peer.kv_events_replay = Some("tcp://host:1".into());
    (peer.tp_size, peer.pp_size, peer.dp_size) = (Some(1), Some(1), Some(1));
    peer.front = Some(true);
    peer.registered_by = Some("name".into());
    (peer.lease, peer.abandon_grace) =
        (Some(std::time::Duration::from_secs(1)), Some(std::time::Duration::from_secs(1)));
    (peer.dp_rank, peer.dp_split) = (Some(0), true);
    peer.hand_offs = Some(vec![kvbaton_proxy::Endpoint::Completions]);
    peer.nixl_version = Some("1.5.1".into());
    peer.labels = [("zone".to_owned(), "a".to_owned())].into();
    let mut sample = Config { prefill: vec![peer.clone()], decode: vec![peer.clone()], ..Config::default() };
    sample.store.user = Some("user".into());
    sample.store.password = Some("password".into());
    for file in [&mut sample.store.ca, &mut sample.store.cert, &mut sample.store.key] {
        *file = Some("file.pem".into());
    }
    sample.nixl.library = Some("libnixl_capi.so".into());
    sample.nixl.version = Some("1.5.1".into());
    super::security::sample(&mut sample);
    super::health::sample(&mut sample);
    super::routing::sample(&mut sample);
    super::telemetry::sample(&mut sample);
    super::discovery::sample(&mut sample, &peer);
    sample.side_channel.front.advertise = Some("host".into());
    sample.hand_off.registry_address = "host:1".parse().ok();
    let mut table = Table::try_from(sample).unwrap_or_default();
    super::discovery::complete(&mut table);
    for list in PEER_LISTS {
        if let Some(Value::Array(peers)) = table.get_mut(list) {
            for peer in peers.iter_mut().filter_map(Value::as_table_mut) {
                // The list says the role; the token is never written out.
                peer.remove("role");
                peer.insert("token".into(), Value::String(String::new()));
            }
        }
    }
    table
}

fn file_entries(path: &Path, entries: &mut Vec<Entry>, faults: &mut Vec<ConfigFault>) {
    let source = Source::File(path.to_owned());
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            faults.push(ConfigFault::new(source, "", format!("cannot be read: {error}"), None));
            return;
        }
    };
    text_entries(source, &text, entries, faults);
}

fn text_entries(source: Source, text: &str, entries: &mut Vec<Entry>, faults: &mut Vec<ConfigFault>) {
    match text.parse::<Table>() {
        Ok(table) => collect(&source, &mut Vec::new(), table, entries),
        Err(error) => {
            let line = error.span().map(|span| text[..span.start].lines().count().max(1));
            let place = line.map_or_else(String::new, |line| format!("line {line}"));
            faults.push(ConfigFault::new(source, &place, error.message().to_owned(), None));
        }
    }
}

/// Flattens tables to entries; lists stay whole.
fn collect(source: &Source, path: &mut Vec<String>, table: Table, entries: &mut Vec<Entry>) {
    for (key, value) in table {
        path.push(key);
        match value {
            Value::Table(inner) if !inner.is_empty() => collect(source, path, inner, entries),
            value => entries.push(Entry { source: source.clone(), path: path.clone(), value }),
        }
        path.pop();
    }
}

fn env_entries(env: &[(String, String)], schema: &Table, entries: &mut Vec<Entry>) {
    for (name, value) in env {
        let Some(rest) = name.strip_prefix(ENV_PREFIX) else { continue };
        // A Kubernetes Service called kvbaton puts these into every pod of its namespace.
        let of_service = rest.starts_with("SERVICE_") || rest == "PORT" || rest.starts_with("PORT_");
        if of_service || rest == "CONFIG" {
            continue;
        }
        let path: Vec<String> = rest.split("__").map(str::to_ascii_lowercase).collect();
        let value = typed(value, lookup(schema, &path));
        entries.push(Entry { source: Source::Env(name.clone()), path, value });
    }
}

fn flag_entries(flags: &Flags, schema: &Table, entries: &mut Vec<Entry>) {
    for (key, value) in &flags.set {
        let path: Vec<String> = key.split('.').map(str::to_owned).collect();
        let value = typed(value, lookup(schema, &path));
        entries.push(Entry { source: Source::Flag("--set"), path, value });
    }
    if let Some(listen) = flags.listen {
        let value = Value::String(listen.to_string());
        entries.push(Entry { source: Source::Flag("--listen"), path: vec!["listen".into()], value });
    }
    for (flag, list, urls) in
        [("--prefill", "prefill", &flags.prefill), ("--decode", "decode", &flags.decode)]
    {
        if !urls.is_empty() {
            let value = Value::Array(urls.iter().map(|url| peer_table(url)).collect());
            entries.push(Entry { source: Source::Flag(flag), path: vec![list.into()], value });
        }
    }
}

/// A text of the environment or of a flag, as the type that the setting has.
fn typed(text: &str, like: Option<&Value>) -> Value {
    let as_text = || Value::String(text.to_owned());
    match like {
        Some(Value::Integer(_)) => text.parse().map_or_else(|_| as_text(), Value::Integer),
        Some(Value::Float(_)) => text.parse().map_or_else(|_| as_text(), Value::Float),
        Some(Value::Boolean(_)) => text.parse().map_or_else(|_| as_text(), Value::Boolean),
        Some(Value::Array(sample)) => {
            let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
            Value::Array(
                items.map(|item| if of_texts(sample) { item.into() } else { peer_table(item) }).collect(),
            )
        }
        _ => as_text(),
    }
}

/// Whether a list is one of texts; the others are of tables.
fn of_texts(sample: &[Value]) -> bool {
    sample.first().is_some_and(Value::is_str)
}

fn peer_table(url: &str) -> Value {
    Value::Table(Table::from_iter([("url".to_owned(), Value::String(url.to_owned()))]))
}

fn lookup<'a>(table: &'a Table, path: &[String]) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    let value = table.get(first)?;
    if rest.is_empty() { Some(value) } else { lookup(value.as_table()?, rest) }
}

fn set(table: &mut Table, path: &[String], value: Value) {
    match path {
        [] => {}
        [last] => {
            let value = match value {
                Value::Array(peers) if PEER_LISTS.contains(&last.as_str()) => {
                    Value::Array(peers.into_iter().map(|peer| with_role(last, peer)).collect())
                }
                value => value,
            };
            table.insert(last.clone(), value);
        }
        [first, rest @ ..] => {
            let inner = table.entry(first.clone()).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(inner) = inner {
                set(inner, rest, value);
            }
        }
    }
}

fn with_role(list: &str, mut peer: Value) -> Value {
    if let Value::Table(peer) = &mut peer {
        peer.insert("role".into(), Value::String(list.to_owned()));
    }
    peer
}

/// Whether one entry has a known key and a value of its type.
fn check(entry: &Entry, schema: &Table) -> Result<(), Vec<ConfigFault>> {
    let mut faults = Vec::new();
    let key = entry.path.join(".");
    match lookup(schema, &entry.path) {
        None => faults.push(unknown(entry, &key, schema)),
        Some(Value::Array(sample)) if PEER_LISTS.contains(&key.as_str()) => {
            check_peers(entry, &key, sample, &mut faults);
        }
        Some(like) => {
            if let (Value::Array(sample), Value::Array(items)) = (like, &entry.value) {
                check_members(entry, &key, sample, items, &mut faults);
            }
            let mut alone = Table::new();
            set(&mut alone, &entry.path, entry.value.clone());
            if faults.is_empty()
                && let Err(error) = Config::deserialize(Value::Table(alone))
            {
                faults.push(ConfigFault::new(entry.source.clone(), &key, said(&error), None));
            }
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(faults) }
}

/// Names the unknown keys of a list's tables.
fn check_members(entry: &Entry, key: &str, sample: &[Value], items: &[Value], faults: &mut Vec<ConfigFault>) {
    let Some(known) = sample.first().and_then(Value::as_table) else { return };
    for (position, item) in items.iter().enumerate() {
        let names = item.as_table().into_iter().flat_map(Table::keys);
        for name in names.filter(|name| !known.contains_key(*name)) {
            let near = nearest(name, known.keys().map(String::as_str));
            let place = format!("{key}[{position}].{name}");
            faults.push(ConfigFault::new(entry.source.clone(), &place, "is no setting".into(), near));
        }
    }
}

fn check_peers(entry: &Entry, key: &str, sample: &[Value], faults: &mut Vec<ConfigFault>) {
    let fault = |key: &str, what: &str, hint: Option<String>| {
        ConfigFault::new(entry.source.clone(), key, what.to_owned(), hint)
    };
    let Value::Array(peers) = &entry.value else {
        let hint = format!("write [[{key}]] and below it url = \"http://host:port\"");
        faults.push(fault(key, "must be a list of engines", Some(hint)));
        return;
    };
    let known = sample.first().and_then(Value::as_table);
    for (position, peer) in peers.iter().enumerate() {
        let place = format!("{key}[{position}]");
        let Value::Table(peer) = peer else {
            let hint = format!("write [[{key}]] and below it url = \"http://host:port\"");
            faults.push(fault(&place, "must be a table", Some(hint)));
            continue;
        };
        if !peer.contains_key("url") {
            faults.push(fault(&place, "has no url", Some("url = \"http://host:port\"".into())));
        }
        for (name, value) in peer {
            let place = format!("{place}.{name}");
            let names = known.map(|known| known.keys().map(String::as_str).collect::<Vec<_>>());
            if !names.as_ref().is_some_and(|names| names.contains(&name.as_str())) {
                let near = names.and_then(|names| nearest(name, names.into_iter()));
                faults.push(fault(&place, "is no setting", near));
                continue;
            }
            let mut alone = peer_table("http://127.0.0.1:1");
            if let Value::Table(alone) = &mut alone {
                alone.insert("role".into(), Value::String(key.to_owned()));
                alone.insert(name.clone(), value.clone());
            }
            if let Err(error) = PeerSpec::deserialize(alone) {
                faults.push(fault(&place, &said(&error), None));
            }
        }
    }
}

fn said(error: &toml::de::Error) -> String {
    let message = error.message();
    let message = message
        .replace("expected a duration", "expected a duration such as \"30s\" or \"5m\"")
        .replace("expected usize", "expected a whole number")
        .replace("expected u32", "expected a whole number")
        .replace("invalid socket address syntax", "expected an address such as 127.0.0.1:8000");
    format!("is wrong: {message}")
}

fn unknown(entry: &Entry, key: &str, schema: &Table) -> ConfigFault {
    let mut keys = Vec::new();
    all_keys(schema, String::new(), &mut keys);
    let near = nearest(key, keys.iter().map(String::as_str));
    let near = match (&entry.source, near) {
        (Source::Env(_), Some(near)) => {
            let name = near.trim_start_matches("did you mean ").trim_end_matches('?');
            Some(format!("did you mean {ENV_PREFIX}{}?", name.replace('.', "__").to_ascii_uppercase()))
        }
        (_, near) => near,
    };
    ConfigFault::new(entry.source.clone(), key, "is no setting".into(), near)
}

fn all_keys(table: &Table, prefix: String, keys: &mut Vec<String>) {
    for (key, value) in table {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        if let Value::Table(inner) = value {
            all_keys(inner, path.clone(), keys);
        }
        keys.push(path);
    }
}

fn nearest<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    known
        .map(|name| (strsim::jaro_winkler(key, name), name))
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, name)| format!("did you mean {name}?"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::Embedded;

    fn env(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn file(text: &str) -> (PathBuf, Flags) {
        static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvbaton-{}-{number}.toml", std::process::id()));
        std::fs::write(&path, text).unwrap();
        (path.clone(), Flags { config: Some(path), ..Flags::default() })
    }

    #[test]
    fn flags_beat_environment_beats_file() {
        let (path, mut flags) = file(
            "listen = \"127.0.0.1:1\"\n[timeouts]\nprefill = \"1s\"\nidle = \"1s\"\nconnect = \"1s\"\n[fleet]\nembedded = \"never\"\n",
        );
        flags.set = vec![("timeouts.prefill".into(), "3s".into())];
        let env = env(&[
            ("KVBATON_TIMEOUTS__PREFILL", "2s"),
            ("KVBATON_TIMEOUTS__IDLE", "2s"),
            ("KVBATON_LIMITS__BODY_BYTES", "100"),
            ("KVBATON_PREFILL", "http://a:1, http://b:2"),
            ("OTHER", "x"),
        ]);
        let config = load(&flags, env).unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!(config.listen, "127.0.0.1:1".parse().unwrap());
        assert_eq!(config.timeouts.prefill, Duration::from_secs(3));
        assert_eq!(config.timeouts.idle, Duration::from_secs(2));
        assert_eq!(config.timeouts.connect, Duration::from_secs(1));
        assert_eq!(config.limits.body_bytes, 100);
        assert_eq!(config.prefill[1].url, "http://b:2");
        assert_eq!(config.prefill[1].role, Role::Prefill);
        assert_eq!(config.fleet.embedded, Embedded::Never);
    }

    #[test]
    fn every_wrong_key_of_every_layer_is_named_with_the_nearest_right_one() {
        let (path, mut flags) = file(
            "lisen = \"127.0.0.1:1\"\n[timeouts]\nprefil = \"1s\"\nidle = 5\n[[decode]]\nurl = \"http://d:1\"\ngenration = \"v2\"\n",
        );
        flags.set = vec![("probe.intervall".into(), "3s".into())];
        let faults = load(&flags, env(&[("KVBATON_LIMITS__BODY_BYTE", "1")])).unwrap_err().0;
        std::fs::remove_file(path).unwrap();
        let said: Vec<(String, Option<String>)> =
            faults.into_iter().map(|fault| (fault.key, fault.hint)).collect();
        let hint = |name: &str| Some(format!("did you mean {name}?"));
        let expected = [
            ("lisen", hint("listen")),
            ("timeouts.prefil", hint("timeouts.prefill")),
            ("timeouts.idle", None),
            ("decode[0].genration", hint("generation")),
            ("limits.body_byte", hint("KVBATON_LIMITS__BODY_BYTES")),
            ("probe.intervall", hint("probe.interval")),
        ];
        let expected: Vec<(String, Option<String>)> =
            expected.into_iter().map(|(key, hint)| (key.to_owned(), hint)).collect();
        let sort = |mut list: Vec<(String, Option<String>)>| {
            list.sort();
            list
        };
        assert_eq!(sort(said), sort(expected));
    }

    #[test]
    fn variables_of_a_kubernetes_service_are_not_settings() {
        let env = env(&[
            ("KVBATON_SERVICE_HOST", "10.0.0.1"),
            ("KVBATON_PORT", "tcp://10.0.0.1:8000"),
            ("KVBATON_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ]);
        assert_eq!(load(&Flags::default(), env).unwrap(), Config::default());
    }

    #[test]
    fn a_broken_file_names_its_line() {
        let (path, flags) = file("listen = \"127.0.0.1:1\"\n\n[timeouts\n");
        let faults = load(&flags, env(&[])).unwrap_err().0;
        std::fs::remove_file(path).unwrap();
        assert_eq!(faults.len(), 1);
        assert_eq!(faults[0].key, "line 3");
        let gone = Flags { config: Some("/nonexistent/kvbaton.toml".into()), ..Flags::default() };
        assert!(load(&gone, env(&[])).unwrap_err().to_string().contains("cannot be read"));
    }
}
