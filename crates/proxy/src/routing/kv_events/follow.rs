//! Subscribes to engines' events and keeps what they say in order. An engine that cannot be followed is as one
//! that has nothing cached.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kv_connector::kv_events::{EventBatch, EventSubscriber, Published, replay};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::index::BlockIndex;
use super::peer::{Known, Source};
use crate::Core;
use crate::pool::peer::Peer;

/// How soon a peer that has become ready is noticed.
const SOON: Duration = Duration::from_millis(500);

/// For connecting, and for what was missed.
const DEADLINE: Duration = Duration::from_secs(5);

/// Until an engine that could not be followed is tried again.
const REST: Duration = Duration::from_secs(2);

/// A subscription that was started.
struct Followed {
    peer: Arc<Peer>,
    /// Cancelled to end it, and by its end.
    end: CancellationToken,
    again: Instant,
}

/// Follows all ready peers that publish.
pub(super) async fn watch(core: Arc<Core>) {
    let mut ticks = interval(SOON);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut followed: HashMap<(String, usize), Followed> = HashMap::new();
    loop {
        tokio::select! {
            () = core.stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let peers = core.pool.all();
        followed.retain(|_, one| {
            let stays = peers.iter().any(|peer| Arc::ptr_eq(peer, &one.peer));
            // A lost host says nothing: what it had is gone when it answers again.
            if !stays || !one.peer.is_ready() {
                one.end.cancel();
            }
            stays
        });
        for peer in peers.iter().filter(|peer| peer.events.is_any() && peer.is_ready()) {
            for at in 0..peer.events.sources.len() {
                let key = (peer.id.clone(), at);
                let is_followed = |one: &Followed| !one.end.is_cancelled() || one.again > Instant::now();
                if followed.get(&key).is_some_and(is_followed) {
                    continue;
                }
                let end = core.stop.child_token();
                let one = Followed { peer: Arc::clone(peer), end: end.clone(), again: Instant::now() + REST };
                followed.insert(key, one);
                core.tasks.spawn(follow(Arc::clone(&core), Arc::clone(peer), at, end));
            }
        }
    }
}

async fn follow(core: Arc<Core>, peer: Arc<Peer>, at: usize, end: CancellationToken) {
    let Some(source) = peer.events.sources.get(at) else { return };
    let room = core.settings().kv_events.blocks;
    let followed = tokio::select! {
        () = end.cancelled() => Ok(()),
        followed = listen(source, || BlockIndex::new(core.kv_events.keys.clone(), room)) => followed,
    };
    // Batches are missed from now on.
    *source.state.write() = None;
    if let Err(error) = followed {
        tracing::info!(peer = %peer.id, address = %source.address, %error, "KV events cannot be read");
    }
    end.cancel();
}

async fn listen(source: &Source, index: impl Fn() -> BlockIndex) -> io::Result<()> {
    let address = &source.address;
    let mut events = timeout(DEADLINE, EventSubscriber::connect(&address.host, address.port)).await??;
    *source.state.write() = Some(Known { index: index(), next: None, gaps: 0, refused: 0 });
    // From the first batch on, if the engine still has it: what comes meanwhile waits in the subscription.
    if source.replay.is_some() {
        catch_up(source, 0).await;
    }
    loop {
        let published = events.next().await?;
        let next = source.state.read().as_ref().and_then(|known| known.next);
        if let Some(next) = next.filter(|next| published.number > *next) {
            catch_up(source, next).await;
        }
        take(source, &published);
    }
}

/// Takes in what was missed, as far as the engine still has it.
async fn catch_up(source: &Source, from: u64) {
    let Some(address) = &source.replay else { return };
    let replaying = replay(&address.host, address.port, from, |published| take(source, &published));
    match timeout(DEADLINE, replaying).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::info!(%address, %error, "KV events cannot be replayed"),
        Err(_) => tracing::info!(%address, "KV events are not replayed in time"),
    }
}

/// Takes in a batch in its turn. After a gap nothing is known any more: what was removed in it would stay.
fn take(source: &Source, published: &Published) {
    let mut state = source.state.write();
    let Some(known) = state.as_mut() else { return };
    match known.next {
        Some(next) if published.number < next => return,
        Some(next) if published.number > next => {
            known.gaps += 1;
            known.index.clear();
        }
        Some(_) | None => {}
    }
    known.next = Some(published.number.saturating_add(1));
    match EventBatch::decode(&published.payload) {
        Ok(batch) if source.rank.is_some() && batch.rank.is_some() && batch.rank != source.rank => {
            known.refused += 1;
        }
        Ok(batch) => known.index.apply(&batch),
        Err(error) => {
            known.refused += 1;
            known.index.clear();
            tracing::debug!(address = %source.address, %error, "a batch of KV events cannot be read");
        }
    }
}
