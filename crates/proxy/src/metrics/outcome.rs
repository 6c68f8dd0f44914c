//! How requests, hand-offs and prefills end, as closed sets of labels.

use crate::error::ProxyError;

/// How the router made a prefill engine free blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// It told the engine itself.
    Notification,
    /// A decode engine refused the hand-off and told it.
    Rejection,
    /// A decode engine read the blocks for nothing.
    Read,
}

impl Way {
    pub(super) const ALL: [Self; 3] = [Self::Notification, Self::Rejection, Self::Read];

    /// The name used in metrics and spans.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Notification => "notification",
            Self::Rejection => "rejection",
            Self::Read => "read",
        }
    }
}

/// How a hand-off ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandOffResult {
    /// A decode engine took it.
    Relayed,
    /// The router made the prefill engine free the blocks.
    Released(Way),
    /// Both engines had been told to write and to receive, and were left to it before the answer showed more.
    Pushed,
    /// The prefill engine ended, and its blocks with it.
    EngineGone,
    /// The prefill engine's own timer had to free the blocks.
    Expired,
}

impl HandOffResult {
    /// Those of hand-offs that were refused are made where they are refused.
    pub(super) const LABELS: [&'static str; 7] =
        ["relayed", "missing", "refused", "released", "pushed", "engine_gone", "expired"];

    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Relayed => "relayed",
            Self::Released(_) => "released",
            Self::Pushed => "pushed",
            Self::EngineGone => "engine_gone",
            Self::Expired => "expired",
        }
    }
}

/// What became of a prefill that nobody waited for any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AbandonedPrefill {
    /// It was heard out, and its blocks were released.
    Released,
    /// It was heard out, and named no blocks.
    KeptNone,
    /// Its answer never came whole.
    Failed,
    /// It took too long and its connection was closed.
    Aborted,
}

impl AbandonedPrefill {
    pub(super) const ALL: [Self; 4] = [Self::Released, Self::KeptNone, Self::Failed, Self::Aborted];

    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::KeptNone => "kept_none",
            Self::Failed => "failed",
            Self::Aborted => "aborted",
        }
    }
}

/// How a client's request ended, seen from the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Outcome {
    Served,
    /// An engine's 4xx was relayed, or the router refused the body.
    ClientError,
    EngineError,
    NoPeer,
    /// The client left before its answer was complete.
    Abandoned,
    /// The router was shutting down, or had no room.
    Cut,
    /// A limit on requests.
    Limited,
}

impl Outcome {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::ClientError => "client_error",
            Self::EngineError => "engine_error",
            Self::NoPeer => "no_peer",
            Self::Abandoned => "abandoned",
            Self::Cut => "cut",
            Self::Limited => "limited",
        }
    }

    pub(crate) const fn of_code(code: u8) -> Self {
        const ALL: [Outcome; 7] = [
            Outcome::Served,
            Outcome::ClientError,
            Outcome::EngineError,
            Outcome::NoPeer,
            Outcome::Abandoned,
            Outcome::Cut,
            Outcome::Limited,
        ];
        if (code as usize) < ALL.len() { ALL[code as usize] } else { Self::Abandoned }
    }

    pub(crate) const fn of_error(error: &ProxyError) -> Self {
        match error {
            ProxyError::BadRequest(_) | ProxyError::ModelDenied { .. } => Self::ClientError,
            ProxyError::NoPeer(_) | ProxyError::NoCompatiblePair => Self::NoPeer,
            ProxyError::ShuttingDown => Self::Cut,
            ProxyError::Busy(_) => Self::Limited,
            ProxyError::Upstream(failure) if !failure.broken.blames_the_engine() => Self::Cut,
            ProxyError::Upstream(_) | ProxyError::PrefillFailed(_) | ProxyError::HandOff(_) => {
                Self::EngineError
            }
        }
    }

    pub(crate) const fn of_status(status: u16) -> Self {
        match status {
            0..400 => Self::Served,
            400..500 => Self::ClientError,
            _ => Self::EngineError,
        }
    }
}
