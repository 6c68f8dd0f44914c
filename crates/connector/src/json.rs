//! One strict pass over JSON text (RFC 8259) that yields the members of an object as byte spans.
//!
//! For the few fields of large bodies that are of interest, and the rest passed on as it is. Owns syntax only: it builds no tree, allocates nothing per key, never recurses, and its faults carry
//! offsets, never content. It must not know what any field means.

mod scan;
mod text;

use std::borrow::Cow;
use std::ops::Range;

use self::scan::Scanner;

pub use self::scan::{Event, walk};
pub use self::text::{Unescape, key_is, push_string, unescape};

/// Containers that may be open at once, the outermost object included.
pub const MAX_DEPTH: usize = 512;

/// What a JSON value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `{...}`
    Object,
    /// `[...]`
    Array,
    /// `"..."`
    String,
    /// Any number.
    Number,
    /// `true`
    True,
    /// `false`
    False,
    /// `null`
    Null,
}

/// Why a text is not an acceptable JSON object, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} at byte {offset}")]
pub struct JsonFault {
    /// Offset of the first offending byte; the text's length where it ends too early.
    pub offset: usize,
    /// What is wrong there.
    pub kind: JsonFaultKind,
}

/// The kinds of [`JsonFault`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonFaultKind {
    /// The bytes are not UTF-8.
    #[error("invalid UTF-8")]
    Utf8,
    /// The text ends inside a value.
    #[error("unexpected end")]
    UnexpectedEnd,
    /// A byte that cannot stand where it does.
    #[error("unexpected byte")]
    UnexpectedByte,
    /// A number that breaks the grammar.
    #[error("malformed number")]
    Number,
    /// A backslash followed by no legal escape.
    #[error("malformed escape")]
    Escape,
    /// A raw control character inside a string.
    #[error("control character in a string")]
    ControlCharacter,
    /// More than [`MAX_DEPTH`] containers are open.
    #[error("nested too deeply")]
    TooDeep,
    /// Something follows the object.
    #[error("trailing bytes")]
    TrailingBytes,
    /// The text begins like JSON, but not with an object.
    #[error("not an object")]
    NotAnObject,
}

impl JsonFaultKind {
    fn at(self, offset: usize) -> JsonFault {
        JsonFault { offset, kind: self }
    }
}

/// One member of an object, as spans of the text it was found in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member<'a> {
    text: &'a str,
    key: Range<usize>,
    escaped: bool,
    value: Range<usize>,
    kind: Kind,
}

impl<'a> Member<'a> {
    /// The key between its quotes, escapes unresolved.
    pub fn raw_key(&self) -> &'a str {
        &self.text[self.key.clone()]
    }

    /// Whether the key holds escapes.
    pub fn is_escaped(&self) -> bool {
        self.escaped
    }

    /// Whether the key, its escapes resolved, is `name`.
    pub fn key_is(&self, name: &str) -> bool {
        key_is(self.raw_key(), self.escaped, name)
    }

    /// The value's span.
    pub fn value(&self) -> Range<usize> {
        self.value.clone()
    }

    /// The value's text.
    pub fn raw_value(&self) -> &'a str {
        &self.text[self.value.clone()]
    }

    /// What the value is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The whole text that the spans refer to.
    pub fn text(&self) -> &'a str {
        self.text
    }

    /// From the key's opening quote to the end of the value.
    pub fn span(&self) -> Range<usize> {
        self.key.start - 1..self.value.end
    }

    /// The value with escapes resolved, if it is a string.
    pub fn string(&self) -> Option<Cow<'a, str>> {
        let raw = self.raw_value();
        (self.kind == Kind::String).then(|| unescape(&raw[1..raw.len() - 1]))
    }
}

/// Whether the whole text is one JSON object.
///
/// # Errors
/// The first thing that is not so.
pub fn is_object(body: &[u8]) -> Result<(), JsonFault> {
    members(body)?.try_for_each(|member| member.map(|_| ()))
}

/// Where the elements of an array are, in order; `raw` is a checked array.
///
/// # Errors
/// The first fault inside it.
pub fn elements(raw: &str) -> Result<Vec<Range<usize>>, JsonFault> {
    let bytes = raw.as_bytes();
    let (mut depth, mut next, mut found) = (0_usize, 0_usize, Vec::new());
    walk(raw, 0, |event| {
        let end = match event {
            Event::Open { .. } => {
                depth += 1;
                if depth == 1 {
                    next = 1;
                }
                return;
            }
            Event::Key { .. } => return,
            Event::Scalar { span, .. } => span.end,
            Event::Close { end } => {
                depth -= 1;
                end
            }
        };
        if depth == 1 {
            let between = |byte: &u8| byte.is_ascii_whitespace() || *byte == b',';
            let start = next + bytes[next..].iter().take_while(|byte| between(byte)).count();
            found.push(start..end);
            next = end;
        }
    })?;
    Ok(found)
}

/// Checks that `body` is UTF-8 and walks the members of the object in it.
///
/// # Errors
/// The first fault before the first member; later ones come from the iterator.
pub fn members(body: &[u8]) -> Result<Members<'_>, JsonFault> {
    Fields::of(body).map(Members)
}

/// The members of one object in order, duplicates included; ends after the first fault.
///
/// Only an exhausted iterator has checked the whole text.
#[derive(Clone, Debug)]
pub struct Members<'a>(Fields<'a>);

impl<'a> Members<'a> {
    /// Walks the object that `text` is.
    ///
    /// # Errors
    /// `NotAnObject`, `UnexpectedByte` or `UnexpectedEnd` when the text does not begin with an object.
    pub fn open(text: &'a str) -> Result<Self, JsonFault> {
        Fields::open(text).map(Self)
    }

    /// As [`Members::open`] where something else may follow the object, which is not looked at.
    ///
    /// # Errors
    /// As there.
    pub fn beginning(text: &'a str) -> Result<Self, JsonFault> {
        Fields::start(text, 0, 1, false).map(Self)
    }

    fn advance(&mut self) -> Result<Option<Member<'a>>, JsonFault> {
        let Some(key) = self.0.key()? else { return Ok(None) };
        self.0.pass(key).map(Some)
    }
}

impl<'a> Iterator for Members<'a> {
    type Item = Result<Member<'a>, JsonFault>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.stage == Stage::Done {
            return None;
        }
        let item = self.advance().transpose();
        if !matches!(item, Some(Ok(_))) {
            self.0.stage = Stage::Done;
        }
        item
    }
}

/// The members of one object, one key after the other: whoever knows a value's form reads it himself, so that it is
/// looked at once, and passes the others.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    scan: Scanner<'a>,
    stage: Stage,
    /// Nothing may follow the object.
    alone: bool,
    /// Containers that are open inside the object.
    depth: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    First,
    Later,
    Done,
}

/// A key of [`Fields`], whose value comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key<'a> {
    text: &'a str,
    span: Range<usize>,
    escaped: bool,
}

impl<'a> Key<'a> {
    /// Whether it, its escapes resolved, is `name`.
    pub fn is(&self, name: &str) -> bool {
        key_is(&self.text[self.span.clone()], self.escaped, name)
    }

    /// It with its escapes resolved.
    pub fn name(&self) -> Cow<'a, str> {
        let raw = &self.text[self.span.clone()];
        if self.escaped { unescape(raw) } else { Cow::Borrowed(raw) }
    }
}

impl<'a> Fields<'a> {
    /// Those of the object that `text` is.
    ///
    /// # Errors
    /// `NotAnObject`, `UnexpectedByte` or `UnexpectedEnd` when the text does not begin with an object.
    pub fn open(text: &'a str) -> Result<Self, JsonFault> {
        Self::start(text, 0, 1, true)
    }

    /// Those of the object that `body` is, which is checked to be UTF-8.
    ///
    /// # Errors
    /// `Utf8` there, or as [`Fields::open`].
    pub fn of(body: &'a [u8]) -> Result<Self, JsonFault> {
        let text = std::str::from_utf8(body).map_err(|error| JsonFaultKind::Utf8.at(error.valid_up_to()))?;
        Self::open(text)
    }

    /// Those of the object that is the next value of `self`, which goes on where they end ([`Fields::resume`]).
    ///
    /// # Errors
    /// As [`Fields::open`].
    pub fn inner(&self) -> Result<Self, JsonFault> {
        Self::start(self.scan.text, self.scan.at, self.depth + 1, false)
    }

    fn start(text: &'a str, at: usize, depth: usize, alone: bool) -> Result<Self, JsonFault> {
        let mut scan = Scanner { text, at };
        scan.skip_whitespace();
        match scan.peek()? {
            b'{' => scan.at += 1,
            b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n' => {
                return Err(JsonFaultKind::NotAnObject.at(scan.at));
            }
            _ => return Err(JsonFaultKind::UnexpectedByte.at(scan.at)),
        }
        Ok(Self { scan, stage: Stage::First, alone, depth })
    }

    /// The next key, after its value before it was passed or read; none at the end of the object.
    ///
    /// # Errors
    /// The first fault since the last value.
    pub fn key(&mut self) -> Result<Option<Key<'a>>, JsonFault> {
        let scan = &mut self.scan;
        scan.skip_whitespace();
        match (self.stage, scan.peek()?) {
            (_, b'}') => {
                scan.at += 1;
                self.stage = Stage::Done;
                if self.alone {
                    scan.skip_whitespace();
                    if scan.at < scan.text.len() {
                        return Err(JsonFaultKind::TrailingBytes.at(scan.at));
                    }
                }
                return Ok(None);
            }
            (Stage::First, _) => self.stage = Stage::Later,
            (_, b',') => {
                scan.at += 1;
                scan.skip_whitespace();
            }
            _ => return Err(JsonFaultKind::UnexpectedByte.at(scan.at)),
        }
        let (span, escaped) = scan.key()?;
        Ok(Some(Key { text: scan.text, span, escaped }))
    }

    /// Checks the value of `key` and passes it.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn pass(&mut self, key: Key<'a>) -> Result<Member<'a>, JsonFault> {
        let start = self.scan.at;
        let kind = self.scan.value(self.depth, &mut |_| {})?;
        let Key { text, span, escaped } = key;
        Ok(Member { text, key: span, escaped, value: start..self.scan.at, kind })
    }

    /// The text from the next value on.
    pub fn rest(&self) -> &'a str {
        &self.scan.text[self.scan.at..]
    }

    /// Where in the text the next value begins, or the last one ended.
    pub fn offset(&self) -> usize {
        self.scan.at
    }

    /// The next value was read elsewhere, and ends there.
    pub fn resume(&mut self, end: usize) {
        self.scan.at = end;
    }
}

/// Whether a value says nothing: `null`, or an object without members.
pub fn is_blank(kind: Kind, raw: &str) -> bool {
    match kind {
        Kind::Null => true,
        Kind::Object => raw[1..raw.len() - 1].bytes().all(|byte| byte.is_ascii_whitespace()),
        _ => false,
    }
}
