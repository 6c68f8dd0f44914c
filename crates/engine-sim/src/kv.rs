//! The model: KV content that depends on every earlier token, and next tokens that depend on KV.
//!
//! Everything is read back from memory before it is used, so wrong, stale or missing bytes change
//! the text. No state of a request lives here.

use kv_connector::protocol::Generation;
use kv_connector::transport::{KvMemory, MemoryError};

use crate::blocks::BlockId;
use crate::config::EngineConfig;
use crate::tokens::Token;

const SEED: u64 = 0x6b76_6261_746f_6e21;

/// How KV bytes lie in memory: per region, block by block, head by head, token by token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) regions: usize,
    pub(crate) blocks: usize,
    pub(crate) block_size: usize,
    heads: usize,
    /// Bytes of one head and token in one region.
    chunk: usize,
}

impl Geometry {
    /// v14 packs K and V of a layer into one region; v2 has a region for each.
    pub(crate) fn of(config: &EngineConfig) -> Self {
        let row = config.head_dim * config.dtype;
        let (regions, chunk) = match config.generation {
            Generation::V14 => (config.layers, 2 * row),
            Generation::V2 => (2 * config.layers, row),
        };
        Self {
            regions,
            blocks: config.num_blocks,
            block_size: config.block_size,
            heads: config.kv_heads,
            chunk,
        }
    }

    pub(crate) fn block_bytes(&self) -> usize {
        self.heads * self.block_size * self.chunk
    }

    pub(crate) fn region_bytes(&self) -> usize {
        self.blocks * self.block_bytes()
    }

    fn chunk_range(&self, head: usize, slot: usize) -> std::ops::Range<usize> {
        let start = (head * self.block_size + slot) * self.chunk;
        start..start + self.chunk
    }
}

/// The KV memory of one engine with the model that works on it.
pub(crate) struct KvCache {
    memory: KvMemory,
    bases: Vec<u64>,
    geometry: Geometry,
}

/// What the model has read of a request's context so far: a digest and the position it covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContextDigest {
    pub(crate) positions: usize,
    value: u64,
}

impl Default for ContextDigest {
    fn default() -> Self {
        Self { positions: 0, value: SEED }
    }
}

impl ContextDigest {
    /// The random bits that choose the next token; `noise` tells sampled sequences apart.
    pub(crate) fn entropy(self, noise: u64) -> u64 {
        mix(self.value ^ mix(noise))
    }
}

impl KvCache {
    pub(crate) fn new(memory: KvMemory, geometry: Geometry) -> Self {
        Self { bases: memory.base_addresses(), memory, geometry }
    }

    /// Computes the KV of `tokens`, which start at `position`, reading what came before.
    ///
    /// # Errors
    /// A block outside the memory.
    pub(crate) fn compute(
        &self,
        blocks: &[BlockId],
        position: usize,
        tokens: &[Token],
    ) -> Result<(), MemoryError> {
        let size = self.geometry.block_size;
        let mut previous = vec![SEED; self.geometry.regions];
        if let Some(before) = position.checked_sub(1) {
            for (region, digest) in previous.iter_mut().enumerate() {
                let bytes = self.read_block(region, blocks[before / size])?;
                *digest = self.slot_digest(&bytes, before % size);
            }
        }
        let end = position + tokens.len();
        let mut start = position;
        while start < end {
            let stop = end.min((start / size + 1) * size);
            let slots = &tokens[start - position..stop - position];
            self.compute_block(blocks[start / size], start, slots, &mut previous)?;
            start = stop;
        }
        Ok(())
    }

    /// Extends a digest to `positions` by reading every region of every slot in between.
    ///
    /// # Errors
    /// A block outside the memory.
    pub(crate) fn read_context(
        &self,
        blocks: &[BlockId],
        mut digest: ContextDigest,
        positions: usize,
    ) -> Result<ContextDigest, MemoryError> {
        let size = self.geometry.block_size;
        while digest.positions < positions {
            let stop = positions.min((digest.positions / size + 1) * size);
            let block = blocks[digest.positions / size];
            let contents = (0..self.geometry.regions)
                .map(|region| self.read_block(region, block))
                .collect::<Result<Vec<_>, _>>()?;
            for position in digest.positions..stop {
                for bytes in &contents {
                    digest.value = fold(digest.value, self.slot_digest(bytes, position % size));
                }
            }
            digest.positions = stop;
        }
        Ok(digest)
    }

    /// Inverts bytes in the middle of each block.
    ///
    /// # Errors
    /// A block outside the memory.
    pub(crate) fn corrupt(&self, blocks: &[BlockId]) -> Result<(), MemoryError> {
        for block in blocks {
            for region in 0..self.geometry.regions {
                let mut bytes = self.read_block(region, *block)?;
                // The first chunk belongs to the first token, which every context reads.
                for byte in bytes.iter_mut().take(self.geometry.chunk) {
                    *byte = !*byte;
                }
                self.memory.write(self.block_address(region, *block), &bytes)?;
            }
        }
        Ok(())
    }

    fn compute_block(
        &self,
        block: BlockId,
        start: usize,
        tokens: &[Token],
        previous: &mut [u64],
    ) -> Result<(), MemoryError> {
        let size = self.geometry.block_size;
        let mut contents = (0..self.geometry.regions)
            .map(|region| self.read_block(region, block))
            .collect::<Result<Vec<_>, _>>()?;
        for (offset, token) in tokens.iter().enumerate() {
            let position = start + offset;
            let mut below = u64::from(*token);
            for (region, bytes) in contents.iter_mut().enumerate() {
                let hidden = fold(fold(previous[region] ^ region as u64, position as u64), below);
                self.fill_slot(bytes, position % size, hidden);
                previous[region] = self.slot_digest(bytes, position % size);
                below = hidden;
            }
        }
        for (region, bytes) in contents.iter().enumerate() {
            self.memory.write(self.block_address(region, block), bytes)?;
        }
        Ok(())
    }

    fn fill_slot(&self, block: &mut [u8], slot: usize, hidden: u64) {
        for head in 0..self.geometry.heads {
            let mut state = fold(hidden, head as u64);
            for piece in block[self.geometry.chunk_range(head, slot)].chunks_mut(8) {
                state = mix(state);
                let bytes = state.to_le_bytes();
                piece.copy_from_slice(&bytes[..piece.len()]);
            }
        }
    }

    fn slot_digest(&self, block: &[u8], slot: usize) -> u64 {
        let mut digest = SEED;
        for head in 0..self.geometry.heads {
            for piece in block[self.geometry.chunk_range(head, slot)].chunks(8) {
                let mut lane = [0; 8];
                lane[..piece.len()].copy_from_slice(piece);
                digest =
                    (digest ^ u64::from_le_bytes(lane)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
            }
        }
        digest
    }

    fn read_block(&self, region: usize, block: BlockId) -> Result<Vec<u8>, MemoryError> {
        self.memory.read(self.block_address(region, block), self.geometry.block_bytes() as u64)
    }

    fn block_address(&self, region: usize, block: BlockId) -> u64 {
        self.bases[region] + u64::from(block) * self.geometry.block_bytes() as u64
    }
}

fn fold(state: u64, value: u64) -> u64 {
    mix(state.rotate_left(23) ^ value.wrapping_mul(0xd6e8_feb8_6659_fd93))
}

/// The finaliser of splitmix64.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache() -> KvCache {
        let config = EngineConfig { num_blocks: 16, block_size: 4, ..EngineConfig::default() };
        let geometry = Geometry::of(&config);
        KvCache::new(KvMemory::allocate(&vec![geometry.region_bytes(); geometry.regions]), geometry)
    }

    fn digest(cache: &KvCache, blocks: &[BlockId], positions: usize) -> u64 {
        cache.read_context(blocks, ContextDigest::default(), positions).unwrap().entropy(0)
    }

    #[test]
    fn content_does_not_depend_on_where_or_in_how_many_pieces() {
        let cache = cache();
        let tokens: Vec<Token> = (10..20).collect();
        cache.compute(&[1, 2, 3], 0, &tokens).unwrap();
        cache.compute(&[7, 5, 9], 0, &tokens[..3]).unwrap();
        cache.compute(&[7, 5, 9], 3, &tokens[3..6]).unwrap();
        cache.compute(&[7, 5, 9], 6, &tokens[6..]).unwrap();
        assert_eq!(digest(&cache, &[1, 2, 3], 10), digest(&cache, &[7, 5, 9], 10));
    }

    #[test]
    fn reading_in_steps_equals_reading_at_once() {
        let cache = cache();
        cache.compute(&[1, 2, 3], 0, &[1; 11]).unwrap();
        let part = cache.read_context(&[1, 2, 3], ContextDigest::default(), 5).unwrap();
        let all = cache.read_context(&[1, 2, 3], part, 11).unwrap();
        assert_eq!(all, cache.read_context(&[1, 2, 3], ContextDigest::default(), 11).unwrap());
    }

    #[test]
    fn every_byte_of_the_context_matters() {
        let cache = cache();
        cache.compute(&[1, 2], 0, &[5; 8]).unwrap();
        let clean = digest(&cache, &[1, 2], 8);
        for region in 0..cache.geometry.regions {
            for block in [1, 2] {
                for index in 0..cache.geometry.block_bytes() {
                    let address = cache.block_address(region, block) + index as u64;
                    let byte = cache.memory.read(address, 1).unwrap()[0];
                    cache.memory.write(address, &[byte ^ 1]).unwrap();
                    assert_ne!(
                        digest(&cache, &[1, 2], 8),
                        clean,
                        "region {region} block {block} byte {index}"
                    );
                    cache.memory.write(address, &[byte]).unwrap();
                }
            }
        }
    }

    #[test]
    fn stale_predecessor_spoils_what_is_computed_after_it() {
        let cache = cache();
        cache.compute(&[1, 2], 0, &[5, 5, 5, 5, 6, 6, 6, 6]).unwrap();
        let clean = cache.read_block(0, 2).unwrap();
        let stale = vec![0x55; cache.geometry.block_bytes()];
        cache.memory.write(cache.block_address(0, 1), &stale).unwrap();
        cache.compute(&[1, 2], 4, &[6; 4]).unwrap();
        assert_ne!(clean, cache.read_block(0, 2).unwrap());
    }
}
