//! How the errors of engines and operators look: of the registry, and of peers that are described.

use http::StatusCode;
use kvbaton_proxy::{PeerSpecError, RegistryError};

use super::{Class, Face};

pub(super) fn registry_face(error: &RegistryError) -> Face {
    let conflict =
        |code, param: &'static str| Face::new(StatusCode::CONFLICT, Class::InvalidRequest, code).param(param);
    let forbidden =
        |code, param: &'static str| Face::new(StatusCode::FORBIDDEN, Class::Permission, code).param(param);
    let unavailable = |code| Face::new(StatusCode::SERVICE_UNAVAILABLE, Class::Unavailable, code).retry();
    match error {
        RegistryError::Malformed { .. } => Face::invalid("malformed_payload"),
        RegistryError::EngineMismatch { .. } => conflict("engine_id_mismatch", "engine_id"),
        RegistryError::TooLarge { .. } => {
            Face::new(StatusCode::PAYLOAD_TOO_LARGE, Class::InvalidRequest, "body_too_large")
        }
        RegistryError::Invalid { field, .. } => Face::invalid("invalid_registration").param(*field),
        RegistryError::EngineIdTaken { .. } => conflict("engine_id_taken", "engine_id"),
        RegistryError::AddressTaken { .. } => conflict("address_taken", "base_url"),
        RegistryError::Contended { .. } => conflict("registration_contended", "engine_id"),
        RegistryError::StoreUnavailable => unavailable("store_unavailable"),
        RegistryError::NotOwner { .. } => forbidden("not_owner", "engine_id"),
        RegistryError::ModelNotAllowed { .. } => forbidden("model_not_allowed", "model"),
        RegistryError::UnknownEngine { .. } => Face::absent("unknown_engine").param("engine_id"),
        RegistryError::TooManyWatchers { .. } => unavailable("too_many_watchers"),
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
