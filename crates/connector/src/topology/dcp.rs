//! Pairing of block lists whose blocks are dealt out to context-parallel ranks in turn.

use thiserror::Error;

/// The two ranks of a pairing and what is already cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DcpPair {
    /// Local decode-context-parallel size.
    pub local_size: u32,
    /// Local rank in it.
    pub local_rank: u32,
    /// Remote decode-context-parallel size.
    pub remote_size: u32,
    /// The remote transfer rank that is read from.
    pub remote_rank: u32,
    /// Blocks of the local rank that its prefix cache already holds.
    pub cached_blocks: usize,
    /// Blocks of the whole context, over all remote ranks, when known.
    pub total_blocks: Option<usize>,
}

/// The remote rank offers fewer blocks than the context needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the remote blocks cover {got} of {wanted} needed")]
pub struct DcpUncovered {
    /// Local blocks to fill from the remote rank.
    pub wanted: usize,
    /// Remote blocks that fit them.
    pub got: usize,
}

/// Pairs local blocks (without cached ones) with the remote rank's blocks at the same positions.
///
/// Both results are equally long; empty ones mean that this rank has nothing to read there.
///
/// # Errors
/// With a known total, remote blocks that do not reach it.
pub fn dcp_pair(pair: DcpPair, local: &[u64], remote: &[u64]) -> Result<(Vec<u64>, Vec<u64>), DcpUncovered> {
    let size = |size: u32| usize::try_from(size.max(1)).unwrap_or(usize::MAX);
    let (local_size, remote_size) = (size(pair.local_size), size(pair.remote_size));
    let [local_rank, remote_rank] = [pair.local_rank, pair.remote_rank].map(|rank| rank as usize);
    let cached = pair.cached_blocks;
    let local = match pair.total_blocks {
        None => local,
        Some(total) => {
            let held = total.saturating_sub(local_rank).div_ceil(local_size);
            &local[..held.saturating_sub(cached).min(local.len())]
        }
    };
    let (local_start, local_step, remote_start, remote_step) = if local_size == remote_size {
        (0, 1, cached, 1)
    } else if local_size < remote_size {
        let step = remote_size / local_size;
        // Position of the remote rank among those that share the local rank's blocks.
        let position = (remote_rank.saturating_sub(local_rank) / local_size) % step;
        let start = (position + step - cached % step) % step;
        (start, step, (cached + start - position) / step, 1)
    } else {
        let step = local_size / remote_size;
        let position = local_rank.saturating_sub(remote_rank % remote_size) / remote_size;
        (0, 1, position.saturating_add(cached.saturating_mul(step)), step)
    };
    let picked: Vec<u64> = local.iter().skip(local_start).step_by(local_step).copied().collect();
    let offered = remote.iter().skip(remote_start).step_by(remote_step).copied();
    let mut matched: Vec<u64> = offered.take(picked.len()).collect();
    if pair.total_blocks.is_some() && matched.len() < picked.len() {
        return Err(DcpUncovered { wanted: picked.len(), got: matched.len() });
    }
    let mut picked = picked;
    picked.truncate(matched.len());
    matched.shrink_to_fit();
    Ok((picked, matched))
}
