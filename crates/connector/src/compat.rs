//! The compatibility hash: two engines exchange KV only when theirs are equal.
//!
//! The digest of a JSON object in Python's default spelling, so it must match byte for byte.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

use crate::protocol::params::{Generation, TransferMode};

/// Factors of the speculative configuration, for speculators that use hidden states.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct SpeculativeFactors {
    /// Speculation method.
    pub method: Option<String>,
    /// Draft model.
    pub model: Option<String>,
    /// Revision of the draft model.
    pub revision: Option<String>,
    /// Code revision of the draft model.
    pub code_revision: Option<String>,
    /// Whether drafts are made in parallel.
    pub parallel_drafting: bool,
    /// Cache dtype of the draft, or else the target's.
    pub kv_cache_dtype: String,
    /// Layers whose hidden states are used.
    pub auxiliary_layer_ids: Option<Vec<i64>>,
}

/// A speculator as an engine is configured with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Speculator {
    /// Whether drafts are made from hidden states, which the KV cache then belongs to.
    pub uses_hidden_states: bool,
    /// Speculation method.
    pub method: Option<String>,
    /// Draft model.
    pub model: Option<String>,
    /// Revision of the draft model.
    pub revision: Option<String>,
    /// Code revision of the draft model.
    pub code_revision: Option<String>,
    /// Whether drafts are made in parallel.
    pub parallel_drafting: bool,
    /// Cache dtype of the draft; none takes the target's.
    pub kv_cache_dtype: Option<String>,
    /// Layers whose hidden states are used.
    pub auxiliary_layer_ids: Option<Vec<i64>>,
    /// Tokens drafted at a time; the two sides may differ in it.
    pub num_speculative_tokens: u64,
    /// Attention backend of the draft; the two sides may differ in it.
    pub attention_backend: Option<String>,
}

impl Speculator {
    /// What both sides must agree on; none for a speculator without hidden states.
    pub fn factors(&self, target_cache_dtype: &str) -> Option<SpeculativeFactors> {
        self.uses_hidden_states.then(|| SpeculativeFactors {
            method: self.method.clone(),
            model: self.model.clone(),
            revision: self.revision.clone(),
            code_revision: self.code_revision.clone(),
            parallel_drafting: self.parallel_drafting,
            kv_cache_dtype: self.kv_cache_dtype.clone().unwrap_or_else(|| target_cache_dtype.to_owned()),
            auxiliary_layer_ids: self.auxiliary_layer_ids.clone(),
        })
    }
}

/// The backend name of a push engine whose layers share rows: stages may order backends differently.
pub fn packed_backend_name(backends: &[&str]) -> String {
    let names: std::collections::BTreeSet<&str> = backends.iter().copied().collect();
    names.into_iter().collect::<Vec<_>>().join(",")
}

/// Everything that must be equal on both sides of a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompatFactors {
    /// Protocol generation; decides which factors count.
    pub generation: Generation,
    /// Connector version number; [`Generation::connector_version`] unless a test says otherwise.
    pub connector_version: u64,
    /// Version string of the engine, with its local suffix.
    pub vllm_version: String,
    /// The model argument as given, a path or a hub name.
    pub model: String,
    /// Model dtype such as `torch.bfloat16`.
    pub dtype: String,
    /// Total KV heads, before tensor parallelism.
    pub num_kv_heads: u64,
    /// Elements per head.
    pub head_size: u64,
    /// Hidden layers.
    pub num_hidden_layers: u64,
    /// Attention backend name.
    pub attn_backend_name: String,
    /// Configured cache dtype, `auto` by default.
    pub cache_dtype: String,
    /// Whether the hybrid cache allocator is on (v14).
    pub is_hma_enabled: bool,
    /// Speculative factors (v14); none without such a speculator.
    pub speculative_config: Option<SpeculativeFactors>,
    /// Pull or push (v14).
    pub transfer_mode: TransferMode,
}

impl CompatFactors {
    /// The text that is hashed: sorted keys, `", "` and `": "`, ASCII only.
    pub fn preimage(&self) -> String {
        let mut json = PythonJson::default();
        json.open();
        json.string("attn_backend_name", &self.attn_backend_name);
        json.string("cache_dtype", &self.cache_dtype);
        json.string("dtype", &self.dtype);
        json.number("head_size", self.head_size);
        let v14 = self.generation == Generation::V14;
        if v14 {
            json.boolean("is_hma_enabled", self.is_hma_enabled);
        }
        json.string("model", &self.model);
        json.number("nixl_connector_version", self.connector_version);
        json.number("num_hidden_layers", self.num_hidden_layers);
        json.number("num_kv_heads", self.num_kv_heads);
        if v14 {
            json.key("speculative_config");
            match &self.speculative_config {
                None => json.out.push_str("null"),
                Some(factors) => factors.write(&mut json),
            }
            json.string("transfer_mode", self.transfer_mode.as_str());
        }
        json.string("vllm_version", &self.vllm_version);
        json.close();
        json.out
    }

    /// The hash as 64 lowercase hex digits.
    pub fn digest(&self) -> String {
        let mut hex = String::with_capacity(64);
        for byte in Sha256::digest(self.preimage().as_bytes()) {
            let _infallible = write!(hex, "{byte:02x}");
        }
        hex
    }
}

impl SpeculativeFactors {
    fn write(&self, json: &mut PythonJson) {
        json.open();
        json.key("auxiliary_layer_ids");
        match &self.auxiliary_layer_ids {
            None => json.out.push_str("null"),
            Some(ids) => {
                let texts: Vec<String> = ids.iter().map(i64::to_string).collect();
                let _infallible = write!(json.out, "[{}]", texts.join(", "));
            }
        }
        json.optional("code_revision", self.code_revision.as_deref());
        json.string("kv_cache_dtype", &self.kv_cache_dtype);
        json.optional("method", self.method.as_deref());
        json.optional("model", self.model.as_deref());
        json.boolean("parallel_drafting", self.parallel_drafting);
        json.optional("revision", self.revision.as_deref());
        json.close();
    }
}

/// Writes an object as Python's `json.dumps` does by default; the caller sorts the keys.
#[derive(Default)]
struct PythonJson {
    out: String,
    has_member: bool,
}

impl PythonJson {
    fn open(&mut self) {
        self.out.push('{');
        self.has_member = false;
    }

    fn close(&mut self) {
        self.out.push('}');
        self.has_member = true;
    }

    fn key(&mut self, key: &str) {
        if std::mem::replace(&mut self.has_member, true) {
            self.out.push_str(", ");
        }
        self.quoted(key);
        self.out.push_str(": ");
    }

    fn string(&mut self, key: &str, value: &str) {
        self.key(key);
        self.quoted(value);
    }

    fn optional(&mut self, key: &str, value: Option<&str>) {
        match value {
            Some(value) => self.string(key, value),
            None => {
                self.key(key);
                self.out.push_str("null");
            }
        }
    }

    fn number(&mut self, key: &str, value: u64) {
        self.key(key);
        let _infallible = write!(self.out, "{value}");
    }

    fn boolean(&mut self, key: &str, value: bool) {
        self.key(key);
        self.out.push_str(if value { "true" } else { "false" });
    }

    fn quoted(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                ' '..='~' => self.out.push(character),
                _ => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let _infallible = write!(self.out, "\\u{unit:04x}");
                    }
                }
            }
        }
        self.out.push('"');
    }
}

#[cfg(test)]
mod tests;
