//! Liveness, readiness and metrics.
//! Must never wait for an engine.

use axum::Json;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, StatusCode};
use kvbaton_proxy::{MetricsFormat, Proxy, Readiness, StoreView};
use serde::Serialize;

/// The process answers.
#[derive(Serialize)]
pub(crate) struct Alive {
    status: &'static str,
}

/// Whether the fleet can serve, with the counts that say why not.
#[derive(Serialize)]
pub(crate) struct Ready {
    ready: bool,
    #[serde(flatten)]
    counts: Readiness,
    /// A store that is away makes no router unready: it serves with what it knows.
    store: StoreView,
}

pub(crate) async fn live() -> Json<Alive> {
    Json(Alive { status: "ok" })
}

pub(crate) async fn ready(Shared(proxy): Shared<Proxy>) -> (StatusCode, Json<Ready>) {
    let counts = proxy.readiness();
    let ready = counts.is_ready();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(Ready { ready, counts, store: proxy.store() }))
}

pub(crate) async fn metrics(Shared(proxy): Shared<Proxy>, headers: HeaderMap) -> Response {
    let accept: Vec<&str> = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let format = MetricsFormat::accepted(Some(&accept.join(",")));
    ([(CONTENT_TYPE, format.content_type())], proxy.metrics(format)).into_response()
}
