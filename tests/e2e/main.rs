//! End-to-end tests: the real program, real simulated engines, real sockets on free ports.
//! Only faults below HTTP are played by a scripted socket instead of an engine.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends with the first thing that is not as expected"
)]
#![cfg_attr(
    feature = "nixl",
    allow(clippy::print_stdout, clippy::print_stderr, reason = "a skipped test says so")
)]

mod abandon;
mod admin;
mod admission;
mod bad_input;
mod balanced;
mod bound_engines;
mod bound_handoffs;
mod chaos;
mod cli;
mod cors;
mod credentials;
mod discovery;
mod engine_faults;
mod field_notes;
mod fleet;
mod handoff;
mod health;
mod injection;
mod kv_events;
mod lasting;
mod lasting_ends;
mod legs;
mod logs;
mod malformed_handoff;
mod metrics;
mod models;
#[cfg(feature = "nixl")]
mod nixl;
#[cfg(not(feature = "nixl"))]
mod no_nixl;
mod notify;
#[cfg(feature = "nixl")]
mod notify_vllm;
mod observe;
mod program;
mod push;
mod registry;
mod registry_bench;
mod registry_tls;
mod registry_v1;
mod reload;
mod restart;
mod retry;
mod right_answers;
mod routing;
mod secrecy;
mod side_channel;
mod simulate;
mod smuggling;
#[cfg(feature = "etcd")]
mod store;
mod stream;
mod stream_bounds;
mod stream_faults;
mod support;
mod threads;
mod tls;
mod traces;
