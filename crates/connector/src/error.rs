//! States in which a vLLM engine core cannot go on.
//!
//! The connector never panics on them: the host learns which invariant broke and chooses
//! between dying as vLLM does and carrying on without the offending request.

use thiserror::Error;

use crate::regions::PairError;

/// An invariant whose violation ends a vLLM engine core; the connector stays usable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EngineFatal {
    /// A receive was built from parameters that lack a required key; the receive is dropped.
    #[error("request {request}: transfer parameters have no {key}")]
    MissingKey {
        /// The local request.
        request: String,
        /// The absent key of `kv_transfer_params`.
        key: &'static str,
    },
    /// The host counted external tokens for a request that names no remote blocks.
    #[error("request {request}: {external_tokens} external tokens but no remote blocks")]
    NoRemoteBlocks {
        /// The local request.
        request: String,
        /// Tokens the host expected to be loaded.
        external_tokens: usize,
    },
    /// The remote side offers fewer blocks than the local side has to fill.
    #[error("request {request}: group {group} needs {local} blocks, the remote offers {remote}")]
    RemoteBlocksTooFew {
        /// The local request.
        request: String,
        /// Cache group with the shortage.
        group: usize,
        /// Blocks to fill locally.
        local: usize,
        /// Blocks offered by the remote side.
        remote: usize,
    },
    /// Local and remote block lists have different numbers of cache groups.
    #[error("request {request}: {local} local cache groups, {remote} remote ones")]
    GroupCountMismatch {
        /// The local request.
        request: String,
        /// Groups of the local engine.
        local: usize,
        /// Groups named by the remote engine.
        remote: usize,
    },
    /// The block ids have the shape (flat or nested) of the other protocol generation.
    #[error("request {request}: block ids have the shape of another protocol generation")]
    BlockIdShape {
        /// The local request.
        request: String,
    },
    /// A request left the batch without a hand-off although it already held a lease.
    #[error("request {request}: withdrawn while it holds a lease")]
    WithdrawnWhileLeased {
        /// The local request.
        request: String,
    },
    /// Local and remote block lists that cannot belong to the same request.
    #[error("request {request}: {error}")]
    UnpairedBlocks {
        /// The local request.
        request: String,
        /// What does not fit.
        error: PairError,
    },
    /// Both sides divide their layers into cache groups differently, where lists by region cannot
    /// be told.
    #[error("request {request}: the cache groups of the two sides cannot be mapped")]
    UnsupportedRegions {
        /// The local request.
        request: String,
    },
    /// A failed handshake left a v2 worker without the peer's geometry when it collected results.
    #[error("request {request}: engine {engine_id} was never registered")]
    PeerNeverRegistered {
        /// The local request.
        request: String,
        /// The peer whose handshake failed.
        engine_id: String,
    },
}
