//! Where the KV bytes of every rank lie: heads over ranks, then regions, blocks, heads and tokens.
//!
//! Pure arithmetic; the same content has the same logical heads in every topology.

use std::ops::Range;

use kv_connector::protocol::Generation;
use kv_connector::regions::Layout;
use kv_connector::regions::convert::BlockShape;

use crate::config::{Attention, EngineConfig};

/// The KV memory of one engine; all its ranks are shaped alike.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) ranks: usize,
    pub(crate) regions: usize,
    pub(crate) blocks: usize,
    pub(crate) block_size: usize,
    /// Heads of the model, of which every rank holds a slice; 1 for a latent.
    heads: usize,
    /// Bytes of one head and token in one region.
    pub(crate) chunk: usize,
    head_major: bool,
}

impl Geometry {
    /// v14 packs K and V of a layer into one region; v2 has a region for each. A latent is neither.
    pub(crate) fn of(config: &EngineConfig) -> Self {
        let row = config.head_dim * config.dtype;
        let (regions, chunk) = match (config.attention, config.generation) {
            (Attention::Mla, _) => (config.layers, row),
            (Attention::Full, Generation::V14) => (config.layers, 2 * row),
            (Attention::Full, Generation::V2) => (2 * config.layers, row),
        };
        Self {
            ranks: config.tp_size as usize,
            regions,
            blocks: config.num_blocks,
            block_size: config.block_size,
            heads: config.total_kv_heads(),
            chunk,
            head_major: matches!(config.layout(), Layout::Lbhnc | Layout::Hnd),
        }
    }

    /// Heads that one rank holds; ranks share heads when there are too few.
    fn heads_per_rank(&self) -> usize {
        (self.heads / self.ranks).max(1)
    }

    /// Per head of the model, who holds it: rank and place among the rank's heads.
    pub(crate) fn holders(&self) -> Vec<Vec<(usize, usize)>> {
        let mut holders = vec![Vec::new(); self.heads];
        for rank in 0..self.ranks {
            let first = rank * self.heads / self.ranks;
            for index in 0..self.heads_per_rank() {
                holders[first + index].push((rank, index));
            }
        }
        holders
    }

    /// A rank's part of one block in one region.
    pub(crate) fn shape(&self) -> BlockShape {
        BlockShape { heads: self.heads_per_rank(), tokens: self.block_size, content_bytes: self.chunk }
    }

    /// Whether the tokens of a head follow one another.
    pub(crate) fn is_head_major(&self) -> bool {
        self.head_major
    }

    /// Bytes of a rank's part of one block in one region.
    pub(crate) fn block_bytes(&self) -> usize {
        self.heads_per_rank() * self.block_size * self.chunk
    }

    /// Bytes of one region of a rank.
    pub(crate) fn region_bytes(&self) -> usize {
        self.blocks * self.block_bytes()
    }

    /// Where a rank's head and token lie in its part of a block.
    pub(crate) fn chunk_range(&self, index: usize, slot: usize) -> Range<usize> {
        let chunk = match self.head_major {
            true => index * self.block_size + slot,
            false => slot * self.heads_per_rank() + index,
        };
        let start = chunk * self.chunk;
        start..start + self.chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(tp_size: u32, kv_heads: usize) -> Geometry {
        Geometry::of(&EngineConfig { tp_size, kv_heads, ..EngineConfig::default() })
    }

    #[test]
    fn heads_are_dealt_out_in_runs() {
        let geometry = geometry(2, 4);
        assert_eq!(geometry.holders(), [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]);
        assert_eq!(geometry.shape().heads, 2);
    }

    #[test]
    fn too_few_heads_are_held_several_times() {
        assert_eq!(geometry(4, 2).holders(), [[(0, 0), (1, 0)], [(2, 0), (3, 0)]]);
        let latent = EngineConfig { tp_size: 2, attention: Attention::Mla, ..EngineConfig::default() };
        assert_eq!(Geometry::of(&latent).holders(), [[(0, 0), (1, 0)]]);
    }
}
