//! The ZMQ side channel of vLLM engines: serving handshake payloads and asking for them.
//!
//! A REQ and ROUTER pair of ZMTP 3 without security, in both protocol generations. A peer that
//! breaks the rules ends only its own connection; what the payloads mean is for
//! [`crate::worker`] to decide.

mod client;
mod server;
pub(crate) mod zmtp;

pub use client::{SideChannelClient, shake_hands};
pub use server::{RankPayloads, SideChannelServer, reply_frames};

/// How long a client waits for each reply.
pub const RECEIVE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

#[cfg(test)]
mod tests;
