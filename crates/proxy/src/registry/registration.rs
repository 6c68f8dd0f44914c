//! What engines send: registrations, heartbeats and payloads, checked before anything is touched.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use kv_connector::fit::EngineTraits;
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::topology::MAX_TRANSFER_SIZE;
use sha2::{Digest, Sha256};

use super::address::canonical_base_url;
use super::clock::Echo;
use super::error::{FieldProblem, PayloadPart, RegistryError};
use super::limits::RegistryLimits;
use super::ownership::Writer;
use super::record::{EngineRole, EngineState, Rank, RankView};

/// One engine as it registers itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Registration {
    /// Its id.
    pub engine_id: String,
    /// Where its HTTP API is.
    pub base_url: Option<String>,
    /// What it is for.
    pub role: Option<EngineRole>,
    /// The model that it serves.
    pub model: Option<String>,
    /// Which of the data-parallel engines behind the base URL it is.
    pub dp_rank: u32,
    /// The version of vLLM that it runs.
    pub vllm_version: Option<String>,
    /// What its payloads do not tell.
    pub traits: EngineTraits,
    /// Where it is in its life.
    pub state: EngineState,
    /// After how long a silence it leaves, in seconds; `None` never.
    pub ttl_seconds: Option<f64>,
    /// Its monotonic clock when it sent this, in seconds.
    pub clock: Option<f64>,
    /// All its ranks; `None` keeps those that are known.
    pub ranks: Option<Vec<RankPayload>>,
    /// On whose behalf this is written.
    pub writer: Writer,
}

/// One rank's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPayload {
    /// Pipeline rank.
    pub pp_rank: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// A `NixlHandshakePayload`, as the connector makes it.
    pub payload: Bytes,
}

/// A sign of life.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Heartbeat {
    /// The state that the engine is in now; `None` as before.
    pub state: Option<EngineState>,
    /// Its monotonic clock when it sent this, in seconds.
    pub clock: Option<f64>,
    /// The last answer that it saw; of use with `clock` only.
    pub echo: Option<Echo>,
}

impl Heartbeat {
    pub(crate) fn check(&self) -> Result<(), RegistryError> {
        check_finite("clock", self.clock)?;
        check_finite("echo", self.echo.map(|echo| echo.router_clock))?;
        check_finite("echo", self.echo.map(|echo| echo.received))
    }
}

/// What a registration becomes once it is found to be good.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) base_url: Option<String>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) ranks: Option<BTreeMap<Rank, Arc<RankView>>>,
}

impl Registration {
    pub(crate) fn check(&self, limits: &RegistryLimits) -> Result<Checked, RegistryError> {
        check_name("engine_id", &self.engine_id, limits)?;
        if let Some(model) = &self.model {
            check_name("model", model, limits)?;
        }
        if let Some(version) = &self.vllm_version {
            check_name("vllm_version", version, limits)?;
        }
        check_traits(&self.traits, limits)?;
        check_finite("clock", self.clock)?;
        let base_url = self.base_url.as_deref().map(|text| check_url(text, limits)).transpose()?;
        let ttl = self.ttl_seconds.map(|seconds| check_ttl(seconds, limits)).transpose()?;
        let ranks = self.ranks.as_ref().map(|ranks| self.check_ranks(ranks, limits)).transpose()?;
        Ok(Checked { base_url, ttl, ranks })
    }

    fn check_ranks(
        &self,
        ranks: &[RankPayload],
        limits: &RegistryLimits,
    ) -> Result<BTreeMap<Rank, Arc<RankView>>, RegistryError> {
        if ranks.len() > limits.ranks {
            return Err(RegistryError::Full);
        }
        let mut checked = BTreeMap::new();
        for RankPayload { pp_rank, tp_rank, payload } in ranks {
            let view = check_payload(&self.engine_id, (*pp_rank, *tp_rank), payload.clone(), limits)?;
            if checked.insert((*pp_rank, *tp_rank), Arc::new(view)).is_some() {
                let problem = FieldProblem::RepeatedRank { pp_rank: *pp_rank, tp_rank: *tp_rank };
                return Err(RegistryError::Invalid { field: "ranks", problem });
            }
        }
        Ok(checked)
    }
}

/// Reads one rank's payload.
pub(crate) fn check_payload(
    engine_id: &str,
    (pp_rank, tp_rank): Rank,
    payload: Bytes,
    limits: &RegistryLimits,
) -> Result<RankView, RegistryError> {
    if payload.len() > limits.payload_bytes {
        return Err(RegistryError::TooLarge { limit: limits.payload_bytes });
    }
    let malformed = |part| move |reason| RegistryError::Malformed { part, reason };
    let outer = NixlHandshakePayload::decode(&payload).map_err(malformed(PayloadPart::Payload))?;
    let metadata = NixlAgentMetadata::decode_any(&outer.agent_metadata_bytes)
        .map_err(malformed(PayloadPart::Metadata))?;
    if metadata.engine_id() != engine_id {
        return Err(RegistryError::EngineMismatch { found: metadata.engine_id().to_owned() });
    }
    check_name("engine_id", engine_id, limits)?;
    if outer.compatibility_hash.len() > limits.name_bytes {
        let problem = FieldProblem::Length { limit: limits.name_bytes };
        return Err(RegistryError::Invalid { field: "compatibility_hash", problem });
    }
    Ok(RankView {
        pp_rank,
        tp_rank,
        generation: metadata.generation(),
        compatibility_hash: outer.compatibility_hash,
        payload_bytes: payload.len(),
        metadata,
        registered_at: unix_seconds(),
        sha256: hex(&Sha256::digest(&payload)),
        payload,
    })
}

pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |value: u8| char::from(DIGITS[usize::from(value & 15)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect()
}

fn check_name(field: &'static str, name: &str, limits: &RegistryLimits) -> Result<(), RegistryError> {
    if (1..=limits.name_bytes).contains(&name.len()) {
        return Ok(());
    }
    Err(RegistryError::Invalid { field, problem: FieldProblem::Length { limit: limits.name_bytes } })
}

fn check_url(text: &str, limits: &RegistryLimits) -> Result<String, RegistryError> {
    let invalid = |problem| RegistryError::Invalid { field: "base_url", problem };
    if text.len() > limits.url_bytes {
        return Err(invalid(FieldProblem::Length { limit: limits.url_bytes }));
    }
    canonical_base_url(text).ok_or(invalid(FieldProblem::Url))
}

fn check_traits(traits: &EngineTraits, limits: &RegistryLimits) -> Result<(), RegistryError> {
    for (field, size) in [
        ("tp_size", traits.tp_size),
        ("pp_size", traits.pp_size),
        ("dcp_size", traits.dcp_size),
        ("kv_heads", traits.kv_heads),
    ] {
        if size.is_some_and(|size| !(1..=MAX_TRANSFER_SIZE).contains(&size)) {
            let problem = FieldProblem::Count { most: MAX_TRANSFER_SIZE };
            return Err(RegistryError::Invalid { field, problem });
        }
    }
    if traits.side_channel_port == Some(0) {
        let problem = FieldProblem::Count { most: u32::from(u16::MAX) };
        return Err(RegistryError::Invalid { field: "side_channel_port", problem });
    }
    for (field, text) in
        [("nixl_version", &traits.nixl_version), ("side_channel_host", &traits.side_channel_host)]
    {
        if let Some(text) = text {
            check_name(field, text, limits)?;
        }
    }
    Ok(())
}

fn check_ttl(seconds: f64, limits: &RegistryLimits) -> Result<Duration, RegistryError> {
    let (least, most) = (limits.least_ttl, limits.most_ttl);
    let ttl = Duration::try_from_secs_f64(seconds).ok().filter(|ttl| (least..=most).contains(ttl));
    let problem = FieldProblem::Seconds { least: least.as_secs(), most: most.as_secs() };
    ttl.ok_or(RegistryError::Invalid { field: "ttl_seconds", problem })
}

fn check_finite(field: &'static str, number: Option<f64>) -> Result<(), RegistryError> {
    if number.is_none_or(f64::is_finite) {
        return Ok(());
    }
    Err(RegistryError::Invalid { field, problem: FieldProblem::NotFinite })
}
