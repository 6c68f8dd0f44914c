//! The OpenAI-compatible endpoints: completions and chat go through the pair of engines by one
//! generic forward, models come from the core, the rest is passed to one decode engine as it is.
//! Must never look into a body: that is the core's work.

use axum::body::{Body, Bytes};
use axum::extract::{Request, State as Shared};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use http::uri::PathAndQuery;
use kvbaton_proxy::{Client, Endpoint, Exchange, Proxy};

use crate::State;
use crate::error::RouteError;
use crate::extract::{Segments, check_not_encoded, exchange};
use crate::held::read_held_body;
use crate::keep_alive;

/// Answers a request through prefill, hand-off and decode.
pub(crate) async fn forward(
    endpoint: Endpoint,
    Shared(state): Shared<State>,
    request: Request,
) -> Result<Response, RouteError> {
    let (parts, mut body) = request.into_parts();
    let exchange = exchange(parts, &state.proxy, endpoint.label());
    let account = exchange.account.clone();
    let answered = async {
        check_not_encoded(&exchange.headers)?;
        let (bound, held) = (state.limits.body_bound(), state.proxy.held());
        let body = read_held_body(&exchange.headers, &mut body, bound, held).await?;
        answer(endpoint, state, exchange, body).await
    };
    answered.await.inspect_err(|error| error.tell(&account))
}

/// Answers a request whose body has been read.
pub(crate) async fn answer(
    endpoint: Endpoint,
    state: State,
    exchange: Exchange,
    body: Bytes,
) -> Result<Response, RouteError> {
    let proxy = state.proxy;
    let order = proxy.read(endpoint, &exchange, body)?;
    let (interval, account) = (state.limits.now().keep_alive, exchange.account.clone());
    let streams = order.wants_stream();
    let mut response = if streams && !interval.is_zero() {
        let served = Box::pin(async move { Ok(proxy.serve(&order, &exchange).await?.map(Body::new)) });
        keep_alive::answered(served, endpoint, account, interval).await?
    } else {
        proxy.serve(&order, &exchange).await?.map(Body::new)
    };
    if streams {
        response.extensions_mut().insert(Streamed);
    }
    Ok(response)
}

/// Stands in the extensions of answers to requests that were read whole and asked for a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streamed;

/// Hands a request to one decode engine, path, query and body as they are.
pub(crate) async fn pass_through(
    Shared(state): Shared<State>,
    request: Request,
) -> Result<Response, RouteError> {
    let (parts, mut body) = request.into_parts();
    let target = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let method = parts.method.clone();
    let exchange = exchange(parts, &state.proxy, "pass_through");
    let account = exchange.account.clone();
    let passed = async move {
        let (bound, held) = (state.limits.body_bound(), state.proxy.held());
        let body = read_held_body(&exchange.headers, &mut body, bound, held).await?;
        let answer = state.proxy.pass_through(method, target, exchange, body).await?;
        Ok(answer.map(Body::new))
    };
    passed.await.inspect_err(|error: &RouteError| error.tell(&account))
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
