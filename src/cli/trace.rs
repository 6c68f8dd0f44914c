//! `kvbaton trace`: what happened to one request, step by step.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Args;
use http::Method;
use serde::Deserialize;

use super::client::{Connection, Question};
use super::table::{Output, duration, or_dash, say_json, table};
use super::{runtime, say};

/// Columns of the picture of time.
const WIDTH: usize = 40;

#[derive(Debug, Args)]
pub(super) struct TraceArgs {
    /// The request's id, as in the answer's header x-request-id.
    id: String,
    #[command(flatten)]
    router: Connection,
    /// How the answer is told.
    #[arg(long, value_name = "FORM", default_value = "table")]
    output: Output,
}

#[derive(Debug, Deserialize)]
struct Timeline {
    request_id: String,
    endpoint: String,
    state: String,
    outcome: Option<String>,
    status: Option<u16>,
    model: Option<String>,
    stream: Option<bool>,
    prefill: Option<String>,
    decode: Option<String>,
    tries: u64,
    queue_seconds: Option<f64>,
    prefill_seconds: Option<f64>,
    hand_off_seconds: Option<f64>,
    first_byte_seconds: Option<f64>,
    seconds: f64,
    steps: Vec<Step>,
    steps_left_out: u64,
}

#[derive(Debug, Deserialize)]
struct Step {
    step: String,
    seconds: f64,
    peer: Option<String>,
    status: Option<u16>,
    blocks: Option<u64>,
    reason: Option<String>,
}

pub(super) fn run(args: TraceArgs) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        let operators = args.router.open()?;
        let question = Question::new(Method::GET, &["admin", "requests", &args.id]);
        let answer = operators.ask(question).await?;
        match args.output {
            Output::Table => say(&operators.read_as::<Timeline>(&answer)?.text())?,
            Output::Json => say_json(&answer)?,
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl Timeline {
    fn text(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "request     {}", self.request_id);
        let how = match (&self.outcome, self.status) {
            (Some(outcome), Some(status)) => format!("{outcome}, {status}"),
            _ => self.state.clone(),
        };
        let stream = if self.stream == Some(true) { ", streamed" } else { "" };
        let _ =
            writeln!(text, "endpoint    {}{stream}, model {}", self.endpoint, or_dash(self.model.as_ref()));
        let _ = writeln!(text, "outcome     {how}, after {}", duration(self.seconds));
        let (prefill, decode) = (or_dash(self.prefill.as_ref()), or_dash(self.decode.as_ref()));
        let _ = writeln!(text, "peers       {prefill} to {decode}, {} exchanges", self.tries);
        let parts = [
            ("queue", self.queue_seconds),
            ("prefill", self.prefill_seconds),
            ("hand-off", self.hand_off_seconds),
            ("first byte", self.first_byte_seconds),
        ];
        for (name, seconds) in parts {
            let _ = writeln!(text, "{name:11} {}", or_dash(seconds.map(duration)));
        }
        text.push('\n');
        let rows: Vec<[String; 5]> = self.steps.iter().map(|step| self.row(step)).collect();
        text.push_str(&table(["AT", "STEP", "PEER", "WHAT", "WHEN"], &rows));
        if self.steps_left_out > 0 {
            let _ = writeln!(text, "({} steps found no room)", self.steps_left_out);
        }
        text
    }

    fn row(&self, step: &Step) -> [String; 5] {
        let part = (step.seconds / self.seconds.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        let before = (part * (WIDTH - 1) as f64).round() as usize;
        let what = [
            step.status.map(|status| status.to_string()),
            step.blocks.map(|blocks| format!("{blocks} blocks")),
            step.reason.clone(),
        ];
        [
            duration(step.seconds),
            step.step.clone(),
            step.peer.clone().unwrap_or_default(),
            what.into_iter().flatten().collect::<Vec<_>>().join(", "),
            format!("{}|", ".".repeat(before)),
        ]
    }
}
