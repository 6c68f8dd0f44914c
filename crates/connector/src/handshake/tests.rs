use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;

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
    let mut bytes =
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len())
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
    assert_eq!(client.fetch("p", 0, 1).await, Ok(payload));
    let asked = String::from_utf8(server.join().unwrap()).unwrap();
    assert!(asked.starts_with("GET /registry/v1/engines/p/ranks/0/1 HTTP/1.1\r\n"), "{asked}");
    assert!(asked.contains("accept: application/msgpack\r\n"));
    assert!(!asked.contains("authorization"));
}

#[tokio::test]
async fn refusals_are_typed() {
    for (status, error) in [
        ("404 Not Found", RegistryError::Unknown),
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
