//! What operators look at: requests with their timelines, and the fleet as a stream of events.
//! Must never hold state of its own, nor wait for an engine.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::State as Shared;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use http::header::{HeaderName, HeaderValue};
use kvbaton_proxy::{Proxy, RequestTimeline, RequestView};
use serde::{Deserialize, Serialize};

use crate::error::RouteError;
use crate::extract::{Params, Segments};

const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Silence after which a comment is sent, so that neither end takes the other for gone.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How many requests are listed unless it is told, and at most.
const REQUESTS: usize = 100;
const MOST_REQUESTS: usize = 1000;

/// Which requests.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Which {
    limit: Option<usize>,
    state: Option<State>,
}

/// Whether a request still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Running,
    Ended,
}

/// The last requests.
#[derive(Serialize)]
pub(crate) struct Requests {
    requests: Vec<RequestView>,
}

pub(crate) async fn requests(
    Shared(proxy): Shared<Proxy>,
    Params(Which { limit, state }): Params<Which>,
) -> Result<Json<Requests>, RouteError> {
    let limit = limit.unwrap_or(REQUESTS);
    if !(1..=MOST_REQUESTS).contains(&limit) {
        return Err(RouteError::Query { what: format!("`limit` must be from 1 to {MOST_REQUESTS}") });
    }
    let running = state.map(|state| state == State::Running);
    Ok(Json(Requests { requests: proxy.requests(limit, running) }))
}

pub(crate) async fn request(
    Shared(proxy): Shared<Proxy>,
    Segments(id): Segments<String>,
) -> Result<Json<RequestTimeline>, RouteError> {
    proxy.request(&id).map(Json).ok_or(RouteError::UnknownRequest { id })
}

/// The fleet: an event `snapshot` with everything, then events `delta` with what has changed. Ends when the
/// router leaves.
pub(crate) async fn events(Shared(proxy): Shared<Proxy>) -> Result<Response, RouteError> {
    let pulse = proxy.pulse()?;
    let events = stream::unfold(pulse, |mut pulse| async {
        let frame = pulse.next().await?;
        let event = Event::default().event(if frame.whole { "snapshot" } else { "delta" }).data(frame.json);
        Some((Ok::<_, Infallible>(event), pulse))
    });
    let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    response.headers_mut().insert(X_ACCEL_BUFFERING, HeaderValue::from_static("no"));
    Ok(response)
}
