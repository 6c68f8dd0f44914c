//! Whether a failed leg may be tried on another engine: from what broke, how far it got and what
//! is left of two budgets. Pure but for the fleet's bucket; sends nothing.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::error::{Broken, Progress, UpstreamFailure};
use crate::settings::Retry;

/// What to do after a failed leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing more can be tried.
    GiveUp,
    /// Another engine may run the leg again.
    Again,
    /// Another engine may have the very same hand-off: the first cannot have seen it.
    AgainWithTheSameHandOff,
}

/// How a prefill leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrefillFault {
    Broke(UpstreamFailure),
    Status(u16),
}

/// Nothing of a prefill leg reaches the client, so any engine may compute it again. What the client
/// is to blame for, and what is too large to hold, would only fail again.
pub(crate) fn after_prefill(fault: PrefillFault) -> Verdict {
    match fault {
        PrefillFault::Broke(failure) if matches!(failure.broken, Broken::TooLarge | Broken::NoRoom) => {
            Verdict::GiveUp
        }
        PrefillFault::Broke(_) | PrefillFault::Status(502..=504) => Verdict::Again,
        PrefillFault::Status(_) => Verdict::GiveUp,
    }
}

/// A decode leg may be run again while its head has not gone to the client. A hand-off that its
/// engine may have begun to read is spent.
pub(crate) fn after_decode(failure: UpstreamFailure) -> Verdict {
    match (failure.broken, failure.progress) {
        (
            Broken::TooLarge | Broken::NoRoom | Broken::Timeout | Broken::Idle | Broken::Total,
            Progress::Sent | Progress::Answering,
        ) => Verdict::GiveUp,
        (_, Progress::NotSent) => Verdict::AgainWithTheSameHandOff,
        (_, Progress::Sent | Progress::Answering) => Verdict::Again,
    }
}

/// As [`after_decode`], for an engine that answered but cannot serve. It may have looked at the
/// hand-off before it refused.
pub(crate) fn after_decode_status(status: u16) -> Verdict {
    match status {
        502..=504 => Verdict::Again,
        _ => Verdict::GiveUp,
    }
}

/// The fleet's budget: every request adds a fraction of a retry, so that a failing fleet is not
/// asked for much more than its clients ask.
#[derive(Debug)]
pub(crate) struct Budget {
    settings: ArcSwap<Retry>,
    tokens: Mutex<(f64, Instant)>,
}

impl Budget {
    pub(crate) fn new(settings: Retry) -> Self {
        let tokens = Mutex::new((f64::from(settings.burst), Instant::now()));
        Self { settings: ArcSwap::from_pointee(settings), tokens }
    }

    /// Other rates and another bound from now on; what is in the bucket stays.
    pub(crate) fn replace(&self, settings: Retry) {
        self.settings.store(Arc::new(settings));
    }

    /// Counts one request.
    pub(crate) fn deposit(&self) {
        let settings = self.settings.load();
        let mut tokens = self.tokens.lock();
        tokens.0 = (tokens.0 + settings.per_request).min(f64::from(settings.burst));
    }

    /// Takes one retry, if there is one.
    pub(crate) fn withdraw(&self) -> bool {
        let settings = self.settings.load();
        let mut tokens = self.tokens.lock();
        let (left, since) = *tokens;
        let now = Instant::now();
        let earned = (now - since).as_secs_f64() * settings.per_second;
        let left = (left + earned).min(f64::from(settings.burst));
        let granted = left >= 1.0;
        *tokens = (if granted { left - 1.0 } else { left }, now);
        granted
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::Stage;

    fn failure(broken: Broken, progress: Progress) -> UpstreamFailure {
        UpstreamFailure::new(Stage::Decode, broken, progress)
    }

    #[test]
    fn item_56_only_what_another_engine_can_mend_is_tried_again() {
        let broke = |broken, progress| after_prefill(PrefillFault::Broke(failure(broken, progress)));
        assert_eq!(broke(Broken::Connect, Progress::NotSent), Verdict::Again);
        assert_eq!(broke(Broken::Reset, Progress::Sent), Verdict::Again);
        assert_eq!(broke(Broken::Timeout, Progress::Sent), Verdict::Again);
        assert_eq!(broke(Broken::TooLarge, Progress::Answering), Verdict::GiveUp);
        for (status, verdict) in [
            (400, Verdict::GiveUp),
            (429, Verdict::GiveUp),
            (500, Verdict::GiveUp),
            (501, Verdict::GiveUp),
            (502, Verdict::Again),
            (503, Verdict::Again),
            (504, Verdict::Again),
            (505, Verdict::GiveUp),
        ] {
            assert_eq!(after_prefill(PrefillFault::Status(status)), verdict, "{status}");
            assert_eq!(after_decode_status(status), verdict, "{status}");
        }
    }

    #[test]
    fn item_19_a_hand_off_is_used_again_only_if_it_cannot_have_been_seen() {
        let verdict = |broken, progress| after_decode(failure(broken, progress));
        assert_eq!(verdict(Broken::Connect, Progress::NotSent), Verdict::AgainWithTheSameHandOff);
        assert_eq!(verdict(Broken::Reset, Progress::NotSent), Verdict::AgainWithTheSameHandOff);
        assert_eq!(verdict(Broken::Reset, Progress::Sent), Verdict::Again);
        assert_eq!(verdict(Broken::Protocol, Progress::Sent), Verdict::Again);
        assert_eq!(verdict(Broken::Timeout, Progress::Sent), Verdict::GiveUp);
        assert_eq!(verdict(Broken::TooLarge, Progress::Answering), Verdict::GiveUp);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failing_fleet_is_not_stormed() {
        let budget = Budget::new(Retry { per_request: 0.5, per_second: 1.0, burst: 2, ..Retry::default() });
        assert_eq!([budget.withdraw(), budget.withdraw(), budget.withdraw()], [true, true, false]);
        budget.deposit();
        assert!(!budget.withdraw());
        budget.deposit();
        assert!(budget.withdraw());
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!([budget.withdraw(), budget.withdraw(), budget.withdraw()], [true, true, false]);
    }
}
