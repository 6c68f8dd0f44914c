//! From a request's spans to OTLP's messages.

use std::time::{SystemTime, UNIX_EPOCH};

use kvbaton_proxy::{SpanKind, SpanRecord, SpanValue};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, SpanFlags, Status, span};

/// What all spans of this program have in common.
pub(super) fn resource(service_name: &str, instance: &str) -> Resource {
    let attribute = |name, value: &str| attribute(name, SpanValue::from(value));
    Resource {
        attributes: vec![
            attribute("service.name", service_name),
            attribute("service.version", env!("CARGO_PKG_VERSION")),
            attribute("service.instance.id", instance),
        ],
        ..Resource::default()
    }
}

/// One call's message.
pub(super) fn message(resource: &Resource, spans: Vec<SpanRecord>) -> ExportTraceServiceRequest {
    let scope = InstrumentationScope {
        name: "kvbaton".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let spans = spans.into_iter().map(encoded).collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
    let of_resource =
        ResourceSpans { resource: Some(resource.clone()), scope_spans, ..ResourceSpans::default() };
    ExportTraceServiceRequest { resource_spans: vec![of_resource] }
}

fn encoded(record: SpanRecord) -> Span {
    let kind = match record.kind {
        SpanKind::Server => span::SpanKind::Server,
        SpanKind::Client => span::SpanKind::Client,
        SpanKind::Internal => span::SpanKind::Internal,
    };
    let status =
        record.error.map(|error| Status { message: error.to_owned(), code: StatusCode::Error as i32 });
    // Sampled; and whether the parent is another program's is known.
    let mut flags = 1 | SpanFlags::ContextHasIsRemoteMask as u32;
    if record.is_remote_parent {
        flags |= SpanFlags::ContextIsRemoteMask as u32;
    }
    Span {
        trace_id: record.trace_id.to_be_bytes().to_vec(),
        span_id: record.span_id.to_be_bytes().to_vec(),
        trace_state: record.trace_state.unwrap_or_default(),
        parent_span_id: record.parent.map(|parent| parent.to_be_bytes().to_vec()).unwrap_or_default(),
        flags,
        name: record.name.to_owned(),
        kind: kind as i32,
        start_time_unix_nano: nanoseconds(record.began),
        end_time_unix_nano: nanoseconds(record.ended),
        attributes: record.attributes.into_iter().map(|(name, value)| attribute(name, value)).collect(),
        status,
        ..Span::default()
    }
}

fn attribute(name: &str, value: SpanValue) -> KeyValue {
    let value = match value {
        SpanValue::Text(text) => Value::StringValue(text),
        SpanValue::Number(number) => Value::IntValue(number),
        SpanValue::Real(measure) => Value::DoubleValue(measure),
        SpanValue::Flag(flag) => Value::BoolValue(flag),
    };
    KeyValue { key: name.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
