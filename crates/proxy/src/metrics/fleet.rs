//! The gauges that are set when somebody looks: the fleet, its health, the registry, the store, what waits.
//! The peers' are the only ones that name peers, by their ids.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Metrics;
use super::list::{
    EngineLabels, ModelLabel, OperationLabels, PairLabels, PeerLabel, PeerLabels, ResultLabel, SourceLabel,
    StageLabel, StateLabel,
};
use crate::admission::Counts;
use crate::error::Stage;
use crate::pool::{BreakerState, HealthView};
use crate::registry::{EngineState, RegistryError, RegistrySnapshot};
use crate::routing::roster::Shares;
use crate::store::StoreView;
use crate::trace::TraceCounts;

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl Metrics {
    pub(crate) fn held_bytes(&self, bytes: usize) {
        self.table.held.set(number(bytes));
    }

    /// Takes in who takes the requests of models with a ratio.
    pub(crate) fn shares(&self, shares: &Shares) {
        self.table.model_engines.clear();
        self.table.model_ratio.clear();
        for (model, lists) in shares {
            let [prefill, decode] = lists.each_ref().map(Vec::len);
            for (stage, count) in [(Stage::Prefill, prefill), (Stage::Decode, decode)] {
                let labels = EngineLabels { model: Arc::clone(model), stage: stage.label() };
                self.table.model_engines.get_or_create(&labels).set(number(count));
            }
            if prefill > 0 && decode > 0 {
                let label = ModelLabel { model: Arc::clone(model) };
                self.table.model_ratio.get_or_create(&label).set(prefill as f64 / decode as f64);
            }
        }
    }

    pub(crate) fn store(&self, view: &StoreView) {
        self.table.store_up.set(view.up.into());
        self.table.store_age.set(view.age_seconds.unwrap_or(f64::INFINITY));
    }

    /// Takes in what prefill engines hold for hand-offs.
    pub(crate) fn leases(&self, blocks: usize, oldest: Duration) {
        self.table.blocks_live.set(number(blocks));
        self.table.oldest_lease.set(oldest.as_secs_f64());
    }

    /// Takes in the fleet as it is now: (stage, condition) of every peer, and restarts by stage.
    pub(crate) fn fleet(
        &self,
        conditions: impl Iterator<Item = (Stage, &'static str)>,
        restarts: impl Iterator<Item = (Stage, u64)>,
    ) {
        self.table.peers.clear();
        for (stage, condition) in conditions {
            self.table.peers.get_or_create(&PeerLabels { stage: stage.label(), condition }).inc();
        }
        self.table.restarts.clear();
        for (stage, count) in restarts {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.table.restarts.get_or_create(&StageLabel { stage: stage.label() }).inc_by(count);
        }
    }

    /// Takes in how many peers each source found.
    pub(crate) fn discovered(&self, counts: &BTreeMap<Arc<str>, usize>) {
        self.table.discovery_peers.clear();
        for (source, count) in counts {
            let label = SourceLabel { source: Arc::clone(source) };
            self.table.discovery_peers.get_or_create(&label).set(number(*count));
        }
    }

    /// A source could not be asked, or only by half.
    pub(crate) fn discovery_failed(&self, source: &Arc<str>) {
        self.table.discovery_failures.get_or_create(&SourceLabel { source: Arc::clone(source) }).inc();
    }

    /// Takes in how many pairs there are of each verdict, and whether they are used.
    pub(crate) fn pairs(&self, counts: HashMap<(&'static str, bool), usize>) {
        self.table.pairs.clear();
        for ((verdict, used), count) in counts {
            let used = if used { "true" } else { "false" };
            self.table.pairs.get_or_create(&PairLabels { verdict, used }).set(number(count));
        }
    }

    /// Takes in the registry as it is now.
    pub(crate) fn registry(&self, snapshot: &RegistrySnapshot) {
        let mut counts = [("registering", 0), ("ready", 0), ("draining", 0)];
        for engine in snapshot.engines.values() {
            let at = match engine.state {
                EngineState::Registering => 0,
                EngineState::Ready => 1,
                EngineState::Draining => 2,
            };
            counts[at].1 += 1;
        }
        for (state, count) in counts {
            self.table.registry_engines.get_or_create(&StateLabel { state }).set(count);
        }
        let payloads = snapshot.engines.values().map(|engine| engine.payload_bytes()).sum();
        self.table.registry_payload.set(number(payloads));
        self.table.registry_revision.set(i64::try_from(snapshot.revision).unwrap_or(i64::MAX));
    }

    /// An engine asked something of the registry.
    pub(crate) fn registry_called<T>(&self, operation: &'static str, outcome: &Result<T, RegistryError>) {
        let result = match outcome {
            Ok(_) => "done",
            Err(RegistryError::StoreUnavailable) => "store_unavailable",
            Err(_) => "refused",
        };
        self.table.registry_calls.get_or_create(&OperationLabels { operation, result }).inc();
    }

    /// Takes in what became of traces.
    pub(crate) fn traces(&self, counts: &TraceCounts) {
        let all = [("exported", &counts.exported), ("dropped", &counts.dropped), ("failed", &counts.failed)];
        for (result, count) in all {
            let shown = self.table.traces.get_or_create(&ResultLabel { result });
            shown.inner().store(count.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Takes in who runs and waits for a stage.
    pub(crate) fn admission(&self, stage: Stage, counts: Counts) {
        let label = StageLabel { stage: stage.label() };
        self.table.running.get_or_create(&label).set(number(counts.running));
        self.table.waiting.get_or_create(&label).set(number(counts.waiting));
        let tokens = i64::try_from(counts.waiting_tokens).unwrap_or(i64::MAX);
        self.table.waiting_tokens.get_or_create(&label).set(tokens);
        match counts.places {
            Some(places) => drop(self.table.limit.get_or_create(&label).set(number(places))),
            None => drop(self.table.limit.remove(&label)),
        }
    }

    /// Takes in how each peer's requests went.
    pub(crate) fn health(&self, peers: impl Iterator<Item = (Stage, String, HealthView)>) {
        self.table.breaker.clear();
        self.table.openings.clear();
        self.table.share.clear();
        for (stage, peer, health) in peers {
            let label = PeerLabel { stage: stage.label(), peer };
            let state = match health.breaker {
                BreakerState::Closed => 0,
                BreakerState::HalfOpen => 1,
                BreakerState::Open => 2,
            };
            self.table.breaker.get_or_create(&label).set(state);
            let opened = i64::try_from(health.opened).unwrap_or(i64::MAX);
            self.table.openings.get_or_create(&label).set(opened);
            self.table.share.get_or_create(&label).set(health.share);
        }
    }
}
