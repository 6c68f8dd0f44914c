//! What one request has tried so far, and how it ends without a decode engine's answer.

use std::sync::Arc;

use http::Response;

use crate::Core;
use crate::account::Account;
use crate::error::{ProxyError, Stage, UpstreamFailure};
use crate::pool::peer::Peer;
use crate::retry::PrefillFault;
use crate::routing::decide::Stays;
use crate::routing::prefix::{Chunks, Matched};
use crate::settings::Retry;
use crate::stream::RelayBody;

/// The engines that have failed one request, and how often it may still be tried again.
pub(super) struct Tries {
    account: Account,
    left: u32,
    pub(super) resent: bool,
    /// How often a prefill engine was asked.
    pub(super) prefills: u32,
    pub(super) prefill: Vec<Arc<Peer>>,
    pub(super) decode: Vec<Arc<Peer>>,
    /// Why the decode engine computes the prompt although a prefill engine could.
    pub(super) stays: Option<Stays>,
    /// The prompt as it is remembered, where a policy goes by that.
    pub(super) chunks: Chunks,
    /// Who has cached how much of it, where engines' events tell.
    pub(super) cached: Option<Matched>,
}

impl Tries {
    pub(super) fn new(settings: &Retry, account: Account) -> Self {
        let (prefill, decode) = (Vec::new(), Vec::new());
        Self {
            account,
            left: settings.attempts,
            resent: false,
            prefills: 0,
            prefill,
            decode,
            stays: None,
            chunks: Chunks::default(),
            cached: None,
        }
    }

    /// Whether a kept connection ended under the request, so that the same engine may be asked once
    /// more on a new one; this is nobody's failure.
    pub(super) fn resend(&mut self, failure: UpstreamFailure) -> bool {
        failure.stale && !std::mem::replace(&mut self.resent, true)
    }

    pub(super) fn again(&mut self, core: &Core, stage: Stage) -> bool {
        let granted = self.left > 0 && core.retries.withdraw();
        if granted {
            self.left -= 1;
            core.metrics.retried(stage);
            self.account.tell(|told| told.retries += 1);
        }
        granted
    }
}

/// Why a request ends before a decode engine's answer.
pub(super) enum Stopped {
    /// P refused it; its answer is the client's.
    Refused(Box<Response<RelayBody>>),
    Error(ProxyError),
}

impl From<ProxyError> for Stopped {
    fn from(error: ProxyError) -> Self {
        Self::Error(error)
    }
}

impl From<PrefillFault> for ProxyError {
    fn from(fault: PrefillFault) -> Self {
        match fault {
            PrefillFault::Broke(failure) => Self::Upstream(failure),
            PrefillFault::Status(status) => Self::PrefillFailed(status),
        }
    }
}
