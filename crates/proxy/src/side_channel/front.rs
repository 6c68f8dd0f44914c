//! The router's own side channels: one port for each registered engine, at which an unmodified decode
//! engine gets that engine's payloads from the registry. Whatever comes in on them ends nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use kv_connector::protocol::handshake::HandshakeRequest;
use kv_connector::side_channel::{SideChannelServer, reply_frames};
use tokio::task::{AbortHandle, JoinSet};

use super::ports::Ports;
use crate::Core;
use crate::handoff::HandedOff;
use crate::pool::peer::Peer;
use crate::registry::{EngineRecord, EngineState, Registry};
use crate::splice::rewrite_address;

/// How soon an engine for which no port was free is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// A clock so far ahead that blocks whose expiry is compared with it count as expired: what is answered
/// for an engine that tells no clock.
const FAR_AHEAD: f64 = 1e12;

/// One open port; dropping it closes the port.
#[derive(Debug)]
struct Front {
    port: u16,
    engine_id: Arc<ArcSwap<String>>,
    serving: AbortHandle,
}

impl Drop for Front {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Keeps a port open for every registered engine until the core stops.
pub(super) async fn watch(core: Arc<Core>) {
    let settings = &core.settings().side_channel.front;
    let mut ports = Ports::new(settings.ports);
    let mut fronts = BTreeMap::<String, Front>::new();
    let mut serving = JoinSet::new();
    let mut revision = core.registry.subscribe();
    loop {
        revision.mark_unchanged();
        let engines = engines_by_place(&core.registry);
        let gone: Vec<String> =
            fronts.keys().filter(|place| !engines.contains_key(*place)).cloned().collect();
        for place in gone {
            fronts.remove(&place);
            ports.give_back(&place);
        }
        let mut complete = true;
        for (place, engine_id) in engines {
            if let Some(front) = fronts.get(&place) {
                front.engine_id.store(Arc::new(engine_id));
                continue;
            }
            match open(&core, settings.listen, &place, engine_id, &mut ports, &mut serving).await {
                Some(front) => drop(fronts.insert(place, front)),
                None => complete = false,
            }
        }
        let by_engine = fronts.values().map(|front| (front.engine_id.load().to_string(), front.port));
        core.side_channels.fronts.store(Arc::new(by_engine.collect()));
        while serving.try_join_next().is_some() {}
        tokio::select! {
            () = core.stop.cancelled() => return,
            changed = revision.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(AGAIN), if !complete => {}
        }
    }
}

/// The engines that can be answered for, by the place that keeps its port.
fn engines_by_place(registry: &Registry) -> BTreeMap<String, String> {
    let snapshot = registry.snapshot();
    let ready = snapshot
        .engines
        .values()
        .filter(|engine| engine.state != EngineState::Registering && engine.first_rank().is_some());
    ready.map(|engine| (place(engine), engine.engine_id.clone())).collect()
}

fn place(engine: &EngineRecord) -> String {
    match &engine.base_url {
        Some(base_url) => format!("{base_url} {}", engine.dp_rank),
        None => engine.engine_id.clone(),
    }
}

async fn open(
    core: &Core,
    listen: IpAddr,
    place: &str,
    engine_id: String,
    ports: &mut Ports,
    serving: &mut JoinSet<()>,
) -> Option<Front> {
    let mut refused = Vec::new();
    let server = loop {
        let Some(port) = ports.take(place, &refused) else {
            tracing::info!(engine_id, "no port is free for an engine's side channel at the router");
            return None;
        };
        match SideChannelServer::bind((listen, port)).await {
            Ok(server) => break server,
            Err(error) => {
                tracing::info!(port, %error, "a port for a side channel at the router cannot be used");
                ports.give_back(place);
                if refused.contains(&port) || port == 0 {
                    return None;
                }
                refused.push(port);
            }
        }
    };
    let port = server.local_addr().ok()?.port();
    let engine_id = Arc::new(ArcSwap::from_pointee(engine_id));
    let (served, registry, metrics) =
        (Arc::clone(&engine_id), core.registry.clone(), Arc::clone(&core.metrics));
    let answering = server.serve_with(move |frames| {
        let reply = answer(&registry, &served.load(), frames);
        metrics.front_asked(reply.is_some());
        ControlFlow::Continue(reply)
    });
    Some(Front { port, engine_id, serving: serving.spawn(answering) })
}

/// The reply in the dialect of whoever asks: one of another generation shall learn at once, by the
/// hashes, that they do not fit.
fn answer(registry: &Registry, engine_id: &str, frames: &[Vec<u8>]) -> Option<Vec<Vec<u8>>> {
    let [delimiter, request] = frames else { return None };
    if !delimiter.is_empty() {
        return None;
    }
    let (dialect, request) = HandshakeRequest::decode_any(request).ok()?;
    let engine = registry.engine(engine_id).filter(|engine| engine.state != EngineState::Registering)?;
    let rank = engine.ranks.get(&(request.pp_rank, request.tp_rank))?;
    let clock = registry.clock(&engine).map_or(FAR_AHEAD, |clock| clock.seconds);
    Some(reply_frames(dialect, rank.payload.to_vec(), clock))
}

impl Core {
    /// The hand-off as a decode engine gets it: one that does not register by itself is sent to the
    /// router's side channel for the engine that holds the blocks, if that can answer for all ranks.
    pub(crate) fn hand_off_for(&self, hand_off: &HandedOff, decode: &Peer) -> Bytes {
        self.fronted(hand_off, decode).unwrap_or_else(|| hand_off.raw.clone())
    }

    fn fronted(&self, hand_off: &HandedOff, decode: &Peer) -> Option<Bytes> {
        let settings = &self.settings().side_channel.front;
        if !settings.enabled {
            return None;
        }
        let wanted = decode
            .spec
            .front
            .unwrap_or_else(|| !self.side_channels.registers_itself(decode, &self.registry, &self.pool));
        if !wanted {
            return None;
        }
        let fronts: Arc<HashMap<String, u16>> = self.side_channels.fronts.load_full();
        let port = *fronts.get(&hand_off.engine_id)?;
        let engine = self.registry.engine(&hand_off.engine_id)?;
        let served: BTreeSet<_> = engine.ranks.keys().copied().collect();
        if !hand_off.channel.ranks().iter().all(|rank| served.contains(rank)) {
            return None;
        }
        let host = settings.host()?;
        rewrite_address(&hand_off.raw, Some(&host), Some(port)).ok()
    }
}

#[cfg(test)]
mod tests;
