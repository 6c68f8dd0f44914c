//! Settings of the NIXL transport, versions of peers, and why an agent could not be had.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use thiserror::Error;

use crate::transport::{AgentName, TransportError};

pub use crate::transport::NixlVersion;

use super::blob;

/// Where the NIXL library is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LibrarySource {
    /// The file itself.
    Path(PathBuf),
    /// Folders to look into, in order: for the file, or for an installed wheel (`site-packages`).
    Folders(Vec<PathBuf>),
}

/// Who lets UCX make progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// NIXL's own thread, as in vLLM; it keeps one core busy as long as the agent lives.
    Thread,
    /// The transport's thread, which looks that often while nothing is in flight.
    ///
    /// Costs little when idle. Peers that need this side's help (no RDMA, no shared memory) are
    /// served that much later.
    Polling(Duration),
}

/// Settings of one agent.
#[derive(Debug, Clone)]
pub struct NixlConfig {
    /// Beginning of the agent's name; a random part and the NIXL version follow.
    pub name: String,
    /// The version of the library, when it cannot be told from where it is installed.
    pub version: Option<NixlVersion>,
    /// Who lets UCX make progress.
    pub progress: Progress,
    /// Settings of NIXL's UCX backend that differ from its defaults.
    pub backend: BTreeMap<String, String>,
    /// What is known of peers, and whether unknown ones are dealt with.
    pub peers: PeerVersions,
    /// Commands that may wait for the transport's thread.
    pub queue: usize,
    /// How long a call waits for the transport's thread before it gives up.
    pub call_timeout: Duration,
    /// How long the agent lives on after it is dropped, for what is still on its way.
    pub linger: Duration,
}

impl NixlConfig {
    /// The defaults: NIXL's progress thread, and no peer of unknown version.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            version: None,
            progress: Progress::Thread,
            backend: BTreeMap::new(),
            peers: PeerVersions::default(),
            queue: 4096,
            call_timeout: Duration::from_secs(10),
            linger: Duration::from_millis(200),
        }
    }
}

#[derive(Debug, Default)]
struct Known {
    versions: Mutex<HashMap<AgentName, NixlVersion>>,
    allow_unknown: bool,
}

/// What NIXL peers run; clones share what is known.
///
/// By default a peer is dealt with only when its version is known to fit. Agents of this crate
/// carry the version in their name; of others it has to be said.
#[derive(Debug, Clone, Default)]
pub struct PeerVersions {
    known: Arc<Known>,
}

impl PeerVersions {
    /// Also deals with peers of unknown version; a peer with NIXL below 1.4 then crashes.
    pub fn allowing_unknown() -> Self {
        Self { known: Arc::new(Known { allow_unknown: true, ..Known::default() }) }
    }

    /// Says which version the owner of an agent metadata blob runs.
    ///
    /// # Errors
    /// A blob that is not NIXL's.
    pub fn announce(&self, agent_metadata: &[u8], version: NixlVersion) -> Result<AgentName, TransportError> {
        let name = blob::agent_name(agent_metadata).ok_or(TransportError::BadAgentMetadata)?;
        let name = AgentName(name.to_owned());
        self.known.versions.lock().insert(name.clone(), version);
        Ok(name)
    }

    /// Forgets an agent that was announced.
    pub fn forget(&self, agent: &AgentName) {
        self.known.versions.lock().remove(agent);
    }

    /// Whether an agent may be loaded and notified by one that runs `own`.
    pub(super) fn check(&self, agent: &str, own: Option<NixlVersion>) -> Result<(), TransportError> {
        let announced = self.known.versions.lock().get(&AgentName(agent.to_owned())).copied();
        match (own, announced.or_else(|| blob::version_in_name(agent))) {
            (Some(own), Some(peer)) if own.talks_with(peer) => Ok(()),
            (Some(_), Some(_)) => Err(TransportError::IncompatibleVersion(agent.to_owned())),
            _ if self.known.allow_unknown => Ok(()),
            _ => Err(TransportError::UnknownVersion(agent.to_owned())),
        }
    }
}

/// Why there is no NIXL agent.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NixlError {
    /// No usable library.
    #[error(
        "NIXL not available: {reason}; install it with `pip install --no-deps nixl-cu12==1.5.1` and name its folder"
    )]
    NotAvailable {
        /// What was tried.
        reason: String,
    },
    /// The library is too old for this transport.
    #[error("{path} lacks {function}: NIXL 1.5 or newer is needed", path = path.display())]
    FunctionMissing {
        /// The library.
        path: PathBuf,
        /// The missing function.
        function: &'static str,
    },
    /// A process can hold one NIXL library only.
    #[error("another NIXL library than {path} is loaded", path = path.display())]
    OtherLibraryLoaded {
        /// The library that was asked for.
        path: PathBuf,
    },
    /// The memory has no addresses that another process could use.
    #[error("the memory was not allocated for NIXL")]
    NotAddressable,
    /// NIXL refused to make an agent or its UCX backend.
    #[error("NIXL could not {action}: {error}")]
    Refused {
        /// What was asked of it.
        action: &'static str,
        /// What it said.
        error: String,
    },
    /// The transport's thread could not be started or ended at once.
    #[error("no thread for NIXL: {0}")]
    Thread(std::io::ErrorKind),
}
