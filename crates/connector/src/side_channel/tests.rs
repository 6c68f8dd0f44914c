use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::zmtp::{self, SocketType};
use super::*;
use crate::ClockTime;
use crate::golden::{capture, list, unhex, vectors};
use crate::protocol::Generation;
use crate::protocol::handshake::HandshakeRequest;
use crate::worker::{HandshakeFailure, HandshakeJob};

fn job(generation: Generation, address: SocketAddr, ranks: &[(u32, u32)]) -> HandshakeJob {
    HandshakeJob {
        engine_id: "p".to_owned(),
        host: address.ip().to_string(),
        port: i64::from(address.port()),
        generation,
        tp_size: 2,
        pp_size: 1,
        ranks: ranks.to_vec(),
    }
}

/// A local clock that gains a second with every look at it.
fn ticking() -> impl Fn() -> ClockTime {
    let now = std::cell::Cell::new(0);
    move || {
        now.set(now.get() + 1);
        Duration::from_secs(now.get())
    }
}

fn payloads() -> RankPayloads {
    HashMap::from([((0, 0), vec![7; 300]), ((0, 1), vec![8]), ((1, 0), vec![9])])
}

/// Runs `client` against a server until it ends.
async fn with_server<F: Future>(generation: Generation, client: impl FnOnce(SocketAddr) -> F) -> F::Output {
    let server = SideChannelServer::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap();
    tokio::select! {
        () = server.serve(generation, payloads(), || Duration::from_millis(1_610_704)) => panic!("it ended"),
        output = client(address) => output,
    }
}

/// A connection that has been introduced, to be misused.
async fn raw(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    zmtp::greet(&mut stream, SocketType::Req).await.unwrap();
    stream
}

#[tokio::test]
async fn both_generations_are_served_rank_by_rank() {
    for (generation, ranks) in
        [(Generation::V14, &[(0, 0), (0, 1), (1, 0)][..]), (Generation::V2, &[(0, 0), (0, 1)])]
    {
        let replies = with_server(generation, |address| async move {
            shake_hands(&job(generation, address, ranks), ticking()).await
        });
        let replies = replies.await.unwrap();
        assert_eq!(replies.len(), ranks.len());
        for (reply, rank) in replies.iter().zip(ranks) {
            assert_eq!((reply.pp_rank, reply.tp_rank), *rank);
            assert_eq!(reply.payload, payloads()[rank]);
            assert_eq!(
                reply.clock.map(|clock| clock.remote_seconds),
                (generation == Generation::V14).then_some(1610.704)
            );
        }
        let clock = replies[0].clock.map(|clock| (clock.sent, clock.received));
        let expected = Some((Duration::from_secs(1), Duration::from_secs(2)));
        assert_eq!(clock, expected.filter(|_| generation == Generation::V14));
    }
}

#[tokio::test]
async fn a_real_request_gets_payload_and_clock() {
    with_server(Generation::V14, |address| async move {
        let mut stream = raw(address).await;
        zmtp::send(&mut stream, &[b"", &capture("sidechannel_P.request.bin")]).await.unwrap();
        let frames = zmtp::receive(&mut stream, zmtp::MAX_REPLY).await.unwrap();
        assert_eq!(frames.len(), 3);
        assert_eq!((frames[0].len(), &frames[1]), (0, &payloads()[&(0, 0)]));
        assert_eq!(frames[2], crate::protocol::handshake::encode_clock(1610.704));
    })
    .await;
}

#[tokio::test]
async fn malformed_requests_are_dropped_and_the_next_one_is_served() {
    let vectors = vectors("handshake.json");
    let requests = list(&vectors["malformed_requests"]).iter().map(|case| unhex(&case["hex"]));
    // Some are only odd in the other generation.
    let malformed: Vec<Vec<u8>> =
        requests.filter(|bytes| HandshakeRequest::decode(Generation::V14, bytes).is_err()).collect();
    assert!(malformed.len() >= 7, "{}", malformed.len());
    with_server(Generation::V14, |address| async move {
        let mut stream = raw(address).await;
        for request in &malformed {
            zmtp::send(&mut stream, &[b"", request]).await.unwrap();
        }
        let unknown_rank = HandshakeRequest { pp_rank: 9, tp_rank: 9 };
        zmtp::send(&mut stream, &[b"", &unknown_rank.encode(Generation::V14)]).await.unwrap();
        for frames in [&[&b"x"[..]][..], &[b"x", b"y"], &[b"", b"x", b"y"], &[b""]] {
            zmtp::send(&mut stream, frames).await.unwrap();
        }
        let request = HandshakeRequest { pp_rank: 0, tp_rank: 1 };
        zmtp::send(&mut stream, &[b"", &request.encode(Generation::V14)]).await.unwrap();
        assert_eq!(zmtp::receive(&mut stream, zmtp::MAX_REPLY).await.unwrap()[1], [8]);
        let served = shake_hands(&job(Generation::V14, address, &[(0, 0)]), ticking()).await;
        assert!(served.is_ok());
    })
    .await;
}

#[tokio::test]
async fn peers_that_break_the_protocol_end_only_their_own_connection() {
    let mut greeting = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
    greeting.extend(b"NULL");
    greeting.resize(64, 0);
    let with = |change: fn(&mut Vec<u8>)| {
        let mut bytes = greeting.clone();
        change(&mut bytes);
        bytes
    };
    let ready = b"\x04\x06\x05READY";
    let broken: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: somewhere\r\nUser-Agent: a browser that got lost here\r\n\r\n".to_vec(),
        with(|bytes| bytes[10] = 2),
        with(|bytes| bytes[12..17].copy_from_slice(b"PLAIN")),
        with(|bytes| bytes[12..17].copy_from_slice(b"NULLX")),
        with(|bytes| bytes.extend(b"\x00\x05hello")),
        // Frames that claim to be endless, and messages of endless frames.
        with(|bytes| bytes.extend(b"\x04\x06\x05READY\x02\xff\xff\xff\xff\xff\xff\xff\xff")),
        with(|bytes| bytes.extend(b"\x04\x06\x05READY\x06\x00\x00\x00\x02\x00\x00\x00\x00")),
        [greeting.clone(), ready.to_vec(), [1, 0].repeat(1000)].concat(),
    ];
    with_server(Generation::V14, |address| async move {
        for bytes in broken {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
            // The server hangs up; what it had sent before does not matter.
            let mut rest = Vec::new();
            let closed = tokio::time::timeout(Duration::from_secs(5), stream.read_to_end(&mut rest)).await;
            assert!(closed.is_ok(), "{bytes:?}");
        }
        let abandoned = TcpStream::connect(address).await.unwrap();
        drop(abandoned);
        assert!(shake_hands(&job(Generation::V14, address, &[(0, 0)]), ticking()).await.is_ok());
    })
    .await;
}

#[tokio::test]
async fn a_server_may_answer_as_it_likes_and_end_itself() {
    let server = SideChannelServer::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap();
    let serving = server.serve_with(|frames| match frames {
        [delimiter, request] if delimiter.is_empty() && request == b"end" => ControlFlow::Break(()),
        [_, request] if request == b"nothing" => ControlFlow::Continue(None),
        frames => ControlFlow::Continue(Some(vec![vec![frames.len() as u8], b"reply".to_vec()])),
    });
    let client = async {
        let mut stream = raw(address).await;
        zmtp::send(&mut stream, &[b"", b"nothing"]).await.unwrap();
        zmtp::send(&mut stream, &[b"", b"x", b"y"]).await.unwrap();
        let frames = zmtp::receive(&mut stream, zmtp::MAX_REPLY).await.unwrap();
        assert_eq!(frames, [b"".to_vec(), vec![3], b"reply".to_vec()]);
        zmtp::send(&mut stream, &[b"", b"end"]).await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        assert!(rest.is_empty());
    };
    tokio::join!(serving, client);
    assert!(TcpStream::connect(address).await.is_err(), "the port is closed");
}

#[tokio::test]
async fn silent_connections_keep_nobody_out() {
    with_server(Generation::V14, |address| async move {
        let mut silent = Vec::new();
        for _ in 0..super::server::MAX_CONNECTIONS + 50 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        assert!(shake_hands(&job(Generation::V14, address, &[(0, 0)]), ticking()).await.is_ok());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_client_waits_five_seconds_for_a_reply_and_for_a_listener() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let started = tokio::time::Instant::now();
    let result = shake_hands(&job(Generation::V14, address, &[(0, 0)]), ticking()).await;
    assert_eq!(result, Err(HandshakeFailure::Timeout));
    assert_eq!(started.elapsed(), RECEIVE_TIMEOUT);
    drop(silent);
    let result = shake_hands(&job(Generation::V14, address, &[(0, 0)]), ticking()).await;
    assert_eq!(result, Err(HandshakeFailure::Unreachable));
    for port in [-1, 65_536] {
        let mut job = job(Generation::V14, address, &[(0, 0)]);
        job.port = port;
        assert_eq!(shake_hands(&job, ticking()).await, Err(HandshakeFailure::Unreachable));
    }
}

/// The client against a peer that answers with `frames`.
async fn answered(generation: Generation, frames: &[&[u8]]) -> Result<(), HandshakeFailure> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let job = job(generation, listener.local_addr().unwrap(), &[(0, 0)]);
    let answering = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        zmtp::greet(&mut stream, SocketType::Router).await.unwrap();
        zmtp::receive(&mut stream, zmtp::MAX_REPLY).await.unwrap();
        zmtp::send(&mut stream, frames).await.unwrap();
        stream
    };
    let (result, _stream) = tokio::join!(shake_hands(&job, ticking()), answering);
    result.map(|_| ())
}

#[tokio::test]
async fn a_reply_has_the_frames_of_its_generation() {
    let clock = crate::protocol::handshake::encode_clock(1.0);
    let bad = Err(HandshakeFailure::BadReply);
    assert_eq!(answered(Generation::V14, &[b"", b"payload", &clock]).await, Ok(()));
    assert_eq!(answered(Generation::V14, &[b"", b"payload"]).await, bad);
    assert_eq!(answered(Generation::V14, &[b"", b"payload", &clock, b""]).await, bad);
    assert_eq!(answered(Generation::V14, &[b"", b"payload", b"late"]).await, bad);
    assert_eq!(answered(Generation::V14, &[b"x", b"payload", &clock]).await, bad);
    assert_eq!(answered(Generation::V2, &[b"", b"payload"]).await, Ok(()));
    assert_eq!(answered(Generation::V2, &[b"", b"payload", &clock]).await, bad);
}
