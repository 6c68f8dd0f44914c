use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::StreamBody;
use proptest::collection::vec;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::mpsc;

use super::super::lending::Lender;
use super::*;

const STALL: Duration = Duration::from_secs(60);

type Frame = io::Result<hyper::body::Frame<Bytes>>;

/// A body whose frames are sent by the other half, and how often it was asked for one.
fn made() -> (mpsc::UnboundedSender<&'static str>, Body, Arc<AtomicUsize>) {
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
    (sender, Body::new(StreamBody::new(stream)), asked)
}

fn connection(room: usize) -> (DuplexStream, Reread<DuplexStream>) {
    let (client, ours) = duplex(room);
    (client, Reread::new(ours, Lender::default(), STALL))
}

/// What the client can read now.
async fn came(client: &mut DuplexStream, bytes: usize) -> String {
    let mut read = vec![0; bytes];
    client.read_exact(&mut read).await.unwrap();
    String::from_utf8(read).unwrap()
}

#[tokio::test]
async fn each_chunk_goes_as_soon_as_it_is_there() {
    let (mut client, mut ours) = connection(1 << 10);
    let (frames, body, _) = made();
    let mut passing = Passing::new(&mut ours, body, true);
    assert!(futures_util::poll!(&mut passing).is_pending());
    frames.send("data: 1\n\n").unwrap();
    assert!(futures_util::poll!(&mut passing).is_pending());
    assert_eq!(came(&mut client, 14).await, "9\r\ndata: 1\n\n\r\n");
    assert_eq!(passing.unsent.0.capacity(), 0, "it waits without a buffer");
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
    let (mut client, mut ours) = connection(8);
    let (frames, body, asked) = made();
    frames.send("data: 1\n\n").unwrap();
    let mut passing = Passing::new(&mut ours, body, true);
    assert!(futures_util::poll!(&mut passing).is_pending());
    let before = asked.load(Ordering::Relaxed);
    frames.send("data: 2\n\n").unwrap();
    assert!(futures_util::poll!(&mut passing).is_pending());
    assert_eq!(asked.load(Ordering::Relaxed), before);
    drop(frames);
    // The connection stays open, and its end is known by its length.
    let whole = "9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n";
    let (passed, all) = tokio::join!(passing, came(&mut client, whole.len()));
    passed.unwrap();
    assert_eq!(all, whole);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_takes_nothing_for_too_long_is_given_up() {
    let (mut client, mut ours) = connection(32);
    let (frames, body, _) = made();
    let start = tokio::time::Instant::now();
    let reading = async {
        frames.send("data: 1\n\n").unwrap();
        // An engine may be silent for longer.
        tokio::time::sleep(2 * STALL).await;
        frames
            .send("data: more than the client has room for, so that it waits until there is some\n\n")
            .unwrap();
        for _ in 0..3 {
            tokio::time::sleep(STALL * 2 / 3).await;
            came(&mut client, 8).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = Passing::new(&mut ours, body, true) => {
            assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        }
        () = reading => unreachable!(),
    }
    assert_eq!(start.elapsed(), 2 * STALL + 3 * STALL * 2 / 3 + STALL);
}

#[tokio::test]
async fn a_client_that_leaves_ends_it_unless_it_may_close_its_half() {
    for watches in [true, false] {
        let (mut client, mut ours) = connection(1 << 10);
        let (frames, body, _) = made();
        let mut passing = Passing::new(&mut ours, body, watches);
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
    let (frames, body, _) = made();
    frames.send("data: 1\n\n").unwrap();
    frames.send("broken").unwrap();
    assert!(Passing::new(&mut ours, body, true).await.is_err());
    drop(ours);
    let mut all = String::new();
    client.read_to_string(&mut all).await.unwrap();
    assert_eq!(all, "9\r\ndata: 1\n\n\r\n");
}

#[tokio::test]
async fn what_comes_meanwhile_is_for_the_next_reader() {
    let (mut client, ours) = connection(1 << 10);
    let mut ours = ours.with_early(b"GET ");
    let (frames, body, _) = made();
    let mut passing = Passing::new(&mut ours, body, true);
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
    let (frames, body, _) = made();
    let mut passing = Passing::new(&mut ours, body, true);
    client.write_all(b"POST").await.unwrap();
    assert!(futures_util::poll!(&mut passing).is_pending());
    drop(frames);
    passing.await.unwrap();
    assert!(ours.has_early());
    assert_eq!(ours.read_u32().await.unwrap().to_be_bytes(), *b"POST");
    assert!(!ours.has_early());
}

/// Lengths, each after so many milliseconds.
type Paces = Vec<(usize, u64)>;

/// Those of a body's frames and of a client's reads.
fn paces() -> impl Strategy<Value = (Paces, Paces)> {
    let size = prop_oneof![8 => 0..300_usize, 1 => 60_000..140_000_usize];
    let pause = || prop_oneof![3 => Just(0_u64), 1 => 1..3_000_u64];
    (vec((size, pause()), 0..20), vec((1..5_000_usize, pause()), 1..8))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn at_any_pace_all_arrives_and_what_the_client_sends_is_kept(
        (frames, reads) in paces(),
        room in 1_500..9_000_usize,
        sent in vec(any::<u8>(), 0..3_000),
        watches: bool,
    ) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(async {
            let data = |at: usize, length: usize| Bytes::from(vec![b'a' + at as u8; length]);
            let mut expected = Vec::new();
            for (at, &(length, _)) in frames.iter().enumerate().filter(|(_, frame)| frame.0 > 0) {
                expected.extend(format!("{length:x}\r\n").into_bytes());
                expected.extend(data(at, length));
                expected.extend(b"\r\n");
            }
            expected.extend(b"0\r\n\r\n");
            let stream = futures_util::stream::unfold(0, move |at| {
                let frame = frames.get(at).copied();
                async move {
                    let (length, pause) = frame?;
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                    Some((Frame::Ok(hyper::body::Frame::data(data(at, length))), at + 1))
                }
            });
            let (client, mut ours) = connection(room);
            let (mut reader, mut writer) = tokio::io::split(client);
            let reading = async {
                let mut came: Vec<u8> = Vec::new();
                for (most, pause) in reads.iter().cycle() {
                    if came.len() >= expected.len() {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(*pause)).await;
                    let mut piece = vec![0; *most];
                    let length = reader.read(&mut piece).await.unwrap();
                    came.extend(&piece[..length]);
                }
                came
            };
            let serving = async {
                Passing::new(&mut ours, Body::new(StreamBody::new(stream)), watches).await.unwrap();
                let mut early = vec![0; sent.len()];
                ours.read_exact(&mut early).await.unwrap();
                early
            };
            let writing = async { writer.write_all(&sent).await.unwrap() };
            let (came, early, ()) = tokio::join!(reading, serving, writing);
            assert!(came == expected, "{} bytes in the place of {}", came.len(), expected.len());
            assert_eq!(early, sent);
        });
    }
}
