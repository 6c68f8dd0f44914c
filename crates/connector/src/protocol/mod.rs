//! The wire: transfer parameters, handshake payloads, agent metadata and notifications.
//!
//! Both protocol generations side by side. Bytes in, typed values or typed errors out;
//! nothing here keeps state or performs I/O.

pub mod handoff;
pub mod handshake;
pub mod metadata;
pub mod msgpack;
pub mod notification;
pub mod params;
pub mod registration;

pub use handoff::{HandOff, HandOffDefect};
pub use params::{BlockIds, Generation, KvTransferParams, Presence, TransferMode};
