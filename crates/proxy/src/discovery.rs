//! Peers that come and go with the addresses that a source names: DNS, or Kubernetes. Each source has one
//! task, which ends with the program or with a reload that has no such source. Who vanishes is drained, a
//! source that fails keeps what it had. Never touches peers of the settings or of operators.

mod dns;
mod failure;
mod kept;
#[cfg(feature = "kubernetes")]
mod kubernetes;
pub(crate) mod plan;
mod settings;

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use failure::SourceFailure;
use kept::{Found, Graces, Kept, News};
use plan::Wanted;
pub use settings::{
    DiscoveryFault, DiscoverySettings, DnsKind, DnsSource, KubernetesSource, PeerScheme, PeerTemplate,
    PortChoice,
};

use crate::Core;
use crate::pool::{Discovered, probe};
use crate::registry::{EngineRole, canonical_base_url};

/// What a source has to say.
#[derive(Debug, Default)]
struct Report {
    /// What it found; nothing if it could not look. With a failure beside it, only a part.
    found: Option<Vec<Found>>,
    failure: Option<SourceFailure>,
}

impl Report {
    const fn failed(failure: SourceFailure) -> Self {
        Self { found: None, failure: Some(failure) }
    }
}

/// A source and how it is asked.
#[derive(Clone, Debug, PartialEq)]
enum Asked {
    Dns(dns::Question),
    #[cfg(feature = "kubernetes")]
    Kubernetes(kubernetes::Watch),
}

impl Asked {
    fn all(settings: &DiscoverySettings) -> Vec<Self> {
        let dns = settings.dns.iter().map(|source| Self::Dns(dns::Question::new(source, settings)));
        #[cfg(feature = "kubernetes")]
        let dns = dns.chain(
            settings
                .kubernetes
                .iter()
                .map(|source| Self::Kubernetes(kubernetes::Watch::new(source, settings))),
        );
        dns.collect()
    }

    fn label(&self) -> String {
        match self {
            Self::Dns(question) => question.source.label(),
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes(watch) => watch.source.label(),
        }
    }

    const fn about(&self) -> (EngineRole, PeerScheme, &PeerTemplate) {
        match self {
            Self::Dns(dns::Question { source, .. }) => (source.role, source.scheme, &source.peer),
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes(kubernetes::Watch { source, .. }) => (source.role, source.scheme, &source.peer),
        }
    }

    /// Whether both find the same engines, however they are described.
    fn is_same(&self, other: &Self) -> bool {
        let port = |asked: &Self| match asked {
            Self::Dns(question) => question.source.port.map(PortChoice::Number),
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes(watch) => watch.source.port.clone(),
        };
        self.label() == other.label() && self.about().0 == other.about().0 && port(self) == port(other)
    }

    async fn run(self, tell: mpsc::Sender<Report>) {
        match self {
            Self::Dns(question) => question.run(tell).await,
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes(watch) => watch.run(tell).await,
        }
    }
}

/// The sources of now.
#[derive(Debug, Default)]
pub(crate) struct Discovery {
    sources: Mutex<Sources>,
}

#[derive(Debug, Default)]
struct Sources {
    running: Vec<Running>,
    /// How many were started.
    started: u64,
}

#[derive(Debug)]
struct Running {
    number: u64,
    label: Arc<str>,
    asked: Asked,
    kept: Kept,
    /// Whether it has answered or failed at all.
    heard: bool,
    failure: Option<String>,
    stop: CancellationToken,
}

/// A source as operators see it.
#[derive(Clone, Debug, Serialize)]
pub struct SourceView {
    /// Its name, as its peers show it.
    pub source: String,
    /// What its engines do.
    pub role: EngineRole,
    /// Whether it has answered or failed at all.
    pub heard: bool,
    /// The base URLs that it names, those that it keeps for now included.
    pub urls: Vec<String>,
    /// Why it has no answer now, or only a part of one.
    pub failure: Option<String>,
}

impl Running {
    fn url(&self, found: &Found) -> String {
        let scheme = match self.asked.about().1 {
            PeerScheme::Http => "http",
            PeerScheme::Https => "https",
        };
        format!("{scheme}://{}", found.address)
    }

    fn wanted(&self) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        let (role, _, template) = self.asked.about();
        for found in self.kept.found() {
            let url = self.url(found);
            let Some(place) = canonical_base_url(&url) else { continue };
            for mut spec in template.peers(role, &url) {
                for (label, value) in &found.labels {
                    // The settings' word counts for more.
                    spec.labels.entry(label.clone()).or_insert_with(|| value.clone());
                }
                let instance = found.instance.as_deref().map(Arc::from);
                let source = Arc::clone(&self.label);
                wanted.push(Wanted { spec, place: place.clone(), source, instance });
            }
        }
        wanted
    }

    /// Takes a report; whether the addresses may be others now.
    fn take(&mut self, report: Report, now: Instant) -> bool {
        let Report { found, failure } = report;
        self.heard = true;
        let source = &self.label;
        if let Some(failure) = &failure {
            match self.kept.failed() {
                Some(News::Failing(kept)) => {
                    tracing::warn!(%source, kept, error = %failure, "a source of engines fails, what it had is kept");
                }
                _ => tracing::debug!(%source, error = %failure, "a source of engines still fails"),
            }
        }
        let whole = failure.is_none();
        self.failure = failure.map(|failure| failure.to_string());
        let Some(found) = found else { return false };
        match self.kept.answer(found, whole, now) {
            Some(News::Empty(0)) => tracing::info!(%source, "a source of engines names none"),
            Some(News::Empty(kept)) => {
                tracing::warn!(%source, kept, "a source of engines names none any more, what it had is kept for now");
            }
            Some(News::Recovered) => tracing::info!(%source, "a source of engines answers again"),
            Some(News::Failing(_)) | None => {}
        }
        true
    }
}

/// Waits until then, or for good.
async fn until(then: Option<Instant>) {
    match then {
        Some(then) => tokio::time::sleep_until(then).await,
        None => std::future::pending().await,
    }
}

/// Starts the sources of the settings.
pub(crate) fn start(core: &Arc<Core>) {
    core.discover_from(&core.settings().discovery);
}

impl Core {
    /// Asks these sources from now on. One that was there keeps what it found, and goes on if it is
    /// asked as before.
    pub(crate) fn discover_from(self: &Arc<Self>, settings: &DiscoverySettings) {
        let mut sources = self.discovery.sources.lock();
        let mut before = std::mem::take(&mut sources.running);
        for asked in Asked::all(settings) {
            let known = before.iter().position(|running| running.asked.is_same(&asked));
            let running = match known.map(|at| before.swap_remove(at)) {
                Some(running) if running.asked == asked => running,
                known => {
                    sources.started += 1;
                    self.follow_source(sources.started, asked, known)
                }
            };
            sources.running.push(running);
        }
        for gone in before {
            gone.stop.cancel();
        }
        self.apply(&sources.running);
    }

    fn follow_source(self: &Arc<Self>, number: u64, asked: Asked, before: Option<Running>) -> Running {
        let stop = self.stop.child_token();
        let (core, ends, question) = (Arc::clone(self), stop.clone(), asked.clone());
        self.tasks.spawn(async move {
            let (tell, mut told) = mpsc::channel(1);
            let work = async {
                let asking = question.run(tell);
                tokio::pin!(asking);
                let mut due = None;
                loop {
                    tokio::select! {
                        () = &mut asking => return,
                        Some(report) = told.recv() => due = core.reported(number, Some(report)),
                        () = until(due) => due = core.reported(number, None),
                    }
                }
            };
            ends.run_until_cancelled(work).await;
        });
        let label = asked.label().into();
        match before {
            Some(before) => {
                before.stop.cancel();
                Running { number, label, asked, stop, ..before }
            }
            None => {
                Running { number, label, asked, kept: Kept::default(), heard: false, failure: None, stop }
            }
        }
    }

    /// Takes a source's report, or looks what of its addresses is over; when it is to look again.
    fn reported(self: &Arc<Self>, number: u64, report: Option<Report>) -> Option<Instant> {
        let now = Instant::now();
        let settings = self.settings();
        let graces = Graces { missing: settings.discovery.grace, empty: settings.discovery.empty_grace };
        let mut sources = self.discovery.sources.lock();
        // Not one that a reload has ended.
        let running = sources.running.iter_mut().find(|running| running.number == number)?;
        let is_news = match report {
            Some(report) => {
                if report.failure.is_some() {
                    self.metrics.discovery_failed(&running.label);
                }
                running.take(report, now)
            }
            None => true,
        };
        let due = running.kept.settle(now, graces);
        if is_news {
            self.apply(&sources.running);
        }
        due
    }

    /// Makes the fleet what the sources want; under their lock, so that an older wish never comes last.
    fn apply(self: &Arc<Self>, running: &[Running]) {
        let wanted: Vec<Wanted> = running.iter().flat_map(Running::wanted).collect();
        let Discovered { came, changed, leaving } = self.pool.discover(&wanted);
        for peer in &came {
            let (role, source) = (peer.spec.role.stage().label(), peer.standing.origin());
            tracing::info!(peer = %peer.id, role, url = %peer.spec.url, %source, "a discovered engine is a peer now");
        }
        for peer in came.into_iter().chain(changed) {
            if peer.spec.notify {
                self.notifier.prepare();
            }
            probe::probe_soon(self, peer);
        }
        for peer in leaving {
            let source = peer.standing.origin();
            tracing::info!(peer = %peer.id, url = %peer.spec.url, %source, "an engine is not named any more, its peer leaves");
            self.see_off(peer);
        }
    }

    /// Counts the peers of each source; those of sources that have none as well.
    pub(crate) fn count_discovered(&self) -> BTreeMap<Arc<str>, usize> {
        let sources = self.discovery.sources.lock();
        let mut counts: BTreeMap<Arc<str>, usize> =
            sources.running.iter().map(|running| (Arc::clone(&running.label), 0)).collect();
        drop(sources);
        for peer in self.pool.all() {
            if let Some(source) = peer.standing.origin().source() {
                *counts.entry(Arc::clone(source)).or_default() += 1;
            }
        }
        counts
    }

    /// The sources as operators see them.
    pub(crate) fn source_views(&self) -> Vec<SourceView> {
        let view = |running: &Running| SourceView {
            source: running.label.to_string(),
            role: running.asked.about().0,
            heard: running.heard,
            urls: running.kept.found().map(|found| running.url(found)).collect(),
            failure: running.failure.clone(),
        };
        self.discovery.sources.lock().running.iter().map(view).collect()
    }
}
