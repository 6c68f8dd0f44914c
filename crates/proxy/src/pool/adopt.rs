//! Engines that register with a base URL and a role are peers while they are registered.
//! Never touches a peer that the settings or an operator named.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::operator::PeerPlace;
use super::origin::Origin;
use super::peer::{Peer, PeerSpec, Role};
use super::standing::Standing;
use super::{Pool, Snapshot};
use crate::registry::{EngineRecord, EngineRole, Registry};

/// Longest id that is made of an address.
const MAX_ID: usize = 128;

/// What the registry changed in the fleet.
#[derive(Debug, Default)]
pub(crate) struct Adopted {
    /// Peers that are new.
    pub(crate) came: Vec<Arc<Peer>>,
    /// Peers whose engines are gone; they leave when what they have has ended.
    pub(crate) leaving: Vec<Arc<Peer>>,
}

impl Pool {
    /// Makes peers of registered engines, and lets those leave whose engines are gone.
    pub(crate) fn adopt(&self, registry: &Registry) -> Adopted {
        let _changing = self.changes.lock();
        let registry = registry.snapshot();
        let removed = &self.operator.state().removed;
        let current = self.snapshot.load();
        let places: BTreeSet<PeerPlace> = registry
            .engines
            .values()
            .filter(|engine| !self.is_anothers(engine, &current))
            .flat_map(|engine| places(engine))
            .filter(|place| !removed.contains(place))
            .collect();
        let mut held: BTreeMap<PeerPlace, &Arc<Peer>> = BTreeMap::new();
        for peer in current.all() {
            if let Some(url) = peer.address.clone() {
                held.insert(PeerPlace { url, role: peer.spec.role }, peer);
            }
        }
        let mut adopted = Adopted::default();
        let mut next = Snapshot { prefill: current.prefill.clone(), decode: current.decode.clone() };
        for place in &places {
            match held.get(place) {
                Some(peer) if peer.standing.is_adopted() => {
                    peer.standing.set_leaving(false);
                }
                Some(_) => {}
                None => match new_peer(&next, place) {
                    Ok(peer) => {
                        let peer = Arc::new(self.watched(peer));
                        if self.pairing.load().warm_up {
                            peer.warmth.cool();
                        }
                        next.push(Arc::clone(&peer));
                        adopted.came.push(peer);
                    }
                    Err(error) => tracing::debug!(url = %place.url, %error, "a registered engine is no peer"),
                },
            }
        }
        for (place, peer) in held {
            if peer.standing.is_adopted() && !places.contains(&place) && peer.standing.set_leaving(true) {
                adopted.leaving.push(Arc::clone(peer));
            }
        }
        if !adopted.came.is_empty() {
            self.snapshot.store(Arc::new(next));
            self.mark();
            self.relearn();
        }
        adopted
    }

    /// Whether an engine is at the address of a peer for which it does not speak.
    fn is_anothers(&self, engine: &EngineRecord, fleet: &Snapshot) -> bool {
        let here = |peer: &&Arc<Peer>| engine.base_url.is_some() && peer.address == engine.base_url;
        fleet.all().filter(here).any(|peer| !self.believes(engine, peer))
    }

    /// Takes a peer out that was leaving and has nothing left; not one that stays after all.
    pub(crate) fn let_go(&self, peer: &Arc<Peer>) {
        let _changing = self.changes.lock();
        if peer.standing.is_leaving() {
            self.take_out(&self.snapshot.load(), peer);
        }
    }
}

fn places(engine: &EngineRecord) -> impl Iterator<Item = PeerPlace> {
    let roles: &[Role] = match engine.role {
        None => &[],
        Some(EngineRole::Prefill) => &[Role::Prefill],
        Some(EngineRole::Decode) => &[Role::Decode],
        Some(EngineRole::Both) => &[Role::Prefill, Role::Decode],
    };
    let url = engine.base_url.clone();
    roles.iter().filter_map(move |role| url.clone().map(|url| PeerPlace { url, role: *role }))
}

fn new_peer(fleet: &Snapshot, place: &PeerPlace) -> Result<Peer, super::PeerSpecError> {
    let mut id = id_of(place);
    // Two addresses can read alike; the second one is numbered.
    let mut number = 1;
    while fleet.all().any(|peer| peer.id == id) {
        number += 1;
        id = format!("{}.{number}", id_of(place));
    }
    let mut peer = Peer::new(id, PeerSpec::new(place.role, place.url.clone()))?;
    peer.standing = Standing::of(Origin::Registration);
    Ok(peer)
}

/// An id made of role and address, so that it is the same at every router and after every restart.
pub(super) fn id_of(place: &PeerPlace) -> String {
    let address = place.url.split_once("://").map_or(place.url.as_str(), |(_, rest)| rest);
    let legible = address.trim_matches(['[', ']']).chars().map(|c| match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' => c,
        _ => '-',
    });
    let id: String = format!("{}-", place.role.stage().label()).chars().chain(legible).collect();
    id.chars().take(MAX_ID - 8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_made_of_role_and_address() {
        let id = |role, url: &str| id_of(&PeerPlace { url: url.to_owned(), role });
        assert_eq!(id(Role::Prefill, "http://10.0.0.5:8100"), "prefill-10.0.0.5-8100");
        assert_eq!(id(Role::Decode, "http://host/a/b"), "decode-host-a-b");
        assert_eq!(id(Role::Decode, "http://[::1]:8100"), "decode---1--8100");
        assert!(id(Role::Decode, &format!("http://{}", "a".repeat(500))).len() < MAX_ID);
    }
}
