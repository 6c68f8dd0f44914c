//! The scanner proper: passes values byte by byte, checks the grammar, reports what it meets.

use std::ops::Range;

use super::{JsonFault, JsonFaultKind, Kind, MAX_DEPTH};

const WORD_BITS: usize = u64::BITS as usize;

/// Words of a string that are looked at one by one.
const NEAR: usize = 4;

/// What [`walk`] meets, in the order of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A container opens.
    Open {
        /// Whether it is an object.
        object: bool,
    },
    /// The innermost container ended.
    Close {
        /// Just after it.
        end: usize,
    },
    /// A key of the innermost object.
    Key {
        /// Without its quotes.
        raw: Range<usize>,
        /// Whether it holds escapes.
        escaped: bool,
    },
    /// A value that is no container.
    Scalar {
        /// What it is.
        kind: Kind,
        /// Where it is.
        span: Range<usize>,
    },
}

/// Reports everything inside the one value that starts at `start` in `text`.
///
/// # Errors
/// The first fault inside the value.
pub fn walk(text: &str, start: usize, mut on: impl FnMut(Event)) -> Result<(), JsonFault> {
    Scanner { text, at: start }.value(1, &mut on).map(drop)
}

#[derive(Clone, Debug)]
pub(super) struct Scanner<'a> {
    pub(super) text: &'a str,
    pub(super) at: usize,
}

impl Scanner<'_> {
    pub(super) fn peek(&self) -> Result<u8, JsonFault> {
        self.text.as_bytes().get(self.at).copied().ok_or(JsonFaultKind::UnexpectedEnd.at(self.at))
    }

    #[inline]
    pub(super) fn skip_whitespace(&mut self) {
        let bytes = self.text.as_bytes();
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = bytes.get(self.at) {
            self.at += 1;
        }
    }

    /// Passes one value; `outer` containers are open around it.
    pub(super) fn value(&mut self, outer: usize, on: &mut impl FnMut(Event)) -> Result<Kind, JsonFault> {
        let root = match self.peek()? {
            b'{' => Kind::Object,
            b'[' => Kind::Array,
            _ => return self.scalar(on),
        };
        let mut open = Nesting::within(outer);
        loop {
            let start = self.at;
            let object = match self.peek()? {
                b'{' => true,
                b'[' => false,
                _ => {
                    if !open.in_object() {
                        self.plain_integers(on);
                    }
                    self.scalar(on)?;
                    if self.after_value(&mut open, on)? {
                        return Ok(root);
                    }
                    continue;
                }
            };
            if !open.push(object) {
                return Err(JsonFaultKind::TooDeep.at(start));
            }
            on(Event::Open { object });
            self.at += 1;
            self.skip_whitespace();
            let empty = self.peek()? == if object { b'}' } else { b']' };
            if empty {
                if self.after_value(&mut open, on)? {
                    return Ok(root);
                }
            } else if object {
                let (raw, escaped) = self.key()?;
                on(Event::Key { raw, escaped });
            }
        }
    }

    /// Closes what ends here and steps to the next value; true when the outermost container closed.
    #[inline]
    fn after_value(&mut self, open: &mut Nesting, on: &mut impl FnMut(Event)) -> Result<bool, JsonFault> {
        loop {
            self.skip_whitespace();
            let object = open.in_object();
            match self.peek()? {
                b',' => {
                    self.at += 1;
                    self.skip_whitespace();
                    if object {
                        let (raw, escaped) = self.key()?;
                        on(Event::Key { raw, escaped });
                    }
                    return Ok(false);
                }
                b'}' if object => {}
                b']' if !object => {}
                _ => return Err(JsonFaultKind::UnexpectedByte.at(self.at)),
            }
            self.at += 1;
            on(Event::Close { end: self.at });
            if open.pop() {
                return Ok(true);
            }
        }
    }

    #[inline]
    fn scalar(&mut self, on: &mut impl FnMut(Event)) -> Result<Kind, JsonFault> {
        let start = self.at;
        let kind = match self.peek()? {
            b'"' => {
                self.string()?;
                Kind::String
            }
            b'-' | b'0'..=b'9' => {
                self.number()?;
                Kind::Number
            }
            b't' => self.literal(b"true", Kind::True)?,
            b'f' => self.literal(b"false", Kind::False)?,
            b'n' => self.literal(b"null", Kind::Null)?,
            _ => return Err(JsonFaultKind::UnexpectedByte.at(start)),
        };
        on(Event::Scalar { kind, span: start..self.at });
        Ok(kind)
    }

    /// Passes a key and its colon; the span excludes the quotes.
    pub(super) fn key(&mut self) -> Result<(Range<usize>, bool), JsonFault> {
        if self.peek()? != b'"' {
            return Err(JsonFaultKind::UnexpectedByte.at(self.at));
        }
        let start = self.at + 1;
        let escaped = self.string()?;
        let end = self.at - 1;
        self.skip_whitespace();
        if self.peek()? != b':' {
            return Err(JsonFaultKind::UnexpectedByte.at(self.at));
        }
        self.at += 1;
        self.skip_whitespace();
        Ok((start..end, escaped))
    }

    /// Passes a string from its opening quote; true when it holds escapes.
    fn string(&mut self) -> Result<bool, JsonFault> {
        let bytes = self.text.as_bytes();
        let mut at = self.at + 1;
        // Most strings are keys: too short for a search that has to be set up.
        if let Some(end) = near_end(bytes, at) {
            self.at = end + 1;
            return Ok(false);
        }
        let mut escaped = false;
        loop {
            let rest = &bytes[at..];
            let found = memchr::memchr2(b'"', b'\\', rest);
            let run = &rest[..found.unwrap_or(rest.len())];
            if holds_control(run) {
                let bad = run.iter().position(|byte| *byte < b' ').unwrap_or_default();
                return Err(JsonFaultKind::ControlCharacter.at(at + bad));
            }
            let Some(found) = found else {
                return Err(JsonFaultKind::UnexpectedEnd.at(bytes.len()));
            };
            at += found;
            if bytes[at] == b'"' {
                self.at = at + 1;
                return Ok(escaped);
            }
            escaped = true;
            at += escape_length(&bytes[at..]).map_err(|kind| match kind {
                JsonFaultKind::UnexpectedEnd => kind.at(bytes.len()),
                _ => kind.at(at),
            })?;
        }
    }

    /// Passes the items of a list that are plain integers, up to the last one of the run: a prompt may be
    /// a hundred thousand token ids.
    fn plain_integers(&mut self, on: &mut impl FnMut(Event)) {
        let bytes = self.text.as_bytes();
        loop {
            let start = self.at;
            let end = past_digits(bytes, start);
            let padded = end > start + 1 && bytes[start] == b'0';
            let next = end + 1 + usize::from(bytes.get(end + 1) == Some(&b' '));
            let follows = bytes.get(end) == Some(&b',') && bytes.get(next).is_some_and(u8::is_ascii_digit);
            if end == start || padded || !follows {
                return;
            }
            on(Event::Scalar { kind: Kind::Number, span: start..end });
            self.at = next;
        }
    }

    fn number(&mut self) -> Result<(), JsonFault> {
        let bytes = self.text.as_bytes();
        let fault = |at: usize| {
            let kind = if at < bytes.len() { JsonFaultKind::Number } else { JsonFaultKind::UnexpectedEnd };
            kind.at(at)
        };
        let mut at = self.at + usize::from(bytes[self.at] == b'-');
        match bytes.get(at) {
            Some(b'0') => at += 1,
            Some(b'1'..=b'9') => at = past_digits(bytes, at),
            _ => return Err(fault(at)),
        }
        if bytes.get(at) == Some(&b'.') {
            let fraction = at + 1;
            at = past_digits(bytes, fraction);
            if at == fraction {
                return Err(fault(at));
            }
        }
        if let Some(b'e' | b'E') = bytes.get(at) {
            let signed = matches!(bytes.get(at + 1), Some(b'+' | b'-'));
            let exponent = at + 1 + usize::from(signed);
            at = past_digits(bytes, exponent);
            if at == exponent {
                return Err(fault(at));
            }
        }
        self.at = at;
        Ok(())
    }

    fn literal(&mut self, word: &[u8], kind: Kind) -> Result<Kind, JsonFault> {
        let rest = &self.text.as_bytes()[self.at..];
        if rest.starts_with(word) {
            self.at += word.len();
            return Ok(kind);
        }
        let same = rest.iter().zip(word).take_while(|(have, want)| have == want).count();
        let fault =
            if same == rest.len() { JsonFaultKind::UnexpectedEnd } else { JsonFaultKind::UnexpectedByte };
        Err(fault.at(self.at + same))
    }
}

/// Which of the open containers are objects, one bit each.
struct Nesting {
    objects: [u64; MAX_DEPTH / WORD_BITS],
    depth: usize,
    limit: usize,
}

impl Nesting {
    fn within(outer: usize) -> Self {
        Self { objects: [0; MAX_DEPTH / WORD_BITS], depth: 0, limit: MAX_DEPTH.saturating_sub(outer) }
    }

    fn push(&mut self, object: bool) -> bool {
        if self.depth == self.limit {
            return false;
        }
        let (word, bit) = (self.depth / WORD_BITS, self.depth % WORD_BITS);
        self.objects[word] = self.objects[word] & !(1 << bit) | u64::from(object) << bit;
        self.depth += 1;
        true
    }

    fn in_object(&self) -> bool {
        let top = self.depth - 1;
        self.objects[top / WORD_BITS] >> (top % WORD_BITS) & 1 == 1
    }

    /// True when nothing is open any more.
    fn pop(&mut self) -> bool {
        self.depth -= 1;
        self.depth == 0
    }
}

/// The closing quote of a string that holds nothing special before it, if that is near.
fn near_end(bytes: &[u8], start: usize) -> Option<usize> {
    const EACH: u64 = u64::MAX / 0xFF;
    const HIGH: u64 = EACH << 7;
    for at in (start..).step_by(size_of::<u64>()).take(NEAR) {
        let word = u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
        // Of each of these the lowest byte that is marked is right, which is the only one that counts.
        let lacks = |byte: u8| {
            (word ^ (EACH * u64::from(byte))).wrapping_sub(EACH) & !(word ^ (EACH * u64::from(byte)))
        };
        let controls = word.wrapping_sub(EACH * u64::from(b' ')) & !word;
        let special = (lacks(b'"') | lacks(b'\\') | controls) & HIGH;
        if special != 0 {
            let found = at + special.trailing_zeros() as usize / 8;
            return (bytes[found] == b'"').then_some(found);
        }
    }
    None
}

/// A minimum instead of a search: it has no early exit, so it compiles to vector code.
fn holds_control(run: &[u8]) -> bool {
    run.iter().fold(u8::MAX, |lowest, byte| lowest.min(*byte)) < b' '
}

fn past_digits(bytes: &[u8], mut at: usize) -> usize {
    while let Some(b'0'..=b'9') = bytes.get(at) {
        at += 1;
    }
    at
}

/// Length of the escape that `bytes` begins with; surrogates need no partner, as in Python.
fn escape_length(bytes: &[u8]) -> Result<usize, JsonFaultKind> {
    match bytes.get(1) {
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(2),
        Some(b'u') => {
            let digits = &bytes[2..bytes.len().min(6)];
            if !digits.iter().all(u8::is_ascii_hexdigit) {
                return Err(JsonFaultKind::Escape);
            }
            if digits.len() == 4 { Ok(6) } else { Err(JsonFaultKind::UnexpectedEnd) }
        }
        Some(_) => Err(JsonFaultKind::Escape),
        None => Err(JsonFaultKind::UnexpectedEnd),
    }
}
