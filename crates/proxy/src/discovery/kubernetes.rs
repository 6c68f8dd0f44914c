//! Addresses from Kubernetes: lists the EndpointSlices of a source, then watches them from there on. A watch
//! that ends goes on where it was; only when the API has forgotten that is everything listed anew.

mod slices;

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::sync::mpsc;
use tokio::time::Instant;

use self::slices::Slices;
use super::failure::SourceFailure;
use super::settings::KubernetesSource;
use super::{DiscoverySettings, Report};

/// The label by which a slice belongs to a Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// Slices in one page of a list.
const PAGE: u32 = 500;

/// Longest pause after failures.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

const FORBIDDEN: u16 = 403;
/// The API does not know the state any more from which it shall go on.
const GONE: u16 = 410;

/// What is watched and how patiently.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Watch {
    pub(super) source: KubernetesSource,
    soonest: Duration,
}

/// Nobody listens any more.
struct Over;

impl Watch {
    pub(super) fn new(source: &KubernetesSource, settings: &DiscoverySettings) -> Self {
        Self { source: source.clone(), soonest: settings.min_refresh }
    }

    /// Watches for as long as it is polled.
    pub(super) async fn run(self, tell: mpsc::Sender<Report>) {
        let mut failures = 0_u32;
        loop {
            let began = Instant::now();
            let failure = match self.api().await {
                Ok(api) => match self.follow(&api, &tell, &mut failures).await {
                    Ok(Over) => return,
                    Err(failure) => failure,
                },
                Err(failure) => failure,
            };
            if tell.send(Report::failed(failure)).await.is_err() {
                return;
            }
            let pause = self.pause(failures);
            failures = failures.saturating_add(1);
            tokio::time::sleep_until(began + pause).await;
        }
    }

    /// A time that doubles with each failure, and of which routers that began together have different ones.
    fn pause(&self, failures: u32) -> Duration {
        let longest = LONGEST_PAUSE.max(self.soonest);
        let pause = self.soonest.saturating_mul(1 << failures.min(16)).min(longest);
        pause.mul_f64(rand::random_range(0.75..1.25))
    }

    async fn api(&self) -> Result<Api<EndpointSlice>, SourceFailure> {
        let no = |why: &dyn std::error::Error| SourceFailure::NoKubernetes { why: with_causes(why) };
        let source = &self.source;
        let mut config = match (&source.api, &source.kubeconfig) {
            (Some(api), _) => Config::new(api.parse().map_err(|error: http::uri::InvalidUri| no(&error))?),
            (None, Some(path)) => {
                let file = Kubeconfig::read_from(path).map_err(|error| no(&error))?;
                let options =
                    KubeConfigOptions { context: source.context.clone(), ..KubeConfigOptions::default() };
                Config::from_custom_kubeconfig(file, &options).await.map_err(|error| no(&error))?
            }
            (None, None) => Config::incluster().map_err(|error| no(&error))?,
        };
        // Failures are told, and tried again here.
        config.default_retry = false;
        let client = Client::try_from(config).map_err(|error| no(&error))?;
        Ok(Api::namespaced(client, &source.namespace))
    }

    fn selector(&self) -> String {
        match (&self.source.service, &self.source.selector) {
            (Some(service), _) => format!("{SERVICE_NAME}={service}"),
            (None, selector) => selector.clone().unwrap_or_default(),
        }
    }

    /// Lists and watches until something fails.
    async fn follow(
        &self,
        api: &Api<EndpointSlice>,
        tell: &mpsc::Sender<Report>,
        failures: &mut u32,
    ) -> Result<Over, SourceFailure> {
        loop {
            let (mut slices, mut version) = self.list(api).await?;
            *failures = 0;
            if tell.send(slices.report(self.source.port.as_ref())).await.is_err() {
                return Ok(Over);
            }
            let mut broken = 0_u32;
            loop {
                let began = Instant::now();
                let end = self.watch_once(api, &mut slices, &mut version, tell, &mut broken).await?;
                match end {
                    End::Over => return Ok(Over),
                    End::Gone => break,
                    End::Ended => {
                        // An API that ends each watch at once is not asked without a pause.
                        tokio::time::sleep_until(began + self.pause(broken)).await;
                        broken = broken.saturating_add(1);
                    }
                }
            }
        }
    }

    async fn list(&self, api: &Api<EndpointSlice>) -> Result<(Slices, String), SourceFailure> {
        let mut params = ListParams::default().labels(&self.selector()).limit(PAGE);
        let mut slices = Slices::default();
        loop {
            let page = api.list(&params).await.map_err(|error| self.failure("list", error))?;
            for slice in page.items {
                slices.put(slice);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok((slices, page.metadata.resource_version.unwrap_or_default())),
            }
        }
    }

    /// One watch, from `version` on.
    async fn watch_once(
        &self,
        api: &Api<EndpointSlice>,
        slices: &mut Slices,
        version: &mut String,
        tell: &mpsc::Sender<Report>,
        broken: &mut u32,
    ) -> Result<End, SourceFailure> {
        // With bookmarks, by which it can go on though none of these slices has changed for long.
        let params = WatchParams::default().labels(&self.selector());
        let events = match api.watch(&params, version).await {
            Ok(events) => events,
            Err(kube::Error::Api(status)) if status.code == GONE => return Ok(End::Gone),
            Err(error) => return Err(self.failure("watch", error)),
        };
        let mut events = std::pin::pin!(events);
        while let Some(first) = events.next().await {
            let mut changed = false;
            let mut event = Some(first);
            // All that has come, so that an endpoint that moves from slice to slice is not seen to be away.
            while let Some(next) = event {
                match next {
                    Ok(WatchEvent::Added(slice) | WatchEvent::Modified(slice)) => {
                        *version = slice.metadata.resource_version.clone().unwrap_or_default();
                        slices.put(slice);
                        changed = true;
                    }
                    Ok(WatchEvent::Deleted(slice)) => {
                        *version = slice.metadata.resource_version.clone().unwrap_or_default();
                        slices.remove(&slice);
                        changed = true;
                    }
                    Ok(WatchEvent::Bookmark(mark)) => *version = mark.metadata.resource_version,
                    Ok(WatchEvent::Error(status)) if status.code == GONE => return Ok(End::Gone),
                    Ok(WatchEvent::Error(status)) => {
                        return Err(self.failure("watch", kube::Error::Api(status)));
                    }
                    Err(error) => {
                        tracing::debug!(source = %self.source.label(), %error, "a watch broke off, it goes on from there");
                        return Ok(self.told(changed, slices, tell).await.unwrap_or(End::Ended));
                    }
                }
                *broken = 0;
                event = events.next().now_or_never().flatten();
            }
            if let Some(over) = self.told(changed, slices, tell).await {
                return Ok(over);
            }
        }
        Ok(End::Ended)
    }

    /// Tells what there is now, if it may be something else.
    async fn told(&self, changed: bool, slices: &Slices, tell: &mpsc::Sender<Report>) -> Option<End> {
        let report = || slices.report(self.source.port.as_ref());
        (changed && tell.send(report()).await.is_err()).then_some(End::Over)
    }

    fn failure(&self, verb: &'static str, error: kube::Error) -> SourceFailure {
        let namespace = self.source.namespace.clone();
        match error {
            kube::Error::Api(status) if status.code == FORBIDDEN => {
                SourceFailure::Forbidden { verb, namespace, message: status.message.clone() }
            }
            error => SourceFailure::Kubernetes { verb, namespace, error: Arc::new(error) },
        }
    }
}

/// How a watch ended.
enum End {
    /// Nobody listens any more.
    Over,
    /// It can go on where it was.
    Ended,
    /// It cannot.
    Gone,
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
