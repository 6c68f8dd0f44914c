//! Traces on their way to the collector: a bounded queue, one task, few calls. A collector that is slow or gone
//! costs traces, which are counted, and never a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvbaton_proxy::{Sampling, SpanRecord, TraceCounts, Traces};
use opentelemetry_proto::tonic::resource::v1::Resource;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::collector::{Collector, CollectorFault};
use super::encode;
use crate::config::Telemetry;

/// The most traces of one call.
const MOST: usize = 256;

/// How often one call is made, and the pause after the first failed one, doubled each time.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(250);

/// The task that sends traces.
pub(crate) struct Exporter {
    traces: Traces,
    tasks: TaskTracker,
    stop: CancellationToken,
    /// What still runs ends at once.
    cut: CancellationToken,
}

struct Export {
    queue: mpsc::Receiver<Vec<SpanRecord>>,
    collector: Collector,
    resource: Resource,
    counts: Arc<TraceCounts>,
    interval: Duration,
    stop: CancellationToken,
    /// The collector's failure has been told.
    told: bool,
}

impl Exporter {
    /// Starts sending traces, if the settings name a collector.
    ///
    /// # Errors
    /// They name one that cannot be used.
    pub(crate) fn start(settings: &Telemetry) -> Result<Option<Self>, CollectorFault> {
        if settings.traces.endpoint.is_none() {
            return Ok(None);
        }
        let tasks = TaskTracker::new();
        let collector = Collector::new(&settings.traces, tasks.clone())?;
        let (sender, queue) = mpsc::channel(settings.traces.queue);
        let counts = Arc::new(TraceCounts::default());
        let (stop, cut) = (CancellationToken::new(), CancellationToken::new());
        let instance = format!("{:032x}", rand::random::<u128>());
        let export = Export {
            queue,
            collector,
            resource: encode::resource(&settings.service_name, &instance),
            counts: Arc::clone(&counts),
            interval: settings.traces.interval,
            stop: stop.clone(),
            told: false,
        };
        let cutting = cut.clone();
        tasks.spawn(async move { cutting.run_until_cancelled(export.run()).await });
        let sampling =
            Sampling { ratio: settings.traces.sample, follow_parent: settings.traces.follow_parent };
        let traces = Traces::new(sampling, counts, move |spans| sender.try_send(spans).is_ok());
        Ok(Some(Self { traces, tasks, stop, cut }))
    }

    /// Where the core puts its traces.
    pub(crate) fn traces(&self) -> Traces {
        self.traces.clone()
    }

    /// Sends what still waits, until then at the latest.
    pub(crate) async fn flush(self, deadline: Instant) {
        self.stop.cancel();
        self.tasks.close();
        if timeout_at(deadline, self.tasks.wait()).await.is_err() {
            tracing::warn!("the last traces could not be exported in time");
            self.cut.cancel();
            self.tasks.wait().await;
        }
    }
}

impl Export {
    /// Until everything that came before the stop is sent.
    async fn run(mut self) {
        loop {
            let first = tokio::select! {
                first = self.queue.recv() => first,
                () = self.stop.cancelled(), if !self.queue.is_closed() => {
                    self.queue.close();
                    continue;
                }
            };
            let Some(mut spans) = first else { return };
            let count = 1 + self.gather(&mut spans).await;
            self.send(spans, count).await;
        }
    }

    /// Adds what comes within the interval; how many traces that are.
    async fn gather(&mut self, spans: &mut Vec<SpanRecord>) -> u64 {
        let (until, mut count) = (Instant::now() + self.interval, 0);
        while count + 1 < MOST as u64 {
            let next = tokio::select! {
                next = timeout_at(until, self.queue.recv()) => next,
                () = self.stop.cancelled(), if !self.queue.is_closed() => {
                    self.queue.close();
                    continue;
                }
            };
            let Ok(Some(more)) = next else { break };
            spans.extend(more);
            count += 1;
        }
        count
    }

    async fn send(&mut self, spans: Vec<SpanRecord>, count: u64) {
        let message = encode::message(&self.resource, spans);
        let mut pause = PAUSE;
        for attempt in 1..=TRIES {
            let error = match self.collector.take(message.clone()).await {
                Ok(()) => {
                    add(&self.counts.exported, count);
                    if std::mem::take(&mut self.told) {
                        tracing::info!("the collector takes traces again");
                    }
                    return;
                }
                Err(error) => error,
            };
            if !std::mem::replace(&mut self.told, true) {
                tracing::warn!(%error, "the collector does not take traces");
            }
            if attempt == TRIES || !error.may_pass() || self.stop.is_cancelled() {
                break;
            }
            self.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
            pause *= 2;
        }
        add(&self.counts.failed, count);
    }
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
