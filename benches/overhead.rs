//! What the router costs: CPU time per request, requests per second, latency and memory, in one run beside
//! whichever other routers are installed, between the same mock engines.
//!
//! `cargo bench --bench overhead` prints the tables of `docs/performance.md` and draws its plots;
//! `-- --growth` is the second half alone, `-- --streams` the memory of open streams, its last part;
//! `-- --loads` only runs the loads, for whoever watches the program meanwhile;
//! `-- --seconds 2` has each measurement last so long; `-- --smoke` is over in seconds and its figures mean
//! nothing; `-- --instructions` counts a request's instructions under valgrind and holds them against
//! `benches/overhead/budget.txt`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed step ends the benchmark"
)]
#![allow(clippy::print_stdout, reason = "the result is printed")]

#[path = "overhead/budget.rs"]
mod budget;
#[path = "overhead/client.rs"]
mod client;
#[path = "overhead/costs.rs"]
mod costs;
#[path = "overhead/engine.rs"]
mod engine;
#[path = "overhead/growth.rs"]
mod growth;
#[path = "overhead/plot.rs"]
mod plot;
#[path = "overhead/process.rs"]
mod process;
#[path = "overhead/table.rs"]
mod table;

use std::time::Duration;

/// How long everything takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Of one measurement.
    pub(crate) lasts: Duration,
    pub(crate) connections: &'static [usize],
    /// Most peers, and most slow streams at a time.
    pub(crate) most: usize,
}

const FULL: Plan = Plan { lasts: Duration::from_secs(5), connections: &[1, 32, 256], most: 5000 };
const SMOKE: Plan = Plan { lasts: Duration::from_millis(100), connections: &[2], most: 20 };

fn main() {
    let asked = |name: &str| std::env::args().any(|argument| argument == name);
    if asked("--instructions") {
        std::process::exit(i32::from(!budget::holds(asked("--write"))));
    }
    let mut plan = if asked("--smoke") { SMOKE } else { FULL };
    let seconds = std::env::args().skip_while(|argument| argument != "--seconds").nth(1);
    if let Some(seconds) = seconds.and_then(|seconds| seconds.parse().ok()) {
        plan.lasts = Duration::from_secs(seconds);
    }
    let engines = engine::Engines::start();
    let folder = asked("--plots").then_some("docs/performance");
    if asked("--loads") {
        return table::run(&engines, plan);
    }
    if asked("--streams") {
        return growth::streams(&engines, plan, folder);
    }
    if !asked("--growth") {
        println!("{}", table::measure(&engines, plan));
        println!("{}", costs::measure(&engines, plan));
    }
    growth::measure(&engines, plan, folder);
}
