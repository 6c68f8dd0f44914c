//! Reading batches. Nothing is allocated beyond a small multiple of what has arrived.

use super::{BlockHash, BlocksStored, EventBatch, KvEvent};

/// Deepest nesting; events have four levels.
const MAX_DEPTH: usize = 16;

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

impl EventBatch {
    /// Reads a batch.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadBatch> {
        let mut reader = Reader { bytes };
        let Value::Array(fields @ 2..) = reader.next()? else {
            return Err(BadBatch::Field { field: "the batch" });
        };
        reader.skip(MAX_DEPTH)?;
        let Value::Array(count) = reader.next()? else { return Err(BadBatch::Field { field: "events" }) };
        let mut events = Vec::new();
        for _ in 0..count {
            events.extend(event(&mut reader)?);
        }
        let rank = match fields {
            2 => None,
            _ => optional(reader.next()?, "data_parallel_rank")?,
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
        match reader.next()? {
            Value::Map(count) if count <= MAX_FIELDS => {
                for _ in 0..count {
                    let Value::Text(name) = reader.next()? else {
                        return Err(BadBatch::Field { field: "a name" });
                    };
                    let value = reader.skip(MAX_DEPTH)?;
                    match name {
                        b"type" => fields.kind = text(value).ok_or(BadBatch::Field { field: "type" })?,
                        _ => fields.named.push((name, value)),
                    }
                }
            }
            Value::Array(count @ 1..=MAX_FIELDS) => {
                fields.kind = text(reader.skip(MAX_DEPTH)?).ok_or(BadBatch::Field { field: "type" })?;
                for _ in 1..count {
                    fields.placed.push(reader.skip(MAX_DEPTH)?);
                }
            }
            _ => return Err(BadBatch::Field { field: "an event" }),
        }
        Ok(fields)
    }

    fn get(&self, order: &[&str], name: &'static str) -> Result<Value<'a>, BadBatch> {
        let mut reader = self.reader(order, name);
        if reader.bytes.is_empty() { Ok(Value::Nil) } else { reader.next() }
    }

    fn reader(&self, order: &[&str], name: &'static str) -> Reader<'a> {
        let named = self.named.iter().find(|(known, _)| *known == name.as_bytes()).map(|(_, value)| *value);
        let placed =
            || order.iter().position(|field| *field == name).and_then(|at| self.placed.get(at).copied());
        Reader { bytes: named.or_else(placed).unwrap_or_default() }
    }

    /// The elements of a list; none for null or nothing.
    fn list<T>(
        &self,
        order: &[&str],
        name: &'static str,
        element: impl Fn(&mut Reader<'a>) -> Result<T, BadBatch>,
    ) -> Result<Option<Vec<T>>, BadBatch> {
        let mut reader = self.reader(order, name);
        if reader.bytes.is_empty() {
            return Ok(None);
        }
        match reader.next()? {
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
        let hashes = fields.list(order, "block_hashes", |reader| hash(reader.next()?))?;
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
    let token = |reader: &mut Reader<'_>| whole(reader.next()?, "token_ids");
    let tokens = fields.list(&STORED, "token_ids", token)?.ok_or(BadBatch::Field { field: "token_ids" })?;
    let block_size: u32 = whole(fields.get(&STORED, "block_size")?, "block_size")?;
    let block_size = block_size as usize;
    if block_size == 0 || hashes.len().checked_mul(block_size) != Some(tokens.len()) {
        return Err(BadBatch::Tokens);
    }
    let keys = |reader: &mut Reader<'_>| {
        let raw = reader.skip(MAX_DEPTH)?;
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
        Value::Binary(bytes) => Ok(BlockHash::Bytes(bytes.into())),
        Value::Whole(number) => Ok(BlockHash::Number(number)),
        _ => Err(BadBatch::Field { field: "a block hash" }),
    }
}

fn whole<T: TryFrom<i128>>(value: Value<'_>, field: &'static str) -> Result<T, BadBatch> {
    match value {
        Value::Whole(number) => T::try_from(number).map_err(|_| BadBatch::Field { field }),
        _ => Err(BadBatch::Field { field }),
    }
}

fn optional(value: Value<'_>, field: &'static str) -> Result<Option<u32>, BadBatch> {
    if matches!(value, Value::Nil) { Ok(None) } else { whole(value, field).map(Some) }
}

fn words(value: Value<'_>, field: &'static str) -> Result<Option<String>, BadBatch> {
    match value {
        Value::Nil => Ok(None),
        Value::Text(text) => Ok(Some(String::from_utf8_lossy(text).into_owned())),
        _ => Err(BadBatch::Field { field }),
    }
}

fn text(raw: &[u8]) -> Option<&[u8]> {
    match (Reader { bytes: raw }).next() {
        Ok(Value::Text(text)) => Some(text),
        _ => None,
    }
}

const NIL: u8 = 0xc0;

/// A value, or the head of one that holds others.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Value<'a> {
    Nil,
    Whole(i128),
    Text(&'a [u8]),
    Binary(&'a [u8]),
    Array(usize),
    Map(usize),
    /// Something that no field here is.
    Other,
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], BadBatch> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or(BadBatch::Malformed)?;
        self.bytes = rest;
        Ok(taken)
    }

    fn unsigned(&mut self, bytes: usize) -> Result<u64, BadBatch> {
        Ok(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn length(&mut self, bytes: usize) -> Result<usize, BadBatch> {
        usize::try_from(self.unsigned(bytes)?).map_err(|_| BadBatch::Malformed)
    }

    fn next(&mut self) -> Result<Value<'a>, BadBatch> {
        let [first] = *self.take(1)? else { return Err(BadBatch::Malformed) };
        let low = usize::from(first);
        Ok(match first {
            0x00..=0x7f => Value::Whole(first.into()),
            0x80..=0x8f => Value::Map(low & 0x0f),
            0x90..=0x9f => Value::Array(low & 0x0f),
            0xa0..=0xbf => Value::Text(self.take(low & 0x1f)?),
            NIL => Value::Nil,
            0xc1 => return Err(BadBatch::Malformed),
            0xc2 | 0xc3 => Value::Other,
            0xc4..=0xc6 => {
                let length = self.length(1 << (first - 0xc4))?;
                Value::Binary(self.take(length)?)
            }
            0xc7..=0xc9 => {
                let length = self.length(1 << (first - 0xc7))?;
                self.take(length.saturating_add(1))?;
                Value::Other
            }
            0xca => self.take(4).map(|_| Value::Other)?,
            0xcb => self.take(8).map(|_| Value::Other)?,
            0xcc..=0xcf => Value::Whole(self.unsigned(1 << (first - 0xcc))?.into()),
            0xd0 => Value::Whole((self.unsigned(1)? as u8).cast_signed().into()),
            0xd1 => Value::Whole((self.unsigned(2)? as u16).cast_signed().into()),
            0xd2 => Value::Whole((self.unsigned(4)? as u32).cast_signed().into()),
            0xd3 => Value::Whole(self.unsigned(8)?.cast_signed().into()),
            0xd4..=0xd8 => self.take((1 << (first - 0xd4)) + 1).map(|_| Value::Other)?,
            0xd9..=0xdb => {
                let length = self.length(1 << (first - 0xd9))?;
                Value::Text(self.take(length)?)
            }
            0xdc => Value::Array(self.length(2)?),
            0xdd => Value::Array(self.length(4)?),
            0xde => Value::Map(self.length(2)?),
            0xdf => Value::Map(self.length(4)?),
            0xe0..=0xff => Value::Whole(first.cast_signed().into()),
        })
    }

    /// Passes over one whole value; its bytes.
    fn skip(&mut self, depth: usize) -> Result<&'a [u8], BadBatch> {
        let before = self.bytes;
        let inside = match self.next()? {
            Value::Array(count) => count,
            Value::Map(count) => count.saturating_mul(2),
            _ => 0,
        };
        let deeper = match inside {
            0 => 0,
            _ => depth.checked_sub(1).ok_or(BadBatch::Malformed)?,
        };
        for _ in 0..inside {
            self.skip(deeper)?;
        }
        Ok(&before[..before.len() - self.bytes.len()])
    }
}
