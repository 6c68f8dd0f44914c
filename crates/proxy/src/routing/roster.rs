//! The peers of a fleet by what they serve, made when the fleet or what is known of it changes, so that a choice
//! among many looks at a few.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};

use foldhash::fast::RandomState;

use super::PeerKey;
use super::ring::Ring;
use crate::error::Stage;
use crate::models::{Candidate, PdRatio, divide};
use crate::pool::Snapshot;
use crate::pool::peer::Peer;

/// Up to so many peers of a stage are all looked at.
pub(crate) const FEW: usize = 8;

/// Models of which not every engine takes requests.
pub(crate) type Ratios = Vec<(Arc<str>, PdRatio)>;

/// The peers of each stage that take a model's requests.
pub(crate) type Shares = HashMap<Arc<str>, [Vec<Arc<Peer>>; 2]>;

/// The peers of one snapshot.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    pub(crate) snapshot: Arc<Snapshot>,
    by_model: HashMap<String, [Vec<Arc<Peer>>; 2]>,
    /// Every model that some peer lists, whether it may have requests of it or not.
    listed: HashSet<String>,
    /// Whether each peer of a stage has shown all that it may serve.
    complete: [bool; 2],
    shares: Shares,
    /// Where each peer of a stage is in its list.
    places: Arc<[HashMap<PeerKey, usize, RandomState>; 2]>,
    rings: [OnceLock<Ring>; 2],
}

impl Roster {
    pub(crate) fn of(snapshot: &Arc<Snapshot>, ratios: &Ratios) -> Self {
        let mut by_model: HashMap<String, [Vec<Arc<Peer>>; 2]> = HashMap::new();
        let mut listed = HashSet::new();
        let mut complete = [true; 2];
        for stage in [Stage::Prefill, Stage::Decode] {
            for peer in snapshot.of(stage) {
                let models = Arc::clone(&peer.observed.now().models);
                // What a credential binds an engine to may have another name in its list.
                complete[stage as usize] &= !models.is_empty() && !peer.is_bound();
                for model in models.iter() {
                    if !listed.contains(&model.id) {
                        listed.insert(model.id.clone());
                    }
                    if !peer.may_have(Some(&model.id)) {
                        continue;
                    }
                    let lists = by_model.entry(model.id.clone()).or_default();
                    if lists[stage as usize].last().is_none_or(|last| !Arc::ptr_eq(last, peer)) {
                        lists[stage as usize].push(Arc::clone(peer));
                    }
                }
            }
        }
        let mut roster = Self {
            snapshot: Arc::clone(snapshot),
            by_model,
            listed,
            complete,
            shares: Shares::default(),
            places: Arc::new([Stage::Prefill, Stage::Decode].map(|stage| {
                snapshot.of(stage).iter().enumerate().map(|(at, peer)| (peer.routing.key, at)).collect()
            })),
            rings: Default::default(),
        };
        roster.shares = roster.shared_out(ratios);
        roster
    }

    /// The same fleet with other shares.
    pub(crate) fn with(&self, shares: Shares) -> Self {
        Self {
            snapshot: Arc::clone(&self.snapshot),
            by_model: self.by_model.clone(),
            listed: self.listed.clone(),
            complete: self.complete,
            shares,
            places: Arc::clone(&self.places),
            rings: self.rings.clone(),
        }
    }

    /// The peers that list a model and may have it, ready or not.
    pub(crate) fn serving(&self, stage: Stage, model: &str) -> &[Arc<Peer>] {
        self.by_model.get(model).map_or(&[], |lists| &lists[stage as usize])
    }

    /// The peer of a stage that has a key.
    pub(crate) fn peer(&self, stage: Stage, key: PeerKey) -> Option<&Arc<Peer>> {
        let at = self.places[stage as usize].get(&key)?;
        self.snapshot.of(stage).get(*at)
    }

    /// Whether no peer can have the model that its list does not name: one of its stage does, or all have shown
    /// their lists.
    pub(crate) fn must_list(&self, stage: Stage, model: &str) -> bool {
        self.complete[stage as usize] || !self.serving(stage, model).is_empty()
    }

    /// Whether the whole fleet has shown what it serves, and this is not part of it.
    pub(crate) fn is_unknown(&self, model: &str) -> bool {
        let anybody = self.snapshot.all().next().is_some();
        anybody && self.complete == [true; 2] && !self.listed.contains(model)
    }

    /// The peers of a stage that take a model's requests, where not all do.
    pub(crate) fn share(&self, stage: Stage, model: Option<&str>) -> Option<&[Arc<Peer>]> {
        if self.shares.is_empty() {
            return None;
        }
        let share = &self.shares.get(model?)?[stage as usize];
        (!share.is_empty()).then_some(share)
    }

    pub(crate) fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Who takes the requests of models with a ratio, by who is open now.
    pub(crate) fn shared_out(&self, ratios: &Ratios) -> Shares {
        let mut shares = Shares::default();
        for (model, ratio) in ratios {
            let open = |stage| -> Vec<&Arc<Peer>> {
                self.serving(stage, model).iter().filter(|peer| peer.is_open()).collect()
            };
            let all = [open(Stage::Prefill), open(Stage::Decode)];
            // The same for both roles of one engine.
            let place = |peer: &&Arc<Peer>| {
                let url = peer.address.as_deref().unwrap_or(&peer.spec.url);
                peer.spec.dp_rank.map_or_else(|| url.to_owned(), |rank| format!("{url}#{rank}"))
            };
            let places = all.each_ref().map(|peers| peers.iter().map(place).collect::<Vec<_>>());
            let [prefill, decode] = places
                .each_ref()
                .map(|places| places.iter().map(|place| Candidate { place }).collect::<Vec<_>>());
            let shared = divide(model, *ratio, &prefill, &decode);
            let taken = |stage: Stage, places: &[usize]| {
                places.iter().map(|at| Arc::clone(all[stage as usize][*at])).collect::<Vec<_>>()
            };
            let lists = [taken(Stage::Prefill, &shared.prefill), taken(Stage::Decode, &shared.decode)];
            shares.insert(Arc::clone(model), lists);
        }
        shares
    }

    /// All peers of a stage on a ring; made when it is first asked for.
    pub(crate) fn ring(&self, stage: Stage) -> &Ring {
        self.rings[stage as usize].get_or_init(|| {
            Ring::new(self.snapshot.of(stage).iter().map(|peer| (peer.routing.key, peer.id.as_str(), 1.0)))
        })
    }
}
