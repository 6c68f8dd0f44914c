//! First pass over a hand-off: known fields as loosely typed values, everything else skipped.
//!
//! No value is refused here, so the second pass can name each defect.

mod plain;

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::HandOffDefect;
use crate::protocol::params::BlockIds;

const BLOCK_IDS: &str = "remote_block_ids";

/// Any JSON value of a known field.
#[derive(Debug)]
pub(super) enum Loose<'a> {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Cow<'a, str>),
    List(Result<BlockIds, HandOffDefect>),
    Object,
}

/// The known fields; the last of two equal keys wins, as in Python.
#[derive(Debug, Default)]
pub(super) struct RawHandOff<'a> {
    pub(super) do_remote_prefill: Option<Loose<'a>>,
    pub(super) do_remote_decode: Option<Loose<'a>>,
    pub(super) remote_block_ids: Option<Loose<'a>>,
    pub(super) remote_engine_id: Option<Loose<'a>>,
    pub(super) remote_request_id: Option<Loose<'a>>,
    pub(super) remote_host: Option<Loose<'a>>,
    pub(super) remote_port: Option<Loose<'a>>,
    pub(super) tp_size: Option<Loose<'a>>,
    pub(super) dcp_size: Option<Loose<'a>>,
    pub(super) pp_size: Option<Loose<'a>>,
    pub(super) remote_num_tokens: Option<Loose<'a>>,
    pub(super) remote_blocks_expiry_time: Option<Loose<'a>>,
    pub(super) transfer_mode: Option<Loose<'a>>,
    pub(super) remote_prefill_cached_tokens: Option<Loose<'a>>,
    pub(super) remote_block_size: Option<Loose<'a>>,
    pub(super) transfer_id: Option<Loose<'a>>,
    pub(super) has_internal_keys: bool,
}

/// The whole value.
#[derive(Debug)]
pub(super) enum RawValue<'a> {
    Null,
    Object(Box<RawHandOff<'a>>),
    Other,
}

impl<'a> RawHandOff<'a> {
    fn slot(&mut self, key: &str) -> Option<&mut Option<Loose<'a>>> {
        Some(match key {
            "do_remote_prefill" => &mut self.do_remote_prefill,
            "do_remote_decode" => &mut self.do_remote_decode,
            BLOCK_IDS => &mut self.remote_block_ids,
            "remote_engine_id" => &mut self.remote_engine_id,
            "remote_request_id" => &mut self.remote_request_id,
            "remote_host" => &mut self.remote_host,
            "remote_port" => &mut self.remote_port,
            "tp_size" => &mut self.tp_size,
            "dcp_size" => &mut self.dcp_size,
            "pp_size" => &mut self.pp_size,
            "remote_num_tokens" => &mut self.remote_num_tokens,
            "remote_blocks_expiry_time" => &mut self.remote_blocks_expiry_time,
            "transfer_mode" => &mut self.transfer_mode,
            "remote_prefill_cached_tokens" => &mut self.remote_prefill_cached_tokens,
            "remote_block_size" => &mut self.remote_block_size,
            "transfer_id" => &mut self.transfer_id,
            _ => return None,
        })
    }
}

/// A value that is read as strictly as any other (depth, escapes, numbers) and then dropped.
struct Skipped;

impl<'de> Deserialize<'de> for Skipped {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SkippedVisitor;
        impl<'de> Visitor<'de> for SkippedVisitor {
            type Value = Skipped;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any JSON value")
            }
            fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
                Ok(Skipped)
            }
            fn visit_bool<E: Error>(self, _: bool) -> Result<Self::Value, E> {
                Ok(Skipped)
            }
            fn visit_i64<E: Error>(self, _: i64) -> Result<Self::Value, E> {
                Ok(Skipped)
            }
            fn visit_u64<E: Error>(self, _: u64) -> Result<Self::Value, E> {
                Ok(Skipped)
            }
            fn visit_f64<E: Error>(self, _: f64) -> Result<Self::Value, E> {
                Ok(Skipped)
            }
            fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
                Ok(Skipped)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                while seq.next_element::<Skipped>()?.is_some() {}
                Ok(Skipped)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                while map.next_entry::<Skipped, Skipped>()?.is_some() {}
                Ok(Skipped)
            }
        }
        deserializer.deserialize_any(SkippedVisitor)
    }
}

/// A key without copying it where the JSON allows.
struct Key<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Key<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key")
            }
            fn visit_borrowed_str<E: Error>(self, key: &'de str) -> Result<Self::Value, E> {
                Ok(Key(Cow::Borrowed(key)))
            }
            fn visit_str<E: Error>(self, key: &str) -> Result<Self::Value, E> {
                Ok(Key(Cow::Owned(key.to_owned())))
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

impl<'de> Deserialize<'de> for RawValue<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct RawVisitor;
        impl<'de> Visitor<'de> for RawVisitor {
            type Value = RawValue<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any JSON value")
            }
            fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
                Ok(RawValue::Null)
            }
            fn visit_bool<E: Error>(self, _: bool) -> Result<Self::Value, E> {
                Ok(RawValue::Other)
            }
            fn visit_i64<E: Error>(self, _: i64) -> Result<Self::Value, E> {
                Ok(RawValue::Other)
            }
            fn visit_u64<E: Error>(self, _: u64) -> Result<Self::Value, E> {
                Ok(RawValue::Other)
            }
            fn visit_f64<E: Error>(self, _: f64) -> Result<Self::Value, E> {
                Ok(RawValue::Other)
            }
            fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
                Ok(RawValue::Other)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                while seq.next_element::<Skipped>()?.is_some() {}
                Ok(RawValue::Other)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut raw = Box::<RawHandOff<'de>>::default();
                while let Some(Key(key)) = map.next_key()? {
                    raw.has_internal_keys |= key.starts_with('_');
                    match raw.slot(&key) {
                        Some(slot) if key == BLOCK_IDS => {
                            let list: &serde_json::value::RawValue = map.next_value()?;
                            *slot = Some(match plain::block_ids(list.get()) {
                                Some(ids) => Loose::List(Ok(ids)),
                                None => serde_json::from_str(list.get()).map_err(A::Error::custom)?,
                            });
                        }
                        Some(slot) => *slot = Some(map.next_value()?),
                        None => {
                            map.next_value::<Skipped>()?;
                        }
                    }
                }
                Ok(RawValue::Object(raw))
            }
        }
        deserializer.deserialize_any(RawVisitor)
    }
}

impl<'de> Deserialize<'de> for Loose<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LooseVisitor;
        impl<'de> Visitor<'de> for LooseVisitor {
            type Value = Loose<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any JSON value")
            }
            fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
                Ok(Loose::Null)
            }
            fn visit_bool<E: Error>(self, value: bool) -> Result<Self::Value, E> {
                Ok(Loose::Bool(value))
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Self::Value, E> {
                Ok(Loose::Int(i128::from(value)))
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Self::Value, E> {
                Ok(Loose::Int(i128::from(value)))
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Self::Value, E> {
                Ok(Loose::Float(value))
            }
            fn visit_borrowed_str<E: Error>(self, value: &'de str) -> Result<Self::Value, E> {
                Ok(Loose::Text(Cow::Borrowed(value)))
            }
            fn visit_str<E: Error>(self, value: &str) -> Result<Self::Value, E> {
                Ok(Loose::Text(Cow::Owned(value.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                read_block_ids(seq).map(Loose::List)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                while map.next_entry::<Skipped, Skipped>()?.is_some() {}
                Ok(Loose::Object)
            }
        }
        deserializer.deserialize_any(LooseVisitor)
    }
}

/// One element of the outer or of an inner list.
enum Element {
    Id(Result<u64, HandOffDefect>),
    Group(Result<Vec<u64>, HandOffDefect>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementVisitor;
        impl<'de> Visitor<'de> for ElementVisitor {
            type Value = Element;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any JSON value")
            }
            fn visit_u64<E: Error>(self, id: u64) -> Result<Self::Value, E> {
                Ok(Element::Id(Ok(id)))
            }
            fn visit_i64<E: Error>(self, _: i64) -> Result<Self::Value, E> {
                Ok(Element::Id(Err(HandOffDefect::BlockIdNegative)))
            }
            fn visit_f64<E: Error>(self, _: f64) -> Result<Self::Value, E> {
                Ok(Element::Id(Err(HandOffDefect::BlockIdNotInteger)))
            }
            fn visit_bool<E: Error>(self, _: bool) -> Result<Self::Value, E> {
                Ok(Element::Id(Err(HandOffDefect::BlockIdNotInteger)))
            }
            fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
                Ok(Element::Id(Err(HandOffDefect::BlockIdNotInteger)))
            }
            fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
                Ok(Element::Id(Err(HandOffDefect::BlockIdNotInteger)))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut ids = Ok(Vec::new());
                while let Some(element) = seq.next_element()? {
                    match (&mut ids, element) {
                        (Ok(ids), Element::Id(Ok(id))) => ids.push(id),
                        (Ok(_), Element::Id(Err(defect))) => ids = Err(defect),
                        (Ok(_), Element::Group(_)) => ids = Err(HandOffDefect::BlockIdNotInteger),
                        (Err(_), _) => {}
                    }
                }
                Ok(Element::Group(ids))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                while map.next_entry::<Skipped, Skipped>()?.is_some() {}
                Ok(Element::Id(Err(HandOffDefect::BlockIdNotInteger)))
            }
        }
        deserializer.deserialize_any(ElementVisitor)
    }
}

fn read_block_ids<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Result<BlockIds, HandOffDefect>, A::Error> {
    let mut flat_ids = Vec::new();
    let mut groups = Vec::new();
    let mut defect = None;
    while let Some(element) = seq.next_element()? {
        match element {
            Element::Id(Ok(id)) => flat_ids.push(id),
            Element::Group(Ok(ids)) => groups.push(ids),
            Element::Id(Err(found)) | Element::Group(Err(found)) => {
                defect.get_or_insert(found);
            }
        }
    }
    Ok(match (defect, flat_ids.is_empty(), groups.is_empty()) {
        (Some(defect), _, _) => Err(defect),
        (None, true, true) => Err(HandOffDefect::NoBlocks),
        (None, true, false) => Ok(BlockIds::grouped(groups)),
        (None, false, true) => Ok(BlockIds::flat(flat_ids)),
        (None, false, false) => Err(HandOffDefect::BlockIdsMixed),
    })
}
