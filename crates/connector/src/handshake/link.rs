//! One exchange after the other with the registry, over connections that are kept: in plain or TLS,
//! each with a deadline and a bound on what is read. Knows nothing of engines.

use std::error::Error as StdError;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::RegistryError;
use super::tls::RegistryTls;

/// Time for one exchange, from connecting to the last byte.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection is kept without use.
const KEEP: Duration = Duration::from_secs(90);

/// A way to one registry; clones share its connections.
#[derive(Clone, Debug)]
pub(super) struct Link {
    http: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

/// An answer that says yes.
pub(super) struct Answer {
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

impl Link {
    /// # Errors
    /// A certificate or key cannot be used.
    pub(super) fn new(tls: &RegistryTls) -> Result<Self, RegistryError> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let https = HttpsConnectorBuilder::new().with_tls_config(tls.config()?).https_or_http();
        let connector = https.enable_http1().wrap_connector(tcp);
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_idle_timeout(KEEP).pool_timer(TokioTimer::new());
        Ok(Self { http: builder.build(connector) })
    }

    /// Sends a request and reads the whole answer.
    ///
    /// # Errors
    /// No answer within the deadline, one that is longer than `limit`, or one that says no.
    pub(super) async fn exchange(
        &self,
        request: Request<Full<Bytes>>,
        limit: usize,
    ) -> Result<Answer, RegistryError> {
        let exchange = self.exchange_in_its_time(request, limit);
        tokio::time::timeout(TOTAL_TIMEOUT, exchange).await.unwrap_or(Err(RegistryError::Timeout))
    }

    async fn exchange_in_its_time(
        &self,
        request: Request<Full<Bytes>>,
        limit: usize,
    ) -> Result<Answer, RegistryError> {
        // Of a registration a conflict says something else.
        let is_look_up = request.method() == Method::GET;
        let response = self.http.request(request).await.map_err(|error| fault(&error))?;
        let (head, body) = response.into_parts();
        match head.status {
            status if status.is_success() => {}
            StatusCode::NOT_FOUND => return Err(RegistryError::Unknown),
            StatusCode::CONFLICT if is_look_up => return Err(RegistryError::NotReady),
            status => return Err(RegistryError::Refused { status: status.as_u16() }),
        }
        Ok(Answer { headers: head.headers, body: read(body, limit).await? })
    }
}

async fn read(mut body: Incoming, limit: usize) -> Result<Vec<u8>, RegistryError> {
    let mut all = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| fault(&error))?.into_data() else { continue };
        if all.len() + data.len() > limit {
            return Err(RegistryError::TooLong);
        }
        all.extend_from_slice(&data);
    }
    Ok(all)
}

/// What TLS has to say of a failure, wherever in its causes; else there is no connection.
fn fault(error: &(dyn StdError + 'static)) -> RegistryError {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(tls) = error.downcast_ref::<rustls::Error>() {
            return match tls {
                rustls::Error::InvalidCertificate(_) => RegistryError::Untrusted,
                rustls::Error::AlertReceived(_) => RegistryError::NotLetIn,
                _ => RegistryError::NoTls,
            };
        }
        // An I/O error passes over what it holds when it is asked for its source.
        let held = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = match held {
            Some(held) => Some(held),
            None => error.source(),
        };
    }
    RegistryError::Unreachable
}
