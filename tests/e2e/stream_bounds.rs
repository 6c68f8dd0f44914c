//! What bounds an answer: deadlines, the client's patience, the router's room and its own end.

use std::time::Duration;

use engine_sim::{ArmedFault, Fault, Leg, Stage};
use kvbaton_proxy::Role;
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETIONS, Cluster, End, FakeEngine, Gate, PROMPT, Step, Wire, chunk, completion, events,
    request, single_text, sse_head, stream_text,
};

const EVENT: &[u8] = b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
const COMMENT: &str = ": keep-alive\n\n";
/// Short beside every deadline, long beside what a busy machine needs for one step.
const TICK: Duration = Duration::from_millis(150);

fn streamed(max_tokens: u64) -> Value {
    let mut body = completion(PROMPT, max_tokens);
    body["stream"] = json!(true);
    body
}

async fn open(cluster: &Cluster, body: &Value) -> Wire {
    Wire::open(cluster.addr, &request(COMPLETIONS, &[], &body.to_string())).await
}

fn last_error(stream: &str) -> Value {
    let last = events(stream).pop().unwrap_or_else(|| panic!("no event: {stream:?}"));
    serde_json::from_str::<Value>(&last).unwrap()["error"].clone()
}

#[tokio::test]
async fn item_22_comments_while_the_prompt_is_computed() {
    let cluster = Cluster::builder().config(|config| config.stream.keep_alive = TICK).start().await;
    let gate = cluster.p().faults().hold(Stage::BeforeHead, Leg::Prefill);
    let body = streamed(6);
    let mut wire = open(&cluster, &body).await;
    let (status, head) = wire.head().await;
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    let before = wire.body_until(&COMMENT.repeat(2)).await;
    assert_eq!(before.replace(COMMENT, ""), "", "nothing but comments before the first event");
    gate.release();
    let (rest, end) = wire.rest().await;
    assert_eq!(end, End::Clean);
    assert_eq!(stream_text(&rest.replace(COMMENT, "")), single_text(COMPLETIONS, &body).await);
    let counted = [("outcome", "served"), ("status", "200")];
    assert_eq!(cluster.metric("kvbaton_requests_total", &counted).await, 1.0);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_22_comments_while_a_request_waits_for_its_turn() {
    let narrow = |config: &mut kvbaton::config::Config| {
        config.stream.keep_alive = TICK;
        config.admission.prefill.requests = 1;
    };
    let cluster = Cluster::builder().config(narrow).start().await;
    let gate = cluster.p().faults().hold(Stage::Arrival, Leg::Prefill);
    let body = streamed(6);
    let first = open(&cluster, &body).await;
    gate.arrived(1).await;
    let mut second = open(&cluster, &body).await;
    assert_eq!(second.head().await.0, 200);
    assert_eq!(second.body_until(&COMMENT.repeat(2)).await.replace(COMMENT, ""), "");
    assert_eq!(cluster.metric("kvbaton_admission_waiting", &[("stage", "prefill")]).await, 1.0);
    gate.release();
    let (rest, end) = second.rest().await;
    assert_eq!(stream_text(&rest.replace(COMMENT, "")), single_text(COMPLETIONS, &body).await);
    assert_eq!(end, End::Clean);
    drop(first);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_22_never_a_comment_where_no_stream_was_asked_for_or_by_default() {
    for (interval, stream) in [(TICK, false), (Duration::ZERO, true)] {
        let cluster = Cluster::builder().config(move |c| c.stream.keep_alive = interval).start().await;
        let gate = cluster.p().faults().hold(Stage::BeforeHead, Leg::Prefill);
        let mut body = completion(PROMPT, 3);
        body["stream"] = json!(stream);
        let mut wire = open(&cluster, &body).await;
        gate.arrived(1).await;
        assert!(tokio::time::timeout(TICK * 3, wire.head()).await.is_err(), "no head before the answer");
        drop(wire);
        gate.release();
        cluster.wait_no_blocks().await;
        cluster.finish().await;
    }
}

#[tokio::test]
async fn item_22_an_error_after_the_first_comment_is_an_event() {
    let cluster = Cluster::builder().config(|config| config.stream.keep_alive = TICK).start().await;
    let gate = cluster.p().faults().hold(Stage::Arrival, Leg::Prefill);
    let said =
        json!({"error": {"message": "too long", "type": "BadRequestError", "param": null, "code": 400}});
    let fault = Fault::Refuse { status: 400, body: said };
    cluster.p().faults().arm(ArmedFault { fault, leg: Leg::Prefill, sticky: false });
    let mut wire = open(&cluster, &streamed(6)).await;
    assert_eq!(wire.head().await.0, 200);
    wire.body_until(COMMENT).await;
    gate.release();
    let (rest, end) = wire.rest().await;
    assert_eq!(end, End::Clean);
    let error = last_error(&rest.replace(COMMENT, ""));
    assert_eq!((&error["message"], &error["code"]), (&json!("too long"), &json!("400")), "{rest}");
    let counted = [("outcome", "client_error"), ("status", "400")];
    assert_eq!(cluster.metric("kvbaton_requests_total", &counted).await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_22_another_engine_is_still_tried_after_the_first_comment() {
    let gate = Gate::new();
    let broken = FakeEngine::start(vec![Step::Wait(gate.clone()), Step::Reset]).await;
    let cluster = Cluster::builder()
        .peer(Role::Decode, &broken.url())
        .config(|config| config.stream.keep_alive = TICK)
        .warns(&["an engine failed"])
        .start()
        .await;
    let body = streamed(6);
    let expected = single_text(COMPLETIONS, &body).await;
    // Equally busy engines take turns, so that one of two requests meets the broken one first.
    for _ in 0..2 {
        let mut wire = open(&cluster, &body).await;
        let (status, _) = wire.head().await;
        assert_eq!(status, 200);
        gate.open();
        let (rest, end) = wire.rest().await;
        assert_eq!((stream_text(&rest.replace(COMMENT, "")), end), (expected.clone(), End::Clean));
    }
    assert_eq!(cluster.metric("kvbaton_retries_total", &[("stage", "decode")]).await, 1.0);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_31_a_client_that_leaves_is_a_499_and_no_engines_error() {
    let cluster = Cluster::builder().logs_all().start().await;
    let gate = cluster.d().faults().hold(Stage::MidStream, Leg::Decode);
    let mut wire = open(&cluster, &streamed(40)).await;
    assert_eq!(wire.head().await.0, 200);
    gate.arrived(1).await;
    drop(wire);
    gate.release();
    let left = [("status", "499"), ("outcome", "abandoned")];
    cluster
        .wait_for("the request is counted", async || {
            cluster.metric("kvbaton_requests_total", &left).await == 1.0
        })
        .await;
    cluster
        .wait_for("the request is logged", async || {
            cluster.log().lines().any(|line| line.contains("status=499") && line.contains("abandoned"))
        })
        .await;
    let all = cluster.metric("kvbaton_requests_total", &[("endpoint", "completions")]).await;
    assert_eq!((all, cluster.metric("kvbaton_upstream_failures_total", &[]).await), (1.0, 0.0));
    assert_eq!(cluster.metric("kvbaton_stream_errors_total", &[]).await, 0.0);
    let peers = cluster.get("/admin/peers").await.json();
    assert!(peers["peers"].as_array().unwrap().iter().all(|peer| peer["last_error"].is_null()), "{peers}");
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_client_that_leaves_at_the_end_mark_was_served() {
    let steps = vec![
        Step::Send(sse_head()),
        Step::Send(chunk(EVENT)),
        Step::Send(chunk(b"data: [DONE]\n\n")),
        Step::Hang,
    ];
    let engine = FakeEngine::start(steps).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).start().await;
    let mut wire = open(&cluster, &streamed(4)).await;
    assert_eq!(wire.head().await.0, 200);
    wire.body_until("[DONE]\n\n").await;
    drop(wire);
    let served = [("status", "200"), ("outcome", "served")];
    cluster
        .wait_for("the request is counted", async || {
            cluster.metric("kvbaton_requests_total", &served).await == 1.0
        })
        .await;
    cluster.finish().await;
}

/// A decode engine that plays these steps under short deadlines, asked for a stream or not.
async fn late(steps: Vec<Step>, stream: bool, tune: fn(&mut kvbaton::config::Config)) -> (u16, String) {
    let engine = FakeEngine::start(steps).await;
    let cluster = Cluster::builder()
        .decode(0)
        .peer(Role::Decode, &engine.url())
        .config(tune)
        .warns(&["decode"])
        .start()
        .await;
    let mut body = completion(PROMPT, 4);
    body["stream"] = json!(stream);
    let answer = cluster.post(COMPLETIONS, &body).await;
    let code = match answer.status {
        200 => last_error(&answer.text())["code"].as_str().unwrap().to_owned(),
        _ => answer.json()["error"]["code"].as_str().unwrap().to_owned(),
    };
    cluster.finish().await;
    (answer.status, code)
}

#[tokio::test]
async fn each_deadline_has_its_own_code() {
    let begun = || vec![Step::Send(sse_head()), Step::Send(chunk(EVENT)), Step::Hang];
    let part =
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{\"a\":".to_vec();
    let part = || vec![Step::Send(part.clone()), Step::Hang];
    let head = late(vec![Step::Hang], true, |config| config.timeouts.decode_head = TICK * 3).await;
    assert_eq!(head, (504, "upstream_timeout".to_owned()));
    let idle = late(begun(), true, |config| config.timeouts.idle = TICK * 3).await;
    assert_eq!(idle, (200, "upstream_idle".to_owned()));
    let idle = late(part(), false, |config| config.timeouts.idle = TICK * 3).await;
    assert_eq!(idle, (504, "upstream_idle".to_owned()));
    let total = late(begun(), true, |config| config.timeouts.total = TICK * 3).await;
    assert_eq!(total, (200, "upstream_total".to_owned()));
    let total = late(part(), false, |config| config.timeouts.total = TICK * 3).await;
    assert_eq!(total, (504, "upstream_total".to_owned()));
}

#[tokio::test]
async fn a_stream_that_the_shutdown_cuts_ends_with_an_error_event() {
    let engine = FakeEngine::start(vec![Step::Send(sse_head()), Step::Send(chunk(EVENT)), Step::Hang]).await;
    let cluster = Cluster::builder()
        .decode(0)
        .peer(Role::Decode, &engine.url())
        .config(|config| config.shutdown.limit = Duration::from_secs(4))
        .start()
        .await;
    let mut wire = open(&cluster, &streamed(4)).await;
    assert_eq!(wire.head().await.0, 200);
    wire.body_until("\n\n").await;
    let ((rest, end), ()) = tokio::join!(wire.rest(), cluster.finish());
    assert_eq!((last_error(&rest)["code"].as_str(), end), (Some("shutting_down"), End::Clean), "{rest}");
}

#[tokio::test]
async fn a_request_that_the_shutdown_cuts_gets_a_503() {
    let cluster = Cluster::builder()
        .config(|config| config.shutdown.limit = Duration::from_secs(6))
        .warns(&["request failed"])
        .start()
        .await;
    // From now on the engines know each other, so that the release is a word that is not held.
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await.status, 200);
    let gate = cluster.d().faults().hold(Stage::BeforeHead, Leg::Decode);
    let mut wire = open(&cluster, &completion(PROMPT, 4)).await;
    gate.arrived(1).await;
    let ((status, _), ()) = tokio::join!(wire.head(), cluster.finish());
    assert_eq!(status, 503);
}

#[tokio::test]
async fn a_slow_reader_costs_a_bounded_amount() {
    const PIECES: usize = 64;
    let piece = [b"data: ".as_slice(), &vec![b'x'; 1 << 20], b"\n\n"].concat();
    let gates: Vec<Gate> = (0..PIECES).map(|_| Gate::new()).collect();
    let mut steps = vec![Step::Send(sse_head())];
    for gate in &gates {
        steps.extend([Step::Send(chunk(&piece)), Step::Open(gate.clone())]);
    }
    steps.push(Step::Send(chunk(b"")));
    let engine = FakeEngine::start(steps).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).start().await;
    let mut wire = open(&cluster, &streamed(4)).await;
    assert_eq!(wire.head().await.0, 200);
    // Long enough for a router that reads ahead to have read all.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let taken = gates.iter().filter(|gate| gate.is_open()).count();
    assert!(taken < PIECES / 2, "{taken} MiB went towards a client that reads nothing");
    let held = cluster.metric("kvbaton_held_bytes", &[]).await;
    assert!(held <= 2.0 * piece.len() as f64, "{held} bytes are held for one stream");
    let (rest, end) = wire.rest().await;
    assert_eq!((rest.len(), end), (piece.len() * PIECES, End::Clean));
    cluster
        .wait_for("nothing is held", async || cluster.metric("kvbaton_held_bytes", &[]).await == 0.0)
        .await;
    cluster.finish().await;
}

#[tokio::test]
async fn uploads_beyond_the_routers_room_are_refused() {
    const LIMIT: usize = 1 << 20;
    let cluster = Cluster::builder()
        .config(|config| {
            config.limits.held_bytes = LIMIT;
            config.limits.body_bytes = LIMIT;
            config.limits.answer_bytes = LIMIT;
        })
        .warns(&["no_room"])
        .start()
        .await;
    let gate = cluster.p().faults().hold(Stage::Arrival, Leg::Prefill);
    let mut body = completion(PROMPT, 2);
    body["padding"] = json!("x".repeat(LIMIT * 2 / 3));
    let (first, ()) = tokio::join!(cluster.post(COMPLETIONS, &body), async {
        gate.arrived(1).await;
        let second = cluster.post(COMPLETIONS, &body).await;
        cluster.assert_error(&second, 503, "no_room");
        assert_eq!(second.header("retry-after"), "1");
        // As well where the length is not declared.
        let text = body.to_string();
        let pieces: Vec<Result<String, std::io::Error>> =
            vec![Ok(text[..9].to_owned()), Ok(text[9..].to_owned())];
        let chunked = reqwest::Body::wrap_stream(futures_util::stream::iter(pieces));
        let third = cluster.post_bytes(COMPLETIONS, chunked, &[]).await;
        cluster.assert_error(&third, 503, "no_room");
        gate.release();
    });
    assert_eq!(first.status, 200, "{first:?}");
    cluster
        .wait_for("nothing is held", async || cluster.metric("kvbaton_held_bytes", &[]).await == 0.0)
        .await;
    assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200, "there is room again");
    cluster.finish().await;
}

#[tokio::test]
async fn a_half_closed_client_gets_its_answer_where_that_is_set() {
    let cluster = Cluster::builder().config(|config| config.stream.half_close = true).start().await;
    let gate = cluster.p().faults().hold(Stage::BeforeHead, Leg::Prefill);
    let mut wire = open(&cluster, &streamed(4)).await;
    wire.close_sending().await;
    gate.arrived(1).await;
    tokio::time::sleep(TICK).await;
    gate.release();
    assert_eq!(wire.head().await.0, 200);
    let (rest, _) = wire.rest().await;
    assert_eq!(stream_text(&rest), single_text(COMPLETIONS, &streamed(4)).await);
    cluster.finish().await;
}

#[tokio::test]
async fn item_17_errors_of_the_other_dialects_are_their_own() {
    for (path, begins) in
        [("/v1/messages", "event: error\ndata: {\"type\":\"error\","), (CHAT, "data: {\"error\":")]
    {
        let steps = vec![
            Step::Send(sse_head()),
            Step::Send(chunk(b"event: message_start\ndata: {}\n\n")),
            Step::Reset,
        ];
        let engine = FakeEngine::start(steps).await;
        let cluster = Cluster::builder()
            .decode(0)
            .peer(Role::Decode, &engine.url())
            .warns(&["broke off", "release"])
            .start()
            .await;
        let body = json!({"model": "sim", "stream": true, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]});
        let stream = cluster.post(path, &body).await.text();
        let (_, last) = stream.trim_end().rsplit_once("\n\n").unwrap();
        assert!(last.trim_start().starts_with(begins), "{stream:?}");
        cluster.finish().await;
    }
}
