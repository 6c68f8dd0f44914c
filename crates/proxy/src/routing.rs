//! Which engines a request had best go to: what is known of their load, their rates and their prefix caches, stable
//! places for keys, and the choice itself. Never sends anything.

pub(crate) mod candidates;
pub(crate) mod choose;
pub(crate) mod decide;
pub(crate) mod explain;
pub(crate) mod facts;
pub(crate) mod kv_events;
pub(crate) mod lately;
pub(crate) mod pick;
pub mod prefix;
pub mod rates;
pub mod ring;
pub(crate) mod roster;
pub mod score;
pub(crate) mod settings;
pub(crate) mod surroundings;
#[cfg(test)]
mod tests;

/// A peer's number, unique for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey(pub u32);
