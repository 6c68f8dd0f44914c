//! Whether the handshake of two engines would pass, worked out from what they publish, with the
//! rules that a worker applies to a real one. Pure: shakes no hands and chooses nothing.

mod judge;
mod local;
mod misfit;
mod traits;

use crate::protocol::metadata::NixlAgentMetadata;

pub use judge::judge;
pub use misfit::{Misfit, Side};
pub use traits::EngineTraits;

/// One rank as it is published.
#[derive(Debug, Clone, Copy)]
pub struct PublishedRank<'a> {
    /// Pipeline stage.
    pub pp_rank: u32,
    /// Transfer rank.
    pub tp_rank: u32,
    /// Its compatibility hash.
    pub compatibility_hash: &'a str,
    /// What it says of its memory.
    pub metadata: &'a NixlAgentMetadata,
}

/// One engine as it is published.
#[derive(Debug, Clone)]
pub struct PublishedEngine<'a> {
    /// Its id.
    pub engine_id: &'a str,
    /// The model that it serves, where it says so.
    pub model: Option<&'a str>,
    /// What its payloads do not tell.
    pub traits: &'a EngineTraits,
    /// Its ranks, as far as they are known.
    pub ranks: Vec<PublishedRank<'a>>,
}

/// What is to be expected of a handshake that nothing speaks against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// It passes.
    Passes,
    /// Too little is known.
    Unknown(Unknown),
}

/// What is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    /// An engine has published nothing.
    #[error("the {0} engine has published no payload")]
    Payloads(Side),
    /// The outcome depends on a setting that the engine does not tell.
    #[error("the outcome depends on a setting of the {0} engine that it does not tell")]
    Traits(Side),
    /// State-space layers whose shapes differ.
    #[error("the engines keep state of different shapes")]
    States,
    /// Pipeline stages of the side that opens the handshake.
    #[error("the {0} engine has pipeline stages, whose layers are not told apart")]
    Stages(Side),
}
