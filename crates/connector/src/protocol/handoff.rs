//! The hand-off: transfer parameters that are safe to give to a decode engine.
//!
//! For routers. Some defective objects stop a vLLM decode engine for good, so every defect has
//! its own name and none is corrected silently. Unknown fields are legal and ignored here.

mod defect;
mod raw;

pub use defect::HandOffDefect;

use super::params::{BlockIds, Generation, TransferMode};
use crate::json::{Fields, JsonFault};
use raw::{Loose, RawHandOff};

/// A validated hand-off of either generation.
#[derive(Debug, Clone, PartialEq)]
pub struct HandOff {
    /// The generation whose shape the block ids have.
    pub generation: Generation,
    /// Logical block ids at the prefill engine; at least one group is not empty.
    pub remote_block_ids: BlockIds,
    /// The prefill engine.
    pub remote_engine_id: String,
    /// Its internal request id.
    pub remote_request_id: String,
    /// Its side channel host, as it reported it.
    pub remote_host: String,
    /// Its side channel port.
    pub remote_port: u16,
    /// Its transfer tensor-parallel size.
    pub tp_size: u32,
    /// Its decode-context-parallel size; 1 when absent.
    pub dcp_size: u32,
    /// Its pipeline stages; 1 when absent.
    pub pp_size: u32,
    /// Tokens it computed, when it says so (v14).
    pub remote_num_tokens: Option<u64>,
    /// Deadline on its scheduler's clock in seconds, when it says so (v14).
    pub remote_blocks_expiry_time: Option<f64>,
    /// Pull or push, when it says so (v14).
    pub transfer_mode: Option<TransferMode>,
    /// Its own prefix-cache hits in tokens, when it says so.
    pub remote_prefill_cached_tokens: Option<u64>,
    /// Reserved by vLLM; checked because engines read it.
    pub remote_block_size: Option<u32>,
    /// Push matching key, when a router has set one.
    pub transfer_id: Option<String>,
    /// True when keys beginning with `_` are there, which only engines may set.
    pub has_internal_keys: bool,
}

impl HandOff {
    /// Reads and checks the raw JSON of `kv_transfer_params`.
    ///
    /// # Errors
    /// The first defect in the order flags, remote fields, sizes, optional fields.
    pub fn parse(json: &[u8]) -> Result<Self, HandOffDefect> {
        Self::check(RawHandOff::read(json)?)
    }

    /// As [`HandOff::parse`] for the object that is the next value of `fields`, which then stand behind it.
    ///
    /// # Errors
    /// The first thing in the object that is not JSON.
    pub fn parse_next(fields: &mut Fields<'_>) -> Result<Result<Self, HandOffDefect>, JsonFault> {
        let (raw, end) = RawHandOff::read_fields(fields.inner()?)?;
        fields.resume(end);
        Ok(raw.and_then(Self::check))
    }

    fn check(raw: RawHandOff<'_>) -> Result<Self, HandOffDefect> {
        if !flag("do_remote_prefill", raw.do_remote_prefill)?.unwrap_or(false) {
            return Err(HandOffDefect::NotRemotePrefill);
        }
        if flag("do_remote_decode", raw.do_remote_decode)?.unwrap_or(false) {
            return Err(HandOffDefect::RemoteDecode);
        }
        let remote_engine_id = text("remote_engine_id", raw.remote_engine_id)?;
        let remote_request_id = text("remote_request_id", raw.remote_request_id)?;
        let remote_host = text("remote_host", raw.remote_host)?;
        let remote_port = port(raw.remote_port)?;
        let remote_block_ids = blocks(raw.remote_block_ids)?;
        let tp_size = size("tp_size", present("tp_size", raw.tp_size)?)?;
        let dcp_size = optional_size("dcp_size", raw.dcp_size)?;
        let pp_size = optional_size("pp_size", raw.pp_size)?;
        Ok(Self {
            generation: if remote_block_ids.is_flat() { Generation::V2 } else { Generation::V14 },
            remote_block_ids,
            remote_engine_id,
            remote_request_id,
            remote_host,
            remote_port,
            tp_size,
            dcp_size,
            pp_size,
            remote_num_tokens: count("remote_num_tokens", raw.remote_num_tokens)?,
            remote_blocks_expiry_time: seconds("remote_blocks_expiry_time", raw.remote_blocks_expiry_time)?,
            transfer_mode: transfer_mode(raw.transfer_mode)?,
            remote_prefill_cached_tokens: count(
                "remote_prefill_cached_tokens",
                raw.remote_prefill_cached_tokens,
            )?,
            remote_block_size: optional(raw.remote_block_size)
                .map(|value| size("remote_block_size", value))
                .transpose()?,
            transfer_id: transfer_id(raw.transfer_id)?,
            has_internal_keys: raw.has_internal_keys,
        })
    }
}

fn present<'a>(field: &'static str, value: Option<Loose<'a>>) -> Result<Loose<'a>, HandOffDefect> {
    match value {
        None => Err(HandOffDefect::Missing { field }),
        Some(Loose::Null) => Err(HandOffDefect::NullField { field }),
        Some(value) => Ok(value),
    }
}

/// Absent and null are one for optional fields.
fn optional(value: Option<Loose<'_>>) -> Option<Loose<'_>> {
    value.filter(|value| !matches!(value, Loose::Null))
}

fn flag(field: &'static str, value: Option<Loose<'_>>) -> Result<Option<bool>, HandOffDefect> {
    match optional(value) {
        None => Ok(None),
        Some(Loose::Bool(value)) => Ok(Some(value)),
        Some(_) => Err(HandOffDefect::WrongType { field, expected: "a boolean" }),
    }
}

fn text(field: &'static str, value: Option<Loose<'_>>) -> Result<String, HandOffDefect> {
    match present(field, value)? {
        Loose::Text(text) if text.is_empty() => Err(HandOffDefect::Empty { field }),
        Loose::Text(text) => Ok(text.into_owned()),
        _ => Err(HandOffDefect::WrongType { field, expected: "a string" }),
    }
}

fn integer<I: TryFrom<i128>>(field: &'static str, value: Loose<'_>) -> Result<I, HandOffDefect> {
    match value {
        Loose::Int(value) => I::try_from(value).map_err(|_| HandOffDefect::OutOfRange { field }),
        // An integer beyond 64 bits arrives as a float, and no field here can be that large.
        Loose::Float(value) if value.fract() == 0.0 && value.abs() >= 1e18 => {
            Err(HandOffDefect::OutOfRange { field })
        }
        _ => Err(HandOffDefect::WrongType { field, expected: "an integer" }),
    }
}

fn port(value: Option<Loose<'_>>) -> Result<u16, HandOffDefect> {
    let field = "remote_port";
    match integer(field, present(field, value)?)? {
        0 => Err(HandOffDefect::OutOfRange { field }),
        port => Ok(port),
    }
}

fn size(field: &'static str, value: Loose<'_>) -> Result<u32, HandOffDefect> {
    match integer(field, value)? {
        0 => Err(HandOffDefect::OutOfRange { field }),
        size => Ok(size),
    }
}

/// D has a default for these only when the key is absent: a null would reach its arithmetic.
fn optional_size(field: &'static str, value: Option<Loose<'_>>) -> Result<u32, HandOffDefect> {
    match value {
        None => Ok(1),
        Some(Loose::Null) => Err(HandOffDefect::NullField { field }),
        Some(value) => size(field, value),
    }
}

fn blocks(value: Option<Loose<'_>>) -> Result<BlockIds, HandOffDefect> {
    let field = "remote_block_ids";
    let ids = match present(field, value)? {
        Loose::Blocks(ids) => ids,
        Loose::List(list) => raw::block_ids(list)?,
        _ => return Err(HandOffDefect::WrongType { field, expected: "a list" }),
    };
    if ids.total() == 0 {
        return Err(HandOffDefect::AllGroupsEmpty);
    }
    Ok(ids)
}

fn count(field: &'static str, value: Option<Loose<'_>>) -> Result<Option<u64>, HandOffDefect> {
    optional(value).map(|value| integer(field, value)).transpose()
}

fn seconds(field: &'static str, value: Option<Loose<'_>>) -> Result<Option<f64>, HandOffDefect> {
    match optional(value) {
        None => Ok(None),
        Some(Loose::Float(value)) => Ok(Some(value)),
        Some(Loose::Int(value)) => Ok(Some(value as f64)),
        Some(_) => Err(HandOffDefect::WrongType { field, expected: "a number" }),
    }
}

fn transfer_id(value: Option<Loose<'_>>) -> Result<Option<String>, HandOffDefect> {
    match optional(value) {
        None => Ok(None),
        Some(Loose::Text(id)) => Ok(Some(id.into_owned())),
        Some(_) => Err(HandOffDefect::WrongType { field: "transfer_id", expected: "a string" }),
    }
}

fn transfer_mode(value: Option<Loose<'_>>) -> Result<Option<TransferMode>, HandOffDefect> {
    match optional(value) {
        None => Ok(None),
        Some(Loose::Text(mode)) => match mode.as_ref() {
            "pull" => Ok(Some(TransferMode::Pull)),
            "push" => Ok(Some(TransferMode::Push)),
            _ => Err(HandOffDefect::UnknownTransferMode),
        },
        Some(_) => Err(HandOffDefect::WrongType { field: "transfer_mode", expected: "a string" }),
    }
}

#[cfg(test)]
mod tests;
