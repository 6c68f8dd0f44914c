//! Traces: the spans of a request at a real OTLP endpoint, the context that both engines get, and a collector
//! that is no use.

use std::time::Duration;

use engine_sim::{ArmedFault, Engine, Fault, Leg};
use futures_util::future::join_all;
use kvbaton::config::{Config, TraceProtocol};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use serde_json::json;

use crate::support::{
    Answer, Authority, CHAT, COMPLETIONS, Cluster, Collector, Front, Mood, PROMPT, attribute, chat,
    completion, generations, only,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn to(collector: &Collector, protocol: TraceProtocol) -> impl Fn(&mut Config) + 'static {
    let url = collector.url.clone();
    move |config| {
        let traces = &mut config.telemetry.traces;
        traces.endpoint = Some(url.clone());
        traces.protocol = protocol;
        traces.sample = 0.0;
        traces.headers = vec!["x-collector-key=let me in".into()];
        traces.interval = Duration::from_millis(20);
        // A loaded machine may be slow.
        traces.timeout = Duration::from_secs(20);
    }
}

async fn ask(cluster: &Cluster, path: &str, body: &serde_json::Value, flags: &str) -> Answer {
    let context = format!("00-{TRACE}-{PARENT}-{flags}");
    let headers = [("traceparent", context.as_str()), ("tracestate", "vendor=1")];
    cluster.post_bytes(path, body.to_string(), &headers).await
}

fn root<'a>(spans: &'a [Span], name: &str) -> Option<&'a Span> {
    spans.iter().find(|span| span.name == name)
}

/// The only span of this name.
fn one<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let mut named = spans.iter().filter(|span| span.name == name);
    let span = named.next().unwrap_or_else(|| panic!("no {name} in {spans:#?}"));
    assert!(named.next().is_none(), "{name} is there twice");
    span
}

/// The context that an engine's only request came with: trace, span and flags.
fn context(engine: &Engine) -> (String, String, String) {
    let seen = only(engine);
    let value = seen.headers["traceparent"].to_str().unwrap().to_owned();
    assert_eq!(seen.headers["tracestate"], "vendor=1");
    let parts: Vec<&str> = value.split('-').collect();
    let ["00", trace, span, flags] = parts[..] else { panic!("{value}") };
    (trace.to_owned(), span.to_owned(), flags.to_owned())
}

async fn a_request_is_one_tree(collector: Collector, protocol: TraceProtocol) {
    let cluster = Cluster::builder().config(to(&collector, protocol)).start().await;
    let mut body = chat(PROMPT, 6);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let answer = ask(&cluster, CHAT, &body, "01").await;
    assert_eq!(answer.status, 200);
    assert!(!answer.everything().contains(TRACE), "a trace is the operator's matter");
    let name = "POST /v1/chat/completions";
    cluster.wait_for("the trace is exported", async || root(&collector.spans(), name).is_some()).await;
    let spans = collector.spans();
    let request = one(&spans, name);
    let mut names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    names.sort_unstable();
    let all = [name, "choose_pair", "choose_pair", "decode", "hand_off", "prefill", "queue", "stream"];
    assert_eq!(names, all);

    // Ids, parents, times.
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE && span.trace_state == "vendor=1"));
    assert_eq!(hex(&request.parent_span_id), PARENT);
    assert_eq!(request.flags & 0x300, 0x300, "the parent is another program's");
    let (prefill, decode) = (one(&spans, "prefill"), one(&spans, "decode"));
    for span in spans.iter().filter(|span| span.name != name) {
        let parent = if span.name == "stream" { decode } else { request };
        assert_eq!(span.parent_span_id, parent.span_id, "{}", span.name);
        assert_eq!(span.flags & 0x300, 0x100, "{}", span.name);
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
        assert!(request.start_time_unix_nano <= span.start_time_unix_nano, "{span:?}");
        assert!(span.end_time_unix_nano <= request.end_time_unix_nano, "{span:?}");
    }
    assert!(prefill.end_time_unix_nano <= decode.start_time_unix_nano, "P first");
    let kinds = [(request, SpanKind::Server), (prefill, SpanKind::Client), (decode, SpanKind::Client)];
    for (span, kind) in kinds {
        assert_eq!(span.kind(), kind, "{}", span.name);
        assert_eq!(attribute(&span.attributes, "gen_ai.operation.name"), "chat");
        assert_eq!(attribute(&span.attributes, "gen_ai.request.model"), "sim");
        assert_eq!(attribute(&span.attributes, "http.response.status_code"), "200");
    }
    assert!(spans.iter().all(|span| span.status.is_none()), "nothing failed");

    // What the engines got.
    assert_eq!(context(cluster.p()), (TRACE.into(), hex(&prefill.span_id), "01".into()));
    assert_eq!(context(cluster.d()), (TRACE.into(), hex(&decode.span_id), "01".into()));

    // What is said.
    let usage = answer.text();
    let usage = usage.lines().find(|line| line.contains("\"usage\":{")).unwrap();
    let usage: serde_json::Value = serde_json::from_str(&usage["data: ".len()..]).unwrap();
    let said = |name: &str| attribute(&request.attributes, name);
    assert_eq!(said("gen_ai.usage.input_tokens"), usage["usage"]["prompt_tokens"].to_string());
    assert_eq!(said("gen_ai.usage.output_tokens"), "6");
    assert_eq!(said("kvbaton.outcome"), "served");
    assert_eq!(said("kvbaton.prefill"), "prefill-1");
    assert_eq!(said("kvbaton.decode"), "decode-1");
    assert_eq!(said("kvbaton.stream"), "true");
    assert_eq!(attribute(&prefill.attributes, "server.port"), cluster.p().addr().port().to_string());
    assert_eq!(attribute(&decode.attributes, "server.address"), "127.0.0.1");
    assert!(!format!("{spans:?}").contains("quick brown"), "a span holds the prompt");
    let (headers, resource) = collector.first();
    assert_eq!(headers["x-collector-key"], "let me in");
    assert_eq!(attribute(&resource.attributes, "service.name"), "kvbaton");
    assert_eq!(attribute(&resource.attributes, "service.version"), env!("CARGO_PKG_VERSION"));
    cluster
        .wait_for("the export is counted", async || {
            cluster.metric("kvbaton_traces_total", &[("result", "exported")]).await == 1.0
        })
        .await;
    let accept = [("accept", "application/openmetrics-text")];
    let page = cluster.send("GET", "/metrics", &accept, "").await.text();
    let example = page.lines().find(|line| {
        line.starts_with("kvbaton_hand_over_seconds_bucket")
            && line.contains(&format!("trace_id=\"{TRACE}\""))
    });
    assert!(example.is_some(), "no example of the trace: {page}");
    cluster.finish().await;
}

#[tokio::test]
async fn a_request_is_one_tree_over_grpc() {
    a_request_is_one_tree(Collector::grpc(Mood::Takes).await, TraceProtocol::Grpc).await;
}

#[tokio::test]
async fn a_request_is_one_tree_over_http() {
    a_request_is_one_tree(Collector::http(Mood::Takes).await, TraceProtocol::Http).await;
}

#[tokio::test]
async fn what_the_client_does_not_sample_is_not_exported_and_the_engines_are_told() {
    let collector = Collector::grpc(Mood::Takes).await;
    let cluster = Cluster::builder().config(to(&collector, TraceProtocol::Grpc)).start().await;
    assert_eq!(ask(&cluster, COMPLETIONS, &completion(PROMPT, 2), "00").await.status, 200);
    for engine in [cluster.p(), cluster.d()] {
        let (trace, span, flags) = context(engine);
        assert_eq!((trace.as_str(), flags.as_str()), (TRACE, "00"));
        assert_ne!(span, PARENT);
    }
    // One without a context is not sampled either; its engines get a context that says so.
    assert_eq!(cluster.post(COMPLETIONS, &completion("another prompt of some length", 2)).await.status, 200);
    let seen = generations(cluster.d());
    assert!(seen[1].headers["traceparent"].to_str().unwrap().ends_with("-00"));
    assert_eq!(ask(&cluster, CHAT, &chat(PROMPT, 2), "01").await.status, 200);
    let name = "POST /v1/chat/completions";
    cluster.wait_for("the trace is exported", async || root(&collector.spans(), name).is_some()).await;
    assert!(root(&collector.spans(), "POST /v1/completions").is_none());
    cluster.finish().await;
}

#[tokio::test]
async fn without_a_collector_the_clients_context_passes_as_it_is() {
    let cluster = Cluster::builder().start().await;
    assert_eq!(ask(&cluster, COMPLETIONS, &completion(PROMPT, 2), "01").await.status, 200);
    for engine in [cluster.p(), cluster.d()] {
        assert_eq!(context(engine), (TRACE.into(), PARENT.into(), "01".into()));
    }
    cluster.finish().await;
}

#[tokio::test]
async fn what_waits_is_exported_before_the_program_ends() {
    let collector = Collector::grpc(Mood::Takes).await;
    let tune = to(&collector, TraceProtocol::Grpc);
    let cluster = Cluster::builder()
        .config(move |config| {
            tune(config);
            config.telemetry.traces.interval = Duration::from_secs(3600);
        })
        .start()
        .await;
    assert_eq!(ask(&cluster, COMPLETIONS, &completion(PROMPT, 2), "01").await.status, 200);
    assert_eq!(collector.calls(), 0);
    cluster.finish().await;
    let spans = collector.spans();
    let request = one(&spans, "POST /v1/completions");
    assert_eq!(attribute(&request.attributes, "gen_ai.operation.name"), "text_completion");
    assert_eq!(collector.calls(), 1);
}

#[tokio::test]
async fn a_collector_that_is_busy_is_asked_again() {
    for over_grpc in [true, false] {
        let mood = Mood::RefusesFirst(2);
        let (collector, protocol) = match over_grpc {
            true => (Collector::grpc(mood).await, TraceProtocol::Grpc),
            false => (Collector::http(mood).await, TraceProtocol::Http),
        };
        let tune = to(&collector, protocol);
        let cluster = Cluster::builder().config(tune).warns(&["does not take traces"]).start().await;
        assert_eq!(ask(&cluster, COMPLETIONS, &completion(PROMPT, 2), "01").await.status, 200);
        cluster.wait_for("the trace is exported", async || !collector.spans().is_empty()).await;
        assert_eq!(collector.calls(), 3);
        cluster.finish().await;
    }
}

#[tokio::test]
async fn a_collector_that_never_answers_costs_traces_and_no_request() {
    let collector = Collector::grpc(Mood::NeverAnswers).await;
    let tune = to(&collector, TraceProtocol::Grpc);
    let cluster = Cluster::builder()
        .config(move |config| {
            tune(config);
            config.telemetry.traces.timeout = Duration::from_secs(3600);
            config.telemetry.traces.queue = 2;
            config.shutdown.limit = Duration::from_secs(4);
        })
        .warns(&["the last traces could not be exported in time"])
        .start()
        .await;
    assert_eq!(ask(&cluster, COMPLETIONS, &completion(PROMPT, 2), "01").await.status, 200);
    cluster.wait_for("the collector is asked", async || collector.calls() == 1).await;
    let body = completion(PROMPT, 2);
    let answers = join_all((0..8).map(|_| ask(&cluster, COMPLETIONS, &body, "01"))).await;
    assert!(answers.iter().all(|answer| answer.status == 200), "{answers:?}");
    cluster
        .wait_for("what finds no room is dropped", async || {
            cluster.metric("kvbaton_traces_total", &[("result", "dropped")]).await == 6.0
        })
        .await;
    assert_eq!(collector.calls(), 1);
    cluster.finish().await;
}

#[tokio::test]
async fn a_collector_that_is_gone_costs_traces_and_no_request() {
    let gone = {
        let listener = crate::support::listen().await;
        format!("http://{}", listener.local_addr().unwrap())
    };
    for protocol in [TraceProtocol::Grpc, TraceProtocol::Http] {
        let url = gone.clone();
        let cluster = Cluster::builder()
            .config(move |config| {
                let traces = &mut config.telemetry.traces;
                (traces.endpoint, traces.protocol, traces.sample) = (Some(url.clone()), protocol, 1.0);
                traces.interval = Duration::from_millis(1);
            })
            .warns(&["does not take traces"])
            .start()
            .await;
        for _ in 0..4 {
            assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
        }
        cluster
            .wait_for("a failure is counted", async || {
                cluster.metric("kvbaton_traces_total", &[("result", "failed")]).await > 0.0
            })
            .await;
        cluster.finish().await;
    }
}

#[tokio::test]
async fn what_failed_says_so() {
    let collector = Collector::grpc(Mood::Takes).await;
    let cluster = Cluster::builder()
        .prefill(0)
        .config(to(&collector, TraceProtocol::Grpc))
        .config(|config| config.hand_off.on_no_prefill = kvbaton_proxy::OnMissing::Fail)
        .warns(&["no_prefill"])
        .unready()
        .start()
        .await;
    cluster.wait_for("D is ready", async || cluster.get("/readyz").await.json()["decode_ready"] == 1).await;
    let answer = ask(&cluster, COMPLETIONS, &completion(PROMPT, 2), "01").await;
    cluster.assert_error(&answer, 503, "no_prefill");
    let name = "POST /v1/completions";
    cluster.wait_for("the trace is exported", async || root(&collector.spans(), name).is_some()).await;
    let spans = collector.spans();
    let request = one(&spans, name);
    assert_eq!(request.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(attribute(&request.attributes, "error.type"), "no_peer");
    assert_eq!(attribute(&request.attributes, "http.response.status_code"), "503");
    let failed = spans.iter().filter(|span| span.name == "choose_pair" && span.status.is_some()).count();
    assert_eq!(failed, 1, "{spans:#?}");
    cluster.finish().await;
}

#[tokio::test]
async fn a_collector_behind_tls_is_believed_by_its_authority_only() {
    let (ours, other) = (Authority::new(), Authority::new());
    let front = Front::new(&ours.identity("collector", &["collector.example"]), None);
    for protocol in [TraceProtocol::Grpc, TraceProtocol::Http] {
        let plain = match protocol {
            TraceProtocol::Grpc => Collector::grpc(Mood::Takes).await,
            TraceProtocol::Http => Collector::http(Mood::Takes).await,
        };
        let collector = plain.behind(&front);
        assert!(collector.url.starts_with("https://"));
        for (trusted, result) in [(&other, "failed"), (&ours, "exported")] {
            let (tune, ca) = (to(&collector, protocol), trusted.certificate.clone());
            let mut builder = Cluster::builder().config(move |config| {
                tune(config);
                config.telemetry.traces.ca = Some(ca.clone());
            });
            if result == "failed" {
                builder = builder.warns(&["does not take traces"]);
            }
            let cluster = builder.start().await;
            assert_eq!(ask(&cluster, COMPLETIONS, &completion(PROMPT, 2), "01").await.status, 200);
            cluster
                .wait_for(result, async || {
                    cluster.metric("kvbaton_traces_total", &[("result", result)]).await == 1.0
                })
                .await;
            assert_eq!(collector.calls(), usize::from(result == "exported"));
            cluster.finish().await;
        }
        one(&collector.spans(), "POST /v1/completions");
    }
}

#[tokio::test]
async fn a_release_is_a_part_of_its_request() {
    let collector = Collector::grpc(Mood::Takes).await;
    let cluster = Cluster::builder().config(to(&collector, TraceProtocol::Grpc)).start().await;
    // A pair that has not talked before, and one that has.
    for (way, status) in [("read", 400), ("rejection", 429)] {
        let body = json!({"error": {"message": "no", "type": "t", "param": null, "code": status}});
        cluster.d().faults().arm(ArmedFault {
            fault: Fault::Refuse { status, body },
            leg: Leg::Decode,
            sticky: false,
        });
        assert_eq!(ask(&cluster, COMPLETIONS, &completion(PROMPT, 6), "01").await.status, status);
        cluster.wait_no_blocks().await;
        let of_way = |span: &Span| attribute(&span.attributes, "kvbaton.release.way") == way;
        cluster.wait_for(way, async || collector.spans().iter().any(of_way)).await;
        let spans = collector.spans();
        let release = spans.iter().find(|span| of_way(span)).unwrap();
        assert_eq!(release.name, "release");
        assert_eq!(hex(&release.trace_id), TRACE);
        assert_eq!(attribute(&release.attributes, "kvbaton.peer"), "prefill-1");
        let code = status.to_string();
        let request = spans.iter().find(|span| {
            span.name == "POST /v1/completions"
                && attribute(&span.attributes, "http.response.status_code") == code
        });
        assert_eq!(release.parent_span_id, request.unwrap().span_id);
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    }
    cluster.finish().await;
}
