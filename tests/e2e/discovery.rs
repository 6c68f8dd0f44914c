//! Engines that come and go with what a source of addresses names.

mod dns;
#[cfg(feature = "kubernetes")]
mod kubernetes;
