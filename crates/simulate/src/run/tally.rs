//! What is counted in a run.

use std::collections::BTreeMap;
use std::time::Duration;

use kvbaton_proxy::Role;
use kvbaton_proxy::simulated::Decision;

use super::Goal;
use crate::engine::Engine;
use crate::histogram::Histogram;
use crate::plan::Plan;
use crate::report::{DecisionCount, EngineReport, Report, StageReport};
use crate::trace::{Request, Trace};

#[derive(Debug)]
pub(super) struct Tally {
    goal: Goal,
    pub(super) refused: u64,
    pub(super) too_long: u64,
    pub(super) moved_bytes: u64,
    pub(super) itl: Histogram,
    ttft: Histogram,
    end_to_end: Histogram,
    completed: u64,
    good: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    decisions: BTreeMap<(&'static str, &'static str), u64>,
    last: Duration,
}

impl Tally {
    pub(super) fn new(goal: Goal) -> Self {
        Self {
            goal,
            refused: 0,
            too_long: 0,
            moved_bytes: 0,
            itl: Histogram::default(),
            ttft: Histogram::default(),
            end_to_end: Histogram::default(),
            completed: 0,
            good: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            output_tokens: 0,
            decisions: BTreeMap::new(),
            last: Duration::ZERO,
        }
    }

    pub(super) fn decided(&mut self, decision: Decision) {
        let what = if decision.disaggregated { "disaggregated" } else { "decode_only" };
        *self.decisions.entry((what, decision.reason)).or_default() += 1;
    }

    pub(super) fn ended(&mut self, of: &Request, first: Duration, last: Duration, cached: u32) {
        let ttft = first - of.at;
        let itl = if of.output > 1 { (last - first) / (of.output - 1) } else { Duration::ZERO };
        self.ttft.add(ttft);
        self.end_to_end.add(last - of.at);
        self.completed += 1;
        let within = |goal: Option<Duration>, took: Duration| goal.is_none_or(|goal| took <= goal);
        self.good += u64::from(within(self.goal.ttft, ttft) && within(self.goal.itl, itl));
        self.prompt_tokens += u64::from(of.input);
        self.cached_tokens += u64::from(cached);
        self.output_tokens += u64::from(of.output);
        self.last = self.last.max(last);
    }

    pub(super) fn report(
        &self,
        plan: &Plan,
        trace: &Trace,
        names: &[(String, Role)],
        engines: &[Engine],
    ) -> Report {
        let seconds = self.last.as_secs_f64();
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let part = |some: u64, all: u64| if all > 0 { some as f64 / all as f64 } else { 0.0 };
        let engines: Vec<EngineReport> = names
            .iter()
            .zip(engines)
            .map(|((name, role), engine)| EngineReport {
                name: name.clone(),
                role: if *role == Role::Prefill { "prefill" } else { "decode" },
                requests: engine.told.requests,
                busy: if seconds > 0.0 { engine.told.busy.as_secs_f64() / seconds } else { 0.0 },
                computed_tokens: engine.told.computed,
                generated_tokens: engine.told.generated,
                hit_rate: part(engine.told.found, engine.told.looked_up),
                highest_kv_usage: engine.told.highest_usage,
                preemptions: engine.told.preemptions,
            })
            .collect();
        let requests = trace.requests.len() as u64;
        Report {
            plan: plan.name.clone(),
            requests,
            completed: self.completed,
            refused: self.refused,
            too_long: self.too_long,
            seconds,
            ttft: self.ttft.percentiles(),
            itl: self.itl.percentiles(),
            end_to_end: self.end_to_end.percentiles(),
            good: self.good,
            good_part: part(self.good, requests),
            goodput: per_second(self.good),
            requests_per_second: per_second(self.completed),
            output_tokens_per_second: per_second(self.output_tokens),
            hit_rate: part(self.cached_tokens, self.prompt_tokens),
            moved_bytes: self.moved_bytes,
            decisions: self
                .decisions
                .iter()
                .map(|((decision, reason), count)| DecisionCount { decision, reason, count: *count })
                .collect(),
            prefill: StageReport::of(&engines, "prefill"),
            decode: StageReport::of(&engines, "decode"),
            engines,
        }
    }
}
