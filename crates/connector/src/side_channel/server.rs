//! The serving side: answers requests for the payloads of this engine's ranks.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::BufStream;
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::ClockTime;
use crate::protocol::Generation;
use crate::protocol::handshake::{HandshakeRequest, encode_clock};

use super::zmtp::{self, SocketType};

/// Encoded handshake payloads by (pipeline rank, transfer rank).
pub type RankPayloads = HashMap<(u32, u32), Vec<u8>>;

/// Connections served at a time; more wait in the listener's queue.
const MAX_CONNECTIONS: usize = 1024;
/// How long a peer may take to introduce itself or to take an answer.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long accepting rests after an error, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A bound side channel.
#[derive(Debug)]
pub struct SideChannelServer {
    listener: TcpListener,
}

struct Served<C> {
    generation: Generation,
    payloads: RankPayloads,
    clock: C,
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
        let served = Arc::new(Served { generation, payloads, clock });
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            if connections.len() >= MAX_CONNECTIONS {
                connections.join_next().await;
            }
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let served = Arc::clone(&served);
                    connections.spawn(async move {
                        if let Err(error) = serve_peer(stream, &served).await {
                            tracing::debug!(%peer, %error, "side channel connection ended");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "side channel cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

async fn serve_peer<C: Fn() -> ClockTime>(stream: TcpStream, served: &Served<C>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufStream::new(stream);
    timeout(PEER_TIMEOUT, zmtp::greet(&mut stream, SocketType::Router)).await??;
    loop {
        let frames = zmtp::receive(&mut stream).await?;
        let [delimiter, request] = frames.as_slice() else {
            tracing::warn!(frames = frames.len(), "side channel request dropped: not two frames");
            continue;
        };
        if !delimiter.is_empty() {
            tracing::warn!("side channel request dropped: no delimiter");
            continue;
        }
        let payload = match HandshakeRequest::decode(served.generation, request) {
            Ok(request) => served.payloads.get(&(request.pp_rank, request.tp_rank)),
            Err(error) => {
                tracing::warn!(%error, "side channel request dropped");
                continue;
            }
        };
        // An unknown rank gets no answer: the peer's timeout tells it.
        let Some(payload) = payload else {
            tracing::warn!("side channel request dropped: the rank is not served");
            continue;
        };
        let clock = encode_clock((served.clock)().as_secs_f64());
        let reply: &[&[u8]] = match served.generation {
            Generation::V2 => &[b"", payload],
            Generation::V14 => &[b"", payload, &clock],
        };
        timeout(PEER_TIMEOUT, zmtp::send(&mut stream, reply)).await??;
    }
}
