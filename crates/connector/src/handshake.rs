//! Handshakes over HTTP: engines register at kvbaton's registry and fetch each other's payloads.
//!
//! Bytes go through untouched; what they mean is for [`crate::worker`] to decide.

mod link;
mod message;
mod tls;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Request, request};
use http_body_util::Full;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use thiserror::Error;

pub use crate::fit::EngineTraits;
pub use message::{
    ClockEstimate, Echo, EngineRole, EngineState, Fetched, Heartbeat, RankPayload, Receipt, Registration,
};
pub use tls::{ClientIdentity, RegistryTls};

use crate::worker::HandshakeFailure;
use link::{Answer, Link};

/// The media type of a payload.
pub const PAYLOAD_MEDIA_TYPE: &str = "application/msgpack";

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
    /// Nobody trusted has signed the registry's certificate, or it is another host's.
    #[error("the registry's certificate is not trusted")]
    Untrusted,
    /// The registry has broken off the TLS handshake: it wants another certificate, or one at all.
    #[error("the registry does not take this client's certificate, or wants one")]
    NotLetIn,
    /// What answers there does not speak TLS as it should.
    #[error("the registry does not speak TLS")]
    NoTls,
    /// A certificate or key of the client's own cannot be used.
    #[error("the {what} for TLS cannot be used")]
    Certificates {
        /// Which one.
        what: &'static str,
    },
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
            RegistryError::Unreachable
            | RegistryError::Untrusted
            | RegistryError::NotLetIn
            | RegistryError::NoTls => Self::Unreachable,
            RegistryError::BadRequest
            | RegistryError::Certificates { .. }
            | RegistryError::Refused { .. }
            | RegistryError::TooLong
            | RegistryError::Garbled => Self::BadReply,
        }
    }
}

/// A client of one registry; clones share their connections.
#[derive(Debug, Clone)]
pub struct RegistryClient {
    link: Link,
    base_url: String,
    authorization: Option<HeaderValue>,
}

impl RegistryClient {
    /// A client of the registry at `base_url`, with a bearer token where one is needed. One with an
    /// `https://` URL must have a certificate of a public authority.
    ///
    /// # Errors
    /// A token that no header can carry.
    pub fn new(base_url: impl Into<String>, token: Option<String>) -> Result<Self, RegistryError> {
        Self::with_tls(base_url, token, &RegistryTls::default())
    }

    /// As [`RegistryClient::new`] with authorities and a certificate of one's own.
    ///
    /// # Errors
    /// A token that no header can carry, or certificates that cannot be used.
    pub fn with_tls(
        base_url: impl Into<String>,
        token: Option<String>,
        tls: &RegistryTls,
    ) -> Result<Self, RegistryError> {
        let authorization = token
            .map(|token| HeaderValue::try_from(format!("Bearer {token}")))
            .transpose()
            .map_err(|_| RegistryError::BadRequest)?
            .map(|mut value| {
                value.set_sensitive(true);
                value
            });
        let base_url = base_url.into().trim_end_matches('/').to_owned();
        Ok(Self { link: Link::new(tls)?, base_url, authorization })
    }

    /// Registers an engine with all its ranks, in place of what the registry knew of it.
    ///
    /// Dropping the future leaves it open whether the registry took the registration.
    ///
    /// # Errors
    /// Whatever kept the registry from confirming it within 5 seconds.
    pub async fn register(&self, registration: &Registration) -> Result<Receipt, RegistryError> {
        let request =
            self.request(Method::PUT, &registration.engine_id, "").header(CONTENT_TYPE, PAYLOAD_MEDIA_TYPE);
        read_receipt(&self.send(request, registration.encode(), MAX_RECEIPT).await?)
    }

    /// Gives a sign of life, which renews the lease.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] when the engine has to register again, else whatever kept the
    /// registry from confirming it within 5 seconds.
    pub async fn heartbeat(&self, engine_id: &str, heartbeat: &Heartbeat) -> Result<Receipt, RegistryError> {
        let request =
            self.request(Method::POST, engine_id, "/heartbeat").header(CONTENT_TYPE, PAYLOAD_MEDIA_TYPE);
        read_receipt(&self.send(request, heartbeat.encode(), MAX_RECEIPT).await?)
    }

    /// Leaves the registry. Dropping the future leaves it open whether the engine is still there.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] when the engine was not there, else whatever kept the registry
    /// from confirming it within 5 seconds.
    pub async fn deregister(&self, engine_id: &str) -> Result<(), RegistryError> {
        let request = self.request(Method::DELETE, engine_id, "");
        self.send(request, Vec::new(), MAX_RECEIPT).await.map(|_| ())
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
            .header(CONTENT_TYPE, PAYLOAD_MEDIA_TYPE);
        self.send(request, payload, MAX_RECEIPT).await.map(|_| ())
    }

    /// The payload of one rank, byte for byte as it was published. Dropping the future is safe.
    ///
    /// # Errors
    /// [`RegistryError::Unknown`] at once when nothing was published, else what went wrong within
    /// 5 seconds.
    pub async fn fetch(&self, engine_id: &str, pp_rank: u32, tp_rank: u32) -> Result<Fetched, RegistryError> {
        let request =
            self.request(Method::GET, engine_id, &rank(pp_rank, tp_rank)).header(ACCEPT, PAYLOAD_MEDIA_TYPE);
        let Answer { headers, body } = self.send(request, Vec::new(), MAX_PAYLOAD).await?;
        Ok(Fetched { clock: clock_estimate(&headers), payload: body })
    }

    fn request(&self, method: Method, engine_id: &str, rest: &str) -> request::Builder {
        let engine_id = utf8_percent_encode(engine_id, SEGMENT);
        let url = format!("{}/registry/v1/engines/{engine_id}{rest}", self.base_url);
        let request = Request::builder().method(method).uri(url);
        match &self.authorization {
            Some(value) => request.header(AUTHORIZATION, value.clone()),
            None => request,
        }
    }

    async fn send(
        &self,
        request: request::Builder,
        body: Vec<u8>,
        limit: usize,
    ) -> Result<Answer, RegistryError> {
        let request = request.body(Full::new(Bytes::from(body))).map_err(|_| RegistryError::BadRequest)?;
        // Without a host there is nobody to ask.
        if request.uri().scheme().is_none() || request.uri().host().is_none() {
            return Err(RegistryError::BadRequest);
        }
        self.link.exchange(request, limit).await
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

fn read_receipt(answer: &Answer) -> Result<Receipt, RegistryError> {
    serde_json::from_slice(&answer.body).map_err(|_| RegistryError::Garbled)
}

#[cfg(test)]
mod tests;
