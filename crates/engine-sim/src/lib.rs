//! A simulated vLLM engine that is faithful where a router can tell the difference.
//!
//! It owns real KV bytes and moves them through `kv-connector`'s transports; generated text
//! depends on the bytes it reads, so a wrong hand-off shows. It holds no router policy.

mod blocks;
mod cache_events;
mod config;
mod conn;
mod core;
mod engine;
mod error;
mod faults;
mod geometry;
mod http;
mod kv;
mod listener;
mod metrics;
mod ranks;
mod registration;
mod shared;
mod tokens;
mod transport;

pub use config::{Attention, EngineConfig, LoadFailurePolicy, Role};
pub use engine::{Engine, spawn};
pub use error::EngineError;
pub use faults::{ArmedFault, Corrupt, Fault, Faults, Gate, Leg, Stage};
pub use kv_connector::handshake::{ClientIdentity, RegistryTls};
pub use kv_connector::protocol::Generation;
pub use kv_connector::regions::Layout;
pub use listener::ListenerState;
pub use shared::{EngineStats, SeenRequest};
pub use transport::KvTransport;
