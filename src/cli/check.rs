//! `kvbaton check`: settings, engines, handshakes, and one real hand-off of every pair, with a verdict.
//! The hand-offs are the router's own: of a running one, or of one that is started for it from the settings.

mod target;
mod verdict;

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use url::Url;

use super::client::{Credentials, Operators};
use super::fault::{BAD, CliError};
use super::peers::Peer;
use super::table::{Output, duration, or_dash, say_json, table};
use super::{ServeArgs, runtime, say};
use crate::config::load;
use target::{Pair, Source, Target};
use verdict::{Finding, Judgement, NOTHING_READY, of_peer};

#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    /// Ask this running router; without it, a router is started from the settings for the time of the check.
    #[arg(long, value_name = "URL", conflicts_with = "ServeArgs")]
    router: Option<Url>,
    #[command(flatten)]
    with: Credentials,
    #[command(flatten)]
    settings: ServeArgs,
    /// Only read the settings, and say all that is wrong with them; starts nothing and asks nobody.
    #[arg(long, conflicts_with = "router")]
    only_settings: bool,
    /// How long engines may take to answer a router that is started for the check, in seconds.
    #[arg(long, value_name = "S", default_value_t = 20.0)]
    wait: f64,
    /// How the verdict is told.
    #[arg(long, value_name = "FORM", default_value = "table")]
    output: Output,
}

pub(super) fn run(args: CheckArgs) -> anyhow::Result<ExitCode> {
    if args.only_settings {
        let config = load(&args.settings.into(), std::env::vars())?;
        let (prefill, decode) = (config.prefill.len(), config.decode.len());
        let sources = match config.discovery.dns.len() + config.discovery.kubernetes.len() {
            0 => String::new(),
            count => format!(", {count} source(s) of more"),
        };
        say(&format!("good: settings with {prefill} prefill and {decode} decode engine(s){sources}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let wait = Duration::try_from_secs_f64(args.wait)
        .map_err(|_| CliError::Usage { option: "--wait", why: "must be a number of seconds" })?;
    runtime()?.block_on(async {
        let target = match &args.router {
            Some(router) => Target::Running(Box::new(Operators::new(router, &args.with)?)),
            None => Target::start(args.settings.into(), wait).await?,
        };
        let report = report(&target).await;
        target.end().await;
        let report = report?;
        match args.output {
            Output::Table => say(&report.text())?,
            Output::Json => say_json(&report.json())?,
        }
        Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::from(BAD) })
    })
}

/// Everything that was found out.
struct Report {
    of: String,
    sources: Vec<Source>,
    peers: Vec<Peer>,
    pairs: Vec<Judgement>,
}

async fn report(target: &Target) -> Result<Report, CliError> {
    let (sources, peers) = (target.sources().await?, target.peers().await?);
    let mut pairs = Vec::new();
    let known = target.pairs().await?;
    let bar = progress(known.len());
    for pair in known {
        bar.set_message(format!("{} to {}", pair.prefill, pair.decode));
        pairs.push(judge(target, pair).await?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Report { of: target.name(), sources, peers, pairs })
}

async fn judge(target: &Target, pair: Pair) -> Result<Judgement, CliError> {
    let trial = target.attempt(&pair.prefill, &pair.decode).await?;
    Ok(Judgement { pair, trial })
}

/// On standard error, and only where that is a terminal.
fn progress(pairs: usize) -> ProgressBar {
    let bar = ProgressBar::new(pairs as u64);
    match ProgressStyle::with_template("hand-offs {bar:30} {pos}/{len} {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

impl Report {
    fn is_good(&self) -> bool {
        self.roles().is_none()
            && self.sources.iter().all(|source| source.finding().is_none())
            && self.peers.iter().all(|peer| of_peer(peer).is_none())
            && self.all_work()
    }

    fn all_work(&self) -> bool {
        self.pairs.iter().all(Judgement::works)
    }

    /// Which role nobody has.
    fn roles(&self) -> Option<&'static str> {
        let has = |role: &str| self.peers.iter().any(|peer| peer.role == role);
        match (has("prefill"), has("decode")) {
            (true, true) => None,
            (false, true) => {
                Some("there is no prefill engine: name one with [[prefill]] in the settings or --prefill")
            }
            (true, false) => {
                Some("there is no decode engine: name one with [[decode]] in the settings or --decode")
            }
            (false, false) => {
                Some("there are no engines: name them with [[prefill]] and [[decode]] in the settings")
            }
        }
    }

    fn text(&self) -> String {
        let mut text = format!("checked: {}\n\n", self.of);
        if !self.sources.is_empty() {
            let row = |source: &Source| {
                let names = if source.urls.is_empty() { "-".to_owned() } else { source.urls.join(", ") };
                [source.source.clone(), source.role.clone(), names]
            };
            let rows: Vec<[String; 3]> = self.sources.iter().map(row).collect();
            text.push_str(&table(["SOURCE", "ROLE", "NAMES"], &rows));
            text.push('\n');
        }
        let rows: Vec<[String; 5]> = self
            .peers
            .iter()
            .map(|peer| {
                let version = or_dash(peer.version.as_ref());
                [peer.id.clone(), peer.role.clone(), peer.state.clone(), version, peer.url.clone()]
            })
            .collect();
        text.push_str(&table(["ENGINE", "ROLE", "STATE", "VERSION", "URL"], &rows));
        text.push('\n');
        let rows: Vec<[String; 6]> = self.pairs.iter().map(Judgement::row).collect();
        text.push_str(&table(["PREFILL", "DECODE", "HANDSHAKE", "HAND-OFF", "BLOCKS", "TIME"], &rows));
        text.push('\n');
        for Finding { what, advice, see } in self.findings() {
            let _ = writeln!(text, "{what}\n    {advice}\n    more: docs/troubleshooting.md#{see}");
        }
        let (works, all) = (self.pairs.iter().filter(|pair| pair.works()).count(), self.pairs.len());
        let verdict = if self.is_good() { "good" } else { "not good" };
        let _ = writeln!(text, "{verdict}: {works} of {all} pairs hand off");
        text
    }

    /// What is wrong and what to do about it.
    fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        findings.extend(self.roles().map(|what| {
            let (what, advice) = what.split_once(": ").unwrap_or((what, ""));
            Finding { what: what.to_owned(), advice: advice.to_owned(), see: NOTHING_READY }
        }));
        findings.extend(self.sources.iter().filter_map(Source::finding));
        findings.extend(self.peers.iter().filter_map(of_peer));
        // What an engine lacks is said once, not of each of its pairs.
        findings.extend(self.pairs.iter().filter_map(Judgement::finding));
        findings
    }

    fn json(&self) -> Value {
        let peers: Vec<Value> = self
            .peers
            .iter()
            .map(|peer| json!({"id": peer.id, "role": peer.role, "state": peer.state, "url": peer.url}))
            .collect();
        let pairs: Vec<Value> = self.pairs.iter().map(Judgement::json).collect();
        let findings: Vec<Value> = self
            .findings()
            .into_iter()
            .map(|found| json!({"what": found.what, "advice": found.advice, "see": found.see}))
            .collect();
        let sources: Vec<Value> = self.sources.iter().map(Source::json).collect();
        json!({
            "good": self.is_good(),
            "of": self.of,
            "sources": sources,
            "peers": peers,
            "pairs": pairs,
            "findings": findings,
        })
    }
}

impl Judgement {
    fn row(&self) -> [String; 6] {
        let time = (self.trial.seconds > 0.0).then(|| duration(self.trial.seconds));
        [
            self.pair.prefill.clone(),
            self.pair.decode.clone(),
            self.pair.verdict.clone(),
            self.trial.result.replace('_', " "),
            or_dash(self.trial.blocks),
            or_dash(time),
        ]
    }
}
