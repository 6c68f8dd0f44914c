//! The blocks of one engine's prefix cache. Pure: told what the engine says, asked for the beginning of a prompt.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use ahash::RandomState;
use kv_connector::kv_events::{BlockHash, BlocksStored, EventBatch, KvEvent, extra_keys};

use super::PromptTokens;

/// Where every chain begins.
const ROOT: u64 = 0;

/// What one engine has cached.
#[derive(Debug)]
pub(super) struct BlockIndex {
    keys: RandomState,
    /// Most blocks; those beyond it are not taken in.
    room: usize,
    /// Tokens of a whole block.
    block_size: usize,
    /// Our hash of each block, by the engine's.
    blocks: HashMap<u64, u64, RandomState>,
    /// How many of the engine's hashes stand for each of ours: engines that do not tell a block's salt make
    /// several of one.
    held: HashMap<u64, u32, RandomState>,
}

impl BlockIndex {
    pub(super) fn new(keys: RandomState, room: usize) -> Self {
        let (blocks, held) = (HashMap::with_hasher(keys.clone()), HashMap::with_hasher(keys.clone()));
        Self { keys, room, block_size: 0, blocks, held }
    }

    /// How many blocks there are.
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) const fn block_size(&self) -> usize {
        self.block_size
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
        self.held.clear();
    }

    /// Takes in what an engine says.
    pub(super) fn apply(&mut self, batch: &EventBatch) {
        for event in &batch.events {
            match event {
                KvEvent::Stored(stored) if is_first(stored.medium.as_deref(), stored.group) => {
                    self.store(stored)
                }
                KvEvent::Removed { hashes, medium, group } if is_first(medium.as_deref(), *group) => {
                    for hash in hashes {
                        self.remove(hash);
                    }
                }
                KvEvent::Cleared => self.clear(),
                KvEvent::Stored(_) | KvEvent::Removed { .. } => {}
            }
        }
    }

    fn store(&mut self, stored: &BlocksStored) {
        if stored.block_size > self.block_size {
            // What was told before were parts of blocks.
            self.clear();
            self.block_size = stored.block_size;
        }
        if stored.block_size != self.block_size {
            return;
        }
        let mut chain = match &stored.parent {
            None => ROOT,
            // Without what comes before them the blocks match nothing.
            Some(parent) => match self.blocks.get(&self.name(parent)) {
                Some(parent) => *parent,
                None => return,
            },
        };
        for (at, hash) in stored.hashes.iter().enumerate() {
            let tokens = &stored.tokens[at * self.block_size..(at + 1) * self.block_size];
            let extra = match &stored.extra_keys {
                Some(keys) => keys[at].clone(),
                None => extra_keys(stored.lora.as_deref(), None),
            };
            chain = link(&self.keys, chain, tokens, extra.as_deref());
            let name = self.name(hash);
            if self.blocks.len() >= self.room && !self.blocks.contains_key(&name) {
                return;
            }
            if let Some(before) = self.blocks.insert(name, chain) {
                self.release(before);
            }
            *self.held.entry(chain).or_default() += 1;
        }
    }

    fn remove(&mut self, hash: &BlockHash) {
        if let Some(chain) = self.blocks.remove(&self.name(hash)) {
            self.release(chain);
        }
    }

    fn release(&mut self, chain: u64) {
        if let Some(count) = self.held.get_mut(&chain) {
            *count -= 1;
            if *count == 0 {
                self.held.remove(&chain);
            }
        }
    }

    fn name(&self, hash: &BlockHash) -> u64 {
        self.keys.hash_one(hash)
    }

    /// How many tokens from the beginning of a prompt are cached.
    pub(super) fn cached(&self, chain: &Chain) -> usize {
        chain.links.iter().take_while(|link| self.held.contains_key(link)).count() * self.block_size
    }
}

/// Whether events are of the first group of layers, in the engine's own memory.
fn is_first(medium: Option<&str>, group: Option<u32>) -> bool {
    medium.is_none_or(|medium| medium == "GPU") && group.is_none_or(|group| group == 0)
}

fn link(keys: &RandomState, before: u64, tokens: &[u32], extra: Option<&[u8]>) -> u64 {
    let mut hasher = keys.build_hasher();
    hasher.write_u64(before);
    for token in tokens {
        hasher.write_u32(*token);
    }
    hasher.write(extra.unwrap_or_default());
    // No block is the root.
    hasher.finish() | 1
}

/// A prompt as the blocks of one size.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    block_size: usize,
    lora: Option<Box<str>>,
    links: Arc<[u64]>,
}

impl Chain {
    pub(super) fn new(
        keys: &RandomState,
        prompt: &PromptTokens,
        block_size: usize,
        lora: Option<&str>,
    ) -> Self {
        let (first, others) = (extra_keys(lora, prompt.salt.as_deref()), extra_keys(lora, None));
        let mut before = ROOT;
        let blocks = prompt.tokens.chunks_exact(block_size.max(1)).enumerate();
        let links = blocks.map(|(at, tokens)| {
            before = link(keys, before, tokens, if at == 0 { &first } else { &others }.as_deref());
            before
        });
        Self { block_size, lora: lora.map(Into::into), links: links.collect() }
    }

    pub(super) fn is_of(&self, block_size: usize, lora: Option<&str>) -> bool {
        self.block_size == block_size && self.lora.as_deref() == lora
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: usize = 4;

    fn index(room: usize) -> BlockIndex {
        BlockIndex::new(RandomState::with_seeds(1, 2, 3, 4), room)
    }

    fn hash(number: u64) -> BlockHash {
        BlockHash::Bytes(number.to_be_bytes().into())
    }

    fn stored(first: u64, parent: Option<u64>, tokens: &[u32]) -> BlocksStored {
        BlocksStored {
            hashes: (first..first + (tokens.len() / SIZE) as u64).map(hash).collect(),
            parent: parent.map(hash),
            tokens: tokens.to_vec(),
            block_size: SIZE,
            ..BlocksStored::default()
        }
    }

    fn tell(index: &mut BlockIndex, event: KvEvent) {
        index.apply(&EventBatch { rank: None, events: vec![event] });
    }

    fn removed(number: u64) -> KvEvent {
        KvEvent::Removed { hashes: vec![hash(number)], medium: Some("GPU".into()), group: Some(0) }
    }

    fn cached(index: &BlockIndex, tokens: &[u32], salt: Option<&str>, lora: Option<&str>) -> usize {
        let prompt = PromptTokens { tokens: tokens.into(), salt: salt.map(str::to_owned) };
        index.cached(&Chain::new(&index.keys, &prompt, SIZE, lora))
    }

    #[test]
    fn blocks_count_until_they_go() {
        let (mut index, tokens) = (index(100), (0..20).collect::<Vec<u32>>());
        tell(&mut index, KvEvent::Stored(stored(1, None, &tokens[..8])));
        tell(&mut index, KvEvent::Stored(stored(3, Some(2), &tokens[8..16])));
        assert_eq!(cached(&index, &tokens, None, None), 16);
        assert_eq!(cached(&index, &tokens[..14], None, None), 12);
        assert_eq!(cached(&index, &tokens[1..], None, None), 0);
        tell(&mut index, removed(4));
        assert_eq!(cached(&index, &tokens, None, None), 12);
        // Told again, as engines do when blocks are used once more.
        tell(&mut index, KvEvent::Stored(stored(1, None, &tokens[..12])));
        tell(&mut index, removed(3));
        assert_eq!((cached(&index, &tokens, None, None), index.len()), (8, 2));
        // A parent that is gone leads nowhere.
        tell(&mut index, KvEvent::Stored(stored(4, Some(3), &tokens[12..16])));
        assert_eq!(index.len(), 2);
        tell(&mut index, KvEvent::Cleared);
        assert_eq!((cached(&index, &tokens, None, None), index.len(), index.held.len()), (0, 0, 0));
    }

    #[test]
    fn salts_and_adapters_keep_blocks_apart() {
        let (mut index, tokens) = (index(100), (0..8).collect::<Vec<u32>>());
        let salted = BlocksStored {
            extra_keys: Some(vec![extra_keys(None, Some("s")), None]),
            ..stored(1, None, &tokens)
        };
        tell(&mut index, KvEvent::Stored(salted));
        assert_eq!(cached(&index, &tokens, Some("s"), None), 8);
        assert_eq!(cached(&index, &tokens, None, None), 0);
        assert_eq!(cached(&index, &tokens, Some("t"), None), 0);
        // An engine that does not tell extra keys tells the adapter.
        let adapted = BlocksStored { lora: Some("ad".into()), ..stored(5, None, &tokens) };
        tell(&mut index, KvEvent::Stored(adapted));
        assert_eq!(cached(&index, &tokens, None, Some("ad")), 8);
        assert_eq!(cached(&index, &tokens, Some("s"), Some("ad")), 0);
    }

    #[test]
    fn slower_places_other_groups_and_parts_of_blocks_do_not_count() {
        let (mut index, tokens) = (index(100), (0..8).collect::<Vec<u32>>());
        let elsewhere = BlocksStored { medium: Some("CPU".into()), ..stored(1, None, &tokens) };
        let other_group = BlocksStored { group: Some(1), ..stored(1, None, &tokens) };
        for stored in [elsewhere, other_group] {
            tell(&mut index, KvEvent::Stored(stored));
        }
        assert_eq!(index.len(), 0);
        let part = BlocksStored { block_size: 2, hashes: vec![hash(9)], ..stored(9, None, &tokens[..2]) };
        tell(&mut index, KvEvent::Stored(part.clone()));
        tell(&mut index, KvEvent::Stored(stored(1, None, &tokens)));
        tell(&mut index, KvEvent::Stored(part));
        assert_eq!((index.len(), index.block_size()), (2, SIZE));
    }

    proptest! {
        /// Whatever an engine says, the bound holds and both maps agree.
        #[test]
        fn it_stays_within_its_bound(
            events in proptest::collection::vec((0..12_u64, proptest::option::of(0..12_u64), 1..4_usize, 0..4_u8), 0..80),
            room in 1..10_usize,
        ) {
            let mut index = index(room);
            for (first, parent, blocks, kind) in events {
                let tokens: Vec<u32> = (0..(blocks * SIZE) as u32).map(|token| token % 2 + first as u32).collect();
                tell(&mut index, match kind {
                    0 => removed(first),
                    _ => KvEvent::Stored(stored(first, parent, &tokens)),
                });
                prop_assert!(index.len() <= room);
                prop_assert_eq!(index.held.values().sum::<u32>() as usize, index.len());
            }
        }
    }
}
