use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::protocol::params::TransferMode;

use super::*;

/// Answers one request with fixed bytes and returns what was asked.
fn serve_once(answer: Vec<u8>) -> (String, JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let thread = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut asked = Vec::new();
        let mut chunk = [0; 1024];
        while !is_complete(&asked) {
            let n = socket.read(&mut chunk).unwrap();
            assert!(n > 0, "the request ended early");
            asked.extend_from_slice(&chunk[..n]);
        }
        socket.write_all(&answer).unwrap();
        asked
    });
    (url, thread)
}

fn is_complete(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request).to_ascii_lowercase();
    let Some(head_end) = text.find("\r\n\r\n") else { return false };
    let body_len = text
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |len| len.parse::<usize>().unwrap());
    request.len() >= head_end + 4 + body_len
}

fn response(status: &str, body: &[u8]) -> Vec<u8> {
    response_with(status, "", body)
}

fn response_with(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let mut bytes =
        format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n")
            .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

#[tokio::test]
async fn a_payload_is_published_at_its_rank() {
    let (url, server) = serve_once(response("204 No Content", b""));
    let client = RegistryClient::new(url + "/", Some("secret".to_owned())).unwrap();
    client.publish("p/1 ä", 2, 3, vec![0, 0xff]).await.unwrap();
    let asked = server.join().unwrap();
    let text = String::from_utf8_lossy(&asked);
    assert!(text.starts_with("PUT /registry/v1/engines/p%2F1%20%C3%A4/ranks/2/3 HTTP/1.1\r\n"), "{text}");
    assert!(text.contains("content-type: application/msgpack\r\n"));
    assert!(text.contains("authorization: Bearer secret\r\n"));
    assert!(asked.ends_with(&[b'\n', 0, 0xff]));
}

#[tokio::test]
async fn a_payload_is_fetched_byte_for_byte() {
    let payload: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let (url, server) = serve_once(response("200 OK", &payload));
    let client = RegistryClient::new(url, None).unwrap();
    assert_eq!(client.fetch("p", 0, 1).await, Ok(Fetched { payload, clock: None }));
    let asked = String::from_utf8(server.join().unwrap()).unwrap();
    assert!(asked.starts_with("GET /registry/v1/engines/p/ranks/0/1 HTTP/1.1\r\n"), "{asked}");
    assert!(asked.contains("accept: application/msgpack\r\n"));
    assert!(!asked.contains("authorization"));
}

#[tokio::test]
async fn refusals_are_typed() {
    for (status, error) in [
        ("404 Not Found", RegistryError::Unknown),
        ("409 Conflict", RegistryError::NotReady),
        ("400 Bad Request", RegistryError::Refused { status: 400 }),
        ("503 Service Unavailable", RegistryError::Refused { status: 503 }),
    ] {
        let (url, server) = serve_once(response(status, b"{}"));
        let client = RegistryClient::new(url, None).unwrap();
        assert_eq!(client.fetch("p", 0, 0).await, Err(error));
        server.join().unwrap();
    }
}

#[tokio::test]
async fn no_registry_and_bad_addresses_are_typed() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gone = RegistryClient::new(format!("http://{address}"), None).unwrap();
    assert_eq!(gone.fetch("p", 0, 0).await, Err(RegistryError::Unreachable));
    let nonsense = RegistryClient::new("not a url", None).unwrap();
    assert_eq!(nonsense.fetch("p", 0, 0).await, Err(RegistryError::BadRequest));
    assert!(matches!(
        RegistryClient::new("http://x", Some("a\nb".to_owned())),
        Err(RegistryError::BadRequest)
    ));
    assert_eq!(HandshakeFailure::from(RegistryError::Unknown), HandshakeFailure::UnknownEngine);
}

#[tokio::test]
async fn an_engine_registers_beats_and_leaves() {
    let receipt = br#"{"engine_id":"p","revision":7,"generation":1,"ttl_seconds":6.0,"router_clock":1.25}"#;
    let (url, server) = serve_once(response("201 Created", receipt));
    let registration = Registration {
        engine_id: "p".to_owned(),
        role: Some(EngineRole::Prefill),
        ttl: Some(Duration::from_secs(6)),
        clock: Some(Duration::from_millis(500)),
        ranks: Some(vec![RankPayload { pp_rank: 0, tp_rank: 1, payload: vec![0xff] }]),
        ..Registration::default()
    };
    let client = RegistryClient::new(url, None).unwrap();
    assert_eq!(client.register(&registration).await, Ok(Receipt { revision: 7, router_clock: 1.25 }));
    let asked = server.join().unwrap();
    assert!(asked.starts_with(b"PUT /registry/v1/engines/p HTTP/1.1\r\n"));
    let mut body = b"\x89\xa8base_url\xc0\xa4role\xa7prefill\xa5model\xc0\xa7dp_rank\x00".to_vec();
    body.extend(b"\xacvllm_version\xc0\xa5state\xa5ready\xabttl_seconds\xcb\x40\x18\0\0\0\0\0\0");
    body.extend(b"\xa5clock\xcb\x3f\xe0\0\0\0\0\0\0\xa5ranks\x91\x83\xa7pp_rank\0\xa7tp_rank\x01");
    body.extend(b"\xa7payload\xc4\x01\xff");
    assert!(asked.ends_with(&body), "{}", String::from_utf8_lossy(&asked));

    let (url, server) = serve_once(response("200 OK", receipt));
    let traits = EngineTraits {
        tp_size: Some(2),
        transfer_mode: Some(TransferMode::Pull),
        is_mla: Some(true),
        side_channel_port: Some(5600),
        ..EngineTraits::default()
    };
    let registration = Registration { engine_id: "p".to_owned(), traits, ..Registration::default() };
    RegistryClient::new(url, None).unwrap().register(&registration).await.unwrap();
    let asked = server.join().unwrap();
    let mut body =
        b"\xa5clock\xc0\xa5ranks\xc0\xa7tp_size\x02\xadtransfer_mode\xa4pull\xa6is_mla\xc3".to_vec();
    body.extend(b"\xb1side_channel_port\xcd\x15\xe0");
    assert!(asked.ends_with(&body), "{}", String::from_utf8_lossy(&asked));

    let (url, server) = serve_once(response("200 OK", receipt));
    let echo = Echo { router_clock: 1.25, received: Duration::from_millis(500) };
    let beat = Heartbeat { state: Some(EngineState::Draining), clock: None, echo: Some(echo) };
    let client = RegistryClient::new(url, None).unwrap();
    assert_eq!(client.heartbeat("p", &beat).await, Ok(Receipt { revision: 7, router_clock: 1.25 }));
    let asked = server.join().unwrap();
    assert!(asked.starts_with(b"POST /registry/v1/engines/p/heartbeat HTTP/1.1\r\n"));
    let mut body = b"\x83\xa5state\xa8draining\xa5clock\xc0\xa4echo\x82\xacrouter_clock".to_vec();
    body.extend(b"\xcb\x3f\xf4\0\0\0\0\0\0\xa8received\xcb\x3f\xe0\0\0\0\0\0\0");
    assert!(asked.ends_with(&body), "{}", String::from_utf8_lossy(&asked));

    let (url, server) = serve_once(response("204 No Content", b""));
    RegistryClient::new(url, None).unwrap().deregister("p").await.unwrap();
    assert!(server.join().unwrap().starts_with(b"DELETE /registry/v1/engines/p HTTP/1.1\r\n"));
}

#[tokio::test]
async fn what_is_no_receipt_is_typed() {
    for (answer, error) in [
        (response("404 Not Found", b"{}"), RegistryError::Unknown),
        (response("409 Conflict", b"{}"), RegistryError::Refused { status: 409 }),
        (response("200 OK", b"{}"), RegistryError::Garbled),
        (response("200 OK", &vec![b' '; MAX_RECEIPT + 1]), RegistryError::TooLong),
    ] {
        let (url, server) = serve_once(answer);
        let client = RegistryClient::new(url, None).unwrap();
        assert_eq!(client.heartbeat("p", &Heartbeat::default()).await, Err(error));
        server.join().unwrap();
    }
}

#[tokio::test]
async fn the_engines_clock_comes_with_its_payload() {
    for (headers, clock) in [
        ("", None),
        ("kv-clock: 12.5\r\nkv-clock-error: 0.25\r\n", Some((12.5, Some(0.25)))),
        ("kv-clock: 12.5\r\nkv-clock-bound: lower\r\n", Some((12.5, None))),
        ("kv-clock: NaN\r\nkv-clock-error: 0.25\r\n", None),
        ("kv-clock: 12.5\r\nkv-clock-error: -1\r\n", Some((12.5, None))),
    ] {
        let (url, server) = serve_once(response_with("200 OK", headers, b"x"));
        let fetched = RegistryClient::new(url, None).unwrap().fetch("p", 0, 0).await.unwrap();
        assert_eq!(
            fetched.clock,
            clock.map(|(seconds, error)| ClockEstimate { seconds, error }),
            "{headers}"
        );
        server.join().unwrap();
    }
}
