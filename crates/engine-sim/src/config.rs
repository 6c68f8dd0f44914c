//! What one simulated engine is: its shape, its speed, its protocol generation.
//!
//! A plain record with one `Default`; it reads no environment and opens nothing.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use kv_connector::handshake::RegistryTls;
use kv_connector::protocol::Generation;
use kv_connector::regions::Layout;
use serde::{Deserialize, Serialize};
use url::Url;

use crate::transport::KvTransport;

/// What an engine is meant for; a vLLM engine does whatever its requests ask, so this only labels it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Fetches KV and generates.
    Decode,
    /// Does whatever is asked.
    #[default]
    Both,
}

/// What a decode engine does with a request whose KV could not be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadFailurePolicy {
    /// The request ends with an internal server error (vLLM 0.32's default).
    #[default]
    Fail,
    /// The prompt is computed locally (vLLM 0.13's default).
    Recompute,
}

/// What a layer's cache stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Keys and values by head; the heads are dealt out over the ranks.
    #[default]
    Full,
    /// One latent per token, equal on all ranks.
    Mla,
}

/// Settings of one engine.
#[derive(Clone)]
pub struct EngineConfig {
    /// The label of the engine.
    pub role: Role,
    /// What moves the KV blocks between engines.
    pub transport: KvTransport,
    /// Connector protocol and vLLM behaviour.
    pub generation: Generation,
    /// The model's name; it also enters the compatibility hash.
    pub model: String,
    /// Names of adapters of it, which the engine lists and serves as models of their own.
    pub adapters: Vec<String>,
    /// The engine id; `None` draws a random UUID, as vLLM does at every start.
    pub engine_id: Option<String>,
    /// Context limit in tokens.
    pub max_model_len: usize,
    /// Attention layers.
    pub layers: usize,
    /// KV blocks, including the null block that is never used.
    pub num_blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// KV heads per layer over all ranks; with latent attention there is one, whatever this says.
    pub kv_heads: usize,
    /// What a layer's cache stores.
    pub attention: Attention,
    /// Tensor-parallel ranks, each with its own KV memory.
    pub tp_size: u32,
    /// The order inside of a block; `None` is the generation's head-major one.
    pub kv_layout: Option<Layout>,
    /// Whether a head-major cache may be received into a token-major one.
    pub permute_received: bool,
    /// Elements per head.
    pub head_dim: usize,
    /// Bytes per element.
    pub dtype: usize,
    /// How long a finished prefill keeps its blocks for the decode side.
    pub lease: Duration,
    /// Time one prompt token takes to compute.
    pub prefill_time_per_token: Duration,
    /// Time one decode step takes, whatever the batch.
    pub decode_time_per_token: Duration,
    /// Requests that run at once.
    pub max_num_seqs: usize,
    /// Prompt tokens computed in one step at most.
    pub max_num_batched_tokens: usize,
    /// Base URL of the handshake registry; without one every pull from an unknown engine fails.
    pub registry: Option<Url>,
    /// Bearer token for the registry.
    pub registry_token: Option<String>,
    /// What the engine trusts and shows when the registry's URL is `https://`.
    pub registry_tls: RegistryTls,
    /// How often the engine gives the registry a sign of life.
    pub registry_refresh: Duration,
    /// After how long a silence the registry lets the engine go; `None` is three refreshes, and at
    /// least 5 s.
    pub registry_ttl: Option<Duration>,
    /// Address of a ZMQ side channel, as unmodified vLLM has one; hand-offs then name it, and the
    /// engine shakes hands over the peers' ones instead of the registry. Port 0 takes a free one.
    pub side_channel: Option<SocketAddr>,
    /// Address at which it publishes its KV cache events over ZMQ; port 0 takes a free one.
    pub kv_events: Option<SocketAddr>,
    /// Address at which it replays those that were missed.
    pub kv_events_replay: Option<SocketAddr>,
    /// Host reported in hand-offs; `None` is the listener's address.
    pub advertise_host: Option<String>,
    /// Port reported in hand-offs; `None` is the listener's port.
    pub advertise_port: Option<u16>,
    /// What happens to a request whose KV could not be loaded.
    pub load_failure_policy: LoadFailurePolicy,
    /// The version that `/version` and the compatibility hash show; `None` follows the generation.
    pub vllm_version: Option<String>,
    /// Whether a differing compatibility hash refuses a handshake.
    pub enforce_compat: bool,
    /// Generation ends at a token with this probability (one in so many); `None` never ends by itself.
    pub eos_every: Option<u64>,
    /// Whether an idle engine is blind to notifications, as vLLM is in the cases its versions have.
    pub idle_trap: bool,
    /// How long an idle connection is kept open; uvicorn closes it after 5 s.
    pub keep_alive: Duration,
    /// Requests kept in the log that tests read.
    pub request_log: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            role: Role::Both,
            transport: KvTransport::Loopback,
            generation: Generation::V14,
            model: "sim".to_owned(),
            adapters: Vec::new(),
            engine_id: None,
            max_model_len: 8192,
            layers: 2,
            num_blocks: 513,
            block_size: 16,
            kv_heads: 2,
            attention: Attention::Full,
            tp_size: 1,
            kv_layout: None,
            permute_received: false,
            head_dim: 8,
            dtype: 2,
            lease: Duration::from_secs(30),
            prefill_time_per_token: Duration::ZERO,
            decode_time_per_token: Duration::ZERO,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            registry: None,
            registry_token: None,
            registry_tls: RegistryTls::default(),
            registry_refresh: Duration::from_secs(2),
            registry_ttl: None,
            side_channel: None,
            kv_events: None,
            kv_events_replay: None,
            advertise_host: None,
            advertise_port: None,
            load_failure_policy: LoadFailurePolicy::Fail,
            vllm_version: None,
            enforce_compat: true,
            eos_every: None,
            idle_trap: true,
            keep_alive: Duration::from_secs(5),
            request_log: 256,
        }
    }
}

impl fmt::Debug for EngineConfig {
    /// Names what tells engines apart, and never the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineConfig")
            .field("role", &self.role)
            .field("transport", &self.transport)
            .field("generation", &self.generation)
            .field("model", &self.model)
            .field("engine_id", &self.engine_id)
            .field("max_model_len", &self.max_model_len)
            .field("num_blocks", &self.num_blocks)
            .field("block_size", &self.block_size)
            .finish_non_exhaustive()
    }
}

impl EngineConfig {
    /// Defaults of a generation: v2 has a 480 s lease and recomputes after a failed load.
    pub fn for_generation(generation: Generation) -> Self {
        match generation {
            Generation::V14 => Self::default(),
            Generation::V2 => Self {
                generation,
                lease: Duration::from_secs(480),
                load_failure_policy: LoadFailurePolicy::Recompute,
                ..Self::default()
            },
        }
    }

    /// The vLLM version that this engine claims.
    pub fn version(&self) -> &str {
        match (&self.vllm_version, self.generation) {
            (Some(version), _) => version,
            (None, Generation::V14) => "0.32.0",
            (None, Generation::V2) => "0.13.0",
        }
    }

    pub(crate) fn is_v14(&self) -> bool {
        self.generation == Generation::V14
    }

    /// The order inside of a block.
    pub fn layout(&self) -> Layout {
        self.kv_layout.unwrap_or(match self.generation {
            Generation::V14 => Layout::Lbhnc,
            Generation::V2 => Layout::Hnd,
        })
    }

    /// Heads of a layer over all ranks, a latent counted as one.
    pub(crate) fn total_kv_heads(&self) -> usize {
        match self.attention {
            Attention::Full => self.kv_heads,
            Attention::Mla => 1,
        }
    }

    /// The first setting that cannot work, with what it must be.
    pub(crate) fn fault(&self) -> Option<(&'static str, &'static str)> {
        let positive = [
            ("layers", self.layers),
            ("block_size", self.block_size),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("dtype", self.dtype),
            ("max_model_len", self.max_model_len),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Some((name, "at least 1"));
        }
        if self.num_blocks < 2 {
            return Some(("num_blocks", "at least 2, because block 0 is never used"));
        }
        let (heads, ranks) = (self.total_kv_heads(), self.tp_size as usize);
        if ranks == 0 || !(heads.is_multiple_of(ranks) || ranks.is_multiple_of(heads)) {
            return Some(("tp_size", "a divisor or a multiple of the KV heads"));
        }
        let layouts = match self.generation {
            Generation::V14 => [Layout::Lbhnc, Layout::Lbnhc],
            Generation::V2 => [Layout::Hnd, Layout::Nhd],
        };
        if !layouts.contains(&self.layout()) {
            return Some(("kv_layout", "LBHNC or LBNHC, in v2 HND or NHD"));
        }
        if self.eos_every == Some(0) {
            return Some(("eos_every", "at least 1"));
        }
        None
    }
}
