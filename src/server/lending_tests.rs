use std::convert::Infallible;
use std::time::Duration;

use futures_util::FutureExt as _;
use http::HeaderValue;
use http_body_util::StreamBody;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::sync::{mpsc, oneshot};

use super::super::reread::Reread;
use super::super::streaming::Passing;
use super::super::{Turn, next_turn};
use super::*;

/// An answer, and who sends what its body is made of.
fn stream() -> (mpsc::UnboundedSender<&'static str>, Response<Body>) {
    let (sender, mut data) = mpsc::unbounded_channel::<&'static str>();
    let frames = futures_util::stream::poll_fn(move |context| {
        let data = data.poll_recv(context);
        data.map(|data| {
            data.map(|data| Ok::<_, Infallible>(Frame::data(Bytes::from_static(data.as_bytes()))))
        })
    });
    let response = Response::builder().header("content-type", "text/event-stream").extension(Streamed);
    (sender, response.body(Body::new(StreamBody::new(frames))).unwrap())
}

#[tokio::test]
async fn only_plain_streams_are_lent() {
    let lent = |change: fn(&mut Response<Body>)| {
        let (_sender, mut answer) = stream();
        change(&mut answer);
        let lender = Lender::default();
        let answer = lender.lend(answer);
        let lends = lender.lends();
        drop(answer);
        assert!(!lender.lends(), "nobody can be given the body any more");
        lends
    };
    assert!(lent(|_| {}));
    assert!(!lent(|answer| *answer.status_mut() = StatusCode::BAD_GATEWAY));
    assert!(!lent(|answer| answer.extensions_mut().clear()));
    // An engine may answer as a whole though a stream was asked for.
    assert!(!lent(|answer| *answer.body_mut() = Body::from("{}")));
    for name in [CONNECTION, CONTENT_LENGTH] {
        let (_sender, mut answer) = stream();
        answer.headers_mut().insert(name, HeaderValue::from_static("9"));
        assert!(!is_plain_stream(&answer));
    }
    let request = |version, connection: Option<&str>| {
        let builder = Request::builder().version(version);
        let builder =
            connection.into_iter().fold(builder, |builder, value| builder.header(CONNECTION, value));
        is_plain(&builder.body(()).unwrap())
    };
    assert!(request(Version::HTTP_11, None));
    assert!(request(Version::HTTP_11, Some("Keep-Alive")));
    for said in ["close", "keep-alive, close", "upgrade", ""] {
        assert!(!request(Version::HTTP_11, Some(said)), "{said:?}");
    }
    assert!(!request(Version::HTTP_10, None));
    assert!(!request(Version::HTTP_10, Some("keep-alive")));
}

#[tokio::test]
async fn a_body_is_taken_back_when_all_it_gave_is_written_and_it_waits() {
    let lender = Lender::default();
    let (sender, answer) = stream();
    let mut lent = lender.lend(answer).into_body();
    lender.flushed();
    assert!(lender.take_back().is_none(), "it was not asked yet");
    sender.send("a").unwrap();
    let mut poll =
        || futures_util::future::poll_fn(|context| Pin::new(&mut lent).poll_frame(context)).now_or_never();
    assert!(poll().is_some());
    lender.flushed();
    assert!(lender.take_back().is_none(), "it may have more");
    assert!(poll().is_none());
    sender.send("b").unwrap();
    assert!(poll().is_some());
    assert!(poll().is_none());
    assert!(lender.take_back().is_none(), "something is still to be written");
    lender.flushed();
    assert!(lender.take_back().is_some());
    assert!(matches!(poll(), Some(None)), "the body is elsewhere");
}

#[tokio::test]
async fn a_connection_takes_over_a_stream_that_lasts_and_gives_the_next_request_to_hyper() {
    let (mut client, ours) = duplex(1 << 12);
    let lender = Lender::default();
    let (answers, asked) = (parking_lot::Mutex::new(Vec::new()), lender.clone());
    let (sender, answer) = stream();
    answers.lock().push(answer);
    let (last, answer) = stream();
    answers.lock().insert(0, answer);
    drop(last);
    let service = service_fn(|_: Request<hyper::body::Incoming>| {
        let answer = answers.lock().pop().unwrap();
        Answering { answer: Box::pin(async { Ok(answer) }), lender: Some(asked.clone()) }
    });
    let (takes_over, taken_over) = oneshot::channel();
    let serving = async {
        let stream = Reread::new(ours, lender.clone(), Duration::from_secs(60));
        let mut serving = http1::Builder::new().serve_connection(TokioIo::new(stream), &service);
        let Turn::Lasts(body) = next_turn(&mut serving, &lender).await else { panic!("it ended") };
        takes_over.send(()).unwrap();
        let parts = serving.into_parts();
        let mut stream = parts.io.into_inner().with_early(&parts.read_buf);
        Passing::new(&mut stream, body, true).await.unwrap();
        let mut serving = http1::Builder::new().serve_connection(TokioIo::new(stream), &service);
        assert!(matches!(next_turn(&mut serving, &lender).await, Turn::Ended(Ok(()))));
    };
    let asking = async {
        let request = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n";
        client.write_all(request).await.unwrap();
        sender.send("one").unwrap();
        taken_over.await.unwrap();
        client.write_all(request).await.unwrap();
        sender.send("more").unwrap();
        drop(sender);
        let mut all = Vec::new();
        while all.windows(5).filter(|end| end == b"0\r\n\r\n").count() < 2 {
            assert_ne!(client.read_buf(&mut all).await.unwrap(), 0);
        }
        drop(client);
        String::from_utf8(all).unwrap()
    };
    let ((), all) = tokio::join!(serving, asking);
    let heads = all.matches("HTTP/1.1 200 OK\r\n").count();
    assert_eq!((heads, all.matches("date: ").count()), (2, 2), "{all}");
    let first = all.split_once("\r\n\r\n").unwrap().1;
    assert!(first.starts_with("3\r\none\r\n4\r\nmore\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n"), "{all}");
    assert!(all.ends_with("\r\n\r\n0\r\n\r\n"), "{all}");
}
