//! Handshakes through the registry beside handshakes over ZMQ, many registered ranks, many heartbeats.
//!
//! `cargo bench --bench registry` prints the tables of `docs/performance.md`; with `-- --smoke` it is over in
//! seconds and its figures mean nothing. `KVBATON_BENCH_PYTHON` names a Python with pyzmq and msgspec, as every
//! installation of vLLM has; without one its listener is left out.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed step ends the benchmark"
)]
#![allow(clippy::print_stdout, reason = "the result is printed")]

#[path = "registry/measure.rs"]
mod measure;

use measure::Plan;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let smoke = std::env::args().any(|argument| argument == "--smoke");
    let python = std::env::var("KVBATON_BENCH_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    println!("{}", measure::run(if smoke { Plan::SMOKE } else { Plan::FULL }, &python).await);
}
