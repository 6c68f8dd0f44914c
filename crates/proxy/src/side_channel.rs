//! The ZMQ side channels of unmodified engines: theirs, which the router reads so that it knows them,
//! and its own, at which their decode engines shake hands with the registry. Decides about no pair.

pub(crate) mod channels;
mod dialect;
mod front;
mod ports;
mod reader;
pub(crate) mod settings;

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use crate::Core;
use crate::handoff::HandedOff;
use crate::pool::Pool;
use crate::pool::peer::Peer;
use crate::registry::{EngineRecord, Registry};
use settings::ReadSideChannels;

/// Side channels that are read at the same time.
const AT_ONCE: usize = 64;

/// What the core keeps of side channels beside each peer's own.
#[derive(Debug)]
pub(crate) struct SideChannels {
    /// Somebody has to be asked before the next round.
    wake: Notify,
    reading: Arc<Semaphore>,
    /// The registrations that the router made, with their revisions: whatever has another one now is
    /// somebody else's.
    ours: Mutex<HashMap<String, u64>>,
    /// The router's own ports by engine id.
    fronts: ArcSwap<HashMap<String, u16>>,
}

impl Default for SideChannels {
    fn default() -> Self {
        Self {
            wake: Notify::new(),
            reading: Arc::new(Semaphore::new(AT_ONCE)),
            ours: Mutex::default(),
            fronts: ArcSwap::default(),
        }
    }
}

impl SideChannels {
    /// Whether the router itself has registered it, by what it read.
    pub(crate) fn is_ours(&self, engine: &EngineRecord) -> bool {
        self.ours.lock().get(&engine.engine_id) == Some(&engine.revision)
    }

    fn registered(&self, engine_id: &str, revision: u64) {
        self.ours.lock().insert(engine_id.to_owned(), revision);
    }

    /// Takes an engine out of the registry if the router put it there.
    fn withdraw(&self, engine_id: &str, registry: &Registry) {
        let revision = self.ours.lock().remove(engine_id);
        let engine = registry.engine(engine_id).filter(|engine| revision == Some(engine.revision));
        if engine.is_some() {
            registry.remove(engine_id);
        }
    }

    /// Whether any engine behind the peer has registered by itself.
    fn registers_itself(&self, peer: &Peer, registry: &Registry, pool: &Pool) -> bool {
        let there = registry.engines_at(&peer.spec.url);
        there.iter().any(|engine| !self.is_ours(engine) && pool.believes(engine, peer))
    }
}

/// Starts the tasks; they end with the core's stop token.
pub(crate) fn start(core: &Arc<Core>) {
    if core.settings().side_channel.read != ReadSideChannels::Off {
        core.tasks.spawn(reader::watch(Arc::clone(core)));
    }
    if core.settings().side_channel.front.enabled {
        core.tasks.spawn(front::watch(Arc::clone(core)));
    }
}

impl Core {
    /// Takes in what a hand-off says of its engine's side channel. An engine id that is new at a known
    /// address is a restarted engine: the old one leaves at once, and the new one is asked for.
    pub(crate) fn side_channel_named(&self, peer: &Peer, hand_off: &HandedOff) {
        let read = self.settings().side_channel.read;
        if read == ReadSideChannels::Off {
            return;
        }
        let news = peer.channels.named(&hand_off.engine_id, &hand_off.channel, read);
        if let Some(gone) = &news.replaced {
            self.side_channels.withdraw(gone, &self.registry);
        }
        if news.ask {
            self.side_channels.wake.notify_one();
        }
    }

    /// Takes the engines that were read behind a peer out of the registry, unless another peer has
    /// them too.
    pub(crate) fn side_channels_forgotten(&self, peer: &Peer) {
        let read = peer.channels.engine_ids();
        let others = self.pool.all();
        for engine_id in read {
            let shared = others.iter().any(|other| other.channels.engine_ids().contains(&engine_id));
            if !shared {
                self.side_channels.withdraw(&engine_id, &self.registry);
            }
        }
    }
}
