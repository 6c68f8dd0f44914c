//! Handshakes over HTTP: publishing and fetching payloads at kvbaton's registry.
//!
//! Bytes go through untouched; what they mean is for [`crate::worker`] to decide.

use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use thiserror::Error;

use crate::worker::HandshakeFailure;

/// The media type of a payload.
pub const PAYLOAD_MEDIA_TYPE: &str = "application/msgpack";

/// Time for one exchange, from connecting to the last byte.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest payload that is read.
const MAX_PAYLOAD: usize = 16 << 20;

/// Everything but RFC 3986's unreserved characters.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Why the registry did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RegistryError {
    /// The base URL, the token or the engine id cannot be put into a request.
    #[error("the registry request cannot be built")]
    BadRequest,
    /// The engine or rank is not registered.
    #[error("the registry does not know the engine")]
    Unknown,
    /// The registry answered with an error.
    #[error("the registry refused with status {status}")]
    Refused {
        /// The HTTP status.
        status: u16,
    },
    /// No answer in time.
    #[error("the registry did not answer in time")]
    Timeout,
    /// No connection, or one that broke.
    #[error("the registry cannot be reached")]
    Unreachable,
    /// An answer longer than any payload.
    #[error("the registry's answer is too long")]
    TooLong,
}

impl From<RegistryError> for HandshakeFailure {
    fn from(error: RegistryError) -> Self {
        match error {
            RegistryError::Unknown => Self::UnknownEngine,
            RegistryError::Timeout => Self::Timeout,
            RegistryError::Unreachable => Self::Unreachable,
            RegistryError::BadRequest | RegistryError::Refused { .. } | RegistryError::TooLong => {
                Self::BadReply
            }
        }
    }
}

/// A client of one registry; clones share their connections.
#[derive(Debug, Clone)]
pub struct RegistryClient {
    http: Client,
    base_url: String,
    authorization: Option<HeaderValue>,
}

impl RegistryClient {
    /// A client of the registry at `base_url`, with a bearer token where one is needed.
    ///
    /// # Errors
    /// A token that no header can carry, or no HTTP client.
    pub fn new(base_url: impl Into<String>, token: Option<String>) -> Result<Self, RegistryError> {
        let authorization = token
            .map(|token| HeaderValue::try_from(format!("Bearer {token}")))
            .transpose()
            .map_err(|_| RegistryError::BadRequest)?
            .map(|mut value| {
                value.set_sensitive(true);
                value
            });
        // The environment's proxy settings are not for a library to follow.
        let http = Client::builder()
            .timeout(TOTAL_TIMEOUT)
            .no_proxy()
            .build()
            .map_err(|_| RegistryError::BadRequest)?;
        let base_url = base_url.into().trim_end_matches('/').to_owned();
        Ok(Self { http, base_url, authorization })
    }

    /// Publishes the payload of one rank, replacing an earlier one.
    ///
    /// Dropping the future leaves it open whether the registry took the payload.
    ///
    /// # Errors
    /// Whatever kept the registry from confirming it within 5 seconds.
    pub async fn publish(
        &self,
        engine_id: &str,
        pp_rank: u32,
        tp_rank: u32,
        payload: Vec<u8>,
    ) -> Result<(), RegistryError> {
        let request = self
            .request(Method::PUT, engine_id, pp_rank, tp_rank)
            .header(CONTENT_TYPE, PAYLOAD_MEDIA_TYPE)
            .body(payload);
        send(request).await.map(|_| ())
    }

    /// The payload of one rank, byte for byte as it was published. Dropping the future is safe.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] at once when nothing was published, else what went wrong within
    /// 5 seconds.
    pub async fn fetch(&self, engine_id: &str, pp_rank: u32, tp_rank: u32) -> Result<Vec<u8>, RegistryError> {
        let request =
            self.request(Method::GET, engine_id, pp_rank, tp_rank).header(ACCEPT, PAYLOAD_MEDIA_TYPE);
        let mut response = send(request).await?;
        let mut payload = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(transport_error)? {
            if payload.len() + chunk.len() > MAX_PAYLOAD {
                return Err(RegistryError::TooLong);
            }
            payload.extend_from_slice(&chunk);
        }
        Ok(payload)
    }

    fn request(&self, method: Method, engine_id: &str, pp_rank: u32, tp_rank: u32) -> RequestBuilder {
        let engine_id = utf8_percent_encode(engine_id, SEGMENT);
        let url = format!("{}/registry/v1/engines/{engine_id}/ranks/{pp_rank}/{tp_rank}", self.base_url);
        let request = self.http.request(method, url);
        match &self.authorization {
            Some(value) => request.header(reqwest::header::AUTHORIZATION, value.clone()),
            None => request,
        }
    }
}

async fn send(request: RequestBuilder) -> Result<Response, RegistryError> {
    let response = request.send().await.map_err(transport_error)?;
    match response.status() {
        status if status.is_success() => Ok(response),
        StatusCode::NOT_FOUND => Err(RegistryError::Unknown),
        status => Err(RegistryError::Refused { status: status.as_u16() }),
    }
}

fn transport_error(error: reqwest::Error) -> RegistryError {
    if error.is_timeout() {
        RegistryError::Timeout
    } else if error.is_builder() {
        RegistryError::BadRequest
    } else {
        RegistryError::Unreachable
    }
}

#[cfg(test)]
mod tests;
