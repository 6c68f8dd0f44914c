use bytes::Bytes;
use http::header::HeaderValue;
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::connect::HttpConnector;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::connection::EngineTls;
use crate::dial::Dials;

/// An engine whose connections the test holds itself.
struct Engine {
    listener: TcpListener,
    place: Place,
    wire: Wire,
}

impl Engine {
    async fn start() -> Self {
        Self::keeping(Duration::from_secs(60)).await
    }

    async fn keeping(lasts: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let authority: Authority = listener.local_addr().unwrap().to_string().parse().unwrap();
        let patience = Duration::from_secs(60);
        let dialer = Dialer::new(HttpConnector::new(), EngineTls::default(), Dials::new(patience), patience);
        Self {
            listener,
            place: Place::new(false, authority),
            wire: Wire::new(dialer, lasts, TaskTracker::new()),
        }
    }

    async fn accept(&self) -> TcpStream {
        self.listener.accept().await.unwrap().0
    }

    fn ask(
        &self,
        body: &[u8],
    ) -> impl Future<Output = Result<Response<EngineBody>, WireError>> + Send + use<> {
        self.ask_by(Method::POST, body)
    }

    fn ask_by(
        &self,
        method: Method,
        body: &[u8],
    ) -> impl Future<Output = Result<Response<EngineBody>, WireError>> + Send + use<> {
        let (wire, place, body) =
            (self.wire.clone(), self.place.clone(), Spliced::from(Bytes::copy_from_slice(body)));
        async move {
            let headers = HeaderMap::from_iter([("x-a".parse().unwrap(), HeaderValue::from_static("1"))]);
            let (prefix, path) = ("/engine", "/v1/x?y=z");
            wire.send(&Outgoing {
                place: &place,
                method: &method,
                prefix,
                path,
                headers: &headers,
                body: &body,
            })
            .await
        }
    }
}

/// Reads one request whose body has this length.
async fn read(stream: &mut TcpStream, body: usize) -> String {
    let mut all = Vec::new();
    loop {
        if let Some(end) = memchr::memmem::find(&all, b"\r\n\r\n")
            && all.len() == end + 4 + body
        {
            return String::from_utf8(all).unwrap();
        }
        assert_ne!(stream.read_buf(&mut all).await.unwrap(), 0, "the router closed");
    }
}

async fn text(answer: Response<EngineBody>) -> Result<String, WireError> {
    Ok(String::from_utf8(answer.into_body().collect().await?.to_bytes().to_vec()).unwrap())
}

#[tokio::test]
async fn a_request_is_written_whole_and_its_connection_kept() {
    let engine = Engine::start().await;
    let (answer, mut stream) = tokio::join!(engine.ask(b"hello"), async {
        let mut stream = engine.accept().await;
        let request = read(&mut stream, 5).await;
        let host = engine.place.authority.as_str();
        assert_eq!(
            request,
            format!(
                "POST /engine/v1/x?y=z HTTP/1.1\r\nhost: {host}\r\nx-a: 1\r\ncontent-length: 5\r\n\r\nhello"
            )
        );
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-b:  c \r\nx-e:\r\n\r\nab")
            .await
            .unwrap();
        stream
    });
    let answer = answer.unwrap();
    assert_eq!(
        (&answer.headers()["x-b"], &answer.headers()["x-e"]),
        (&"c".parse().unwrap(), &"".parse().unwrap())
    );
    assert_eq!(text(answer).await.unwrap(), "ab");
    let (again, ()) = tokio::join!(engine.ask(b"again"), async {
        read(&mut stream, 5).await;
        stream
            .write_all(b"HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
            .await
            .unwrap();
        stream.write_all(b"2\r\nbc\r\n0\r\n\r\n").await.unwrap();
    });
    let again = again.unwrap();
    assert_eq!(again.status(), 404);
    assert_eq!(text(again).await.unwrap(), "abc");
}

#[tokio::test]
async fn interim_answers_are_passed_over_and_heads_may_come_in_pieces() {
    let engine = Engine::start().await;
    let (answer, ()) = tokio::join!(engine.ask(b"x"), async {
        let mut stream = engine.accept().await;
        read(&mut stream, 1).await;
        for piece in [
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 10",
            "3 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 20",
            "0 OK\r\ncontent-le",
            "ngth: 3\r\n\r\na",
            "bc",
        ] {
            stream.write_all(piece.as_bytes()).await.unwrap();
            tokio::task::yield_now().await;
        }
    });
    assert_eq!(text(answer.unwrap()).await.unwrap(), "abc");
}

#[tokio::test]
async fn a_kept_connection_that_has_ended_is_not_used() {
    let engine = Engine::start().await;
    let (answer, stream) = tokio::join!(engine.ask(b"x"), async {
        let mut stream = engine.accept().await;
        read(&mut stream, 1).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        stream
    });
    text(answer.unwrap()).await.unwrap();
    drop(stream);
    // Until the runtime has looked at its sockets.
    while engine.wire.kept.shelf(&engine.place).is_needed() {
        tokio::task::yield_now().await;
    }
    let (answer, _stream) = tokio::join!(engine.ask(b"y"), async {
        let mut stream = engine.accept().await;
        read(&mut stream, 1).await;
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
        stream
    });
    assert_eq!(answer.unwrap().status(), 204);
}

#[tokio::test]
async fn a_connection_is_not_kept_whose_answer_says_or_means_so() {
    for answer in [
        "HTTP/1.1 200 OK\r\nconnection: x, Close\r\ncontent-length: 2\r\n\r\nab",
        "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nab",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabHTTP/1.1 200 OK\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\nx",
    ] {
        let engine = Engine::start().await;
        let (got, mut stream) = tokio::join!(engine.ask(b"x"), async {
            let mut stream = engine.accept().await;
            read(&mut stream, 1).await;
            stream.write_all(answer.as_bytes()).await.unwrap();
            stream
        });
        assert_eq!(text(got.unwrap()).await.unwrap(), "ab", "{answer}");
        let end = stream.read(&mut [0; 1]).await;
        assert!(matches!(end, Ok(0) | Err(_)), "{answer}");
    }
}

#[tokio::test]
async fn a_body_without_a_length_ends_with_its_connection_and_any_other_is_cut_off_by_it() {
    for (answer, whole) in [
        ("HTTP/1.1 200 OK\r\n\r\nab", true),
        ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", false),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n", false),
    ] {
        let engine = Engine::start().await;
        let (got, ()) = tokio::join!(engine.ask(b"x"), async {
            let mut stream = engine.accept().await;
            read(&mut stream, 1).await;
            stream.write_all(answer.as_bytes()).await.unwrap();
        });
        match text(got.unwrap()).await {
            Ok(body) => assert!(whole && body == "ab", "{answer}"),
            Err(error) => assert!(!whole && matches!(error, WireError::Reset { .. }), "{answer}"),
        }
    }
}

#[tokio::test]
async fn what_is_not_http_is_told_from_what_breaks_off() {
    let engine = Engine::start().await;
    for (answer, is_http) in [
        ("", true),
        ("HTTP/1.1 200 O", true),
        ("nonsense\r\n\r\n", false),
        ("HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", false),
    ] {
        let (got, ()) = tokio::join!(engine.ask(b"x"), async {
            let mut stream = engine.accept().await;
            read(&mut stream, 1).await;
            stream.write_all(answer.as_bytes()).await.unwrap();
        });
        match got.unwrap_err() {
            WireError::Reset { silent: false } => assert!(is_http, "{answer}"),
            WireError::Protocol => assert!(!is_http, "{answer}"),
            other => panic!("{answer}: {other}"),
        }
    }
}

#[tokio::test]
async fn an_answer_before_the_body_has_come_whole_is_taken() {
    let engine = Engine::start().await;
    let body = vec![b'x'; 32 << 20];
    let (answer, _stream) = tokio::join!(engine.ask(&body), async {
        let mut stream = engine.accept().await;
        let mut some = [0; 1000];
        stream.read_exact(&mut some).await.unwrap();
        stream.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno").await.unwrap();
        stream
    });
    let answer = answer.unwrap();
    assert_eq!(answer.status(), 413);
    assert_eq!(text(answer).await.unwrap(), "no");
}

#[tokio::test]
async fn a_large_body_goes_out_whole_to_a_slow_reader() {
    let engine = Engine::start().await;
    let body: Vec<u8> = (0..8_u32 << 20).map(|at| (at % 251) as u8).collect();
    let (answer, ()) = tokio::join!(engine.ask(&body), async {
        let mut stream = engine.accept().await;
        let mut all = Vec::new();
        let end = loop {
            stream.read_buf(&mut all).await.unwrap();
            if let Some(end) = memchr::memmem::find(&all, b"\r\n\r\n") {
                break end + 4;
            }
        };
        while all.len() < end + body.len() {
            stream.read_buf(&mut all).await.unwrap();
        }
        assert!(all[end..] == body);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    });
    assert_eq!(answer.unwrap().status(), 200);
}

#[tokio::test]
async fn a_head_has_no_body_and_a_get_no_length() {
    let engine = Engine::start().await;
    let (answer, ()) = tokio::join!(engine.ask_by(Method::HEAD, b""), async {
        let mut stream = engine.accept().await;
        assert!(!read(&mut stream, 0).await.contains("content-length"));
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n").await.unwrap();
    });
    assert_eq!(text(answer.unwrap()).await.unwrap(), "");
}

#[tokio::test]
async fn idle_connections_are_closed_in_time() {
    let engine = Engine::keeping(Duration::from_millis(100)).await;
    let (answer, mut stream) = tokio::join!(engine.ask(b"x"), async {
        let mut stream = engine.accept().await;
        read(&mut stream, 1).await;
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        stream
    });
    text(answer.unwrap()).await.unwrap();
    assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 0);
}

#[tokio::test]
async fn a_path_that_would_break_the_request_is_refused() {
    let engine = Engine::start().await;
    let (headers, body) = (HeaderMap::new(), Spliced::from(Bytes::new()));
    for path in ["/a b", "/a\r\nx: y", "a", "/\u{7f}"] {
        let request = Outgoing {
            place: &engine.place,
            method: &Method::GET,
            prefix: "",
            path,
            headers: &headers,
            body: &body,
        };
        assert!(matches!(engine.wire.send(&request).await, Err(WireError::Target)), "{path:?}");
    }
}
