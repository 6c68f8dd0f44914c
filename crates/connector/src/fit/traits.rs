//! What an engine may say of itself beyond its payloads.

use serde::{Deserialize, Serialize};

use crate::protocol::params::TransferMode;

/// Settings of an engine that its payloads do not tell; whatever is absent is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineTraits {
    /// Transfer tensor-parallel size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tp_size: Option<u32>,
    /// Pipeline stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pp_size: Option<u32>,
    /// Decode-context-parallel size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dcp_size: Option<u32>,
    /// Which side drives the copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_mode: Option<TransferMode>,
    /// KV heads of the model over all ranks; 1 with multi-head latent attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<u32>,
    /// Whether the model caches one latent instead of heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub is_mla: Option<bool>,
    /// Whether a head-major cache may be received into a token-major one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permute_received: Option<bool>,
    /// Whether the hybrid cache allocator is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hma_required: Option<bool>,
    /// Whether transfers end in a host buffer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_buffer: Option<bool>,
    /// Whether peers with another compatibility hash are refused, as is the default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enforce_compat: Option<bool>,
    /// The version of NIXL that it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nixl_version: Option<String>,
    /// Where peers reach its side channel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub side_channel_host: Option<String>,
    /// The port of its side channel for rank 0 of its data-parallel rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub side_channel_port: Option<u16>,
}
