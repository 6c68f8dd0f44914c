//! One engine, or a pair with a registry between them, driven over HTTP.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod death;
mod faults;
mod handoff;
mod leases;
mod refusals;
mod registration;
mod shapes;
mod single;
mod storm;
mod support;
