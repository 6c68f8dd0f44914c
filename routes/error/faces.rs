//! How each kind of error looks from outside: status, class, code, parameter.

use http::StatusCode;
use kvbaton_proxy::{
    BadRequest, Broken, Busy, BusyReason, BusyScope, HandOffRefusal, ProxyError, Stage, UpstreamFailure,
};

/// Seconds after which a fleet without a ready engine is worth another try: about one probe.
const RETRY_SECONDS: u64 = 1;

/// The longest time after which a client is told to try again, in seconds.
const LONGEST_RETRY: u64 = 3600;

/// OpenAI's classes of errors, as far as this surface needs them.
#[derive(Clone, Copy)]
pub(super) enum Class {
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
    pub(super) const fn name(self) -> &'static str {
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

/// How one error looks from outside.
pub(super) struct Face {
    pub(super) status: StatusCode,
    pub(super) class: Class,
    pub(super) code: &'static str,
    pub(super) param: Option<String>,
    /// Replaces the error's own text where that one is for the log.
    pub(super) message: Option<String>,
    /// Seconds after which another try may succeed.
    pub(super) retry: Option<u64>,
}

impl Face {
    pub(super) fn new(status: StatusCode, class: Class, code: &'static str) -> Self {
        Self { status, class, code, param: None, message: None, retry: None }
    }

    pub(super) fn invalid(code: &'static str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Class::InvalidRequest, code)
    }

    pub(super) fn absent(code: &'static str) -> Self {
        Self::new(StatusCode::NOT_FOUND, Class::NotFound, code)
    }

    pub(super) fn upstream(status: StatusCode, code: &'static str, message: String) -> Self {
        Self { message: Some(message), ..Self::new(status, Class::Upstream, code) }
    }

    pub(super) fn param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    pub(super) fn retry(mut self) -> Self {
        self.retry = Some(RETRY_SECONDS);
        self
    }
}

pub(super) fn no_room() -> Face {
    Face::new(StatusCode::SERVICE_UNAVAILABLE, Class::Unavailable, "no_room").retry()
}

pub(super) fn proxy_face(error: &ProxyError) -> Face {
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
                _ => ("bad_handoff", "an unusable KV hand-off"),
            };
            Face::upstream(StatusCode::BAD_GATEWAY, code, format!("the prefill engine returned {what}"))
        }
    }
}

fn busy_face(busy: &Busy) -> Face {
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
