//! Letting peers go: idle ones, replaced ones, and ones the transport has lost track of.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::ClockTime;
use crate::protocol::params::TransferMode;
use crate::transport::{AgentName, Transport};

use super::peer::Peer;
use super::{Worker, log_failed};

/// Longest time for which reads from a peer fail at once, and how long it is remembered.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Shortest such time after the first occurrence.
const MIN_BACKOFF: Duration = Duration::from_secs(1);

/// How often a peer was lost lately.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backoff {
    delay: Duration,
    release_at: ClockTime,
}

impl<T: Transport> Worker<T> {
    /// Only called when a handshake is asked for: memory grows with peers, not with time.
    pub(super) fn evict_idle_peers(&mut self, now: ClockTime) {
        if self.config.engine_ttl.is_zero() {
            return;
        }
        let busy = self.engines_in_transfer();
        let idle: Vec<String> = self
            .peers
            .iter()
            .filter(|(engine, peer)| {
                now.saturating_sub(peer.last_active) > self.config.engine_ttl
                    && !busy.contains(engine.as_str())
            })
            .map(|(engine, _)| engine.clone())
            .collect();
        for engine in idle {
            tracing::info!(engine, "idle peer forgotten");
            self.release_peer(&engine);
        }
    }

    /// Engines whose memory a transfer still reads or writes.
    fn engines_in_transfer(&self) -> BTreeSet<String> {
        let reads = self
            .transfers
            .keys()
            .filter_map(|request| self.recving.get(request))
            .map(|recv| recv.remote.engine_id.clone());
        reads.chain(self.sending.values().map(|sending| sending.engine_id.clone())).collect()
    }

    /// Releases replaced and lost engines, once nothing refers to them.
    pub(super) fn release_stale_peers(&mut self, now: ClockTime) {
        // While any handshake is open, the address table is about to change.
        if self.config.mode != TransferMode::Pull || !self.handshakes.is_empty() {
            return;
        }
        self.probe_failed_peers(now);
        let serving: BTreeSet<&String> = self.engine_by_address.values().collect();
        let awaited: BTreeSet<&String> = self.recving.values().map(|recv| &recv.remote.engine_id).collect();
        let in_transfer = self.engines_in_transfer();
        let backed_off =
            |engine: &String| self.backoff.get(engine).is_some_and(|backoff| backoff.release_at > now);
        let released: Vec<String> = self
            .peers
            .keys()
            .filter(|engine| {
                let replaced = !serving.contains(engine) && !awaited.contains(engine);
                let lost =
                    self.invalid.contains(*engine) && !backed_off(engine) && !in_transfer.contains(*engine);
                replaced || lost
            })
            .cloned()
            .collect();
        for engine in released {
            tracing::info!(engine, "replaced or lost peer released");
            self.release_peer(&engine);
        }
    }

    /// Asks the transport whether it still knows the agents of engines whose transfers failed.
    fn probe_failed_peers(&mut self, now: ClockTime) {
        for engine in std::mem::take(&mut self.failed_engines) {
            let Some(peer) = self.peers.get(&engine) else { continue };
            if self.invalid.contains(&engine) {
                continue;
            }
            let agents: Vec<AgentName> = peer.agents().map(|(_, agent)| agent.clone()).collect();
            if !agents.iter().all(|agent| self.transport.knows_remote_agent(agent)) {
                self.mark_invalid(&engine, now);
            }
        }
    }

    /// The first time the peer is shaken hands with again at once, then after longer and longer.
    fn mark_invalid(&mut self, engine: &str, now: ClockTime) {
        self.backoff.retain(|_, backoff| now.saturating_sub(backoff.release_at) <= MAX_BACKOFF);
        let delay = match self.backoff.get(engine) {
            None => Duration::ZERO,
            Some(earlier) => (earlier.delay * 2).clamp(MIN_BACKOFF, MAX_BACKOFF),
        };
        self.backoff.insert(engine.to_owned(), Backoff { delay, release_at: now + delay });
        self.invalid.insert(engine.to_owned());
        tracing::warn!(
            engine,
            ?delay,
            "the transport has lost a peer; reads from it fail until it is released"
        );
    }

    pub(super) fn agents_of(&self, engine_id: &str) -> Vec<AgentName> {
        let peer = self.peers.get(engine_id);
        peer.map(|peer| peer.agents().map(|(_, agent)| agent.clone()).collect()).unwrap_or_default()
    }

    pub(super) fn release_peer(&mut self, engine_id: &str) {
        let Some(peer) = self.peers.remove(engine_id) else { return };
        self.engine_by_address.retain(|_, engine| engine != engine_id);
        self.failed_engines.remove(engine_id);
        self.invalid.remove(engine_id);
        self.release_ranks(peer, &[]);
    }

    /// Releases the lists of all ranks and the agents that are not `kept`.
    pub(super) fn release_ranks(&mut self, peer: Peer, kept: &[AgentName]) {
        let (mut lists, mut agents) = (Vec::new(), Vec::new());
        for rank in peer.ranks.into_values() {
            lists.extend(rank.memory.map(|memory| memory.list));
            agents.push(rank.agent);
        }
        for list in lists {
            log_failed("release a peer's descriptors", self.transport.release_list(list));
        }
        for agent in agents.iter().filter(|agent| !kept.contains(agent)) {
            log_failed("remove a peer's agent", self.transport.remove_remote_agent(agent));
        }
    }
}
