//! Whether a peer's announced memory fits the local one, rule by rule in vLLM's order.
//!
//! Pure: a peer is described only when every rule holds, so a refused one leaves nothing behind.

mod align;
mod error;
mod v14;
mod v2;

pub use error::PeerError;

use crate::protocol::metadata::NixlAgentMetadata;
use crate::topology::ParallelSizes;

use super::{LocalGeometry, PeerGeometry, descriptors};

/// What the local side expects of the peer.
#[derive(Debug, Clone, Copy)]
pub struct PeerRequest<'a> {
    /// The engine named by the transfer parameters.
    pub engine_id: &'a str,
    /// Its sizes according to the transfer parameters.
    pub sizes: ParallelSizes,
    /// A rank of the same engine that was accepted before.
    pub known: Option<&'a PeerGeometry>,
}

/// Checks one rank's metadata and describes the rank.
///
/// # Errors
/// The first rule that is broken; nothing is kept.
pub fn validate_peer(
    local: &LocalGeometry,
    request: &PeerRequest<'_>,
    metadata: &NixlAgentMetadata,
) -> Result<PeerGeometry, PeerError> {
    match metadata {
        NixlAgentMetadata::V2(metadata) => v2::validate(local, request, metadata),
        NixlAgentMetadata::V14(metadata) => v14::validate(local, request, metadata),
    }
}

/// Numbers of the wire as sizes.
fn size(what: &'static str, value: i64) -> Result<u64, PeerError> {
    u64::try_from(value).map_err(|_| PeerError::Number { what, value })
}

fn sizes(what: &'static str, values: &[i64]) -> Result<Vec<u64>, PeerError> {
    values.iter().map(|value| size(what, *value)).collect()
}

fn count(what: &'static str, expected: usize, got: usize) -> Result<(), PeerError> {
    if expected == got { Ok(()) } else { Err(PeerError::ListLength { what, expected, got }) }
}

fn block_len(region: usize, expected: u64, got: u64) -> Result<(), PeerError> {
    if expected == got { Ok(()) } else { Err(PeerError::BlockLen { region, expected, got }) }
}

/// A slice past its block would read the neighbour's bytes.
fn check_slices(local: &LocalGeometry, peer: &PeerGeometry) -> Result<(), PeerError> {
    for (position, (index, remote)) in local.transferred_regions().into_iter().zip(&peer.regions).enumerate()
    {
        let slice = descriptors::head_slice(local, peer, index).map_err(PeerError::Descriptors)?;
        let held = if local.halves { remote.block_len / 2 } else { remote.block_len };
        if slice.offset.checked_add(slice.len).is_none_or(|end| end > held) {
            return Err(PeerError::SliceOutsideBlock { region: position });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
