//! What can go wrong while an engine starts.

use std::io;

use thiserror::Error;

/// Why an engine did not start.
#[derive(Debug, Error)]
pub enum EngineError {
    /// A setting has a value that no engine can have.
    #[error("engine setting {setting} must be {expected}")]
    Setting {
        /// The field of the configuration.
        setting: &'static str,
        /// What it must be.
        expected: &'static str,
    },
    /// The listener has no usable address.
    #[error("the listener has no local address")]
    Listener(#[source] io::Error),
    /// The ZMQ side channel cannot be bound.
    #[error("the side channel cannot be bound")]
    SideChannel(#[source] io::Error),
    /// The KV events' ports cannot be bound.
    #[error("the ports of the KV events cannot be bound")]
    KvEvents(#[source] io::Error),
    /// The KV memory could not be made available to peers.
    #[error("the KV memory could not be registered with the transport")]
    Worker(#[from] kv_connector::worker::WorkerSetupError),
    /// The loopback transport could not be started.
    #[error("the loopback transport could not be started")]
    Loopback(#[source] io::Error),
    /// NIXL was asked for, and this build has none.
    #[cfg(not(feature = "nixl"))]
    #[error(
        "this build has no NIXL: build it with `--features nixl`, which needs g++ and libclang (scripts/nixl-setup \
         installs them and the library)"
    )]
    NixlNotBuilt,
    /// NIXL is not there or gave no agent.
    #[cfg(feature = "nixl")]
    #[error(transparent)]
    Nixl(#[from] kv_connector::transport::nixl::NixlError),
    /// The system has no memory for the KV blocks.
    #[cfg(feature = "nixl")]
    #[error("no memory for the KV blocks")]
    Memory(#[from] kv_connector::transport::OutOfMemory),
    /// The thread that starts the engine's transport broke off.
    #[error("the transport could not be started")]
    Start(#[source] tokio::task::JoinError),
    /// The registry client could not be built.
    #[error("the handshake registry cannot be used")]
    Registry(#[source] kv_connector::handshake::RegistryError),
}
