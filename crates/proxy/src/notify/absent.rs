//! What stands in for the NIXL agent in a build without feature `nixl`: there is none.

use std::convert::Infallible;

use kv_connector::transport::{NixlVersion, TransportError};

use super::Notice;
use crate::registry::Registry;
use crate::settings::Nixl;

/// Why there is no agent.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAgent {
    /// The build lacks it.
    #[error("this program was built without feature nixl")]
    NotBuilt,
}

/// An agent that cannot be.
pub(super) struct Agent(Infallible);

impl Agent {
    pub(super) fn start(_settings: &Nixl) -> Result<Self, NoAgent> {
        Err(NoAgent::NotBuilt)
    }

    pub(super) fn version(&self) -> Option<NixlVersion> {
        match self.0 {}
    }

    pub(super) fn tell(&mut self, _notice: &Notice, _version: NixlVersion) -> Result<(), TransportError> {
        match self.0 {}
    }

    pub(super) fn probe(&mut self, _notice: &Notice) -> Result<(), TransportError> {
        match self.0 {}
    }

    pub(super) fn forget_the_gone(&mut self, _registry: &Registry) {
        match self.0 {}
    }
}
