//! Why a handshake would fail.

use std::fmt;

use thiserror::Error;

use crate::protocol::params::{Generation, TransferMode};
use crate::regions::PeerError;
use crate::topology::TopologyError;
use crate::worker::HandshakeError;

/// One of the two engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The engine that computes the prompt.
    Prefill,
    /// The engine that generates.
    Decode,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// Why two engines cannot exchange KV.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Misfit {
    /// Both are one.
    #[error("an engine cannot hand off to itself")]
    OwnEngine,
    /// An engine whose ranks cannot belong to one engine.
    #[error("the ranks of the {side} engine differ in their {what}")]
    RanksDisagree {
        /// Whose ranks.
        side: Side,
        /// In what.
        what: &'static str,
    },
    /// They serve different models.
    #[error("the prefill engine serves {prefill:?}, the decode engine {decode:?}")]
    Models {
        /// Of the prefill engine.
        prefill: String,
        /// Of the decode engine.
        decode: String,
    },
    /// They speak different protocol generations.
    #[error("the prefill engine speaks connector version {}, the decode engine {}", .prefill.connector_version(), .decode.connector_version())]
    Generations {
        /// Of the prefill engine.
        prefill: Generation,
        /// Of the decode engine.
        decode: Generation,
    },
    /// Their transfer modes differ.
    #[error("the prefill engine is set to {}, the decode engine to {}", .prefill.as_str(), .decode.as_str())]
    Modes {
        /// Of the prefill engine.
        prefill: TransferMode,
        /// Of the decode engine.
        decode: TransferMode,
    },
    /// Their compatibility hashes differ, and a side cares.
    #[error("the compatibility hashes differ: prefill {prefill}, decode {decode}")]
    Hashes {
        /// Of the prefill engine.
        prefill: String,
        /// Of the decode engine.
        decode: String,
    },
    /// A rank that the other side would ask for is not published.
    #[error("rank {pp_rank}/{tp_rank} of the {side} engine is not published")]
    MissingRank {
        /// Whose rank.
        side: Side,
        /// Pipeline stage.
        pp_rank: u32,
        /// Transfer rank.
        tp_rank: u32,
    },
    /// A worker would refuse the other side.
    #[error("rank {tp_rank} of the {side} engine would refuse the handshake: {error}")]
    Refused {
        /// Who refuses.
        side: Side,
        /// Its transfer rank.
        tp_rank: u32,
        /// Why.
        error: Box<HandshakeError>,
    },
}

impl Misfit {
    /// A short name of the reason, for machines.
    pub fn label(&self) -> &'static str {
        match self {
            Self::OwnEngine => "own_engine",
            Self::RanksDisagree { .. } => "ranks_disagree",
            Self::Models { .. } => "models_differ",
            Self::Generations { .. } => "generations_differ",
            Self::Modes { .. } => "modes_differ",
            Self::Hashes { .. } => "hashes_differ",
            Self::MissingRank { .. } => "rank_missing",
            Self::Refused { error, .. } => refusal_label(error),
        }
    }
}

fn refusal_label(error: &HandshakeError) -> &'static str {
    use PeerError as E;
    let topology = |error: &TopologyError| match error {
        TopologyError::BlockSizes { .. } => "block_sizes_differ",
        _ => "topologies_differ",
    };
    match error {
        HandshakeError::Topology(error) | HandshakeError::Peer(E::Topology(error)) => topology(error),
        HandshakeError::PipelineStages(_) => "topologies_differ",
        HandshakeError::Peer(error) => match error {
            E::Layout { .. } | E::PermuteHybrid | E::RepackHybrid(_) | E::ScatteredHeads(_) => {
                "layouts_differ"
            }
            E::RoutedBlockSizes { .. } | E::HostBufferBlockSizes | E::SlicedSubBlocks(_) => {
                "block_sizes_differ"
            }
            E::HeadBoundary { .. }
            | E::PartialContext { .. }
            | E::ReplicatedContext
            | E::RoutedSizes { .. }
            | E::ContextSizes { .. }
            | E::StateContext { .. }
            | E::SharedHeads { .. }
            | E::UnequalSizes(_) => "topologies_differ",
            _ => "regions_differ",
        },
        _ => "regions_differ",
    }
}
