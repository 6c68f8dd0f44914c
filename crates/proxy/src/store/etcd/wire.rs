//! The keys and values of the store. Values carry the number of their form; payloads lie beside
//! them in pieces, byte for byte, because etcd takes no large requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kv_connector::fit::EngineTraits;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Deserializer, Serialize};

use crate::client::ModelScope;
use crate::registry::{EngineRecord, EngineRole, EngineState, Rank, RankView};

/// The form of the values that this router writes, and the newest that it reads.
pub(super) const SCHEMA: u32 = 1;

/// Largest piece of a payload. etcd refuses requests above 1.5 MiB unless it is told otherwise.
pub(super) const PIECE: usize = 512 << 10;

/// Bytes of payload in one request, at most.
pub(super) const BATCH_BYTES: usize = 1 << 20;

/// Operations in one request, at most; etcd's own limit is 128 unless it is told otherwise.
pub(super) const BATCH_OPERATIONS: usize = 64;

/// RFC 3986's unreserved characters stay; a slash in a name must not look like a level.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Where things are.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    state: String,
    payloads: String,
}

/// What a key of the followed part is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// An engine.
    Engine(String),
    /// An engine's clock.
    Clock(String),
    /// The last engine that was removed on purpose.
    Removal,
    /// What operators decided.
    Decided,
    /// Who is at an address, or something of a newer router.
    Other,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Self {
        let prefix = prefix.trim_end_matches('/');
        Self { state: format!("{prefix}/v1/state/"), payloads: format!("{prefix}/v1/payloads/") }
    }

    /// What is followed; payloads are not in it.
    pub(super) fn state(&self) -> &str {
        &self.state
    }

    pub(super) fn engine(&self, engine_id: &str) -> String {
        format!("{}engines/{}", self.state, segment(engine_id))
    }

    pub(super) fn clock(&self, engine_id: &str) -> String {
        format!("{}clocks/{}", self.state, segment(engine_id))
    }

    pub(super) fn removal(&self) -> String {
        format!("{}removal", self.state)
    }

    /// What operators decided.
    pub(super) fn decided(&self) -> String {
        format!("{}operator", self.state)
    }

    /// Which store this is: written once, by the first router.
    pub(super) fn name(&self) -> String {
        format!("{}name", self.state)
    }

    /// A key that is followed and means nothing: its changes mark a place among the others.
    pub(super) fn mark(&self) -> String {
        format!("{}mark", self.state)
    }

    pub(super) fn address(&self, (base_url, dp_rank): &(String, u32)) -> String {
        format!("{}addresses/{}/{dp_rank}", self.state, segment(base_url))
    }

    /// All payloads of an engine.
    pub(super) fn payloads(&self, engine_id: &str) -> String {
        format!("{}{}/", self.payloads, segment(engine_id))
    }

    /// The payloads that were written together.
    pub(super) fn batch(&self, engine_id: &str, token: &str) -> String {
        format!("{}{token}/", self.payloads(engine_id))
    }

    pub(super) fn piece(&self, engine_id: &str, rank: &RankValue, piece: usize) -> String {
        let batch = self.batch(engine_id, &rank.token);
        format!("{batch}{}.{}/{piece}", rank.pp_rank, rank.tp_rank)
    }

    pub(super) fn subject(&self, key: &[u8]) -> Subject {
        let key = std::str::from_utf8(key).ok().and_then(|key| key.strip_prefix(&self.state));
        let name = |text: &str| percent_decode_str(text).decode_utf8().ok().map(String::from);
        match key.and_then(|key| key.split_once('/')) {
            Some(("engines", id)) => name(id).map_or(Subject::Other, Subject::Engine),
            Some(("clocks", id)) => name(id).map_or(Subject::Other, Subject::Clock),
            _ if key == Some("removal") => Subject::Removal,
            _ if key == Some("operator") => Subject::Decided,
            _ => Subject::Other,
        }
    }
}

fn segment(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

/// What is read of a value first: whether the rest can be.
#[derive(Deserialize)]
struct Form {
    schema: u32,
}

/// Why a value is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ValueFault {
    /// It is of a newer router.
    #[error("is of form {0}, and this router reads none above {SCHEMA}")]
    Newer(u32),
    /// It is not what is written there.
    #[error("cannot be read: {0}")]
    Garbled(String),
}

/// Reads a value.
///
/// # Errors
/// It is newer than this router, or none of ours.
pub(super) fn read<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, ValueFault> {
    let garbled = |error: serde_json::Error| ValueFault::Garbled(error.to_string());
    let form: Form = serde_json::from_slice(bytes).map_err(garbled)?;
    if form.schema > SCHEMA {
        return Err(ValueFault::Newer(form.schema));
    }
    serde_json::from_slice(bytes).map_err(garbled)
}

/// Writes a value.
pub(super) fn write<T: Serialize>(value: &T) -> Vec<u8> {
    // Our own values are maps with text keys: they can be written.
    serde_json::to_vec(value).unwrap_or_default()
}

/// An engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct EngineValue {
    schema: u32,
    pub(super) engine_id: String,
    base_url: Option<String>,
    role: Option<EngineRole>,
    model: Option<String>,
    dp_rank: u32,
    vllm_version: Option<String>,
    #[serde(default, deserialize_with = "known_traits")]
    traits: EngineTraits,
    state: EngineState,
    generation: u64,
    registered_at: u64,
    ttl_seconds: Option<f64>,
    /// The credential that it belongs to.
    #[serde(default)]
    owner: Option<String>,
    /// The models that the credential is for; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner_models: Option<BTreeSet<String>>,
    pub(super) ranks: Vec<RankValue>,
}

/// One rank of it, and where its payload lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RankValue {
    pub(super) pp_rank: u32,
    pub(super) tp_rank: u32,
    pub(super) sha256: String,
    pub(super) bytes: usize,
    /// With which others it was written. No two writes share one, so that what a failed write
    /// leaves behind is never what another one needs.
    pub(super) token: String,
    pub(super) registered_at: u64,
}

impl RankValue {
    pub(super) fn rank(&self) -> Rank {
        (self.pp_rank, self.tp_rank)
    }

    /// The sizes of the pieces in which its payload lies.
    pub(super) fn pieces(&self) -> impl Iterator<Item = usize> + use<> {
        let bytes = self.bytes;
        (0..bytes.div_ceil(PIECE)).map(move |piece| PIECE.min(bytes - piece * PIECE))
    }
}

impl EngineValue {
    /// A record's value, with the payloads where `token` says.
    pub(super) fn new(record: &EngineRecord, token: impl Fn(&RankView) -> String) -> Self {
        let ranks = record.ranks.values().map(|view| RankValue {
            pp_rank: view.pp_rank,
            tp_rank: view.tp_rank,
            sha256: view.sha256.clone(),
            bytes: view.payload.len(),
            token: token(view),
            registered_at: view.registered_at,
        });
        Self {
            schema: SCHEMA,
            engine_id: record.engine_id.clone(),
            base_url: record.base_url.clone(),
            role: record.role,
            model: record.model.clone(),
            dp_rank: record.dp_rank,
            vllm_version: record.vllm_version.clone(),
            traits: record.traits.clone(),
            state: record.state,
            generation: record.generation,
            registered_at: record.registered_at,
            ttl_seconds: record.ttl.map(|ttl| ttl.as_secs_f64()),
            owner: record.owner.as_deref().map(str::to_owned),
            owner_models: match &record.bound {
                ModelScope::All => None,
                ModelScope::Only(models) => Some(BTreeSet::clone(models)),
            },
            ranks: ranks.collect(),
        }
    }

    /// The record that it is the value of.
    ///
    /// # Errors
    /// Its time to live is no duration.
    pub(super) fn into_record(
        self,
        ranks: BTreeMap<Rank, Arc<RankView>>,
    ) -> Result<EngineRecord, ValueFault> {
        let ttl = self.ttl_seconds.map(Duration::try_from_secs_f64).transpose();
        Ok(EngineRecord {
            engine_id: self.engine_id,
            base_url: self.base_url,
            role: self.role,
            model: self.model,
            dp_rank: self.dp_rank,
            vllm_version: self.vllm_version,
            traits: self.traits,
            state: self.state,
            generation: self.generation,
            revision: 0,
            registered_at: self.registered_at,
            ttl: ttl.map_err(|error| ValueFault::Garbled(error.to_string()))?,
            ranks,
            owner: self.owner.map(Arc::from),
            bound: self.owner_models.map_or(ModelScope::All, |models| ModelScope::Only(Arc::new(models))),
            pulse: Arc::default(),
        })
    }
}

/// A trait that only newer routers know costs the others no more than the traits.
fn known_traits<'de, D: Deserializer<'de>>(deserializer: D) -> Result<EngineTraits, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

/// The engine that was removed on purpose last; written together with its deletion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Removal {
    pub(super) schema: u32,
    pub(super) engine_id: String,
}

/// An engine's clock, as one router measured it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ClockValue {
    pub(super) schema: u32,
    /// Which life of the engine it is of.
    pub(super) generation: u64,
    /// Seconds on the engine's clock.
    pub(super) seconds: f64,
    /// The true value was at most so far away.
    pub(super) error: f64,
    /// The measuring router's wall clock then, in Unix seconds.
    pub(super) unix: f64,
    /// Which router that was.
    pub(super) router: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_levels_whatever_the_names_hold() {
        let keys = Keys::new("/kv/");
        assert_eq!(keys.engine("a/b c"), "/kv/v1/state/engines/a%2Fb%20c");
        let address = ("http://10.0.0.1:1".to_owned(), 2);
        assert_eq!(keys.address(&address), "/kv/v1/state/addresses/http%3A%2F%2F10.0.0.1%3A1/2");
        for id in ["a", "a/b c", "ü", "%2F", "removal"] {
            assert_eq!(keys.subject(keys.engine(id).as_bytes()), Subject::Engine(id.to_owned()));
            assert_eq!(keys.subject(keys.clock(id).as_bytes()), Subject::Clock(id.to_owned()));
        }
        assert_eq!(keys.subject(keys.removal().as_bytes()), Subject::Removal);
        assert_eq!(keys.subject(keys.decided().as_bytes()), Subject::Decided);
        assert_eq!(keys.subject(keys.address(&address).as_bytes()), Subject::Other);
        assert_eq!(keys.subject(b"/kv/v1/state/engines/\xff"), Subject::Other);
        assert_eq!(keys.subject(b"/other/v1/state/engines/a"), Subject::Other);
        assert!(!keys.payloads("a").starts_with(keys.state()));
    }

    fn value(text: &str) -> Result<EngineValue, ValueFault> {
        read(text.as_bytes())
    }

    const VALUE: &str = r#"{"schema":1,"engine_id":"a","base_url":"http://h:1","role":"prefill",
        "model":"m","dp_rank":1,"vllm_version":null,"traits":{"tp_size":2},"state":"draining",
        "generation":3,"registered_at":7,"ttl_seconds":1.5,"owner":"o","owner_models":["m"],"ranks":[{"pp_rank":0,"tp_rank":1,
        "sha256":"00","bytes":524289,"token":"t","registered_at":8}]}"#;

    #[test]
    fn a_value_is_read_as_it_was_written() {
        let read_back = value(VALUE).unwrap();
        assert_eq!(value(std::str::from_utf8(&write(&read_back)).unwrap()), Ok(read_back.clone()));
        assert_eq!(read_back.ranks[0].pieces().collect::<Vec<_>>(), [524_288, 1]);
        let record = read_back.into_record(BTreeMap::new()).unwrap();
        assert_eq!(record.ttl, Some(Duration::from_millis(1500)));
        assert_eq!(record.owner.as_deref(), Some("o"));
        assert_eq!(record.bound, ModelScope::of(&["m".to_owned()]));
        assert_eq!((record.state, record.traits.tp_size), (EngineState::Draining, Some(2)));
        let of_before = VALUE.replace(r#","owner_models":["m"]"#, "");
        let record = value(&of_before).unwrap().into_record(BTreeMap::new()).unwrap();
        assert_eq!(record.bound, ModelScope::All);
    }

    #[test]
    fn newer_values_are_told_from_broken_ones() {
        assert_eq!(value(&VALUE.replace(r#""schema":1"#, r#""schema":2"#)), Err(ValueFault::Newer(2)));
        assert!(matches!(value("{}"), Err(ValueFault::Garbled(_))));
        assert!(matches!(value(r#"{"schema":1}"#), Err(ValueFault::Garbled(_))));
        let with_more = VALUE.replace(r#""schema":1"#, r#""schema":1,"colour":"red""#);
        assert_eq!(value(&with_more), value(VALUE));
        let unknown_trait = VALUE.replace("tp_size", "wings");
        assert_eq!(value(&unknown_trait).unwrap().traits, EngineTraits::default());
    }
}
