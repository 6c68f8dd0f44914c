//! The inside of JSON strings: resolving escapes, and making them.

use std::borrow::Cow;

/// Whether a raw key, its escapes resolved, is `name`.
pub fn key_is(raw: &str, escaped: bool, name: &str) -> bool {
    if escaped { Unescape { rest: raw }.eq(name.chars()) } else { raw == name }
}

/// Resolves the escapes of a string's inside; a lone surrogate becomes U+FFFD.
pub fn unescape(raw: &str) -> Cow<'_, str> {
    if memchr::memchr(b'\\', raw.as_bytes()).is_none() {
        return Cow::Borrowed(raw);
    }
    Cow::Owned(Unescape { rest: raw }.collect())
}

/// The characters of a scanned string's inside.
#[derive(Clone, Debug)]
pub struct Unescape<'a> {
    rest: &'a str,
}

impl<'a> Unescape<'a> {
    /// Of what stands between the quotes of a checked string.
    #[must_use]
    pub fn new(raw: &'a str) -> Self {
        Self { rest: raw }
    }

    fn unit(&mut self) -> Option<u32> {
        let digits = self.rest.strip_prefix("\\u")?.get(..4)?;
        let unit = u32::from_str_radix(digits, 16).ok()?;
        self.rest = &self.rest[6..];
        Some(unit)
    }
}

impl Iterator for Unescape<'_> {
    type Item = char;

    fn next(&mut self) -> Option<char> {
        if let Some(unit) = self.unit() {
            if !(0xD800..0xDC00).contains(&unit) {
                return Some(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            let after_high = self.rest;
            let low = self.unit().filter(|low| (0xDC00..0xE000).contains(low));
            let Some(low) = low else {
                self.rest = after_high;
                return Some(char::REPLACEMENT_CHARACTER);
            };
            return char::from_u32(0x1_0000 + ((unit - 0xD800) << 10) + (low - 0xDC00));
        }
        let mut characters = self.rest.chars();
        let mut character = characters.next()?;
        if character == '\\' {
            character = match characters.next()? {
                'b' => '\u{8}',
                'f' => '\u{c}',
                'n' => '\n',
                'r' => '\r',
                't' => '\t',
                same => same,
            };
        }
        self.rest = characters.as_str();
        Some(character)
    }
}

/// Appends `text` as a JSON string, quotes included.
pub fn push_string(out: &mut Vec<u8>, text: &str) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    out.push(b'"');
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
            0..b' ' => {
                let (high, low) = (HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]);
                out.extend_from_slice(&[b'\\', b'u', b'0', b'0', high, low]);
            }
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}
