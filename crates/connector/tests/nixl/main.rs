//! The NIXL transport between processes: with itself, with Python's nixl, and under a worker.
//!
//! This process orchestrates and loads no NIXL itself: every agent lives in a child process, which
//! can be given UCX settings and can be killed. Where NIXL is not installed the tests say so and
//! pass, unless KVBATON_REQUIRE_NIXL is set.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step is a failed test")]
#![allow(clippy::print_stderr, reason = "a skipped test says so")]
#![allow(clippy::print_stdout, reason = "figures are printed")]

mod children;
mod engine;
mod handoff;
mod peer;
mod processes;
mod python;
#[cfg(all(feature = "zmq", feature = "registry"))]
mod vllm;
