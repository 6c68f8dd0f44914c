//! The part of msgpack that handshakes and KV events use, with the strictness of vLLM's decoder.
//!
//! Reads from a slice without copying, never recurses and never allocates for a length that the
//! bytes cannot back. No coercion between types.

use thiserror::Error;

/// Why bytes were refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The bytes end inside a value.
    #[error("the data is truncated")]
    Truncated,
    /// Bytes follow the value.
    #[error("bytes follow the value at offset {offset}")]
    TrailingBytes {
        /// Offset of the first byte too many.
        offset: usize,
    },
    /// A marker that msgpack reserves.
    #[error("invalid marker at offset {offset}")]
    InvalidMarker {
        /// Offset of the marker.
        offset: usize,
    },
    /// A string that is not UTF-8.
    #[error("a string is not valid UTF-8")]
    InvalidUtf8,
    /// A value of another type than the field has.
    #[error("field {field}: expected {expected}, got {got}")]
    WrongType {
        /// The field, or `payload` for the whole.
        field: &'static str,
        /// The type the field has.
        expected: &'static str,
        /// The type that was found.
        got: &'static str,
    },
    /// An array whose length is fixed has another one.
    #[error("field {field}: expected {expected} items, got {got}")]
    WrongLength {
        /// The field.
        field: &'static str,
        /// The fixed length.
        expected: usize,
        /// The length that was found.
        got: usize,
    },
    /// An integer outside the range of the field.
    #[error("field {field}: the integer is out of range")]
    OutOfRange {
        /// The field.
        field: &'static str,
    },
    /// A required field is not there.
    #[error("the required field {field} is missing")]
    MissingField {
        /// The field.
        field: &'static str,
    },
}

impl DecodeError {
    /// True when the bytes are not msgpack at all, false when they are but say something else.
    pub fn is_malformed(&self) -> bool {
        matches!(
            self,
            Self::Truncated | Self::TrailingBytes { .. } | Self::InvalidMarker { .. } | Self::InvalidUtf8
        )
    }
}

/// One value without its content, which follows for containers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value<'a> {
    Nil,
    Bool,
    Int(i128),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(usize),
    Map(usize),
    Ext,
}

impl Value<'_> {
    fn type_name(&self) -> &'static str {
        match self {
            Self::Nil => "null",
            Self::Bool => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Bin(_) => "bytes",
            Self::Array(_) => "array",
            Self::Map(_) => "object",
            Self::Ext => "ext",
        }
    }

    fn mismatch(&self, field: &'static str, expected: &'static str) -> DecodeError {
        DecodeError::WrongType { field, expected, got: self.type_name() }
    }
}

/// A cursor over msgpack bytes.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    /// Checks that nothing follows.
    pub(crate) fn finish(&self) -> Result<(), DecodeError> {
        if self.is_empty() {
            return Ok(());
        }
        Err(DecodeError::TrailingBytes { offset: self.offset })
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        let end = self.offset.checked_add(len).ok_or(DecodeError::Truncated)?;
        let slice = self.bytes.get(self.offset..end).ok_or(DecodeError::Truncated)?;
        self.offset = end;
        Ok(slice)
    }

    fn big_endian<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        self.take(N)?.try_into().map_err(|_| DecodeError::Truncated)
    }

    fn len8(&mut self) -> Result<usize, DecodeError> {
        Ok(usize::from(u8::from_be_bytes(self.big_endian()?)))
    }

    fn len16(&mut self) -> Result<usize, DecodeError> {
        Ok(usize::from(u16::from_be_bytes(self.big_endian()?)))
    }

    fn len32(&mut self) -> Result<usize, DecodeError> {
        usize::try_from(u32::from_be_bytes(self.big_endian()?)).map_err(|_| DecodeError::Truncated)
    }

    /// Every item takes at least one byte, so a longer header than the rest is a lie.
    fn items(&self, count: usize, bytes_per_item: usize) -> Result<usize, DecodeError> {
        let rest = self.bytes.len() - self.offset;
        if count.saturating_mul(bytes_per_item) > rest { Err(DecodeError::Truncated) } else { Ok(count) }
    }

    fn array(&self, count: usize) -> Result<Value<'a>, DecodeError> {
        Ok(Value::Array(self.items(count, 1)?))
    }

    fn map(&self, count: usize) -> Result<Value<'a>, DecodeError> {
        Ok(Value::Map(self.items(count, 2)?))
    }

    fn ext(&mut self, len: usize) -> Result<Value<'a>, DecodeError> {
        self.take(len.saturating_add(1))?;
        Ok(Value::Ext)
    }

    /// The next value; the items of a container follow.
    pub(crate) fn value(&mut self) -> Result<Value<'a>, DecodeError> {
        let offset = self.offset;
        let [marker] = self.big_endian()?;
        Ok(match marker {
            0x00..=0x7f => Value::Int(i128::from(marker)),
            0x80..=0x8f => self.map(usize::from(marker & 0x0f))?,
            0x90..=0x9f => self.array(usize::from(marker & 0x0f))?,
            0xa0..=0xbf => Value::Str(self.take(usize::from(marker & 0x1f))?),
            0xc0 => Value::Nil,
            0xc1 => return Err(DecodeError::InvalidMarker { offset }),
            0xc2 | 0xc3 => Value::Bool,
            0xc4 => Value::Bin(self.len8().and_then(|len| self.take(len))?),
            0xc5 => Value::Bin(self.len16().and_then(|len| self.take(len))?),
            0xc6 => Value::Bin(self.len32().and_then(|len| self.take(len))?),
            0xc7 => self.len8().and_then(|len| self.ext(len))?,
            0xc8 => self.len16().and_then(|len| self.ext(len))?,
            0xc9 => self.len32().and_then(|len| self.ext(len))?,
            0xca => Value::Float(f64::from(f32::from_be_bytes(self.big_endian()?))),
            0xcb => Value::Float(f64::from_be_bytes(self.big_endian()?)),
            0xcc => Value::Int(i128::from(u8::from_be_bytes(self.big_endian()?))),
            0xcd => Value::Int(i128::from(u16::from_be_bytes(self.big_endian()?))),
            0xce => Value::Int(i128::from(u32::from_be_bytes(self.big_endian()?))),
            0xcf => Value::Int(i128::from(u64::from_be_bytes(self.big_endian()?))),
            0xd0 => Value::Int(i128::from(i8::from_be_bytes(self.big_endian()?))),
            0xd1 => Value::Int(i128::from(i16::from_be_bytes(self.big_endian()?))),
            0xd2 => Value::Int(i128::from(i32::from_be_bytes(self.big_endian()?))),
            0xd3 => Value::Int(i128::from(i64::from_be_bytes(self.big_endian()?))),
            0xd4 => self.ext(1)?,
            0xd5 => self.ext(2)?,
            0xd6 => self.ext(4)?,
            0xd7 => self.ext(8)?,
            0xd8 => self.ext(16)?,
            0xd9 => Value::Str(self.len8().and_then(|len| self.take(len))?),
            0xda => Value::Str(self.len16().and_then(|len| self.take(len))?),
            0xdb => Value::Str(self.len32().and_then(|len| self.take(len))?),
            0xdc => self.len16().and_then(|count| self.array(count))?,
            0xdd => self.len32().and_then(|count| self.array(count))?,
            0xde => self.len16().and_then(|count| self.map(count))?,
            0xdf => self.len32().and_then(|count| self.map(count))?,
            0xe0..=0xff => Value::Int(i128::from(marker as i8)),
        })
    }

    /// Whether nothing follows.
    pub(crate) fn is_empty(&self) -> bool {
        self.offset == self.bytes.len()
    }

    /// One value with everything in it, as it is written.
    #[cfg(feature = "zmq")]
    pub(crate) fn raw(&mut self) -> Result<&'a [u8], DecodeError> {
        let begin = self.offset;
        self.skip()?;
        self.bytes.get(begin..self.offset).ok_or(DecodeError::Truncated)
    }

    /// Passes over one value with everything in it.
    pub(crate) fn skip(&mut self) -> Result<(), DecodeError> {
        let mut open: usize = 1;
        while open > 0 {
            open -= 1;
            let inside = match self.value()? {
                Value::Array(items) => items,
                Value::Map(pairs) => pairs.saturating_mul(2),
                _ => 0,
            };
            open = open.saturating_add(inside);
        }
        Ok(())
    }

    pub(crate) fn map_header(&mut self, field: &'static str) -> Result<usize, DecodeError> {
        match self.value()? {
            Value::Map(pairs) => Ok(pairs),
            other => Err(other.mismatch(field, "object")),
        }
    }

    pub(crate) fn array_header(&mut self, field: &'static str) -> Result<usize, DecodeError> {
        match self.value()? {
            Value::Array(items) => Ok(items),
            other => Err(other.mismatch(field, "array")),
        }
    }

    pub(crate) fn str(&mut self, field: &'static str) -> Result<&'a str, DecodeError> {
        match self.value()? {
            Value::Str(bytes) => std::str::from_utf8(bytes).map_err(|_| DecodeError::InvalidUtf8),
            other => Err(other.mismatch(field, "str")),
        }
    }

    pub(crate) fn bin(&mut self, field: &'static str) -> Result<&'a [u8], DecodeError> {
        match self.value()? {
            Value::Bin(bytes) => Ok(bytes),
            other => Err(other.mismatch(field, "bytes")),
        }
    }

    /// A number; an integer will do.
    pub(crate) fn float(&mut self, field: &'static str) -> Result<f64, DecodeError> {
        match self.value()? {
            Value::Float(value) => Ok(value),
            Value::Int(value) => Ok(value as f64),
            other => Err(other.mismatch(field, "float")),
        }
    }

    pub(crate) fn int<I: TryFrom<i128>>(&mut self, field: &'static str) -> Result<I, DecodeError> {
        match self.value()? {
            Value::Int(value) => I::try_from(value).map_err(|_| DecodeError::OutOfRange { field }),
            other => Err(other.mismatch(field, "int")),
        }
    }

    /// True, and passed over, when the next value is nil.
    pub(crate) fn nil(&mut self) -> bool {
        let is_nil = self.bytes.get(self.offset) == Some(&0xc0);
        self.offset += usize::from(is_nil);
        is_nil
    }

    pub(crate) fn list<T>(
        &mut self,
        field: &'static str,
        mut item: impl FnMut(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Vec<T>, DecodeError> {
        let count = self.array_header(field)?;
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    pub(crate) fn pair<I: TryFrom<i128>>(&mut self, field: &'static str) -> Result<[I; 2], DecodeError> {
        let got = self.array_header(field)?;
        if got != 2 {
            return Err(DecodeError::WrongLength { field, expected: 2, got });
        }
        Ok([self.int(field)?, self.int(field)?])
    }
}

/// Writes values with the shortest header, as msgspec does.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    pub(crate) bytes: Vec<u8>,
}

impl Writer {
    fn header(&mut self, len: usize, fix: Option<(u8, usize)>, markers: [Option<u8>; 3]) {
        if let Some((marker, limit)) = fix
            && len < limit
        {
            self.bytes.push(marker | len as u8);
            return;
        }
        match (u8::try_from(len), u16::try_from(len), markers) {
            (Ok(len), _, [Some(marker), _, _]) => self.bytes.extend([marker, len]),
            (_, Ok(len), [_, Some(marker), _]) => {
                self.bytes.push(marker);
                self.bytes.extend(len.to_be_bytes());
            }
            (_, _, [_, _, marker]) => {
                self.bytes.extend(marker);
                // Longer values than 4 GiB do not exist in this protocol.
                self.bytes.extend((len as u32).to_be_bytes());
            }
        }
    }

    pub(crate) fn map(&mut self, pairs: usize) {
        self.header(pairs, Some((0x80, 16)), [None, Some(0xde), Some(0xdf)]);
    }

    pub(crate) fn array(&mut self, items: usize) {
        self.header(items, Some((0x90, 16)), [None, Some(0xdc), Some(0xdd)]);
    }

    pub(crate) fn str(&mut self, text: &str) {
        self.header(text.len(), Some((0xa0, 32)), [Some(0xd9), Some(0xda), Some(0xdb)]);
        self.bytes.extend(text.as_bytes());
    }

    pub(crate) fn bin(&mut self, bytes: &[u8]) {
        self.header(bytes.len(), None, [Some(0xc4), Some(0xc5), Some(0xc6)]);
        self.bytes.extend(bytes);
    }

    pub(crate) fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    /// A number; an integer will do.
    #[cfg(feature = "registry")]
    pub(crate) fn bool(&mut self, value: bool) {
        self.bytes.push(if value { 0xc3 } else { 0xc2 });
    }

    pub(crate) fn float(&mut self, value: f64) {
        self.bytes.push(0xcb);
        self.bytes.extend(value.to_be_bytes());
    }

    pub(crate) fn uint(&mut self, value: u64) {
        if value < 0x80 {
            self.bytes.push(value as u8);
        } else if let Ok(value) = u8::try_from(value) {
            self.bytes.extend([0xcc, value]);
        } else if let Ok(value) = u16::try_from(value) {
            self.bytes.push(0xcd);
            self.bytes.extend(value.to_be_bytes());
        } else if let Ok(value) = u32::try_from(value) {
            self.bytes.push(0xce);
            self.bytes.extend(value.to_be_bytes());
        } else {
            self.bytes.push(0xcf);
            self.bytes.extend(value.to_be_bytes());
        }
    }

    pub(crate) fn int(&mut self, value: i64) {
        if let Ok(value) = u64::try_from(value) {
            self.uint(value);
        } else if value >= -32 {
            self.bytes.push(value as u8);
        } else if let Ok(value) = i8::try_from(value) {
            self.bytes.extend([0xd0, value as u8]);
        } else if let Ok(value) = i16::try_from(value) {
            self.bytes.push(0xd1);
            self.bytes.extend(value.to_be_bytes());
        } else if let Ok(value) = i32::try_from(value) {
            self.bytes.push(0xd2);
            self.bytes.extend(value.to_be_bytes());
        } else {
            self.bytes.push(0xd3);
            self.bytes.extend(value.to_be_bytes());
        }
    }

    pub(crate) fn list<T>(&mut self, items: &[T], mut item: impl FnMut(&mut Self, &T)) {
        self.array(items.len());
        for value in items {
            item(self, value);
        }
    }
}
