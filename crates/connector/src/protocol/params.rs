//! `kv_transfer_params`, the JSON object that travels between prefill, router and decode.
//!
//! The engine-side view: it keeps apart what vLLM keeps apart (an absent key, a null, a
//! value) and carries unknown fields on. A router that has to reject bad objects uses
//! [`super::handoff::HandOff`] instead.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeSeq, Serializer};

/// What the router sends as `kv_transfer_params` on the prefill leg.
pub const PREFILL_REQUEST_PARAMS: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// The transfer parameters of the prefill leg, as JSON bytes; the same for every generation.
pub fn prefill_request_params() -> &'static [u8] {
    PREFILL_REQUEST_PARAMS.as_bytes()
}

/// The two protocol generations that differ on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Generation {
    /// Connector version 2 (vLLM 0.13): flat block ids, fixed lease, one-frame handshake.
    #[serde(rename = "v2")]
    V2,
    /// Connector version 14 (vLLM 0.32): block ids per cache group, leases with heartbeats.
    #[serde(rename = "v14")]
    V14,
}

impl Generation {
    /// The connector version number that enters the compatibility hash.
    pub fn connector_version(self) -> u64 {
        match self {
            Self::V2 => 2,
            Self::V14 => 14,
        }
    }
}

/// Which side drives the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransferMode {
    /// The decode engine reads.
    Pull,
    /// The prefill engine writes.
    Push,
}

impl TransferMode {
    /// The name used on the wire and in the compatibility hash.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "push",
        }
    }
}

/// A JSON field that may be absent, null or set; vLLM treats the three differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Presence<T> {
    /// The key is not in the object.
    #[default]
    Absent,
    /// The key is there with the value null.
    Null,
    /// The key has a value.
    Value(T),
}

impl<T> Presence<T> {
    /// True when the key is not in the object.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }

    /// True when the key is in the object, even as null.
    pub fn is_present(&self) -> bool {
        !self.is_absent()
    }

    /// The value, when there is one.
    pub fn value(&self) -> Option<&T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Absent | Self::Null => None,
        }
    }
}

impl<T> From<T> for Presence<T> {
    fn from(value: T) -> Self {
        Self::Value(value)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Presence<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match Option::<T>::deserialize(deserializer)? {
            Some(value) => Self::Value(value),
            None => Self::Null,
        })
    }
}

impl<T: Serialize> Serialize for Presence<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Value(value) => value.serialize(serializer),
            Self::Absent | Self::Null => serializer.serialize_none(),
        }
    }
}

/// Logical block ids, one list per transferable cache group, in either wire shape.
///
/// The flat shape of v2 is one group; the shape is remembered so that re-encoding is faithful.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockIds {
    groups: Vec<Vec<u64>>,
    flat: bool,
}

impl BlockIds {
    /// The flat list of v2.
    pub fn flat(ids: Vec<u64>) -> Self {
        Self { groups: vec![ids], flat: true }
    }

    /// The nested lists of v14.
    pub fn grouped(groups: Vec<Vec<u64>>) -> Self {
        Self { groups, flat: false }
    }

    /// The shape that `generation` puts on the wire; v2 keeps only the first group.
    pub fn for_generation(generation: Generation, mut groups: Vec<Vec<u64>>) -> Self {
        match generation {
            Generation::V14 => Self::grouped(groups),
            Generation::V2 if groups.is_empty() => Self::flat(Vec::new()),
            Generation::V2 => Self::flat(groups.swap_remove(0)),
        }
    }

    /// The ids, one list per group.
    pub fn groups(&self) -> &[Vec<u64>] {
        &self.groups
    }

    /// True for the flat wire shape of v2.
    pub fn is_flat(&self) -> bool {
        self.flat
    }

    /// Python's truth value of the JSON list: false only for `[]`, true for `[[]]`.
    pub fn is_truthy(&self) -> bool {
        if self.flat { self.total() > 0 } else { !self.groups.is_empty() }
    }

    /// The number of block ids over all groups.
    pub fn total(&self) -> usize {
        self.groups.iter().map(Vec::len).sum()
    }
}

impl Serialize for BlockIds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.flat {
            return serializer.collect_seq(self.groups.iter().flatten());
        }
        let mut seq = serializer.serialize_seq(Some(self.groups.len()))?;
        for group in &self.groups {
            seq.serialize_element(group)?;
        }
        seq.end()
    }
}

enum IdOrGroup {
    Id(u64),
    Group(Vec<u64>),
}

impl<'de> Deserialize<'de> for IdOrGroup {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IdOrGroupVisitor;
        impl<'de> Visitor<'de> for IdOrGroupVisitor {
            type Value = IdOrGroup;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a block id or a list of block ids")
            }
            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Self::Value, E> {
                Ok(IdOrGroup::Id(id))
            }
            fn visit_i64<E: de::Error>(self, id: i64) -> Result<Self::Value, E> {
                u64::try_from(id)
                    .map(IdOrGroup::Id)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(id), &self))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = seq.next_element()? {
                    ids.push(id);
                }
                Ok(IdOrGroup::Group(ids))
            }
        }
        deserializer.deserialize_any(IdOrGroupVisitor)
    }
}

impl<'de> Deserialize<'de> for BlockIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BlockIdsVisitor;
        impl<'de> Visitor<'de> for BlockIdsVisitor {
            type Value = BlockIds;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of block ids or a list of such lists")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut flat_ids = Vec::new();
                let mut groups = Vec::new();
                while let Some(element) = seq.next_element()? {
                    match element {
                        IdOrGroup::Id(id) => flat_ids.push(id),
                        IdOrGroup::Group(ids) => groups.push(ids),
                    }
                }
                match (flat_ids.is_empty(), groups.is_empty()) {
                    (true, _) => Ok(BlockIds::grouped(groups)),
                    (false, true) => Ok(BlockIds::flat(flat_ids)),
                    (false, false) => Err(de::Error::custom("block ids mix numbers and lists")),
                }
            }
        }
        deserializer.deserialize_seq(BlockIdsVisitor)
    }
}

/// The whole object, as an engine reads and writes it; fields are declared in vLLM's wire order.
#[derive(Debug, Clone, PartialEq, Default, serde::Serialize, serde::Deserialize)]
#[serde(default, remote = "Self")]
pub struct KvTransferParams {
    /// "You are the decode engine: fetch the blocks."
    #[serde(deserialize_with = "null_as_false")]
    pub do_remote_prefill: bool,
    /// "You are the prefill engine: keep the blocks."
    #[serde(deserialize_with = "null_as_false")]
    pub do_remote_decode: bool,
    /// Logical block ids on the remote side.
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub remote_block_ids: Presence<BlockIds>,
    /// The engine that holds the blocks.
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub remote_engine_id: Presence<String>,
    /// The remote engine's internal request id; key of notifications and heartbeats.
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub remote_request_id: Presence<String>,
    /// Side channel host of the remote engine.
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub remote_host: Presence<String>,
    /// Side channel port of the remote engine; a decimal string is read as vLLM reads it.
    #[serde(skip_serializing_if = "Presence::is_absent", deserialize_with = "number_or_decimal")]
    pub remote_port: Presence<i64>,
    /// Transfer tensor-parallel size of the remote engine.
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub tp_size: Presence<u32>,
    /// Decode-context-parallel size of the remote engine (v14).
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub dcp_size: Presence<u32>,
    /// Pipeline stages of the remote engine (v14).
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub pp_size: Presence<u32>,
    /// Tokens computed on the remote side (v14).
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub remote_num_tokens: Presence<u64>,
    /// Deadline on the remote scheduler's clock, in seconds; only a decode engine sets it (v14).
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub remote_blocks_expiry_time: Presence<f64>,
    /// Pull or push, for the router's information (v14).
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub transfer_mode: Presence<TransferMode>,
    /// The prefill engine's own prefix-cache hits, in tokens; added by its core, not by the connector.
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub remote_prefill_cached_tokens: Presence<u64>,
    /// Reserved by vLLM; read when present, never written.
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub remote_block_size: Presence<u32>,
    /// Push matching key that newer routers put into both legs.
    #[serde(skip_serializing_if = "Presence::is_absent")]
    pub transfer_id: Presence<String>,
    /// Fields this version does not know, in their original order.
    #[serde(flatten)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl<'de> Deserialize<'de> for KvTransferParams {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // A map first: the last of two equal keys wins, as in Python.
        let map = serde_json::Map::deserialize(deserializer)?;
        Self::deserialize(serde_json::Value::Object(map)).map_err(de::Error::custom)
    }
}

impl Serialize for KvTransferParams {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl KvTransferParams {
    /// The first of the four keys a decode engine insists on that is not in the object at all.
    pub fn first_missing_remote_key(&self) -> Option<&'static str> {
        [
            ("remote_engine_id", self.remote_engine_id.is_present()),
            ("remote_request_id", self.remote_request_id.is_present()),
            ("remote_host", self.remote_host.is_present()),
            ("remote_port", self.remote_port.is_present()),
        ]
        .into_iter()
        .find_map(|(key, present)| (!present).then_some(key))
    }

    /// Adds a prefill engine's own prefix-cache hits to its answer; only such answers carry them.
    pub fn export_prefill_cached_tokens(&mut self, cached_tokens: u64) {
        if self.do_remote_prefill {
            self.remote_prefill_cached_tokens = cached_tokens.into();
        }
    }

    /// True when the remote block ids are a non-empty list.
    pub fn names_remote_blocks(&self) -> bool {
        self.remote_block_ids.value().is_some_and(BlockIds::is_truthy)
    }
}

fn null_as_false<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::<bool>::deserialize(deserializer)?.unwrap_or(false))
}

fn number_or_decimal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Presence<i64>, D::Error> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Port {
        Number(i64),
        Text(String),
    }
    Ok(match Option::<Port>::deserialize(deserializer)? {
        None => Presence::Null,
        Some(Port::Number(port)) => Presence::Value(port),
        Some(Port::Text(text)) => Presence::Value(
            text.parse()
                .map_err(|_| de::Error::invalid_value(de::Unexpected::Str(&text), &"a port number"))?,
        ),
    })
}

#[cfg(test)]
mod tests;
