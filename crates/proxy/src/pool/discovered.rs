//! Peers at the addresses that sources found: a plan is made of what there is and what is wanted, and
//! carried out in one exchange of the snapshot. Never touches a peer that settings or operators named.

use std::sync::Arc;

use super::adopt::id_of;
use super::operator::PeerPlace;
use super::origin::Origin;
use super::peer::{Peer, PeerSpecError};
use super::standing::Standing;
use super::{Pool, Snapshot};
use crate::discovery::plan::{Held, Wanted, plan};

/// What the sources changed in the fleet.
#[derive(Debug, Default)]
pub(crate) struct Discovered {
    /// Peers that are new.
    pub(crate) came: Vec<Arc<Peer>>,
    /// Peers that are described differently; they keep what was learnt of them.
    pub(crate) changed: Vec<Arc<Peer>>,
    /// Peers that are not wanted any more; they leave when what they have has ended.
    pub(crate) leaving: Vec<Arc<Peer>>,
}

impl Pool {
    /// Makes the discovered peers those that are wanted.
    pub(crate) fn discover(&self, wanted: &[Wanted]) -> Discovered {
        let _changing = self.changes.lock();
        let decided = self.operator.state();
        let current = self.snapshot.load();
        let peers: Vec<&Arc<Peer>> = current.all().collect();
        let held: Vec<Held<'_>> = peers
            .iter()
            .map(|peer| Held {
                place: peer.address.as_deref(),
                spec: &peer.spec,
                origin: peer.standing.origin(),
            })
            .collect();
        let is_removed = |wanted: &Wanted| {
            decided.removed.contains(&PeerPlace { url: wanted.place.clone(), role: wanted.spec.role })
        };
        let plan = plan(&held, wanted, is_removed);
        let mut done = Discovered::default();
        for held in plan.stay {
            peers[held].standing.set_leaving(false);
        }
        for held in plan.leave {
            if peers[held].standing.set_leaving(true) {
                done.leaving.push(Arc::clone(peers[held]));
            }
        }
        let mut next = Snapshot::clone(&current);
        for (held, wanted_at) in plan.change {
            let before = peers[held];
            match self.discovered(&next, &wanted[wanted_at], Some(before)) {
                Ok(peer) => {
                    next.retain(|peer| !std::ptr::eq(peer, Arc::as_ptr(before)));
                    next.push(Arc::clone(&peer));
                    done.changed.push(peer);
                }
                Err(error) => refused(&wanted[wanted_at], &error),
            }
        }
        for wanted_at in plan.come {
            match self.discovered(&next, &wanted[wanted_at], None) {
                Ok(peer) => {
                    next.push(Arc::clone(&peer));
                    done.came.push(peer);
                }
                Err(error) => refused(&wanted[wanted_at], &error),
            }
        }
        if !done.came.is_empty() || !done.changed.is_empty() {
            self.snapshot.store(Arc::new(next));
            self.mark();
            self.relearn();
        }
        done
    }

    fn discovered(
        &self,
        fleet: &Snapshot,
        wanted: &Wanted,
        before: Option<&Arc<Peer>>,
    ) -> Result<Arc<Peer>, PeerSpecError> {
        let id = match before {
            Some(before) if before.spec.dp_rank == wanted.spec.dp_rank => before.id.clone(),
            _ => free_id(fleet, wanted),
        };
        let mut peer = self.watched(Peer::new(id, wanted.spec.clone())?);
        peer.standing = Standing::of(Origin::Discovery {
            source: Arc::clone(&wanted.source),
            instance: wanted.instance.clone(),
        });
        match before.filter(|before| is_same_process(before.standing.origin(), wanted)) {
            Some(before) => {
                peer.learns_from(before);
                peer.health = Arc::clone(&before.health);
            }
            None if self.pairing.load().warm_up => peer.warmth.cool(),
            None => {}
        }
        Ok(Arc::new(peer))
    }
}

/// Whether what was learnt of a peer still holds: not if the source says that another process is there now.
fn is_same_process(before: &Origin, wanted: &Wanted) -> bool {
    match before {
        Origin::Discovery { instance: Some(before), .. } => {
            wanted.instance.as_ref().is_none_or(|now| now == before)
        }
        _ => true,
    }
}

/// An id of role, address and rank, the same at every router; the second of two that read alike is numbered.
fn free_id(fleet: &Snapshot, wanted: &Wanted) -> String {
    let place = PeerPlace { url: wanted.place.clone(), role: wanted.spec.role };
    let first = match wanted.spec.dp_rank {
        Some(rank) => format!("{}-{rank}", id_of(&place)),
        None => id_of(&place),
    };
    let (mut id, mut number) = (first.clone(), 1);
    while fleet.all().any(|peer| peer.id == id) {
        number += 1;
        id = format!("{first}.{number}");
    }
    id
}

fn refused(wanted: &Wanted, error: &PeerSpecError) {
    tracing::warn!(source = %wanted.source, url = %wanted.spec.url, %error, "a discovered address cannot be a peer");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{PeerSpec, Role};
    use crate::registry::{EngineRole, Registration, Registry, RegistryLimits};
    use crate::settings::Settings;

    const URL: &str = "http://10.0.0.1:8000";

    fn wanted(source: &str) -> Wanted {
        Wanted {
            spec: PeerSpec::new(Role::Decode, URL),
            place: URL.to_owned(),
            source: source.into(),
            instance: None,
        }
    }

    fn of_process(uid: &str) -> Wanted {
        Wanted { instance: Some(uid.into()), ..wanted("a") }
    }

    fn sources(pool: &Pool) -> Vec<String> {
        pool.all().iter().map(|peer| peer.standing.origin().to_string()).collect()
    }

    #[tokio::test]
    async fn a_peer_has_the_same_id_whenever_its_address_is_found() {
        let pool = Pool::default();
        assert_eq!(pool.discover(&[wanted("a")]).came[0].id, "decode-10.0.0.1-8000");
        let left = pool.discover(&[]).leaving.remove(0);
        assert!(!left.standing.is_open());
        assert!(pool.discover(&[]).leaving.is_empty(), "once");
        pool.discover(&[wanted("a")]);
        assert!(left.standing.is_open(), "it is back before it was gone");
        pool.discover(&[]);
        pool.let_go(&left);
        assert!(pool.all().is_empty());
        assert_eq!(pool.discover(&[wanted("a")]).came[0].id, "decode-10.0.0.1-8000");
    }

    #[tokio::test]
    async fn settings_win_whoever_came_first() {
        let pool = Pool::default();
        pool.discover(&[wanted("a")]);
        let named = pool.add(PeerSpec::new(Role::Decode, "http://10.0.0.1:8000/")).unwrap();
        assert_eq!(sources(&pool), ["settings"]);
        let done = pool.discover(&[wanted("a")]);
        assert!(done.came.is_empty() && done.changed.is_empty());
        // The settings lose it: from then on it is the source's.
        pool.exchange(std::slice::from_ref(&named.spec), Vec::new()).unwrap();
        pool.discover(&[wanted("a")]);
        assert_eq!(sources(&pool), ["a"]);
        // And back, with what was learnt of it.
        let health = Arc::clone(&pool.all()[0].health);
        pool.exchange(&[], vec![PeerSpec::new(Role::Decode, URL)]).unwrap();
        assert_eq!(sources(&pool), ["settings"]);
        assert!(Arc::ptr_eq(&pool.all()[0].health, &health));
    }

    #[tokio::test]
    async fn what_operators_removed_does_not_come_back() {
        let pool = Pool::default();
        pool.operator.change(|state| {
            state.removed.insert(PeerPlace { url: URL.into(), role: Role::Decode });
        });
        pool.discover(&[wanted("a")]);
        assert!(pool.all().is_empty());
    }

    #[tokio::test]
    async fn another_description_keeps_what_was_learnt_and_another_process_does_not() {
        let pool = Pool::default();
        let first = pool.discover(&[of_process("1")]).came.remove(0);
        first.failed("refused", false);
        let health = |pool: &Pool| Arc::clone(&pool.all()[0].health);
        let mut other = of_process("1");
        other.spec.labels.insert("zone".into(), "a".into());
        let changed = pool.discover(std::slice::from_ref(&other)).changed.remove(0);
        assert_eq!((changed.id.as_str(), pool.all().len()), (first.id.as_str(), 1));
        assert!(Arc::ptr_eq(&health(&pool), &first.health) && changed.observed.now().last_error.is_some());
        let changed = pool.discover(&[of_process("2")]).changed.remove(0);
        assert!(!Arc::ptr_eq(&health(&pool), &first.health) && changed.observed.now().last_error.is_none());
    }

    #[tokio::test]
    async fn new_peers_are_cold_where_pairs_are_warmed_up() {
        let mut settings = Settings::default();
        let pool = Pool::default();
        settings.pairing.warm_up = true;
        pool.set_pairing(settings.pairing);
        let first = pool.discover(&[of_process("1")]).came.remove(0);
        assert!(!first.warmth.is_warm());
        let second = pool.discover(&[of_process("2")]).changed.remove(0);
        assert!(!second.warmth.is_warm());
    }

    #[tokio::test]
    async fn registered_and_found_is_one_peer_which_the_registration_keeps_when_it_is_not_found_any_more() {
        let (pool, registry) = (Pool::default(), Registry::new(RegistryLimits::default()));
        let engine = Registration {
            engine_id: "e".into(),
            base_url: Some(URL.into()),
            role: Some(EngineRole::Decode),
            ..Registration::default()
        };
        registry.register(engine).unwrap();
        let adopted = pool.adopt(&registry).came.remove(0);
        let found = pool.discover(&[wanted("a")]).changed.remove(0);
        assert_eq!((found.id.as_str(), sources(&pool)), (adopted.id.as_str(), vec!["a".to_owned()]));
        assert!(pool.adopt(&registry).came.is_empty());
        pool.discover(&[]);
        pool.adopt(&registry);
        assert!(found.standing.is_leaving(), "its engine's registration does not hold it");
        pool.let_go(&found);
        pool.adopt(&registry);
        assert_eq!(sources(&pool), ["registration"]);
    }
}
