//! The figures and the tables that show them.

use std::fmt;
use std::time::Duration;

use super::Plan;

/// Durations of one kind of exchange.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    micros: Vec<f64>,
}

impl Samples {
    pub(super) fn push(&mut self, took: Duration) {
        self.micros.push(took.as_secs_f64() * 1e6);
    }

    pub(super) fn extend(&mut self, others: Self) {
        self.micros.extend(others.micros);
    }

    pub(crate) fn len(&self) -> usize {
        self.micros.len()
    }

    fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.micros.clone();
        sorted.sort_by(f64::total_cmp);
        let at = (sorted.len().saturating_sub(1) as f64 * share).round() as usize;
        sorted.get(at).copied().unwrap_or(f64::NAN)
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.micros.is_empty() {
            return f.write_str("- | -");
        }
        write!(f, "{:.0} | {:.0}", self.quantile(0.5), self.quantile(0.99))
    }
}

/// One way to shake hands.
#[derive(Debug, Default)]
pub(crate) struct Side {
    /// One rank on a kept connection.
    pub(crate) kept: Samples,
    /// One rank on a new connection.
    pub(crate) fresh: Samples,
    /// From an engine that nobody knows to its payload at the other engine.
    pub(crate) whole: Samples,
}

/// All ways to shake hands.
#[derive(Debug)]
pub(crate) struct Handshakes {
    /// The connector's HTTP client and the registry.
    pub(crate) http: Side,
    /// The connector's ZMQ client and vLLM's listener in Python, where there is one.
    pub(crate) vllm: Option<Side>,
    /// The connector's ZMQ client and the router's side channel.
    pub(crate) front: Side,
}

/// Many registered ranks.
#[derive(Debug)]
pub(crate) struct Ranks {
    /// How long registering all of them took.
    pub(crate) registering: Duration,
    /// Look-ups at a registry with next to nothing in it.
    pub(crate) among_few: Samples,
    /// Look-ups at the full one.
    pub(crate) among_many: Samples,
    /// By how many bytes the router grew.
    pub(crate) memory: u64,
}

/// Many engines' signs of life.
#[derive(Debug)]
pub(crate) struct Beats {
    /// How long each was on its way, there and back.
    pub(crate) answers: Samples,
    /// What the router computed meanwhile.
    pub(crate) computed: Duration,
    /// How long that was.
    pub(crate) span: Duration,
}

/// Everything that was measured.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) plan: Plan,
    pub(crate) handshakes: Handshakes,
    pub(crate) ranks: Ranks,
    pub(crate) beats: Beats,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plan, handshakes: Handshakes { http, vllm, front }, ranks, beats } = self;
        writeln!(f, "| one handshake, µs | p50 | p99 | p50, new connection | p99 | p50, new engine | p99 |")?;
        writeln!(f, "|---|--:|--:|--:|--:|--:|--:|")?;
        let mut row =
            |name, side: &Side| writeln!(f, "| {name} | {} | {} | {} |", side.kept, side.fresh, side.whole);
        row("HTTP, registry", http)?;
        match vllm {
            Some(vllm) => row("ZMQ, vLLM's listener (pyzmq)", vllm)?,
            None => row("ZMQ, vLLM's listener: left out, no Python with zmq and msgspec", &Side::default())?,
        }
        row("ZMQ, router's front", front)?;
        if let Some(vllm) = vllm {
            let ratio = http.kept.quantile(0.5) / vllm.kept.quantile(0.5);
            writeln!(f, "\nHTTP's p50 on a kept connection is {ratio:.2} of that of vLLM's listener.")?;
        }
        let count = plan.engines * plan.ranks as usize;
        let per_rank = ranks.memory / count as u64;
        let mebibytes = ranks.memory as f64 / f64::from(1 << 20);
        writeln!(f, "\n| look-up over HTTP, µs | p50 | p99 |\n|---|--:|--:|")?;
        writeln!(
            f,
            "| among 1 rank | {} |\n| among {count} ranks | {} |",
            ranks.among_few, ranks.among_many
        )?;
        writeln!(
            f,
            "\n{count} ranks of {} engines: {mebibytes:.1} MiB more resident memory, {per_rank} bytes a rank; \
             registered one engine after the other in {:.2} s.",
            plan.engines,
            ranks.registering.as_secs_f64(),
        )?;
        let rate = plan.beating as f64 / plan.interval.as_secs_f64();
        let share = beats.computed.as_secs_f64() / beats.span.as_secs_f64();
        writeln!(
            f,
            "\n{} engines, a heartbeat each {:?} ({rate:.0} a second), {} heartbeats in {:.0} s: the router took {:.2} % of one \
             core, {:.0} µs a heartbeat; answered in µs (p50 | p99): {}.",
            plan.beating,
            plan.interval,
            beats.answers.len(),
            beats.span.as_secs_f64(),
            share * 100.0,
            share / rate * 1e6,
            beats.answers,
        )
    }
}
