//! The router's NIXL agent: no memory, connections to the prefill engines it was asked to notify.
//! Its calls block for a moment, so only the owner makes them, off the runtime's threads. Must be
//! given nothing that has not passed the gate.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;

use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::transport::nixl::{
    LibrarySource, NixlAgent, NixlConfig, NixlError, NixlLibrary, NixlMemory, PeerVersions, Progress,
};
use kv_connector::transport::{AgentName, NixlVersion, Transport as _, TransportError};

use super::Notice;
use crate::registry::{Rank, RankView, Registry};
use crate::settings::Nixl;

/// Most engines to which connections are kept; the one that was notified longest ago goes first.
const MAX_ENGINES: usize = 1024;

/// How often the idle agent lets UCX work: a connection is made in a few turns.
const TURN: Duration = Duration::from_millis(2);

/// How long one call may wait for NIXL; half of the shortest sensible release.
const CALL: Duration = Duration::from_secs(2);

/// Why there is no agent.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAgent {
    /// The settings do not say where the library is.
    #[error("nixl.library does not say where the NIXL library is")]
    NoLibrary,
    /// The library or NIXL itself refused.
    #[error(transparent)]
    Nixl(#[from] NixlError),
}

/// One rank's agent, as it was loaded.
#[derive(Debug)]
struct Known {
    name: AgentName,
    /// Of the payload that told of it: another one is another process.
    sha256: String,
}

#[derive(Debug, Default)]
struct Engine {
    ranks: BTreeMap<Rank, Known>,
    used: u64,
}

/// The agent and whom it knows.
#[derive(Debug)]
pub(super) struct Agent {
    nixl: NixlAgent,
    peers: PeerVersions,
    version: Option<NixlVersion>,
    engines: HashMap<String, Engine>,
    /// Counts notices, to know which engine was notified longest ago.
    turn: u64,
}

impl Agent {
    /// Loads the library and makes the agent; takes up to a second.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn start(settings: &Nixl) -> Result<Self, NoAgent> {
        let library = NixlLibrary::load(&source(settings.library.as_deref().ok_or(NoAgent::NoLibrary)?))?;
        let said = settings.version.as_deref().and_then(NixlVersion::parse);
        let config = NixlConfig {
            version: said,
            progress: Progress::Polling(TURN),
            call_timeout: CALL,
            ..NixlConfig::new("kvbaton-router")
        };
        let (peers, version) = (config.peers.clone(), said.or(library.version()));
        let nixl = NixlAgent::new(config, &library, NixlMemory::none())?;
        tracing::info!(library = %library.path().display(), "prefill engines can be notified over NIXL");
        Ok(Self { nixl, peers, version, engines: HashMap::new(), turn: 0 })
    }

    /// The version of the library, if it is known.
    pub(super) fn version(&self) -> Option<NixlVersion> {
        self.version
    }

    /// Tells every rank, all of them connected first. A connection that has broken since the last
    /// notice is made anew once.
    ///
    /// # Errors
    /// What NIXL refused; the engine's connections are then forgotten.
    pub(super) fn tell(&mut self, notice: &Notice, version: NixlVersion) -> Result<(), TransportError> {
        let told = self.try_to_tell(notice, version);
        if told.is_err() {
            self.forget(&notice.engine_id);
        }
        told
    }

    fn try_to_tell(&mut self, notice: &Notice, version: NixlVersion) -> Result<(), TransportError> {
        self.turn += 1;
        let names: Result<Vec<_>, _> =
            notice.ranks.iter().map(|view| self.meet(&notice.engine_id, view, version)).collect();
        for (view, name) in notice.ranks.iter().zip(names?) {
            if self.nixl.notify_heard(&name, &notice.message).is_err() {
                let name = self.meet(&notice.engine_id, view, version)?;
                self.nixl.notify_heard(&name, &notice.message)?;
            }
        }
        Ok(())
    }

    /// Uses every connection of the engine once more, for a word that changes nothing.
    ///
    /// # Errors
    /// A connection has broken.
    pub(super) fn probe(&mut self, notice: &Notice) -> Result<(), TransportError> {
        let Some(word) = Notice::small_talk(notice.generation) else { return Ok(()) };
        let Some(engine) = self.engines.get(&notice.engine_id) else { return Ok(()) };
        let probed = engine.ranks.values().try_for_each(|known| self.nixl.notify_heard(&known.name, &word));
        if probed.is_err() {
            self.forget(&notice.engine_id);
        }
        probed
    }

    /// Lets go of engines that have left the registry.
    pub(super) fn forget_the_gone(&mut self, registry: &Registry) {
        let gone: Vec<String> =
            self.engines.keys().filter(|id| registry.engine(id).is_none()).cloned().collect();
        for engine_id in gone {
            self.forget(&engine_id);
        }
    }

    /// The agent of one rank, loaded unless it is known and its connection whole.
    fn meet(
        &mut self,
        engine_id: &str,
        view: &RankView,
        version: NixlVersion,
    ) -> Result<AgentName, TransportError> {
        let rank = (view.pp_rank, view.tp_rank);
        if !self.engines.contains_key(engine_id) {
            self.make_room();
        }
        let engine = self.engines.entry(engine_id.to_owned()).or_default();
        engine.used = self.turn;
        if let Some(known) = engine.ranks.get(&rank)
            && known.sha256 == view.sha256
            && self.nixl.knows_remote_agent(&known.name)
        {
            return Ok(known.name.clone());
        }
        if let Some(old) = engine.ranks.remove(&rank) {
            leave(&mut self.nixl, &self.peers, &old.name);
        }
        let blob = match &view.metadata {
            NixlAgentMetadata::V2(metadata) => &metadata.agent_metadata,
            NixlAgentMetadata::V14(metadata) => &metadata.agent_metadata,
        };
        let name = self.peers.announce(blob, version)?;
        if let Err(error) = self.nixl.add_remote_agent(blob) {
            self.peers.forget(&name);
            return Err(error);
        }
        engine.ranks.insert(rank, Known { name: name.clone(), sha256: view.sha256.clone() });
        Ok(name)
    }

    fn make_room(&mut self) {
        if self.engines.len() < MAX_ENGINES {
            return;
        }
        let oldest = self.engines.iter().min_by_key(|(_, engine)| engine.used).map(|(id, _)| id.clone());
        if let Some(oldest) = oldest {
            self.forget(&oldest);
        }
    }

    fn forget(&mut self, engine_id: &str) {
        for known in self.engines.remove(engine_id).unwrap_or_default().ranks.into_values() {
            leave(&mut self.nixl, &self.peers, &known.name);
        }
    }
}

fn leave(nixl: &mut NixlAgent, peers: &PeerVersions, name: &AgentName) {
    if let Err(error) = nixl.remove_remote_agent(name) {
        tracing::debug!(%error, "an agent was not known any more");
    }
    peers.forget(name);
}

/// The file itself, or a folder in which a wheel was installed.
fn source(library: &Path) -> LibrarySource {
    if library.is_dir() {
        LibrarySource::Folders(vec![library.to_owned()])
    } else {
        LibrarySource::Path(library.to_owned())
    }
}

#[cfg(test)]
mod tests;
