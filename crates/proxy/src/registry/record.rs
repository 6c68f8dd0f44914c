//! What is known of a registered engine, as the core reads it and as people see it.
//! A record never changes: a change makes a new one. Only the pulse is shared by them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kv_connector::fit::EngineTraits;
use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::protocol::params::Generation;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::clock::{ClockReading, ClockTrack};
use crate::client::ModelScope;

/// A rank as (pipeline, tensor-parallel).
pub type Rank = (u32, u32);

/// What an engine says that it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineRole {
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Pulls KV and generates.
    Decode,
    /// Either.
    Both,
}

/// Where an engine is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineState {
    /// Not all of it is known yet; look-ups are refused.
    Registering,
    /// It serves.
    #[default]
    Ready,
    /// It finishes what it has; look-ups are answered, since hand-offs are still under way.
    Draining,
}

/// The part of an engine that moves without being a change.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// When a silent engine leaves.
    pub(crate) deadline: Option<Instant>,
    pub(crate) clock: ClockTrack,
    /// Where the store has the engine, when it is one that several routers share.
    #[cfg(feature = "etcd")]
    pub(crate) stored: Option<super::shared::Stored>,
}

impl Pulse {
    /// Whether it is this router that lets a silent engine leave. Where a store does, it must
    /// leave everywhere at once, and nowhere while the store is away.
    #[cfg(feature = "etcd")]
    pub(crate) fn is_timed_here(&self) -> bool {
        self.stored.is_none_or(|stored| stored.lost)
    }

    /// Whether it is this router that lets a silent engine leave.
    #[cfg(not(feature = "etcd"))]
    #[expect(clippy::unused_self, reason = "the other build asks the pulse")]
    pub(crate) const fn is_timed_here(&self) -> bool {
        true
    }
}

/// One registered engine at one revision.
#[derive(Clone, Debug)]
pub struct EngineRecord {
    /// Its id.
    pub engine_id: String,
    /// Where its HTTP API is, in canonical spelling.
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
    /// Which life at its address (or, without one, of its id) this is; from 1.
    pub generation: u64,
    /// The revision of its last change.
    pub revision: u64,
    /// Unix time of its first registration in this generation, in seconds.
    pub registered_at: u64,
    /// After how long a silence it leaves; `None` never.
    pub ttl: Option<Duration>,
    /// Its ranks.
    pub ranks: BTreeMap<Rank, Arc<RankView>>,
    /// The credential that alone may change it; `None` until one has registered it.
    pub owner: Option<Arc<str>>,
    /// The models that its credential is for: it gets no request of another one.
    pub bound: ModelScope,
    pub(crate) pulse: Arc<Mutex<Pulse>>,
}

/// The sum of lengths, of which none is negative in a payload that can be used.
fn sum(lens: &[i64]) -> u64 {
    lens.iter().filter_map(|len| u64::try_from(*len).ok()).fold(0, u64::saturating_add)
}

impl EngineRecord {
    /// The first rank, which speaks for the engine; (0, 0) once it is known.
    #[must_use]
    pub fn first_rank(&self) -> Option<&Arc<RankView>> {
        self.ranks.first_key_value().map(|(_, view)| view)
    }

    /// The digest that two engines must share.
    #[must_use]
    pub fn compatibility_hash(&self) -> Option<&str> {
        self.first_rank().map(|rank| rank.compatibility_hash.as_str())
    }

    /// The connector's generation.
    #[must_use]
    pub fn connector(&self) -> Option<Generation> {
        self.first_rank().map(|rank| rank.generation)
    }

    /// What its first rank says of its memory.
    #[must_use]
    pub fn metadata(&self) -> Option<&NixlAgentMetadata> {
        self.first_rank().map(|rank| &rank.metadata)
    }

    pub(crate) fn is_live(&self, now: Instant) -> bool {
        self.pulse.lock().deadline.is_none_or(|deadline| now < deadline)
    }

    /// How many bytes one block has over all ranks and regions.
    pub(crate) fn bytes_per_block(&self) -> u64 {
        let lens = |rank: &Arc<RankView>| match &rank.metadata {
            NixlAgentMetadata::V2(metadata) => sum(&metadata.block_lens),
            NixlAgentMetadata::V14(metadata) => sum(&metadata.block_lens),
        };
        self.ranks.values().map(lens).fold(0, u64::saturating_add)
    }

    pub(crate) fn payload_bytes(&self) -> usize {
        self.ranks.values().map(|rank| rank.payload_bytes).sum()
    }

    /// Whether it must be taken for another engine than one that registers under its id: it has a
    /// lease, so it gave a sign of life of late, and does so at another address.
    pub(crate) fn lives_elsewhere(&self, other: &Self) -> bool {
        let addresses = (self.address(), other.address());
        self.ttl.is_some() && matches!(addresses, (Some(here), Some(there)) if here != there)
    }

    /// Whether this is another process than an earlier record's: another id, or other memory at the
    /// same rank.
    #[must_use]
    pub fn is_another_life(&self, earlier: &Self) -> bool {
        self.engine_id != earlier.engine_id
            || earlier
                .ranks
                .iter()
                .any(|(rank, view)| self.ranks.get(rank).is_some_and(|now| now.payload != view.payload))
    }

    /// Whether both say the same, whatever their revisions.
    pub(crate) fn says_the_same(&self, other: &Self) -> bool {
        let same_ranks = self.ranks.len() == other.ranks.len()
            && self.ranks.iter().zip(&other.ranks).all(|((rank, view), (other_rank, other_view))| {
                rank == other_rank && (Arc::ptr_eq(view, other_view) || view.payload == other_view.payload)
            });
        same_ranks
            && self.base_url == other.base_url
            && self.role == other.role
            && self.model == other.model
            && self.dp_rank == other.dp_rank
            && self.vllm_version == other.vllm_version
            && self.traits == other.traits
            && self.state == other.state
            && self.generation == other.generation
            && self.ttl == other.ttl
            && self.owner == other.owner
            && self.bound == other.bound
    }

    fn about(&self) -> AboutEngine {
        AboutEngine {
            engine_id: self.engine_id.clone(),
            base_url: self.base_url.clone(),
            role: self.role,
            model: self.model.clone(),
            dp_rank: self.dp_rank,
            vllm_version: self.vllm_version.clone(),
            traits: self.traits.clone(),
            state: self.state,
            generation: self.generation,
            revision: self.revision,
            registered_at: self.registered_at,
            ttl_seconds: self.ttl.map(|ttl| ttl.as_secs_f64()),
            connector_version: self.connector().map(Generation::connector_version),
            compatibility_hash: self.compatibility_hash().map(str::to_owned),
        }
    }

    /// The view without what the ranks say of their memory.
    #[must_use]
    pub fn summary(&self) -> EngineSummary {
        let ranks =
            self.ranks.keys().map(|(pp_rank, tp_rank)| RankId { pp_rank: *pp_rank, tp_rank: *tp_rank });
        EngineSummary { about: self.about(), ranks: ranks.collect() }
    }

    pub(crate) fn view(&self, clock: Option<ClockReading>) -> EngineView {
        EngineView { about: self.about(), clock, ranks: self.ranks.values().cloned().collect() }
    }
}

/// What is shown of an engine wherever it is shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AboutEngine {
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
    /// What its payloads do not tell; what is not known is left out.
    #[serde(flatten)]
    pub traits: EngineTraits,
    /// Where it is in its life.
    pub state: EngineState,
    /// Which life at its address this is.
    pub generation: u64,
    /// The revision of its last change.
    pub revision: u64,
    /// Unix time of the registration, in seconds.
    pub registered_at: u64,
    /// After how long a silence it leaves.
    pub ttl_seconds: Option<f64>,
    /// The connector's version, as far as the metadata tells it.
    pub connector_version: Option<u64>,
    /// The first rank's digest that two engines must share.
    pub compatibility_hash: Option<String>,
}

/// A registered engine with everything that its ranks say.
#[derive(Clone, Debug, Serialize)]
pub struct EngineView {
    /// What it is.
    #[serde(flatten)]
    pub about: AboutEngine,
    /// Its clock now, where it tells it.
    pub clock: Option<ClockReading>,
    /// Its ranks in order.
    pub ranks: Vec<Arc<RankView>>,
}

/// A registered engine with the names of its ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EngineSummary {
    /// What it is.
    #[serde(flatten)]
    pub about: AboutEngine,
    /// Its ranks in order.
    pub ranks: Vec<RankId>,
}

/// The name of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankId {
    /// Pipeline rank.
    pub pp_rank: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
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
    /// SHA-256 of the payload in hex.
    pub sha256: String,
    /// The bytes.
    #[serde(skip)]
    pub payload: Bytes,
}
