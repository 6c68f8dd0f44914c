//! What moves bytes between engines: a sealed trait in the shape of NIXL's agent.
//!
//! Memory is registered, descriptor lists are prepared once per peer, and a transfer is two
//! index arrays into two lists. Calls never block on a peer; progress is seen by polling.

mod boxed;
#[cfg(test)]
mod contract;
pub mod loopback;
mod memory;
#[cfg(feature = "nixl")]
pub mod nixl;
mod version;

use std::time::Duration;

#[cfg(feature = "nixl")]
pub use memory::OutOfMemory;
pub use memory::{KvMemory, MemoryError};
use thiserror::Error;
pub use version::NixlVersion;

pub(crate) mod sealed {
    /// Keeps the set of transports closed: the state machines are tested against these only.
    pub trait Sealed {}
}

/// The kind of memory a range lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryType {
    /// Host memory.
    Dram,
    /// Accelerator memory.
    Vram,
}

impl MemoryType {
    /// The name used in agent metadata.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dram => "DRAM",
            Self::Vram => "VRAM",
        }
    }
}

/// One contiguous range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// First byte.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Device the range lies on; 0 for host memory.
    pub device: u64,
}

/// Handle of one memory registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegistrationId(pub u64);

/// Handle of one prepared descriptor list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ListId(pub u64);

/// Handle of one transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// The name under which a remote agent is known after it was added.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AgentName(pub String);

/// Direction of a transfer, seen from the side that starts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransferOp {
    /// Remote to local.
    Read,
    /// Local to remote.
    Write,
}

/// Progress of a posted transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransferState {
    /// Bytes may still move.
    InProgress,
    /// All bytes have arrived and the notification is on its way.
    Done,
    /// The transfer ended without success.
    Failed,
}

/// Measurements of a finished transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Telemetry {
    /// Time from post to completion.
    pub transfer: Duration,
    /// Time spent in posting.
    pub post: Duration,
    /// Bytes moved.
    pub bytes: u64,
    /// Descriptor pairs.
    pub descriptors: u64,
}

/// A call the transport refused or could not do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TransportError {
    /// The agent metadata of a peer could not be understood.
    #[error("agent metadata is not usable by this transport")]
    BadAgentMetadata,
    /// No agent of that name was added.
    #[error("agent {0} is not known")]
    UnknownAgent(String),
    /// The handle was never given out or is already released.
    #[error("unknown handle {0}")]
    UnknownHandle(u64),
    /// The transfer was made and never started.
    #[error("transfer {0} was never posted")]
    NotPosted(u64),
    /// A range is outside the registered memory.
    #[error("range {address:#x}+{len} is not registered")]
    NotRegistered {
        /// First byte of the range.
        address: u64,
        /// Length in bytes.
        len: u64,
    },
    /// An index points past the end of its descriptor list.
    #[error("descriptor index {index} is outside a list of {len}")]
    IndexOutOfRange {
        /// The index.
        index: u64,
        /// Length of the list.
        len: u64,
    },
    /// Local and remote sides of a transfer do not pair up.
    #[error("local and remote descriptors do not match in number or length")]
    Mismatch,
    /// Too much work is queued for a peer.
    #[error("the queue to agent {0} is full or closed")]
    Busy(String),
    /// The transfer has not ended, so its bytes may still arrive.
    #[error("transfer {0} has not ended")]
    InProgress(u64),
    /// Nothing is known of the NIXL an agent runs, and a wrong one would crash it.
    #[error("agent {0} runs an unknown version of NIXL")]
    UnknownVersion(String),
    /// An agent runs a NIXL that this one must not talk to.
    #[error("agent {0} runs a version of NIXL that this one cannot talk to")]
    IncompatibleVersion(String),
    /// The library beneath the transport refused something.
    #[error("the library could not {0}")]
    Backend(&'static str),
    /// The transport has ended.
    #[error("the transport has ended")]
    Stopped,
    /// The operation is not offered by this transport.
    #[error("the transport does not offer this operation")]
    Unsupported,
    /// A scripted failure.
    #[error("scripted failure of {0:?}")]
    Scripted(loopback::Call),
}

/// An agent that moves bytes; implemented by [`loopback::LoopbackAgent`], with feature `nixl` by
/// `nixl::NixlAgent`, and by boxes of them.
pub trait Transport: sealed::Sealed + Send {
    /// The opaque blob with which a peer's agent can reach this one.
    fn agent_metadata(&self) -> Vec<u8>;

    /// Makes ranges reachable for peers.
    ///
    /// # Errors
    /// A range that does not lie in this agent's memory.
    fn register_memory(
        &mut self,
        memory: MemoryType,
        ranges: &[Descriptor],
    ) -> Result<RegistrationId, TransportError>;

    /// Ends a registration.
    ///
    /// # Errors
    /// An unknown handle.
    fn deregister_memory(&mut self, registration: RegistrationId) -> Result<(), TransportError>;

    /// Learns a peer from its blob; no bytes are exchanged yet.
    ///
    /// # Errors
    /// A blob of another transport.
    fn add_remote_agent(&mut self, metadata: &[u8]) -> Result<AgentName, TransportError>;

    /// Forgets a peer; its transfers fail.
    ///
    /// # Errors
    /// An unknown agent.
    fn remove_remote_agent(&mut self, agent: &AgentName) -> Result<(), TransportError>;

    /// True while this agent still holds what it was told about a peer; says nothing of the peer.
    ///
    /// A transport that notices a connection break for good may answer false from then on.
    fn knows_remote_agent(&mut self, agent: &AgentName) -> bool;

    /// Prepares a list of ranges of one kind in this agent's memory.
    ///
    /// # Errors
    /// A range that is not registered.
    fn prepare_local(
        &mut self,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError>;

    /// Prepares a list of ranges of one kind in a peer's memory.
    ///
    /// # Errors
    /// An unknown agent.
    fn prepare_remote(
        &mut self,
        agent: &AgentName,
        memory: MemoryType,
        descriptors: &[Descriptor],
    ) -> Result<ListId, TransportError>;

    /// Releases a prepared list; transfers made from it go on.
    ///
    /// # Errors
    /// An unknown handle.
    fn release_list(&mut self, list: ListId) -> Result<(), TransportError>;

    /// Makes a transfer between equally long selections of two lists.
    ///
    /// The notification, if any, reaches the peer once the bytes have moved.
    ///
    /// # Errors
    /// Unknown lists, an index out of range, or sides that do not pair up.
    fn make_transfer(
        &mut self,
        op: TransferOp,
        local: (ListId, &[u64]),
        remote: (ListId, &[u64]),
        notification: Option<&[u8]>,
    ) -> Result<TransferId, TransportError>;

    /// Starts a transfer.
    ///
    /// # Errors
    /// An unknown handle or a peer whose queue is full.
    fn post(&mut self, transfer: TransferId) -> Result<TransferState, TransportError>;

    /// Looks at a transfer without waiting.
    ///
    /// # Errors
    /// An unknown handle.
    fn poll(&mut self, transfer: TransferId) -> Result<TransferState, TransportError>;

    /// Measurements of a transfer that is done, when the transport takes them.
    fn telemetry(&mut self, transfer: TransferId) -> Option<Telemetry>;

    /// Releases a transfer handle; NIXL refuses one in flight, whose bytes may still arrive.
    ///
    /// # Errors
    /// An unknown handle, or a transfer that cannot be released yet; the handle then stays valid.
    fn release_transfer(&mut self, transfer: TransferId) -> Result<(), TransportError>;

    /// Sends a notification without a transfer; delivery is not confirmed.
    ///
    /// # Errors
    /// An unknown agent or one whose queue is full.
    fn send_notification(&mut self, agent: &AgentName, message: &[u8]) -> Result<(), TransportError>;

    /// Takes the notifications that have arrived, in order of arrival per peer.
    fn take_notifications(&mut self) -> Vec<(AgentName, Vec<u8>)>;
}
