//! A collector of traces that speaks OTLP as its servers do: over gRPC by the protocol's own generated service,
//! over HTTP by decoding the body. It may refuse, or never answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use http::{HeaderMap, StatusCode};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use prost::Message as _;
use tokio::task::JoinSet;
use tonic::transport::server::TcpIncoming;

use super::listen;
use super::pki::Front;

/// What it does with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    Takes,
    /// The first so many calls are told to come again.
    RefusesFirst(usize),
    NeverAnswers,
}

#[derive(Clone)]
struct Shared {
    mood: Mood,
    calls: Arc<AtomicUsize>,
    taken: Arc<Mutex<Vec<(HeaderMap, ExportTraceServiceRequest)>>>,
}

impl Shared {
    /// Whether the call is taken.
    async fn take(&self, headers: HeaderMap, request: ExportTraceServiceRequest) -> bool {
        let before = self.calls.fetch_add(1, Ordering::SeqCst);
        match self.mood {
            Mood::NeverAnswers => std::future::pending().await,
            Mood::RefusesFirst(count) if before < count => false,
            _ => {
                self.taken.lock().push((headers, request));
                true
            }
        }
    }
}

#[tonic::async_trait]
impl TraceService for Shared {
    async fn export(
        &self,
        request: tonic::Request<ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<ExportTraceServiceResponse>, tonic::Status> {
        let headers = request.metadata().clone().into_headers();
        if self.take(headers, request.into_inner()).await {
            Ok(tonic::Response::new(ExportTraceServiceResponse::default()))
        } else {
            Err(tonic::Status::unavailable("come again"))
        }
    }
}

async fn over_http(State(shared): State<Shared>, headers: HeaderMap, body: Bytes) -> (StatusCode, Vec<u8>) {
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    if shared.take(headers, request).await {
        (StatusCode::OK, ExportTraceServiceResponse::default().encode_to_vec())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, Vec::new())
    }
}

/// A running collector.
pub(crate) struct Collector {
    pub(crate) url: String,
    shared: Shared,
    _serving: JoinSet<()>,
}

impl Collector {
    pub(crate) async fn grpc(mood: Mood) -> Self {
        let (listener, shared) = (listen().await, shared(mood));
        let url = format!("http://{}", listener.local_addr().unwrap());
        let service = TraceServiceServer::new(shared.clone());
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let server = tonic::transport::Server::builder().add_service(service);
            server.serve_with_incoming(TcpIncoming::from(listener)).await.unwrap();
        });
        Self { url, shared, _serving: serving }
    }

    pub(crate) async fn http(mood: Mood) -> Self {
        let (listener, shared) = (listen().await, shared(mood));
        let url = format!("http://{}", listener.local_addr().unwrap());
        let app = axum::Router::new().route("/v1/traces", post(over_http)).with_state(shared.clone());
        let mut serving = JoinSet::new();
        serving.spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, shared, _serving: serving }
    }

    /// The same behind TLS, at another URL.
    pub(crate) fn behind(mut self, front: &Front) -> Self {
        self.url = front.before(self.url.trim_start_matches("http://").parse().unwrap());
        self
    }

    /// How many calls came.
    pub(crate) fn calls(&self) -> usize {
        self.shared.calls.load(Ordering::SeqCst)
    }

    /// All spans so far.
    pub(crate) fn spans(&self) -> Vec<Span> {
        let taken = self.shared.taken.lock();
        let resources = taken.iter().flat_map(|(_, request)| &request.resource_spans);
        resources.flat_map(|resource| &resource.scope_spans).flat_map(|scope| scope.spans.clone()).collect()
    }

    /// What the first call said of the program, and its headers.
    pub(crate) fn first(&self) -> (HeaderMap, Resource) {
        let taken = self.shared.taken.lock();
        let (headers, request) = taken.first().unwrap();
        (headers.clone(), request.resource_spans[0].resource.clone().unwrap())
    }
}

fn shared(mood: Mood) -> Shared {
    Shared { mood, calls: Arc::default(), taken: Arc::default() }
}

/// An attribute as text; empty if there is none.
pub(crate) fn attribute(attributes: &[KeyValue], name: &str) -> String {
    let mut named = attributes.iter().filter(|attribute| attribute.key == name);
    let value = named.next().and_then(|attribute| attribute.value.as_ref()?.value.clone());
    assert!(named.next().is_none(), "{name} is there twice");
    match value {
        None => String::new(),
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::BoolValue(flag)) => flag.to_string(),
        Some(other) => panic!("{name} is {other:?}"),
    }
}
