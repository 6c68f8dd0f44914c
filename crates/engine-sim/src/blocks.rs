//! The block pool: reference counts, the prefix cache by block-hash chain, and LRU eviction.
//!
//! It never touches KV bytes: a freed block keeps its old content until somebody writes over it.

use std::collections::{BTreeMap, HashMap};

use crate::tokens::Token;

/// A block number; block 0 is the null block and is never handed out.
pub(crate) type BlockId = u32;

/// The identity of a full block: its tokens and everything before them.
pub(crate) type BlockHash = u128;

/// Hashes of all full blocks of a token sequence, each covering its whole prefix. Sequences with
/// different salts share nothing.
pub(crate) fn chain_hashes(tokens: &[Token], block_size: usize, salt: &str) -> Vec<BlockHash> {
    let mut previous = salt.bytes().fold(0x6b76_6261_746f_6e00_u128, |seed, byte| {
        (seed ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b).rotate_left(29)
    });
    tokens
        .chunks_exact(block_size)
        .map(|block| {
            for token in block {
                previous = (previous ^ u128::from(*token))
                    .wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
                    .rotate_left(41);
            }
            previous ^= previous >> 67;
            previous
        })
        .collect()
}

#[derive(Default)]
struct Slot {
    references: u32,
    hash: Option<BlockHash>,
    free_stamp: Option<u64>,
}

/// All blocks of one engine.
pub(crate) struct BlockPool {
    slots: Vec<Slot>,
    free: BTreeMap<u64, BlockId>,
    cached: HashMap<BlockHash, BlockId>,
    next_stamp: u64,
    /// Hashes that were taken from the cache, where somebody collects them.
    evicted: Option<Vec<BlockHash>>,
}

impl BlockPool {
    /// A pool of `blocks` blocks including the null block.
    pub(crate) fn new(blocks: usize) -> Self {
        let mut pool = Self {
            slots: (0..blocks).map(|_| Slot::default()).collect(),
            free: BTreeMap::new(),
            cached: HashMap::new(),
            next_stamp: 0,
            evicted: None,
        };
        for id in 1..blocks {
            pool.enqueue(BlockId::try_from(id).unwrap_or(BlockId::MAX));
        }
        pool
    }

    /// Blocks that can be handed out in total.
    pub(crate) fn capacity(&self) -> usize {
        self.slots.len().saturating_sub(1)
    }

    /// Blocks that somebody holds now.
    pub(crate) fn used(&self) -> usize {
        self.capacity() - self.free.len()
    }

    /// Blocks that can be allocated now.
    pub(crate) fn available(&self) -> usize {
        self.free.len()
    }

    /// The longest cached prefix, as blocks in order; nothing is referenced yet.
    pub(crate) fn lookup(&self, hashes: &[BlockHash]) -> Vec<BlockId> {
        hashes.iter().map_while(|hash| self.cached.get(hash).copied()).collect()
    }

    /// How many of these blocks sit in the free list, so that using them takes from the free count.
    pub(crate) fn idle_among(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|id| self.slots[**id as usize].references == 0).count()
    }

    /// Takes a reference on cached blocks.
    pub(crate) fn touch(&mut self, blocks: &[BlockId]) {
        for id in blocks {
            let slot = &mut self.slots[*id as usize];
            if let Some(stamp) = slot.free_stamp.take() {
                self.free.remove(&stamp);
            }
            slot.references += 1;
        }
    }

    /// Allocates `count` blocks, evicting the least recently used, or none if there are too few.
    pub(crate) fn allocate(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if self.free.len() < count {
            return None;
        }
        let mut blocks = Vec::with_capacity(count);
        while blocks.len() < count {
            let (_, id) = self.free.pop_first()?;
            let slot = &mut self.slots[id as usize];
            slot.free_stamp = None;
            slot.references = 1;
            if let Some(hash) = slot.hash.take()
                && self.cached.get(&hash) == Some(&id)
            {
                self.cached.remove(&hash);
                if let Some(evicted) = &mut self.evicted {
                    evicted.push(hash);
                }
            }
            blocks.push(id);
        }
        Some(blocks)
    }

    /// Collects from now on what is taken from the cache.
    pub(crate) fn collect_evicted(&mut self) {
        self.evicted.get_or_insert_default();
    }

    /// What was taken from the cache since the last call, where it is collected.
    pub(crate) fn take_evicted(&mut self) -> Vec<BlockHash> {
        self.evicted.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Publishes full blocks in the prefix cache; blocks beyond the hashes are left alone. The position of the
    /// first that was not there.
    pub(crate) fn publish(&mut self, blocks: &[BlockId], hashes: &[BlockHash]) -> usize {
        let mut first = blocks.len().min(hashes.len());
        for (at, (id, hash)) in blocks.iter().zip(hashes).enumerate() {
            let slot = &mut self.slots[*id as usize];
            if slot.hash.is_none() {
                slot.hash = Some(*hash);
                self.cached.entry(*hash).or_insert(*id);
                first = first.min(at);
            }
        }
        first
    }

    /// Drops one reference on each block; tails become evictable before heads.
    pub(crate) fn release(&mut self, blocks: &[BlockId]) {
        for id in blocks.iter().rev() {
            let slot = &mut self.slots[*id as usize];
            slot.references = slot.references.saturating_sub(1);
            if slot.references == 0 {
                self.enqueue(*id);
            }
        }
    }

    /// Forgets every cached prefix, as after a failed load of unknown extent.
    #[cfg(test)]
    pub(crate) fn cached_blocks(&self) -> usize {
        self.cached.len()
    }

    fn enqueue(&mut self, id: BlockId) {
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        self.slots[id as usize].free_stamp = Some(stamp);
        self.free.insert(stamp, id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_block_is_never_handed_out() {
        let mut pool = BlockPool::new(4);
        assert_eq!(pool.allocate(3), Some(vec![1, 2, 3]));
        assert_eq!(pool.allocate(1), None);
        assert_eq!(pool.used(), 3);
    }

    #[test]
    fn cached_prefix_is_found_until_evicted() {
        let tokens: Vec<Token> = (0..48).collect();
        let hashes = chain_hashes(&tokens, 16, "");
        let mut pool = BlockPool::new(6);
        let blocks = pool.allocate(3).unwrap();
        pool.publish(&blocks, &hashes);
        pool.release(&blocks);
        assert_eq!(pool.lookup(&hashes), blocks);
        assert_eq!(pool.idle_among(&blocks), 3);
        let taken = pool.allocate(3).unwrap();
        assert_eq!(taken, vec![4, 5, 3], "unused blocks go first, then the tail of the freed request");
        assert_eq!(pool.lookup(&hashes), blocks[..2]);
        assert_eq!(pool.cached_blocks(), 2);
    }

    #[test]
    fn shared_block_stays_until_the_last_reference() {
        let mut pool = BlockPool::new(3);
        let blocks = pool.allocate(1).unwrap();
        pool.touch(&blocks);
        pool.release(&blocks);
        assert_eq!(pool.used(), 1);
        pool.release(&blocks);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn chain_depends_on_every_earlier_token() {
        let mut tokens: Vec<Token> = (0..32).collect();
        let before = chain_hashes(&tokens, 16, "");
        tokens[0] = 99;
        let after = chain_hashes(&tokens, 16, "");
        assert_ne!(before[0], after[0]);
        assert_ne!(before[1], after[1]);
    }
}
