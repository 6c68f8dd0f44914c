//! Which prefill and decode engines can hand off to each other, as far as is known: a pair whose
//! handshake would fail serves nobody, and kills a version 2 decode engine.

use std::collections::BTreeSet;
use std::sync::Arc;

use kv_connector::protocol::params::Generation;
use serde::Serialize;

use super::peer::Peer;
use crate::registry::{RegistrySnapshot, canonical_base_url};
use crate::settings::UnknownPairs;

/// What the registry says of the engines behind a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Ids of the engines, one per data-parallel rank.
    pub(crate) engine_ids: BTreeSet<String>,
    /// Their connector generation and their digest, where all of them agree.
    pub(crate) generation: Option<Generation>,
    pub(crate) compatibility_hash: Option<Arc<str>>,
}

impl Identity {
    /// Looks a peer up by its base URL, else by the ids that its hand-offs named.
    pub(crate) fn of(peer: &Peer, registry: &RegistrySnapshot) -> Self {
        let url = canonical_base_url(&peer.spec.url);
        let at_url = registry.engines.values().filter(|engine| url.is_some() && engine.base_url == url);
        let of_rank = at_url.filter(|engine| peer.spec.dp_rank.is_none_or(|rank| engine.dp_rank == rank));
        let mut engines: Vec<_> = of_rank.collect();
        if engines.is_empty() {
            let named = peer.observed.read().engine_ids.clone();
            engines = named.iter().filter_map(|id| registry.engines.get(id)).collect();
        }
        let agreed = |mut values: Vec<Option<String>>| {
            values.dedup();
            if let [Some(only)] = values.as_mut_slice() { Some(std::mem::take(only)) } else { None }
        };
        let hashes = engines.iter().map(|engine| engine.compatibility_hash().map(str::to_owned)).collect();
        let mut generations: Vec<_> =
            engines.iter().map(|engine| engine.first_rank().map(|rank| rank.generation)).collect();
        generations.dedup();
        Self {
            engine_ids: engines.iter().map(|engine| engine.engine_id.clone()).collect(),
            generation: if let [only] = generations[..] { only } else { None },
            compatibility_hash: agreed(hashes).map(Arc::from),
        }
    }
}

/// Whether a pair can hand off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The handshake would pass, as far as the digests tell.
    Compatible,
    /// Too little is known.
    Unknown,
    /// The engines speak different connector generations.
    GenerationsDiffer,
    /// The engines' compatibility hashes differ.
    HashesDiffer,
}

impl Verdict {
    /// Whether such a pair may be used.
    pub(crate) fn allows(self, unknown: UnknownPairs) -> bool {
        match self {
            Self::Compatible => true,
            Self::Unknown => unknown == UnknownPairs::Allow,
            Self::GenerationsDiffer | Self::HashesDiffer => false,
        }
    }
}

/// Judges a pair.
pub(crate) fn judge(prefill: &Peer, decode: &Peer) -> Verdict {
    let (p, d) = (prefill.identity.load(), decode.identity.load());
    if let (Some(p), Some(d)) = (&p.compatibility_hash, &d.compatibility_hash) {
        return match (p == d, p_and_d_generations(prefill, decode)) {
            (true, _) => Verdict::Compatible,
            (false, Some((p, d))) if p != d => Verdict::GenerationsDiffer,
            (false, _) => Verdict::HashesDiffer,
        };
    }
    match p_and_d_generations(prefill, decode) {
        Some((p, d)) if p != d => Verdict::GenerationsDiffer,
        _ => Verdict::Unknown,
    }
}

fn p_and_d_generations(prefill: &Peer, decode: &Peer) -> Option<(Generation, Generation)> {
    Some((prefill.generation()?, decode.generation()?))
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
    /// Whether requests may use it.
    pub used: bool,
    /// The prefill engine's digest, if it is known.
    pub prefill_hash: Option<Arc<str>>,
    /// The decode engine's digest, if it is known.
    pub decode_hash: Option<Arc<str>>,
}

impl PairView {
    pub(crate) fn of(prefill: &Peer, decode: &Peer, unknown: UnknownPairs) -> Self {
        let verdict = judge(prefill, decode);
        Self {
            prefill: prefill.id.clone(),
            decode: decode.id.clone(),
            verdict,
            used: verdict.allows(unknown),
            prefill_hash: prefill.identity.load().compatibility_hash.clone(),
            decode_hash: decode.identity.load().compatibility_hash.clone(),
        }
    }
}
