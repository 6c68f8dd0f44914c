//! Bytes between loopback agents: the blob that introduces one and the frames on a connection.
//!
//! Integers are big-endian. Lengths from the socket are bounded before anything is allocated.

use std::io::{self, Read, Write};
use std::net::SocketAddr;

use crate::protocol::msgpack::{Reader, Writer};
use crate::transport::{Descriptor, TransferOp};

const KIND: &str = "kvbaton-loopback-1";
pub(super) const MAX_NAME: usize = 1 << 10;
/// Longest notification.
const MAX_MESSAGE: usize = 1 << 20;
/// Most descriptors in one transfer.
const MAX_DESCRIPTORS: usize = 1 << 22;

pub(super) const STATUS_OK: u8 = 0;
pub(super) const STATUS_REFUSED: u8 = 1;

const OP_READ: u8 = 1;
const OP_WRITE: u8 = 2;
const OP_NOTIFY: u8 = 3;

/// What a peer needs to reach an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AgentBlob {
    pub(super) name: String,
    pub(super) address: SocketAddr,
    pub(super) secret: [u8; 16],
}

impl AgentBlob {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.array(4);
        writer.str(KIND);
        writer.str(&self.name);
        writer.str(&self.address.to_string());
        writer.bin(&self.secret);
        writer.bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        if reader.array_header("blob").ok()? != 4 || reader.str("kind").ok()? != KIND {
            return None;
        }
        let name = reader.str("name").ok().filter(|name| name.len() <= MAX_NAME)?.to_owned();
        let address: SocketAddr = reader.str("address").ok()?.parse().ok()?;
        let secret = reader.bin("secret").ok()?.try_into().ok()?;
        reader.finish().ok()?;
        // A peer must not be able to make this engine dial anything but a local agent.
        address.ip().is_loopback().then_some(Self { name, address, secret })
    }
}

const FABRIC_KIND: &str = "kvbaton-fabric-1";

/// The blob of an agent that is reached through a fabric, by its name alone.
pub(super) fn encode_fabric_name(name: &str) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.array(2);
    writer.str(FABRIC_KIND);
    writer.str(name);
    writer.bytes
}

pub(super) fn decode_fabric_name(bytes: &[u8]) -> Option<String> {
    let mut reader = Reader::new(bytes);
    if reader.array_header("blob").ok()? != 2 || reader.str("kind").ok()? != FABRIC_KIND {
        return None;
    }
    let name = reader.str("name").ok().filter(|name| name.len() <= MAX_NAME)?.to_owned();
    reader.finish().ok()?;
    Some(name)
}

/// One request on a connection; the bytes of a write follow it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Transfer { op: TransferOp, descriptors: Vec<Descriptor>, notification: Option<Vec<u8>> },
    Notify(Vec<u8>),
}

pub(super) fn write_hello(out: &mut impl Write, secret: &[u8; 16], name: &str) -> io::Result<()> {
    out.write_all(secret)?;
    write_bytes(out, name.as_bytes())
}

/// The name of the agent that connects, when it knows the secret.
pub(super) fn read_hello(input: &mut impl Read, secret: &[u8; 16]) -> io::Result<String> {
    let mut offered = [0; 16];
    input.read_exact(&mut offered)?;
    if offered != *secret {
        return Err(refused("wrong secret"));
    }
    let name = read_bytes(input, MAX_NAME)?;
    String::from_utf8(name).map_err(|_| refused("name is not UTF-8"))
}

pub(super) fn write_transfer(
    out: &mut impl Write,
    op: TransferOp,
    descriptors: &[Descriptor],
    notification: Option<&[u8]>,
) -> io::Result<()> {
    let code = match op {
        TransferOp::Read => OP_READ,
        TransferOp::Write => OP_WRITE,
    };
    out.write_all(&[code, u8::from(notification.is_some())])?;
    write_bytes(out, notification.unwrap_or_default())?;
    write_len(out, descriptors.len(), MAX_DESCRIPTORS)?;
    for descriptor in descriptors {
        out.write_all(&descriptor.address.to_be_bytes())?;
        out.write_all(&descriptor.len.to_be_bytes())?;
    }
    Ok(())
}

pub(super) fn write_notify(out: &mut impl Write, message: &[u8]) -> io::Result<()> {
    out.write_all(&[OP_NOTIFY])?;
    write_bytes(out, message)
}

/// The next request; none when the peer has closed the connection between two requests.
pub(super) fn read_frame(input: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut code = [0; 1];
    if input.read(&mut code)? == 0 {
        return Ok(None);
    }
    let op = match code[0] {
        OP_READ => TransferOp::Read,
        OP_WRITE => TransferOp::Write,
        OP_NOTIFY => return Ok(Some(Frame::Notify(read_bytes(input, MAX_MESSAGE)?))),
        _ => return Err(refused("unknown request")),
    };
    let mut has_notification = [0; 1];
    input.read_exact(&mut has_notification)?;
    let message = read_bytes(input, MAX_MESSAGE)?;
    let count = read_len(input, MAX_DESCRIPTORS)?;
    let mut descriptors = Vec::new();
    for _ in 0..count {
        let (address, len) = (read_u64(input)?, read_u64(input)?);
        descriptors.push(Descriptor { address, len, device: 0 });
    }
    let notification = (has_notification[0] != 0).then_some(message);
    Ok(Some(Frame::Transfer { op, descriptors, notification }))
}

pub(super) fn read_status(input: &mut impl Read) -> io::Result<()> {
    let mut status = [0; 1];
    input.read_exact(&mut status)?;
    if status[0] == STATUS_OK { Ok(()) } else { Err(refused("the peer refused the request")) }
}

pub(super) fn refused(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn write_bytes(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    write_len(out, bytes.len(), MAX_MESSAGE)?;
    out.write_all(bytes)
}

fn read_bytes(input: &mut impl Read, limit: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; read_len(input, limit)?];
    input.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn write_len(out: &mut impl Write, len: usize, limit: usize) -> io::Result<()> {
    match u32::try_from(len) {
        Ok(wire) if len <= limit => out.write_all(&wire.to_be_bytes()),
        _ => Err(refused("length over the limit")),
    }
}

fn read_len(input: &mut impl Read, limit: usize) -> io::Result<usize> {
    let mut bytes = [0; 4];
    input.read_exact(&mut bytes)?;
    match usize::try_from(u32::from_be_bytes(bytes)) {
        Ok(len) if len <= limit => Ok(len),
        _ => Err(refused("length over the limit")),
    }
}

fn read_u64(input: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    input.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}
