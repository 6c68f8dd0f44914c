//! Whether the fleet can serve, in numbers.

use std::sync::Arc;

use serde::Serialize;

use super::Pool;
use super::peer::Peer;
use crate::error::Stage;

/// How many peers take requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// Ready prefill engines.
    pub prefill_ready: usize,
    /// Ready decode engines.
    pub decode_ready: usize,
    /// The router is shutting down and wants no new requests.
    pub draining: bool,
    /// Whether any ready prefill engine can hand off to any ready decode engine.
    #[serde(skip)]
    pub pair: bool,
}

impl Readiness {
    /// At least one pair can serve, and the router is not leaving.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.pair && !self.draining
    }
}

impl Pool {
    /// The peers of a stage that answer, whether they get new requests or not.
    pub(crate) fn ready_peers(&self, stage: Stage) -> Vec<Arc<Peer>> {
        self.snapshot.load().of(stage).iter().filter(|peer| peer.is_ready()).cloned().collect()
    }

    /// Whether a peer of a stage takes new requests.
    pub(crate) fn is_any_ready(&self, stage: Stage) -> bool {
        self.snapshot.load().of(stage).iter().any(|peer| peer.is_open())
    }

    /// How many peers of a stage take new requests.
    pub(crate) fn ready(&self, stage: Stage) -> usize {
        self.snapshot.load().of(stage).iter().filter(|peer| peer.is_open()).count()
    }
}
