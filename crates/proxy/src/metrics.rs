//! The counters and histograms of the router, in one handle that is passed in. `list.rs` says which there are.
//! Never an address or a request id in a label; a client's word for a model only if the fleet knows it.

mod fleet;
mod list;
mod outcome;
mod page;
mod steps;
mod table;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use foldhash::fast::RandomState;
use parking_lot::RwLock;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

use crate::error::{HandOffRefusal, Stage, UpstreamFailure};
use crate::side_channel::channels::SideChannelState;
use list::{
    DecisionLabels, FailureLabels, ModelLabel, NameLabels, ReasonLabel, RequestLabels, ResultLabel,
    StageLabel, Table, WayLabel,
};
pub(crate) use outcome::{AbandonedPrefill, HandOffResult, Outcome, Way};
pub use page::{MetricsFormat, metrics_table};
pub(crate) use steps::{Batch, Steps};
pub use table::MetricDoc;
use table::{Durations, TraceLabel};

/// The models that get series of their own; further ones are counted with the unknown ones.
const MOST_MODELS: usize = 256;

/// The name of all others.
const OTHER: &str = "other";

/// Every metric of the router, in the order of the page.
#[must_use]
pub fn metric_docs() -> Vec<MetricDoc> {
    Table::docs()
}

/// The router's metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    table: Table,
    models: RwLock<HashMap<Arc<str>, Arc<OfModel>, RandomState>>,
    other: Arc<OfModel>,
}

/// The metrics of one model; a request looks them up once.
#[derive(Debug)]
pub(crate) struct OfModel {
    name: Arc<str>,
    request: Durations,
    first_token: Durations,
    pub(crate) inter_token: Steps,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    output_tokens: Counter,
}

impl OfModel {
    fn of(table: &Table, name: &str) -> Arc<Self> {
        let name: Arc<str> = Arc::from(name);
        let label = ModelLabel { model: Arc::clone(&name) };
        Arc::new(Self {
            request: table.request.get_or_create_owned(&label),
            first_token: table.first_token.get_or_create_owned(&label),
            inter_token: table.inter_token.get_or_create_owned(&label),
            prompt_tokens: table.prompt_tokens.get_or_create_owned(&label),
            cached_tokens: table.cached_tokens.get_or_create_owned(&label),
            output_tokens: table.output_tokens.get_or_create_owned(&label),
            name,
        })
    }

    /// The model's name, `other` for those that the fleet does not know.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn request_took(&self, took: Duration, example: Example) {
        observe(&self.request, took, example);
    }

    pub(crate) fn first_token_took(&self, took: Duration, example: Example) {
        observe(&self.first_token, took, example);
    }

    pub(crate) fn prompt_had(&self, tokens: u64, cached: u64) {
        self.prompt_tokens.inc_by(tokens);
        self.cached_tokens.inc_by(cached);
    }

    pub(crate) fn generated(&self, tokens: u64) {
        self.output_tokens.inc_by(tokens);
    }
}

/// The trace that a duration is an example of, if it is sampled.
pub(crate) type Example = Option<u128>;

fn observe(durations: &Durations, took: Duration, example: Example) {
    let label = example.map(|id| TraceLabel { trace_id: format!("{id:032x}") });
    let when = label.as_ref().map(|_| SystemTime::now());
    durations.observe(took.as_secs_f64(), label, when);
}

/// A duration of which the router has one histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Took {
    /// From sending the prefill leg to its whole answer.
    Prefill,
    /// From the prefill answer to the first body byte of the decode answer.
    HandOver,
    /// From sending the decode leg to its response head.
    DecodeHead,
    /// From sending the decode leg to the end of its answer.
    Decode,
    /// Waiting for admission.
    Wait,
}

impl Metrics {
    pub(crate) fn new() -> Arc<Self> {
        let mut registry = Registry::with_prefix(table::PREFIX);
        let table = Table::new(&mut registry);
        // Results that have not happened yet still show as zero, so that alerts can be written.
        for result in HandOffResult::LABELS {
            let _ = table.hand_offs.get_or_create(&ResultLabel { result });
        }
        for way in Way::ALL {
            let _ = table.releases.get_or_create(&WayLabel { way: way.label() });
        }
        for fate in AbandonedPrefill::ALL {
            let _ = table.abandoned_prefills.get_or_create(&ResultLabel { result: fate.label() });
        }
        for stage in [Stage::Prefill, Stage::Decode] {
            let _ = table.retries.get_or_create(&StageLabel { stage: stage.label() });
        }
        let other = OfModel::of(&table, OTHER);
        Arc::new(Self { registry, table, models: RwLock::default(), other })
    }

    pub(crate) fn encode(&self, format: MetricsFormat) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail; an encoder fault would show as a truncated page.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        match format {
            MetricsFormat::OpenMetrics => text,
            MetricsFormat::Prometheus => page::in_older_format(&text),
        }
    }

    /// The metrics of a model; `known` tells whether the fleet has it, and is asked once.
    pub(crate) fn of_model(&self, name: &str, known: impl FnOnce() -> bool) -> Arc<OfModel> {
        if let Some(model) = self.models.read().get(name) {
            return Arc::clone(model);
        }
        if !known() {
            return self.other();
        }
        let mut models = self.models.write();
        if models.len() >= MOST_MODELS && !models.contains_key(name) {
            return self.other();
        }
        let model = models.entry(Arc::from(name)).or_insert_with(|| OfModel::of(&self.table, name));
        Arc::clone(model)
    }

    /// A name of the settings became a model.
    pub(crate) fn model_named(&self, asked: &Arc<str>, served: &Arc<str>) {
        let labels = NameLabels { asked: Arc::clone(asked), served: Arc::clone(served) };
        self.table.names.get_or_create(&labels).inc();
    }

    /// The metrics of requests that name no model that is known.
    pub(crate) fn other(&self) -> Arc<OfModel> {
        Arc::clone(&self.other)
    }

    pub(crate) fn request_ended(
        &self,
        endpoint: &'static str,
        model: &OfModel,
        status: u16,
        outcome: Outcome,
    ) {
        let (model, outcome) = (Arc::clone(&model.name), outcome.label());
        let labels = RequestLabels { endpoint, model, outcome, status: u32::from(status) };
        self.table.requests.get_or_create(&labels).inc();
    }

    pub(crate) fn took(&self, what: Took, duration: Duration, example: Example) {
        let durations = match what {
            Took::Prefill => &self.table.prefill,
            Took::HandOver => &self.table.hand_over,
            Took::DecodeHead => &self.table.decode_head,
            Took::Decode => &self.table.decode,
            Took::Wait => &self.table.wait,
        };
        observe(durations, duration, example);
    }

    pub(crate) fn turned_away(&self, limit: &'static str, reason: &'static str) {
        self.table.refused.get_or_create(&list::RefusalLabels { limit, reason }).inc();
    }

    pub(crate) fn hand_off_refused(&self, refusal: &HandOffRefusal) {
        self.table.hand_offs.get_or_create(&ResultLabel { result: refusal.label() }).inc();
    }

    /// A hand-off that was granted so long ago ended.
    pub(crate) fn hand_off_ended(&self, result: HandOffResult, held: Duration) {
        if let HandOffResult::Released(way) = result {
            self.table.releases.get_or_create(&WayLabel { way: way.label() }).inc();
        }
        self.table.hand_offs.get_or_create(&ResultLabel { result: result.label() }).inc();
        observe(&self.table.lease, held, None);
    }

    /// A decode engine took blocks over, of so many bytes as far as is known.
    pub(crate) fn handed_over(&self, blocks: usize, bytes: u64) {
        self.table.blocks.inc_by(blocks as u64);
        self.table.bytes.inc_by(bytes);
    }

    pub(crate) fn prefill_abandoned(&self, fate: AbandonedPrefill) {
        self.table.abandoned_prefills.get_or_create(&ResultLabel { result: fate.label() }).inc();
    }

    pub(crate) fn not_notified(&self, reason: &'static str) {
        self.table.notification_failures.get_or_create(&ReasonLabel { reason }).inc();
    }

    pub(crate) fn hand_offs_live(&self, count: usize) {
        self.table.hand_offs_live.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The decode engine computes the prompt itself.
    pub(crate) fn bypassed(&self, reason: &'static str) {
        self.table.bypass.get_or_create(&ReasonLabel { reason }).inc();
        self.decided("decode_only", reason);
    }

    /// Whose work the prompt is, and why.
    pub(crate) fn decided(&self, decision: &'static str, reason: &'static str) {
        self.table.decisions.get_or_create(&DecisionLabels { decision, reason }).inc();
    }

    pub(crate) fn upstream_failed(&self, failure: UpstreamFailure) {
        let labels = FailureLabels { stage: failure.stage.label(), kind: failure.broken.label() };
        self.table.upstream_failures.get_or_create(&labels).inc();
    }

    pub(crate) fn stream_broken(&self) {
        self.table.stream_errors.inc();
    }

    pub(crate) fn stream_cut(&self) {
        self.table.streams_cut.inc();
    }

    pub(crate) fn retried(&self, stage: Stage) {
        self.table.retries.get_or_create(&StageLabel { stage: stage.label() }).inc();
    }

    pub(crate) fn side_channel_looked(&self, state: SideChannelState) {
        let result = match state {
            SideChannelState::Unread => "unread",
            SideChannelState::Read => "read",
            SideChannelState::NotAsked => "not_asked",
            SideChannelState::Failed => "failed",
            SideChannelState::RegistersItself => "registers_itself",
        };
        self.table.side_channel_looks.get_or_create(&ResultLabel { result }).inc();
    }

    pub(crate) fn front_asked(&self, answered: bool) {
        let result = if answered { "answered" } else { "dropped" };
        self.table.front_requests.get_or_create(&ResultLabel { result }).inc();
    }
}

#[cfg(test)]
mod tests;
