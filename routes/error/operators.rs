//! How the errors of engines and operators look: of the registry, and of peers that are described.

use http::StatusCode;
use kvbaton_proxy::{PeerSpecError, RegistryError};

use super::faces::{Class, Face};

/// Another try may succeed.
pub(super) fn unavailable(code: &'static str) -> Face {
    Face::new(StatusCode::SERVICE_UNAVAILABLE, Class::Unavailable, code).retry()
}

pub(super) fn registry_face(error: &RegistryError) -> Face {
    let conflict =
        |code, param: &'static str| Face::new(StatusCode::CONFLICT, Class::InvalidRequest, code).param(param);
    let forbidden =
        |code, param: &'static str| Face::new(StatusCode::FORBIDDEN, Class::Permission, code).param(param);
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
        RegistryError::AddressReserved { .. } => forbidden("address_reserved", "base_url"),
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
        PeerSpecError::KvEvents => Face::invalid("invalid_peer").param("kv_events"),
        PeerSpecError::Size => Face::invalid("invalid_peer").param("tp_size"),
        PeerSpecError::Lease => Face::invalid("invalid_peer").param("lease"),
        PeerSpecError::AbandonGrace => Face::invalid("invalid_peer").param("abandon_grace"),
        PeerSpecError::Ranks => Face::invalid("invalid_peer").param("dp_rank"),
        PeerSpecError::Notify => Face::invalid("invalid_peer").param("notify"),
        PeerSpecError::NixlVersion { .. } => Face::invalid("invalid_peer").param("nixl_version"),
        PeerSpecError::Name { .. } => Face::invalid("invalid_peer").param("name"),
        PeerSpecError::Exists { .. } => Face::new(StatusCode::CONFLICT, Class::InvalidRequest, "peer_exists"),
    }
}
