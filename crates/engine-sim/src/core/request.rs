//! One request inside the engine core, and what passes between it and the HTTP layer.

use std::sync::Arc;

use kv_connector::protocol::KvTransferParams;
use tokio::sync::mpsc;

use crate::blocks::{BlockHash, BlockId};
use crate::faults::Corrupt;
use crate::kv::ContextDigest;
use crate::tokens::Token;

/// How a request is sampled and when it ends.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sampling {
    pub(crate) max_tokens: usize,
    pub(crate) min_tokens: usize,
    pub(crate) stop_token_ids: Vec<Token>,
    pub(crate) ignore_eos: bool,
    /// Tells sampled sequences apart; 0 is greedy.
    pub(crate) noise: u64,
    /// Keeps the request's blocks apart from those of other salts in the prefix cache.
    pub(crate) cache_salt: String,
    /// The tokens that the output is bound to, and then its end; empty for a free one.
    pub(crate) script: Arc<[Option<Token>]>,
}

/// A request as the HTTP layer submits it.
pub(crate) struct NewRequest {
    pub(crate) id: String,
    pub(crate) prompt: Vec<Token>,
    pub(crate) sampling: Sampling,
    pub(crate) params: Option<KvTransferParams>,
    pub(crate) corrupt: Option<Corrupt>,
    /// The receiver's end means that the client has gone.
    pub(crate) outputs: mpsc::Sender<Output>,
}

/// What the HTTP layer asks of the core.
pub(crate) enum Command {
    /// Run a request.
    Submit(Box<NewRequest>),
    /// Transfer parameters on whose values the core breaks.
    Poison,
    /// A request that was refused although it brought a hand-off: let the connector release it.
    PreAborted {
        /// A fresh id.
        id: String,
        /// The hand-off.
        params: Box<KvTransferParams>,
    },
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FinishReason {
    Length,
    /// An end-of-sequence token, or the stop token named.
    Stop(Option<Token>),
}

/// The end of a request.
#[derive(Debug, Clone)]
pub(crate) struct Finish {
    pub(crate) reason: FinishReason,
    pub(crate) params: Option<KvTransferParams>,
}

/// One generated token.
#[derive(Debug, Clone)]
pub(crate) struct Generated {
    pub(crate) token: Token,
    pub(crate) entropy: u64,
    /// Prompt tokens that were not computed for this request.
    pub(crate) cached_tokens: usize,
    /// Prompt tokens that this request added to the prefix cache.
    pub(crate) created_tokens: usize,
    pub(crate) finish: Option<Finish>,
}

/// What the core reports for a request.
#[derive(Debug, Clone)]
pub(crate) enum Output {
    Token(Box<Generated>),
    /// The KV could not be loaded.
    LoadFailed,
    /// A request of this id is known already.
    Duplicate,
    /// The engine core is dead.
    Dead,
}

/// Where a request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Waiting,
    /// Its blocks are being filled from elsewhere; nothing but the transfer's end moves it on.
    WaitingForRemoteKv,
    Running,
    /// Ended; its blocks are kept until the transfer layer reports it.
    Finished,
}

/// A request that the core knows.
pub(crate) struct Request {
    pub(crate) state: State,
    /// Prompt and generated tokens.
    pub(crate) tokens: Vec<Token>,
    pub(crate) prompt_len: usize,
    /// Tokens whose KV is in the blocks.
    pub(crate) computed: usize,
    pub(crate) blocks: Vec<BlockId>,
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) sampling: Sampling,
    pub(crate) corrupt: Option<Corrupt>,
    pub(crate) outputs: mpsc::Sender<Output>,
    pub(crate) digest: ContextDigest,
    /// Set when the request is scheduled for the first time.
    pub(crate) cached_tokens: Option<usize>,
    pub(crate) local_hit: usize,
    pub(crate) external_tokens: usize,
    /// First of the blocks that were filled from elsewhere.
    pub(crate) first_pulled_block: usize,
    /// What the prefill engine says about its own cache hits.
    pub(crate) remote_cached: Option<usize>,
    pub(crate) load_failed: bool,
    pub(crate) is_prefill_leg: bool,
}

impl Request {
    pub(crate) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }
}
