//! The OpenAI-compatible endpoints: completions and chat go through the pair of engines by one
//! generic forward, models come from the core, the rest is passed to one decode engine as it is.
//! Must never look into a body: that is the core's work.

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use http::uri::PathAndQuery;
use kvbaton_proxy::{Client, Endpoint, Proxy};

use crate::State;
use crate::error::RouteError;
use crate::extract::{Segments, check_not_encoded, exchange, read_body};

/// Answers a request through prefill, hand-off and decode.
pub(crate) async fn forward(
    endpoint: Endpoint,
    Shared(state): Shared<State>,
    request: Request,
) -> Result<Response, RouteError> {
    let (parts, body) = request.into_parts();
    check_not_encoded(&parts.headers)?;
    let body = read_body(&parts.headers, body, state.limits.body_bound()).await?;
    let answer = state.proxy.complete(endpoint, exchange(parts), body).await?;
    Ok(answer.map(Body::new))
}

/// Hands a request to one decode engine, path, query and body as they are.
pub(crate) async fn pass_through(
    Shared(state): Shared<State>,
    request: Request,
) -> Result<Response, RouteError> {
    let (parts, body) = request.into_parts();
    let target = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let method = parts.method.clone();
    let body = read_body(&parts.headers, body, state.limits.body_bound()).await?;
    let answer = state.proxy.pass_through(method, target, exchange(parts), body).await?;
    Ok(answer.map(Body::new))
}

/// The union of the peers' models, as far as they are the client's.
pub(crate) async fn models(Shared(proxy): Shared<Proxy>, Extension(client): Extension<Client>) -> Response {
    Json(proxy.models().only(&client.models)).into_response()
}

/// One model's entry; an id may hold slashes.
pub(crate) async fn model(
    Shared(proxy): Shared<Proxy>,
    Extension(client): Extension<Client>,
    Segments(id): Segments<String>,
) -> Result<Response, RouteError> {
    match proxy.models().only(&client.models).entry(&id) {
        Some(entry) => Ok(Json(entry).into_response()),
        None => Err(RouteError::UnknownModel { id }),
    }
}
