//! The table: every router that is installed, under three loads and a rising number of clients.

use std::fmt::Write as _;

use crate::Plan;
use crate::client::{self, Load, Until};
use crate::engine::Engines;
use crate::growth::fleet;
use crate::process::{Router, Who, kvbaton};

/// One line of the table.
pub(crate) struct Row {
    pub(crate) cpu_us: f64,
    pub(crate) per_second: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) bad: usize,
}

/// Measures one load at one router.
pub(crate) fn row(router: &Router, engines: &Engines, load: &Load, connections: usize, plan: Plan) -> Row {
    client::run(router.addr, load, connections, Until::Over(plan.lasts / 5));
    let (before, served) = (router.cpu(), engines.served());
    let sample = client::run(router.addr, load, connections, Until::Over(plan.lasts));
    let cpu = router.cpu() - before;
    let (prefills, decodes) = engines.served();
    // Whoever left out a leg has not done the work that is compared.
    let legs = (prefills - served.0).min(decodes - served.1) as usize;
    let is_router = router.pid() != 0;
    Row {
        cpu_us: if is_router { cpu.as_secs_f64() * 1e6 / sample.good().max(1) as f64 } else { 0.0 },
        per_second: sample.per_second(),
        p50: sample.latency(0.5),
        p99: sample.latency(0.99),
        bad: sample.bad + if legs > 0 { sample.good().saturating_sub(legs) } else { 0 },
    }
}

/// Runs the loads at kvbaton, which is then asked to end.
pub(crate) fn run(engines: &Engines, plan: Plan) {
    // With the log that operators read, and without it.
    for level in ["error", "info"] {
        let log = ["--set".to_owned(), format!("log.level={level}")];
        let router = Router::kvbaton(&[&fleet(engines, 2)[..], &log].concat());
        for load in Load::all() {
            for connections in plan.connections {
                client::run(router.addr, &load, *connections, Until::Over(plan.lasts));
            }
        }
        router.end();
    }
}

/// Measures all of them.
pub(crate) fn measure(engines: &Engines, plan: Plan) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "| router | load | clients | CPU µs/request | requests/s | p50 ms | p99 ms | failed |"
    );
    let _ = writeln!(text, "|---|---|---|---|---|---|---|---|");
    let mut memory = String::new();
    for who in Who::installed() {
        let router = Router::start(who, engines);
        let idle = router.resident();
        for load in Load::all() {
            for connections in plan.connections {
                let row = row(&router, engines, &load, *connections, plan);
                let _ = writeln!(
                    text,
                    "| {} | {} | {connections} | {:.0} | {:.0} | {:.2} | {:.2} | {} |",
                    who.name(),
                    load.name,
                    row.cpu_us,
                    row.per_second,
                    row.p50,
                    row.p99,
                    row.bad
                );
            }
        }
        if router.pid() != 0 {
            let _ = writeln!(
                memory,
                "| {} | {:.0} ms | {:.1} | {:.1} |",
                who.name(),
                router.first_answer.as_secs_f64() * 1e3,
                idle as f64 / 1e6,
                router.resident() as f64 / 1e6
            );
        }
    }
    let _ = writeln!(
        text,
        "\n| router | start to first answer | MB idle | MB after the loads |\n|---|---|---|---|\n{memory}"
    );
    let binary = std::fs::metadata(kvbaton()).unwrap().len();
    let _ = writeln!(text, "kvbaton's program has {:.1} MB.", binary as f64 / 1e6);
    text
}
