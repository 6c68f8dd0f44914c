//! The whole matrix in few words, for fleets whose pairs are many: each kind of verdict once, and each prefill
//! peer's row as runs of kinds.

use std::collections::HashMap;

use serde::Serialize;

use super::{Judged, Matrix, Quarantine};
use crate::pool::Snapshot;
use crate::pool::pairing::Verdict;

/// Most kinds of verdict that are told apart; what comes after them is told by its label only.
const MOST_KINDS: usize = 256;

/// All pairs.
#[derive(Debug, Serialize)]
pub(crate) struct CompactMatrix<'a> {
    prefill: Vec<&'a str>,
    decode: Vec<&'a str>,
    kinds: Vec<Kind>,
    /// For each prefill peer, over the decode peers: a kind's place, how many pairs in a row are of it, and
    /// so on.
    rows: Vec<Vec<u32>>,
}

/// A verdict as some pairs have it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
struct Kind {
    verdict: &'static str,
    reason: Option<String>,
    quarantine: Option<&'static str>,
    used: bool,
}

impl Matrix {
    /// The pairs of these peers.
    pub(crate) fn compact<'a>(&self, peers: &'a Snapshot) -> CompactMatrix<'a> {
        let mut kinds: Vec<Kind> = Vec::new();
        let mut places: HashMap<Kind, u32> = HashMap::new();
        // Of the pairs of two classes all have the same words but for quarantines.
        let mut met: HashMap<(usize, usize, Option<&'static str>), u32> = HashMap::new();
        let mut rows = Vec::with_capacity(peers.prefill.len());
        for prefill in &peers.prefill {
            let mut row: Vec<u32> = Vec::new();
            for decode in &peers.decode {
                let judged = self.judged(prefill, decode);
                let quarantine = judged.as_ref().and_then(|judged| judged.quarantine).map(named);
                let classes = judged.as_ref().map(|judged| (judged.prefill.class, judged.decode.class));
                let (of_prefill, of_decode) = classes.unwrap_or((usize::MAX, usize::MAX));
                let place = *met.entry((of_prefill, of_decode, quarantine)).or_insert_with(|| {
                    let mut kind = Kind::of(judged);
                    if kinds.len() >= MOST_KINDS && !places.contains_key(&kind) {
                        kind.reason = None;
                    }
                    *places.entry(kind).or_insert_with_key(|kind| {
                        kinds.push(kind.clone());
                        kinds.len() as u32 - 1
                    })
                });
                match row.as_mut_slice() {
                    [.., last, count] if *last == place => *count += 1,
                    _ => row.extend([place, 1]),
                }
            }
            rows.push(row);
        }
        let ids = |peers: &'a [std::sync::Arc<crate::pool::peer::Peer>]| {
            peers.iter().map(|peer| peer.id.as_str()).collect()
        };
        CompactMatrix { prefill: ids(&peers.prefill), decode: ids(&peers.decode), kinds, rows }
    }
}

impl Kind {
    fn of(judged: Option<Judged<'_>>) -> Self {
        // A peer that has just come is judged at the next look.
        let Some(judged) = judged else {
            return Self { verdict: "unknown", reason: None, quarantine: None, used: false };
        };
        Self {
            verdict: judged.verdict.label(),
            reason: match &**judged.verdict {
                Verdict::Compatible => None,
                verdict => verdict.reason(),
            },
            quarantine: judged.quarantine.map(named),
            used: judged.used,
        }
    }
}

fn named(quarantine: Quarantine) -> &'static str {
    match quarantine {
        Quarantine::Operator => "operator",
        Quarantine::Restarted { .. } => "restarted",
    }
}
