//! The one place where errors become HTTP: status, OpenAI's error body, `Retry-After`.
//! Owns what the surface itself refuses; knows the core's errors and how clients see them.
//! Must never show an engine's address, nor turn an error into a response anywhere else.

pub(crate) mod anthropic;
mod event;
mod faces;
mod operators;

use axum::Json;
use axum::body::Bytes;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use kvbaton_proxy::{Account, PeerSpecError, ProxyError, RegistryError, TooManyViewers};
use serde::Serialize;

pub(crate) use event::event_of;
use faces::{Class, Face, no_room, proxy_face};
use operators::{peer_spec_face, registry_face, unavailable};

use crate::access::NotLocal;
use crate::log::LogFault;
use crate::reload::NotReloaded;

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
    #[error("the dashboard has no file `{name}`")]
    UnknownFile { name: String },
    #[error("nothing is known of a request `{id}` (any more)")]
    UnknownRequest { id: String },
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
    #[error("the settings of this program come from no place that could be read again")]
    NotReloadable,
    #[error(transparent)]
    NotReloaded(#[from] NotReloaded),
    #[error("the log of this program is not its own to change")]
    LogNotOurs,
    #[error(transparent)]
    Log(#[from] LogFault),
    #[error(transparent)]
    Proxy(#[from] ProxyError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Viewers(#[from] TooManyViewers),
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

/// OpenAI's error body.
#[derive(Serialize)]
struct ErrorBody {
    error: ErrorObject,
}

#[derive(Clone, Serialize)]
struct ErrorObject {
    message: String,
    #[serde(rename = "type")]
    class: &'static str,
    param: Option<String>,
    code: &'static str,
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
            Self::UnknownFile { .. } => Face::absent("unknown_file"),
            Self::UnknownRequest { .. } => Face::absent("unknown_request").param("id"),
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
            Self::NotReloadable => Face::new(StatusCode::CONFLICT, Class::InvalidRequest, "not_reloadable"),
            Self::LogNotOurs => Face::new(StatusCode::CONFLICT, Class::InvalidRequest, "log_not_adjustable"),
            Self::Log(_) => Face::invalid("invalid_log_level").param("level"),
            Self::NotReloaded(_) => Face::invalid("invalid_settings"),
            Self::Proxy(error) => proxy_face(error),
            Self::Registry(error) => registry_face(error),
            Self::Viewers(_) => unavailable("too_many_watchers"),
            Self::PeerSpec(error) => peer_spec_face(error),
            Self::Unexpected => Face::new(StatusCode::INTERNAL_SERVER_ERROR, Class::Server, "internal_error"),
        }
    }
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
        let mut response = (status, Json(ErrorBody { error: error.clone() })).into_response();
        // For those who say it in another dialect.
        response.extensions_mut().insert(error);
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
mod tests;
