//! The announcement with which a decode engine asks a prefill engine to write (push mode).
//!
//! A prefix and a msgpack map in fixed order. Which prefill it means is found by request id.

use std::borrow::Cow;

use super::msgpack::{DecodeError, Reader, Value, Writer};

/// What an announcement begins with.
pub const PUSH_REGISTRATION_PREFIX: &[u8] = b"PUSH_REG:";

/// Where a decode engine wants the blocks of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PushRegistration {
    /// The request at the decode engine.
    pub request_id: String,
    /// The decode engine.
    pub decode_engine_id: String,
    /// Its side channel host.
    pub decode_host: String,
    /// Its side channel port, unchecked.
    pub decode_port: i64,
    /// Its tensor-parallel size.
    pub decode_tp_size: u32,
    /// Logical block ids to write, per cache group.
    pub local_block_ids: Vec<Vec<u64>>,
    /// The prefill engine.
    pub remote_engine_id: String,
    /// Its side channel host.
    pub remote_host: String,
    /// Its side channel port, unchecked.
    pub remote_port: i64,
    /// Its tensor-parallel size.
    pub remote_tp_size: u32,
    /// Its pipeline stages.
    pub remote_pp_size: u32,
}

impl PushRegistration {
    /// The bytes of the notification, prefix included.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer { bytes: PUSH_REGISTRATION_PREFIX.to_vec() };
        w.map(11);
        w.str("request_id");
        w.str(&self.request_id);
        w.str("decode_engine_id");
        w.str(&self.decode_engine_id);
        w.str("decode_host");
        w.str(&self.decode_host);
        w.str("decode_port");
        w.int(self.decode_port);
        w.str("decode_tp_size");
        w.uint(u64::from(self.decode_tp_size));
        w.str("local_block_ids");
        w.list(&self.local_block_ids, |w, group| w.list(group, |w, id| w.uint(*id)));
        w.str("remote_engine_id");
        w.str(&self.remote_engine_id);
        w.str("remote_host");
        w.str(&self.remote_host);
        w.str("remote_port");
        w.int(self.remote_port);
        w.str("remote_tp_size");
        w.uint(u64::from(self.remote_tp_size));
        w.str("remote_pp_size");
        w.uint(u64::from(self.remote_pp_size));
        w.bytes
    }

    /// Reads a notification; none when it is no announcement.
    ///
    /// # Errors
    /// Inside the result: bytes after the prefix that name no receive.
    pub fn decode(notification: &[u8]) -> Option<Result<Self, DecodeError>> {
        notification.strip_prefix(PUSH_REGISTRATION_PREFIX).map(Self::decode_map)
    }

    fn decode_map(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let mut registration = Self { remote_pp_size: 1, ..Self::default() };
        const REQUIRED: [&str; 6] = [
            "request_id",
            "decode_engine_id",
            "decode_host",
            "decode_port",
            "decode_tp_size",
            "local_block_ids",
        ];
        let mut seen = [false; REQUIRED.len()];
        for _ in 0..r.map_header("registration")? {
            let key = r.str("registration key")?;
            if let Some(index) = REQUIRED.iter().position(|required| *required == key) {
                seen[index] = true;
            }
            registration.decode_field(&mut r, key)?;
        }
        r.finish()?;
        match seen.iter().position(|seen| !seen) {
            Some(index) => Err(DecodeError::MissingField { field: REQUIRED[index] }),
            None => Ok(registration),
        }
    }

    fn decode_field(&mut self, r: &mut Reader<'_>, key: &str) -> Result<(), DecodeError> {
        let text = |r: &mut Reader<'_>, field| Ok::<_, DecodeError>(r.str(field)?.to_owned());
        match key {
            "request_id" => self.request_id = text(r, "request_id")?,
            "decode_engine_id" => self.decode_engine_id = text(r, "decode_engine_id")?,
            "decode_host" => self.decode_host = text(r, "decode_host")?,
            "decode_port" => self.decode_port = r.int("decode_port")?,
            "decode_tp_size" => self.decode_tp_size = r.int("decode_tp_size")?,
            "local_block_ids" => self.local_block_ids = decode_groups(r)?,
            "remote_engine_id" => self.remote_engine_id = text(r, "remote_engine_id")?,
            "remote_host" => self.remote_host = text(r, "remote_host")?,
            "remote_port" => self.remote_port = r.int("remote_port")?,
            "remote_tp_size" => self.remote_tp_size = r.int("remote_tp_size")?,
            "remote_pp_size" => self.remote_pp_size = r.int("remote_pp_size")?,
            _ => r.skip()?,
        }
        Ok(())
    }
}

/// One list per group; a single group may come as a flat list.
fn decode_groups(r: &mut Reader<'_>) -> Result<Vec<Vec<u64>>, DecodeError> {
    let field = "local_block_ids";
    let mut groups = Vec::new();
    let mut flat = Vec::new();
    for _ in 0..r.array_header(field)? {
        match r.value()? {
            Value::Int(id) => {
                flat.push(u64::try_from(id).map_err(|_| DecodeError::OutOfRange { field })?);
            }
            Value::Array(items) => {
                let mut group = Vec::new();
                for _ in 0..items {
                    group.push(r.int(field)?);
                }
                groups.push(group);
            }
            _ => return Err(DecodeError::WrongType { field, expected: "array", got: "other" }),
        }
    }
    match (groups.is_empty(), flat.is_empty()) {
        (_, true) => Ok(groups),
        (true, false) => Ok(vec![flat]),
        (false, false) => Err(DecodeError::WrongType { field, expected: "array", got: "int" }),
    }
}

/// The request id without the `-` and eight hex digits that an engine appends to it.
///
/// One newline at the end does not hide the digits and stays, as with the `$` of vLLM's pattern.
pub fn base_request_id(request: &str) -> Cow<'_, str> {
    let line = request.strip_suffix('\n').unwrap_or(request);
    match line.rsplit_once('-') {
        Some((base, suffix)) if suffix.len() == 8 && suffix.bytes().all(|b| b.is_ascii_hexdigit()) => {
            if line.len() == request.len() { base.into() } else { format!("{base}\n").into() }
        }
        _ => request.into(),
    }
}

#[cfg(test)]
mod tests;
