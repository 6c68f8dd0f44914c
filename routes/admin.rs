//! The operator's view and control of the fleet: peers and live hand-offs.
//! Must never hold state of its own: every answer is read from the core.

use axum::Json;
use axum::extract::State as Shared;
use http::StatusCode;
use http::header::LOCATION;
use kvbaton_proxy::{HandOffView, PairView, PeerSpec, PeerView, Proxy};
use serde::Serialize;

use crate::error::RouteError;
use crate::extract::{Json as JsonBody, Segments};

/// All peers.
#[derive(Serialize)]
pub(crate) struct Peers {
    peers: Vec<PeerView>,
}

/// All live hand-offs.
#[derive(Serialize)]
pub(crate) struct HandOffs {
    handoffs: Vec<HandOffView>,
}

/// Every pair of a prefill and a decode peer.
#[derive(Serialize)]
pub(crate) struct Pairs {
    pairs: Vec<PairView>,
}

pub(crate) async fn peers(Shared(proxy): Shared<Proxy>) -> Json<Peers> {
    Json(Peers { peers: proxy.peers() })
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
    let peer = proxy.add_peer(spec)?;
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

pub(crate) async fn compatibility(Shared(proxy): Shared<Proxy>) -> Json<Pairs> {
    Json(Pairs { pairs: proxy.pairs() })
}

pub(crate) async fn hand_offs(Shared(proxy): Shared<Proxy>) -> Json<HandOffs> {
    Json(HandOffs { handoffs: proxy.hand_offs() })
}
