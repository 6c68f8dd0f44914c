//! The rank arithmetic of vLLM 0.13, which knows only decode sizes at least as large as prefill's.

use super::TopologyError;

/// Local over remote tensor-parallel size.
///
/// # Errors
/// A local size that is no multiple of the remote one.
pub fn tp_ratio(local: u32, remote: u32) -> Result<u32, TopologyError> {
    if local == 0 || remote == 0 || !local.is_multiple_of(remote) {
        return Err(TopologyError::NotDivisible { local, remote });
    }
    Ok(local / remote)
}

/// The one remote rank that `rank` reads from.
///
/// # Errors
/// A local size that is no multiple of the remote one.
pub fn target_rank(rank: u32, local: u32, remote: u32) -> Result<u32, TopologyError> {
    Ok(rank / tp_ratio(local, remote)?)
}

/// Whether the remote side stores heads more than once; true already at one head per rank.
pub fn is_replicated(remote_tp: u32, total_kv_heads: u32) -> bool {
    remote_tp >= total_kv_heads.max(1)
}

/// Index of the head slice of `rank` inside the remote block; 0 for replicated caches.
///
/// # Errors
/// A local size that is no multiple of the remote one.
pub fn rank_offset_factor(
    rank: u32,
    local: u32,
    remote: u32,
    replicates: bool,
) -> Result<u32, TopologyError> {
    let ratio = tp_ratio(local, remote)?;
    Ok(if replicates { 0 } else { rank % ratio })
}
