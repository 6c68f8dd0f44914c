//! Which remote ranks hold what a local rank needs, and which slice of it.

use std::collections::{BTreeMap, BTreeSet};

use super::{ParallelSizes, TopologyError, consumers, dcp_source_ranks, tp_ratio};

/// What the layers of a cache group store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Keys and values, or a latent, per token.
    Attention,
    /// A circular attention buffer that lives in regions of its own.
    Scratch,
    /// Convolution and temporal state per sequence.
    Ssm,
    /// State pages of per-layer embeddings, equal on all ranks.
    Ple,
}

impl GroupKind {
    /// True for groups of state, whose blocks are neither split nor expanded.
    pub fn is_state(self) -> bool {
        matches!(self, Self::Ssm | Self::Ple)
    }
}

/// A worker's ranks and sizes in its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerRanks {
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Prefill-context-parallel rank.
    pub pcp_rank: u32,
    /// Prefill-context-parallel size.
    pub pcp_size: u32,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
}

/// A worker's place among the workers that transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferRank {
    /// Transfer rank.
    pub rank: u32,
    /// Transfer size.
    pub size: u32,
    /// False for the copies of a replicated prefill context: they serve nothing.
    pub participates: bool,
}

/// The rank and size a worker has in transfers.
pub fn transfer_rank(worker: WorkerRanks) -> TransferRank {
    if worker.pcp_size > 1 && worker.dcp_size > 1 {
        return TransferRank { rank: worker.pcp_rank, size: worker.pcp_size, participates: true };
    }
    let participates = worker.pcp_size <= 1 || worker.pcp_rank == 0;
    TransferRank { rank: worker.tp_rank, size: worker.tp_size, participates }
}

/// The sizes a scheduler announces in its transfer parameters.
pub fn advertised_sizes(tp: u32, dcp: u32) -> ParallelSizes {
    ParallelSizes { tp: tp.max(dcp), dcp }
}

/// The local rank's place, as far as peers matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalTopology {
    /// Transfer rank.
    pub rank: u32,
    /// Transfer sizes.
    pub sizes: ParallelSizes,
    /// Prefill-context-parallel size.
    pub pcp: u32,
    /// KV heads of the model over all ranks; 1 with multi-head latent attention.
    pub total_kv_heads: u32,
    /// Whether the model caches one latent instead of heads.
    pub is_mla: bool,
}

impl LocalTopology {
    /// One rank of a tensor-parallel engine.
    pub fn new(rank: u32, tp: u32, total_kv_heads: u32) -> Self {
        Self { rank, sizes: ParallelSizes::tp(tp), pcp: 1, total_kv_heads, is_mla: false }
    }

    /// One rank of a tensor-parallel engine whose cache is a latent, equal on all ranks.
    pub fn mla(rank: u32, tp: u32) -> Self {
        Self { rank, sizes: ParallelSizes::tp(tp), pcp: 1, total_kv_heads: 1, is_mla: true }
    }

    /// Heads stored by one rank of `tp`.
    pub fn heads_per_rank(&self, tp: u32) -> u32 {
        (self.total_kv_heads / tp.max(1)).max(1)
    }

    /// Whether ranks of `tp` share heads because there are more ranks than heads.
    pub fn shares_heads(&self, tp: u32) -> bool {
        tp > self.total_kv_heads
    }

    /// Whether ranks of `tp` hold equal caches, by latent attention or shared heads.
    pub fn replicates(&self, tp: u32) -> bool {
        self.is_mla || self.shares_heads(tp)
    }

    /// Which interleaved share of the context the rank keeps.
    pub fn dcp_rank(&self) -> u32 {
        self.rank % self.sizes.dcp.max(1)
    }

    /// Head that remote rank `rank` of `tp` begins with.
    fn head_of(&self, rank: u32, tp: u32) -> u64 {
        u64::from(rank) * u64::from(self.total_kv_heads) / u64::from(tp.max(1))
    }

    /// The mapping onto an engine of the given sizes.
    ///
    /// # Errors
    /// Sizes that do not divide one another or are out of range.
    pub fn tp_mapping(
        &self,
        remote: ParallelSizes,
        groups: &[GroupKind],
    ) -> Result<TpMapping, TopologyError> {
        self.sizes.check()?;
        remote.check()?;
        let ratio = tp_ratio(self.sizes.tp, remote.tp)?;
        let attention_ranks = self.attention_ranks(remote, ratio);
        let state_ranks = if ratio < 0 { self.window(ratio) } else { attention_ranks.clone() };
        let has_state = groups.iter().any(|group| group.is_state());
        let mut union: BTreeSet<u32> = attention_ranks.iter().copied().collect();
        if has_state {
            union.extend(&state_ranks);
        }
        let slot_of_head: BTreeMap<u64, u32> =
            (0..).zip(&attention_ranks).map(|(slot, rank)| (self.head_of(*rank, remote.tp), slot)).collect();
        let slot = |rank: u32| slot_of_head.get(&self.head_of(rank, remote.tp)).copied().unwrap_or(0);
        Ok(TpMapping {
            tp_ratio: ratio,
            attention_slots: union.iter().map(|rank| (*rank, slot(*rank))).collect(),
            source_ranks: union.into_iter().collect(),
            source_ranks_per_group: groups
                .iter()
                .map(|group| if group.is_state() { state_ranks.clone() } else { attention_ranks.clone() })
                .collect(),
            rank_offset_factor: self.rank_offset_factor(remote.tp, ratio, &attention_ranks),
            local_consumers: consumers(self.sizes, remote)?,
            state_ranks: if has_state { state_ranks } else { Vec::new() },
            attention_ranks,
        })
    }

    /// The remote ranks of the local rank's window when the remote side has more ranks.
    fn window(&self, ratio: i64) -> Vec<u32> {
        let width = u32::try_from(ratio.unsigned_abs()).unwrap_or(u32::MAX);
        let first = self.rank.saturating_mul(width);
        (first..first.saturating_add(width)).collect()
    }

    fn attention_ranks(&self, remote: ParallelSizes, ratio: i64) -> Vec<u32> {
        if self.is_mla && remote.dcp > 1 {
            return dcp_source_ranks(self.rank, self.sizes, remote);
        }
        if self.is_mla || ratio > 0 {
            let rank = u64::from(self.rank) * u64::from(remote.tp) / u64::from(self.sizes.tp.max(1));
            return vec![u32::try_from(rank).unwrap_or(u32::MAX)];
        }
        // Ranks that share a head hold the same bytes: the first of them is enough.
        let mut ranks = self.window(ratio);
        ranks.dedup_by_key(|rank| self.head_of(*rank, remote.tp));
        ranks
    }

    fn rank_offset_factor(&self, remote_tp: u32, ratio: i64, attention_ranks: &[u32]) -> u64 {
        let local_tp = self.sizes.tp;
        if self.is_mla || local_tp <= remote_tp {
            return 0;
        }
        if self.shares_heads(local_tp) {
            let first = attention_ranks.first().copied().unwrap_or(0);
            return self.head_of(self.rank, local_tp).saturating_sub(self.head_of(first, remote_tp));
        }
        u64::from(self.rank) % ratio.unsigned_abs().max(1)
    }
}

/// The mapping of one local rank onto one remote engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TpMapping {
    /// Local over remote transfer size, negative when the remote side is larger.
    pub tp_ratio: i64,
    /// Remote ranks that attention is read from, one per head slice.
    pub attention_ranks: Vec<u32>,
    /// Remote ranks that state is read from; empty without groups of state.
    pub state_ranks: Vec<u32>,
    /// All remote ranks that are read from, ascending.
    pub source_ranks: Vec<u32>,
    /// Remote ranks per cache group.
    pub source_ranks_per_group: Vec<Vec<u32>>,
    /// Which attention slice each source rank holds.
    pub attention_slots: BTreeMap<u32, u32>,
    /// Which slice of the remote block the local rank reads, when the local side is larger.
    pub rank_offset_factor: u64,
    /// How many local ranks read from one remote rank; goes into notifications.
    pub local_consumers: u32,
}

impl TpMapping {
    /// Whether local blocks are written in slices, one per source rank.
    pub fn needs_split(&self, is_mla: bool) -> bool {
        self.tp_ratio < 0 && (!is_mla || self.source_ranks.len() > 1)
    }

    /// Whether group `group` is read from `rank`.
    pub fn reads(&self, group: usize, rank: u32) -> bool {
        self.source_ranks_per_group.get(group).is_some_and(|ranks| ranks.contains(&rank))
    }
}
