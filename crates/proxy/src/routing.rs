//! Which engines a request had best go to: what is known of their prefix caches, and stable places for keys.

pub(crate) mod kv_events;
pub mod prefix;
pub mod ring;

/// A peer's number, unique for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey(pub u32);
