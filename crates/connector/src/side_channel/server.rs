//! The serving side: answers requests for the payloads of this engine's ranks.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::BufStream;
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

use crate::ClockTime;
use crate::protocol::Generation;
use crate::protocol::handshake::{HandshakeRequest, encode_clock};

use super::zmtp::{self, SocketType};

/// Encoded handshake payloads by (pipeline rank, transfer rank).
pub type RankPayloads = HashMap<(u32, u32), Vec<u8>>;

/// Connections served at a time; for one more the oldest is closed, since a handshake is short.
pub(super) const MAX_CONNECTIONS: usize = 256;
/// How long a peer may take to introduce itself or to take an answer.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may be silent; a ZMQ socket connects again when it wants something.
const SILENCE: Duration = Duration::from_secs(60);
/// How long accepting rests after an error, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A bound side channel.
#[derive(Debug)]
pub struct SideChannelServer {
    listener: TcpListener,
}

impl SideChannelServer {
    /// Binds the channel; port 0 takes a free one.
    ///
    /// # Errors
    /// An address that cannot be bound.
    pub async fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await? })
    }

    /// A channel over a listener that is bound already.
    pub fn from_listener(listener: TcpListener) -> Self {
        Self { listener }
    }

    /// The bound address.
    ///
    /// # Errors
    /// Whatever the operating system says.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until the future is dropped, which closes the port and every connection.
    ///
    /// `clock` has to be the one that stamps deadlines: peers compare theirs with it.
    pub async fn serve(
        self,
        generation: Generation,
        payloads: RankPayloads,
        clock: impl Fn() -> ClockTime + Send + Sync + 'static,
    ) {
        self.serve_with(move |frames| {
            let reply = read_request(generation, frames).and_then(|request| {
                let payload = payloads.get(&(request.pp_rank, request.tp_rank));
                if payload.is_none() {
                    tracing::warn!("side channel request dropped: the rank is not served");
                }
                Some(reply_frames(generation, payload?.clone(), clock().as_secs_f64()))
            });
            ControlFlow::Continue(reply)
        })
        .await;
    }

    /// Serves whatever `answer` makes of a request's frames, the delimiter included: the frames after
    /// the reply's own delimiter, or nothing, which the peer's timeout tells it. Must not block.
    ///
    /// Ends when `answer` breaks off or the future is dropped; both close the port and every
    /// connection.
    pub async fn serve_with<A>(self, answer: A)
    where
        A: Fn(&[Vec<u8>]) -> ControlFlow<(), Option<Vec<Vec<u8>>>> + Send + Sync + 'static,
    {
        let served = Arc::new((answer, Notify::new()));
        let mut connections = JoinSet::new();
        let mut oldest = VecDeque::<AbortHandle>::new();
        loop {
            while connections.try_join_next().is_some() {}
            oldest.retain(|connection| !connection.is_finished());
            while oldest.len() >= MAX_CONNECTIONS {
                oldest.pop_front().inspect(AbortHandle::abort);
            }
            let accepted = tokio::select! {
                () = served.1.notified() => return,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let served = Arc::clone(&served);
                    oldest.push_back(connections.spawn(async move {
                        match serve_peer(stream, &served.0).await {
                            Ok(()) => served.1.notify_one(),
                            Err(error) => tracing::debug!(%peer, %error, "side channel connection ended"),
                        }
                    }));
                }
                Err(error) => {
                    tracing::warn!(%error, "side channel cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// The frames of a reply in a generation; the older one knows no clock.
pub fn reply_frames(generation: Generation, payload: Vec<u8>, clock_seconds: f64) -> Vec<Vec<u8>> {
    match generation {
        Generation::V2 => vec![payload],
        Generation::V14 => vec![payload, encode_clock(clock_seconds)],
    }
}

fn read_request(generation: Generation, frames: &[Vec<u8>]) -> Option<HandshakeRequest> {
    let [delimiter, request] = frames else {
        tracing::warn!(frames = frames.len(), "side channel request dropped: not two frames");
        return None;
    };
    if !delimiter.is_empty() {
        tracing::warn!("side channel request dropped: no delimiter");
        return None;
    }
    HandshakeRequest::decode(generation, request)
        .inspect_err(|error| tracing::warn!(%error, "side channel request dropped"))
        .ok()
}

/// Serves one connection until it ends, which is an error, or until the answers end.
async fn serve_peer<A>(stream: TcpStream, answer: &A) -> io::Result<()>
where
    A: Fn(&[Vec<u8>]) -> ControlFlow<(), Option<Vec<Vec<u8>>>>,
{
    stream.set_nodelay(true)?;
    let mut stream = BufStream::new(stream);
    timeout(PEER_TIMEOUT, zmtp::greet(&mut stream, SocketType::Router)).await??;
    loop {
        let frames = timeout(SILENCE, zmtp::receive(&mut stream, zmtp::MAX_REQUEST)).await??;
        let reply = match answer(&frames) {
            ControlFlow::Break(()) => return Ok(()),
            ControlFlow::Continue(None) => continue,
            ControlFlow::Continue(Some(reply)) => reply,
        };
        let frames: Vec<&[u8]> = std::iter::once(&[][..]).chain(reply.iter().map(Vec::as_slice)).collect();
        timeout(PEER_TIMEOUT, zmtp::send(&mut stream, &frames)).await??;
    }
}
