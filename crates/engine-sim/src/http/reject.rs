//! Error answers in vLLM's wording and shape.
//!
//! One `Rejection` per refused request; nothing here decides whether to refuse.

use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use serde_json::Value;

/// vLLM's message for a request that meets a dead engine core.
const DEAD_ENGINE: &str = "EngineCore encountered an issue. See stack trace (above) for the root cause.";

/// Why a request is refused, as it is shown to the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rejection {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
}

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: ErrorInfo<'a>,
}

#[derive(Serialize)]
struct ErrorInfo<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: u16,
}

impl Rejection {
    /// A value that vLLM's own checks refuse inside the handler.
    pub(crate) fn bad_value(message: String, param: Option<&str>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            message,
            param: param.map(str::to_owned),
        }
    }

    /// The same with the parameter, and perhaps its value, appended to the message.
    pub(crate) fn bad_parameter(message: &str, param: &str, value: Option<&str>) -> Self {
        let suffix = match value {
            Some(value) => format!("(parameter={param}, value={value})"),
            None => format!("(parameter={param})"),
        };
        Self::bad_value(format!("{message} {suffix}"), Some(param))
    }

    /// One field that the schema refuses, rendered as the framework does.
    pub(crate) fn schema_error(
        kind: &str,
        location: &str,
        message: &str,
        input: &str,
        context: &str,
    ) -> Self {
        let text = format!(
            "1 validation error:\n  {{'type': '{kind}', 'loc': '{location}', 'msg': '{message}', 'input': {input}{context}}}"
        );
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "Bad Request",
            message: text,
            param: Some(location.to_owned()),
        }
    }

    pub(crate) fn unsupported_media_type() -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "Bad Request",
            message: "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
                .to_owned(),
            param: None,
        }
    }

    pub(crate) fn unknown_model(asked: &str, served: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError",
            message: format!("The model `{asked}` does not exist. Valid aliases: {served}."),
            param: Some("model".to_owned()),
        }
    }

    /// A failed KV load.
    pub(crate) fn internal() -> Self {
        Self::server_error("Internal server error")
    }

    /// The engine core is dead.
    pub(crate) fn dead() -> Self {
        Self::server_error(DEAD_ENGINE)
    }

    /// The engine is not known to the registry yet.
    pub(crate) fn starting() -> Self {
        Self { status: StatusCode::SERVICE_UNAVAILABLE, ..Self::server_error("The engine is starting") }
    }

    fn server_error(message: &str) -> Self {
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "InternalServerError",
            message: message.to_owned(),
            param: None,
        }
    }

    /// The body as vLLM's JSON answers have it.
    pub(crate) fn body(&self) -> String {
        let body = ErrorBody {
            error: ErrorInfo {
                message: &self.message,
                r#type: self.kind,
                param: self.param.as_deref(),
                code: self.status.as_u16(),
            },
        };
        serde_json::to_string(&body).unwrap_or_default()
    }

    /// The body as it appears in an event of a stream: Python's spaced JSON.
    pub(crate) fn event_body(&self) -> String {
        let quoted = |text: &str| Value::from(text).to_string();
        format!(
            "{{\"error\": {{\"message\": {}, \"type\": {}, \"param\": {}, \"code\": {}}}}}",
            quoted(&self.message),
            quoted(self.kind),
            self.param.as_deref().map_or_else(|| "null".to_owned(), quoted),
            self.status.as_u16(),
        )
    }

    /// The HTTP answer on the messages endpoint: what its handler refuses has that dialect's shape, what the
    /// schema refuses has not.
    pub(crate) fn message_response(&self) -> Response {
        if self.kind == "Bad Request" {
            return self.response();
        }
        let error = serde_json::json!({"type": self.kind, "message": self.message});
        json_response(self.status, serde_json::json!({"type": "error", "error": error}).to_string())
    }

    pub(crate) fn unknown_response(id: &str) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            kind: "invalid_request_error",
            message: format!("Response with id '{id}' not found."),
            param: Some("response_id".to_owned()),
        }
    }

    /// The HTTP answer.
    pub(crate) fn response(&self) -> Response {
        json_response(self.status, self.body())
    }
}

/// A JSON answer.
pub(crate) fn json_response(status: StatusCode, body: String) -> Response {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Python's representation of a JSON value inside an error message, containers described by size.
pub(crate) fn python_input(value: &Value) -> String {
    match value {
        Value::Null => "'None'".to_owned(),
        Value::Bool(true) => "'True'".to_owned(),
        Value::Bool(false) => "'False'".to_owned(),
        Value::Number(number) => format!("'{number}'"),
        Value::String(text) => python_string(text),
        Value::Array(items) => format!("'<list of {} items>'", items.len()),
        Value::Object(map) => format!("'<dict of {} items>'", map.len()),
    }
}

fn python_string(text: &str) -> String {
    let short: String = text.chars().take(200).collect();
    let suffix = if short.len() < text.len() { "...[truncated]" } else { "" };
    let escaped = short.replace('\\', "\\\\").replace('\n', "\\n");
    if escaped.contains('\'') && !escaped.contains('"') {
        format!("\"{escaped}{suffix}\"")
    } else {
        format!("'{}{suffix}'", escaped.replace('\'', "\\'"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_type_matches_the_capture() {
        let rejection = Rejection::schema_error(
            "dict_type",
            "body.kv_transfer_params",
            "Input should be a valid dictionary",
            &python_input(&Value::from("x")),
            "",
        );
        let expected =
            include_str!("../../../../tests/fixtures/captures/errors2/err_D_kv_params_string.resp.json");
        assert_eq!(rejection.body(), expected);
    }

    #[test]
    fn event_body_matches_the_capture() {
        let expected =
            include_str!("../../../../tests/fixtures/captures/err_D_wrong_engine_id_stream.resp.sse");
        assert_eq!(format!("data: {}\n\ndata: [DONE]\n\n", Rejection::internal().event_body()), expected);
    }

    #[test]
    fn dead_engine_matches_the_capture() {
        let expected =
            include_str!("../../../../tests/fixtures/captures/errors2/D_prompt_longer_than_P.resp.json");
        assert_eq!(Rejection::dead().body(), expected);
    }
}
