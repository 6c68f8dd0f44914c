//! Who talks to whom: ratios of tensor-parallel sizes, ranks to contact, readers to expect.
//!
//! Pure arithmetic on sizes and ranks; it knows nothing of requests or memory.

use thiserror::Error;

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
        return if local % remote == 0 { Ok(i64::from(local / remote)) } else { Err(error) };
    }
    if remote % local == 0 { Ok(-i64::from(remote / local)) } else { Err(error) }
}

/// Remote ranks whose metadata rank `rank` needs, without context parallelism.
///
/// # Errors
/// As [`tp_ratio`].
pub fn handshake_ranks(rank: u32, local: u32, remote: u32) -> Result<Vec<u32>, TopologyError> {
    let ratio = tp_ratio(local, remote)?;
    let width = u32::try_from(ratio.unsigned_abs()).unwrap_or(u32::MAX);
    if ratio > 0 {
        return Ok(vec![rank / width]);
    }
    Ok((0..width).map(|i| rank * width + i).collect())
}

/// How many local ranks read from one remote rank; the number behind the colon of a notification.
///
/// # Errors
/// As [`tp_ratio`].
pub fn consumers(local: u32, remote: u32) -> Result<u32, TopologyError> {
    let ratio = tp_ratio(local, remote)?.max(1);
    Ok(u32::try_from(ratio).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests;
