//! The fleet: peers by role in one snapshot that is swapped whole, and the choice among them.

mod adopt;
pub(crate) mod breaker;
mod discovered;
mod exchange;
mod glance;
pub(crate) mod health;
pub(crate) mod load;
pub(crate) mod matrix;
mod models;
mod observed;
pub(crate) mod operator;
pub(crate) mod origin;
mod outcome;
pub(crate) mod pairing;
pub(crate) mod peer;
pub(crate) mod probe;
mod readiness;
pub(crate) mod scrape;
mod spec;
pub(crate) mod standing;
pub(crate) mod traffic;
pub(crate) mod writers;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

pub(crate) use adopt::Adopted;
pub use breaker::{BreakerSettings, BreakerState};
pub(crate) use discovered::Discovered;
use health::Health;
pub use health::HealthView;
pub use load::EngineLoadView;
use matrix::{Facts, Matrix, PairKey, pair_key};
pub use matrix::{PairView, QuarantineView};
pub use models::ModelList;
use operator::Operator;
pub use operator::{OperatorState, PeerPlace};
use origin::Origin;
pub use pairing::Verdict;
use pairing::{ByAddress, Identity};
use peer::Peer;
pub use peer::{Authorization, PeerFault, PeerSpec, PeerSpecError, PeerState, PeerView, Role, is_host};
pub use readiness::Readiness;
pub use standing::Restarts;
use standing::Standing;
use tokio::sync::Notify;
use tokio::time::Instant;
pub use writers::Writers;

use crate::dial::Dials;
use crate::error::Stage;
use crate::registry::{Registry, canonical_base_url};
use crate::request::Endpoint;
use crate::routing::facts::TokenSize;
use crate::routing::prefix::PrefixTree as Prefixes;
use crate::routing::roster::{Ratios, Roster};
use crate::routing::surroundings::Surroundings;
use crate::settings::{Pairing, Settings};
use crate::warm_up::Turn;

#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    prefill: Vec<Arc<Peer>>,
    decode: Vec<Arc<Peer>>,
}

impl Snapshot {
    pub(crate) fn of(&self, stage: Stage) -> &[Arc<Peer>] {
        match stage {
            Stage::Prefill => &self.prefill,
            Stage::Decode => &self.decode,
        }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Peer>> {
        self.prefill.iter().chain(&self.decode)
    }

    fn retain(&mut self, stays: impl Fn(&Peer) -> bool) {
        self.prefill.retain(|peer| stays(peer));
        self.decode.retain(|peer| stays(peer));
    }

    fn push(&mut self, peer: Arc<Peer>) {
        match peer.spec.role {
            Role::Prefill => self.prefill.push(peer),
            Role::Decode => self.decode.push(peer),
        }
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
    pairing: ArcSwap<Pairing>,
    writers: ArcSwap<Writers>,
    /// The verdicts on all pairs.
    matrix: ArcSwap<Matrix>,
    /// What operators decided.
    pub(crate) operator: Operator,
    /// Pairs of which one side restarted, until when they are not used.
    quarantined: Mutex<HashMap<PairKey, Instant>>,
    /// Held by whoever learns.
    learning: Mutex<()>,
    /// Whose turn it is to warm a peer up.
    pub(crate) warming: Turn,
    /// Told when a peer answers that did not.
    pub(crate) came_back: Notify,
    /// The registry's revision, and the count of wishes to learn anew, that the matrix is of.
    learnt: [AtomicU64; 2],
    wishes: AtomicU64,
    breaker: ArcSwap<BreakerSettings>,
    /// The peers by what they serve.
    roster: ArcSwap<Roster>,
    /// Models of which not every peer takes requests.
    ratios: ArcSwap<Ratios>,
    /// Who has probably cached which prompts.
    pub(crate) prefixes: Prefixes,
    /// How many bytes of a prompt make a token.
    pub(crate) token_size: TokenSize,
    dials: Option<Dials>,
    /// Where choices have time and chance from.
    pub(crate) surroundings: Surroundings,
}

impl Pool {
    pub(crate) fn new(settings: &Settings, dials: Dials) -> Self {
        let (pairing, breaker) = (settings.pairing.clone(), settings.breaker.clone());
        Self {
            prefixes: Prefixes::new(settings.routing.prefix.clone()),
            pairing: ArcSwap::from_pointee(pairing),
            breaker: ArcSwap::from_pointee(breaker),
            dials: Some(dials),
            wishes: AtomicU64::new(1),
            ..Self::default()
        }
    }

    /// Other rules of pairing from now on.
    pub(crate) fn set_pairing(&self, pairing: Pairing) {
        self.pairing.store(Arc::new(pairing));
        self.relearn();
    }

    /// Other settings of all breakers from now on; what they have counted stays.
    pub(crate) fn set_breaker(&self, settings: &BreakerSettings) {
        let _changing = self.changes.lock();
        self.breaker.store(Arc::new(settings.clone()));
        for peer in self.snapshot.load().all() {
            peer.health.tune(settings.clone());
        }
    }

    /// A new peer whose health is watched as the settings say.
    fn watched(&self, mut peer: Peer) -> Peer {
        let dial = self.dials.as_ref().map(|dials| dials.of(peer.authority()));
        peer.health = Arc::new(Health::new(BreakerSettings::clone(&self.breaker.load()), dial));
        peer
    }

    /// Adds a peer as the settings do.
    #[cfg(test)]
    pub(crate) fn add(&self, spec: PeerSpec) -> Result<Arc<Peer>, PeerSpecError> {
        self.add_of(Origin::Settings, spec)
    }

    /// Adds a peer that somebody names; it takes requests after its first good probe.
    ///
    /// # Errors
    /// The description cannot be used, or such a peer exists.
    pub(crate) fn add_of(&self, origin: Origin, spec: PeerSpec) -> Result<Arc<Peer>, PeerSpecError> {
        let mut numbers = self.changes.lock();
        let current = self.snapshot.load();
        let id = match &spec.name {
            Some(name) => checked_name(name)?,
            None => numbered(&current, &mut numbers, spec.role),
        };
        // Whom nobody named gives way to whoever is named.
        let is_here = |peer: &Arc<Peer>| is_same_place(&peer.spec, &spec);
        let twin = current.all().find(|peer| {
            (peer.id == id || is_here(peer)) && !(peer.standing.origin().gives_way() && is_here(peer))
        });
        if let Some(twin) = twin {
            return Err(PeerSpecError::Exists { id: twin.id.clone() });
        }
        let mut next = Snapshot::clone(&current);
        next.prefill.retain(|peer| !is_here(peer));
        next.decode.retain(|peer| !is_here(peer));
        let mut peer = self.watched(Peer::new(id, spec)?);
        peer.standing = Standing::of(origin);
        let peer = Arc::new(peer);
        if self.pairing.load().warm_up {
            peer.warmth.cool();
        }
        next.push(Arc::clone(&peer));
        self.snapshot.store(Arc::new(next));
        self.mark();
        self.relearn();
        Ok(peer)
    }

    /// Takes a peer out; what is in flight with it goes on.
    pub(crate) fn remove(&self, id: &str) -> Option<Arc<Peer>> {
        let _changing = self.changes.lock();
        let current = self.snapshot.load();
        let gone = Arc::clone(current.all().find(|peer| peer.id == id)?);
        self.take_out(&current, &gone);
        Some(gone)
    }

    fn take_out(&self, current: &Snapshot, gone: &Arc<Peer>) {
        let mut next = current.clone();
        next.prefill.retain(|peer| !Arc::ptr_eq(peer, gone));
        next.decode.retain(|peer| !Arc::ptr_eq(peer, gone));
        self.snapshot.store(Arc::new(next));
        self.prefixes.forget(gone.routing.key);
        self.relearn();
    }

    /// Gives every peer the marks that operators decided on.
    pub(crate) fn mark(&self) {
        let decided = self.operator.state();
        let mut news = false;
        for peer in self.snapshot.load().all() {
            peer.standing.set_drained(decided.drained.contains(&peer.id));
            news |= peer.standing.set_quarantined(decided.quarantined.contains(&peer.id));
        }
        if news {
            self.relearn();
        }
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Peer>> {
        self.snapshot.load().all().find(|peer| peer.id == id).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Peer>> {
        self.snapshot.load().all().cloned().collect()
    }

    /// Takes over what the registry says and judges the pairs, if anything has changed since.
    pub(crate) fn learn(&self, registry: &Registry) {
        if self.is_current(registry) {
            return;
        }
        let _learning = self.learning.lock();
        if self.is_current(registry) {
            return;
        }
        let wishes = self.wishes.load(Ordering::Acquire);
        let registry = registry.snapshot();
        let peers = self.snapshot.load_full();
        let (by_address, writers) = (ByAddress::new(&registry), self.writers.load());
        for peer in peers.all() {
            let identity = Identity::of(peer, &by_address, &writers);
            if !peer.identity.load().is(&identity) {
                let ended = peer.standing.learn(&identity);
                peer.identity.store(Arc::new(identity));
                if !ended.is_empty() {
                    self.restarted(&peers, peer, &ended);
                }
            }
        }
        let matrix = Matrix::of(&peers, &self.matrix.load(), &self.pairing.load(), &self.quarantined.lock());
        self.quarantined.lock().retain(|pair, _| matrix.knows(pair));
        self.matrix.store(Arc::new(matrix));
        self.roster.store(Arc::new(Roster::of(&peers, &self.ratios.load())));
        self.learnt[1].store(wishes, Ordering::Release);
        self.learnt[0].store(registry.revision, Ordering::Release);
    }

    fn is_current(&self, registry: &Registry) -> bool {
        self.learnt[1].load(Ordering::Acquire) == self.wishes.load(Ordering::Acquire)
            && self.learnt[0].load(Ordering::Acquire) == registry.revision()
    }

    /// An engine of a peer began another life: whoever talked to the old one may be kept away.
    fn restarted(&self, peers: &Snapshot, peer: &Arc<Peer>, ended: &[String]) {
        tracing::info!(peer = %peer.id, url = %peer.spec.url, ?ended, "an engine restarted");
        self.prefixes.forget(peer.routing.key);
        let lasts = self.pairing.load().quarantine_restarted;
        if !lasts.is_zero() {
            let until = Instant::now() + lasts;
            let mut quarantined = self.quarantined.lock();
            match peer.spec.role {
                Role::Prefill => {
                    for decode in &peers.decode {
                        if ended.iter().any(|engine_id| decode.has_met(engine_id)) {
                            quarantined.insert(pair_key(peer, decode), until);
                        }
                    }
                }
                Role::Decode => {
                    for prefill in &peers.prefill {
                        let engines = &prefill.identity.load().engines;
                        if engines.iter().any(|engine| peer.has_met(&engine.engine_id)) {
                            quarantined.insert(pair_key(prefill, peer), until);
                        }
                    }
                }
            }
        }
        if peer.spec.role == Role::Decode {
            peer.forget_met();
        }
    }

    /// Lets quarantines end whose time is over.
    pub(crate) fn end_quarantines(&self, now: Instant) {
        let mut quarantined = self.quarantined.lock();
        let before = quarantined.len();
        quarantined.retain(|_, until| now < *until);
        if quarantined.len() != before {
            self.relearn();
        }
    }

    /// Ends the quarantines of all pairs of a peer.
    pub(crate) fn end_quarantines_of(&self, peer: &Peer) {
        let place = std::ptr::from_ref(peer).addr();
        self.quarantined.lock().retain(|(prefill, decode), _| *prefill != place && *decode != place);
        self.relearn();
    }

    /// The pairs are judged anew before the next choice, because a peer has come or gone or shows
    /// itself as another one.
    pub(crate) fn relearn(&self) {
        self.wishes.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether a pair may hand off. A peer that has just left the fleet goes on as it was.
    pub(crate) fn fits(&self, prefill: &Peer, decode: &Peer) -> bool {
        self.fits_by(&self.matrix(), prefill, decode)
    }

    /// The verdicts of now, for whoever looks many of them up.
    pub(crate) fn matrix(&self) -> arc_swap::Guard<Arc<Matrix>> {
        self.matrix.load()
    }

    /// As [`Pool::fits`] by these verdicts.
    pub(crate) fn fits_by(&self, matrix: &Matrix, prefill: &Peer, decode: &Peer) -> bool {
        let known = matrix.fits(prefill, decode);
        known.unwrap_or_else(|| {
            let rules = self.pairing.load();
            pairing::judge(&Facts::of(prefill), &Facts::of(decode), &rules).allows(rules.unknown)
        })
    }

    /// Whose turn it is among the peers of a stage.
    pub(crate) fn turn(&self, stage: Stage) -> usize {
        self.turns[stage as usize].fetch_add(1, Ordering::Relaxed)
    }

    /// The part of a stage's peers that must be sound for breakers to count.
    pub(crate) fn breaker_floor(&self) -> f64 {
        self.breaker.load().floor
    }

    /// The peers of now by what they serve.
    pub(crate) fn roster(&self) -> Arc<Roster> {
        let (roster, snapshot) = (self.roster.load_full(), self.snapshot.load_full());
        if Arc::ptr_eq(&roster.snapshot, &snapshot) {
            return roster;
        }
        Arc::new(Roster::of(&snapshot, &self.ratios.load()))
    }

    /// Other ratios from now on.
    pub(crate) fn set_ratios(&self, ratios: Ratios) {
        self.ratios.store(Arc::new(ratios));
        self.relearn();
    }

    /// Lets other peers take the requests of models with a ratio, if others are open than were.
    pub(crate) fn share_out(&self) {
        let ratios = self.ratios.load();
        if ratios.is_empty() {
            return;
        }
        let _learning = self.learning.lock();
        let roster = self.roster.load();
        let shares = roster.shared_out(&ratios);
        let is = |one: &[Vec<Arc<Peer>>; 2], other: &[Vec<Arc<Peer>>; 2]| {
            let all = |lists: &[Vec<Arc<Peer>>; 2]| -> Vec<*const Peer> {
                lists.iter().flatten().map(Arc::as_ptr).collect()
            };
            all(one) == all(other) && one[0].len() == other[0].len()
        };
        let same = shares
            .iter()
            .all(|(model, lists)| roster.shares().get(model).is_some_and(|before| is(before, lists)));
        if !same {
            self.roster.store(Arc::new(roster.with(shares)));
        }
    }

    /// Whether a decode peer has an open prefill peer that can hand off to it.
    pub(crate) fn has_partner(&self, decode: &Peer) -> bool {
        let (snapshot, matrix) = (self.snapshot.load(), self.matrix.load());
        let fits = |prefill: &Peer| matrix.fits(prefill, decode) == Some(true);
        snapshot.prefill.iter().any(|prefill| prefill.is_open() && fits(prefill))
    }

    /// Whether no prefill peer that is open takes hand-offs on an endpoint.
    pub(crate) fn none_hands_off_on(&self, endpoint: Endpoint) -> bool {
        let snapshot = self.snapshot.load();
        let mut ready = snapshot.prefill.iter().filter(|peer| peer.is_open()).peekable();
        ready.peek().is_some() && ready.all(|peer| !peer.hands_off_on(endpoint))
    }

    /// Whether any peer may have requests of some models only.
    pub(crate) fn has_bound(&self) -> bool {
        self.snapshot.load().all().any(|peer| peer.is_bound())
    }

    /// Whether any open pair can hand off.
    pub(crate) fn has_pair(&self) -> bool {
        self.snapshot.load().decode.iter().any(|decode| decode.is_open() && self.has_partner(decode))
    }

    /// The verdicts as they were made last, and the peers of now.
    pub(crate) fn judged(&self) -> (Arc<Matrix>, Arc<Snapshot>) {
        (self.matrix.load_full(), self.snapshot.load_full())
    }

    /// Every pair, with what is known of it.
    pub(crate) fn pairs(&self) -> Vec<PairView> {
        let (snapshot, matrix) = (self.snapshot.load(), self.matrix.load());
        let pairs = snapshot.prefill.iter().flat_map(|p| snapshot.decode.iter().map(move |d| (p, d)));
        pairs.filter_map(|(prefill, decode)| matrix.view(prefill, decode)).collect()
    }

    /// One pair, with what is known of it.
    pub(crate) fn pair(&self, prefill: &Peer, decode: &Peer) -> Option<PairView> {
        self.matrix.load().view(prefill, decode)
    }

    /// How many pairs there are of each verdict, used or not.
    pub(crate) fn count_pairs(&self) -> HashMap<(&'static str, bool), usize> {
        self.matrix.load().counts()
    }

    /// Whether any peer lists a model.
    pub(crate) fn serves(&self, model: &str) -> bool {
        self.snapshot.load().all().any(|peer| peer.serves(model))
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

/// Whether both mean one engine in one role; an address without a rank means all of its ranks.
fn is_same_place(one: &PeerSpec, other: &PeerSpec) -> bool {
    let ranks_differ = one.dp_rank.zip(other.dp_rank).is_some_and(|(one, other)| one != other);
    one.role == other.role && is_same_url(&one.url, &other.url) && !ranks_differ
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
