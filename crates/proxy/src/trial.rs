//! One real hand-off of a pair that an operator names, and what came of it. Never uses a pair that is known not
//! to fit, and holds no engine's address.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, timeout};

use crate::pool::peer::{Peer, Role};
use crate::pool::probe;
use crate::warm_up::{self, NotWarm};
use crate::{Core, Proxy, Stage};

/// Longest hand-off; a first handshake has been seen to take half a minute.
const LONGEST: Duration = Duration::from_secs(90);

/// How long the decode engine's counters may lag behind its answer, and how often they are read meanwhile.
const LAG: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(100);

/// What came of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrialResult {
    /// The decode engine answered, and nothing says that it did not read the blocks.
    Works,
    /// The decode engine answered, but its counters say that it computed the prompt itself.
    NotRead,
    /// The pair is known not to fit; nothing was sent.
    Incompatible,
    /// The pair is kept from hand-offs; nothing was sent.
    Quarantined,
    /// The prefill engine does not answer its probes; nothing was sent.
    PrefillUnready,
    /// The decode engine does not answer its probes; nothing was sent.
    DecodeUnready,
    /// The engines list no model in common; nothing was sent.
    NoCommonModel,
    /// The prefill engine broke off or refused.
    PrefillFailed,
    /// The prefill engine's hand-off is missing or must not be used.
    HandOffRefused,
    /// The decode engine broke off or refused.
    DecodeFailed,
    /// It took too long.
    TimedOut,
}

/// One trial of a pair.
#[derive(Clone, Debug, Serialize)]
pub struct Trial {
    /// Id of the prefill peer.
    pub prefill: String,
    /// Id of the decode peer.
    pub decode: String,
    /// What came of it.
    pub result: TrialResult,
    /// Why, in words.
    pub detail: Option<String>,
    /// How long it took.
    pub seconds: f64,
    /// How many blocks were handed off.
    pub blocks: Option<usize>,
    /// Whether the decode engine counted a transfer meanwhile; none where it does not count them.
    pub read: Option<bool>,
}

/// Which of the two peers does not exist in its role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no {} peer `{id}`", .stage.label())]
pub struct UnknownPeer {
    /// Which role it was to have.
    pub stage: Stage,
    /// Its id as given.
    pub id: String,
}

/// A decode engine's own count of transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Transfers {
    done: Option<f64>,
    failed: f64,
}

impl Transfers {
    fn read(page: &str) -> Self {
        let mut transfers = Self::default();
        for line in page.lines() {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let name = series.split('{').next().unwrap_or(series);
            let Ok(value) = value.parse::<f64>() else { continue };
            match name {
                "vllm:nixl_xfer_time_seconds_count" => {
                    transfers.done = Some(transfers.done.unwrap_or(0.0) + value);
                }
                "vllm:nixl_num_failed_transfers_total" => transfers.failed += value,
                _ => {}
            }
        }
        transfers
    }

    /// What has come since: whether it read, as far as that can be told.
    fn since(self, before: Self) -> Option<bool> {
        match (self.done, before.done) {
            (Some(now), before) if now > before.unwrap_or(0.0) => Some(true),
            _ if self.failed > before.failed => Some(false),
            (None, _) => None,
            (Some(_), _) => Some(false),
        }
    }
}

impl Proxy {
    /// Makes one small hand-off of a pair, drained or not, and says what came of it. Dropping the future frees
    /// what was taken.
    ///
    /// # Errors
    /// One of the two is not in the fleet.
    pub async fn try_pair(&self, prefill: &str, decode: &str) -> Result<Trial, UnknownPeer> {
        let find = |id: &str, role: Role| {
            let found = self.core.pool.get(id).filter(|peer| peer.spec.role == role);
            found.ok_or_else(|| UnknownPeer { stage: role.stage(), id: id.to_owned() })
        };
        let pair = [find(prefill, Role::Prefill)?, find(decode, Role::Decode)?];
        self.core.pool.learn(&self.core.registry);
        let began = Instant::now();
        let mut trial = Trial {
            prefill: prefill.to_owned(),
            decode: decode.to_owned(),
            result: TrialResult::Works,
            detail: None,
            seconds: 0.0,
            blocks: None,
            read: None,
        };
        if let Some((result, detail)) = self.core.hindrance(&pair) {
            return Ok(Trial { result, detail, ..trial });
        }
        if timeout(LONGEST, self.core.make_trial(&pair, &mut trial)).await.is_err() {
            trial.result = TrialResult::TimedOut;
            trial.detail = Some(format!("it took longer than {} s", LONGEST.as_secs()));
        }
        trial.seconds = began.elapsed().as_secs_f64();
        Ok(trial)
    }
}

impl Core {
    /// Why a pair is not to be tried.
    fn hindrance(&self, [prefill, decode]: &[Arc<Peer>; 2]) -> Option<(TrialResult, Option<String>)> {
        let last = |peer: &Peer| peer.observed.now().last_error.as_ref().map(|fault| fault.kind.clone());
        if !prefill.is_ready() {
            return Some((TrialResult::PrefillUnready, last(prefill)));
        }
        if !decode.is_ready() {
            return Some((TrialResult::DecodeUnready, last(decode)));
        }
        let Some(pair) = self.pool.pair(prefill, decode) else {
            // One of the two has just come or gone.
            return (!self.pool.fits(prefill, decode)).then_some((TrialResult::Incompatible, None));
        };
        match &pair.quarantine {
            Some(quarantine) => Some((TrialResult::Quarantined, Some(quarantine.reason.to_owned()))),
            None if pair.used => None,
            None => Some((TrialResult::Incompatible, pair.reason.clone())),
        }
    }

    async fn make_trial(self: &Arc<Self>, [prefill, decode]: &[Arc<Peer>; 2], trial: &mut Trial) {
        let before = self.transfers(decode).await;
        match warm_up::exercise(self, prefill, decode).await {
            Ok(blocks) => trial.blocks = Some(blocks),
            Err(error) => {
                trial.result = match &error {
                    NotWarm::NoCommonModel => TrialResult::NoCommonModel,
                    NotWarm::Broken(failure) => failed_at(failure.stage),
                    NotWarm::Status { stage, .. } => failed_at(*stage),
                    NotWarm::HandOff(_) => TrialResult::HandOffRefused,
                    NotWarm::Request(_) => TrialResult::PrefillFailed,
                };
                trial.detail = Some(error.to_string());
                return;
            }
        }
        let Some(before) = before else { return };
        let end = Instant::now() + LAG;
        loop {
            trial.read = self.transfers(decode).await.and_then(|now| now.since(before));
            if trial.read != Some(false) || Instant::now() >= end {
                break;
            }
            tokio::time::sleep(LOOK).await;
        }
        if trial.read == Some(false) {
            trial.result = TrialResult::NotRead;
            trial.detail =
                Some("the decode engine answered but counted no transfer that succeeded".to_owned());
        }
    }

    async fn transfers(&self, decode: &Arc<Peer>) -> Option<Transfers> {
        let page = timeout(LAG, probe::get(decode, &self.upstream, "/metrics")).await;
        let (status, page) = page.ok()?.ok()?;
        status.is_success().then(|| Transfers::read(&String::from_utf8_lossy(&page)))
    }
}

fn failed_at(stage: Stage) -> TrialResult {
    match stage {
        Stage::Prefill => TrialResult::PrefillFailed,
        Stage::Decode => TrialResult::DecodeFailed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_read_from_the_engines_own_page() {
        let page = "# HELP x\nvllm:nixl_xfer_time_seconds_count{engine=\"0\"} 2.0\n\
                    vllm:nixl_xfer_time_seconds_count{engine=\"1\"} 1.0\n\
                    vllm:nixl_num_failed_transfers_total{engine=\"0\"} 4.0\n";
        let before = Transfers::read(page);
        assert_eq!(before, Transfers { done: Some(3.0), failed: 4.0 });
        let more = |done, failed| Transfers { done, failed }.since(before);
        assert_eq!(more(Some(4.0), 4.0), Some(true));
        assert_eq!(more(Some(3.0), 4.0), Some(false), "nothing was read");
        assert_eq!(more(Some(3.0), 5.0), Some(false), "reading failed");
        assert_eq!(Transfers::read("up 1\n").since(Transfers::default()), None, "it does not count");
    }
}
