//! Why the registry did not do what it was asked, as data.

use kv_connector::protocol::msgpack::DecodeError;

/// Why a registration, a heartbeat or a watch was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// The outer message or the metadata inside it cannot be decoded.
    #[error("malformed {part}: {reason}")]
    Malformed {
        /// Which of the two layers.
        part: PayloadPart,
        /// What is wrong with it.
        reason: DecodeError,
    },
    /// The payload is another engine's.
    #[error("the payload belongs to engine {found:?}")]
    EngineMismatch {
        /// The engine id inside the metadata.
        found: String,
    },
    /// The payload exceeds the configured size.
    #[error("the payload is larger than {limit} bytes")]
    TooLarge {
        /// The limit in bytes.
        limit: usize,
    },
    /// A field of a registration or a heartbeat has a value that cannot be used.
    #[error("`{field}` {problem}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        problem: FieldProblem,
    },
    /// The registry holds as many engines, ranks or bytes as it may.
    #[error("the registry is full")]
    Full,
    /// No engine of this id is registered, or its time ran out: it has to register again.
    #[error("the engine `{engine_id}` is not registered")]
    UnknownEngine {
        /// The id.
        engine_id: String,
    },
    /// An engine that lives has the id, at another address.
    #[error("another engine has the id `{engine_id}`")]
    EngineIdTaken {
        /// The id.
        engine_id: String,
    },
    /// Another engine took the address while this one was registering.
    #[error("the engine `{holder}` has taken the address just now")]
    AddressTaken {
        /// Whose it is now.
        holder: String,
    },
    /// The store that routers share cannot be reached, so that no change can be made for all.
    #[error("the store cannot be reached")]
    StoreUnavailable,
    /// The store took nothing because others kept changing the same engine.
    #[error("others are changing the engine `{engine_id}`")]
    Contended {
        /// The id.
        engine_id: String,
    },
    /// The engine, or whoever is at its address, belongs to another credential.
    #[error("the engine `{engine_id}` belongs to another credential")]
    NotOwner {
        /// The id of the engine that is another's.
        engine_id: String,
    },
    /// The address is that of a peer that the settings or an operator named, and not for engines of
    /// this credential.
    #[error("the address {base_url} is a configured engine's and not for engines of this credential")]
    AddressReserved {
        /// The address.
        base_url: String,
    },
    /// The engine serves a model that its credential is not for.
    #[error("this credential is not for engines of the model `{model}`")]
    ModelNotAllowed {
        /// The model.
        model: String,
    },
    /// As many watchers as may are there.
    #[error("{limit} watchers are there already")]
    TooManyWatchers {
        /// The limit.
        limit: usize,
    },
}

/// What is wrong with a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldProblem {
    /// Nothing, or longer than names are.
    #[error("must have 1 to {limit} bytes")]
    Length {
        /// The longest, in bytes.
        limit: usize,
    },
    /// Not a base URL.
    #[error("must be a base URL of the form http://host:port")]
    Url,
    /// Outside of its range.
    #[error("must be a number of seconds from {least} to {most}")]
    Seconds {
        /// The least, in whole seconds rounded down.
        least: u64,
        /// The most.
        most: u64,
    },
    /// No count of anything.
    #[error("must be a whole number from 1 to {most}")]
    Count {
        /// The most.
        most: u32,
    },
    /// Not a finite number.
    #[error("must be a finite number")]
    NotFinite,
    /// The same rank twice.
    #[error("names the rank {pp_rank}/{tp_rank} twice")]
    RepeatedRank {
        /// Pipeline rank.
        pp_rank: u32,
        /// Tensor-parallel rank.
        tp_rank: u32,
    },
}

/// The two layers of a handshake payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadPart {
    /// `NixlHandshakePayload`
    Payload,
    /// `NixlAgentMetadata`
    Metadata,
}

impl std::fmt::Display for PayloadPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Payload => "NixlHandshakePayload",
            Self::Metadata => "NixlAgentMetadata",
        })
    }
}
