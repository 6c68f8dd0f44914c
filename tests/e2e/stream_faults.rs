//! A decode engine that fails: before its head the client gets the status, after it an error event.

use std::time::Duration;

use engine_sim::{ArmedFault, Fault, Leg};
use kvbaton_proxy::Role;
use serde_json::{Value, json};

use crate::support::{
    COMPLETIONS, Cluster, End, FakeEngine, Gate, PROMPT, Step, Wire, chunk, completion, request, sse_head,
};

const EVENT: &[u8] = b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n";

fn streamed() -> Value {
    let mut body = completion(PROMPT, 12);
    body["stream"] = json!(true);
    body
}

async fn refused(status: u16, stream: bool) {
    let cluster = Cluster::builder().start().await;
    let body =
        json!({"error": {"message": "too long", "type": "BadRequestError", "param": null, "code": status}});
    let fault = Fault::Refuse { status, body: body.clone() };
    cluster.d().faults().arm(ArmedFault { fault, leg: Leg::Decode, sticky: false });
    let mut sent = completion(PROMPT, 12);
    sent["stream"] = json!(stream);
    let answer = cluster.post(COMPLETIONS, &sent).await;
    assert_eq!(answer.status, status);
    assert!(answer.header("content-type").starts_with("application/json"), "{answer:?}");
    assert_eq!(answer.json(), body);
    // The engine did not look at the hand-off, so only the router can have freed the blocks.
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    assert_eq!(cluster.released().await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_13_a_400_reaches_a_streaming_client() {
    refused(400, true).await;
}

#[tokio::test]
async fn a_400_reaches_a_client() {
    refused(400, false).await;
}

#[tokio::test]
async fn item_14_a_503_reaches_a_streaming_client() {
    refused(503, true).await;
}

#[tokio::test]
async fn item_14_a_context_overflow_reaches_a_streaming_client_as_the_engine_says_it() {
    let mut body = streamed();
    body["max_tokens"] = json!(100_000);
    let alone = crate::support::single(COMPLETIONS, &body).await;
    assert_eq!(alone.status, 400);
    let cluster = Cluster::builder().start().await;
    let answer = cluster.post(COMPLETIONS, &body).await;
    assert_eq!((answer.status, answer.text()), (400, alone.text()));
    assert_eq!(answer.header("content-type"), alone.header("content-type"));
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

/// A stream whose engine ends it in a way, and what the client got of the body.
async fn broken_stream(sent: &[&[u8]], last: Step, idle: Duration) -> (String, End, Cluster, FakeEngine) {
    let gate = Gate::new();
    let mut steps = vec![Step::Send(sse_head())];
    steps.extend(sent.iter().map(|piece| Step::Send(chunk(piece))));
    steps.extend([Step::Wait(gate.clone()), last]);
    let engine = FakeEngine::start(steps).await;
    let cluster = Cluster::builder()
        .decode(0)
        .peer(Role::Decode, &engine.url())
        .config(move |config| config.timeouts.idle = idle)
        .warns(&["stream"])
        .start()
        .await;
    let mut wire = Wire::open(cluster.addr, &request(COMPLETIONS, &[], &streamed().to_string())).await;
    assert_eq!(wire.head().await.0, 200);
    // An event goes on when it is whole.
    let whole: Vec<&[u8]> = sent.iter().copied().filter(|piece| piece.ends_with(b"\n\n")).collect();
    let length: usize = whole.iter().map(|piece| piece.len()).sum();
    let mut body = Vec::new();
    while body.len() < length {
        body.extend(wire.chunk().await.unwrap());
    }
    assert_eq!(body, whole.concat());
    gate.open();
    let (rest, end) = wire.rest().await;
    (rest, end, cluster, engine)
}

/// The rest of a stream must be an error event after a blank line, and nothing else.
fn assert_error_event(cluster: &Cluster, rest: &str, code: &str) {
    let event = rest.strip_prefix("\n\ndata: ").and_then(|rest| rest.strip_suffix("\n\n"));
    let event = event.unwrap_or_else(|| panic!("no error event: {rest:?}"));
    let event: Value = serde_json::from_str(event).unwrap();
    assert_eq!(event["error"]["type"], "upstream_error", "{event}");
    assert_eq!(event["error"]["code"], code, "{event}");
    assert!(event["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{event}");
    let port = format!(":{}", cluster.p().addr().port());
    assert!(!rest.contains("127.0.0.1") && !rest.contains("http://") && !rest.contains(&port), "{rest}");
}

#[tokio::test]
async fn item_17_a_reset_between_events_ends_the_stream_with_an_error_event() {
    let (rest, end, cluster, _engine) =
        broken_stream(&[EVENT, EVENT], Step::Reset, Duration::from_secs(9)).await;
    assert_error_event(&cluster, &rest, "upstream_reset");
    assert_eq!(end, End::Clean);
    assert_eq!(cluster.metric("kvbaton_stream_errors_total", &[]).await, 1.0);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_17_a_reset_inside_an_event_does_not_merge_with_the_error_event() {
    let (rest, end, cluster, _engine) =
        broken_stream(&[EVENT, b"data: {\"choi"], Step::Reset, Duration::from_secs(9)).await;
    assert_error_event(&cluster, &rest, "upstream_reset");
    assert_eq!(end, End::Clean);
    cluster.finish().await;
}

#[tokio::test]
async fn an_orderly_close_before_the_last_chunk_is_an_error_too() {
    let (rest, end, cluster, _engine) =
        broken_stream(&[EVENT], Step::Send(Vec::new()), Duration::from_secs(9)).await;
    assert_error_event(&cluster, &rest, "upstream_reset");
    assert_eq!(end, End::Clean);
    cluster.finish().await;
}

#[tokio::test]
async fn a_broken_chunk_header_is_an_error_too() {
    let garbage = Step::Send(b"zz\r\nnonsense".to_vec());
    let (rest, end, cluster, _engine) = broken_stream(&[EVENT], garbage, Duration::from_secs(9)).await;
    assert_error_event(&cluster, &rest, "upstream_reset");
    assert_eq!(end, End::Clean);
    cluster.finish().await;
}

#[tokio::test]
async fn silence_inside_a_stream_ends_it_with_an_error_event() {
    let (rest, end, cluster, _engine) = broken_stream(&[EVENT], Step::Hang, Duration::from_millis(600)).await;
    assert_error_event(&cluster, &rest, "upstream_idle");
    assert_eq!(end, End::Clean);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_reset_right_after_done_is_no_error() {
    let gate = Gate::new();
    let done = b"data: [DONE]\n\n";
    let steps = vec![
        Step::Send(sse_head()),
        Step::Send(chunk(EVENT)),
        Step::Send(chunk(done)),
        Step::Wait(gate.clone()),
        Step::Reset,
    ];
    let engine = FakeEngine::start(steps).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).start().await;
    let mut wire = Wire::open(cluster.addr, &request(COMPLETIONS, &[], &streamed().to_string())).await;
    assert_eq!(wire.head().await.0, 200);
    assert_eq!(
        wire.body_until("[DONE]\n\n").await,
        format!("{}data: [DONE]\n\n", str::from_utf8(EVENT).unwrap())
    );
    gate.open();
    assert_eq!(wire.rest().await, (String::new(), End::Clean));
    assert_eq!(cluster.metric("kvbaton_stream_errors_total", &[]).await, 0.0);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_simulated_engine_that_resets_mid_stream_ends_the_stream_with_an_error_event() {
    let cluster = Cluster::builder().warns(&["stream"]).start().await;
    let fault = Fault::Reset { after_bytes: 1500 };
    cluster.d().faults().arm(ArmedFault { fault, leg: Leg::Decode, sticky: false });
    let mut body = streamed();
    body["max_tokens"] = json!(200);
    let answer = cluster.post(COMPLETIONS, &body).await;
    let text = answer.text();
    let (before, event) = text.rsplit_once("\n\ndata: ").unwrap();
    assert!(before.starts_with("data: {") && !text.contains("[DONE]"), "{text}");
    assert_error_event(&cluster, &format!("\n\ndata: {event}"), "upstream_reset");
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_17_a_reset_inside_an_answer_that_is_not_streamed_is_a_502() {
    let partial =
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{\"id\":".to_vec();
    let engine = FakeEngine::start(vec![Step::Send(partial), Step::Reset]).await;
    let cluster = Cluster::builder()
        .decode(0)
        .peer(Role::Decode, &engine.url())
        .warns(&["reset", "release a hand-off"])
        .start()
        .await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 12)).await;
    cluster.assert_error(&answer, 502, "upstream_reset");
    cluster.finish().await;
}
