//! Watches the peers: one round of probes per interval, all peers at once.
//! Only a good probe makes a peer ready.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};
use kv_connector::protocol::params::Generation;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::observed::Observed;
use super::peer::{Peer, PeerFault, PeerState, ServedModel};
use crate::Core;
use crate::error::{Broken, Stage, UpstreamFailure};
use crate::request_id::RequestId;
use crate::settings::Probe;
use crate::splice::Spliced;
use crate::upstream::{Leg, Upstream, own_headers};
use crate::warm_up;

/// Largest model list or version that a probe reads, in bytes.
const PROBE_LIMIT: usize = 4 << 20;

/// How often an engine that is not ready is looked at, at most: one that starts or comes back should
/// not wait for a whole interval.
const SOON: Duration = Duration::from_millis(500);

/// Starts the probing task; it ends with the core's stop token.
pub(crate) fn watch(core: Arc<Core>) {
    let tasks = core.tasks.clone();
    tasks.spawn(async move {
        let mut rounds = 0_u64;
        let mut pause = tokio::time::interval(core.settings().probe.interval.min(SOON));
        pause.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let now = tokio::select! {
                () = core.stop.cancelled() => return,
                now = pause.tick() => now,
            };
            rounds += 1;
            let probing = core.settings().probe.clone();
            let interval = probing.interval;
            core.ledger.sweep();
            core.pool.end_quarantines(now);
            for stage in [Stage::Prefill, Stage::Decode] {
                core.admission.resize(stage, || core.pool.ready(stage));
            }
            core.pool.share_out();
            for peer in core.pool.all() {
                let wait = jittered(interval, probing.jitter, &peer.id, rounds);
                if !peer.is_ready() || peer.is_due(now, wait) {
                    probe_soon(&core, peer);
                }
            }
        }
    });
}

/// The interval, longer or shorter by at most this part of itself; another one for each peer and round.
fn jittered(interval: Duration, jitter: f64, id: &str, round: u64) -> Duration {
    let mut hasher = DefaultHasher::new();
    (id, round).hash(&mut hasher);
    let within = hasher.finish() as f64 / u64::MAX as f64;
    interval.mul_f64(1.0 + jitter * (2.0 * within - 1.0))
}

/// Probes one peer in a task of its own.
pub(crate) fn probe_soon(core: &Arc<Core>, peer: Arc<Peer>) {
    let tasks = core.tasks.clone();
    let core = Arc::clone(core);
    peer.probed_at(tokio::time::Instant::now());
    tasks.spawn(async move {
        tokio::select! {
            () = core.stop.cancelled() => {}
            () = probe_and_warm_up(&core, &peer) => {}
        }
    });
}

async fn probe_and_warm_up(core: &Arc<Core>, peer: &Arc<Peer>) {
    let was_ready = peer.is_ready();
    if probe(peer, &core.upstream, &core.settings().probe).await {
        core.pool.relearn();
    }
    if !was_ready && peer.is_ready() {
        core.pool.came_back.notify_waiters();
    }
    warm_up::after_probe(core, peer).await;
}

/// Probes one peer once and records what was seen; whether it shows itself as another one.
async fn probe(peer: &Arc<Peer>, upstream: &Upstream, settings: &Probe) -> bool {
    let looked = tokio::time::timeout(settings.timeout, look(peer, upstream, &settings.path)).await;
    let outcome = looked.unwrap_or(Err(Unwell::Silent));
    let unwell = outcome.as_ref().err().map(|unwell| (unwell.to_string(), unwell.is_refusal()));
    let (before, after) = peer.observed.change(|observed| note(outcome, observed, peer, settings));
    let shows_news = (before.models_changed, before.generation) != (after.models_changed, after.generation);
    // An engine that has never answered yet is starting, and is not spared.
    let had_served = !before.models.is_empty();
    let (before, now, in_a_row) = (before.state, after.state, after.silent);
    if before != now {
        peer.forget_met();
    }
    if before == PeerState::Unreachable && now == PeerState::Ready && had_served {
        peer.health.revived();
    }
    let (role, url) = (peer.spec.role.stage().label(), &peer.spec.url);
    let Some((reason, refused)) = unwell else {
        if before != now {
            tracing::info!(peer = %peer.id, role, %url, "an engine is ready");
        }
        return shows_news;
    };
    // An engine that was never ready may be starting: that is said once, when it has had its time.
    let starting = before != PeerState::Ready && !refused;
    let news = if starting { in_a_row == settings.patience } else { before != now };
    if news && now == PeerState::Unreachable && !peer.standing.is_open() {
        // Whoever was told to go, or says so, is expected to be gone.
        tracing::info!(peer = %peer.id, role, %url, reason, "an engine that gets no requests is not usable");
    } else if news && now == PeerState::Unreachable {
        tracing::warn!(peer = %peer.id, role, %url, reason, "an engine is not usable by its probes");
    }
    shows_news
}

/// Takes in what a probe saw.
fn note(outcome: Result<Seen, Unwell>, observed: &mut Observed, peer: &Peer, settings: &Probe) {
    let was_ready = observed.state == PeerState::Ready;
    match outcome {
        Ok(seen) => {
            observed.state = PeerState::Ready;
            observed.silent = 0;
            if !observed.models.iter().map(|model| &model.id).eq(seen.models.iter().map(|model| &model.id)) {
                observed.models_changed += 1;
            }
            observed.models = seen.models;
            if let Some(version) = seen.version {
                observed.generation = peer.spec.generation.or_else(|| generation_of(&version));
                observed.version = Some(version);
            }
        }
        Err(unwell) => {
            observed.silent += 1;
            let overlooked = unwell.is_silence() && observed.silent < settings.patience;
            if !was_ready || !overlooked {
                observed.state = PeerState::Unreachable;
            }
            let hint = if peer.ends_in_v1() { " (its url should not end in /v1)" } else { "" };
            // What an engine says while it starts is no error.
            if was_ready || unwell.is_refusal() || observed.silent >= settings.patience {
                observed.last_error = Some(PeerFault::now(format!("{unwell}{hint}")));
            }
        }
    }
}

struct Seen {
    models: Arc<[ServedModel]>,
    version: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Unwell {
    #[error("probe: no answer in time")]
    Silent,
    #[error("probe: {}", .0.broken.label())]
    Broken(#[from] UpstreamFailure),
    #[error("probe: {path} answered {status}")]
    Status { path: String, status: u16 },
    #[error("probe: the model list is not one")]
    Models,
    #[error("probe: the url leads back to this router")]
    Itself,
}

impl Unwell {
    fn is_refusal(&self) -> bool {
        match self {
            Self::Broken(failure) => failure.broken == Broken::Connect,
            Self::Itself => true,
            Self::Silent | Self::Status { .. } | Self::Models => false,
        }
    }

    /// Slowness, of the engine or of this machine, rather than a word that the engine is gone.
    fn is_silence(&self) -> bool {
        match self {
            Self::Silent => true,
            Self::Broken(failure) => failure.broken != Broken::Connect,
            Self::Status { .. } | Self::Models | Self::Itself => false,
        }
    }
}

async fn look(peer: &Arc<Peer>, upstream: &Upstream, health: &str) -> Result<Seen, Unwell> {
    let (status, _) = get(peer, upstream, health).await?;
    // An engine without the endpoint is alive all the same.
    if !status.is_success() && status != StatusCode::NOT_FOUND {
        return Err(Unwell::Status { path: health.to_owned(), status: status.as_u16() });
    }
    let (status, body) = get(peer, upstream, "/v1/models").await?;
    if status == StatusCode::LOOP_DETECTED {
        return Err(Unwell::Itself);
    }
    if !status.is_success() {
        return Err(Unwell::Status { path: "/v1/models".to_owned(), status: status.as_u16() });
    }
    let models = read_models(&body)?;
    let version = version(peer, upstream).await.unwrap_or_default();
    Ok(Seen { models, version })
}

/// The version that an engine tells now; none when it answers without one.
///
/// # Errors
/// It does not answer.
pub(crate) async fn version(
    peer: &Arc<Peer>,
    upstream: &Upstream,
) -> Result<Option<String>, UpstreamFailure> {
    let (status, body) = get(peer, upstream, "/version").await?;
    let told = || serde_json::from_slice::<Version>(&body).ok().map(|answer| answer.version);
    Ok(status.is_success().then(told).flatten())
}

/// An engine's answer to one question.
///
/// # Errors
/// It does not answer.
pub(crate) async fn get(
    peer: &Arc<Peer>,
    upstream: &Upstream,
    path: &str,
) -> Result<(StatusCode, Bytes), UpstreamFailure> {
    let stage = peer.spec.role.stage();
    let leg = || Leg {
        stage,
        peer,
        method: Method::GET,
        path,
        headers: own_headers(&RequestId::accept(None)),
        body: Spliced::from(Bytes::new()),
    };
    let response = match upstream.send(leg(), Duration::MAX).await {
        Err(failure) if failure.stale => upstream.send_anew(leg(), Duration::MAX).await?,
        sent => sent?,
    };
    let status = response.status();
    let body = upstream.collect(stage, response.into_body(), PROBE_LIMIT).await?;
    Ok((status, body))
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

pub(crate) fn read_models(body: &[u8]) -> Result<Arc<[ServedModel]>, Unwell> {
    let list: Models = serde_json::from_slice(body).map_err(|_| Unwell::Models)?;
    list.data
        .into_iter()
        .map(|entry| {
            let model: Model = serde_json::from_str(entry.get()).map_err(|_| Unwell::Models)?;
            Ok(ServedModel { id: model.id, entry })
        })
        .collect()
}

/// The connector generation of a vLLM version. 0.13 speaks version 2; the answer for versions
/// in between is unknown, and then each hand-off's own shape decides.
fn generation_of(version: &str) -> Option<Generation> {
    let mut numbers = version.split(['.', '+', '-']).map(str::parse::<u32>);
    let (major, minor) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    match (major, minor) {
        (0, ..=13) => Some(Generation::V2),
        (0, ..32) => None,
        _ => Some(Generation::V14),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_name_their_generation() {
        assert_eq!(generation_of("0.13.0"), Some(Generation::V2));
        assert_eq!(generation_of("0.13.0+cu129"), Some(Generation::V2));
        assert_eq!(generation_of("0.32.0"), Some(Generation::V14));
        assert_eq!(generation_of("1.0.0"), Some(Generation::V14));
        assert_eq!(generation_of("0.20.1"), None);
        assert_eq!(generation_of("main"), None);
    }

    #[test]
    fn intervals_differ_within_bounds() {
        let interval = Duration::from_secs(10);
        let all: Vec<Duration> = (0..200).map(|round| jittered(interval, 0.2, "p1", round)).collect();
        assert!(all.iter().all(|one| (8.0..=12.0).contains(&one.as_secs_f64())));
        let spread = all.iter().max().unwrap().saturating_sub(*all.iter().min().unwrap());
        assert!(spread > Duration::from_secs(2), "{spread:?}");
        assert_eq!(jittered(interval, 0.0, "p1", 1), interval);
    }

    #[test]
    fn model_entries_keep_every_field() {
        let body = br#"{"object":"list","data":[{"id":"a","x":{"y":1.50}},{"id":"b"}]}"#;
        let models = read_models(body).unwrap();
        assert_eq!(models[0].id, "a");
        assert_eq!(models[0].entry.get(), r#"{"id":"a","x":{"y":1.50}}"#);
        assert!(read_models(b"{}").is_err());
    }
}
