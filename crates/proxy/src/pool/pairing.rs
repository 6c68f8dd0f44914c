//! Which prefill and decode engines can hand off to each other, as far as is known: a pair whose
//! handshake would fail serves nobody, and kills a version 2 decode engine.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kv_connector::fit::{self, Fit, Misfit, PublishedEngine, PublishedRank, Unknown};
use kv_connector::protocol::params::{Generation, TransferMode};
use serde::{Serialize, Serializer};

use super::matrix::Facts;
use super::peer::Peer;
use super::writers::Writers;
use crate::registry::{EngineRecord, EngineState, RegistrySnapshot};
use crate::settings::{Pairing, UnknownPairs};

/// The registered engines by their base URL, in the order of their data-parallel ranks.
pub(crate) struct ByAddress<'a> {
    registry: &'a RegistrySnapshot,
    engines: HashMap<&'a str, Vec<&'a Arc<EngineRecord>>>,
}

impl<'a> ByAddress<'a> {
    pub(crate) fn new(registry: &'a RegistrySnapshot) -> Self {
        let mut engines: HashMap<&str, Vec<&Arc<EngineRecord>>> = HashMap::new();
        for engine in registry.engines.values() {
            if let Some(base_url) = &engine.base_url {
                engines.entry(base_url).or_default().push(engine);
            }
        }
        engines.values_mut().for_each(|engines| engines.sort_by_key(|engine| engine.dp_rank));
        Self { registry, engines }
    }
}

/// What the registry says of the engines behind a peer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Identity {
    /// The engines, one per data-parallel rank.
    pub(crate) engines: Vec<Arc<EngineRecord>>,
    /// Whether they are known by the peer's address, not only by what its hand-offs named.
    pub(crate) at_address: bool,
}

impl Identity {
    /// Looks a peer up by its base URL, else by the ids that its hand-offs named.
    pub(crate) fn of(peer: &Peer, registry: &ByAddress<'_>, writers: &Writers) -> Self {
        let at_address = peer.address.as_deref().and_then(|address| registry.engines.get(address));
        let believed = |engine: &&Arc<EngineRecord>| writers.believe(engine, peer);
        let of_rank = at_address.into_iter().flatten().filter(|engine| {
            // Of one of several ranks, only its own engine.
            believed(engine) && peer.spec.dp_rank.is_none_or(|rank| engine.dp_rank == rank)
        });
        let engines: Vec<_> = of_rank.map(|engine| Arc::clone(engine)).collect();
        if !engines.is_empty() {
            return Self { engines, at_address: true };
        }
        let named = peer.observed.now().engine_ids.clone();
        let engines =
            named.iter().filter_map(|id| registry.registry.engines.get(id)).filter(believed).cloned();
        Self { engines: engines.collect(), at_address: false }
    }

    /// Whether both are of the same records.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.at_address == other.at_address
            && self.engines.len() == other.engines.len()
            && self.engines.iter().zip(&other.engines).all(|(one, other)| Arc::ptr_eq(one, other))
    }

    pub(crate) fn engine_ids(&self) -> BTreeSet<String> {
        self.engines.iter().map(|engine| engine.engine_id.clone()).collect()
    }

    /// Their connector generation, where all of them agree.
    pub(crate) fn generation(&self) -> Option<Generation> {
        agreed(self.engines.iter().map(|engine| engine.connector()))
    }

    /// Which side drives the copy, where all of them agree.
    pub(crate) fn transfer_mode(&self) -> Option<TransferMode> {
        agreed(self.engines.iter().map(|engine| engine.traits.transfer_mode))
    }

    /// Their digest, where all of them agree.
    pub(crate) fn compatibility_hash(&self) -> Option<&str> {
        agreed(self.engines.iter().map(|engine| engine.compatibility_hash()))
    }

    /// The state of the one that is furthest from serving: which of them a request reaches is not
    /// the router's choice.
    pub(crate) fn state(&self) -> Option<EngineState> {
        let rank = |state: &EngineState| match state {
            EngineState::Ready => 0,
            EngineState::Draining => 1,
            EngineState::Registering => 2,
        };
        self.engines.iter().map(|engine| engine.state).max_by_key(rank)
    }
}

fn agreed<T: PartialEq>(mut values: impl Iterator<Item = Option<T>>) -> Option<T> {
    let first = values.next()??;
    values.all(|value| value.as_ref() == Some(&first)).then_some(first)
}

/// Whether a pair can hand off.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The handshake of every rank would pass.
    Compatible,
    /// Too little is known; of what, where the engines are registered.
    Unknown(Option<Unknown>),
    /// The handshake would fail.
    Misfit(Box<Misfit>),
    /// The prefill engine has more tensor-parallel ranks, which the operator does not want.
    MoreRanks {
        /// The prefill engine's.
        prefill: u32,
        /// The decode engine's.
        decode: u32,
    },
}

impl Verdict {
    /// Its name for machines.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Compatible => "compatible",
            Self::Unknown(_) => "unknown",
            Self::Misfit(misfit) => misfit.label(),
            Self::MoreRanks { .. } => "prefill_tp_larger",
        }
    }

    /// Why it is not better, for people.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Compatible => None,
            Self::Unknown(unknown) => unknown.map(|unknown| unknown.to_string()),
            Self::Misfit(misfit) => Some(misfit.to_string()),
            Self::MoreRanks { prefill, decode } => Some(format!(
                "the prefill engine has {prefill} tensor-parallel ranks, the decode engine {decode}"
            )),
        }
    }

    /// Whether such a pair may be used.
    pub(crate) fn allows(&self, unknown: UnknownPairs) -> bool {
        match self {
            Self::Compatible => true,
            Self::Unknown(_) => unknown == UnknownPairs::Allow,
            Self::Misfit(_) | Self::MoreRanks { .. } => false,
        }
    }
}

impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.label())
    }
}

impl From<Misfit> for Verdict {
    fn from(misfit: Misfit) -> Self {
        Self::Misfit(Box::new(misfit))
    }
}

/// Judges a pair: every engine of the one with every engine of the other, since any of them may
/// meet.
pub(crate) fn judge(prefill: &Facts, decode: &Facts, rules: &Pairing) -> Verdict {
    if let Some(misfit) = without_a_common_model(prefill, decode) {
        return misfit.into();
    }
    let (p, d) = (&prefill.identity, &decode.identity);
    let mut unknown = None;
    for prefill in &p.engines {
        for decode in &d.engines {
            match fit::judge(&published(prefill), &published(decode)) {
                Ok(Fit::Passes) => {}
                Ok(Fit::Unknown(what)) => unknown = Some(what),
                Err(misfit) => return misfit.into(),
            }
        }
    }
    if let (Some(p), Some(d)) = (prefill.generation, decode.generation)
        && p != d
    {
        return Misfit::Generations { prefill: p, decode: d }.into();
    }
    if let (Some(p), Some(d)) = (prefill.transfer_mode, decode.transfer_mode)
        && p != d
    {
        return Misfit::Modes { prefill: p, decode: d }.into();
    }
    if rules.prefill_tp_at_most_decode
        && let (Some(p), Some(d)) = (tp_size(prefill), tp_size(decode))
        && p > d
    {
        return Verdict::MoreRanks { prefill: p, decode: d };
    }
    let known = !p.engines.is_empty() && !d.engines.is_empty() && unknown.is_none();
    if known { Verdict::Compatible } else { Verdict::Unknown(unknown) }
}

/// The tensor-parallel size of a peer's engines: the largest that is registered, else the operator's word,
/// else what its hand-offs told.
fn tp_size(facts: &Facts) -> Option<u32> {
    let published = |engine: &Arc<EngineRecord>| {
        let ranks = || engine.ranks.keys().map(|(_, tp_rank)| tp_rank.saturating_add(1)).max();
        engine.traits.tp_size.or_else(ranks)
    };
    let registered = facts.identity.engines.iter().filter_map(published).max();
    registered.or(facts.tp_size)
}

/// Both legs name one model, so that peers whose lists have none in common never serve a request.
fn without_a_common_model(prefill: &Facts, decode: &Facts) -> Option<Misfit> {
    let [p, d] = [&prefill.models, &decode.models];
    let common = p.is_empty() || d.is_empty() || p.iter().any(|p| d.iter().any(|d| p.id == d.id));
    let list = |models: &[super::peer::ServedModel]| {
        models.iter().map(|model| model.id.as_str()).collect::<Vec<_>>().join(", ")
    };
    (!common).then(|| Misfit::Models { prefill: list(p), decode: list(d) })
}

fn published(engine: &EngineRecord) -> PublishedEngine<'_> {
    PublishedEngine {
        engine_id: &engine.engine_id,
        model: engine.model.as_deref(),
        traits: &engine.traits,
        ranks: engine
            .ranks
            .iter()
            .map(|((pp_rank, tp_rank), view)| PublishedRank {
                pp_rank: *pp_rank,
                tp_rank: *tp_rank,
                compatibility_hash: &view.compatibility_hash,
                metadata: &view.metadata,
            })
            .collect(),
    }
}
