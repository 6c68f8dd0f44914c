//! The peers of a fleet by what they serve, made when the fleet or what is known of it changes, so that a choice
//! among many looks at a few.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use super::ring::Ring;
use crate::error::Stage;
use crate::pool::Snapshot;
use crate::pool::peer::Peer;

/// Up to so many peers of a stage are all looked at.
pub(crate) const FEW: usize = 8;

/// The peers of one snapshot.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    pub(crate) snapshot: Arc<Snapshot>,
    by_model: HashMap<String, [Vec<Arc<Peer>>; 2]>,
    rings: [OnceLock<Ring>; 2],
}

impl Roster {
    pub(crate) fn of(snapshot: &Arc<Snapshot>) -> Self {
        let mut by_model: HashMap<String, [Vec<Arc<Peer>>; 2]> = HashMap::new();
        for stage in [Stage::Prefill, Stage::Decode] {
            let peers = snapshot.of(stage);
            if peers.len() <= FEW {
                continue;
            }
            for peer in peers {
                let models = Arc::clone(&peer.observed.read().models);
                for model in models.iter().filter(|model| peer.may_have(Some(&model.id))) {
                    let lists = by_model.entry(model.id.clone()).or_default();
                    if lists[stage as usize].last().is_none_or(|last| !Arc::ptr_eq(last, peer)) {
                        lists[stage as usize].push(Arc::clone(peer));
                    }
                }
            }
        }
        Self { snapshot: Arc::clone(snapshot), by_model, rings: Default::default() }
    }

    /// The peers that list a model and may have it, where there are many peers; ready or not.
    pub(crate) fn serving(&self, stage: Stage, model: &str) -> &[Arc<Peer>] {
        self.by_model.get(model).map_or(&[], |lists| &lists[stage as usize])
    }

    /// All peers of a stage on a ring; made when it is first asked for.
    pub(crate) fn ring(&self, stage: Stage) -> &Ring {
        self.rings[stage as usize].get_or_init(|| {
            Ring::new(self.snapshot.of(stage).iter().map(|peer| (peer.routing.key, peer.id.as_str(), 1.0)))
        })
    }
}
