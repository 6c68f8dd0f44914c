//! What can go wrong with one request, as data: what, whose fault, how far it got.
//! Never builds a response and never holds an engine's address.

use crate::admission::{Busy, BusyScope};
use crate::request::BadRequest;

/// The leg of the exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// The prefill engine's leg.
    Prefill,
    /// The decode engine's leg.
    Decode,
}

impl Stage {
    /// The name used in metrics, logs and error codes.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Who has to act for the request to succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The client sent something that cannot work.
    Client,
    /// An engine failed or answered nonsense.
    Engine(Stage),
    /// The fleet has nobody who could serve the request now.
    Fleet(Stage),
    /// The router itself cannot go on with it.
    Router,
}

/// How far an exchange with an engine got before it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Progress {
    /// The engine cannot have seen the request.
    NotSent,
    /// The engine may have seen it; no answer came.
    Sent,
    /// The answer had begun.
    Answering,
}

/// What broke between the router and an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Broken {
    /// No connection could be made.
    Connect,
    /// The connection ended early.
    Reset,
    /// No answer in time.
    Timeout,
    /// The answer had begun, and no more of it came in time.
    Idle,
    /// The whole answer took too long.
    Total,
    /// The answer was not HTTP.
    Protocol,
    /// The answer exceeded what the router holds of one.
    TooLarge,
    /// All requests together exceeded what the router holds.
    NoRoom,
}

impl Broken {
    /// The name used in metrics and error codes.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Reset => "reset",
            Self::Timeout => "timeout",
            Self::Idle => "idle",
            Self::Total => "total",
            Self::Protocol => "protocol",
            Self::TooLarge => "too_large",
            Self::NoRoom => "no_room",
        }
    }

    /// Whether the engine is at fault, and not the router's own bounds.
    pub(crate) const fn blames_the_engine(self) -> bool {
        !matches!(self, Self::NoRoom | Self::Total)
    }
}

/// One failed exchange with one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} engine: {} ({progress:?})", stage.label(), broken.label())]
pub struct UpstreamFailure {
    /// Which leg.
    pub stage: Stage,
    /// What broke.
    pub broken: Broken,
    /// How far it got.
    pub progress: Progress,
    /// The connection had been kept from an earlier exchange and ended before a byte of the answer:
    /// most likely the engine closed it for idleness just then.
    pub stale: bool,
}

impl UpstreamFailure {
    /// A failure on a connection that says nothing about idleness.
    #[must_use]
    pub const fn new(stage: Stage, broken: Broken, progress: Progress) -> Self {
        Self { stage, broken, progress, stale: false }
    }

    /// Whether the engine cannot have seen what it was sent.
    #[must_use]
    pub const fn is_unseen(&self) -> bool {
        matches!(self.progress, Progress::NotSent)
    }
}

/// Why an answer of a prefill engine holds no hand-off that may reach a decode engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandOffRefusal {
    /// The answer has none.
    #[error("the prefill engine returned no hand-off")]
    Missing,
    /// The answer is not a JSON object.
    #[error("the prefill engine's answer is not a JSON object")]
    Garbage,
    /// A field is absent or wrong; forwarding it would harm the decode engine.
    #[error("the hand-off is defective: {0}")]
    Defect(kv_connector::protocol::handoff::HandOffDefect),
    /// The prefill engine did not generate exactly one token, so its block list may not fit.
    #[error("the prefill engine generated {0:?} tokens instead of one")]
    TokenCount(Option<u64>),
    /// The hand-off covers more tokens than the prompt has.
    #[error("the hand-off covers {covered} tokens of a prompt of {prompt}")]
    Coverage {
        /// Tokens that the hand-off says it covers.
        covered: u64,
        /// Prompt tokens that the engine counted.
        prompt: u64,
    },
    /// The hand-off names fewer blocks than its tokens fill.
    #[error("the hand-off names {blocks} blocks where {needed} are needed")]
    TooFewBlocks {
        /// Blocks of its longest list.
        blocks: u64,
        /// Blocks that its tokens fill at the engine's block size.
        needed: u64,
    },
    /// The answer lacks log-probabilities of the prompt, which the client asked for.
    #[error("the prefill engine returned no log-probabilities of the prompt")]
    NoPromptLogprobs,
    /// The engine that made it has been replaced since.
    #[error("the engine that made the hand-off is gone")]
    EngineGone,
    /// Its address is not one of the peer that made it.
    #[error("the hand-off names an address that does not belong to the prefill engine")]
    ForeignAddress,
    /// Too little of the lease is left to read the blocks safely.
    #[error("the hand-off's lease is about to end")]
    Expiring,
}

impl HandOffRefusal {
    /// Why the decode engine computes the prompt then, as it stands in metrics.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Missing => "hand_off_missing",
            Self::Expiring => "hand_off_expiring",
            _ => "hand_off_refused",
        }
    }

    /// The name used in metrics.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Garbage
            | Self::Defect(_)
            | Self::TokenCount(_)
            | Self::Coverage { .. }
            | Self::TooFewBlocks { .. }
            | Self::NoPromptLogprobs
            | Self::EngineGone
            | Self::ForeignAddress => "refused",
            Self::Expiring => "expired",
        }
    }
}

/// Why a request got no answer from an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyError {
    /// The body cannot be routed.
    #[error(transparent)]
    BadRequest(#[from] BadRequest),
    /// The model is not one that the client may use.
    #[error("the model `{model}` is not served by any ready engine")]
    ModelDenied {
        /// The model.
        model: Box<str>,
    },
    /// No usable engine for the stage.
    #[error("no {} engine is ready", .0.label())]
    NoPeer(Stage),
    /// A limit on requests is reached.
    #[error(transparent)]
    Busy(Busy),
    /// Engines are ready, but none of them can hand off to another.
    #[error("no prefill engine that is ready can hand off to a decode engine")]
    NoCompatiblePair,
    /// The exchange with an engine broke.
    #[error(transparent)]
    Upstream(#[from] UpstreamFailure),
    /// The prefill engine answered with a server error.
    #[error("the prefill engine answered {0}")]
    PrefillFailed(u16),
    /// No usable hand-off, and the settings say to fail.
    #[error(transparent)]
    HandOff(HandOffRefusal),
    /// The router leaves, and has no time left for the request.
    #[error("the router is shutting down")]
    ShuttingDown,
}

impl ProxyError {
    /// Whose fault it is.
    #[must_use]
    pub const fn fault(&self) -> Fault {
        match self {
            Self::BadRequest(_) | Self::ModelDenied { .. } => Fault::Client,
            Self::NoPeer(stage) | Self::Busy(Busy { scope: BusyScope::Stage(stage), .. }) => {
                Fault::Fleet(*stage)
            }
            Self::Busy(_) => Fault::Client,
            Self::NoCompatiblePair => Fault::Fleet(Stage::Prefill),
            Self::Upstream(failure) if failure.broken.blames_the_engine() => Fault::Engine(failure.stage),
            Self::Upstream(_) | Self::ShuttingDown => Fault::Router,
            Self::PrefillFailed(_) | Self::HandOff(_) => Fault::Engine(Stage::Prefill),
        }
    }

    /// Whether sending the same request again may succeed.
    #[must_use]
    pub const fn may_retry(&self) -> bool {
        !matches!(self, Self::BadRequest(_) | Self::ModelDenied { .. })
    }
}
