//! What the prefix cache gets and loses, published as vLLM 0.32 does. Decides nothing.

use kv_connector::kv_events::{BlockHash, BlocksStored, EventBatch, EventPublisher, KvEvent, extra_keys};

use crate::blocks;
use crate::tokens::Token;

/// The events of one step, published together.
#[derive(Debug)]
pub(crate) struct CacheEvents {
    publisher: EventPublisher,
    pending: Vec<KvEvent>,
}

impl CacheEvents {
    pub(crate) fn new(publisher: EventPublisher) -> Self {
        Self { publisher, pending: Vec::new() }
    }

    /// Blocks `from..hashes.len()` of a request are in the cache now.
    pub(crate) fn stored(
        &mut self,
        hashes: &[blocks::BlockHash],
        from: usize,
        tokens: &[Token],
        block_size: usize,
        salt: &str,
    ) {
        if from >= hashes.len() {
            return;
        }
        let salt = Some(salt).filter(|salt| !salt.is_empty());
        let keys = (from..hashes.len()).map(|at| extra_keys(None, salt.filter(|_| at == 0)));
        self.pending.push(KvEvent::Stored(BlocksStored {
            hashes: hashes[from..].iter().map(hash).collect(),
            parent: from.checked_sub(1).map(|before| hash(&hashes[before])),
            tokens: tokens[from * block_size..hashes.len() * block_size].to_vec(),
            block_size,
            lora: None,
            medium: Some("GPU".to_owned()),
            extra_keys: Some(keys.collect()),
            group: Some(0),
        }));
    }

    /// Blocks have been taken for something else.
    pub(crate) fn removed(&mut self, evicted: impl IntoIterator<Item = blocks::BlockHash>) {
        self.pending.extend(evicted.into_iter().map(|evicted| KvEvent::Removed {
            hashes: vec![hash(&evicted)],
            medium: Some("GPU".to_owned()),
            group: Some(0),
        }));
    }

    /// Publishes what has come together.
    pub(crate) fn flush(&mut self, time: f64) {
        if !self.pending.is_empty() {
            let batch = EventBatch { rank: Some(0), events: std::mem::take(&mut self.pending) };
            self.publisher.publish(batch.encode(time));
        }
    }
}

fn hash(hash: &blocks::BlockHash) -> BlockHash {
    BlockHash::Bytes(hash.to_be_bytes().into())
}
