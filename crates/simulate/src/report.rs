//! What a run says: how long requests took, who was busy, and how the router decided.

use serde::Serialize;

use crate::histogram::Percentiles;

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The name of its plan.
    pub plan: String,
    /// Requests of the trace.
    pub requests: u64,
    /// Those that were answered.
    pub completed: u64,
    /// Those that admission told to come again.
    pub refused: u64,
    /// Those that no engine has room for.
    pub too_long: u64,
    /// From the first request to the last answer's end.
    pub seconds: f64,
    /// Until the first token, in seconds.
    pub ttft: Percentiles,
    /// Between two tokens, in seconds.
    pub itl: Percentiles,
    /// Until the last token, in seconds.
    pub end_to_end: Percentiles,
    /// Requests that met the goals, those that were refused counted as not.
    pub good: u64,
    /// Which part of all that is.
    pub good_part: f64,
    /// How many that are in a second.
    pub goodput: f64,
    /// Requests that were answered, in a second.
    pub requests_per_second: f64,
    /// Tokens that were generated, in a second.
    pub output_tokens_per_second: f64,
    /// The part of prompts' tokens that the engine that computed the prompt had cached.
    pub hit_rate: f64,
    /// Bytes of KV that were moved.
    pub moved_bytes: u64,
    /// How the router decided.
    pub decisions: Vec<DecisionCount>,
    /// The prefill engines.
    pub prefill: StageReport,
    /// The decode engines.
    pub decode: StageReport,
    /// Each engine.
    pub engines: Vec<EngineReport>,
}

/// How often the router decided something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DecisionCount {
    /// `disaggregated` or `decode_only`.
    pub decision: &'static str,
    /// Why, as in the router's metrics.
    pub reason: &'static str,
    /// How often.
    pub count: u64,
}

/// The engines of a stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StageReport {
    /// How many there are.
    pub engines: usize,
    /// The part of the time in which they were busy, on average.
    pub busy: f64,
    /// That of the least busy one.
    pub least_busy: f64,
    /// That of the busiest one.
    pub most_busy: f64,
    /// Sequences that lost their blocks to others.
    pub preemptions: u64,
}

/// One engine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EngineReport {
    /// Its name.
    pub name: String,
    /// `prefill` or `decode`.
    pub role: &'static str,
    /// Requests that it got.
    pub requests: u64,
    /// The part of the time in which it was busy.
    pub busy: f64,
    /// Prompt tokens that it computed.
    pub computed_tokens: u64,
    /// Tokens that it generated.
    pub generated_tokens: u64,
    /// The part of the tokens that it looked up which its prefix cache had.
    pub hit_rate: f64,
    /// The largest part of its blocks that was in use.
    pub highest_kv_usage: f64,
    /// Sequences that lost their blocks to others.
    pub preemptions: u64,
}

impl StageReport {
    pub(crate) fn of(engines: &[EngineReport], role: &str) -> Self {
        let of_role: Vec<&EngineReport> = engines.iter().filter(|engine| engine.role == role).collect();
        let busy = || of_role.iter().map(|engine| engine.busy);
        if of_role.is_empty() {
            return Self::default();
        }
        Self {
            engines: of_role.len(),
            busy: busy().sum::<f64>() / of_role.len() as f64,
            least_busy: busy().fold(f64::INFINITY, f64::min),
            most_busy: busy().fold(0.0, f64::max),
            preemptions: of_role.iter().map(|engine| engine.preemptions).sum(),
        }
    }
}
