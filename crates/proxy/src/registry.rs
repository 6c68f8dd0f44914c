//! Handshake payloads of engines, kept byte for byte, so that a decode engine can fetch its
//! peer's from here instead of a raw socket. Checks what it takes; interprets nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::protocol::msgpack::DecodeError;
use kv_connector::protocol::params::Generation;
use parking_lot::RwLock;
use serde::Serialize;

/// Most ranks of one engine; far above any real pipeline times tensor size.
const MAX_RANKS: usize = 4096;

/// Why a payload was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// The outer message or the metadata inside it cannot be decoded.
    #[error("malformed {part}: {reason}")]
    Malformed {
        /// Which of the two layers.
        part: PayloadPart,
        /// What is wrong with it.
        reason: DecodeError,
    },
    /// The payload is another engine's.
    #[error("the payload belongs to engine {found:?}")]
    EngineMismatch {
        /// The engine id inside the metadata.
        found: String,
    },
    /// The payload exceeds the configured size.
    #[error("the payload is larger than {limit} bytes")]
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// The registry holds as many engines or ranks as it may.
    #[error("the registry is full")]
    Full,
}

/// The two layers of a handshake payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadPart {
    /// `NixlHandshakePayload`
    Payload,
    /// `NixlAgentMetadata`
    Metadata,
}

impl std::fmt::Display for PayloadPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Payload => "NixlHandshakePayload",
            Self::Metadata => "NixlAgentMetadata",
        })
    }
}

/// What a registration changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registered {
    /// The rank was not known.
    Created,
    /// The rank had another payload.
    Replaced,
    /// The rank had the same payload.
    Unchanged,
}

type Rank = (u32, u32);

/// The payloads of all engines that registered.
#[derive(Debug)]
pub struct Registry {
    engines: RwLock<BTreeMap<String, BTreeMap<Rank, Arc<RankView>>>>,
    payload_bytes: usize,
    max_engines: usize,
}

impl Registry {
    pub(crate) fn new(payload_bytes: usize, max_engines: usize) -> Self {
        Self { engines: RwLock::default(), payload_bytes, max_engines }
    }

    /// Takes one rank's payload.
    ///
    /// # Errors
    /// It cannot be decoded, is another engine's, is too large, or the registry is full.
    pub fn put(
        &self,
        engine_id: &str,
        pp_rank: u32,
        tp_rank: u32,
        payload: Bytes,
    ) -> Result<Registered, RegistryError> {
        if payload.len() > self.payload_bytes {
            return Err(RegistryError::TooLarge { limit: self.payload_bytes });
        }
        let known = self.get(engine_id, pp_rank, tp_rank);
        if known.is_some_and(|known| known.payload == payload) {
            return Ok(Registered::Unchanged);
        }
        let malformed = |part| move |reason| RegistryError::Malformed { part, reason };
        let outer = NixlHandshakePayload::decode(&payload).map_err(malformed(PayloadPart::Payload))?;
        let metadata = NixlAgentMetadata::decode_any(&outer.agent_metadata_bytes)
            .map_err(malformed(PayloadPart::Metadata))?;
        if metadata.engine_id() != engine_id {
            return Err(RegistryError::EngineMismatch { found: metadata.engine_id().to_owned() });
        }
        let registered_at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let view = Arc::new(RankView {
            pp_rank,
            tp_rank,
            generation: metadata.generation(),
            compatibility_hash: outer.compatibility_hash,
            payload_bytes: payload.len(),
            metadata,
            registered_at,
            payload,
        });
        let mut engines = self.engines.write();
        if !engines.contains_key(engine_id) && engines.len() >= self.max_engines {
            return Err(RegistryError::Full);
        }
        let ranks = engines.entry(engine_id.to_owned()).or_default();
        if !ranks.contains_key(&(pp_rank, tp_rank)) && ranks.len() >= MAX_RANKS {
            return Err(RegistryError::Full);
        }
        Ok(match ranks.insert((pp_rank, tp_rank), view) {
            None => Registered::Created,
            Some(_) => Registered::Replaced,
        })
    }

    /// One rank's payload, exactly as it was put.
    #[must_use]
    pub fn get(&self, engine_id: &str, pp_rank: u32, tp_rank: u32) -> Option<Arc<RankView>> {
        self.engines.read().get(engine_id)?.get(&(pp_rank, tp_rank)).cloned()
    }

    /// Tokens per block of an engine's block ids. Known for the newest generation only: an older
    /// one tells the size of its kernel's blocks, of which a named block may hold several.
    pub(crate) fn tokens_per_block(&self, engine_id: &str) -> Option<u64> {
        let engines = self.engines.read();
        let (_, rank) = engines.get(engine_id)?.first_key_value()?;
        let NixlAgentMetadata::V14(metadata) = &rank.metadata else { return None };
        let tokens = metadata.block_size.checked_mul(metadata.physical_blocks_per_logical_kv_block)?;
        u64::try_from(tokens).ok().filter(|tokens| *tokens > 0)
    }

    /// All engines with their ranks.
    #[must_use]
    pub fn list(&self) -> Vec<EngineView> {
        self.engines
            .read()
            .iter()
            .map(|(engine_id, ranks)| EngineView {
                engine_id: engine_id.clone(),
                ranks: ranks.values().cloned().collect(),
            })
            .collect()
    }

    /// Forgets an engine; whether it was known.
    pub fn remove(&self, engine_id: &str) -> bool {
        self.engines.write().remove(engine_id).is_some()
    }
}

/// One registered rank; serialises to the view for people.
#[derive(Clone, Debug, Serialize)]
pub struct RankView {
    /// Pipeline rank.
    pub pp_rank: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// Connector generation, by the metadata's fields.
    pub generation: Generation,
    /// Hex digest that two engines must share.
    pub compatibility_hash: String,
    /// Size of the payload.
    pub payload_bytes: usize,
    /// What the rank says of its memory; the transfer agent's opaque part in hex.
    pub metadata: NixlAgentMetadata,
    /// Unix time of the registration, in seconds.
    pub registered_at: u64,
    /// The bytes.
    #[serde(skip)]
    pub payload: Bytes,
}

/// A registered engine.
#[derive(Clone, Debug, Serialize)]
pub struct EngineView {
    /// Its id.
    pub engine_id: String,
    /// Its ranks in order.
    pub ranks: Vec<Arc<RankView>>,
}
