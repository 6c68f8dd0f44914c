//! vLLM's KV cache events: which blocks an engine's prefix cache gets and loses, over ZMQ PUB and SUB.
//!
//! Batches are msgpack, in the form of vLLM 0.32 (events are maps) and in the one before it (events are
//! arrays). Everything that is read is bounded; a peer that breaks the rules ends only its own connection.

mod decode;
mod encode;
mod publisher;
mod subscriber;

pub use decode::BadBatch;
pub use publisher::EventPublisher;
pub use subscriber::{EventSubscriber, Published, replay};

#[cfg(test)]
mod tests;

/// What an engine says at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventBatch {
    /// The data-parallel rank of the engine.
    pub rank: Option<u32>,
    /// What happened, in order; events of kinds that are not known here are left out.
    pub events: Vec<KvEvent>,
}

/// What happened to blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks are in the cache now, or have been used there once more.
    Stored(BlocksStored),
    /// Blocks are no more in the cache.
    Removed {
        /// Their hashes.
        hashes: Vec<BlockHash>,
        /// Where they were.
        medium: Option<String>,
        /// The group of layers.
        group: Option<u32>,
    },
    /// The cache is empty.
    Cleared,
}

/// Blocks that follow one another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlocksStored {
    /// Their hashes, in order.
    pub hashes: Vec<BlockHash>,
    /// The hash of the block before them; none at the beginning of a prompt.
    pub parent: Option<BlockHash>,
    /// The tokens of all of them.
    pub tokens: Vec<u32>,
    /// Tokens of each.
    pub block_size: usize,
    /// The adapter whose blocks they are.
    pub lora: Option<String>,
    /// Where they are: `GPU`, or a slower place.
    pub medium: Option<String>,
    /// For each block what beside its tokens tells it apart (adapter, images, cache salt), as msgpack. None
    /// where the engine does not tell.
    pub extra_keys: Option<Vec<Option<Vec<u8>>>>,
    /// The group of layers.
    pub group: Option<u32>,
}

/// An engine's name for a block with everything before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum BlockHash {
    /// A digest.
    Bytes(Box<[u8]>),
    /// A digest cut to a number.
    Number(i128),
}

/// The extra keys that vLLM gives to a block of a text under an adapter and, at its beginning, a salt.
#[must_use]
pub fn extra_keys(lora: Option<&str>, salt: Option<&str>) -> Option<Vec<u8>> {
    let keys: Vec<&str> = lora.into_iter().chain(salt).collect();
    (!keys.is_empty()).then(|| encode::texts(&keys))
}
