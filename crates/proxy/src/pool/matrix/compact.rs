//! The whole matrix in few words, for fleets whose pairs are many: each kind of verdict once, and each prefill
//! peer's row as runs of kinds.

use std::collections::HashMap;

use serde::Serialize;

use super::{Matrix, Quarantine, pair_key};
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
        let mut rows = Vec::with_capacity(peers.prefill.len());
        for prefill in &peers.prefill {
            let mut row: Vec<u32> = Vec::new();
            for decode in &peers.decode {
                let mut kind = self.kind(pair_key(prefill, decode));
                if kinds.len() >= MOST_KINDS && !places.contains_key(&kind) {
                    kind.reason = None;
                }
                let place = *places.entry(kind).or_insert_with_key(|kind| {
                    kinds.push(kind.clone());
                    kinds.len() as u32 - 1
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

    fn kind(&self, key: super::PairKey) -> Kind {
        // A peer that has just come is judged at the next look.
        let Some(judged) = self.pairs.get(&key) else {
            return Kind { verdict: "unknown", reason: None, quarantine: None, used: false };
        };
        Kind {
            verdict: judged.verdict.label(),
            reason: match &*judged.verdict {
                Verdict::Compatible => None,
                verdict => verdict.reason(),
            },
            quarantine: judged.quarantine.map(|quarantine| match quarantine {
                Quarantine::Operator => "operator",
                Quarantine::Restarted { .. } => "restarted",
            }),
            used: judged.used,
        }
    }
}
