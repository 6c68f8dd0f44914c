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
    /// The KV memory could not be made available to peers.
    #[error("the KV memory could not be registered with the transport")]
    Worker(#[from] kv_connector::worker::WorkerSetupError),
    /// The loopback transport could not be started.
    #[error("the loopback transport could not be started")]
    Loopback(#[source] io::Error),
    /// The registry client could not be built.
    #[error("the handshake registry cannot be used")]
    Registry(#[source] kv_connector::handshake::RegistryError),
}
