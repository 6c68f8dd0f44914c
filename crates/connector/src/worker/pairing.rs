//! Which blocks are read from which remote rank; moves nothing.

use crate::error::EngineFatal;
use crate::protocol::params::Generation;
use crate::regions::{
    DescriptorIndex, IdError, PairError, PairedBlocks, PeerGeometry, RegionPairing, block_ids_by_region,
    expand_groups, pair_block_ids, pair_by_region, split_into_remote_blocks,
};
use crate::scheduler::RecvRequest;
use crate::topology::{DcpPair, dcp_pair};
use crate::transport::{Transport, TransportError};

use super::Worker;

/// The blocks of one remote rank and the local blocks they go into, equally many.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct RankBlocks {
    pub(super) local: Vec<Vec<u64>>,
    pub(super) remote: Vec<Vec<u64>>,
    /// Lists per region instead of per cache group.
    pub(super) by_region: bool,
}

impl RankBlocks {
    pub(super) fn is_empty(&self) -> bool {
        self.local.iter().all(Vec::is_empty)
    }

    pub(super) fn descriptor_ids(
        &self,
        local: &DescriptorIndex,
        remote: &DescriptorIndex,
    ) -> Result<(Vec<u64>, Vec<u64>), TransportError> {
        let ids = |index: &DescriptorIndex, blocks: &[Vec<u64>]| match self.by_region {
            true => index.ids_by_region(blocks),
            false => index.ids(blocks),
        };
        let local = ids(local, &self.local).map_err(index_error)?;
        let remote = ids(remote, &self.remote).map_err(index_error)?;
        if local.len() == remote.len() { Ok((local, remote)) } else { Err(TransportError::Mismatch) }
    }
}

fn index_error(error: IdError) -> TransportError {
    match error {
        IdError::OutOfRange { id, len } => TransportError::IndexOutOfRange { index: id, len },
        _ => TransportError::Mismatch,
    }
}

/// All reads of one receive.
#[derive(Debug, Default)]
pub(super) struct ReadPlan {
    pub(super) ranks: Vec<(u32, RankBlocks)>,
    /// Remote blocks per cache group that reach the local ones.
    pub(super) covered: Vec<usize>,
    pub(super) zero_by_region: Vec<Vec<u64>>,
}

pub(super) fn pairing_error(request: &str, error: PairError) -> EngineFatal {
    let request = request.to_owned();
    match error {
        PairError::ListCount { local, remote } => EngineFatal::GroupCountMismatch { request, local, remote },
        PairError::TooFewRemote { list, decode, prefill } => {
            EngineFatal::RemoteBlocksTooFew { request, group: list, local: decode, remote: prefill }
        }
        error => EngineFatal::UnpairedBlocks { request, error },
    }
}

impl<T: Transport> Worker<T> {
    pub(super) fn plan_read(
        &self,
        request: &str,
        recv: &RecvRequest,
        peer: &PeerGeometry,
    ) -> Result<ReadPlan, EngineFatal> {
        let remote = &recv.remote.block_ids;
        if recv.local_block_ids.iter().all(Vec::is_empty) {
            let ranks = peer.mapping.source_ranks.iter().map(|rank| (*rank, RankBlocks::default()));
            return Ok(ReadPlan { ranks: ranks.collect(), ..ReadPlan::default() });
        }
        if remote.total() > 0 && remote.is_flat() != (self.config.generation == Generation::V2) {
            return Err(EngineFatal::BlockIdShape { request: request.to_owned() });
        }
        let (local, groups) = (recv.local_block_ids.len(), self.geometry.groups.len());
        for lists in [local, remote.groups().len()] {
            if lists != groups {
                let (request, remote) = (request.to_owned(), remote.groups().len());
                return Err(EngineFatal::GroupCountMismatch { request, local, remote });
            }
        }
        if peer.differs_in_groups {
            return self.plan_by_region(request, recv, peer);
        }
        let mut ranks = Vec::new();
        for &rank in &peer.mapping.source_ranks {
            let blocks = self.pair_groups(recv, peer, rank).map_err(|error| pairing_error(request, error))?;
            ranks.push((rank, blocks));
        }
        let mut remote =
            expand_groups(&self.geometry.groups, remote.groups(), peer.topology.blocks_per_logical);
        if peer.block_size_ratio > 1 && !self.context_parallel(peer) {
            self.skip_cached(recv, peer, &mut remote);
        }
        Ok(ReadPlan { ranks, covered: remote.iter().map(Vec::len).collect(), zero_by_region: Vec::new() })
    }

    fn context_parallel(&self, peer: &PeerGeometry) -> bool {
        self.geometry.topology.sizes.dcp > 1 || peer.topology.sizes.dcp > 1
    }

    fn pair_groups(
        &self,
        recv: &RecvRequest,
        peer: &PeerGeometry,
        rank: u32,
    ) -> Result<RankBlocks, PairError> {
        let kinds = &self.geometry.groups;
        let of_rank = |lists: &[Vec<u64>]| -> Vec<Vec<u64>> {
            let of_group = |(group, ids): (usize, &Vec<u64>)| {
                if peer.mapping.reads(group, rank) { ids.clone() } else { Vec::new() }
            };
            lists.iter().enumerate().map(of_group).collect()
        };
        let (mut local, mut remote) =
            (of_rank(&recv.local_block_ids), of_rank(recv.remote.block_ids.groups()));
        let context_parallel = self.context_parallel(peer);
        if context_parallel {
            let attention = kinds.iter().enumerate().filter(|(_, kind)| !kind.is_state());
            for (group, _) in attention {
                if local[group].is_empty() {
                    continue;
                }
                let cached_blocks = recv.local_cached_blocks.get(group).copied().unwrap_or(0);
                let pair = self.dcp_pair(peer, rank, cached_blocks);
                (local[group], remote[group]) = dcp_pair(pair, &local[group], &remote[group])?;
            }
        }
        local = expand_groups(kinds, &local, self.geometry.blocks_per_logical);
        remote = expand_groups(kinds, &remote, peer.topology.blocks_per_logical);
        if peer.block_size_ratio > 1 {
            if !context_parallel {
                self.skip_cached(recv, peer, &mut remote);
            }
            match split_into_remote_blocks(kinds, &local, &remote, peer.block_size_ratio) {
                Some(pieces) => local = pieces,
                None => return Ok(RankBlocks::default()),
            }
        }
        if local.iter().all(Vec::is_empty) {
            return Ok(RankBlocks::default());
        }
        let mut paired = PairedBlocks { decode: local, prefill: remote };
        if !context_parallel {
            let per_logical = (self.geometry.blocks_per_logical, peer.topology.blocks_per_logical);
            paired = pair_block_ids(kinds, paired, per_logical.0, per_logical.1)?;
        }
        Ok(RankBlocks { local: paired.decode, remote: paired.prefill, by_region: false })
    }

    /// Drops the remote blocks that lie in cached local ones. The remote tail does not tell: it may
    /// end within a local block.
    fn skip_cached(&self, recv: &RecvRequest, peer: &PeerGeometry, remote: &mut [Vec<u64>]) {
        let pieces = self.geometry.blocks_per_logical.saturating_mul(peer.block_size_ratio);
        let pieces = usize::try_from(pieces).unwrap_or(usize::MAX);
        for (group, (kind, ids)) in self.geometry.groups.iter().zip(remote).enumerate() {
            let cached = recv.local_cached_blocks.get(group).copied().unwrap_or(0).saturating_mul(pieces);
            if !kind.is_state() && cached < ids.len() {
                ids.drain(..cached);
            }
        }
    }

    fn dcp_pair(&self, peer: &PeerGeometry, rank: u32, cached_blocks: usize) -> DcpPair {
        let topology = &self.geometry.topology;
        DcpPair {
            local_size: topology.sizes.dcp,
            local_rank: topology.dcp_rank(),
            remote_size: peer.topology.sizes.dcp,
            remote_rank: rank,
            cached_blocks,
            total_blocks: None,
        }
    }

    /// Both sides divide the layers into cache groups differently, so lists go by region.
    fn plan_by_region(
        &self,
        request: &str,
        recv: &RecvRequest,
        peer: &PeerGeometry,
    ) -> Result<ReadPlan, EngineFatal> {
        let local = &self.geometry;
        let unsupported = || EngineFatal::UnsupportedRegions { request: request.to_owned() };
        if !local.topology.is_mla || local.has_states() || local.block_size != peer.topology.block_size {
            return Err(unsupported());
        }
        let pair_error = |error| pairing_error(request, error);
        let local_groups: Vec<i64> = local.regions.iter().map(|region| region.group).collect();
        let remote_groups: Vec<i64> = peer.regions.iter().map(|region| region.group).collect();
        let expand = |ids: &[Vec<u64>], per_logical| expand_groups(&local.groups, ids, per_logical);
        let decode = expand(&recv.local_block_ids, local.blocks_per_logical);
        let prefill = expand(recv.remote.block_ids.groups(), peer.topology.blocks_per_logical);
        let decode = block_ids_by_region(&decode, &local_groups).map_err(pair_error)?;
        let prefill = block_ids_by_region(&prefill, &remote_groups).map_err(pair_error)?;
        let known = self.known_prefix(recv, peer, &local_groups, &remote_groups);
        let unequal = peer.topology.blocks_per_logical != local.blocks_per_logical;
        if known.is_none() && (self.context_parallel(peer) || unequal) {
            return Err(unsupported());
        }
        let mut plan = ReadPlan::default();
        let mut covered = vec![0; decode.len()];
        for &rank in &peer.mapping.source_ranks {
            let pairing = RegionPairing {
                known: known.as_ref().map(|(cached, total)| (cached.as_slice(), *total)),
                local_dcp: local.topology.sizes.dcp,
                local_dcp_rank: local.topology.dcp_rank(),
                remote_dcp: peer.topology.sizes.dcp,
                remote_rank: rank,
            };
            let paired = pair_by_region(pairing, &decode, &prefill).map_err(pair_error)?;
            for (covered, list) in covered.iter_mut().zip(&paired.decode) {
                *covered += list.len();
            }
            plan.ranks
                .push((rank, RankBlocks { local: paired.decode, remote: paired.prefill, by_region: true }));
        }
        plan.zero_by_region = decode
            .iter()
            .zip(covered)
            .map(|(blocks, covered)| blocks.iter().skip(covered).copied().collect())
            .collect();
        Ok(plan)
    }

    /// Cached kernel blocks per region and kernel blocks of the whole context, when all is known.
    fn known_prefix(
        &self,
        recv: &RecvRequest,
        peer: &PeerGeometry,
        local_groups: &[i64],
        remote_groups: &[i64],
    ) -> Option<(Vec<usize>, usize)> {
        let tokens = usize::try_from(recv.remote.num_tokens?).ok()?;
        let block_size = usize::try_from(peer.topology.block_size.max(1)).ok()?;
        let per_logical = usize::try_from(self.geometry.blocks_per_logical).ok()?;
        if remote_groups.iter().any(|group| *group < 0) {
            return None;
        }
        let cached = local_groups.iter().map(|group| {
            let group = usize::try_from(*group).ok()?;
            recv.local_cached_blocks.get(group)?.checked_mul(per_logical)
        });
        Some((cached.collect::<Option<Vec<usize>>>()?, tokens.div_ceil(block_size)))
    }
}
