//! How a listener's requests come in: those to the endpoints with two legs straight to their handler where
//! nothing about them is unusual, all others through the router and its layers.
//! Must never decide what a layer decides: whatever one would refuse or change goes through it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;

use axum::Router;
use axum::body::{Body, HttpBody as _};
use axum::extract::{ConnectInfo, Request};
use axum::response::{IntoResponse as _, Response};
use http::header::{EXPECT, TRANSFER_ENCODING};
use http::{Method, Version};
use kvbaton_proxy::{Client, Endpoint, Exchange, RequestId};
use tower::ServiceExt as _;
use tracing::Instrument as _;

use crate::access;
use crate::error::RouteError;
use crate::extract::{X_REQUEST_ID, check_not_encoded, identified, request_span};
use crate::held::read_held_body;
use crate::{CertificateNames, Mounts, State, app, cors, framing, openai, unread};

/// The endpoints whose handler can be reached directly.
const ENDPOINTS: [Endpoint; 4] =
    [Endpoint::ChatCompletions, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages];

type Answer = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

/// One listener's HTTP surface; cheap to clone.
#[derive(Clone)]
pub struct Surface {
    app: Router,
    /// None where the listener has no inference endpoints.
    direct: Option<State>,
}

impl Surface {
    /// What [`app`] builds of these, with the short way beside it.
    #[must_use]
    pub fn new(state: State, mounts: Mounts) -> Self {
        let direct = mounts.clients.then(|| state.clone());
        Self { app: app(state, mounts), direct }
    }

    /// Answers one request of `client`, whose certificate holds these names.
    pub fn answer(
        &self,
        mut request: Request,
        client: SocketAddr,
        names: Option<CertificateNames>,
    ) -> Answer {
        if let Some(names) = names {
            request.extensions_mut().insert(names);
        }
        if let Some(state) = &self.direct
            && let Some((endpoint, who)) = is_usual(state, &mut request)
        {
            return Box::pin(answer(endpoint, state.clone(), request, who));
        }
        request.extensions_mut().insert(ConnectInfo(client));
        Box::pin(self.app.clone().oneshot(request))
    }
}

/// The endpoint and the client of a request that every layer would let pass as it is.
fn is_usual(state: &State, request: &mut Request) -> Option<(Endpoint, Client)> {
    let path = request.uri().path();
    let endpoint = ENDPOINTS.into_iter().find(|endpoint| endpoint.path() == path)?;
    let headers = request.headers();
    let plain = *request.method() == Method::POST
        && request.version() <= Version::HTTP_11
        && !headers.contains_key(EXPECT)
        && !headers.contains_key(TRANSFER_ENCODING)
        && !framing::is_ambiguous(headers)
        && check_not_encoded(headers).is_ok()
        && !cors::applies(&state.cors);
    if !plain {
        return None;
    }
    access::let_in(&state.access, &state.proxy, request).ok().map(|client| (endpoint, client))
}

async fn answer(
    endpoint: Endpoint,
    state: State,
    request: Request,
    client: Client,
) -> Result<Response, Infallible> {
    let (parts, body) = request.into_parts();
    let request_id = RequestId::accept(parts.headers.get(X_REQUEST_ID));
    let header = request_id.header_value();
    let span = request_span(&request_id, &parts.method, parts.uri.path());
    let account = state.proxy.account(&request_id, endpoint.label(), &parts.headers);
    let exchange = Exchange { request_id, headers: parts.headers, client, account };
    // Moved once, here, and not with each of the futures around it.
    let answering = Box::pin(forward(endpoint, state, exchange, body));
    let response = if span.is_disabled() { answering.await } else { answering.instrument(span).await };
    Ok(identified(response, header, endpoint == Endpoint::Messages))
}

async fn forward(endpoint: Endpoint, state: State, exchange: Exchange, mut body: Body) -> Response {
    let account = exchange.account.clone();
    let refused = |error: RouteError| {
        error.tell(&account);
        error.into_response()
    };
    let bound = state.limits.body_bound();
    match read_held_body(&exchange.headers, &mut body, bound, state.proxy.held()).await {
        Ok(read) => openai::answer(endpoint, state, exchange, read).await.unwrap_or_else(refused),
        Err(error) if body.is_end_stream() => refused(error),
        Err(error) => {
            let left = unread::Unread { body, touched: true };
            unread::answered(refused(error), left, false, state.limits.now().body_bytes)
        }
    }
}
