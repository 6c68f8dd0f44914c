//! Errors that come after the head of a stream: told as its last event, in the dialect's own shape.

use axum::body::Bytes;
use kvbaton_proxy::{Endpoint, EventError, error_event};

use super::{RouteError, anthropic};

/// The error as the last event of a stream that has begun.
pub(crate) fn event_of(error: &RouteError, endpoint: Endpoint) -> Bytes {
    let face = error.face();
    let message = face.message.unwrap_or_else(|| error.to_string());
    if let RouteError::Refused { said } = error
        && let Some(event) = refusal_event(endpoint, said)
    {
        return event;
    }
    if face.status.is_server_error() {
        tracing::warn!(status = face.status.as_u16(), code = face.code, error = %error, "stream failed");
    }
    let class = match endpoint {
        Endpoint::Messages => anthropic::class_of(face.status),
        _ => face.class.name(),
    };
    error_event(endpoint, &EventError { class, code: face.code, message: &message })
}

/// An engine's own words, if they are an error object.
fn refusal_event(endpoint: Endpoint, said: &[u8]) -> Option<Bytes> {
    let said: serde_json::Value = serde_json::from_slice(said).ok()?;
    let error = said.get("error")?;
    let text = |name: &str| match error.get(name) {
        Some(serde_json::Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::new(),
    };
    let (class, code, message) = (text("type"), text("code"), text("message"));
    Some(error_event(endpoint, &EventError { class: &class, code: &code, message: &message }))
}
