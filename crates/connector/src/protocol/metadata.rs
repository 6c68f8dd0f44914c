//! Agent metadata: what a peer must know of a rank's memory to read from it.
//!
//! A msgpack map in declaration order with every field present. The decoder takes any key order,
//! skips what it does not know, lets the last of two equal keys win and coerces nothing.

use std::fmt::Write as _;

use serde::Serializer;

use super::msgpack::{DecodeError, Reader, Writer};
use super::params::Generation;

/// Metadata of a v2 rank (8 fields).
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct AgentMetadataV2 {
    /// The engine the rank belongs to.
    pub engine_id: String,
    /// The transport agent's opaque blob.
    #[serde(serialize_with = "as_hex")]
    pub agent_metadata: Vec<u8>,
    /// Address of block 0 per region.
    pub kv_caches_base_addr: Vec<u64>,
    /// Device of the memory; 0 for host memory.
    pub device_id: i64,
    /// Blocks per region.
    pub num_blocks: i64,
    /// Bytes per block per region.
    pub block_lens: Vec<i64>,
    /// `HND` or `NHD`.
    pub kv_cache_layout: String,
    /// Tokens per block.
    pub block_size: i64,
}

/// Metadata of a v14 rank (21 fields).
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct AgentMetadataV14 {
    /// The engine the rank belongs to.
    pub engine_id: String,
    /// The transport agent's opaque blob.
    #[serde(serialize_with = "as_hex")]
    pub agent_metadata: Vec<u8>,
    /// Address of block 0 per region.
    pub kv_caches_base_addr: Vec<u64>,
    /// Device of the memory; 0 for host memory.
    pub device_id: i64,
    /// Kernel blocks.
    pub num_blocks: i64,
    /// Bytes per block per region.
    pub block_lens: Vec<i64>,
    /// Bytes from block to block per region; at least the block length.
    pub block_strides: Vec<i64>,
    /// Physical order of layer, block, head, token and content, such as `LBHNC`.
    pub kv_cache_layout: String,
    /// Tokens per kernel block.
    pub block_size: i64,
    /// Bytes of convolution and temporal state per block.
    pub ssm_sizes: [i64; 2],
    /// Attention backend of the first layer.
    pub attn_backend_name: String,
    /// Kernel blocks per logical block.
    pub physical_blocks_per_logical_kv_block: i64,
    /// Blocks per region, when they differ.
    pub region_num_blocks: Option<Vec<i64>>,
    /// Cache group per region; -1 for a shared one.
    pub region_group_ids: Option<Vec<i64>>,
    /// First layer of each region.
    pub region_names: Option<Vec<String>>,
    /// `VRAM` or `DRAM` per region.
    pub region_mem_types: Option<Vec<String>>,
    /// Decode-context-parallel size.
    pub dcp_size: i64,
    /// Prefill-context-parallel size.
    pub pcp_size: i64,
    /// Bytes of a per-layer-embedding page, when there is one.
    pub ple_block_len: Option<i64>,
    /// Layers of each region.
    pub region_members: Vec<Vec<String>>,
    /// Per layer its offset in the block row and its page bytes.
    #[serde(serialize_with = "as_object")]
    pub packed_member_layouts: Vec<(String, [i64; 2])>,
}

impl Default for AgentMetadataV14 {
    fn default() -> Self {
        Self {
            engine_id: String::new(),
            agent_metadata: Vec::new(),
            kv_caches_base_addr: Vec::new(),
            device_id: 0,
            num_blocks: 0,
            block_lens: Vec::new(),
            block_strides: Vec::new(),
            kv_cache_layout: String::new(),
            block_size: 0,
            ssm_sizes: [0, 0],
            attn_backend_name: String::new(),
            physical_blocks_per_logical_kv_block: 1,
            region_num_blocks: None,
            region_group_ids: None,
            region_names: None,
            region_mem_types: None,
            dcp_size: 1,
            pcp_size: 1,
            ple_block_len: None,
            region_members: Vec::new(),
            packed_member_layouts: Vec::new(),
        }
    }
}

/// Agent metadata of either generation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(untagged)]
pub enum NixlAgentMetadata {
    /// The 8 fields of v2.
    V2(AgentMetadataV2),
    /// The 21 fields of v14.
    V14(Box<AgentMetadataV14>),
}

impl NixlAgentMetadata {
    /// The engine the rank belongs to.
    pub fn engine_id(&self) -> &str {
        match self {
            Self::V2(metadata) => &metadata.engine_id,
            Self::V14(metadata) => &metadata.engine_id,
        }
    }

    /// The generation whose fields these are.
    pub fn generation(&self) -> Generation {
        match self {
            Self::V2(_) => Generation::V2,
            Self::V14(_) => Generation::V14,
        }
    }

    /// The bytes vLLM would send.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::V2(metadata) => metadata.encode(),
            Self::V14(metadata) => metadata.encode(),
        }
    }

    /// Decodes as an engine of `generation` does.
    ///
    /// # Errors
    /// Bytes that vLLM would refuse too, and integers beyond 64 bits signed where it has no limit.
    pub fn decode(generation: Generation, bytes: &[u8]) -> Result<Self, DecodeError> {
        Ok(match generation {
            Generation::V2 => Self::V2(AgentMetadataV2::decode(bytes)?),
            Generation::V14 => Self::V14(Box::new(AgentMetadataV14::decode(bytes)?)),
        })
    }

    /// Decodes as the newest generation whose required fields are all there; for readers that,
    /// unlike an engine, do not know the sender's generation.
    ///
    /// # Errors
    /// What the v2 decoder refuses, or what the v14 decoder refuses beyond missing fields.
    pub fn decode_any(bytes: &[u8]) -> Result<Self, DecodeError> {
        match Self::decode(Generation::V14, bytes) {
            Err(DecodeError::MissingField { .. }) => Self::decode(Generation::V2, bytes),
            decided => decided,
        }
    }
}

fn required<T>(value: Option<T>, field: &'static str) -> Result<T, DecodeError> {
    value.ok_or(DecodeError::MissingField { field })
}

impl AgentMetadataV2 {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.map(8);
        w.str("engine_id");
        w.str(&self.engine_id);
        w.str("agent_metadata");
        w.bin(&self.agent_metadata);
        w.str("kv_caches_base_addr");
        w.list(&self.kv_caches_base_addr, |w, address| w.uint(*address));
        w.str("device_id");
        w.int(self.device_id);
        w.str("num_blocks");
        w.int(self.num_blocks);
        w.str("block_lens");
        w.ints(&self.block_lens);
        w.str("kv_cache_layout");
        w.str(&self.kv_cache_layout);
        w.str("block_size");
        w.int(self.block_size);
        w.bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let (mut engine_id, mut agent_metadata, mut base_addr, mut device_id) = (None, None, None, None);
        let (mut num_blocks, mut block_lens, mut layout, mut block_size) = (None, None, None, None);
        for _ in 0..r.map_header("metadata")? {
            match r.str("metadata key")? {
                "engine_id" => engine_id = Some(r.text("engine_id")?),
                "agent_metadata" => agent_metadata = Some(r.bin("agent_metadata")?.to_vec()),
                "kv_caches_base_addr" => base_addr = Some(r.ints("kv_caches_base_addr")?),
                "device_id" => device_id = Some(r.int("device_id")?),
                "num_blocks" => num_blocks = Some(r.int("num_blocks")?),
                "block_lens" => block_lens = Some(r.ints("block_lens")?),
                "kv_cache_layout" => layout = Some(r.text("kv_cache_layout")?),
                "block_size" => block_size = Some(r.int("block_size")?),
                _ => r.skip()?,
            }
        }
        let metadata = Self {
            engine_id: required(engine_id, "engine_id")?,
            agent_metadata: required(agent_metadata, "agent_metadata")?,
            kv_caches_base_addr: required(base_addr, "kv_caches_base_addr")?,
            device_id: required(device_id, "device_id")?,
            num_blocks: required(num_blocks, "num_blocks")?,
            block_lens: required(block_lens, "block_lens")?,
            kv_cache_layout: required(layout, "kv_cache_layout")?,
            block_size: required(block_size, "block_size")?,
        };
        r.finish()?;
        Ok(metadata)
    }
}

/// Fields of v14 that have no default, in declaration order.
const REQUIRED_V14: [&str; 12] = [
    "engine_id",
    "agent_metadata",
    "kv_caches_base_addr",
    "device_id",
    "num_blocks",
    "block_lens",
    "block_strides",
    "kv_cache_layout",
    "block_size",
    "ssm_sizes",
    "attn_backend_name",
    "physical_blocks_per_logical_kv_block",
];

impl AgentMetadataV14 {
    fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.map(21);
        w.str("engine_id");
        w.str(&self.engine_id);
        w.str("agent_metadata");
        w.bin(&self.agent_metadata);
        w.str("kv_caches_base_addr");
        w.list(&self.kv_caches_base_addr, |w, address| w.uint(*address));
        w.str("device_id");
        w.int(self.device_id);
        w.str("num_blocks");
        w.int(self.num_blocks);
        w.str("block_lens");
        w.ints(&self.block_lens);
        w.str("block_strides");
        w.ints(&self.block_strides);
        w.str("kv_cache_layout");
        w.str(&self.kv_cache_layout);
        w.str("block_size");
        w.int(self.block_size);
        w.str("ssm_sizes");
        w.ints(&self.ssm_sizes);
        w.str("attn_backend_name");
        w.str(&self.attn_backend_name);
        w.str("physical_blocks_per_logical_kv_block");
        w.int(self.physical_blocks_per_logical_kv_block);
        self.encode_optional(&mut w);
        w.bytes
    }

    fn encode_optional(&self, w: &mut Writer) {
        w.str("region_num_blocks");
        w.optional(self.region_num_blocks.as_ref(), |w, counts| w.ints(counts));
        w.str("region_group_ids");
        w.optional(self.region_group_ids.as_ref(), |w, groups| w.ints(groups));
        w.str("region_names");
        w.optional(self.region_names.as_ref(), |w, names| w.texts(names));
        w.str("region_mem_types");
        w.optional(self.region_mem_types.as_ref(), |w, types| w.texts(types));
        w.str("dcp_size");
        w.int(self.dcp_size);
        w.str("pcp_size");
        w.int(self.pcp_size);
        w.str("ple_block_len");
        w.optional(self.ple_block_len.as_ref(), |w, len| w.int(*len));
        w.str("region_members");
        w.list(&self.region_members, |w, members| w.texts(members));
        w.str("packed_member_layouts");
        w.map(self.packed_member_layouts.len());
        for (layer, offset_and_page) in &self.packed_member_layouts {
            w.str(layer);
            w.ints(offset_and_page);
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let mut metadata = Self::default();
        let mut seen = [false; REQUIRED_V14.len()];
        for _ in 0..r.map_header("metadata")? {
            let key = r.str("metadata key")?;
            match REQUIRED_V14.iter().position(|field| *field == key) {
                Some(index) => {
                    metadata.decode_required(&mut r, REQUIRED_V14[index])?;
                    seen[index] = true;
                }
                None => metadata.decode_optional(&mut r, key)?,
            }
        }
        if let Some(index) = seen.iter().position(|seen| !seen) {
            return Err(DecodeError::MissingField { field: REQUIRED_V14[index] });
        }
        r.finish()?;
        Ok(metadata)
    }

    fn decode_required(&mut self, r: &mut Reader<'_>, field: &'static str) -> Result<(), DecodeError> {
        match field {
            "engine_id" => self.engine_id = r.text(field)?,
            "agent_metadata" => self.agent_metadata = r.bin(field)?.to_vec(),
            "kv_caches_base_addr" => self.kv_caches_base_addr = r.ints(field)?,
            "device_id" => self.device_id = r.int(field)?,
            "num_blocks" => self.num_blocks = r.int(field)?,
            "block_lens" => self.block_lens = r.ints(field)?,
            "block_strides" => self.block_strides = r.ints(field)?,
            "kv_cache_layout" => self.kv_cache_layout = r.text(field)?,
            "block_size" => self.block_size = r.int(field)?,
            "ssm_sizes" => self.ssm_sizes = r.pair(field)?,
            "attn_backend_name" => self.attn_backend_name = r.text(field)?,
            _ => self.physical_blocks_per_logical_kv_block = r.int(field)?,
        }
        Ok(())
    }

    fn decode_optional(&mut self, r: &mut Reader<'_>, key: &str) -> Result<(), DecodeError> {
        match key {
            "region_num_blocks" => {
                self.region_num_blocks = r.optional(|r| r.ints("region_num_blocks"))?;
            }
            "region_group_ids" => self.region_group_ids = r.optional(|r| r.ints("region_group_ids"))?,
            "region_names" => self.region_names = r.optional(|r| r.texts("region_names"))?,
            "region_mem_types" => self.region_mem_types = r.optional(|r| r.texts("region_mem_types"))?,
            "dcp_size" => self.dcp_size = r.int("dcp_size")?,
            "pcp_size" => self.pcp_size = r.int("pcp_size")?,
            "ple_block_len" => self.ple_block_len = r.optional(|r| r.int("ple_block_len"))?,
            "region_members" => {
                self.region_members = r.list("region_members", |r| r.texts("region_members"))?;
            }
            "packed_member_layouts" => self.packed_member_layouts = decode_packed(r)?,
            _ => r.skip()?,
        }
        Ok(())
    }
}

fn decode_packed(r: &mut Reader<'_>) -> Result<Vec<(String, [i64; 2])>, DecodeError> {
    let field = "packed_member_layouts";
    let mut index_of = std::collections::HashMap::new();
    let mut layouts: Vec<(String, [i64; 2])> = Vec::new();
    for _ in 0..r.map_header(field)? {
        let layer = r.text(field)?;
        let layout = r.pair(field)?;
        let index = *index_of.entry(layer.clone()).or_insert(layouts.len());
        match layouts.get_mut(index) {
            Some((_, earlier)) => *earlier = layout,
            None => layouts.push((layer, layout)),
        }
    }
    Ok(layouts)
}

impl Reader<'_> {
    fn text(&mut self, field: &'static str) -> Result<String, DecodeError> {
        Ok(self.str(field)?.to_owned())
    }

    fn texts(&mut self, field: &'static str) -> Result<Vec<String>, DecodeError> {
        self.list(field, |r| r.text(field))
    }

    fn ints<I: TryFrom<i128>>(&mut self, field: &'static str) -> Result<Vec<I>, DecodeError> {
        self.list(field, |r| r.int(field))
    }

    fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, DecodeError>,
    ) -> Result<Option<T>, DecodeError> {
        if self.nil() { Ok(None) } else { read(self).map(Some) }
    }
}

impl Writer {
    fn texts(&mut self, texts: &[String]) {
        self.list(texts, |w, text| w.str(text));
    }

    fn ints(&mut self, values: &[i64]) {
        self.list(values, |w, value| w.int(*value));
    }

    fn optional<T>(&mut self, value: Option<&T>, write: impl FnOnce(&mut Self, &T)) {
        match value {
            None => self.nil(),
            Some(value) => write(self, value),
        }
    }
}

fn as_hex<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    let mut hex = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _infallible = write!(hex, "{byte:02x}");
    }
    serializer.serialize_str(&hex)
}

fn as_object<S: Serializer>(layouts: &[(String, [i64; 2])], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(layouts.iter().map(|(layer, layout)| (layer, layout)))
}

#[cfg(test)]
mod tests;
