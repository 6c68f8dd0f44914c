//! What operators do to peers, and the fleet's following of the registry.
//! Decides about no request.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::pool::origin::Origin;
use crate::pool::peer::Peer;
use crate::pool::{Adopted, OperatorState, PeerPlace, PeerSpec, PeerSpecError, PeerView, probe};
use crate::{Core, Proxy};

/// How the wait for a drained peer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DrainEnd {
    /// Nothing is left: no exchange, and no hand-off that it granted or was sent.
    Drained,
    /// Something was left when the time was over; the peer stays drained.
    Timeout,
    /// Somebody let it have requests again.
    Resumed,
    /// The router is leaving.
    RouterLeaving,
}

/// A drained peer, when the wait for it has ended.
#[derive(Clone, Debug, Serialize)]
pub struct Drained {
    /// How it ended.
    pub ended: DrainEnd,
    /// Exchanges that were left.
    pub in_flight: usize,
    /// Hand-offs that were left.
    pub handoffs: usize,
    /// How long it took.
    pub seconds: f64,
    /// The peer.
    pub peer: PeerView,
}

/// Starts the task that makes peers of registered engines; it ends with the core's stop token.
pub(crate) fn follow(core: Arc<Core>) {
    let tasks = core.tasks.clone();
    tasks.spawn(async move {
        let mut changes = core.registry.subscribe();
        loop {
            changes.mark_unchanged();
            if core.settings().pairing.adopt_registered {
                core.adopt();
            }
            // So that restarts are seen though no request comes.
            core.pool.learn(&core.registry);
            tokio::select! {
                () = core.stop.cancelled() => return,
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    });
}

impl Core {
    pub(crate) fn adopt(self: &Arc<Self>) {
        let Adopted { came, leaving } = self.pool.adopt(&self.registry);
        for peer in came {
            let role = peer.spec.role.stage().label();
            tracing::info!(peer = %peer.id, role, url = %peer.spec.url, "a registered engine is a peer now");
            probe::probe_soon(self, peer);
        }
        for peer in leaving {
            tracing::info!(peer = %peer.id, url = %peer.spec.url, "a registered engine is gone, its peer leaves");
            self.see_off(peer);
        }
    }

    /// Lets a peer that is leaving go when what it has has ended.
    pub(crate) fn see_off(self: &Arc<Self>, peer: Arc<Peer>) {
        let core = Arc::clone(self);
        self.tasks.spawn(async move {
            tokio::select! {
                () = core.stop.cancelled() => return,
                () = core.quiet(&peer, |peer| !peer.standing.is_leaving()) => core.pool.let_go(&peer),
            }
            // Its engine may still be registered.
            if peer.standing.is_leaving() && !peer.standing.is_adopted() {
                core.side_channels_forgotten(&peer);
                if core.settings().pairing.adopt_registered {
                    core.adopt();
                }
            }
        });
    }

    /// Waits until a peer has nothing left, or until `enough` holds.
    async fn quiet(&self, peer: &Peer, enough: impl Fn(&Peer) -> bool) {
        loop {
            let (exchange, hand_off) = (peer.standing.moved.notified(), self.ledger.moved.notified());
            tokio::pin!(exchange, hand_off);
            // From here on nothing that ends is missed.
            exchange.as_mut().enable();
            hand_off.as_mut().enable();
            if enough(peer) || (peer.in_flight() == 0 && self.ledger.of_peer(&peer.id) == 0) {
                return;
            }
            tokio::select! {
                () = exchange => {}
                () = hand_off => {}
            }
        }
    }

    /// Puts the fleet as it is into the metrics.
    pub(crate) fn count_fleet(&self) {
        self.pool.learn(&self.registry);
        let peers = self.pool.all();
        self.metrics
            .health(peers.iter().map(|peer| (peer.spec.role.stage(), peer.id.clone(), peer.health.view())));
        let stage = |peer: &Peer| peer.spec.role.stage();
        let quarantined = peers.iter().filter(|peer| peer.standing.is_quarantined());
        let conditions = peers.iter().map(|peer| (stage(peer), peer.condition()));
        self.metrics.fleet(
            conditions.chain(quarantined.map(|peer| (stage(peer), "quarantined"))),
            peers.iter().filter_map(|peer| Some((stage(peer), peer.standing.restarts()?.count))),
        );
        self.metrics.shares(self.pool.roster().shares());
        self.metrics.discovered(&self.count_discovered());
    }
}

impl Proxy {
    /// Adds a peer on an operator's word; as [`Proxy::add_peer`], and all routers are told.
    ///
    /// # Errors
    /// The description cannot be used, or such a peer exists.
    pub fn operator_adds_peer(&self, spec: PeerSpec) -> Result<PeerView, PeerSpecError> {
        let view = self.add_peer_of(Origin::Operator, spec.clone())?;
        let place = self.place_of(&view.id);
        self.core.pool.operator.change(|state| {
            if let Some(place) = &place {
                state.removed.remove(place);
            }
            state.added.insert(view.id.clone(), spec);
        });
        Ok(view)
    }

    /// Takes a peer out of the fleet; exchanges in flight with it go on, and it does not come back
    /// by its engines' registration.
    #[must_use]
    pub fn remove_peer(&self, id: &str) -> Option<PeerView> {
        let peer = self.core.pool.get(id)?;
        let place = self.place_of(id);
        // First, so that the registry's followers do not bring it back.
        self.core.pool.operator.change(|state| {
            state.added.remove(id);
            state.drained.remove(id);
            state.quarantined.remove(id);
            state.removed.extend(place);
        });
        let view = self.core.pool.remove(id)?.view(&self.core.notifier);
        self.core.side_channels_forgotten(&peer);
        Some(view)
    }

    fn place_of(&self, id: &str) -> Option<PeerPlace> {
        let peer = self.core.pool.get(id)?;
        Some(PeerPlace { url: peer.address.clone()?, role: peer.spec.role })
    }

    /// Keeps new requests from a peer, and waits at most `limit` until its exchanges and hand-offs
    /// have ended. Dropping the future leaves the peer drained.
    pub async fn drain_peer(&self, id: &str, limit: Duration) -> Option<Drained> {
        let began = Instant::now();
        let core = &self.core;
        let peer = core.pool.get(id)?;
        core.pool.operator.change(|state| {
            state.drained.insert(peer.id.clone());
        });
        core.pool.mark();
        let ended = tokio::select! {
            biased;
            () = core.quiet(&peer, |peer| !peer.standing.is_drained()) => match peer.standing.is_drained() {
                true => DrainEnd::Drained,
                false => DrainEnd::Resumed,
            },
            () = core.registry.closing().cancelled() => DrainEnd::RouterLeaving,
            () = tokio::time::sleep(limit) => DrainEnd::Timeout,
        };
        Some(Drained {
            ended,
            in_flight: peer.in_flight(),
            handoffs: core.ledger.of_peer(&peer.id),
            seconds: began.elapsed().as_secs_f64(),
            peer: peer.view(&core.notifier),
        })
    }

    /// Keeps a peer from hand-offs; a quarantined decode engine still serves what it serves alone.
    #[must_use]
    pub fn quarantine_peer(&self, id: &str) -> Option<PeerView> {
        let peer = self.core.pool.get(id)?;
        self.core.pool.operator.change(|state| {
            state.quarantined.insert(peer.id.clone());
        });
        self.core.pool.mark();
        Some(peer.view(&self.core.notifier))
    }

    /// Ends what keeps a peer from requests or hand-offs: draining, quarantine, and the quarantines
    /// of its pairs.
    #[must_use]
    pub fn resume_peer(&self, id: &str) -> Option<PeerView> {
        let peer = self.core.pool.get(id)?;
        self.core.pool.operator.change(|state| {
            state.drained.remove(&peer.id);
            state.quarantined.remove(&peer.id);
        });
        self.core.pool.mark();
        self.core.pool.end_quarantines_of(&peer);
        Some(peer.view(&self.core.notifier))
    }

    /// What operators have decided.
    #[must_use]
    pub fn operator_state(&self) -> Arc<OperatorState> {
        self.core.pool.operator.state()
    }

    /// What operators have decided, and every later value.
    #[must_use]
    pub fn subscribe_operator_state(&self) -> watch::Receiver<Arc<OperatorState>> {
        self.core.pool.operator.subscribe()
    }

    /// Takes over what operators decided at another router: peers that are added there and unknown
    /// here come, those that are not added there any more go, and all marks are set. What cannot be
    /// used here is logged and left out.
    pub fn apply_operator_state(&self, next: OperatorState) {
        let before = self.operator_state();
        self.core.pool.operator.change(|state| *state = next.clone());
        for id in before.added.keys().filter(|id| !next.added.contains_key(*id)) {
            drop(self.core.pool.remove(id));
        }
        for place in next.removed.difference(&before.removed) {
            let at = |peer: &&Arc<Peer>| {
                peer.spec.role == place.role && peer.address.as_deref() == Some(place.url.as_str())
            };
            if let Some(peer) = self.core.pool.all().iter().find(at) {
                drop(self.core.pool.remove(&peer.id));
            }
        }
        for (id, spec) in next.added.iter().filter(|(id, _)| !before.added.contains_key(*id)) {
            let named = PeerSpec { name: Some(id.clone()), ..spec.clone() };
            match self.add_peer_of(Origin::Operator, named) {
                Ok(_) | Err(PeerSpecError::Exists { .. }) => {}
                Err(error) => tracing::warn!(peer = %id, %error, "a peer of another router cannot be used"),
            }
        }
        self.core.pool.mark();
        if self.core.settings().pairing.adopt_registered {
            self.core.adopt();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::pool::Role;
    use crate::registry::{EngineRole, Registration};
    use crate::settings::Settings;

    fn router() -> Proxy {
        Proxy::start(Settings::default(), TaskTracker::new(), CancellationToken::new())
    }

    fn registration(engine_id: &str, role: EngineRole) -> Registration {
        Registration {
            engine_id: engine_id.to_owned(),
            base_url: Some("http://127.0.0.1:1".to_owned()),
            role: Some(role),
            ..Registration::default()
        }
    }

    fn ids(proxy: &Proxy) -> Vec<String> {
        proxy.peers().into_iter().map(|peer| peer.id).collect()
    }

    #[tokio::test]
    async fn two_routers_that_share_the_operators_word_treat_their_peers_alike() {
        let (one, other) = (router(), router());
        let mut heard = one.subscribe_operator_state();
        let spec = PeerSpec::new(Role::Prefill, "http://127.0.0.1:1");
        let id = one.operator_adds_peer(spec).unwrap().id;
        assert!(heard.has_changed().unwrap());
        assert!(one.quarantine_peer(&id).unwrap().quarantined);
        let drained = one.drain_peer(&id, Duration::ZERO).await.unwrap();
        assert_eq!((drained.ended, drained.peer.drained), (DrainEnd::Drained, true));

        let text = serde_json::to_string(&*heard.borrow_and_update().clone()).unwrap();
        other.apply_operator_state(serde_json::from_str(&text).unwrap());
        let there = other.peer(&id).unwrap();
        assert_eq!((there.drained, there.quarantined), (true, true));
        assert_eq!(other.operator_state(), one.operator_state());

        assert!(!one.resume_peer(&id).unwrap().drained);
        other.apply_operator_state((*one.operator_state()).clone());
        assert!(!other.peer(&id).unwrap().drained);
        assert!(one.remove_peer(&id).is_some());
        other.apply_operator_state((*one.operator_state()).clone());
        assert_eq!((ids(&one), ids(&other)), (Vec::new(), Vec::new()));
        assert!(one.drain_peer(&id, Duration::ZERO).await.is_none());
    }

    #[tokio::test]
    async fn a_removed_peer_is_not_adopted_again_until_it_is_added() {
        let proxy = router();
        proxy.registry().register(registration("e", EngineRole::Both)).unwrap();
        proxy.core.adopt();
        assert_eq!(ids(&proxy), ["prefill-127.0.0.1-1", "decode-127.0.0.1-1"]);
        assert!(proxy.remove_peer("prefill-127.0.0.1-1").is_some());
        proxy.registry().register(registration("f", EngineRole::Both)).unwrap();
        proxy.core.adopt();
        assert_eq!(ids(&proxy), ["decode-127.0.0.1-1"]);
        let added = proxy.operator_adds_peer(PeerSpec::new(Role::Prefill, "http://127.0.0.1:1")).unwrap();
        assert!(!added.adopted);
        // Named, it stays when its engine goes; adopted, it goes.
        assert!(proxy.registry().remove("f"));
        proxy.core.adopt();
        tokio::time::timeout(Duration::from_secs(20), async {
            while ids(&proxy) != ["prefill-1"] {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
    }

    #[tokio::test]
    async fn an_adopted_peer_stays_until_what_it_has_has_ended() {
        let proxy = router();
        proxy.registry().register(registration("e", EngineRole::Decode)).unwrap();
        proxy.core.adopt();
        let id = ids(&proxy).remove(0);
        let busy = proxy.core.pool.get(&id).unwrap().enter();
        assert!(proxy.registry().remove("e"));
        proxy.core.adopt();
        let view = proxy.peer(&id).unwrap();
        assert_eq!((view.leaving, view.accepts, view.in_flight), (true, false, 1));
        proxy.registry().register(registration("e", EngineRole::Decode)).unwrap();
        proxy.core.adopt();
        assert!(!proxy.peer(&id).unwrap().leaving, "it is back");
        assert!(proxy.registry().remove("e"));
        proxy.core.adopt();
        drop(busy);
        tokio::time::timeout(Duration::from_secs(20), async {
            while proxy.peer(&id).is_some() {
                tokio::task::yield_now().await;
            }
        })
        .await
        .unwrap();
    }

    #[tokio::test]
    async fn another_engine_at_the_place_is_a_restart_and_the_same_one_again_is_none() {
        let proxy = router();
        let restarts = || proxy.peers()[0].restarted.map(|restarts| restarts.count);
        for (engine_id, expected) in
            [("e", None), ("e", None), ("f", Some(1)), ("f", Some(1)), ("e", Some(2))]
        {
            proxy.registry().register(registration(engine_id, EngineRole::Prefill)).unwrap();
            proxy.core.adopt();
            assert_eq!(restarts(), expected, "{engine_id}");
        }
        // The same process, which the registry had lost.
        assert!(proxy.registry().remove("e"));
        proxy.registry().register(registration("e", EngineRole::Prefill)).unwrap();
        proxy.core.adopt();
        assert_eq!(restarts(), Some(2));
    }
}
