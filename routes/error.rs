//! The one place where errors become HTTP: status, OpenAI's error body, `Retry-After`.
//! Owns what the surface itself refuses; knows the core's errors and how clients see them.
//! Must never show an engine's address, nor turn an error into a response anywhere else.

mod request;

use axum::Json;
use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use kvbaton_proxy::{
    Account, Endpoint, EventError, HandOffRefusal, PeerSpecError, ProxyError, RegistryError, Stage,
    error_event,
};
use serde::Serialize;

use crate::access::NotLocal;
use request::{bad_request_face, busy_face, no_room, upstream_face};

/// Seconds after which a fleet without a ready engine is worth another try: about one probe.
const RETRY_SECONDS: u64 = 1;

/// Why a request got an error from the router.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RouteError {
    #[error("there is no such endpoint")]
    UnknownPath,
    #[error("this endpoint does not answer to that method; see the Allow header")]
    MethodNotAllowed,
    #[error("the body is larger than {limit} bytes")]
    BodyTooLarge { limit: usize },
    #[error("the router holds as much as it may; try again soon")]
    NoRoom,
    /// An engine's refusal that came too late to be told by its status.
    #[error("the engine refused the request")]
    Refused { said: Bytes },
    #[error("the body did not arrive in time")]
    BodyTimeout,
    #[error("the body ended early")]
    BodyIncomplete,
    #[error("the body must be plain, without a content encoding")]
    ContentEncoding,
    #[error("the content type must be {expected}")]
    ContentType { expected: &'static str },
    #[error(transparent)]
    Json(#[from] JsonFault),
    #[error("the body cannot be used: {what}")]
    Msgpack {
        /// The member at fault, when the bytes themselves are msgpack.
        path: Option<String>,
        what: String,
    },
    #[error("the query cannot be used: {what}")]
    Query { what: String },
    #[error("a path segment is not valid UTF-8")]
    PathNotUtf8,
    #[error("`{name}` in the path must be a number from 0 to 4294967295")]
    RankInvalid { name: &'static str },
    #[error("the model `{id}` is not served by any ready engine")]
    UnknownModel { id: String },
    #[error("there is no peer `{id}`")]
    UnknownPeer { id: String },
    #[error("the engine `{engine_id}` is not registered")]
    UnknownEngine { engine_id: String },
    #[error("rank {pp_rank}/{tp_rank} of the engine `{engine_id}` is not registered")]
    UnknownRank { engine_id: String, pp_rank: u32, tp_rank: u32 },
    #[error("the engine `{engine_id}` is still registering")]
    EngineNotReady { engine_id: String },
    #[error("only clients on this host may use this endpoint unless a credential for it is configured: {0}")]
    NotLocal(NotLocal),
    #[error("this endpoint needs a token as `Authorization: Bearer <token>`")]
    TokenMissing,
    #[error("the token is wrong, or not good for this endpoint")]
    TokenWrong,
    #[error("you did not provide an API key; send it as `Authorization: Bearer <key>`")]
    KeyMissing,
    #[error("incorrect API key provided")]
    KeyWrong,
    #[error("the request went through this router before: an engine's address leads back to it")]
    Loop,
    #[error("the request's length or host is ambiguous")]
    Ambiguous,
    #[error(transparent)]
    Proxy(#[from] ProxyError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    PeerSpec(#[from] PeerSpecError),
    /// Something that this crate holds impossible; the place of birth logs what it saw.
    #[error("internal error")]
    Unexpected,
}

/// Where and why a JSON body does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the body cannot be used: {what}")]
pub(crate) struct JsonFault {
    /// The member at fault, when the text itself is JSON.
    pub(crate) path: Option<String>,
    /// From 1.
    pub(crate) line: usize,
    /// From 1.
    pub(crate) column: usize,
    /// What is wrong, with the position and, where there is one, the name of the member.
    pub(crate) what: String,
}

impl JsonFault {
    pub(crate) fn new(path: Option<String>, error: &serde_json::Error) -> Self {
        let path = path.filter(|path| error.is_data() && path != "." && path != "?");
        Self { path, line: error.line(), column: error.column(), what: error.to_string() }
    }
}

/// OpenAI's classes of errors, as far as this surface needs them.
#[derive(Clone, Copy)]
enum Class {
    InvalidRequest,
    Authentication,
    Permission,
    NotFound,
    Unavailable,
    Upstream,
    Server,
    RateLimit,
}

impl Class {
    const fn name(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::Permission => "permission_error",
            Self::NotFound => "not_found_error",
            Self::Unavailable => "unavailable_error",
            Self::Upstream => "upstream_error",
            Self::Server => "server_error",
            Self::RateLimit => "rate_limit_error",
        }
    }
}

/// OpenAI's error body.
#[derive(Serialize)]
struct ErrorBody {
    error: ErrorObject,
}

#[derive(Serialize)]
struct ErrorObject {
    message: String,
    #[serde(rename = "type")]
    class: &'static str,
    param: Option<String>,
    code: &'static str,
}

/// How one error looks from outside.
struct Face {
    status: StatusCode,
    class: Class,
    code: &'static str,
    param: Option<String>,
    /// Replaces the error's own text where that one is for the log.
    message: Option<String>,
    /// Seconds after which another try may succeed.
    retry: Option<u64>,
}

impl Face {
    fn new(status: StatusCode, class: Class, code: &'static str) -> Self {
        Self { status, class, code, param: None, message: None, retry: None }
    }

    fn invalid(code: &'static str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Class::InvalidRequest, code)
    }

    fn absent(code: &'static str) -> Self {
        Self::new(StatusCode::NOT_FOUND, Class::NotFound, code)
    }

    fn upstream(status: StatusCode, code: &'static str, message: String) -> Self {
        Self { message: Some(message), ..Self::new(status, Class::Upstream, code) }
    }

    fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    fn retry(mut self) -> Self {
        self.retry = Some(RETRY_SECONDS);
        self
    }
}

impl RouteError {
    /// The status with which it is answered.
    pub(crate) fn status(&self) -> StatusCode {
        self.face().status
    }

    /// Puts it into the request's account.
    pub(crate) fn tell(&self, account: &Account) {
        // A client whose body breaks off has left: nobody reads the answer.
        if !matches!(self, Self::BodyIncomplete) {
            account.refused(self.status().as_u16());
        }
    }

    fn face(&self) -> Face {
        match self {
            Self::UnknownPath => Face::absent("unknown_endpoint"),
            Self::MethodNotAllowed => {
                Face::new(StatusCode::METHOD_NOT_ALLOWED, Class::InvalidRequest, "method_not_allowed")
            }
            Self::BodyTooLarge { .. } => {
                Face::new(StatusCode::PAYLOAD_TOO_LARGE, Class::InvalidRequest, "body_too_large")
            }
            Self::NoRoom => no_room(),
            Self::Refused { .. } => Face::new(StatusCode::BAD_GATEWAY, Class::Upstream, "engine_refused"),
            Self::BodyTimeout => {
                Face::new(StatusCode::REQUEST_TIMEOUT, Class::InvalidRequest, "body_timeout")
            }
            Self::BodyIncomplete => Face::invalid("body_incomplete"),
            Self::ContentEncoding => {
                let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
                Face::new(status, Class::InvalidRequest, "unsupported_content_encoding")
            }
            Self::ContentType { .. } => {
                let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
                Face::new(status, Class::InvalidRequest, "unsupported_content_type")
            }
            Self::Json(fault) => Face { param: fault.path.clone(), ..Face::invalid("invalid_json") },
            Self::Msgpack { path, .. } => Face { param: path.clone(), ..Face::invalid("invalid_msgpack") },
            Self::Query { .. } => Face::invalid("invalid_query"),
            Self::PathNotUtf8 => Face::invalid("invalid_path"),
            Self::RankInvalid { name } => Face::invalid("invalid_rank").param(*name),
            Self::UnknownModel { .. } => Face::absent("model_not_found").param("model"),
            Self::UnknownPeer { .. } => Face::absent("unknown_peer").param("id"),
            Self::UnknownEngine { .. } => Face::absent("unknown_engine").param("engine_id"),
            Self::UnknownRank { .. } => Face::absent("unknown_rank"),
            Self::EngineNotReady { .. } => {
                let status = StatusCode::CONFLICT;
                Face::new(status, Class::InvalidRequest, "engine_not_ready").param("engine_id")
            }
            Self::NotLocal(_) => Face::new(StatusCode::FORBIDDEN, Class::Permission, "not_local"),
            Self::TokenMissing => {
                Face::new(StatusCode::UNAUTHORIZED, Class::Authentication, "token_required")
            }
            Self::TokenWrong => Face::new(StatusCode::UNAUTHORIZED, Class::Authentication, "token_wrong"),
            Self::KeyMissing | Self::KeyWrong => {
                Face::new(StatusCode::UNAUTHORIZED, Class::InvalidRequest, "invalid_api_key")
            }
            Self::Loop => Face::new(StatusCode::LOOP_DETECTED, Class::Upstream, "loop_detected"),
            Self::Ambiguous => Face::invalid("ambiguous_request"),
            Self::Proxy(error) => proxy_face(error),
            Self::Registry(error) => registry_face(error),
            Self::PeerSpec(error) => peer_spec_face(error),
            Self::Unexpected => Face::new(StatusCode::INTERNAL_SERVER_ERROR, Class::Server, "internal_error"),
        }
    }
}

fn proxy_face(error: &ProxyError) -> Face {
    match error {
        ProxyError::BadRequest(bad) => bad_request_face(bad),
        ProxyError::ModelDenied { .. } => Face::absent("model_not_found").param("model"),
        ProxyError::NoPeer(stage) => {
            let code = match stage {
                Stage::Prefill => "no_prefill",
                Stage::Decode => "no_decode",
            };
            Face::new(StatusCode::SERVICE_UNAVAILABLE, Class::Unavailable, code).retry()
        }
        ProxyError::Busy(busy) => busy_face(busy),
        ProxyError::NoCompatiblePair => {
            Face::new(StatusCode::SERVICE_UNAVAILABLE, Class::Unavailable, "no_compatible_pair").retry()
        }
        ProxyError::ShuttingDown => {
            Face::new(StatusCode::SERVICE_UNAVAILABLE, Class::Unavailable, "shutting_down").retry()
        }
        ProxyError::Upstream(failure) => upstream_face(failure),
        ProxyError::PrefillFailed(status) => {
            let message = format!("the prefill engine failed with status {status}");
            Face::upstream(StatusCode::BAD_GATEWAY, "prefill_failed", message)
        }
        ProxyError::HandOff(refusal) => {
            let (code, what) = match refusal {
                HandOffRefusal::Missing => ("no_hand_off", "no KV hand-off"),
                HandOffRefusal::Expiring => ("hand_off_expired", "a KV hand-off whose lease is about to end"),
                _ => ("bad_hand_off", "an unusable KV hand-off"),
            };
            Face::upstream(StatusCode::BAD_GATEWAY, code, format!("the prefill engine returned {what}"))
        }
    }
}

fn registry_face(error: &RegistryError) -> Face {
    match error {
        RegistryError::Malformed { .. } => Face::invalid("malformed_payload"),
        RegistryError::EngineMismatch { .. } => {
            Face::new(StatusCode::CONFLICT, Class::InvalidRequest, "engine_id_mismatch").param("engine_id")
        }
        RegistryError::TooLarge { .. } => {
            Face::new(StatusCode::PAYLOAD_TOO_LARGE, Class::InvalidRequest, "body_too_large")
        }
        RegistryError::Invalid { field, .. } => Face::invalid("invalid_registration").param(*field),
        RegistryError::NotOwner { .. } => {
            Face::new(StatusCode::FORBIDDEN, Class::Permission, "not_owner").param("engine_id")
        }
        RegistryError::ModelNotAllowed { .. } => {
            Face::new(StatusCode::FORBIDDEN, Class::Permission, "model_not_allowed").param("model")
        }
        RegistryError::UnknownEngine { .. } => Face::absent("unknown_engine").param("engine_id"),
        RegistryError::TooManyWatchers { .. } => {
            Face::new(StatusCode::SERVICE_UNAVAILABLE, Class::Unavailable, "too_many_watchers").retry()
        }
        RegistryError::Full => {
            Face::new(StatusCode::INSUFFICIENT_STORAGE, Class::Unavailable, "registry_full")
        }
    }
}

fn peer_spec_face(error: &PeerSpecError) -> Face {
    match error {
        PeerSpecError::Url { .. } | PeerSpecError::Scheme { .. } => {
            Face::invalid("invalid_peer").param("url")
        }
        PeerSpecError::Token => Face::invalid("invalid_peer").param("token"),
        PeerSpecError::SideChannel => Face::invalid("invalid_peer").param("kv_host"),
        PeerSpecError::SideChannelAddress => Face::invalid("invalid_peer").param("side_channel"),
        PeerSpecError::Size => Face::invalid("invalid_peer").param("tp_size"),
        PeerSpecError::Lease => Face::invalid("invalid_peer").param("lease"),
        PeerSpecError::Ranks => Face::invalid("invalid_peer").param("dp_rank"),
        PeerSpecError::Notify => Face::invalid("invalid_peer").param("notify"),
        PeerSpecError::NixlVersion { .. } => Face::invalid("invalid_peer").param("nixl_version"),
        PeerSpecError::Name { .. } => Face::invalid("invalid_peer").param("name"),
        PeerSpecError::Exists { .. } => Face::new(StatusCode::CONFLICT, Class::InvalidRequest, "peer_exists"),
    }
}

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
    let class = face.class.name();
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

impl IntoResponse for RouteError {
    fn into_response(self) -> Response {
        let face = self.face();
        let status = face.status;
        // A loop is told once, by the probes of the peer that leads back here.
        if status.is_server_error() && !matches!(self, Self::Loop) {
            tracing::warn!(status = status.as_u16(), code = face.code, error = %self, "request failed");
        } else {
            tracing::debug!(status = status.as_u16(), code = face.code, "request refused");
        }
        let error = ErrorObject {
            message: face.message.unwrap_or_else(|| self.to_string()),
            class: face.class.name(),
            param: face.param,
            code: face.code,
        };
        let mut response = (status, Json(ErrorBody { error })).into_response();
        if let Some(seconds) = face.retry {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use http_body_util::BodyExt;
    use kvbaton_proxy::{BadRequest, Broken, FieldProblem, Progress, Proxy, Settings, UpstreamFailure};
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;

    fn upstream(stage: Stage, broken: Broken) -> RouteError {
        ProxyError::Upstream(UpstreamFailure::new(stage, broken, Progress::Sent)).into()
    }

    fn bad_request(bad: BadRequest) -> RouteError {
        ProxyError::BadRequest(bad).into()
    }

    fn hand_off(refusal: HandOffRefusal) -> RouteError {
        ProxyError::HandOff(refusal).into()
    }

    fn from_the_core() -> Vec<(RouteError, u16, &'static str)> {
        let wrong_type = BadRequest::WrongType { field: "model", expected: "a string" };
        vec![
            (bad_request(BadRequest::Utf8 { offset: 3 }), 400, "invalid_utf8"),
            (bad_request(BadRequest::NotAnObject), 400, "invalid_json"),
            (bad_request(BadRequest::MissingModel), 400, "model_required"),
            (bad_request(wrong_type), 400, "invalid_type"),
            (
                bad_request(BadRequest::InjectedHandOff { place: "kv_transfer_params" }),
                400,
                "kv_transfer_params_not_allowed",
            ),
            (bad_request(BadRequest::TooManyEdits { limit: 1 }), 400, "too_many_repeated_fields"),
            (ProxyError::NoPeer(Stage::Prefill).into(), 503, "no_prefill"),
            (ProxyError::NoPeer(Stage::Decode).into(), 503, "no_decode"),
            (ProxyError::NoCompatiblePair.into(), 503, "no_compatible_pair"),
            (upstream(Stage::Decode, Broken::Connect), 502, "upstream_connect"),
            (upstream(Stage::Prefill, Broken::Reset), 502, "upstream_reset"),
            (upstream(Stage::Prefill, Broken::Timeout), 504, "upstream_timeout"),
            (upstream(Stage::Decode, Broken::Idle), 504, "upstream_idle"),
            (upstream(Stage::Decode, Broken::Total), 504, "upstream_total"),
            (upstream(Stage::Decode, Broken::NoRoom), 503, "no_room"),
            (ProxyError::ShuttingDown.into(), 503, "shutting_down"),
            (upstream(Stage::Decode, Broken::Protocol), 502, "upstream_protocol"),
            (upstream(Stage::Decode, Broken::TooLarge), 502, "upstream_too_large"),
            (ProxyError::PrefillFailed(500).into(), 502, "prefill_failed"),
            (hand_off(HandOffRefusal::Missing), 502, "no_hand_off"),
            (hand_off(HandOffRefusal::Garbage), 502, "bad_hand_off"),
            (hand_off(HandOffRefusal::TokenCount(Some(2))), 502, "bad_hand_off"),
            (hand_off(HandOffRefusal::Coverage { covered: 9, prompt: 8 }), 502, "bad_hand_off"),
            (hand_off(HandOffRefusal::NoPromptLogprobs), 502, "bad_hand_off"),
            (hand_off(HandOffRefusal::Expiring), 502, "hand_off_expired"),
        ]
    }

    fn from_operators(malformed: RegistryError) -> Vec<(RouteError, u16, &'static str)> {
        let text = String::new;
        vec![
            (malformed.into(), 400, "malformed_payload"),
            (RegistryError::EngineMismatch { found: text() }.into(), 409, "engine_id_mismatch"),
            (RegistryError::TooLarge { limit: 1 }.into(), 413, "body_too_large"),
            (RegistryError::Full.into(), 507, "registry_full"),
            (
                RegistryError::Invalid { field: "clock", problem: FieldProblem::NotFinite }.into(),
                400,
                "invalid_registration",
            ),
            (RegistryError::UnknownEngine { engine_id: text() }.into(), 404, "unknown_engine"),
            (RegistryError::TooManyWatchers { limit: 1 }.into(), 503, "too_many_watchers"),
            (RouteError::EngineNotReady { engine_id: text() }, 409, "engine_not_ready"),
            (PeerSpecError::Url { url: text() }.into(), 400, "invalid_peer"),
            (PeerSpecError::Scheme { url: text() }.into(), 400, "invalid_peer"),
            (PeerSpecError::Ranks.into(), 400, "invalid_peer"),
            (PeerSpecError::Token.into(), 400, "invalid_peer"),
            (PeerSpecError::Name { name: text() }.into(), 400, "invalid_peer"),
            (PeerSpecError::Exists { id: text() }.into(), 409, "peer_exists"),
            (RouteError::UnknownPeer { id: text() }, 404, "unknown_peer"),
            (RouteError::UnknownEngine { engine_id: text() }, 404, "unknown_engine"),
            (RouteError::UnknownRank { engine_id: text(), pp_rank: 0, tp_rank: 0 }, 404, "unknown_rank"),
            (RouteError::RankInvalid { name: "pp_rank" }, 400, "invalid_rank"),
            (RouteError::NotLocal(NotLocal::Address), 403, "not_local"),
            (RouteError::TokenMissing, 401, "token_required"),
            (RouteError::TokenWrong, 401, "token_wrong"),
            (RegistryError::NotOwner { engine_id: text() }.into(), 403, "not_owner"),
            (RegistryError::ModelNotAllowed { model: text() }.into(), 403, "model_not_allowed"),
        ]
    }

    fn from_the_surface() -> Vec<(RouteError, u16, &'static str)> {
        vec![
            (RouteError::UnknownPath, 404, "unknown_endpoint"),
            (RouteError::MethodNotAllowed, 405, "method_not_allowed"),
            (RouteError::BodyTooLarge { limit: 1 }, 413, "body_too_large"),
            (RouteError::NoRoom, 503, "no_room"),
            (RouteError::Refused { said: Bytes::new() }, 502, "engine_refused"),
            (RouteError::BodyTimeout, 408, "body_timeout"),
            (RouteError::BodyIncomplete, 400, "body_incomplete"),
            (RouteError::ContentEncoding, 415, "unsupported_content_encoding"),
            (RouteError::ContentType { expected: "x/y" }, 415, "unsupported_content_type"),
            (RouteError::Msgpack { path: None, what: String::new() }, 400, "invalid_msgpack"),
            (RouteError::Query { what: String::new() }, 400, "invalid_query"),
            (RouteError::PathNotUtf8, 400, "invalid_path"),
            (RouteError::KeyMissing, 401, "invalid_api_key"),
            (RouteError::KeyWrong, 401, "invalid_api_key"),
            (RouteError::Loop, 508, "loop_detected"),
            (RouteError::Ambiguous, 400, "ambiguous_request"),
            (ProxyError::ModelDenied { model: "m".into() }.into(), 404, "model_not_found"),
            (RouteError::UnknownModel { id: String::new() }, 404, "model_not_found"),
            (RouteError::Unexpected, 500, "internal_error"),
        ]
    }

    /// Every error that a client can see, with what it sees.
    fn every_error() -> Vec<(RouteError, u16, &'static str)> {
        let stop = CancellationToken::new();
        let proxy = Proxy::start(Settings::default(), TaskTracker::new(), stop.clone());
        let malformed = proxy.registry().put("e", 0, 0, Bytes::new()).unwrap_err();
        stop.cancel();
        [from_the_core(), from_operators(malformed), from_the_surface()].concat()
    }

    #[tokio::test]
    async fn each_error_has_its_status_and_code() {
        for (error, status, code) in every_error() {
            let response = error.clone().into_response();
            assert_eq!(response.status().as_u16(), status, "{error:?}");
            let must_wait = response.headers().contains_key(RETRY_AFTER);
            assert_eq!(must_wait, status == 503, "{error:?}");
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["error"]["code"], code, "{error:?}");
        }
    }

    #[tokio::test]
    async fn the_contract_names_exactly_the_codes_that_exist() {
        let contract: serde_json::Value = serde_yaml_ng::from_str(include_str!("../openapi.yaml")).unwrap();
        let member =
            |name: &str| format!("/components/schemas/Error/properties/error/properties/{name}/enum");
        let named: BTreeSet<&str> = contract
            .pointer(&member("code"))
            .unwrap()
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|code| code.as_str())
            .collect();
        let errors = every_error();
        let existing: BTreeSet<&str> = errors.iter().map(|(_, _, code)| *code).collect();
        assert_eq!(named, existing);
    }

    #[test]
    fn what_a_client_reads_of_an_engine_is_its_leg_and_no_more() {
        let face = upstream(Stage::Prefill, Broken::Connect).face();
        assert_eq!(face.message.as_deref(), Some("the prefill engine could not be reached"));
        let face = hand_off(HandOffRefusal::TokenCount(Some(7))).face();
        assert_eq!(face.message.as_deref(), Some("the prefill engine returned an unusable KV hand-off"));
    }
}
