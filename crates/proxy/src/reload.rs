//! Taking over changed settings while requests run: for whatever begins from now on.
//! What needs a new listener, client or task is not done here and stays as it was.

use std::sync::Arc;

use serde::Serialize;

use crate::Proxy;
use crate::pool::{PeerSpec, PeerSpecError, probe};
use crate::settings::Settings;

/// What became of the peers of the settings, by their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerChanges {
    /// Those that are new.
    pub added: Vec<String>,
    /// Those that are described differently; they keep what was learnt of them.
    pub updated: Vec<String>,
    /// Those that are gone; what is in flight with them goes on.
    pub removed: Vec<String>,
}

/// Why the peers of the settings cannot be exchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} engine(s) of the settings cannot be used", .0.len())]
pub struct PeerChangeError(pub Vec<PeerSpecError>);

impl Proxy {
    /// Takes over other settings, and other peers in the place of those with these descriptions.
    /// Peers that stay as they are keep their health, their connections and what is in flight.
    ///
    /// # Errors
    /// New peers that cannot be used; then nothing at all has changed.
    pub fn reload(
        &self,
        settings: Settings,
        gone: &[PeerSpec],
        come: Vec<PeerSpec>,
    ) -> Result<PeerChanges, PeerChangeError> {
        let core = &self.core;
        let exchanged = core.pool.exchange(gone, come).map_err(PeerChangeError)?;
        core.upstream.set_idle(settings.timeouts.idle);
        core.held.resize(settings.limits.held_bytes);
        core.retries.replace(settings.retry.clone());
        core.pool.set_breaker(&settings.breaker);
        core.admission.reload(&settings.admission, |stage| core.pool.ready(stage));
        core.pool.set_writers(settings.writers.clone());
        core.pool.set_pairing(settings.pairing.clone());
        core.take_models(&settings.models);
        let (adopts, discovery) = (settings.pairing.adopt_registered, settings.discovery.clone());
        core.settings.store(Arc::new(settings));
        let ids = |peers: &[Arc<crate::pool::peer::Peer>]| peers.iter().map(|peer| peer.id.clone()).collect();
        let changes = PeerChanges {
            added: ids(&exchanged.added),
            updated: ids(&exchanged.updated),
            removed: ids(&exchanged.removed),
        };
        for peer in &exchanged.removed {
            core.side_channels_forgotten(peer);
        }
        for peer in exchanged.added.into_iter().chain(exchanged.updated) {
            if peer.spec.notify {
                core.notifier.prepare();
            }
            probe::probe_soon(core, peer);
        }
        core.discover_from(&discovery);
        if adopts {
            core.adopt();
        }
        Ok(changes)
    }
}
