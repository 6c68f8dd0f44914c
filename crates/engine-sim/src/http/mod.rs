//! The HTTP face of an engine: vLLM's endpoints and the `/sim` ones for outside test drivers.
//!
//! Requests are logged and armed faults applied here, once, before any handler runs.

mod answer;
mod dialects;
mod events;
mod fields;
mod generate;
mod pages;
mod reject;
mod request;
mod sequence;
mod sim;
mod structure;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{any, get, post};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::BodyExt as _;

use crate::conn::ConnControl;
use crate::faults::{Plan, Stage};
use crate::shared::{SeenRequest, Shared};
use generate::{Incoming, generate, leg_of, random_hex};
use reject::json_response;
use request::Endpoint;

const REQUEST_ID: &str = "x-request-id";

/// The whole application of one engine.
pub(crate) fn app(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/responses", post(responses))
        .route("/v1/messages", post(messages))
        .route("/v1/models", get(pages::models))
        .route("/v1/embeddings", post(pages::embeddings))
        .route("/tokenize", post(pages::tokenize))
        .route("/health", get(pages::health))
        .route("/ping", any(pages::health))
        .route("/version", get(pages::version))
        .route("/metrics", get(pages::metrics))
        .route("/sim/stats", get(sim::stats))
        .route("/sim/requests", get(sim::requests))
        .route("/sim/faults", get(sim::faults).post(sim::set_faults))
        .fallback(pages::not_found)
        .method_not_allowed_fallback(pages::method_not_allowed)
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), log_and_decorate))
        .with_state(shared)
}

/// Reads the body, logs the request and gives every answer uvicorn's headers.
async fn log_and_decorate(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = body.collect().await.map(http_body_util::Collected::to_bytes) else {
        // The client went away or broke the framing: nobody is left to answer.
        return json_response(StatusCode::BAD_REQUEST, String::new());
    };
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    if !path.starts_with("/sim/") {
        shared.record(SeenRequest {
            method: parts.method.clone(),
            path,
            headers: parts.headers.clone(),
            body: body.clone(),
        });
    }
    let request_id =
        parts.headers.get(REQUEST_ID).cloned().or_else(|| HeaderValue::from_str(&random_hex(16)).ok());
    let mut response = next.run(Request::from_parts(parts, Body::from(body))).await;
    let headers = response.headers_mut();
    headers.insert(header::SERVER, HeaderValue::from_static("uvicorn"));
    headers.insert(header::VARY, HeaderValue::from_static("Origin"));
    if let Some(request_id) = request_id {
        headers.insert(REQUEST_ID, request_id);
    }
    response
}

async fn completions(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    generation(shared, Endpoint::Completions, request).await
}

async fn chat(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    generation(shared, Endpoint::Chat, request).await
}

async fn responses(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    generation(shared, Endpoint::Responses, request).await
}

async fn messages(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    generation(shared, Endpoint::Messages, request).await
}

async fn generation(shared: Arc<Shared>, endpoint: Endpoint, request: Request) -> Response {
    let control = request.extensions().get::<Arc<ConnControl>>().cloned();
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let leg = leg_of(&body);
    let plan = shared.faults.meet(leg);
    shared.faults.pass(Stage::Arrival, leg).await;
    if plan.stall == Some(Stage::Arrival) {
        std::future::pending::<()>().await;
    }
    if let Some(control) = &control {
        control.reset_after(plan.reset_after);
    }
    let close = plan.close;
    let mut response = match misbehaviour(&plan) {
        Some(response) => response,
        None => generate(shared, incoming(endpoint, &parts.headers, body), plan).await,
    };
    if close {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn incoming(endpoint: Endpoint, headers: &HeaderMap, body: Bytes) -> Incoming {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let media_type = text("content-type").unwrap_or_default().to_ascii_lowercase();
    let is_json = media_type.split(';').next() == Some("application/json");
    Incoming { endpoint, body, request_id: text(REQUEST_ID), is_json }
}

/// The answer of a request that an armed fault answers by itself.
fn misbehaviour(plan: &Plan) -> Option<Response> {
    if let Some((status, body)) = &plan.refuse {
        let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = if body.is_null() { String::new() } else { body.to_string() };
        return Some(json_response(status, body));
    }
    plan.garbage.clone().map(|body| json_response(StatusCode::OK, body))
}
