//! The reading side: a SUB socket for what comes, a DEALER for what was missed.

use std::io;

use tokio::io::BufStream;
use tokio::net::TcpStream;

use crate::side_channel::zmtp::{self, SocketType};

/// A message that subscribes to every topic.
const EVERYTHING: &[u8] = &[1];

/// What follows the last replayed batch in the place of its number.
const END: u64 = u64::MAX;

/// A batch as it was published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Its number; an engine counts its batches from zero.
    pub number: u64,
    /// The batch, as msgpack.
    pub payload: Vec<u8>,
}

/// A subscription to one engine's events.
#[derive(Debug)]
pub struct EventSubscriber {
    stream: BufStream<TcpStream>,
}

impl EventSubscriber {
    /// Connects and subscribes. Sets no deadline; dropping the future ends the attempt.
    ///
    /// # Errors
    /// Nobody listens there, or somebody who does not speak ZMTP.
    pub async fn connect(host: &str, port: u16) -> io::Result<Self> {
        let mut stream = open(host, port, SocketType::Sub).await?;
        zmtp::send(&mut stream, &[EVERYTHING]).await?;
        Ok(Self { stream })
    }

    /// Waits for the next batch. After an error or a dropped future the subscription is of no more use.
    ///
    /// # Errors
    /// The connection ended, or a message is none of an engine's.
    pub async fn next(&mut self) -> io::Result<Published> {
        let frames = zmtp::receive(&mut self.stream, zmtp::MAX_REPLY).await?;
        published(frames)
    }
}

/// Asks for the batches from a number on and hands over each of those that the engine still has. Sets no
/// deadline.
///
/// # Errors
/// The connection ended, or an answer is none of an engine's.
pub async fn replay(host: &str, port: u16, from: u64, mut each: impl FnMut(Published)) -> io::Result<()> {
    let mut stream = open(host, port, SocketType::Dealer).await?;
    zmtp::send(&mut stream, &[b"", &from.to_be_bytes()]).await?;
    loop {
        let mut frames = zmtp::receive(&mut stream, zmtp::MAX_REPLY).await?;
        if frames.first().is_none_or(|delimiter| !delimiter.is_empty()) {
            return Err(zmtp::broken("the answer has no delimiter"));
        }
        frames.remove(0);
        let published = published(frames)?;
        if published.number == END {
            return Ok(());
        }
        each(published);
    }
}

async fn open(host: &str, port: u16, socket: SocketType) -> io::Result<BufStream<TcpStream>> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    let mut stream = BufStream::new(stream);
    zmtp::greet(&mut stream, socket).await?;
    Ok(stream)
}

/// The last two frames; before them is a topic, which older engines leave out of what they replay.
fn published(mut frames: Vec<Vec<u8>>) -> io::Result<Published> {
    let (payload, number) = (frames.pop(), frames.pop());
    let number = number.and_then(|number| <[u8; 8]>::try_from(number).ok());
    match (number, payload) {
        (Some(number), Some(payload)) if frames.len() <= 1 => {
            Ok(Published { number: u64::from_be_bytes(number), payload })
        }
        _ => Err(zmtp::broken("the message has not the frames of an event")),
    }
}
