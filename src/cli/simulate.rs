//! `kvbaton simulate`: what a fleet would do with a trace of requests, by policies. Reads files, starts nothing.

mod view;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvbaton_proxy::DisaggregationMode;
use kvbaton_simulate::{Fleet, Goal, Plan, Report, Synthetic, Trace, TraceError, run as run_plan};
use parking_lot::Mutex;

use super::fault::CliError;
use super::say;
use super::table::say_json;
use crate::config::Config;

#[derive(Debug, Args)]
pub(super) struct SimulateArgs {
    /// The engines and the router's settings for them (TOML, docs/simulate.md).
    #[arg(long, value_name = "FILE")]
    fleet: PathBuf,
    /// Requests: JSON lines as Mooncake's, or CSV as Azure's.
    #[arg(long, value_name = "FILE", required_unless_present = "synthetic", conflicts_with = "synthetic")]
    trace: Option<PathBuf>,
    /// Requests that are made up, such as rate=20,requests=1000,input=2000,output=200,shared=1024.
    #[arg(long, value_name = "KEY=N,...", num_args = 0..=1, default_missing_value = "")]
    synthetic: Option<Synthetic>,
    /// A policy for both stages, or PREFILL+DECODE; repeatable [default: as the fleet's file says].
    #[arg(long, value_name = "POLICY")]
    policy: Vec<String>,
    /// Whether requests are split; repeatable [default: as the fleet's file says].
    #[arg(long, value_name = "MODE")]
    disaggregation: Vec<Mode>,
    /// What chance begins with; the same gives the same figures.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Longest time until the first token of a good request, such as 500ms.
    #[arg(long, value_name = "TIME", value_parser = humantime_serde::re::humantime::parse_duration)]
    slo_ttft: Option<Duration>,
    /// Longest time between the tokens of a good request, on average.
    #[arg(long, value_name = "TIME", value_parser = humantime_serde::re::humantime::parse_duration)]
    slo_itl: Option<Duration>,
    /// Tokens of the blocks that a trace's hash_ids name.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    block_tokens: u32,
    /// How much faster requests come than the trace says.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = factor)]
    speed: f64,
    /// Take only the first requests.
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Print JSON, with each engine's figures.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Mode {
    Always,
    Auto,
    Never,
}

impl From<Mode> for DisaggregationMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Always => Self::Always,
            Mode::Auto => Self::Auto,
            Mode::Never => Self::Never,
        }
    }
}

/// A factor that is none.
#[derive(Debug, thiserror::Error)]
#[error("expected a number from 0.001 to 1000")]
struct NotAFactor;

fn factor(text: &str) -> Result<f64, NotAFactor> {
    text.parse().ok().filter(|factor| (0.001..=1000.0).contains(factor)).ok_or(NotAFactor)
}

pub(super) fn run(args: &SimulateArgs) -> anyhow::Result<ExitCode> {
    let fleet = fleet(&args.fleet)?;
    let mut trace = match (&args.trace, &args.synthetic) {
        (Some(path), _) => trace(path, args.block_tokens)?,
        (None, made_up) => made_up.clone().unwrap_or_default().trace(args.seed),
    };
    trace.requests.truncate(args.requests.unwrap_or(usize::MAX));
    for request in &mut trace.requests {
        request.at = request.at.div_f64(args.speed);
    }
    let modes: Vec<DisaggregationMode> = args.disaggregation.iter().map(|mode| (*mode).into()).collect();
    let plans = Plan::all(&fleet.routing, &fleet.disaggregation, &args.policy, &modes).map_err(|_| {
        CliError::Usage { option: "--policy", why: "one of docs/routing.md, or two with a + between them" }
    })?;
    let goal = Goal { ttft: args.slo_ttft, itl: args.slo_itl };
    let reports = run_all(&plans, &fleet, &trace, args.seed, goal)?;
    if args.json {
        say_json(&serde_json::to_value(&reports)?)?;
    } else {
        say(&view::page(&reports, goal))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Each plan on a thread, as many at once as there are cores.
fn run_all(
    plans: &[Plan],
    fleet: &Fleet,
    trace: &Trace,
    seed: u64,
    goal: Goal,
) -> anyhow::Result<Vec<Report>> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(plans.len()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores.min(plans.len()) {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    let Some(plan) = plans.get(place) else { return };
                    let report = run_plan(plan, fleet, trace, seed, goal);
                    done.lock().push((place, report));
                }
            });
        }
    });
    let mut done = done.into_inner();
    done.sort_by_key(|(place, _)| *place);
    Ok(done.into_iter().map(|(_, report)| report).collect::<Result<_, _>>()?)
}

fn read(path: &Path) -> Result<String, CliError> {
    std::fs::read_to_string(path).map_err(|source| CliError::File { path: path.to_owned(), source })
}

fn fleet(path: &Path) -> anyhow::Result<Fleet> {
    let wrong = |what: String| CliError::Wrong { path: path.to_owned(), what };
    let fleet = Fleet::read(&read(path)?).map_err(|error| wrong(error.to_string()))?;
    let settings = Config {
        routing: fleet.routing.clone(),
        disaggregation: fleet.disaggregation.clone(),
        admission: fleet.admission.clone(),
        ..Config::default()
    };
    settings.validate().map_err(|faults| wrong(faults.to_string()))?;
    Ok(fleet)
}

fn trace(path: &Path, block_tokens: u32) -> Result<Trace, CliError> {
    Trace::read(&read(path)?, block_tokens).map_err(|error| {
        let what = match &error {
            TraceError::Lines { first, count } => {
                let mut what = format!("{error}:");
                first.iter().for_each(|line| what.push_str(&format!("\n  - {line}")));
                if *count > first.len() {
                    what.push_str("\n  - …");
                }
                what
            }
            TraceError::Empty | TraceError::Format => error.to_string(),
        };
        CliError::Wrong { path: path.to_owned(), what }
    })
}
