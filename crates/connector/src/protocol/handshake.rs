//! The handshake: the request for a rank's metadata, the reply's payload and its clock.
//!
//! Decoding happens in two phases so that the compatibility hash is compared before the inner
//! metadata, whose form depends on the peer's version, is looked at.

use thiserror::Error;

use super::msgpack::{DecodeError, Reader, Writer};
use super::params::Generation;

/// The tag of a request for metadata.
pub const GET_METADATA: &[u8] = b"get_meta_msg";

/// A request for the metadata of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandshakeRequest {
    /// Pipeline stage; always 0 in v2.
    pub pp_rank: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
}

/// A request that a server must drop without an answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RequestError {
    /// Not msgpack, or a rank that is no integer.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The request of another generation or of no known kind.
    #[error("expected {expected} items, got {got}")]
    ItemCount {
        /// Items in this generation's request.
        expected: usize,
        /// Items found.
        got: usize,
    },
    /// The tag is not that of a metadata request.
    #[error("the message is not a request for metadata")]
    UnknownMessage,
}

impl HandshakeRequest {
    /// The bytes of one frame.
    pub fn encode(&self, generation: Generation) -> Vec<u8> {
        let mut writer = Writer::default();
        match generation {
            Generation::V2 => writer.array(2),
            Generation::V14 => writer.array(3),
        }
        writer.bin(GET_METADATA);
        if generation == Generation::V14 {
            writer.uint(u64::from(self.pp_rank));
        }
        writer.uint(u64::from(self.tp_rank));
        writer.bytes
    }

    /// Reads the request of a peer that speaks `generation`.
    ///
    /// # Errors
    /// Whatever a server of that generation could not answer sensibly.
    pub fn decode(generation: Generation, bytes: &[u8]) -> Result<Self, RequestError> {
        let mut reader = Reader::new(bytes);
        let got = reader.array_header("request")?;
        let expected = match generation {
            Generation::V2 => 2,
            Generation::V14 => 3,
        };
        if got != expected {
            return Err(RequestError::ItemCount { expected, got });
        }
        Self::read_items(generation, reader)
    }

    /// Reads a request of either generation, which its number of items tells.
    ///
    /// # Errors
    /// Whatever a server of neither generation could answer sensibly.
    pub fn decode_any(bytes: &[u8]) -> Result<(Generation, Self), RequestError> {
        let mut reader = Reader::new(bytes);
        let generation = match reader.array_header("request")? {
            2 => Generation::V2,
            3 => Generation::V14,
            got => return Err(RequestError::ItemCount { expected: 3, got }),
        };
        Ok((generation, Self::read_items(generation, reader)?))
    }

    fn read_items(generation: Generation, mut reader: Reader<'_>) -> Result<Self, RequestError> {
        if reader.bin("tag")? != GET_METADATA {
            return Err(RequestError::UnknownMessage);
        }
        let pp_rank = if generation == Generation::V14 { reader.int("pp_rank")? } else { 0 };
        let tp_rank = reader.int("tp_rank")?;
        reader.finish()?;
        Ok(Self { pp_rank, tp_rank })
    }
}

/// The reply to a handshake: the hash and, still encoded, the agent metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NixlHandshakePayload {
    /// Compatibility hash of the sender.
    pub compatibility_hash: String,
    /// An encoded [`super::metadata::NixlAgentMetadata`]; look inside only when the hashes agree.
    pub agent_metadata_bytes: Vec<u8>,
}

impl NixlHandshakePayload {
    /// The bytes vLLM would send.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.map(2);
        writer.str("compatibility_hash");
        writer.str(&self.compatibility_hash);
        writer.str("agent_metadata_bytes");
        writer.bin(&self.agent_metadata_bytes);
        writer.bytes
    }

    /// Decodes the outer layer only.
    ///
    /// # Errors
    /// Bytes that vLLM would refuse too.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes);
        let (mut hash, mut metadata) = (None, None);
        for _ in 0..reader.map_header("payload")? {
            match reader.str("payload key")? {
                "compatibility_hash" => hash = Some(reader.str("compatibility_hash")?),
                "agent_metadata_bytes" => metadata = Some(reader.bin("agent_metadata_bytes")?),
                _ => reader.skip()?,
            }
        }
        let compatibility_hash = hash.ok_or(DecodeError::MissingField { field: "compatibility_hash" })?;
        let agent_metadata_bytes =
            metadata.ok_or(DecodeError::MissingField { field: "agent_metadata_bytes" })?;
        reader.finish()?;
        Ok(Self {
            compatibility_hash: compatibility_hash.to_owned(),
            agent_metadata_bytes: agent_metadata_bytes.to_vec(),
        })
    }
}

/// The clock frame of a v14 reply: the server's monotonic clock in seconds.
pub fn encode_clock(seconds: f64) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.float(seconds);
    writer.bytes
}

/// Reads the clock frame of a v14 reply.
///
/// # Errors
/// Anything but one number.
pub fn decode_clock(bytes: &[u8]) -> Result<f64, DecodeError> {
    let mut reader = Reader::new(bytes);
    let seconds = reader.float("clock")?;
    reader.finish()?;
    Ok(seconds)
}

#[cfg(test)]
mod tests;
