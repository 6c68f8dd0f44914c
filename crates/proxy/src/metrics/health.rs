//! The gauges of the peers' health; the only ones that name peers, by their ids.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::error::Stage;
use crate::pool::{BreakerState, HealthView};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PeerLabel {
    stage: &'static str,
    peer: String,
}

#[derive(Debug, Default)]
pub(super) struct PeerHealth {
    breaker: Family<PeerLabel, Gauge>,
    openings: Family<PeerLabel, Gauge>,
    share: Family<PeerLabel, Gauge<f64, AtomicU64>>,
}

impl PeerHealth {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "peer_breaker_state",
            "How a peer's breaker stands: 0 closed, 1 half-open, 2 open",
            self.breaker.clone(),
        );
        registry.register(
            "peer_breaker_openings",
            "How often a present peer's breaker has opened",
            self.openings.clone(),
        );
        registry.register(
            "peer_share",
            "The part of its share of requests that a peer gets, below 1 while it recovers",
            self.share.clone(),
        );
    }

    pub(super) fn set(&self, peers: impl Iterator<Item = (Stage, String, HealthView)>) {
        self.breaker.clear();
        self.openings.clear();
        self.share.clear();
        for (stage, peer, health) in peers {
            let label = PeerLabel { stage: stage.label(), peer };
            let state = match health.breaker {
                BreakerState::Closed => 0,
                BreakerState::HalfOpen => 1,
                BreakerState::Open => 2,
            };
            self.breaker.get_or_create(&label).set(state);
            self.openings.get_or_create(&label).set(i64::try_from(health.opened).unwrap_or(i64::MAX));
            self.share.get_or_create(&label).set(health.share);
        }
    }
}
