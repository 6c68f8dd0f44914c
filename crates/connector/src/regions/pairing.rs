//! Which remote block goes into which local one.
//!
//! The decode side holds only blocks it has not computed, the prefill side the whole sequence.

use thiserror::Error;

use crate::topology::{DcpPair, DcpUncovered, ErrorKind, GroupKind, dcp_pair};

use super::SHARED_GROUP;

/// Block lists that do not fit one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PairError {
    /// Different numbers of lists.
    #[error("{local} local block lists, {remote} remote ones")]
    ListCount {
        /// Local lists.
        local: usize,
        /// Remote lists.
        remote: usize,
    },
    /// The decode side has more blocks to fill than the prefill side offers.
    #[error("list {list}: {decode} decode blocks, {prefill} prefill blocks")]
    TooFewRemote {
        /// Index of the cache group.
        list: usize,
        /// Decode blocks.
        decode: usize,
        /// Prefill blocks.
        prefill: usize,
    },
    /// As above for lists per region.
    #[error("region {region}: {decode} decode blocks, {prefill} prefill blocks")]
    RegionUncovered {
        /// Region index.
        region: usize,
        /// Decode blocks.
        decode: usize,
        /// Prefill blocks.
        prefill: usize,
    },
    /// More slots of state than the prefill side can fill.
    #[error("group {group}: {decode} decode slots of state, {prefill} prefill slots")]
    StateSlots {
        /// Cache group.
        group: usize,
        /// Decode slots.
        decode: usize,
        /// Prefill slots.
        prefill: usize,
    },
    /// A difference larger than rounding to logical blocks explains.
    #[error(
        "group {group}: {decode} decode blocks and {prefill} prefill blocks differ by more than {padding}"
    )]
    Padding {
        /// Cache group.
        group: usize,
        /// Decode blocks.
        decode: usize,
        /// Prefill blocks.
        prefill: usize,
        /// Largest difference.
        padding: u64,
    },
    /// A region of a group without blocks.
    #[error("cache group {group} has no block list")]
    NoGroup {
        /// The region's cache group.
        group: i64,
    },
    /// A context-parallel rank that offers too few blocks.
    #[error(transparent)]
    Uncovered(#[from] DcpUncovered),
}

impl PairError {
    /// What vLLM would have raised.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::RegionUncovered { .. } | Self::Uncovered(_) => ErrorKind::Value,
            _ => ErrorKind::Assertion,
        }
    }
}

/// Equally long block lists of both sides, per cache group or per region.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PairedBlocks {
    /// Decode blocks.
    pub decode: Vec<Vec<u64>>,
    /// Prefill blocks.
    pub prefill: Vec<Vec<u64>>,
}

/// Logical block ids of every group as kernel blocks; groups of state stay as they are.
pub fn expand_groups(groups: &[GroupKind], block_ids: &[Vec<u64>], blocks_per_logical: u64) -> Vec<Vec<u64>> {
    let is_state = |group: usize| groups.get(group).is_some_and(|kind| kind.is_state());
    let expand = |(group, ids): (usize, &Vec<u64>)| {
        if is_state(group) { ids.clone() } else { super::kernel_block_ids(ids, blocks_per_logical) }
    };
    block_ids.iter().enumerate().map(expand).collect()
}

/// Cuts local attention blocks into pieces of a remote block and drops those past the remote list.
///
/// None when nothing is left to fill in any group.
pub fn split_into_remote_blocks(
    groups: &[GroupKind],
    local: &[Vec<u64>],
    remote: &[Vec<u64>],
    ratio: u64,
) -> Option<Vec<Vec<u64>>> {
    let pieces: Vec<Vec<u64>> = remote
        .iter()
        .enumerate()
        .map(|(group, remote_ids)| {
            let local_ids = local.get(group).map_or(&[][..], Vec::as_slice);
            if groups.get(group).is_some_and(|kind| kind.is_state()) {
                return local_ids.to_vec();
            }
            let mut pieces = super::kernel_block_ids(local_ids, ratio);
            pieces.truncate(remote_ids.len());
            pieces
        })
        .collect();
    pieces.iter().any(|group| !group.is_empty()).then_some(pieces)
}

/// Pairs kernel blocks per cache group.
///
/// An empty decode group selects nothing, also beside groups with blocks. With groups of state,
/// slots pair by position and attention lists may differ by the rounding to logical blocks.
///
/// # Errors
/// Lists that cannot belong to the same request.
pub fn pair_block_ids(
    groups: &[GroupKind],
    mut blocks: PairedBlocks,
    decode_per_logical: u64,
    prefill_per_logical: u64,
) -> Result<PairedBlocks, PairError> {
    let PairedBlocks { decode, prefill } = &mut blocks;
    if decode.len() != prefill.len() {
        return Err(PairError::ListCount { local: decode.len(), remote: prefill.len() });
    }
    let hybrid = groups.iter().any(|kind| kind.is_state());
    for (group, (decode, prefill)) in decode.iter_mut().zip(prefill).enumerate() {
        let (wanted, offered) = (decode.len(), prefill.len());
        let is_state = groups.get(group).is_some_and(|kind| kind.is_state());
        if is_state {
            // One more decode slot is the position that decode recomputes by itself.
            if wanted > offered + 1 {
                return Err(PairError::StateSlots { group, decode: wanted, prefill: offered });
            }
            decode.truncate(offered);
            keep_last(prefill, wanted);
        } else if !hybrid {
            if wanted > offered {
                return Err(PairError::TooFewRemote { list: group, decode: wanted, prefill: offered });
            }
            keep_last(prefill, wanted);
        } else if wanted == 0 || (decode_per_logical == prefill_per_logical && wanted < offered) {
            keep_last(prefill, wanted);
        } else {
            let padding = decode_per_logical.saturating_add(prefill_per_logical);
            if wanted.abs_diff(offered) as u64 > padding {
                return Err(PairError::Padding { group, decode: wanted, prefill: offered, padding });
            }
            decode.truncate(offered);
            prefill.truncate(wanted);
        }
    }
    Ok(blocks)
}

/// Keeps the last `count` ids.
fn keep_last(ids: &mut Vec<u64>, count: usize) {
    ids.drain(..ids.len().saturating_sub(count));
}

/// One block list per region from one per cache group; a shared region takes all lists.
///
/// # Errors
/// A region whose group has no list.
pub fn block_ids_by_region(
    block_ids: &[Vec<u64>],
    region_groups: &[i64],
) -> Result<Vec<Vec<u64>>, PairError> {
    let list = |group: &i64| match usize::try_from(*group) {
        Ok(index) => block_ids.get(index).cloned().ok_or(PairError::NoGroup { group: *group }),
        Err(_) if *group == SHARED_GROUP => Ok(block_ids.concat()),
        Err(_) => Err(PairError::NoGroup { group: *group }),
    };
    region_groups.iter().map(list).collect()
}

/// How regions are paired when the two sides group their layers differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionPairing<'a> {
    /// Blocks cached locally per region, and kernel blocks of the whole context; none pairs tails.
    pub known: Option<(&'a [usize], usize)>,
    /// Local decode-context-parallel size.
    pub local_dcp: u32,
    /// Local rank in it.
    pub local_dcp_rank: u32,
    /// Remote decode-context-parallel size.
    pub remote_dcp: u32,
    /// The remote rank that is read from.
    pub remote_rank: u32,
}

/// Pairs block lists per region.
///
/// # Errors
/// Regions that the remote side does not cover, different numbers of regions.
pub fn pair_by_region(
    pairing: RegionPairing<'_>,
    decode: &[Vec<u64>],
    prefill: &[Vec<u64>],
) -> Result<PairedBlocks, PairError> {
    if decode.len() != prefill.len() {
        return Err(PairError::ListCount { local: decode.len(), remote: prefill.len() });
    }
    if decode.iter().all(Vec::is_empty) {
        let empty = vec![Vec::new(); decode.len()];
        return Ok(PairedBlocks { decode: empty.clone(), prefill: empty });
    }
    let mut paired = PairedBlocks::default();
    if let Some((cached, total)) = pairing.known {
        if cached.len() != decode.len() {
            return Err(PairError::ListCount { local: decode.len(), remote: cached.len() });
        }
        for ((local, remote), cached) in decode.iter().zip(prefill).zip(cached) {
            let pair = DcpPair {
                local_size: pairing.local_dcp,
                local_rank: pairing.local_dcp_rank,
                remote_size: pairing.remote_dcp,
                remote_rank: pairing.remote_rank,
                cached_blocks: *cached,
                total_blocks: Some(total),
            };
            let (local, remote) = dcp_pair(pair, local, remote)?;
            paired.decode.push(local);
            paired.prefill.push(remote);
        }
        return Ok(paired);
    }
    for (region, (local, remote)) in decode.iter().zip(prefill).enumerate() {
        let Some(skipped) = remote.len().checked_sub(local.len()) else {
            let (decode, prefill) = (local.len(), remote.len());
            return Err(PairError::RegionUncovered { region, decode, prefill });
        };
        paired.decode.push(local.clone());
        paired.prefill.push(remote[skipped..].to_vec());
    }
    Ok(paired)
}

/// The slot with the running state, without the speculative slots behind it.
pub fn clip_state_blocks(blocks: &[u64], speculative_slots: usize) -> &[u64] {
    let Some(last) = blocks.len().checked_sub(1) else { return blocks };
    let kept = last - speculative_slots.min(last);
    &blocks[kept..=kept]
}
