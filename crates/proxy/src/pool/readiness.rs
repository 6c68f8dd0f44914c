//! Whether the fleet can serve, in numbers.

use serde::Serialize;

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
