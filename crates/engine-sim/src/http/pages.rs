//! The endpoints that generate nothing: models, health, version, metrics, tokenising, embeddings.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use super::generate::random_hex;
use super::reject::{Rejection, json_response, python_input};
use super::request::parse_tokenize;
use crate::kv::mix;
use crate::shared::Shared;
use crate::tokens;

pub(super) async fn models(State(shared): State<Arc<Shared>>) -> Response {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let permission = json!({
        "id": format!("modelperm-{}", random_hex(8)), "object": "model_permission", "created": created,
        "allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true,
        "allow_search_indices": false, "allow_view": true, "allow_fine_tuning": false,
        "organization": "*", "group": null, "is_blocking": false,
    });
    let model = &shared.config.model;
    let mut cards = vec![json!({
        "id": model, "object": "model", "created": created, "owned_by": "vllm", "root": model,
        "parent": null, "max_model_len": shared.config.max_model_len, "permission": [permission],
    })];
    // An adapter's root is where it was loaded from.
    cards.extend(shared.config.adapters.iter().map(|adapter| {
        json!({
            "id": adapter, "object": "model", "created": created, "owned_by": "vllm",
            "root": format!("/adapters/{adapter}"), "parent": model, "max_model_len": null,
            "permission": [permission],
        })
    }));
    json_response(StatusCode::OK, json!({"object": "list", "data": cards}).to_string())
}

/// An engine that shakes hands over HTTP is still starting until the registry has its payload: before
/// that, nobody could pull from it.
pub(super) async fn health(State(shared): State<Arc<Shared>>) -> Response {
    let mut response = Response::new(Body::empty());
    if shared.is_dead() || !shared.known.load(Ordering::Relaxed) {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

pub(super) async fn version(State(shared): State<Arc<Shared>>) -> Response {
    json_response(StatusCode::OK, json!({ "version": shared.config.version() }).to_string())
}

pub(super) async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let gauges = *shared.gauges.lock();
    let page = shared.metrics.lock().render(&shared.config.model, gauges, shared.config.is_v14());
    let mut response = Response::new(Body::from(page));
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

pub(super) async fn tokenize(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    match parse_tokenize(&body) {
        Ok(prompt) => {
            let answer = json!({
                "count": prompt.tokens.len(), "max_model_len": shared.config.max_model_len,
                "tokens": prompt.tokens, "token_strs": null,
            });
            json_response(StatusCode::OK, answer.to_string())
        }
        Err(rejection) => rejection.response(),
    }
}

/// A short vector that depends on nothing but the text.
pub(super) async fn embeddings(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    let Ok(request) = serde_json::from_slice::<Value>(&body) else {
        let rejection =
            Rejection::schema_error("json_invalid", "body.0", "JSON decode error", "'<dict of 0 items>'", "");
        return rejection.response();
    };
    let texts: Vec<&str> = match &request["input"] {
        Value::String(text) => vec![text],
        Value::Array(items) => items.iter().filter_map(Value::as_str).collect(),
        other => {
            let input = python_input(other);
            return Rejection::schema_error("missing", "body.input", "Field required", &input, "").response();
        }
    };
    let data: Vec<Value> = texts
        .iter()
        .enumerate()
        .map(|(index, text)| json!({"index": index, "object": "embedding", "embedding": embed(text)}))
        .collect();
    let prompt: usize = texts.iter().map(|text| text.len()).sum();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let answer = json!({
        "id": format!("embd-{}", random_hex(8)), "object": "list", "created": created,
        "model": shared.config.model, "data": data,
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0, "prompt_tokens_details": null},
    });
    json_response(StatusCode::OK, answer.to_string())
}

fn embed(text: &str) -> Vec<f64> {
    let mut state = tokens::encode(text).iter().fold(0, |state, token| mix(state ^ u64::from(*token)));
    (0..8)
        .map(|_| {
            state = mix(state);
            f64::from(u32::try_from(state >> 48).unwrap_or(0)) / 32768.0 - 1.0
        })
        .collect()
}

pub(super) async fn not_found() -> Response {
    json_response(StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#.to_owned())
}

pub(super) async fn method_not_allowed() -> Response {
    json_response(StatusCode::METHOD_NOT_ALLOWED, r#"{"detail":"Method Not Allowed"}"#.to_owned())
}
