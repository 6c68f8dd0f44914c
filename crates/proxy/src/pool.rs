//! The fleet: peers by role in one snapshot that is swapped whole, and the choice among them.

pub(crate) mod pairing;
pub(crate) mod peer;
pub(crate) mod probe;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::value::RawValue;

use pairing::Identity;
pub use pairing::{PairView, Verdict};
pub use peer::{Authorization, PeerFault, PeerSpec, PeerSpecError, PeerState, PeerView, Role, is_host};
use peer::{InFlight, Peer};

use crate::client::ModelScope;
use crate::error::{ProxyError, Stage};
use crate::registry::{Registry, canonical_base_url};
use crate::settings::UnknownPairs;

#[derive(Debug, Default)]
struct Snapshot {
    prefill: Vec<Arc<Peer>>,
    decode: Vec<Arc<Peer>>,
}

impl Snapshot {
    fn of(&self, stage: Stage) -> &[Arc<Peer>] {
        match stage {
            Stage::Prefill => &self.prefill,
            Stage::Decode => &self.decode,
        }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Peer>> {
        self.prefill.iter().chain(&self.decode)
    }
}

/// All peers.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    snapshot: ArcSwap<Snapshot>,
    /// Serialises changes; the values number the prefill and the decode peers without a name.
    changes: Mutex<[usize; 2]>,
    /// Whose turn it is among equally busy peers. One count per stage: with a common one, two
    /// choices a request would meet the same peer each time.
    turns: [AtomicUsize; 2],
    /// The registry's revision that the peers' identities are of.
    learnt: AtomicU64,
}

impl Pool {
    /// Adds a peer; it takes requests after its first good probe.
    ///
    /// # Errors
    /// The description cannot be used, or such a peer exists.
    pub(crate) fn add(&self, spec: PeerSpec) -> Result<Arc<Peer>, PeerSpecError> {
        let mut numbers = self.changes.lock();
        let current = self.snapshot.load();
        let id = match &spec.name {
            Some(name) => checked_name(name)?,
            None => numbered(&current, &mut numbers, spec.role),
        };
        let twin = current.all().find(|peer| {
            peer.id == id || (peer.spec.role == spec.role && is_same_url(&peer.spec.url, &spec.url))
        });
        if let Some(twin) = twin {
            return Err(PeerSpecError::Exists { id: twin.id.clone() });
        }
        let peer = Arc::new(Peer::new(id, spec)?);
        let mut next = Snapshot { prefill: current.prefill.clone(), decode: current.decode.clone() };
        match peer.spec.role {
            Role::Prefill => next.prefill.push(Arc::clone(&peer)),
            Role::Decode => next.decode.push(Arc::clone(&peer)),
        }
        self.snapshot.store(Arc::new(next));
        self.relearn();
        Ok(peer)
    }

    /// Takes a peer out; what is in flight with it goes on.
    pub(crate) fn remove(&self, id: &str) -> Option<PeerView> {
        let _changing = self.changes.lock();
        let current = self.snapshot.load();
        let gone = current.all().find(|peer| peer.id == id).map(|peer| peer.view())?;
        let keep = |peers: &[Arc<Peer>]| peers.iter().filter(|peer| peer.id != id).cloned().collect();
        self.snapshot
            .store(Arc::new(Snapshot { prefill: keep(&current.prefill), decode: keep(&current.decode) }));
        Some(gone)
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Peer>> {
        self.snapshot.load().all().find(|peer| peer.id == id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Peer>> {
        self.snapshot.load().all().cloned().collect()
    }

    /// Takes over what the registry says, if it has changed since.
    pub(crate) fn learn(&self, registry: &Registry) {
        if self.learnt.load(Ordering::Acquire) == registry.revision() {
            return;
        }
        let registry = registry.snapshot();
        for peer in self.snapshot.load().all() {
            let identity = Identity::of(peer, &registry);
            if **peer.identity.load() != identity {
                peer.identity.store(Arc::new(identity));
            }
        }
        self.learnt.store(registry.revision, Ordering::Release);
    }

    /// The next identities are made anew, because a peer has come or has named a new engine.
    pub(crate) fn relearn(&self) {
        self.learnt.store(u64::MAX, Ordering::Release);
    }

    /// The least busy ready peer of a stage that fits and lists the model. When no fitting peer lists
    /// it, any fitting one: the engine answers in its own words whether it has the model.
    ///
    /// `tried` are those that have failed this request already.
    ///
    /// # Errors
    /// [`ProxyError::NoPeer`] when none is ready, [`ProxyError::NoCompatiblePair`] when none of those
    /// that are ready fits.
    pub(crate) fn choose(
        &self,
        stage: Stage,
        model: Option<&str>,
        tried: &[Arc<Peer>],
        fits: impl Fn(&Peer) -> bool,
    ) -> Result<InFlight, ProxyError> {
        let snapshot = self.snapshot.load();
        let peers = snapshot.of(stage);
        let turn = self.turns[stage as usize].fetch_add(1, Ordering::Relaxed);
        let start = if peers.is_empty() { 0 } else { turn % peers.len() };
        let ready: Vec<&Arc<Peer>> = peers[start..]
            .iter()
            .chain(&peers[..start])
            .filter(|peer| peer.is_ready() && !tried.iter().any(|other| Arc::ptr_eq(other, peer)))
            .collect();
        let least_busy = |lists: &dyn Fn(&Peer) -> bool| {
            ready.iter().filter(|peer| lists(peer) && fits(peer)).min_by_key(|peer| peer.in_flight())
        };
        let serving = model.and_then(|model| least_busy(&|peer| peer.serves(model)));
        match serving.or_else(|| least_busy(&|_| true)) {
            Some(peer) => Ok(peer.enter()),
            None if ready.is_empty() => Err(ProxyError::NoPeer(stage)),
            None => Err(ProxyError::NoCompatiblePair),
        }
    }

    /// Whether a decode peer has a ready prefill peer that can hand off to it.
    pub(crate) fn has_partner(&self, decode: &Peer, unknown: UnknownPairs) -> bool {
        let snapshot = self.snapshot.load();
        snapshot.prefill.iter().any(|p| p.is_ready() && pairing::judge(p, decode).allows(unknown))
    }

    /// Whether any ready pair can hand off.
    pub(crate) fn has_pair(&self, unknown: UnknownPairs) -> bool {
        let snapshot = self.snapshot.load();
        snapshot.decode.iter().any(|decode| decode.is_ready() && self.has_partner(decode, unknown))
    }

    /// Every pair, with what is known of it.
    pub(crate) fn pairs(&self, unknown: UnknownPairs) -> Vec<PairView> {
        let snapshot = self.snapshot.load();
        let pairs = snapshot.prefill.iter().flat_map(|p| snapshot.decode.iter().map(move |d| (p, d)));
        pairs.map(|(prefill, decode)| PairView::of(prefill, decode, unknown)).collect()
    }

    /// The peers of a stage that take requests.
    pub(crate) fn ready_peers(&self, stage: Stage) -> Vec<Arc<Peer>> {
        self.snapshot.load().of(stage).iter().filter(|peer| peer.is_ready()).cloned().collect()
    }

    /// How many peers of a stage take requests.
    pub(crate) fn ready(&self, stage: Stage) -> usize {
        self.snapshot.load().of(stage).iter().filter(|peer| peer.is_ready()).count()
    }

    /// The union of the ready peers' model lists, each entry as the first peer gave it.
    pub(crate) fn models(&self) -> ModelList {
        let mut entries: BTreeMap<String, Box<RawValue>> = BTreeMap::new();
        for peer in self.snapshot.load().all().filter(|peer| peer.is_ready()) {
            for served in peer.observed.read().models.iter() {
                entries.entry(served.id.clone()).or_insert_with(|| served.entry.clone());
            }
        }
        let (ids, data) = entries.into_iter().unzip();
        ModelList { object: "list", data, ids }
    }
}

/// The next free id of a role; a number is never used twice, so that an id means one peer for good.
fn numbered(current: &Snapshot, numbers: &mut [usize; 2], role: Role) -> String {
    let [prefill, decode] = numbers;
    let number = match role {
        Role::Prefill => prefill,
        Role::Decode => decode,
    };
    loop {
        *number += 1;
        let id = format!("{}-{number}", role.stage().label());
        if current.all().all(|peer| peer.id != id) {
            return id;
        }
    }
}

fn is_same_url(one: &str, other: &str) -> bool {
    one == other || canonical_base_url(one).is_some_and(|url| canonical_base_url(other) == Some(url))
}

fn checked_name(name: &str) -> Result<String, PeerSpecError> {
    let fits = !name.is_empty()
        && name.len() <= 128
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if fits { Ok(name.to_owned()) } else { Err(PeerSpecError::Name { name: name.to_owned() }) }
}

/// OpenAI's model list over the whole fleet.
#[derive(Clone, Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<Box<RawValue>>,
    #[serde(skip)]
    ids: Vec<String>,
}

impl ModelList {
    /// Those that are in a scope.
    #[must_use]
    pub fn only(self, scope: &ModelScope) -> Self {
        let entries = self.ids.into_iter().zip(self.data).filter(|(id, _)| scope.allows(id));
        let (ids, data) = entries.unzip();
        Self { object: self.object, data, ids }
    }

    /// The models' ids in order.
    #[must_use]
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// The entry of one model, as its peer gave it.
    #[must_use]
    pub fn entry(&self, id: &str) -> Option<&RawValue> {
        let position = self.ids.iter().position(|known| known == id)?;
        self.data.get(position).map(AsRef::as_ref)
    }
}

/// How many peers take requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// Ready prefill engines.
    pub prefill_ready: usize,
    /// Ready decode engines.
    pub decode_ready: usize,
    /// The router is shutting down and wants no new requests.
    pub draining: bool,
    /// Whether any ready prefill engine can hand off to any ready decode engine.
    #[serde(skip)]
    pub pair: bool,
}

impl Readiness {
    /// At least one pair can serve, and the router is not leaving.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.pair && !self.draining
    }
}
