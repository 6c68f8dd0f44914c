//! What a verdict depends on, of one peer. Peers of which all of it is equal are of one class and have the same
//! verdicts: a large fleet has few classes, and its pairs are judged once for each two of them.

use std::collections::HashSet;
use std::sync::Arc;

use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::protocol::params::{Generation, TransferMode};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::pool::pairing::Identity;
use crate::pool::peer::{Peer, ServedModel};
use crate::registry::EngineRecord;

/// Equal for peers of one class.
pub(super) type Digest = [u8; 32];

/// As a peer showed itself at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) identity: Arc<Identity>,
    pub(crate) generation: Option<Generation>,
    pub(crate) transfer_mode: Option<TransferMode>,
    pub(crate) models: Arc<[ServedModel]>,
    models_changed: u64,
    /// The operator's word for the tensor-parallel size, else what the hand-offs told.
    pub(crate) tp_size: Option<u32>,
}

/// All of a class but for the engines' payloads.
#[derive(Serialize)]
struct Described<'a> {
    generation: Option<u64>,
    transfer_mode: Option<&'static str>,
    models: Vec<&'a str>,
    tp_size: Option<u32>,
    engines: Vec<DescribedEngine<'a>>,
}

#[derive(Serialize)]
struct DescribedEngine<'a> {
    /// Only of an engine that is behind a peer of the other stage too, with which it cannot be paired.
    own: Option<&'a str>,
    model: Option<&'a str>,
    traits: kv_connector::fit::EngineTraits,
    ranks: Vec<(u32, u32, &'a str, NixlAgentMetadata)>,
}

impl Facts {
    pub(crate) fn of(peer: &Peer) -> Self {
        let identity = peer.identity.load_full();
        let observed = peer.observed.now();
        Self {
            generation: peer.spec.generation.or(identity.generation()).or(observed.generation),
            transfer_mode: peer.spec.transfer_mode.or(identity.transfer_mode()).or(observed.transfer_mode),
            models: Arc::clone(&observed.models),
            models_changed: observed.models_changed,
            tp_size: peer.spec.tp_size.or(observed.tp_size),
            identity,
        }
    }

    /// Whether nothing has changed since.
    pub(super) fn are(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.identity, &other.identity)
            && self.generation == other.generation
            && self.transfer_mode == other.transfer_mode
            && self.models_changed == other.models_changed
            && self.tp_size == other.tp_size
    }

    /// Of which class the peer is; `shared` are the engines behind peers of both stages.
    pub(super) fn digest(&self, shared: &HashSet<&str>) -> Digest {
        let mut models: Vec<_> = self.models.iter().map(|model| model.id.as_str()).collect();
        models.sort_unstable();
        let engines = self.identity.engines.iter().map(|engine| describe(engine, shared)).collect();
        let generation = self.generation.map(Generation::connector_version);
        let transfer_mode = self.transfer_mode.map(TransferMode::as_str);
        let described = Described { generation, transfer_mode, models, tp_size: self.tp_size, engines };
        let mut digest = Sha256::new();
        // Nothing in it can fail to be written as JSON.
        digest.update(serde_json::to_vec(&described).unwrap_or_default());
        digest.finalize().into()
    }
}

/// What a handshake with an engine depends on: not on who it is, nor on where its memory begins.
fn describe<'a>(engine: &'a EngineRecord, shared: &HashSet<&str>) -> DescribedEngine<'a> {
    let mut traits = engine.traits.clone();
    (traits.side_channel_host, traits.side_channel_port) = (None, None);
    let ranks = engine.ranks.iter().map(|((pp_rank, tp_rank), view)| {
        let mut metadata = view.metadata.clone();
        let (engine_id, agent, addresses) = match &mut metadata {
            NixlAgentMetadata::V2(of) => {
                (&mut of.engine_id, &mut of.agent_metadata, &mut of.kv_caches_base_addr)
            }
            NixlAgentMetadata::V14(of) => {
                (&mut of.engine_id, &mut of.agent_metadata, &mut of.kv_caches_base_addr)
            }
        };
        agent.clear();
        if *engine_id == engine.engine_id {
            engine_id.clear();
        }
        // Sums with an address of the upper half of the space may overflow; others are all alike.
        if let Some(first) = addresses.iter().min().copied().filter(|first| first >> 63 == 0) {
            addresses.iter_mut().for_each(|address| *address -= first);
        }
        (*pp_rank, *tp_rank, view.compatibility_hash.as_str(), metadata)
    });
    DescribedEngine {
        own: shared.get(engine.engine_id.as_str()).map(|_| engine.engine_id.as_str()),
        model: engine.model.as_deref(),
        traits,
        ranks: ranks.collect(),
    }
}
