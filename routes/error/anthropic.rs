//! Errors on the endpoints of Anthropic's dialect, whose clients look for a type beside the error and know
//! other classes. The members that OpenAI's shape has more stay in it.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::Serialize;

use super::ErrorObject;

/// The endpoints of this dialect, and all below it.
const PATH: &str = "/v1/messages";

#[derive(Serialize)]
struct Body {
    #[serde(rename = "type")]
    kind: &'static str,
    error: ErrorObject,
}

/// Whether a path is of this dialect.
pub(crate) fn speaks(path: &str) -> bool {
    path.strip_prefix(PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The answer in this dialect, if it is an error of the router; an engine's own stay as they are.
pub(crate) fn translated(mut answer: Response) -> Response {
    let Some(mut error) = answer.extensions_mut().remove::<ErrorObject>() else { return answer };
    error.class = class_of(answer.status());
    let (mut head, _) = answer.into_parts();
    let (written, body) = Json(Body { kind: "error", error }).into_response().into_parts();
    head.headers.remove(http::header::CONTENT_LENGTH);
    head.headers.extend(written.headers);
    Response::from_parts(head, body)
}

pub(super) fn class_of(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use crate::error::RouteError;

    #[test]
    fn only_its_own_paths_are_of_the_dialect() {
        for (path, is_its) in [
            ("/v1/messages", true),
            ("/v1/messages/count_tokens", true),
            ("/v1/messages_of_others", false),
            ("/v1/responses", false),
        ] {
            assert_eq!(speaks(path), is_its, "{path}");
        }
    }

    #[tokio::test]
    async fn an_error_gets_the_dialects_type_and_class() {
        for (error, class) in [
            (RouteError::BodyTooLarge { limit: 1 }, "request_too_large"),
            (RouteError::KeyMissing, "authentication_error"),
            (RouteError::NoRoom, "overloaded_error"),
            (RouteError::BodyTimeout, "timeout_error"),
            (RouteError::Ambiguous, "invalid_request_error"),
            (RouteError::Unexpected, "api_error"),
        ] {
            let (status, text) = (error.status(), error.to_string());
            let answer = translated(error.into_response());
            assert_eq!(
                (answer.status(), &answer.headers()["content-type"]),
                (status, &"application/json".parse().unwrap())
            );
            let body: serde_json::Value =
                serde_json::from_slice(&answer.into_body().collect().await.unwrap().to_bytes()).unwrap();
            assert_eq!((&body["type"], &body["error"]["type"]), (&"error".into(), &class.into()));
            assert_eq!(body["error"]["message"], text);
        }
        let engines = translated((StatusCode::NOT_FOUND, "its own words").into_response());
        assert_eq!(engines.into_body().collect().await.unwrap().to_bytes(), "its own words");
    }
}
