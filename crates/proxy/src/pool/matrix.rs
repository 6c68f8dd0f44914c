//! The verdict on every pair of peers, made when the fleet changes so that a choice only looks it
//! up. A pair of which nothing has changed keeps its verdict.

mod compact;

use std::collections::HashMap;
use std::sync::Arc;

use kv_connector::protocol::params::Generation;
use serde::Serialize;
use tokio::time::Instant;

use super::Snapshot;
use super::pairing::{Identity, Verdict, judge};
use super::peer::Peer;
use crate::settings::Pairing;

/// A prefill and a decode peer by their places in memory; the matrix keeps both alive.
pub(crate) type PairKey = (usize, usize);

pub(crate) fn pair_key(prefill: &Peer, decode: &Peer) -> PairKey {
    (std::ptr::from_ref(prefill).addr(), std::ptr::from_ref(decode).addr())
}

/// All pairs.
#[derive(Debug, Default)]
pub(crate) struct Matrix {
    pairs: HashMap<PairKey, Judged>,
    /// By decode peer, the prefill peers that may hand off to it.
    partners: HashMap<usize, Vec<Arc<Peer>>>,
}

/// One pair.
#[derive(Clone, Debug)]
pub(crate) struct Judged {
    prefill: Arc<Peer>,
    decode: Arc<Peer>,
    inputs: [Inputs; 2],
    verdict: Arc<Verdict>,
    quarantine: Option<Quarantine>,
    used: bool,
}

/// What the verdict on a pair depends on, of one peer.
#[derive(Clone, Debug)]
struct Inputs {
    identity: Arc<Identity>,
    generation: Option<Generation>,
    models: u64,
    tp_size: Option<u32>,
}

impl Inputs {
    fn of(peer: &Peer) -> Self {
        Self {
            identity: peer.identity.load_full(),
            generation: peer.generation(),
            models: peer.observed.read().models_changed,
            tp_size: peer.observed.read().tp_size,
        }
    }

    fn are(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.identity, &other.identity)
            && self.generation == other.generation
            && self.models == other.models
            && self.tp_size == other.tp_size
    }
}

/// Why a pair that may fit is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quarantine {
    /// An operator said so of one of the two.
    Operator,
    /// One of them restarted after they had talked.
    Restarted { until: Instant },
}

impl Matrix {
    pub(crate) fn of(
        peers: &Snapshot,
        before: &Self,
        rules: &Pairing,
        quarantined: &HashMap<PairKey, Instant>,
    ) -> Self {
        let mut matrix = Self::default();
        let decode: Vec<_> = peers.decode.iter().map(|peer| (peer, Inputs::of(peer))).collect();
        for prefill in &peers.prefill {
            let of_prefill = Inputs::of(prefill);
            for (decode, of_decode) in &decode {
                let key = pair_key(prefill, decode);
                let known = before
                    .pairs
                    .get(&key)
                    .filter(|known| known.inputs[0].are(&of_prefill) && known.inputs[1].are(of_decode));
                let verdict = known.map_or_else(
                    || Arc::new(judge(prefill, decode, rules)),
                    |known| Arc::clone(&known.verdict),
                );
                let by_operator = prefill.standing.is_quarantined() || decode.standing.is_quarantined();
                let restarted = quarantined.get(&key).map(|until| Quarantine::Restarted { until: *until });
                let quarantine = if by_operator { Some(Quarantine::Operator) } else { restarted };
                let used = verdict.allows(rules.unknown) && quarantine.is_none();
                if used {
                    matrix.partners.entry(key.1).or_default().push(Arc::clone(prefill));
                }
                let judged = Judged {
                    prefill: Arc::clone(prefill),
                    decode: Arc::clone(decode),
                    inputs: [of_prefill.clone(), of_decode.clone()],
                    verdict,
                    quarantine,
                    used,
                };
                matrix.pairs.insert(key, judged);
            }
        }
        matrix
    }

    /// Whether a pair may be used; none when one of the two is no longer, or not yet, in the fleet.
    pub(crate) fn fits(&self, prefill: &Peer, decode: &Peer) -> Option<bool> {
        self.pairs.get(&pair_key(prefill, decode)).map(|judged| judged.used)
    }

    pub(crate) fn knows(&self, pair: &PairKey) -> bool {
        self.pairs.contains_key(pair)
    }

    /// The prefill peers that may hand off to a decode peer, ready or not.
    pub(crate) fn partners(&self, decode: &Peer) -> &[Arc<Peer>] {
        self.partners.get(&std::ptr::from_ref(decode).addr()).map_or(&[], Vec::as_slice)
    }

    /// How many pairs there are of each verdict, used or not.
    pub(crate) fn counts(&self) -> HashMap<(&'static str, bool), usize> {
        let mut counts = HashMap::new();
        for judged in self.pairs.values() {
            *counts.entry((judged.verdict.label(), judged.used)).or_default() += 1;
        }
        counts
    }

    /// What operators see of a pair.
    pub(crate) fn view(&self, prefill: &Peer, decode: &Peer) -> Option<PairView> {
        let judged = self.pairs.get(&pair_key(prefill, decode))?;
        let hash = |inputs: &Inputs| inputs.identity.compatibility_hash().map(str::to_owned);
        Some(PairView {
            prefill: judged.prefill.id.clone(),
            decode: judged.decode.id.clone(),
            verdict: (*judged.verdict).clone(),
            reason: judged.verdict.reason(),
            quarantine: judged.quarantine.map(QuarantineView::of),
            used: judged.used,
            prefill_hash: hash(&judged.inputs[0]),
            decode_hash: hash(&judged.inputs[1]),
        })
    }
}

/// One pair as operators see it.
#[derive(Clone, Debug, Serialize)]
pub struct PairView {
    /// Id of the prefill peer.
    pub prefill: String,
    /// Id of the decode peer.
    pub decode: String,
    /// What is known of it.
    pub verdict: Verdict,
    /// Why the verdict is not better, in words.
    pub reason: Option<String>,
    /// Why it is kept from use although it may fit.
    pub quarantine: Option<QuarantineView>,
    /// Whether requests may use it.
    pub used: bool,
    /// The prefill engines' digest, if it is known and one.
    pub prefill_hash: Option<String>,
    /// The decode engines' digest, if it is known and one.
    pub decode_hash: Option<String>,
}

/// A quarantine as operators see it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct QuarantineView {
    /// `operator` or `restarted`.
    pub reason: &'static str,
    /// When it ends by itself.
    pub seconds_left: Option<f64>,
}

impl QuarantineView {
    fn of(quarantine: Quarantine) -> Self {
        match quarantine {
            Quarantine::Operator => Self { reason: "operator", seconds_left: None },
            Quarantine::Restarted { until } => {
                let left = until.saturating_duration_since(Instant::now());
                Self { reason: "restarted", seconds_left: Some(left.as_secs_f64()) }
            }
        }
    }
}
