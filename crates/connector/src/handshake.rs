//! Handshakes over HTTP: engines register at kvbaton's registry and fetch each other's payloads.
//!
//! Bytes go through untouched; what they mean is for [`crate::worker`] to decide.

mod message;

use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use thiserror::Error;

pub use crate::fit::EngineTraits;
pub use message::{
    ClockEstimate, Echo, EngineRole, EngineState, Fetched, Heartbeat, RankPayload, Receipt, Registration,
};

use crate::worker::HandshakeFailure;

/// The media type of a payload.
pub const PAYLOAD_MEDIA_TYPE: &str = "application/msgpack";

/// Time for one exchange, from connecting to the last byte.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest payload that is read.
const MAX_PAYLOAD: usize = 16 << 20;

/// Longest receipt that is read.
const MAX_RECEIPT: usize = 64 << 10;

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
    /// The engine has not finished registering.
    #[error("the engine is still registering")]
    NotReady,
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
    /// An answer that is no receipt.
    #[error("the registry's answer cannot be read")]
    Garbled,
}

impl From<RegistryError> for HandshakeFailure {
    fn from(error: RegistryError) -> Self {
        match error {
            RegistryError::Unknown | RegistryError::NotReady => Self::UnknownEngine,
            RegistryError::Timeout => Self::Timeout,
            RegistryError::Unreachable => Self::Unreachable,
            RegistryError::BadRequest
            | RegistryError::Refused { .. }
            | RegistryError::TooLong
            | RegistryError::Garbled => Self::BadReply,
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

    /// Registers an engine with all its ranks, in place of what the registry knew of it.
    ///
    /// Dropping the future leaves it open whether the registry took the registration.
    ///
    /// # Errors
    /// Whatever kept the registry from confirming it within 5 seconds.
    pub async fn register(&self, registration: &Registration) -> Result<Receipt, RegistryError> {
        let request = self
            .request(Method::PUT, &registration.engine_id, "")
            .header(CONTENT_TYPE, PAYLOAD_MEDIA_TYPE)
            .body(registration.encode());
        read_receipt(send(request).await?).await
    }

    /// Gives a sign of life, which renews the lease.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] when the engine has to register again, else whatever kept the
    /// registry from confirming it within 5 seconds.
    pub async fn heartbeat(&self, engine_id: &str, heartbeat: &Heartbeat) -> Result<Receipt, RegistryError> {
        let request = self
            .request(Method::POST, engine_id, "/heartbeat")
            .header(CONTENT_TYPE, PAYLOAD_MEDIA_TYPE)
            .body(heartbeat.encode());
        read_receipt(send(request).await?).await
    }

    /// Leaves the registry. Dropping the future leaves it open whether the engine is still there.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] when the engine was not there, else whatever kept the registry
    /// from confirming it within 5 seconds.
    pub async fn deregister(&self, engine_id: &str) -> Result<(), RegistryError> {
        send(self.request(Method::DELETE, engine_id, "")).await.map(|_| ())
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
            .request(Method::PUT, engine_id, &rank(pp_rank, tp_rank))
            .header(CONTENT_TYPE, PAYLOAD_MEDIA_TYPE)
            .body(payload);
        send(request).await.map(|_| ())
    }

    /// The payload of one rank, byte for byte as it was published. Dropping the future is safe.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] at once when nothing was published, else what went wrong within
    /// 5 seconds.
    pub async fn fetch(&self, engine_id: &str, pp_rank: u32, tp_rank: u32) -> Result<Fetched, RegistryError> {
        let request =
            self.request(Method::GET, engine_id, &rank(pp_rank, tp_rank)).header(ACCEPT, PAYLOAD_MEDIA_TYPE);
        let response = send(request).await?;
        let clock = clock_estimate(response.headers());
        Ok(Fetched { payload: read(response, MAX_PAYLOAD).await?, clock })
    }

    fn request(&self, method: Method, engine_id: &str, rest: &str) -> RequestBuilder {
        let engine_id = utf8_percent_encode(engine_id, SEGMENT);
        let url = format!("{}/registry/v1/engines/{engine_id}{rest}", self.base_url);
        let request = self.http.request(method, url);
        match &self.authorization {
            Some(value) => request.header(reqwest::header::AUTHORIZATION, value.clone()),
            None => request,
        }
    }
}

fn rank(pp_rank: u32, tp_rank: u32) -> String {
    format!("/ranks/{pp_rank}/{tp_rank}")
}

fn clock_estimate(headers: &HeaderMap) -> Option<ClockEstimate> {
    let number = |name: &str| {
        let value: f64 = headers.get(name)?.to_str().ok()?.parse().ok()?;
        value.is_finite().then_some(value)
    };
    let error = number("kv-clock-error").filter(|error| *error >= 0.0);
    Some(ClockEstimate { seconds: number("kv-clock")?, error })
}

async fn read(mut response: Response, limit: usize) -> Result<Vec<u8>, RegistryError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(transport_error)? {
        if body.len() + chunk.len() > limit {
            return Err(RegistryError::TooLong);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

async fn read_receipt(response: Response) -> Result<Receipt, RegistryError> {
    let body = read(response, MAX_RECEIPT).await?;
    serde_json::from_slice(&body).map_err(|_| RegistryError::Garbled)
}

async fn send(request: RequestBuilder) -> Result<Response, RegistryError> {
    let (client, request) = request.build_split();
    let request = request.map_err(|_| RegistryError::BadRequest)?;
    // Of a registration a conflict says something else.
    let is_look_up = request.method() == Method::GET;
    let response = client.execute(request).await.map_err(transport_error)?;
    match response.status() {
        status if status.is_success() => Ok(response),
        StatusCode::NOT_FOUND => Err(RegistryError::Unknown),
        StatusCode::CONFLICT if is_look_up => Err(RegistryError::NotReady),
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
