//! Reads the engines' metrics pages now and then. What it finds is shown and may be weighed; an engine whose
//! page cannot be read is none the worse for it, only its figures grow old.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::load::EngineLoad;
use super::peer::Peer;
use super::probe;
use crate::Core;

/// How often the settings are looked at while nothing is to be read.
const LOOK: Duration = Duration::from_secs(1);

/// Starts the reading task; it ends with the core's stop token.
pub(crate) fn watch(core: Arc<Core>) {
    let tasks = core.tasks.clone();
    tasks.spawn(async move {
        loop {
            let interval = core.settings().probe.metrics_interval;
            if interval.is_zero() {
                core.pool.all().iter().for_each(|peer| peer.load.store(None));
            } else {
                read_all(&core, interval);
            }
            let pause = if interval.is_zero() { LOOK } else { interval };
            tokio::select! {
                () = core.stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    });
}

/// Reads the pages of all peers that answer, one after the other begun within half the interval.
fn read_all(core: &Arc<Core>, interval: Duration) {
    let ready: Vec<Arc<Peer>> = core.pool.all().into_iter().filter(|peer| peer.is_ready()).collect();
    let gap = interval / 2 / u32::try_from(ready.len().max(1)).unwrap_or(u32::MAX);
    for (place, peer) in ready.into_iter().enumerate() {
        let core = Arc::clone(core);
        let wait = gap.saturating_mul(u32::try_from(place).unwrap_or(u32::MAX));
        let tasks = core.tasks.clone();
        tasks.spawn(async move {
            let read = async {
                tokio::time::sleep(wait).await;
                read_one(&core, &peer).await;
            };
            tokio::select! {
                () = core.stop.cancelled() => {}
                () = read => {}
            }
        });
    }
}

async fn read_one(core: &Core, peer: &Arc<Peer>) {
    let limit = core.settings().probe.timeout;
    let page = match timeout(limit, probe::get(peer, &core.upstream, "/metrics")).await {
        Ok(Ok((status, page))) if status.is_success() => page,
        Ok(Ok((status, _))) => return tracing::debug!(peer = %peer.id, %status, "no metrics page"),
        Ok(Err(error)) => return tracing::debug!(peer = %peer.id, %error, "the metrics page was not read"),
        Err(_late) => return tracing::debug!(peer = %peer.id, "the metrics page did not come in time"),
    };
    was_read(peer, &String::from_utf8_lossy(&page), Instant::now());
}

/// Keeps what a peer's page said.
pub(crate) fn was_read(peer: &Peer, page: &str, at: Instant) {
    let before = peer.load.load_full();
    if let Some(mut load) = EngineLoad::read(page, peer.spec.dp_rank, before.as_deref(), at) {
        load.ours = peer.in_flight() as u64;
        peer.load.store(Some(Arc::new(load)));
    }
}
