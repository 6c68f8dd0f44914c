//! Everything that can be wrong with a hand-off.

use thiserror::Error;

/// Why an object must not reach a decode engine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HandOffDefect {
    /// Not JSON, or more than one value.
    #[error("the hand-off is not JSON")]
    NotJson,
    /// The value null: the prefill engine did not hand off.
    #[error("the hand-off is null")]
    Null,
    /// Another value than an object.
    #[error("the hand-off is not an object")]
    NotAnObject,
    /// A required field is not there.
    #[error("the hand-off has no {field}")]
    Missing {
        /// The field.
        field: &'static str,
    },
    /// A required field is null.
    #[error("{field} of the hand-off is null")]
    NullField {
        /// The field.
        field: &'static str,
    },
    /// A field has a value of the wrong type.
    #[error("{field} of the hand-off is not {expected}")]
    WrongType {
        /// The field.
        field: &'static str,
        /// The type it should have.
        expected: &'static str,
    },
    /// A required text is empty.
    #[error("{field} of the hand-off is empty")]
    Empty {
        /// The field.
        field: &'static str,
    },
    /// A number that no engine of that size or address can have.
    #[error("{field} of the hand-off is out of range")]
    OutOfRange {
        /// The field.
        field: &'static str,
    },
    /// `do_remote_prefill` is false: the object does not ask for a transfer.
    #[error("do_remote_prefill of the hand-off is not true")]
    NotRemotePrefill,
    /// `do_remote_decode` is true: the decode engine would pin blocks of its own.
    #[error("do_remote_decode of the hand-off is true")]
    RemoteDecode,
    /// The list of block ids is empty.
    #[error("remote_block_ids of the hand-off is empty")]
    NoBlocks,
    /// There are cache groups, but none of them has a block.
    #[error("every group in remote_block_ids of the hand-off is empty")]
    AllGroupsEmpty,
    /// A block id is not an integer.
    #[error("a block id of the hand-off is not an integer")]
    BlockIdNotInteger,
    /// A block id is negative.
    #[error("a block id of the hand-off is negative")]
    BlockIdNegative,
    /// Block ids and lists of block ids stand side by side.
    #[error("remote_block_ids of the hand-off mixes numbers and lists")]
    BlockIdsMixed,
    /// `transfer_mode` is neither pull nor push.
    #[error("transfer_mode of the hand-off is unknown")]
    UnknownTransferMode,
}

impl HandOffDefect {
    /// A stable name for counters and logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotJson => "not_json",
            Self::Null => "null",
            Self::NotAnObject => "not_an_object",
            Self::Missing { .. } => "missing_field",
            Self::NullField { .. } => "null_field",
            Self::WrongType { .. } => "wrong_type",
            Self::Empty { .. } => "empty_field",
            Self::OutOfRange { .. } => "out_of_range",
            Self::NotRemotePrefill => "not_remote_prefill",
            Self::RemoteDecode => "remote_decode",
            Self::NoBlocks => "no_blocks",
            Self::AllGroupsEmpty => "all_groups_empty",
            Self::BlockIdNotInteger => "block_id_not_integer",
            Self::BlockIdNegative => "block_id_negative",
            Self::BlockIdsMixed => "block_ids_mixed",
            Self::UnknownTransferMode => "unknown_transfer_mode",
        }
    }
}
