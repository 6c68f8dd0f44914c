//! Streams that last are written without hyper. To a client nothing is different: what it may do with its
//! connection meanwhile and afterwards has the same result as while hyper writes.

use std::time::Duration;

use engine_sim::{Gate, Leg, Stage};
use kvbaton::config::{Config, Tls};
use serde_json::{Value, json};

use crate::support::{
    Authority, COMPLETIONS, Cluster, End, PROMPT, TlsWire, Wire, completion, request, single_text,
    stream_text,
};

/// Who writes a stream that lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Us,
    /// As it does where a client says something of the connection that is not understood.
    Hyper,
}

pub(crate) const BOTH: [By; 2] = [By::Us, By::Hyper];
/// Short beside every deadline, long beside what a busy machine needs for one step.
pub(crate) const TICK: Duration = Duration::from_millis(150);
const LIVE: &str = "GET /livez HTTP/1.1\r\nhost: x\r\n\r\n";
const LAST: &str = "GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

impl By {
    pub(crate) fn request(self, body: &Value) -> Vec<u8> {
        let said = match self {
            Self::Us => "keep-alive",
            Self::Hyper => "keep-alive, x-none",
        };
        request(COMPLETIONS, &[("connection", said)], &body.to_string())
    }
}

pub(crate) fn streamed(max_tokens: u64) -> Value {
    let mut body = completion(PROMPT, max_tokens);
    body["stream"] = json!(true);
    body
}

/// How many streams have gone on without hyper.
pub(crate) fn lasting(cluster: &Cluster) -> usize {
    cluster.log().matches("a stream goes on without hyper").count()
}

/// Asks for a stream and waits until it is settled who writes it, while its engine is held; also what came of it.
async fn begin(cluster: &Cluster, wire: &mut Wire, by: By, body: &Value) -> (Gate, String) {
    let (gate, before) = (cluster.d().faults().hold(Stage::MidStream, Leg::Decode), lasting(cluster));
    wire.send(&by.request(body)).await;
    assert_eq!(wire.head().await.0, 200);
    let begun = wire.body_until("\n\n").await;
    gate.arrived(1).await;
    settled(cluster, by, before).await;
    (gate, begun)
}

/// Waits until it is settled who writes the stream that has begun after so many others had lasted.
pub(crate) async fn settled(cluster: &Cluster, by: By, before: usize) {
    if by == By::Us {
        cluster.wait_for("a stream goes on by itself", async || lasting(cluster) > before).await;
    } else {
        tokio::time::sleep(TICK).await;
        assert_eq!(lasting(cluster), before);
    }
}

async fn plain() -> Cluster {
    Cluster::builder().logs_all().start().await
}

/// What does not differ from answer to answer.
fn constant(answers: &str) -> String {
    let differs = |line: &&str| !line.starts_with("date: ") && !line.starts_with("x-request-id: ");
    answers.lines().filter(differs).collect::<Vec<_>>().join("\n")
}

fn statuses(answers: &str) -> Vec<u16> {
    let heads = answers.split("HTTP/1.1 ").skip(1);
    heads.map(|answer| answer[..3].parse().unwrap()).collect()
}

/// Reads the rest of a stream, whose text must be the right one.
async fn finish_stream(wire: &mut Wire, begun: String, body: &Value) {
    let (rest, end) = wire.rest().await;
    assert_eq!((stream_text(&(begun + &rest)), end), (single_text(COMPLETIONS, body).await, End::Clean));
}

#[tokio::test]
async fn what_a_client_sends_meanwhile_is_understood_as_hyper_does() {
    let long = format!("GET /livez HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n", "y".repeat(20_000));
    let unknown = request(COMPLETIONS, &[], &json!({"model": "none", "prompt": "a"}).to_string());
    let post = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n");
    let chunked = format!("{post}transfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n");
    let two_lengths = format!("{post}content-length: 5\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n");
    let sent: [(&[u8], &[u16]); 9] = [
        (b"", &[200]),
        (LIVE.as_bytes(), &[200, 200]),
        (long.as_bytes(), &[200, 200]),
        (&unknown, &[404, 200]),
        (chunked.as_bytes(), &[400]),
        (b"\r\n\r\n", &[200]),
        (b"\x16\x03\x01\0\0 nonsense\r\n\r\n", &[400]),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &[]),
        (two_lengths.as_bytes(), &[400]),
    ];
    let cluster = plain().await;
    let body = streamed(6);
    for (early, expected) in sent {
        let mut answers = Vec::new();
        for by in BOTH {
            let mut wire = Wire::connect(cluster.addr).await;
            let (gate, begun) = begin(&cluster, &mut wire, by, &body).await;
            wire.send(&[early, LAST.as_bytes()].concat()).await;
            gate.release();
            finish_stream(&mut wire, begun, &body).await;
            answers.push(constant(&wire.everything().await));
        }
        let early = String::from_utf8_lossy(early);
        assert_eq!(answers[0], answers[1], "{early:?}");
        assert_eq!(statuses(&answers[0]), expected, "{early:?}: {}", answers[0]);
    }
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_request_of_which_a_part_came_meanwhile_is_answered() {
    let cluster = plain().await;
    let body = streamed(6);
    let mut large = completion(PROMPT, 6);
    large["padding"] = json!("x".repeat(100_000));
    let next = By::Us.request(&large);
    let expected = single_text(COMPLETIONS, &large).await;
    for by in BOTH {
        let mut wire = Wire::connect(cluster.addr).await;
        // In its head, at its end, in its body's beginning, and farther on than anybody reads ahead.
        for cut in [9, 200, 700, 60_000] {
            let (gate, begun) = begin(&cluster, &mut wire, by, &body).await;
            wire.send(&next[..cut]).await;
            gate.release();
            finish_stream(&mut wire, begun, &body).await;
            wire.send(&next[cut..]).await;
            assert_eq!(wire.head().await.0, 200, "{by:?} {cut}");
            let answer = wire.declared_body().await;
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            assert_eq!(answer["choices"][0]["text"], expected, "{by:?} {cut}");
        }
    }
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_connection_serves_a_hundred_requests_between_its_streams() {
    let cluster = plain().await;
    let (body, short) = (streamed(6), completion(PROMPT, 2));
    let expected = single_text(COMPLETIONS, &short).await;
    let mut wire = Wire::connect(cluster.addr).await;
    for round in 0..100 {
        match round % 4 {
            0 => {
                let (gate, begun) = begin(&cluster, &mut wire, By::Us, &body).await;
                gate.release();
                finish_stream(&mut wire, begun, &body).await;
            }
            1 => {
                wire.send(LIVE.as_bytes()).await;
                assert_eq!(wire.head().await.0, 200, "round {round}");
                wire.skip_declared_body().await;
            }
            2 => {
                wire.send(&request(COMPLETIONS, &[], "{}")).await;
                assert_eq!(wire.head().await.0, 400, "round {round}");
                wire.skip_declared_body().await;
            }
            _ => {
                wire.send(&request(COMPLETIONS, &[], &short.to_string())).await;
                assert_eq!(wire.head().await.0, 200, "round {round}");
                let answer: Value = serde_json::from_slice(&wire.declared_body().await).unwrap();
                assert_eq!(answer["choices"][0]["text"], expected, "round {round}");
            }
        }
    }
    assert_eq!((lasting(&cluster), cluster.relayed().await), (25, 50.0));
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn what_is_told_of_a_stream_is_the_same() {
    let cluster = plain().await;
    let body = streamed(6);
    let mut told = Vec::new();
    for by in BOTH {
        let mut wire = Wire::connect(cluster.addr).await;
        let (gate, begun) = begin(&cluster, &mut wire, by, &body).await;
        gate.release();
        let (rest, end) = wire.rest().await;
        assert_eq!(end, End::Clean);
        let line = || {
            let log = cluster.log();
            log.lines().rfind(|line| line.starts_with("INFO kvbaton::access:")).map(str::to_owned)
        };
        let counted = told.len() + 1;
        let all = [("outcome", "served"), ("status", "200")];
        let served = async || cluster.metric("kvbaton_requests_total", &all).await == counted as f64;
        cluster.wait_for("it is counted", served).await;
        let line = line().unwrap();
        for said in [
            format!("sent_bytes={}", begun.len() + rest.len()),
            format!("received_bytes={}", body.to_string().len()),
            "outcome=\"served\"".to_owned(),
        ] {
            assert!(line.split(' ').any(|word| word == said), "{by:?}: no {said} in {line}");
        }
        let varies = |name: &str| name.contains("seconds") || name.contains("_id") || name == "cached_tokens";
        let same: Vec<_> = line.split(' ').filter(|word| !varies(word.split('=').next().unwrap())).collect();
        let tokens = cluster.metric("kvbaton_output_tokens_total", &[]).await / counted as f64;
        told.push((same.join(" "), tokens, stream_text(&(begun + &rest))));
    }
    assert_eq!(told[0], told[1]);
    cluster.finish().await;
}

#[tokio::test]
async fn whoever_wants_no_connection_afterwards_is_answered_by_hyper() {
    let cluster = plain().await;
    let body = streamed(6);
    let expected = single_text(COMPLETIONS, &body).await;
    let closing = request(COMPLETIONS, &[("connection", "close")], &body.to_string());
    let old = String::from_utf8(request(COMPLETIONS, &[], &body.to_string())).unwrap();
    let old = old.replacen("HTTP/1.1", "HTTP/1.0", 1).into_bytes();
    for (asks, chunked) in [(closing, true), (old, false)] {
        let gate = cluster.d().faults().hold(Stage::MidStream, Leg::Decode);
        let mut wire = Wire::open(cluster.addr, &asks).await;
        let (status, head) = wire.head().await;
        gate.arrived(1).await;
        tokio::time::sleep(TICK).await;
        gate.release();
        assert_eq!((status, head.contains("transfer-encoding: chunked")), (200, chunked), "{head}");
        assert_eq!(head.contains("connection: close"), chunked, "{head}");
        let text = if chunked {
            let (text, end) = wire.rest().await;
            assert_eq!(end, End::Clean);
            text
        } else {
            wire.everything().await
        };
        assert_eq!(stream_text(&text), expected);
        assert_eq!(wire.everything().await, "", "the connection is closed");
    }
    assert_eq!(lasting(&cluster), 0);
    cluster.finish().await;
}

#[tokio::test]
async fn streams_over_tls_last_as_well() {
    let authority = Authority::new();
    let server = authority.identity("server", &["localhost"]);
    // Engines register in plain, on a listener of their own.
    let set = move |config: &mut Config| {
        config.tls = Tls { cert: server.cert(), key: server.key(), ..Tls::default() };
        config.registry.listen = Some("127.0.0.1:0".parse().unwrap());
    };
    let cluster = Cluster::builder().logs_all().config(set).unready().start().await;
    assert!(cluster.running().ready_within(Duration::from_secs(20)).await);
    cluster.wait_registered().await;
    let connect = async || TlsWire::connect(cluster.addr, &authority, None).await.unwrap().wire();
    let body = streamed(6);
    for by in BOTH {
        let mut wire = connect().await;
        for _ in 0..2 {
            let (gate, begun) = begin(&cluster, &mut wire, by, &body).await;
            wire.send(LIVE.as_bytes()).await;
            gate.release();
            finish_stream(&mut wire, begun, &body).await;
            assert_eq!(wire.head().await.0, 200);
            wire.skip_declared_body().await;
        }
        // One that says in TLS that it leaves, and one that only closes.
        for orderly in [true, false] {
            let mut wire = connect().await;
            let aborted = cluster.d().stats().aborted;
            let (gate, _) = begin(&cluster, &mut wire, by, &streamed(2000)).await;
            if orderly {
                wire.close_sending().await;
            } else {
                drop(wire);
            }
            drop(gate);
            cluster.wait_for("the engine aborts", async || cluster.d().stats().aborted == aborted + 1).await;
        }
    }
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}
