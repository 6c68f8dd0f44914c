//! A request's instructions, counted under valgrind: the same on every run and every machine of a kind, so
//! that a change that costs a few percent is seen. The budget is a file of the repository.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::client::{self, Load, Until};
use crate::engine::Engines;
use crate::growth::fleet;
use crate::process::{Router, free, kvbaton};

const BUDGET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/overhead/budget.txt");

/// More than this over the budget is a regression.
const TOLERANCE: f64 = 1.05;
const WARM_UP: usize = 100;
const REQUESTS: usize = 300;
/// A fleet in which a request must cost hardly more than between two engines.
const PEERS: usize = 1000;

/// What is counted: a load and the peers that it is spread over.
struct Case {
    name: String,
    load: Load,
    peers: usize,
}

fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> =
        Load::all().into_iter().map(|load| Case { name: load.name.clone(), load, peers: 2 }).collect();
    let [load, ..] = Load::all();
    cases.push(Case { name: format!("{}-of-{PEERS}", load.name), load, peers: PEERS });
    cases
}

/// Whether each load stays within its budget; `write` makes what is counted now the budget.
pub(crate) fn holds(write: bool) -> bool {
    let engines = Engines::start();
    let cases = cases();
    let counted: Vec<u64> = cases.iter().map(|case| count(&engines, case)).collect();
    if write {
        let line = |(case, count): (&Case, &u64)| format!("{} {count}\n", case.name);
        let lines: Vec<String> = cases.iter().zip(&counted).map(line).collect();
        std::fs::write(BUDGET, lines.concat()).unwrap();
    }
    let budget = std::fs::read_to_string(BUDGET).unwrap();
    let mut holds = true;
    for (case, mut count) in cases.iter().zip(counted) {
        let name = &case.name;
        let of_case = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok();
        let allowed = budget.lines().find_map(of_case);
        let allowed = allowed.unwrap_or_else(|| panic!("no budget for {name} in {BUDGET}"));
        let part = |count: u64| count as f64 / allowed as f64;
        // How an answer is cut into reads depends on what else the machine does; the least is the request's own.
        for _ in 0..2 {
            if part(count) > TOLERANCE {
                count = count.min(self::count(&engines, case));
            }
        }
        let part = part(count);
        let verdict = if part > TOLERANCE { "TOO MANY" } else { "ok" };
        println!(
            "{name}: {count} instructions per request, budget {allowed} ({:+.1} %): {verdict}",
            (part - 1.0) * 100.0
        );
        holds &= part <= TOLERANCE;
    }
    holds
}

fn count(engines: &Engines, case: &Case) -> u64 {
    let (load, name) = (&case.load, &case.name);
    let folder = std::env::temp_dir().join(format!("kvbaton-budget-{}-{}", std::process::id(), name));
    std::fs::create_dir_all(&folder).unwrap();
    let addr = free();
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--instr-atstart=no", "--quiet"]);
    command.arg(format!("--callgrind-out-file={}", folder.join("counted").display()));
    command.arg(kvbaton()).args(["--listen", &addr.to_string()]);
    command.args(fleet(engines, case.peers));
    command.args(["--set", "log.level=error", "--set", "connections.threads=1"]);
    // What it does by itself is no request's.
    command.args(["--set", "probe.interval=10m", "--set", "probe.metrics_interval=0s"]);
    command.args(["--set", "side_channel.read=off"]);
    let router = Router::run(command, addr);
    // At the same time, so that all peers get to know each other first: one client alone would stay with a few.
    client::run(addr, load, case.peers, Until::Requests(WARM_UP));
    control(router.pid(), "-i", Some("on"));
    let sample = client::run(addr, load, 1, Until::Requests(REQUESTS));
    control(router.pid(), "-i", Some("off"));
    control(router.pid(), "-d", None);
    assert_eq!(sample.good(), REQUESTS, "{name}: {} requests failed", sample.bad);
    let total = dumps(&folder).iter().filter_map(|dump| totals(dump)).max().unwrap();
    drop(router);
    std::fs::remove_dir_all(&folder).unwrap();
    total / REQUESTS as u64
}

fn control(pid: u32, option: &str, argument: Option<&str>) {
    let mut command = Command::new("callgrind_control");
    let status = command.arg(option).args(argument).arg(pid.to_string()).stdout(Stdio::null()).status();
    assert!(status.unwrap().success(), "callgrind_control {option}");
}

fn dumps(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// The instructions of all threads in one dump.
fn totals(dump: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(dump).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("totals: "))?;
    line.split_whitespace().next()?.parse().ok()
}
