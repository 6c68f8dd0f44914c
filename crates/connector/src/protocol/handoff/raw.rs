//! First pass over a hand-off: known fields as loosely typed values, everything else skipped.
//!
//! No value is refused here, so the second pass can name each defect.

mod blocks;

use std::borrow::Cow;

use serde::de::IgnoredAny;

use super::HandOffDefect;
use crate::json::{Fields, JsonFault, JsonFaultKind, Kind, Member, unescape};
use crate::protocol::params::BlockIds;

pub(super) use blocks::block_ids;

/// Any JSON value of a known field.
#[derive(Debug)]
pub(super) enum Loose<'a> {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Cow<'a, str>),
    /// A list, unread.
    List(&'a str),
    /// A list of block ids as engines write them.
    Blocks(BlockIds),
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

impl<'a> RawHandOff<'a> {
    /// Reads one JSON value.
    pub(super) fn read(json: &'a [u8]) -> Result<Self, HandOffDefect> {
        let text = std::str::from_utf8(json).map_err(|_| HandOffDefect::NotJson)?;
        let fields = Fields::open(text).map_err(|fault| match fault.kind {
            JsonFaultKind::NotAnObject => not_an_object(json),
            _ => HandOffDefect::NotJson,
        })?;
        Self::read_fields(fields).map_err(|_| HandOffDefect::NotJson)?.0
    }

    /// Reads an object's fields, and to the end of it in any case; where that is.
    pub(super) fn read_fields(
        mut fields: Fields<'a>,
    ) -> Result<(Result<Self, HandOffDefect>, usize), JsonFault> {
        let (mut raw, mut read, text) = (Self::default(), Ok(()), fields.rest());
        let began = fields.offset();
        while let Some(key) = fields.key()? {
            let name = key.name();
            raw.has_internal_keys |= name.starts_with('_');
            let Some(slot) = raw.slot(&name) else {
                fields.pass(key)?;
                continue;
            };
            if name == "remote_block_ids"
                && let Some((ids, rest)) = blocks::plain(fields.rest().as_bytes())
            {
                *slot = Some(Loose::Blocks(ids));
                fields.resume(fields.offset() + fields.rest().len() - rest.len());
                continue;
            }
            match Loose::read(&fields.pass(key)?) {
                Ok(value) => *slot = Some(value),
                Err(defect) => read = read.and(Err(defect)),
            }
        }
        let end = fields.offset();
        // Half of a surrogate pair is not for the scanner to judge, and engines need no escapes.
        let object = &text[..end - began];
        if memchr::memchr(b'\\', object.as_bytes()).is_some()
            && serde_json::from_str::<serde_json::Value>(&format!("{{{object}")).is_err()
        {
            read = Err(HandOffDefect::NotJson);
        }
        Ok((read.map(|()| raw), end))
    }

    fn slot(&mut self, key: &str) -> Option<&mut Option<Loose<'a>>> {
        Some(match key {
            "do_remote_prefill" => &mut self.do_remote_prefill,
            "do_remote_decode" => &mut self.do_remote_decode,
            "remote_block_ids" => &mut self.remote_block_ids,
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

fn not_an_object(json: &[u8]) -> HandOffDefect {
    match serde_json::from_slice::<Option<IgnoredAny>>(json) {
        Ok(None) => HandOffDefect::Null,
        Ok(Some(_)) => HandOffDefect::NotAnObject,
        Err(_) => HandOffDefect::NotJson,
    }
}

impl<'a> Loose<'a> {
    fn read(member: &Member<'a>) -> Result<Self, HandOffDefect> {
        let raw = member.raw_value();
        Ok(match member.kind() {
            Kind::Null => Self::Null,
            Kind::True => Self::Bool(true),
            Kind::False => Self::Bool(false),
            Kind::Number => number(raw)?,
            Kind::String => Self::Text(unescape(&raw[1..raw.len() - 1])),
            Kind::Array => Self::List(raw),
            Kind::Object => Self::Object,
        })
    }
}

fn number<'a>(raw: &str) -> Result<Loose<'a>, HandOffDefect> {
    if let Ok(value) = raw.parse::<i64>() {
        return Ok(Loose::Int(i128::from(value)));
    }
    if raw.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit()) {
        // No field can hold what this cannot.
        return Ok(Loose::Int(raw.parse().unwrap_or(i128::MAX)));
    }
    match raw.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(Loose::Float(value)),
        _ => Err(HandOffDefect::NotJson),
    }
}
