//! The HTTP surface over a real core, asked in process unless framing matters.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod contract;
mod credentials;
mod dashboard;
mod operators;
mod pages;
mod registry;
mod registry_engines;
mod requests;
mod reserved;
mod support;
mod unread;
