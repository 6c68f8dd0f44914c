//! The operator's view and control of the fleet: peers and live hand-offs.
//! Must never hold state of its own: every answer is read from the core.

use std::time::Duration;

use axum::Json;
use axum::extract::State as Shared;
use bytes::Bytes;
use http::StatusCode;
use http::header::LOCATION;
use kvbaton_proxy::{
    CachedPrompt, Drained, Endpoint, ExplainAsk, Explanation, HandOffView, PairView, PeerSpec, PeerView,
    Proxy, SourceView, Trial,
};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::RouteError;
use crate::extract::{Json as JsonBody, Params, Segments};

/// How long a drain waits unless it is told: as long as a long answer may take.
const DRAIN_SECONDS: f64 = 300.0;

/// The longest wait that can be asked for.
const LONGEST_DRAIN: Duration = Duration::from_secs(24 * 3600);

/// All peers.
#[derive(Serialize)]
pub(crate) struct Peers {
    /// How requests are served: there is one way.
    mode: &'static str,
    peers: Vec<PeerView>,
}

/// All live hand-offs.
#[derive(Serialize)]
pub(crate) struct HandOffs {
    handoffs: Vec<HandOffView>,
}

/// How long a drain waits.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DrainLimit {
    /// In seconds.
    timeout: Option<f64>,
}

/// A request as a client would send it, and where.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CacheQuestion {
    endpoint: Endpoint,
    request: Box<RawValue>,
}

/// What engines have cached of a prompt.
#[derive(Serialize)]
pub(crate) struct Cached {
    cached: Vec<CachedPrompt>,
}

/// Every pair of a prefill and a decode peer.
#[derive(Serialize)]
pub(crate) struct Pairs {
    pairs: Vec<PairView>,
}

pub(crate) async fn peers(Shared(proxy): Shared<Proxy>) -> Json<Peers> {
    Json(Peers { mode: "prefill_decode", peers: proxy.peers() })
}

pub(crate) async fn peer(
    Shared(proxy): Shared<Proxy>,
    Segments(id): Segments<String>,
) -> Result<Json<PeerView>, RouteError> {
    proxy.peer(&id).map(Json).ok_or(RouteError::UnknownPeer { id })
}

pub(crate) async fn add_peer(
    Shared(proxy): Shared<Proxy>,
    JsonBody(spec): JsonBody<PeerSpec>,
) -> Result<(StatusCode, [(http::HeaderName, String); 1], Json<PeerView>), RouteError> {
    let peer = proxy.operator_adds_peer(spec)?;
    // An id consists of unreserved characters and needs no encoding.
    let location = format!("/admin/peers/{}", peer.id);
    Ok((StatusCode::CREATED, [(LOCATION, location)], Json(peer)))
}

/// Takes a peer out of the fleet and shows it as it was; exchanges in flight end by themselves.
pub(crate) async fn remove_peer(
    Shared(proxy): Shared<Proxy>,
    Segments(id): Segments<String>,
) -> Result<Json<PeerView>, RouteError> {
    proxy.remove_peer(&id).map(Json).ok_or(RouteError::UnknownPeer { id })
}

/// Keeps new requests from a peer and answers when what it has has ended, or at the time limit.
pub(crate) async fn drain_peer(
    Shared(proxy): Shared<Proxy>,
    Segments(id): Segments<String>,
    Params(limit): Params<DrainLimit>,
) -> Result<Json<Drained>, RouteError> {
    let seconds = limit.timeout.unwrap_or(DRAIN_SECONDS);
    let limit = Duration::try_from_secs_f64(seconds).ok().filter(|limit| *limit <= LONGEST_DRAIN);
    let limit = limit.ok_or_else(|| RouteError::Query {
        what: format!("`timeout` must be a number of seconds up to {}", LONGEST_DRAIN.as_secs()),
    })?;
    proxy.drain_peer(&id, limit).await.map(Json).ok_or(RouteError::UnknownPeer { id })
}

pub(crate) async fn quarantine_peer(
    Shared(proxy): Shared<Proxy>,
    Segments(id): Segments<String>,
) -> Result<Json<PeerView>, RouteError> {
    proxy.quarantine_peer(&id).map(Json).ok_or(RouteError::UnknownPeer { id })
}

pub(crate) async fn resume_peer(
    Shared(proxy): Shared<Proxy>,
    Segments(id): Segments<String>,
) -> Result<Json<PeerView>, RouteError> {
    proxy.resume_peer(&id).map(Json).ok_or(RouteError::UnknownPeer { id })
}

/// The sources of engines' addresses.
#[derive(Serialize)]
pub(crate) struct Sources {
    sources: Vec<SourceView>,
}

pub(crate) async fn discovery(Shared(proxy): Shared<Proxy>) -> Json<Sources> {
    Json(Sources { sources: proxy.sources() })
}

pub(crate) async fn compatibility(Shared(proxy): Shared<Proxy>) -> Json<Pairs> {
    Json(Pairs { pairs: proxy.pairs() })
}

/// What engines that publish their KV events have cached of a request's prompt.
pub(crate) async fn cached(
    Shared(proxy): Shared<Proxy>,
    JsonBody(asked): JsonBody<CacheQuestion>,
) -> Result<Json<Cached>, RouteError> {
    let body = Bytes::from(asked.request.get().to_owned());
    Ok(Json(Cached { cached: proxy.cached(asked.endpoint, body).await? }))
}

/// Makes one small hand-off of a pair and says what came of it.
pub(crate) async fn try_pair(
    Shared(proxy): Shared<Proxy>,
    Segments((prefill, decode)): Segments<(String, String)>,
) -> Result<Json<Trial>, RouteError> {
    let trial = proxy.try_pair(&prefill, &decode).await;
    trial.map(Json).map_err(|unknown| RouteError::UnknownPeer { id: unknown.id })
}

pub(crate) async fn hand_offs(Shared(proxy): Shared<Proxy>) -> Json<HandOffs> {
    Json(HandOffs { handoffs: proxy.hand_offs() })
}

/// Which pair a request would get now, and why; the prompt's length in the query.
pub(crate) async fn explain(
    Shared(proxy): Shared<Proxy>,
    Params(ask): Params<ExplainAsk>,
) -> Json<Explanation> {
    Json(proxy.explain(&ask).await)
}

/// The same for a prompt in the body.
pub(crate) async fn explain_prompt(
    Shared(proxy): Shared<Proxy>,
    JsonBody(ask): JsonBody<ExplainAsk>,
) -> Json<Explanation> {
    Json(proxy.explain(&ask).await)
}
