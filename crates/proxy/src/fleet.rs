//! What operators do to peers, and the fleet's following of the registry.
//! Decides about no request.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;

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
            if core.settings.pairing.adopt_registered {
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
    fn adopt(self: &Arc<Self>) {
        let Adopted { came, leaving } = self.pool.adopt(&self.registry);
        for peer in came {
            let role = peer.spec.role.stage().label();
            tracing::info!(peer = %peer.id, role, url = %peer.spec.url, "a registered engine is a peer now");
            probe::probe_soon(self, peer);
        }
        for peer in leaving {
            tracing::info!(peer = %peer.id, url = %peer.spec.url, "a registered engine is gone, its peer leaves");
            let core = Arc::clone(self);
            self.tasks.spawn(async move {
                tokio::select! {
                    () = core.stop.cancelled() => {}
                    () = core.quiet(&peer, |peer| !peer.standing.is_leaving()) => core.pool.let_go(&peer),
                }
            });
        }
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
        let condition = |peer: &Peer| {
            let standing = &peer.standing;
            match () {
                () if standing.is_leaving() => "leaving",
                () if standing.is_drained() => "drained",
                () if !peer.is_ready() => "unready",
                () if !standing.is_open() => "closed",
                () => "open",
            }
        };
        let stage = |peer: &Peer| peer.spec.role.stage();
        let quarantined = peers.iter().filter(|peer| peer.standing.is_quarantined());
        let conditions = peers.iter().map(|peer| (stage(peer), condition(peer)));
        self.metrics.fleet(
            conditions.chain(quarantined.map(|peer| (stage(peer), "quarantined"))),
            peers.iter().filter_map(|peer| Some((stage(peer), peer.standing.restarts()?.count))),
        );
    }
}

impl Proxy {
    /// Adds a peer on an operator's word; as [`Proxy::add_peer`], and all routers are told.
    ///
    /// # Errors
    /// The description cannot be used, or such a peer exists.
    pub fn operator_adds_peer(&self, spec: PeerSpec) -> Result<PeerView, PeerSpecError> {
        let view = self.add_peer(spec.clone())?;
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
        let view = self.core.pool.remove(id)?;
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
            peer: peer.view(),
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
        Some(peer.view())
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
        Some(peer.view())
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
            match self.add_peer(named) {
                Ok(_) | Err(PeerSpecError::Exists { .. }) => {}
                Err(error) => tracing::warn!(peer = %id, %error, "a peer of another router cannot be used"),
            }
        }
        self.core.pool.mark();
        if self.core.settings.pairing.adopt_registered {
            self.core.adopt();
        }
    }
}
