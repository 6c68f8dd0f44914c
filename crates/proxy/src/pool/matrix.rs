//! The verdict on every pair of peers, made when the fleet changes so that a choice only looks it up. It is
//! kept by class: what one more peer costs does not grow with the pairs that it is in.

mod class;
mod compact;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use foldhash::fast::RandomState;
use serde::Serialize;
use tokio::time::Instant;

use super::Snapshot;
use super::pairing::{Verdict, judge};
use super::peer::Peer;
use crate::settings::{Pairing, UnknownPairs};
use class::Digest;

pub(crate) use class::Facts;

/// A prefill and a decode peer by their places in memory; the matrix keeps both alive.
pub(crate) type PairKey = (usize, usize);

pub(crate) fn pair_key(prefill: &Peer, decode: &Peer) -> PairKey {
    (place(prefill), place(decode))
}

fn place(peer: &Peer) -> usize {
    std::ptr::from_ref(peer).addr()
}

/// All pairs.
#[derive(Debug, Default)]
pub(crate) struct Matrix {
    prefill: Side,
    decode: Side,
    /// By the prefill peer's class, then by the decode peer's.
    verdicts: Vec<Arc<Verdict>>,
    rules: Rules,
    /// Pairs that are kept apart because one of them restarted.
    restarted: HashMap<PairKey, Instant>,
}

/// The peers of one stage.
#[derive(Debug, Default)]
struct Side {
    members: HashMap<usize, Member, RandomState>,
    classes: HashMap<Digest, usize>,
}

#[derive(Debug)]
struct Member {
    /// Its place is a key as long as this lives.
    _peer: Arc<Peer>,
    facts: Facts,
    digest: Digest,
    class: usize,
    /// An operator keeps it apart.
    apart: bool,
}

/// What of the settings verdicts depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rules {
    unknown: UnknownPairs,
    prefill_tp_at_most_decode: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self::of(&Pairing::default())
    }
}

impl Rules {
    fn of(pairing: &Pairing) -> Self {
        let Pairing { unknown, prefill_tp_at_most_decode, .. } = *pairing;
        Self { unknown, prefill_tp_at_most_decode }
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

/// One pair.
struct Judged<'a> {
    prefill: &'a Member,
    decode: &'a Member,
    verdict: &'a Arc<Verdict>,
    quarantine: Option<Quarantine>,
    used: bool,
}

impl Side {
    fn of(peers: &[Arc<Peer>], facts: Vec<Facts>, before: &Self, shared: &HashSet<&str>) -> Self {
        let mut side = Self::default();
        for (peer, facts) in peers.iter().zip(facts) {
            let known = before.members.get(&place(peer)).filter(|known| known.facts.are(&facts));
            // One that is shared, or was, may have to be told from its like.
            let known = known.filter(|_| shared.is_empty());
            let digest = known.map_or_else(|| facts.digest(shared), |known| known.digest);
            let next = side.classes.len();
            let class = *side.classes.entry(digest).or_insert(next);
            let apart = peer.standing.is_quarantined();
            let member = Member { _peer: Arc::clone(peer), facts, digest, class, apart };
            side.members.insert(place(peer), member);
        }
        side
    }

    fn get(&self, peer: &Peer) -> Option<&Member> {
        self.members.get(&place(peer))
    }

    /// One member of each class, by class.
    fn examples(&self) -> Vec<&Member> {
        let mut examples = vec![None; self.classes.len()];
        for member in self.members.values() {
            examples[member.class] = Some(member);
        }
        examples.into_iter().flatten().collect()
    }

    /// How many members of each class there are that an operator keeps apart, and that none does.
    fn sizes(&self) -> Vec<[usize; 2]> {
        let mut sizes = vec![[0; 2]; self.classes.len()];
        for member in self.members.values() {
            sizes[member.class][usize::from(!member.apart)] += 1;
        }
        sizes
    }
}

impl Matrix {
    pub(crate) fn of(
        peers: &Snapshot,
        before: &Self,
        pairing: &Pairing,
        restarted: &HashMap<PairKey, Instant>,
    ) -> Self {
        let facts = |peers: &[Arc<Peer>]| peers.iter().map(|peer| Facts::of(peer)).collect::<Vec<_>>();
        let (of_prefill, of_decode) = (facts(&peers.prefill), facts(&peers.decode));
        let ids = |facts: &[Facts]| -> HashSet<String> {
            let engines = facts.iter().flat_map(|facts| &facts.identity.engines);
            engines.map(|engine| engine.engine_id.clone()).collect()
        };
        let (p, d) = (ids(&of_prefill), ids(&of_decode));
        let shared: HashSet<&str> = p.intersection(&d).map(String::as_str).collect();
        let prefill = Side::of(&peers.prefill, of_prefill, &before.prefill, &shared);
        let decode = Side::of(&peers.decode, of_decode, &before.decode, &shared);
        let rules = Rules::of(pairing);
        let known = |p: &Member, d: &Member| {
            let classes = (before.prefill.classes.get(&p.digest)?, before.decode.classes.get(&d.digest)?);
            (rules == before.rules).then(|| before.of_classes(*classes.0, *classes.1))
        };
        let mut verdicts = Vec::with_capacity(prefill.classes.len() * decode.classes.len());
        let examples = decode.examples();
        for p in prefill.examples() {
            for d in &examples {
                let known = known(p, d).cloned();
                verdicts.push(known.unwrap_or_else(|| Arc::new(judge(&p.facts, &d.facts, pairing))));
            }
        }
        let restarted = restarted.iter().map(|(pair, until)| (*pair, *until));
        let mut matrix = Self { prefill, decode, verdicts, rules, restarted: restarted.collect() };
        let (prefill, decode) = (&matrix.prefill.members, &matrix.decode.members);
        matrix.restarted.retain(|(p, d), _| prefill.contains_key(p) && decode.contains_key(d));
        matrix
    }

    fn of_classes(&self, prefill: usize, decode: usize) -> &Arc<Verdict> {
        &self.verdicts[prefill * self.decode.classes.len() + decode]
    }

    fn judged(&self, prefill: &Peer, decode: &Peer) -> Option<Judged<'_>> {
        let (p, d) = (self.prefill.get(prefill)?, self.decode.get(decode)?);
        let verdict = self.of_classes(p.class, d.class);
        let quarantine = if p.apart || d.apart {
            Some(Quarantine::Operator)
        } else if self.restarted.is_empty() {
            None
        } else {
            let until = self.restarted.get(&pair_key(prefill, decode));
            until.map(|until| Quarantine::Restarted { until: *until })
        };
        let used = quarantine.is_none() && verdict.allows(self.rules.unknown);
        Some(Judged { prefill: p, decode: d, verdict, quarantine, used })
    }

    /// Whether a pair may be used; none when one of the two is no longer, or not yet, in the fleet.
    pub(crate) fn fits(&self, prefill: &Peer, decode: &Peer) -> Option<bool> {
        self.judged(prefill, decode).map(|judged| judged.used)
    }

    pub(crate) fn knows(&self, pair: &PairKey) -> bool {
        self.prefill.members.contains_key(&pair.0) && self.decode.members.contains_key(&pair.1)
    }

    /// How many pairs there are of each verdict, used or not.
    pub(crate) fn counts(&self) -> HashMap<(&'static str, bool), usize> {
        let mut counts: HashMap<_, usize> = HashMap::new();
        let of_decode = self.decode.sizes();
        for (prefill, [p_apart, p]) in self.prefill.sizes().into_iter().enumerate() {
            for (decode, [d_apart, d]) in of_decode.iter().enumerate() {
                let verdict = self.of_classes(prefill, decode);
                let used = if verdict.allows(self.rules.unknown) { p * d } else { 0 };
                *counts.entry((verdict.label(), true)).or_default() += used;
                *counts.entry((verdict.label(), false)).or_default() += (p_apart + p) * (d_apart + d) - used;
            }
        }
        for (prefill, decode) in self.restarted.keys() {
            let (p, d) = (&self.prefill.members[prefill], &self.decode.members[decode]);
            let verdict = self.of_classes(p.class, d.class);
            if !p.apart && !d.apart && verdict.allows(self.rules.unknown) {
                *counts.entry((verdict.label(), true)).or_default() -= 1;
                *counts.entry((verdict.label(), false)).or_default() += 1;
            }
        }
        counts.retain(|_, count| *count > 0);
        counts
    }

    /// What operators see of a pair.
    pub(crate) fn view(&self, prefill: &Peer, decode: &Peer) -> Option<PairView> {
        let judged = self.judged(prefill, decode)?;
        let hash = |member: &Member| member.facts.identity.compatibility_hash().map(str::to_owned);
        Some(PairView {
            prefill: prefill.id.clone(),
            decode: decode.id.clone(),
            verdict: (**judged.verdict).clone(),
            reason: judged.verdict.reason(),
            quarantine: judged.quarantine.map(QuarantineView::of),
            used: judged.used,
            prefill_hash: hash(judged.prefill),
            decode_hash: hash(judged.decode),
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

#[cfg(test)]
mod tests;
