//! Who talks to whom: ratios of tensor-parallel sizes, ranks to contact, readers to expect.
//!
//! Pure arithmetic on sizes and ranks; it knows nothing of requests or memory.

mod block_size;
mod dcp;
mod engines;
mod mapping;
pub mod v2;

pub use block_size::{KernelSizes, kernel_block_size, logical_block_size};
pub use dcp::{DcpPair, DcpUncovered, dcp_pair};
pub use engines::{EngineTopology, EngineTopologyError, TopologyRegistry};
pub use mapping::{
    GroupKind, LocalTopology, TpMapping, TransferRank, WorkerRanks, advertised_sizes, transfer_rank,
};

use thiserror::Error;

/// Largest transfer size a peer may announce; beyond it the lists of ranks would be absurd.
pub const MAX_TRANSFER_SIZE: u32 = 65_536;

/// What vLLM would have raised, for hosts that must treat failures alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// An invariant of the protocol is broken.
    Assertion,
    /// The two sides are configured in ways that do not fit.
    Runtime,
    /// A combination that no version carries out.
    NotImplemented,
    /// A value outside of what the other side can serve.
    Value,
}

/// Sizes that no rank mapping exists for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum TopologyError {
    /// One tensor-parallel size does not divide the other.
    #[error("tensor-parallel sizes {local} and {remote} do not divide one another")]
    NotDivisible {
        /// Local size.
        local: u32,
        /// Remote size.
        remote: u32,
    },
    /// The local block size is no multiple of the remote one.
    #[error("local block size {local} is not divisible by remote block size {remote}")]
    BlockSizes {
        /// Tokens per local block.
        local: u64,
        /// Tokens per remote block.
        remote: u64,
    },
    /// A size beyond [`MAX_TRANSFER_SIZE`].
    #[error("a transfer size of {size} is out of range")]
    TooManyRanks {
        /// The announced size.
        size: u32,
    },
}

/// Local over remote tensor-parallel size: positive when local is at least as large, else the
/// negated inverse; never 0 or -1.
///
/// # Errors
/// Sizes of which neither divides the other, or a zero.
pub fn tp_ratio(local: u32, remote: u32) -> Result<i64, TopologyError> {
    let error = TopologyError::NotDivisible { local, remote };
    if local == 0 || remote == 0 {
        return Err(error);
    }
    if local >= remote {
        return if local.is_multiple_of(remote) { Ok(i64::from(local / remote)) } else { Err(error) };
    }
    if remote.is_multiple_of(local) { Ok(-i64::from(remote / local)) } else { Err(error) }
}

/// How many remote blocks one local block holds.
///
/// # Errors
/// A local size that is no multiple of the remote one, or a zero.
pub fn block_size_ratio(local: u64, remote: u64) -> Result<u64, TopologyError> {
    if local == 0 || remote == 0 || !local.is_multiple_of(remote) {
        return Err(TopologyError::BlockSizes { local, remote });
    }
    Ok(local / remote)
}

/// The parallel sizes of one side of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParallelSizes {
    /// Transfer tensor-parallel size.
    pub tp: u32,
    /// Decode-context-parallel size: 1, or equal to `tp`.
    pub dcp: u32,
}

impl ParallelSizes {
    /// Tensor parallelism alone.
    pub fn tp(tp: u32) -> Self {
        Self { tp, dcp: 1 }
    }

    fn check(self) -> Result<(), TopologyError> {
        if self.tp > MAX_TRANSFER_SIZE { Err(TopologyError::TooManyRanks { size: self.tp }) } else { Ok(()) }
    }
}

/// Remote ranks whose metadata the local rank `rank` needs.
///
/// # Errors
/// Sizes that do not divide one another.
pub fn handshake_ranks(
    rank: u32,
    local: ParallelSizes,
    remote: ParallelSizes,
) -> Result<Vec<u32>, TopologyError> {
    local.check()?;
    remote.check()?;
    let ratio = tp_ratio(local.tp, remote.tp)?;
    if remote.dcp > 1 {
        return Ok(dcp_source_ranks(rank, local, remote));
    }
    let width = u32::try_from(ratio.unsigned_abs()).unwrap_or(u32::MAX);
    if ratio > 0 {
        return Ok(vec![rank / width]);
    }
    Ok((0..width).map(|i| rank.saturating_mul(width).saturating_add(i)).collect())
}

/// Remote ranks that hold a part of the context which the local rank needs.
fn dcp_source_ranks(rank: u32, local: ParallelSizes, remote: ParallelSizes) -> Vec<u32> {
    let local_dcp = local.dcp.max(1);
    let dcp_rank = rank % local_dcp;
    if local_dcp <= remote.dcp {
        return (0..remote.tp).filter(|source| source % local_dcp == dcp_rank).collect();
    }
    vec![dcp_rank % remote.dcp]
}

/// How many local ranks read from one remote rank; the number behind the colon of a notification.
///
/// # Errors
/// Sizes that do not divide one another.
pub fn consumers(local: ParallelSizes, remote: ParallelSizes) -> Result<u32, TopologyError> {
    let ratio = tp_ratio(local.tp, remote.tp)?;
    Ok(match (remote.dcp > 1, local.dcp > 1) {
        (true, false) => local.tp,
        (true, true) => (local.dcp / remote.dcp).max(1),
        (false, _) => u32::try_from(ratio.max(1)).unwrap_or(u32::MAX),
    })
}

#[cfg(test)]
mod tests;
