//! The bytes of a hostile peer on the side channel, whole and in two pieces.

#![no_main]

use std::io;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use kv_connector::protocol::Generation;
use kv_connector::protocol::handshake::{HandshakeRequest, decode_clock};
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncRead, AsyncReadExt, join, sink};

// Private to the crate, and needs nothing else of it.
#[path = "../../src/side_channel/zmtp.rs"]
mod zmtp;

type Messages = (Vec<Vec<Vec<u8>>>, io::ErrorKind);

fuzz_target!(|bytes: &[u8]| {
    let messages = ready(receive_all(bytes));
    let split = bytes.first().map_or(0, |first| usize::from(*first) % bytes.len());
    let (head, tail) = bytes.split_at(split);
    assert_eq!(ready(receive_all(head.chain(tail))), messages);
    assert!(matches!(messages.1, io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof));
    messages.0.iter().for_each(|frames| message(frames));
    greet(bytes);
    let mut introduced = vec![0; 64];
    (introduced[0], introduced[9], introduced[10]) = (0xff, 1, 3);
    introduced[12..16].copy_from_slice(b"NULL");
    introduced.extend(bytes);
    greet(&introduced);
});

/// What is done with bytes in memory never has to wait.
fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("waits for more than there is"),
    }
}

async fn receive_all(mut stream: impl AsyncRead + Unpin) -> Messages {
    let mut messages = Vec::new();
    loop {
        match zmtp::receive(&mut stream, zmtp::MAX_REPLY).await {
            Ok(frames) => messages.push(frames),
            Err(error) => return (messages, error.kind()),
        }
    }
}

fn message(frames: &[Vec<u8>]) {
    assert!((1..=16).contains(&frames.len()));
    let mut sent = Vec::new();
    let slices: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
    ready(zmtp::send(&mut sent, &slices)).expect("memory takes everything");
    assert_eq!(
        ready(zmtp::receive(&mut sent.as_slice(), zmtp::MAX_REPLY)).expect("what was sent can be read"),
        frames
    );
    for frame in frames {
        let _decided = HandshakeRequest::decode(Generation::V14, frame);
        let _decided = HandshakeRequest::decode_any(frame);
        let _decided = decode_clock(frame);
    }
}

fn greet(bytes: &[u8]) {
    for socket in [zmtp::SocketType::Req, zmtp::SocketType::Router] {
        if ready(zmtp::greet(&mut join(bytes, sink()), socket)).is_ok() {
            assert!(bytes[64] & 4 != 0, "only a command introduces a peer");
        }
    }
}
