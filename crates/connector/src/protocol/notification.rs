//! Messages that ride on transfers: completions and heartbeats.
//!
//! Texts are keyed by the prefill engine's request id, never by the decode engine's.

use thiserror::Error;

use super::params::Generation;

/// Prefix of a heartbeat.
pub const HEARTBEAT_PREFIX: &str = "HB:";

/// A parsed message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notification<'a> {
    /// One consumer has read the blocks of a request.
    Completion {
        /// The request at the engine that receives the message.
        request: &'a str,
        /// How many such messages make the request complete; unparsed until the request is known.
        consumers: &'a str,
    },
    /// Leases to renew.
    Heartbeat {
        /// Request ids joined by commas.
        requests: &'a str,
    },
}

/// A message that is none of the known kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NotificationError {
    /// The bytes are not UTF-8.
    #[error("a notification is not valid UTF-8")]
    NotUtf8,
    /// No colon separates request and count.
    #[error("a notification has no count")]
    NoCount,
    /// The count is not a decimal integer.
    #[error("the count of a notification is not an integer")]
    BadCount,
}

impl<'a> Notification<'a> {
    /// Parses the bytes a peer sent; v2 knows no heartbeats.
    ///
    /// # Errors
    /// Bytes that are not UTF-8 or have no count.
    pub fn parse(generation: Generation, bytes: &'a [u8]) -> Result<Self, NotificationError> {
        let text = std::str::from_utf8(bytes).map_err(|_| NotificationError::NotUtf8)?;
        if generation == Generation::V14
            && let Some(requests) = text.strip_prefix(HEARTBEAT_PREFIX)
        {
            return Ok(Self::Heartbeat { requests });
        }
        let (request, consumers) = text.rsplit_once(':').ok_or(NotificationError::NoCount)?;
        Ok(Self::Completion { request, consumers })
    }
}

/// Parses the count of a completion.
///
/// # Errors
/// Anything but an integer.
pub fn parse_consumers(text: &str) -> Result<i64, NotificationError> {
    text.trim().parse().map_err(|_| NotificationError::BadCount)
}

/// The message of one of `consumers` readers of `request`.
pub fn completion(request: &str, consumers: u32) -> Vec<u8> {
    format!("{request}:{consumers}").into_bytes()
}

/// The message that renews the leases of `requests`.
pub fn heartbeat<'a>(requests: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let mut message = String::from(HEARTBEAT_PREFIX);
    for (index, request) in requests.into_iter().enumerate() {
        if index > 0 {
            message.push(',');
        }
        message.push_str(request);
    }
    message.into_bytes()
}

#[cfg(test)]
mod tests;
