//! How a request's own faults, limits on requests and broken exchanges look from outside.

use http::StatusCode;
use kvbaton_proxy::{BadRequest, Broken, Busy, BusyReason, BusyScope, Stage, UpstreamFailure};

use super::{Class, Face, RETRY_SECONDS};

/// The longest time after which a client is told to try again, in seconds.
const LONGEST_RETRY: u64 = 3600;

pub(super) fn busy_face(busy: &Busy) -> Face {
    let code = match (busy.reason, busy.scope) {
        (BusyReason::Rate, _) => "rate_limit_exceeded",
        (BusyReason::Late, _) => "queue_timeout",
        (BusyReason::Full, BusyScope::Stage(Stage::Prefill)) => "prefill_saturated",
        (BusyReason::Full, BusyScope::Stage(Stage::Decode)) => "decode_saturated",
        (BusyReason::Full, BusyScope::Model) => "model_saturated",
        (BusyReason::Full, BusyScope::Key) => "key_saturated",
    };
    // A whole number of seconds, never too early.
    let seconds = (busy.after.as_secs_f64().ceil() as u64).clamp(RETRY_SECONDS, LONGEST_RETRY);
    Face { retry: Some(seconds), ..Face::new(StatusCode::TOO_MANY_REQUESTS, Class::RateLimit, code) }
}

pub(super) fn bad_request_face(bad: &BadRequest) -> Face {
    let code = match bad {
        BadRequest::Utf8 { .. } => "invalid_utf8",
        BadRequest::Json { .. } | BadRequest::NotAnObject => "invalid_json",
        BadRequest::MissingModel => "model_required",
        BadRequest::WrongType { .. } => "invalid_type",
        BadRequest::InjectedHandOff { .. } => "kv_transfer_params_not_allowed",
        BadRequest::TooManyTokens { .. } => "max_tokens_too_large",
        BadRequest::PromptTooLarge { .. } => "prompt_too_large",
        BadRequest::Priority => "invalid_priority",
        BadRequest::TooManyEdits { .. } => "too_many_repeated_fields",
    };
    Face { param: bad.param().map(str::to_owned), ..Face::invalid(code) }
}

pub(super) fn upstream_face(failure: &UpstreamFailure) -> Face {
    let (status, code, what) = match failure.broken {
        Broken::Connect => (StatusCode::BAD_GATEWAY, "upstream_connect", "could not be reached"),
        Broken::Reset => (StatusCode::BAD_GATEWAY, "upstream_reset", "ended the connection early"),
        Broken::Timeout => (StatusCode::GATEWAY_TIMEOUT, "upstream_timeout", "did not answer in time"),
        Broken::Idle => (StatusCode::GATEWAY_TIMEOUT, "upstream_idle", "stopped sending"),
        Broken::Total => (StatusCode::GATEWAY_TIMEOUT, "upstream_total", "took longer than allowed"),
        Broken::NoRoom => return no_room(),
        Broken::Protocol => (StatusCode::BAD_GATEWAY, "upstream_protocol", "did not answer in HTTP"),
        Broken::TooLarge => (StatusCode::BAD_GATEWAY, "upstream_too_large", "answered more than can be held"),
    };
    Face::upstream(status, code, format!("the {} engine {what}", failure.stage.label()))
}

pub(super) fn no_room() -> Face {
    Face::new(StatusCode::SERVICE_UNAVAILABLE, Class::Unavailable, "no_room").retry()
}
