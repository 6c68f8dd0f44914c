use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http_body_util::StreamBody;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::mpsc;

use super::*;

type Frame = io::Result<hyper::body::Frame<Bytes>>;

/// An answer whose body's frames are sent by the other half, and how often it was asked for one.
fn answer() -> (mpsc::UnboundedSender<&'static str>, Response<Body>, Arc<AtomicUsize>) {
    let (sender, mut frames) = mpsc::unbounded_channel::<&'static str>();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let stream = futures_util::stream::poll_fn(move |context| {
        count.fetch_add(1, Ordering::Relaxed);
        frames.poll_recv(context).map(|data| {
            data.map(|data| match data {
                "broken" => Err(io::Error::other("broken")),
                data => Frame::Ok(hyper::body::Frame::data(Bytes::from_static(data.as_bytes()))),
            })
        })
    });
    let response = Response::builder().header("content-type", "text/event-stream").header(DATE, "now");
    let response = response.extension(Streamed).body(Body::new(StreamBody::new(stream))).unwrap();
    (sender, response, asked)
}

const HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ndate: now\r\ntransfer-encoding: chunked\r\n\r\n";

fn connection(room: usize) -> (DuplexStream, Reread<DuplexStream>) {
    let (client, ours) = duplex(room);
    (client, Reread::new(ours))
}

/// What the client can read now.
async fn came(client: &mut DuplexStream, bytes: usize) -> String {
    let mut read = vec![0; bytes];
    client.read_exact(&mut read).await.unwrap();
    String::from_utf8(read).unwrap()
}

#[tokio::test]
async fn the_head_and_each_chunk_come_as_soon_as_they_are_there() {
    let (mut client, mut ours) = connection(1 << 10);
    let (frames, response, _) = answer();
    let mut passing = Passing::new(&mut ours, response, false, true);
    assert!(futures_util::poll!(&mut passing).is_pending());
    assert_eq!(came(&mut client, HEAD.len()).await, HEAD);
    frames.send("data: 1\n\n").unwrap();
    assert!(futures_util::poll!(&mut passing).is_pending());
    assert_eq!(came(&mut client, 14).await, "9\r\ndata: 1\n\n\r\n");
    assert_eq!((passing.unsent.0.capacity(), passing.head.is_none()), (0, true), "it waits without a buffer");
    for data in ["data: 2\n\n", "", "data: 3\n\n"] {
        frames.send(data).unwrap();
    }
    drop(frames);
    passing.await.unwrap();
    drop(ours);
    let mut rest = String::new();
    client.read_to_string(&mut rest).await.unwrap();
    assert_eq!(rest, "9\r\ndata: 2\n\n\r\n9\r\ndata: 3\n\n\r\n0\r\n\r\n");
}

#[tokio::test]
async fn a_client_that_takes_nothing_holds_the_engine_up() {
    let (mut client, mut ours) = connection(16);
    let (frames, response, asked) = answer();
    frames.send("data: 1\n\n").unwrap();
    let mut passing = Passing::new(&mut ours, response, true, true);
    assert!(futures_util::poll!(&mut passing).is_pending());
    let before = asked.load(Ordering::Relaxed);
    frames.send("data: 2\n\n").unwrap();
    assert!(futures_util::poll!(&mut passing).is_pending());
    assert_eq!(asked.load(Ordering::Relaxed), before);
    drop(frames);
    // The connection stays open, and its end is known by its length.
    let head = HEAD.replace("transfer-", "connection: close\r\ntransfer-");
    let whole = format!("{head}9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n");
    let (passed, all) = tokio::join!(passing, came(&mut client, whole.len()));
    passed.unwrap();
    assert_eq!(all, whole);
}

#[tokio::test]
async fn a_client_that_leaves_ends_it_unless_it_may_close_its_half() {
    for watches in [true, false] {
        let (mut client, mut ours) = connection(1 << 10);
        let (frames, response, _) = answer();
        let mut passing = Passing::new(&mut ours, response, false, watches);
        assert!(futures_util::poll!(&mut passing).is_pending());
        client.shutdown().await.unwrap();
        if watches {
            assert_eq!(passing.await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        } else {
            assert!(futures_util::poll!(&mut passing).is_pending());
            drop(frames);
            passing.await.unwrap();
        }
    }
}

#[tokio::test]
async fn an_answer_that_breaks_off_has_no_end() {
    let (mut client, mut ours) = connection(1 << 10);
    let (frames, response, _) = answer();
    frames.send("data: 1\n\n").unwrap();
    frames.send("broken").unwrap();
    assert!(Passing::new(&mut ours, response, false, true).await.is_err());
    drop(ours);
    let mut all = String::new();
    client.read_to_string(&mut all).await.unwrap();
    assert_eq!(all, format!("{HEAD}9\r\ndata: 1\n\n\r\n"));
}

#[tokio::test]
async fn what_comes_meanwhile_is_for_the_next_reader() {
    let (mut client, ours) = connection(1 << 10);
    let mut ours = ours.with_early(b"GET ");
    let (frames, response, _) = answer();
    let mut passing = Passing::new(&mut ours, response, false, true);
    assert!(futures_util::poll!(&mut passing).is_pending());
    client.write_all(b"/livez").await.unwrap();
    assert!(futures_util::poll!(&mut passing).is_pending());
    drop(frames);
    passing.await.unwrap();
    client.shutdown().await.unwrap();
    let mut next = String::new();
    ours.read_to_string(&mut next).await.unwrap();
    assert_eq!(next, "GET /livez");
    let (mut client, mut ours) = connection(1 << 10);
    let (frames, response, _) = answer();
    let mut passing = Passing::new(&mut ours, response, false, true);
    client.write_all(b"POST").await.unwrap();
    assert!(futures_util::poll!(&mut passing).is_pending());
    drop(frames);
    passing.await.unwrap();
    assert!(ours.has_early());
    assert_eq!(ours.read_u32().await.unwrap().to_be_bytes(), *b"POST");
    assert!(!ours.has_early());
}

#[tokio::test]
async fn only_plain_streams_are_handed_over() {
    let taken = async |is_plain, change: fn(&mut Response<Body>)| {
        let (_frames, mut response, _) = answer();
        change(&mut response);
        let over = HandedOver::default();
        let answered = futures_util::poll!(Box::pin(over.or_answer(is_plain, async { Ok(response) })));
        assert_eq!(answered.is_pending(), over.0.lock().is_some());
        over.take().is_some()
    };
    assert!(taken(true, |_| {}).await);
    assert!(!taken(false, |_| {}).await);
    assert!(!taken(true, |response| *response.status_mut() = StatusCode::BAD_GATEWAY).await);
    assert!(!taken(true, |response| response.extensions_mut().clear()).await);
    assert!(
        !taken(true, |response| {
            response.headers_mut().insert(CONTENT_LENGTH, http::HeaderValue::from_static("9"));
        })
        .await
    );
    let request = |version, connection: Option<&str>| {
        let builder = Request::builder().version(version);
        let builder =
            connection.into_iter().fold(builder, |builder, value| builder.header(CONNECTION, value));
        is_plain(&builder.body(()).unwrap())
    };
    assert!(request(Version::HTTP_11, None));
    assert!(!request(Version::HTTP_11, Some("close")));
    assert!(!request(Version::HTTP_10, None));
}
