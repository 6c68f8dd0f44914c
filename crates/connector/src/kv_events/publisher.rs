//! The writing side, for engines: PUB with a ROUTER beside it that replays.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::BufStream;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::side_channel::zmtp::{self, SocketType};

use super::Published;

/// Batches that wait for a slow reader, which misses those that do not fit.
const QUEUE: usize = 1024;
/// Connections of each kind.
const MAX_CONNECTIONS: usize = 64;
/// How long a peer may take to introduce itself.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long accepting rests after an error, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Publishes an engine's batches; clones share it.
#[derive(Clone, Debug)]
pub struct EventPublisher {
    sender: broadcast::Sender<Arc<Published>>,
    /// The next number, and the last batches.
    sent: Arc<Mutex<(u64, VecDeque<Arc<Published>>)>>,
    kept: usize,
}

impl EventPublisher {
    /// A publisher that keeps so many batches for replays.
    #[must_use]
    pub fn new(kept: usize) -> Self {
        Self { sender: broadcast::channel(QUEUE).0, sent: Arc::default(), kept }
    }

    /// Publishes a batch.
    pub fn publish(&self, payload: Vec<u8>) {
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let published = Arc::new(Published { number: sent.0, payload });
        sent.0 += 1;
        if sent.1.len() >= self.kept {
            sent.1.pop_front();
        }
        if self.kept > 0 {
            sent.1.push_back(Arc::clone(&published));
        }
        // Nobody may be listening.
        let _ = self.sender.send(published);
    }

    /// Serves subscribers until the future is dropped, which closes the port and every connection.
    pub async fn serve(self, listener: TcpListener) {
        accept(listener, move |stream| publish_to(stream, self.sender.subscribe())).await;
    }

    /// Serves those who missed batches, in the same way.
    pub async fn serve_replays(self, listener: TcpListener) {
        accept(listener, move |stream| replay_to(stream, self.clone())).await;
    }
}

async fn accept<F>(listener: TcpListener, serve: impl Fn(TcpStream) -> F)
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, peer)) if connections.len() < MAX_CONNECTIONS => {
                let serving = serve(stream);
                connections.spawn(async move {
                    if let Err(error) = serving.await {
                        tracing::debug!(%peer, %error, "a reader of KV events has left");
                    }
                });
            }
            Ok((_, peer)) => tracing::warn!(%peer, "too many readers of KV events"),
            Err(error) => {
                tracing::warn!(%error, "a reader of KV events cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn greeted(stream: TcpStream, socket: SocketType) -> io::Result<BufStream<TcpStream>> {
    stream.set_nodelay(true)?;
    let mut stream = BufStream::new(stream);
    timeout(PEER_TIMEOUT, zmtp::greet(&mut stream, socket)).await??;
    Ok(stream)
}

/// Sends what is published from when the peer has subscribed.
async fn publish_to(stream: TcpStream, mut batches: broadcast::Receiver<Arc<Published>>) -> io::Result<()> {
    let mut stream = greeted(stream, SocketType::Pub).await?;
    timeout(PEER_TIMEOUT, zmtp::receive(&mut stream, zmtp::MAX_REQUEST)).await??;
    loop {
        match batches.recv().await {
            Ok(batch) => {
                zmtp::send(&mut stream, &[b"", &batch.number.to_be_bytes(), &batch.payload]).await?;
            }
            // The reader sees it by the numbers.
            Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return Ok(()),
        }
    }
}

async fn replay_to(stream: TcpStream, publisher: EventPublisher) -> io::Result<()> {
    let mut stream = greeted(stream, SocketType::Router).await?;
    loop {
        let frames = zmtp::receive(&mut stream, zmtp::MAX_REQUEST).await?;
        let [delimiter, from] = &frames[..] else { return Err(zmtp::broken("not two frames")) };
        let from = <[u8; 8]>::try_from(from.as_slice()).ok().filter(|_| delimiter.is_empty());
        let from = u64::from_be_bytes(from.ok_or_else(|| zmtp::broken("no number"))?);
        let batches = publisher.sent.lock().unwrap_or_else(PoisonError::into_inner).1.clone();
        for batch in batches.iter().filter(|batch| batch.number >= from) {
            zmtp::send(&mut stream, &[b"", b"", &batch.number.to_be_bytes(), &batch.payload]).await?;
        }
        zmtp::send(&mut stream, &[b"", b"", &u64::MAX.to_be_bytes(), b""]).await?;
    }
}
