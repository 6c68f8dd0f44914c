//! How each kind of error looks from outside: status, class, code, parameter.

use http::StatusCode;
use kvbaton_proxy::{
    BadRequest, Broken, HandOffRefusal, PeerSpecError, ProxyError, RegistryError, Stage, UpstreamFailure,
};

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
    pub(super) retry: bool,
}

impl Face {
    pub(super) fn new(status: StatusCode, class: Class, code: &'static str) -> Self {
        Self { status, class, code, param: None, message: None, retry: false }
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
        self.retry = true;
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

pub(super) fn bad_request_face(bad: &BadRequest) -> Face {
    let code = match bad {
        BadRequest::Utf8 { .. } => "invalid_utf8",
        BadRequest::Json { .. } | BadRequest::NotAnObject => "invalid_json",
        BadRequest::MissingModel => "model_required",
        BadRequest::WrongType { .. } => "invalid_type",
        BadRequest::InjectedHandOff { .. } => "kv_transfer_params_not_allowed",
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

pub(super) fn registry_face(error: &RegistryError) -> Face {
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

pub(super) fn peer_spec_face(error: &PeerSpecError) -> Face {
    match error {
        PeerSpecError::Url { .. } | PeerSpecError::Scheme { .. } => {
            Face::invalid("invalid_peer").param("url")
        }
        PeerSpecError::Token => Face::invalid("invalid_peer").param("token"),
        PeerSpecError::SideChannel => Face::invalid("invalid_peer").param("kv_host"),
        PeerSpecError::SideChannelAddress => Face::invalid("invalid_peer").param("side_channel"),
        PeerSpecError::Size => Face::invalid("invalid_peer").param("tp_size"),
        PeerSpecError::AbandonGrace => Face::invalid("invalid_peer").param("abandon_grace"),
        PeerSpecError::Lease => Face::invalid("invalid_peer").param("lease"),
        PeerSpecError::Ranks => Face::invalid("invalid_peer").param("dp_rank"),
        PeerSpecError::Notify => Face::invalid("invalid_peer").param("notify"),
        PeerSpecError::NixlVersion { .. } => Face::invalid("invalid_peer").param("nixl_version"),
        PeerSpecError::Name { .. } => Face::invalid("invalid_peer").param("name"),
        PeerSpecError::Exists { .. } => Face::new(StatusCode::CONFLICT, Class::InvalidRequest, "peer_exists"),
    }
}
