//! The model: KV content that depends on every earlier token, and next tokens that depend on KV.
//!
//! Everything is read back from memory before it is used, so wrong, stale or missing bytes change
//! the text. No state of a request lives here.

use kv_connector::regions::convert::{ShapeMismatch, regroup_and_permute, regroup_heads, tail_ranges};
use kv_connector::transport::{KvMemory, MemoryError};
use kv_connector::worker::{Received, ReceivedGroup};
use thiserror::Error;

use crate::blocks::BlockId;
use crate::geometry::Geometry;
use crate::tokens::Token;

const SEED: u64 = 0x6b76_6261_746f_6e21;

/// What a block cannot be read, written or rearranged for.
#[derive(Debug, Error)]
pub(crate) enum KvError {
    /// A block outside the memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A received block of another size.
    #[error(transparent)]
    Shape(#[from] ShapeMismatch),
}

/// The KV memory of one rank.
struct RankMemory {
    memory: KvMemory,
    bases: Vec<u64>,
}

/// One block in one region: the part of every rank.
type Parts = Vec<Vec<u8>>;

/// The KV memory of one engine, all ranks, with the model that works on it.
pub(crate) struct KvCache {
    ranks: Vec<RankMemory>,
    geometry: Geometry,
    /// Per head its rank and place there, as often as it is held.
    holders: Vec<Vec<(usize, usize)>>,
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
    /// A cache over the memory of each rank.
    pub(crate) fn new(memories: Vec<KvMemory>, geometry: Geometry) -> Self {
        let ranks = memories.into_iter().map(|memory| RankMemory { bases: memory.base_addresses(), memory });
        Self { ranks: ranks.collect(), holders: geometry.holders(), geometry }
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

    /// Extends a digest to `positions` by reading every region of every slot in between, from all
    /// ranks.
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
                let mut parts = self.read_block(region, *block)?;
                // The first chunk belongs to the first token, which every context reads.
                for byte in parts.iter_mut().flat_map(|part| part.iter_mut().take(self.geometry.chunk)) {
                    *byte = !*byte;
                }
                self.write_block(region, *block, &parts)?;
            }
        }
        Ok(())
    }

    /// Brings the blocks that a rank has received into its own order and zeroes what was not covered.
    ///
    /// # Errors
    /// A block outside the memory or of another size.
    pub(crate) fn finish_received(&self, rank: usize, received: &Received) -> Result<(), KvError> {
        let Some(rank) = self.ranks.get(rank) else { return Ok(()) };
        for (region, blocks) in received.zero_by_region.iter().enumerate() {
            for block in blocks {
                let zeroes = vec![0; self.geometry.block_bytes()];
                rank.memory.write(self.address(rank, region, *block), &zeroes)?;
            }
        }
        for group in &received.groups {
            for region in 0..self.geometry.regions {
                self.convert_region(rank, region, group)?;
            }
        }
        Ok(())
    }

    fn convert_region(&self, rank: &RankMemory, region: usize, group: &ReceivedGroup) -> Result<(), KvError> {
        let shape = self.geometry.shape();
        let ratio = usize::try_from(group.block_size_ratio.max(1)).unwrap_or(usize::MAX);
        let mut covered = group.covered_sub_blocks;
        for block in &group.blocks {
            let pieces = covered.min(ratio);
            covered -= pieces;
            let address = self.address(rank, region, *block);
            let mut bytes = rank.memory.read(address, self.geometry.block_bytes() as u64)?;
            if group.permute {
                regroup_and_permute(&mut bytes, shape, ratio)?;
            } else if group.regroup {
                regroup_heads(&mut bytes, shape, ratio)?;
            }
            let tokens = pieces * self.geometry.block_size / ratio;
            for range in tail_ranges(shape, self.geometry.is_head_major(), tokens) {
                bytes[range].fill(0);
            }
            rank.memory.write(address, &bytes)?;
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
        for (region, parts) in contents.iter().enumerate() {
            self.write_block(region, block, parts)?;
        }
        Ok(())
    }

    fn fill_slot(&self, parts: &mut Parts, slot: usize, hidden: u64) {
        for (head, holders) in self.holders.iter().enumerate() {
            for (rank, index) in holders {
                let mut state = fold(hidden, head as u64);
                for piece in parts[*rank][self.geometry.chunk_range(*index, slot)].chunks_mut(8) {
                    state = mix(state);
                    let bytes = state.to_le_bytes();
                    piece.copy_from_slice(&bytes[..piece.len()]);
                }
            }
        }
    }

    /// What all heads hold for a token, in the model's order. Copies of a head add nothing as long
    /// as they are equal.
    fn slot_digest(&self, parts: &Parts, slot: usize) -> u64 {
        let mut digest = SEED;
        for holders in &self.holders {
            let mut chunks =
                holders.iter().map(|(rank, index)| &parts[*rank][self.geometry.chunk_range(*index, slot)]);
            let Some(first) = chunks.next() else { continue };
            digest = absorb(digest, first);
            for copy in chunks.filter(|copy| *copy != first) {
                digest = absorb(digest, copy);
            }
        }
        digest
    }

    fn read_block(&self, region: usize, block: BlockId) -> Result<Parts, MemoryError> {
        let len = self.geometry.block_bytes() as u64;
        self.ranks
            .iter()
            .map(|rank| rank.memory.read(self.address(rank, region, u64::from(block)), len))
            .collect()
    }

    fn write_block(&self, region: usize, block: BlockId, parts: &Parts) -> Result<(), MemoryError> {
        for (rank, part) in self.ranks.iter().zip(parts) {
            rank.memory.write(self.address(rank, region, u64::from(block)), part)?;
        }
        Ok(())
    }

    fn address(&self, rank: &RankMemory, region: usize, block: u64) -> u64 {
        rank.bases[region] + block * self.geometry.block_bytes() as u64
    }
}

fn absorb(mut digest: u64, chunk: &[u8]) -> u64 {
    for piece in chunk.chunks(8) {
        let mut lane = [0; 8];
        lane[..piece.len()].copy_from_slice(piece);
        digest = (digest ^ u64::from_le_bytes(lane)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
    digest
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
mod tests;
