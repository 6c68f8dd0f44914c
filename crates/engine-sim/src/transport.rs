//! What the ranks' workers move KV blocks with: agents of the chosen transport, each over memory
//! that it can reach.

use std::path::PathBuf;

use kv_connector::transport::loopback::{Faults, LoopbackAgent};
#[cfg(feature = "nixl")]
use kv_connector::transport::nixl::{
    LibrarySource, NixlAgent, NixlConfig, NixlLibrary, NixlMemory, Progress,
};
use kv_connector::transport::{KvMemory, Transport};

use crate::error::EngineError;

/// How often an idle agent looks after its peers: often enough for them, seldom enough to be idle.
#[cfg(feature = "nixl")]
const NIXL_TURN: std::time::Duration = std::time::Duration::from_micros(500);

/// What moves KV blocks between engines.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum KvTransport {
    /// Sockets on this host; needs nothing.
    #[default]
    Loopback,
    /// NIXL over UCX, as between vLLM's workers; needs the feature `nixl` and NIXL's library.
    Nixl {
        /// The library's file, or a folder that holds it or the wheel it came in.
        library: Option<PathBuf>,
    },
}

/// An agent of either transport.
pub(crate) type Agent = Box<dyn Transport + Sync>;

/// Where the agents of one engine come from.
pub(crate) enum Source {
    Loopback,
    #[cfg(feature = "nixl")]
    Nixl(NixlLibrary),
}

/// One rank's agent, the memory it serves, and its scripted faults if it has such.
pub(crate) struct RankAgent {
    pub(crate) agent: Agent,
    pub(crate) memory: KvMemory,
    pub(crate) faults: Option<Faults>,
}

impl Source {
    /// Finds what the transport needs.
    ///
    /// # Errors
    /// NIXL is not part of this build, or its library is missing or unusable.
    pub(crate) fn open(transport: &KvTransport) -> Result<Self, EngineError> {
        match transport {
            KvTransport::Loopback => Ok(Self::Loopback),
            #[cfg(feature = "nixl")]
            KvTransport::Nixl { library } => Ok(Self::Nixl(NixlLibrary::load(&library_source(library))?)),
            #[cfg(not(feature = "nixl"))]
            KvTransport::Nixl { .. } => Err(EngineError::NixlNotBuilt),
        }
    }

    /// The version of the library, where there is one that tells it.
    pub(crate) fn nixl_version(&self) -> Option<String> {
        match self {
            Self::Loopback => None,
            #[cfg(feature = "nixl")]
            Self::Nixl(library) => library.version().map(|version| version.to_string()),
        }
    }

    /// An agent over zeroed regions of these lengths.
    ///
    /// # Errors
    /// No socket, no agent or no memory.
    pub(crate) fn agent(&self, name: &str, region_lens: &[usize]) -> Result<RankAgent, EngineError> {
        match self {
            Self::Loopback => {
                let memory = KvMemory::allocate(region_lens);
                let agent = LoopbackAgent::new(name, memory.clone()).map_err(EngineError::Loopback)?;
                let faults = Some(agent.faults());
                Ok(RankAgent { agent: Box::new(agent), memory, faults })
            }
            #[cfg(feature = "nixl")]
            Self::Nixl(library) => {
                let memory = KvMemory::allocate_addressable(region_lens)?;
                let config = NixlConfig { progress: Progress::Polling(NIXL_TURN), ..NixlConfig::new(name) };
                let agent = NixlAgent::new(config, library, NixlMemory::of(&memory)?)?;
                Ok(RankAgent { agent: Box::new(agent), memory, faults: None })
            }
        }
    }
}

/// A folder may be the one that a wheel was installed in, or the one above it.
#[cfg(feature = "nixl")]
fn library_source(path: &Option<PathBuf>) -> LibrarySource {
    match path {
        Some(path) if path.is_dir() => LibrarySource::Folders(vec![path.clone(), path.join("python")]),
        Some(path) => LibrarySource::Path(path.clone()),
        None => LibrarySource::Folders(Vec::new()),
    }
}
