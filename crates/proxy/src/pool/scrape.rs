//! Reads the engines' metrics pages now and then. What it finds is shown and may be weighed; an engine whose
//! page cannot be read is none the worse for it, only its figures grow old.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::Pool;
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
                forget_all(&core);
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

/// What engines said of their load when their pages were still read counts no more.
fn forget_all(core: &Core) {
    for peer in core.pool.all().iter().filter(|peer| peer.load.load().is_some()) {
        peer.load.store(None);
    }
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
    was_read(&core.pool, peer, &String::from_utf8_lossy(&page), Instant::now());
}

/// Keeps what a peer's page said.
pub(crate) fn was_read(pool: &Pool, peer: &Arc<Peer>, page: &str, at: Instant) {
    let before = peer.load.load_full();
    if let Some(mut load) = EngineLoad::read(page, peer.spec.dp_rank, before.as_deref(), at) {
        load.ours = peer.in_flight() as u64;
        remember_as_much(pool, peer, &load);
        peer.load.store(Some(Arc::new(load)));
    }
}

/// What an engine's prefix cache has no room for is not taken for cached.
fn remember_as_much(pool: &Pool, peer: &Arc<Peer>, load: &EngineLoad) {
    let stays = pool.get(&peer.id).is_some_and(|known| Arc::ptr_eq(&known, peer));
    if stays {
        let bytes = load.capacity.map(|tokens| (tokens as f64 * pool.token_size.bytes()) as u64);
        pool.prefixes.set_capacity(peer.routing.key, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dial::Dials;
    use crate::pool::{PeerSpec, Role};
    use crate::request::PromptParts;
    use crate::settings::Settings;

    #[tokio::test]
    async fn no_more_of_an_engines_prompts_is_remembered_than_its_cache_holds() {
        let pool = Pool::new(&Settings::default(), Dials::new(Duration::from_secs(1)));
        let peer = pool.add(PeerSpec::new(Role::Prefill, "http://engine:1")).unwrap();
        let prompt = |number: u32| {
            let text = format!("{number:08}").repeat(64);
            pool.prefixes.chunks_of(&PromptParts::of_text("m", None, text.as_bytes()))
        };
        let had = |number| pool.prefixes.matched(&prompt(number)).of(peer.routing.key);
        (0..20).for_each(|number| pool.prefixes.record(&prompt(number), peer.routing.key));
        assert_eq!((had(0), had(19)), (512, 512));
        // Room for four of them, at four bytes for a token.
        let page = "vllm:num_requests_running 0\nvllm:cache_config_info{kv_cache_size_tokens=\"512\"} 1\n";
        let load = EngineLoad::read(page, None, None, Instant::now()).unwrap();
        remember_as_much(&pool, &peer, &load);
        assert_eq!((had(0), had(19)), (0, 512));
        pool.remove(&peer.id);
        remember_as_much(&pool, &peer, &load);
        assert_eq!(had(19), 0, "a peer that has gone is not taken up again");
    }
}
