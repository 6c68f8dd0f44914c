//! Bodies that nobody reads, over a real connection.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{BODY_BYTES, Surface};

/// Serves the surface for as long as the client's part takes.
async fn with_connection<F: Future<Output = ()>>(client: impl FnOnce(TcpStream) -> F) {
    let surface = Surface::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = surface.router.clone().into_make_service_with_connect_info::<SocketAddr>();
    let serve = axum::serve(listener, service).into_future();
    let talk = async { client(TcpStream::connect(address).await.unwrap()).await };
    tokio::select! {
        ended = serve => panic!("the server ended: {ended:?}"),
        in_time = tokio::time::timeout(Duration::from_secs(20), talk) => in_time.unwrap(),
    }
}

/// Reads up to and including `end`.
async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    while !text.contains(end) {
        let mut chunk = [0; 1024];
        let length = stream.read(&mut chunk).await.unwrap();
        assert_ne!(length, 0, "the connection ended after {text:?}");
        text.push_str(std::str::from_utf8(&chunk[..length]).unwrap());
    }
    text
}

/// The last chunk.
const END: &str = "0\r\n\r\n";

#[tokio::test]
async fn a_refused_upload_leaves_the_connection_usable() {
    with_connection(|mut stream| async move {
        for path in ["/v1/completions", "/nowhere"] {
            let length = BODY_BYTES + BODY_BYTES / 2;
            let head = format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n");
            stream.write_all(head.as_bytes()).await.unwrap();
            let refused = read_until(&mut stream, "\"code\":").await;
            let status = if path == "/nowhere" { "HTTP/1.1 404 " } else { "HTTP/1.1 413 " };
            assert!(refused.starts_with(status), "{refused}");
            stream.write_all(&vec![b' '; length]).await.unwrap();
            if !refused.contains(END) {
                read_until(&mut stream, END).await;
            }
        }
        stream.write_all(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let live = read_until(&mut stream, "{\"status\":\"ok\"}").await;
        assert!(live.starts_with("HTTP/1.1 200 "), "{live}");
    })
    .await;
}

#[tokio::test]
async fn a_client_that_waits_for_permission_is_refused_without_its_body() {
    with_connection(|mut stream| async move {
        let length = BODY_BYTES + 1;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\nexpect: 100-continue\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).await.unwrap();
        assert!(all.starts_with("HTTP/1.1 413 "), "{all}");
        assert!(all.contains("connection: close"), "{all}");
    })
    .await;
}

#[tokio::test]
async fn a_length_beyond_all_discarding_closes_the_connection() {
    with_connection(|mut stream| async move {
        let head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999\r\n\r\n";
        stream.write_all(head).await.unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).await.unwrap();
        assert!(all.starts_with("HTTP/1.1 413 "), "{all}");
        assert!(all.contains("connection: close"), "{all}");
    })
    .await;
}
