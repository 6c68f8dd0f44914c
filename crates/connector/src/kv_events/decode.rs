//! Reading batches. Nothing is allocated beyond a small multiple of what has arrived.

use super::{BlockHash, BlocksStored, EventBatch, KvEvent};
use crate::protocol::msgpack::{DecodeError, Reader, Value};

/// Null, as it is written.
const NIL: u8 = 0xc0;

/// Most fields of an event.
const MAX_FIELDS: usize = 64;

/// Where fields stand in an event that is an array, after its kind. Of a map the names count.
const STORED: [&str; 9] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
];
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

/// Why a batch cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadBatch {
    /// It ends too soon or is no msgpack.
    #[error("no msgpack, or cut off")]
    Malformed,
    /// Something in it is not of the kind that it must be.
    #[error("{field} is missing or of the wrong kind")]
    Field {
        /// What.
        field: &'static str,
    },
    /// The blocks' tokens are not as many as they must be.
    #[error("the tokens do not fill the blocks")]
    Tokens,
}

impl From<DecodeError> for BadBatch {
    fn from(_: DecodeError) -> Self {
        Self::Malformed
    }
}

impl EventBatch {
    /// Reads a batch.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadBatch> {
        let mut reader = Reader::new(bytes);
        let Value::Array(fields @ 2..) = reader.value()? else {
            return Err(BadBatch::Field { field: "the batch" });
        };
        reader.raw()?;
        let Value::Array(count) = reader.value()? else { return Err(BadBatch::Field { field: "events" }) };
        let mut events = Vec::new();
        for _ in 0..count {
            events.extend(event(&mut reader)?);
        }
        let rank = match fields {
            2 => None,
            _ => optional(reader.value()?, "data_parallel_rank")?,
        };
        Ok(Self { rank, events })
    }
}

/// The raw fields of one event.
#[derive(Default)]
struct Fields<'a> {
    kind: &'a [u8],
    named: Vec<(&'a [u8], &'a [u8])>,
    placed: Vec<&'a [u8]>,
}

impl<'a> Fields<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, BadBatch> {
        let mut fields = Self::default();
        match reader.value()? {
            Value::Map(count) if count <= MAX_FIELDS => {
                for _ in 0..count {
                    let Value::Str(name) = reader.value()? else {
                        return Err(BadBatch::Field { field: "a name" });
                    };
                    let value = reader.raw()?;
                    match name {
                        b"type" => fields.kind = text(value).ok_or(BadBatch::Field { field: "type" })?,
                        _ => fields.named.push((name, value)),
                    }
                }
            }
            Value::Array(count @ 1..=MAX_FIELDS) => {
                fields.kind = text(reader.raw()?).ok_or(BadBatch::Field { field: "type" })?;
                for _ in 1..count {
                    fields.placed.push(reader.raw()?);
                }
            }
            _ => return Err(BadBatch::Field { field: "an event" }),
        }
        Ok(fields)
    }

    fn get(&self, order: &[&str], name: &'static str) -> Result<Value<'a>, BadBatch> {
        let mut reader = self.reader(order, name);
        if reader.is_empty() { Ok(Value::Nil) } else { Ok(reader.value()?) }
    }

    fn reader(&self, order: &[&str], name: &'static str) -> Reader<'a> {
        let named = self.named.iter().find(|(known, _)| *known == name.as_bytes()).map(|(_, value)| *value);
        let placed =
            || order.iter().position(|field| *field == name).and_then(|at| self.placed.get(at).copied());
        Reader::new(named.or_else(placed).unwrap_or_default())
    }

    /// The elements of a list; none for null or nothing.
    fn list<T>(
        &self,
        order: &[&str],
        name: &'static str,
        element: impl Fn(&mut Reader<'a>) -> Result<T, BadBatch>,
    ) -> Result<Option<Vec<T>>, BadBatch> {
        let mut reader = self.reader(order, name);
        if reader.is_empty() {
            return Ok(None);
        }
        match reader.value()? {
            Value::Nil => Ok(None),
            Value::Array(count) => {
                (0..count).map(|_| element(&mut reader)).collect::<Result<_, _>>().map(Some)
            }
            _ => Err(BadBatch::Field { field: name }),
        }
    }
}

/// The next event; none if it is of a kind that is not known.
fn event(reader: &mut Reader<'_>) -> Result<Option<KvEvent>, BadBatch> {
    let fields = Fields::read(reader)?;
    let hashes = |order: &[&str]| {
        let hashes = fields.list(order, "block_hashes", |reader| hash(reader.value()?))?;
        hashes.ok_or(BadBatch::Field { field: "block_hashes" })
    };
    Ok(match fields.kind {
        b"BlockStored" => Some(KvEvent::Stored(stored(&fields, hashes(&STORED)?)?)),
        b"BlockRemoved" => Some(KvEvent::Removed {
            hashes: hashes(&REMOVED)?,
            medium: words(fields.get(&REMOVED, "medium")?, "medium")?,
            group: optional(fields.get(&REMOVED, "group_idx")?, "group_idx")?,
        }),
        b"AllBlocksCleared" => Some(KvEvent::Cleared),
        _ => None,
    })
}

fn stored(fields: &Fields<'_>, hashes: Vec<BlockHash>) -> Result<BlocksStored, BadBatch> {
    let parent = match fields.get(&STORED, "parent_block_hash")? {
        Value::Nil => None,
        other => Some(hash(other)?),
    };
    let token = |reader: &mut Reader<'_>| whole(reader.value()?, "token_ids");
    let tokens = fields.list(&STORED, "token_ids", token)?.ok_or(BadBatch::Field { field: "token_ids" })?;
    let block_size: u32 = whole(fields.get(&STORED, "block_size")?, "block_size")?;
    let block_size = block_size as usize;
    if block_size == 0 || hashes.len().checked_mul(block_size) != Some(tokens.len()) {
        return Err(BadBatch::Tokens);
    }
    let keys = |reader: &mut Reader<'_>| {
        let raw = reader.raw()?;
        Ok((raw != [NIL]).then(|| raw.to_vec()))
    };
    let extra_keys = fields.list(&STORED, "extra_keys", keys)?;
    if extra_keys.as_ref().is_some_and(|keys| keys.len() != hashes.len()) {
        return Err(BadBatch::Field { field: "extra_keys" });
    }
    Ok(BlocksStored {
        parent,
        tokens,
        block_size,
        lora: words(fields.get(&STORED, "lora_name")?, "lora_name")?,
        medium: words(fields.get(&STORED, "medium")?, "medium")?,
        extra_keys,
        group: optional(fields.get(&STORED, "group_idx")?, "group_idx")?,
        hashes,
    })
}

fn hash(value: Value<'_>) -> Result<BlockHash, BadBatch> {
    match value {
        Value::Bin(bytes) => Ok(BlockHash::Bytes(bytes.into())),
        Value::Int(number) => Ok(BlockHash::Number(number)),
        _ => Err(BadBatch::Field { field: "a block hash" }),
    }
}

fn whole<T: TryFrom<i128>>(value: Value<'_>, field: &'static str) -> Result<T, BadBatch> {
    match value {
        Value::Int(number) => T::try_from(number).map_err(|_| BadBatch::Field { field }),
        _ => Err(BadBatch::Field { field }),
    }
}

fn optional(value: Value<'_>, field: &'static str) -> Result<Option<u32>, BadBatch> {
    if matches!(value, Value::Nil) { Ok(None) } else { whole(value, field).map(Some) }
}

fn words(value: Value<'_>, field: &'static str) -> Result<Option<String>, BadBatch> {
    match value {
        Value::Nil => Ok(None),
        Value::Str(text) => Ok(Some(String::from_utf8_lossy(text).into_owned())),
        _ => Err(BadBatch::Field { field }),
    }
}

fn text(raw: &[u8]) -> Option<&[u8]> {
    match Reader::new(raw).value() {
        Ok(Value::Str(text)) => Some(text),
        _ => None,
    }
}
