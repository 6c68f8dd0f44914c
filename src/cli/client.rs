//! The operators' endpoints of a running router, as subcommands ask them. Decides nothing, and never shows a
//! credential.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::de::DeserializeOwned;
use serde_json::Value;
use url::Url;

use super::fault::CliError;

/// Longest wait for a connection, and for an answer that waits for nothing itself.
const CONNECT: Duration = Duration::from_secs(5);
pub(super) const ANSWER: Duration = Duration::from_secs(30);

/// Largest answer: that of a fleet of thousands.
const LARGEST: usize = 256 << 20;

/// Silence in the stream of the fleet that is taken for its end; comments come every 15 s.
const SILENCE: Duration = Duration::from_secs(40);

/// The variable with a token for who wants no file.
const TOKEN: &str = "OPERATOR_TOKEN";

/// Which router is asked, and as whom.
#[derive(Debug, Args)]
pub(super) struct Connection {
    /// Base URL of the router's operators' endpoints.
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "OPERATOR_ROUTER",
        default_value = "http://127.0.0.1:8000"
    )]
    router: Url,
    #[command(flatten)]
    with: Credentials,
}

impl Connection {
    pub(super) fn open(&self) -> Result<Operators, CliError> {
        Operators::new(&self.router, &self.with)
    }
}

/// As whom a router is asked.
#[derive(Debug, Args)]
pub(super) struct Credentials {
    /// A file with the operator's token; the variable OPERATOR_TOKEN may hold it instead.
    #[arg(long, global = true, value_name = "FILE", env = "OPERATOR_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// The authorities (PEM) that are trusted with an https:// router [default: the public ones].
    #[arg(long, global = true, value_name = "FILE", env = "OPERATOR_CA")]
    ca: Option<PathBuf>,
    /// A certificate (PEM) for a router that asks for one.
    #[arg(long, global = true, value_name = "FILE", env = "OPERATOR_CERT")]
    cert: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, global = true, value_name = "FILE", env = "OPERATOR_KEY")]
    key: Option<PathBuf>,
}

impl Credentials {
    fn authorization(&self) -> Result<Option<HeaderValue>, CliError> {
        let (token, path) = match &self.token_file {
            Some(path) => (read(path)?, path.clone()),
            None => match std::env::var(TOKEN) {
                Ok(token) => (token.into_bytes(), PathBuf::from(TOKEN)),
                Err(_) => return Ok(None),
            },
        };
        let unusable = || CliError::Unusable { path: path.clone(), what: "a token" };
        let token = token
            .split(|byte| *byte == b'\n')
            .map(<[u8]>::trim_ascii)
            .find(|line| !line.is_empty() && !line.starts_with(b"#"));
        let value = [b"Bearer ", token.ok_or_else(unusable)?].concat();
        let mut value = HeaderValue::from_bytes(&value).map_err(|_| unusable())?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    fn tls(&self) -> Result<rustls::ClientConfig, CliError> {
        let mut roots = rustls::RootCertStore::empty();
        match &self.ca {
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
            Some(path) => {
                for certificate in certificates(path)? {
                    roots.add(certificate)?;
                }
            }
        }
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let builder =
            rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let builder = builder.with_root_certificates(roots);
        match (&self.cert, &self.key) {
            (Some(cert), Some(path)) => {
                let key = PrivateKeyDer::from_pem_slice(&read(path)?);
                let key =
                    key.map_err(|_| CliError::Unusable { path: path.clone(), what: "a private key in PEM" })?;
                Ok(builder.with_client_auth_cert(certificates(cert)?, key)?)
            }
            (None, None) => Ok(builder.with_no_client_auth()),
            _ => Err(CliError::Usage { option: "--cert", why: "goes together with --key" }),
        }
    }
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    std::fs::read(path).map_err(|source| CliError::File { path: path.to_owned(), source })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CliError> {
    let text = read(path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let all = all.ok().filter(|all| !all.is_empty());
    all.ok_or_else(|| CliError::Unusable { path: path.to_owned(), what: "certificates in PEM" })
}

/// What broke on the way to a router.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientFault {
    #[error("no answer in time")]
    Late,
    #[error("{}", innermost(.0))]
    Http(hyper_util::client::legacy::Error),
    #[error("the answer broke off")]
    BrokenOff,
    #[error("the answer is too large")]
    TooLarge,
}

/// The last cause tells most: outer ones say `client error`.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// What is asked.
pub(super) struct Question<'a> {
    pub(super) method: Method,
    /// The path's segments, not encoded.
    pub(super) path: Vec<&'a str>,
    pub(super) query: Option<(&'a str, String)>,
    pub(super) body: Option<Value>,
    /// How long the answer may take.
    pub(super) within: Duration,
}

impl<'a> Question<'a> {
    pub(super) fn new(method: Method, path: &[&'a str]) -> Self {
        Self { method, path: path.to_vec(), query: None, body: None, within: ANSWER }
    }
}

/// A running router, as an operator sees it.
pub(super) struct Operators {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    base: Url,
    authorization: Option<HeaderValue>,
}

impl Operators {
    pub(super) fn new(router: &Url, with: &Credentials) -> Result<Self, CliError> {
        if !matches!(router.scheme(), "http" | "https") || router.cannot_be_a_base() {
            return Err(CliError::Usage {
                option: "--router", why: "must be http://host:port or https://…"
            });
        }
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_connect_timeout(Some(CONNECT));
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(with.tls()?).https_or_http().enable_http1();
        let mut builder = Client::builder(TokioExecutor::new());
        let client = builder.pool_timer(TokioTimer::new()).build(connector.wrap_connector(http));
        Ok(Self { client, base: router.clone(), authorization: with.authorization()? })
    }

    /// The router's address without what may be secret in it.
    pub(super) fn name(&self) -> String {
        self.base.origin().ascii_serialization()
    }

    fn unreachable(&self, source: ClientFault) -> CliError {
        CliError::Unreachable { router: self.name(), source }
    }

    pub(super) fn read_as<T: DeserializeOwned>(&self, value: &Value) -> Result<T, CliError> {
        T::deserialize(value).map_err(|source| CliError::Strange { router: self.name(), source })
    }

    /// The JSON of a good answer.
    pub(super) async fn ask(&self, question: Question<'_>) -> Result<Value, CliError> {
        let within = question.within;
        let asked = tokio::time::timeout(within, async {
            let answer = self.send(question).await?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), LARGEST).collect().await;
            let body = body.map_err(|error| {
                let large = error.is::<LengthLimitError>();
                self.unreachable(if large { ClientFault::TooLarge } else { ClientFault::BrokenOff })
            })?;
            Ok::<_, CliError>((status, body.to_bytes()))
        });
        let (status, body) = asked.await.map_err(|_late| self.unreachable(ClientFault::Late))??;
        self.check(status, &body)?;
        let strange = |source| CliError::Strange { router: self.name(), source };
        serde_json::from_slice(&body).map_err(strange)
    }

    async fn send(&self, question: Question<'_>) -> Result<Response<Incoming>, CliError> {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(question.path);
        }
        if let Some((name, value)) = question.query {
            url.query_pairs_mut().append_pair(name, &value);
        }
        let body = question.body.map(|body| Bytes::from(body.to_string()));
        let mut request = Request::builder().method(question.method).uri(url.as_str());
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let unusable = |_| CliError::Usage { option: "--router", why: "is no address that can be asked" };
        let request = request.body(Full::new(body.unwrap_or_default())).map_err(unusable)?;
        self.client.request(request).await.map_err(|error| self.unreachable(ClientFault::Http(error)))
    }

    fn check(&self, status: StatusCode, body: &[u8]) -> Result<(), CliError> {
        if status.is_success() {
            return Ok(());
        }
        let said = serde_json::from_slice::<Value>(body).ok();
        let message = said.as_ref().and_then(|said| said["error"]["message"].as_str());
        let message = message.unwrap_or("no reason was given").to_owned();
        let router = self.name();
        Err(match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => CliError::Denied { router, status, message },
            _ => CliError::Refused { router, status, message },
        })
    }

    /// The fleet as it changes.
    pub(super) async fn events(&self) -> Result<Events, CliError> {
        let question = Question::new(Method::GET, &["admin", "events"]);
        let answer = tokio::time::timeout(question.within, self.send(question)).await;
        let answer = answer.map_err(|_late| self.unreachable(ClientFault::Late))??;
        let status = answer.status();
        if !status.is_success() {
            let body = Limited::new(answer.into_body(), LARGEST).collect().await;
            let body = body.map_err(|_| self.unreachable(ClientFault::BrokenOff))?;
            self.check(status, &body.to_bytes())?;
            return Err(self.unreachable(ClientFault::BrokenOff));
        }
        Ok(Events { body: answer.into_body(), held: Vec::new(), router: self.name() })
    }
}

/// Server-sent events of the fleet.
pub(super) struct Events {
    body: Incoming,
    held: Vec<u8>,
    router: String,
}

impl Events {
    /// The next event's data; dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Result<Value, CliError> {
        let broken = |source, router: &str| CliError::Unreachable { router: router.to_owned(), source };
        loop {
            while let Some(end) = self.held.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.held.drain(..end + 2).collect();
                let data = event.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data:"));
                if let Some(data) = data {
                    let strange = |source| CliError::Strange { router: self.router.clone(), source };
                    return serde_json::from_slice(data).map_err(strange);
                }
            }
            let frame = tokio::time::timeout(SILENCE, self.body.frame()).await;
            let frame = frame.map_err(|_late| broken(ClientFault::Late, &self.router))?;
            match frame.and_then(Result::ok) {
                Some(frame) => self.held.extend(frame.into_data().unwrap_or_default()),
                None => return Err(broken(ClientFault::BrokenOff, &self.router)),
            }
        }
    }
}
