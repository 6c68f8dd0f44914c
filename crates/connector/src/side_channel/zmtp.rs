//! ZMTP 3: greeting, READY and message frames, with everything a peer sends bounded.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Longest message that an asking side reads; payloads are far shorter.
pub(crate) const MAX_REPLY: u64 = 16 << 20;
/// Longest message that a serving side reads; requests have some twenty bytes.
pub(crate) const MAX_REQUEST: u64 = 4 << 10;
/// Longest command; READY carries a few short properties.
const MAX_COMMAND: u64 = 4 << 10;
/// Most frames of one message.
const MAX_FRAMES: usize = 16;

const GREETING_LEN: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The kinds of socket that meet on the side channel, and those that carry KV events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketType {
    Req,
    Router,
    Dealer,
    Pub,
    Sub,
}

impl SocketType {
    fn as_str(self) -> &'static str {
        match self {
            Self::Req => "REQ",
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
            Self::Pub => "PUB",
            Self::Sub => "SUB",
        }
    }
}

pub(crate) fn broken(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Introduces both sides; the peer's kind of socket is its own business.
pub(crate) async fn greet<S>(stream: &mut S, socket: SocketType) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    stream.write_all(&greeting()).await?;
    stream.flush().await?;
    let mut theirs = [0; GREETING_LEN];
    stream.read_exact(&mut theirs).await?;
    let mechanism = &theirs[12..32];
    if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 {
        return Err(broken("the peer does not speak ZMTP 3"));
    }
    if mechanism[..4] != *b"NULL" || mechanism[4..].iter().any(|byte| *byte != 0) {
        return Err(broken("the peer wants a security mechanism"));
    }
    stream.write_all(&ready(socket)).await?;
    stream.flush().await?;
    match read_frame(stream, MAX_COMMAND).await? {
        Frame { flags, body } if flags & COMMAND != 0 && body.starts_with(b"\x05READY") => Ok(()),
        _ => Err(broken("the peer is not ready")),
    }
}

fn greeting() -> [u8; GREETING_LEN] {
    let mut bytes = [0; GREETING_LEN];
    bytes[0] = 0xff;
    bytes[8] = 1;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn ready(socket: SocketType) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", socket.as_str()), ("Identity", "")] {
        body.push(name.len() as u8);
        body.extend(name.as_bytes());
        body.extend((value.len() as u32).to_be_bytes());
        body.extend(value.as_bytes());
    }
    let mut frame = vec![COMMAND, body.len() as u8];
    frame.extend(body);
    frame
}

/// Sends the frames as one message.
pub(crate) async fn send(stream: &mut (impl AsyncWrite + Unpin), frames: &[&[u8]]) -> io::Result<()> {
    let mut bytes = Vec::new();
    for (index, frame) in frames.iter().enumerate() {
        let more = if index + 1 < frames.len() { MORE } else { 0 };
        match u8::try_from(frame.len()) {
            Ok(len) => bytes.extend([more, len]),
            Err(_) => {
                bytes.push(more | LONG);
                bytes.extend((frame.len() as u64).to_be_bytes());
            }
        }
        bytes.extend(*frame);
    }
    stream.write_all(&bytes).await?;
    stream.flush().await
}

/// The frames of the next message of at most so many bytes; commands in between are passed over.
pub(crate) async fn receive(stream: &mut (impl AsyncRead + Unpin), most: u64) -> io::Result<Vec<Vec<u8>>> {
    let mut frames = Vec::new();
    let mut left = most;
    loop {
        let Frame { flags, body } = read_frame(stream, most.max(MAX_COMMAND)).await?;
        if flags & COMMAND != 0 {
            continue;
        }
        left = left.checked_sub(body.len() as u64).ok_or(broken("the message is too long"))?;
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(frames);
        }
        if frames.len() == MAX_FRAMES {
            return Err(broken("the message has too many frames"));
        }
    }
}

struct Frame {
    flags: u8,
    body: Vec<u8>,
}

async fn read_frame(stream: &mut (impl AsyncRead + Unpin), most: u64) -> io::Result<Frame> {
    let flags = stream.read_u8().await?;
    let len = if flags & LONG != 0 { stream.read_u64().await? } else { u64::from(stream.read_u8().await?) };
    if len > most {
        return Err(broken("the frame is too long"));
    }
    // Grows with what arrives, not with what was announced.
    let mut body = Vec::new();
    stream.take(len).read_to_end(&mut body).await?;
    if (body.len() as u64) < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Frame { flags, body })
}
