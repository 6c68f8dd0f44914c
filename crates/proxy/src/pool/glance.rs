//! A peer as the stream for operators shows it: what changes is told, what only grows older is not.

use std::sync::Arc;

use kv_connector::protocol::params::Generation;
use serde::Serialize;

use super::breaker::BreakerState;
use super::peer::{Peer, PeerFault, PeerState, Role};
use crate::registry::EngineState;

/// Most models that are named of one peer.
const MOST_MODELS: usize = 4;

/// One peer.
#[derive(Debug, Serialize)]
pub(crate) struct PeerGlance<'a> {
    pub(crate) id: &'a str,
    role: Role,
    url: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    dp_rank: Option<u32>,
    state: PeerState,
    /// `open` or why it gets no new requests.
    condition: &'static str,
    generation: Option<Generation>,
    version: Option<String>,
    models: Vec<String>,
    in_flight: usize,
    breaker: BreakerState,
    breaker_opened: u64,
    failures_in_a_row: u32,
    share: f64,
    errors: u64,
    last_error: Option<PeerFault>,
    drained: bool,
    quarantined: bool,
    leaving: bool,
    adopted: bool,
    engine_state: Option<EngineState>,
    restarts: u64,
    load: Option<LoadGlance>,
}

/// What its metrics page said.
#[derive(Debug, Serialize)]
struct LoadGlance {
    running: u64,
    waiting: u64,
    kv_usage: Option<f64>,
    cached_token_rate: Option<f64>,
    /// When, on the router's clock.
    at_ms: u64,
}

impl Peer {
    /// Whether it gets new requests, or why not.
    pub(crate) fn condition(&self) -> &'static str {
        match () {
            () if self.standing.is_leaving() => "leaving",
            () if self.standing.is_drained() => "drained",
            () if !self.is_ready() => "unready",
            () if !self.standing.is_open() => "closed",
            () if !self.warmth.is_warm() => "cold",
            () => "open",
        }
    }

    /// As it is now; `millis` puts a moment on the router's clock.
    pub(crate) fn glance(self: &Arc<Self>, millis: impl Fn(tokio::time::Instant) -> u64) -> PeerGlance<'_> {
        let (condition, generation, health) = (self.condition(), self.generation(), self.health.view());
        let observed = self.observed.now();
        let thousandths = |part: f64| (part * 1000.0).round() / 1000.0;
        PeerGlance {
            id: &self.id,
            role: self.spec.role,
            url: &self.spec.url,
            dp_rank: self.spec.dp_rank,
            state: observed.state,
            condition,
            generation,
            version: observed.version.clone(),
            models: observed.models.iter().take(MOST_MODELS).map(|served| served.id.clone()).collect(),
            in_flight: self.in_flight(),
            breaker: health.breaker,
            breaker_opened: health.opened,
            failures_in_a_row: health.failures_in_a_row,
            share: thousandths(health.share),
            errors: self.errors(),
            last_error: observed.last_error.clone(),
            drained: self.standing.is_drained(),
            quarantined: self.standing.is_quarantined(),
            leaving: self.standing.is_leaving(),
            adopted: self.standing.is_adopted(),
            engine_state: self.identity.load().state(),
            restarts: self.standing.restarts().map_or(0, |restarts| restarts.count),
            load: self.load.load().as_deref().map(|load| LoadGlance {
                running: load.running,
                waiting: load.waiting,
                kv_usage: load.kv_usage.map(thousandths),
                cached_token_rate: load.cached_token_rate.map(thousandths),
                at_ms: millis(load.at),
            }),
        }
    }
}
