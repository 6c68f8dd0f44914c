//! Streams arrive piece by piece and byte for byte.

use std::time::Duration;

use engine_sim::{EngineConfig, Leg, Stage};
use kvbaton_proxy::Role;
use serde_json::json;

use crate::support::{
    CHAT, COMPLETIONS, Cluster, End, FakeEngine, Gate, PROMPT, Step, Wire, chat, chunk, completion, request,
    single_text, sse_head, stream_text,
};

const CAPTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/captures");

async fn first_piece_comes_before_the_last_is_made(path: &str, mut body: serde_json::Value) {
    body["stream"] = json!(true);
    let cluster = Cluster::builder().start().await;
    let gate = cluster.d().faults().hold(Stage::MidStream, Leg::Decode);
    let mut wire = Wire::open(cluster.addr, &request(path, &[], &body.to_string())).await;
    let (status, head) = wire.head().await;
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    assert!(!head.contains("content-length:"), "{head}");
    let mut stream = wire.body_until("\n\n").await;
    // The engine is held after its first piece: what has come cannot be the end.
    gate.arrived(1).await;
    assert!(!stream.contains("[DONE]"), "{stream}");
    gate.release();
    let (rest, end) = wire.rest().await;
    assert_eq!(end, End::Clean);
    stream.push_str(&rest);
    assert_eq!(stream_text(&stream), single_text(path, &body).await);
    assert_eq!(cluster.relayed().await, 1.0);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_15_first_piece_of_a_completion_comes_before_the_last_is_made() {
    first_piece_comes_before_the_last_is_made(COMPLETIONS, completion(PROMPT, 12)).await;
}

#[tokio::test]
async fn item_15_first_piece_of_a_chat_comes_before_the_last_is_made() {
    first_piece_comes_before_the_last_is_made(CHAT, chat(PROMPT, 12)).await;
}

/// A decode engine that sends these pieces, each only when the client has the one before.
async fn relayed_piece_by_piece(pieces: &[&[u8]]) {
    let gates: Vec<Gate> = pieces.iter().map(|_| Gate::new()).collect();
    let mut steps = vec![Step::Send(sse_head())];
    for (piece, gate) in pieces.iter().zip(&gates) {
        steps.push(Step::Wait(gate.clone()));
        steps.push(Step::Send(chunk(piece)));
    }
    steps.push(Step::Send(chunk(b"")));
    let engine = FakeEngine::start(steps).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).start().await;
    let mut body = completion(PROMPT, 12);
    body["stream"] = json!(true);
    let mut wire = Wire::open(cluster.addr, &request(COMPLETIONS, &[], &body.to_string())).await;
    let (status, head) = wire.head().await;
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/event-stream; charset=utf-8\r\n"), "{head}");
    let mut held = Vec::new();
    for (piece, gate) in pieces.iter().zip(&gates) {
        gate.open();
        held.extend_from_slice(piece);
        // What belongs to an event whose end has not come waits for it.
        let end = held.windows(2).rposition(|pair| pair == b"\n\n").map_or(0, |at| at + 2);
        let end = held.windows(4).rposition(|end| end == b"\r\n\r\n").map_or(end, |at| end.max(at + 4));
        let expected: Vec<u8> = held.drain(..end).collect();
        let mut got = Vec::new();
        while got.len() < expected.len() {
            got.extend(wire.chunk().await.unwrap());
        }
        assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(&expected));
    }
    let (rest, end) = wire.rest().await;
    assert_eq!((rest.as_bytes(), end), (&held[..], End::Clean));
    cluster.finish().await;
}

#[tokio::test]
async fn item_16_pieces_pass_as_they_are_however_they_are_cut() {
    relayed_piece_by_piece(&[
        b": comment\n\n",
        b"data: {\"a\":\"\xc3",
        b"\xbc\"}\r\n\r\n",
        b"event: x\nid: 7\nretry: 10\ndata: {\"b\":1.50}\n",
        b"\ndata: [DONE]\n\n",
    ])
    .await;
}

#[tokio::test]
async fn a_vllm_stream_passes_to_the_byte() {
    let capture = std::fs::read(format!("{CAPTURES}/chat_completions_stream.D.resp.sse")).unwrap();
    let pieces: Vec<&[u8]> = capture.chunks(173).collect();
    relayed_piece_by_piece(&pieces).await;
}

#[tokio::test]
async fn an_engines_own_error_in_a_stream_passes_to_the_byte() {
    let capture = std::fs::read(format!("{CAPTURES}/err_D_wrong_engine_id_stream.resp.sse")).unwrap();
    relayed_piece_by_piece(&[&capture]).await;
}

#[tokio::test]
async fn a_large_piece_passes() {
    let large = [b"data: ".as_slice(), &vec![b'x'; 3 << 20], b"\n\n"].concat();
    relayed_piece_by_piece(&[&large, b"data: [DONE]\n\n"]).await;
}

#[tokio::test]
async fn usage_comes_at_the_end_of_a_stream_when_asked_for() {
    let mut body = completion(PROMPT, 12);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let cluster = Cluster::builder().start().await;
    let stream = cluster.post(COMPLETIONS, &body).await.text();
    let data = crate::support::events(&stream);
    let last: serde_json::Value = serde_json::from_str(&data[data.len() - 2]).unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 12);
    assert_eq!(last["usage"]["prompt_tokens"], PROMPT.len());
    cluster.finish().await;
}

#[tokio::test]
async fn a_connection_serves_on_after_its_streams() {
    let mut body = completion(PROMPT, 6);
    body["stream"] = json!(true);
    // Each stream lasts for longer than hyper keeps one.
    let slow = |engine: &mut EngineConfig| engine.decode_time_per_token = Duration::from_millis(50);
    let cluster = Cluster::builder().engine(slow).start().await;
    let expected = single_text(COMPLETIONS, &body).await;
    let asks = request(COMPLETIONS, &[], &body.to_string());
    let gate = cluster.d().faults().hold(Stage::MidStream, Leg::Decode);
    // The second comes with the first, the third while the first is on its way.
    let mut wire = Wire::open(cluster.addr, &asks.repeat(2)).await;
    gate.arrived(1).await;
    wire.send(&asks).await;
    gate.release();
    for _ in 0..3 {
        let (status, head) = wire.head().await;
        assert_eq!(status, 200);
        assert!(head.contains("date: ") && !head.contains("connection: "), "{head}");
        let (stream, end) = wire.rest().await;
        assert_eq!((stream_text(&stream), end), (expected.clone(), End::Clean));
    }
    wire.send(b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n").await;
    assert_eq!(wire.head().await.0, 200);
    assert_eq!(cluster.relayed().await, 3.0);
    cluster.wait_idle().await;
    cluster.finish().await;
}
