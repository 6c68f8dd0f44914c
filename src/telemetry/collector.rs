//! One call to a collector, over gRPC or HTTP. Decides nothing about trying again.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioTimer;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use prost::Message as _;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tokio_util::task::TaskTracker;
use tonic::Code;

use crate::config::{TraceProtocol, TraceSettings};

/// The path of traces where the endpoint has none.
const TRACES: &str = "/v1/traces";

/// A collector has nothing to say that is longer.
const LONGEST_ANSWER: usize = 64 << 10;

/// Why traces cannot be sent at all.
#[derive(Debug, thiserror::Error)]
pub enum CollectorFault {
    /// The endpoint or a header cannot be used.
    #[error("the collector's endpoint or headers cannot be used")]
    Endpoint,
    /// The certificates cannot be read.
    #[error("{path} holds no certificates that can be used", path = path.display())]
    Certificates {
        /// Where they should be.
        path: PathBuf,
    },
    /// TLS cannot be set up.
    #[error("TLS to the collector")]
    Tls(#[from] rustls::Error),
}

/// Why one call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotTaken {
    #[error("it took too long")]
    Late,
    #[error("it cannot be reached: {0}")]
    Unreachable(#[from] hyper_util::client::legacy::Error),
    #[error("it answered {0}")]
    Status(StatusCode),
    #[error("it answered {0:?}")]
    Code(Code),
}

impl NotTaken {
    /// Whether another try may succeed, as OTLP's specification has it.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            Self::Late | Self::Unreachable(_) => true,
            Self::Status(status) => matches!(status.as_u16(), 429 | 502 | 503 | 504),
            Self::Code(code) => matches!(
                code,
                Code::Cancelled
                    | Code::DeadlineExceeded
                    | Code::ResourceExhausted
                    | Code::Aborted
                    | Code::OutOfRange
                    | Code::Unavailable
                    | Code::DataLoss
            ),
        }
    }
}

type Connector = HttpsConnector<HttpConnector>;

/// Runs the connections as tracked tasks.
#[derive(Clone, Debug)]
struct Tracked(TaskTracker);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Tracked {
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

/// How it is spoken to.
enum Wire {
    Grpc(Box<TraceServiceClient<Client<Connector, tonic::body::Body>>>),
    Http { client: Box<Client<Connector, Full<Bytes>>>, uri: Uri },
}

/// A collector.
pub(super) struct Collector {
    wire: Wire,
    headers: HeaderMap,
    timeout: Duration,
}

impl Collector {
    /// Prepares for the collector of the settings; it is not asked anything yet.
    pub(super) fn new(settings: &TraceSettings, tasks: TaskTracker) -> Result<Self, CollectorFault> {
        let mut url = settings.url().ok_or(CollectorFault::Endpoint)?;
        let headers = settings.header_map().map_err(|_| CollectorFault::Endpoint)?;
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls(settings)?).https_or_http();
        let mut builder = Client::builder(Tracked(tasks));
        builder.pool_timer(TokioTimer::new()).timer(TokioTimer::new());
        let wire = match settings.protocol {
            TraceProtocol::Grpc => {
                let client = builder.http2_only(true).build(connector.enable_http2().build());
                let origin = url.as_str().parse().map_err(|_| CollectorFault::Endpoint)?;
                Wire::Grpc(Box::new(TraceServiceClient::with_origin(client, origin)))
            }
            TraceProtocol::Http => {
                if url.path() == "/" {
                    url.set_path(TRACES);
                }
                let uri = url.as_str().parse().map_err(|_| CollectorFault::Endpoint)?;
                Wire::Http { client: Box::new(builder.build(connector.enable_http1().build())), uri }
            }
        };
        Ok(Self { wire, headers, timeout: settings.timeout })
    }

    /// Sends one message.
    pub(super) async fn take(&self, message: ExportTraceServiceRequest) -> Result<(), NotTaken> {
        tokio::time::timeout(self.timeout, self.call(message)).await.map_err(|_late| NotTaken::Late)?
    }

    async fn call(&self, message: ExportTraceServiceRequest) -> Result<(), NotTaken> {
        let rejected = match &self.wire {
            Wire::Grpc(client) => {
                let mut request = tonic::Request::new(message);
                *request.metadata_mut() = tonic::metadata::MetadataMap::from_headers(self.headers.clone());
                let mut client = TraceServiceClient::clone(client);
                let answer = client.export(request).await.map_err(|status| NotTaken::Code(status.code()))?;
                answer.into_inner().partial_success
            }
            Wire::Http { client, uri } => {
                let mut request = Request::new(Full::new(Bytes::from(message.encode_to_vec())));
                *request.method_mut() = Method::POST;
                *request.uri_mut() = uri.clone();
                *request.headers_mut() = self.headers.clone();
                request
                    .headers_mut()
                    .insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
                let answer = client.request(request).await?;
                if !answer.status().is_success() {
                    return Err(NotTaken::Status(answer.status()));
                }
                // Read to its end, so that the connection can be used again.
                let said = Limited::new(answer.into_body(), LONGEST_ANSWER).collect().await;
                let said = said.map(http_body_util::Collected::to_bytes).unwrap_or_default();
                opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse::decode(said)
                    .ok()
                    .and_then(|answer| answer.partial_success)
            }
        };
        if let Some(rejected) = rejected.filter(|rejected| rejected.rejected_spans > 0) {
            tracing::debug!(spans = rejected.rejected_spans, "the collector rejected spans");
        }
        Ok(())
    }
}

fn tls(settings: &TraceSettings) -> Result<rustls::ClientConfig, CollectorFault> {
    let mut roots = rustls::RootCertStore::empty();
    match &settings.ca {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(path) => {
            let fault = || CollectorFault::Certificates { path: path.clone() };
            let certificates = CertificateDer::pem_file_iter(path).map_err(|_| fault())?;
            for certificate in certificates {
                let certificate = certificate.map_err(|_| fault())?;
                roots.add(certificate).map_err(|_| fault())?;
            }
            if roots.is_empty() {
                return Err(fault());
            }
        }
    }
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}
