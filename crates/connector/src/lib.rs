//! vLLM's NIXL KV connector in Rust: wire protocol, scheduler half and worker half.
//!
//! A Rust engine links this crate alone. The state machines are synchronous, take the
//! time from their caller and never know which transport moves the bytes; nothing here
//! reads the environment or decides policy.

pub mod aggregate;
pub mod compat;
pub mod error;
pub mod fit;
#[cfg(test)]
mod golden;
#[cfg(feature = "registry")]
pub mod handshake;
pub mod json;
#[cfg(feature = "zmq")]
pub mod kv_events;
pub mod protocol;
pub mod push;
pub mod regions;
pub mod scheduler;
#[cfg(feature = "zmq")]
pub mod side_channel;
pub mod stats;
pub mod topology;
pub mod transport;
pub mod worker;

/// A point on the caller's monotonic clock, as the time since that clock's origin.
pub type ClockTime = std::time::Duration;
