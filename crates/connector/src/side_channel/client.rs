//! The asking side: carries out a worker's handshake job.

use std::io;
use std::time::Duration;

use tokio::io::BufStream;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::ClockTime;
use crate::protocol::Generation;
use crate::protocol::handshake::{HandshakeRequest, decode_clock};
use crate::worker::{ClockSample, HandshakeFailure, HandshakeJob, RankReply};

use super::RECEIVE_TIMEOUT;
use super::zmtp::{self, SocketType};

/// Pause between two attempts to connect to an engine that is not listening yet.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Asks every rank of `job` for its payload, one after the other on one connection.
///
/// `clock` is the clock of the worker the answer goes to. Dropping the future ends the exchange.
///
/// # Errors
/// No connection or no reply within [`RECEIVE_TIMEOUT`] for each rank, or a reply that has not the
/// frames of the job's generation.
pub async fn shake_hands(
    job: &HandshakeJob,
    clock: impl Fn() -> ClockTime,
) -> Result<Vec<RankReply>, HandshakeFailure> {
    let port = u16::try_from(job.port).map_err(|_| HandshakeFailure::Unreachable)?;
    // A ZMQ socket keeps trying to connect in the background; so does this, for as long as it may wait.
    let deadline = Instant::now() + RECEIVE_TIMEOUT;
    let attempt = async {
        loop {
            match TcpStream::connect((job.host.as_str(), port)).await {
                Ok(stream) => return stream,
                Err(error) => {
                    tracing::debug!(job.host, port, %error, "side channel cannot be reached yet");
                }
            }
            sleep(RETRY_PAUSE).await;
        }
    };
    let stream = timeout_at(deadline, attempt).await.map_err(|_| HandshakeFailure::Unreachable)?;
    let mut client = timeout_at(deadline, SideChannelClient::greet(stream))
        .await
        .map_err(|_| HandshakeFailure::Timeout)??;
    let mut replies = Vec::with_capacity(job.ranks.len());
    for &(pp_rank, tp_rank) in &job.ranks {
        let sent = clock();
        let asked = client.ask(job.generation, HandshakeRequest { pp_rank, tp_rank });
        let (payload, remote_seconds) =
            timeout(RECEIVE_TIMEOUT, asked).await.map_err(|_| HandshakeFailure::Timeout)??;
        let received = clock();
        let clock = remote_seconds.map(|remote_seconds| ClockSample { sent, received, remote_seconds });
        replies.push(RankReply { pp_rank, tp_rank, payload, clock });
    }
    Ok(replies)
}

/// One connection to a side channel, and so to one process: what answers on it is one engine's.
#[derive(Debug)]
pub struct SideChannelClient {
    stream: BufStream<TcpStream>,
}

impl SideChannelClient {
    /// Connects once. Sets no deadline; dropping the future ends the attempt.
    ///
    /// # Errors
    /// Nobody listens there, or somebody who does not speak ZMTP.
    pub async fn connect(host: &str, port: u16) -> Result<Self, HandshakeFailure> {
        let stream = TcpStream::connect((host, port)).await.map_err(|error| failure(&error))?;
        Self::greet(stream).await
    }

    async fn greet(stream: TcpStream) -> Result<Self, HandshakeFailure> {
        stream.set_nodelay(true).map_err(|error| failure(&error))?;
        let mut stream = BufStream::new(stream);
        zmtp::greet(&mut stream, SocketType::Req).await.map_err(|error| failure(&error))?;
        Ok(Self { stream })
    }

    /// Asks for one rank's payload and, in v14, the peer's clock in seconds. Sets no deadline.
    ///
    /// A request of another generation than the peer's, or for a rank that it has not, ends a vLLM
    /// engine's listener for good: never guess. After an error or a dropped future the connection is
    /// of no more use.
    ///
    /// # Errors
    /// The connection ended, or the reply has not the frames of the generation.
    pub async fn ask(
        &mut self,
        generation: Generation,
        request: HandshakeRequest,
    ) -> Result<(Vec<u8>, Option<f64>), HandshakeFailure> {
        let request = request.encode(generation);
        zmtp::send(&mut self.stream, &[b"", &request]).await.map_err(|error| failure(&error))?;
        let frames = zmtp::receive(&mut self.stream, zmtp::MAX_REPLY).await;
        read_reply(generation, frames.map_err(|error| failure(&error))?)
    }
}

fn failure(error: &io::Error) -> HandshakeFailure {
    tracing::debug!(%error, "side channel exchange failed");
    match error.kind() {
        io::ErrorKind::InvalidData => HandshakeFailure::BadReply,
        _ => HandshakeFailure::Unreachable,
    }
}

/// The payload and, in v14, the peer's clock.
fn read_reply(
    generation: Generation,
    frames: Vec<Vec<u8>>,
) -> Result<(Vec<u8>, Option<f64>), HandshakeFailure> {
    let mut frames = frames.into_iter();
    let delimiter = frames.next();
    let (payload, clock, rest) = (frames.next(), frames.next(), frames.next());
    match (generation, delimiter.as_deref(), payload, clock, rest) {
        (Generation::V2, Some([]), Some(payload), None, None) => Ok((payload, None)),
        (Generation::V14, Some([]), Some(payload), Some(clock), None) => {
            let seconds = decode_clock(&clock).map_err(|_| HandshakeFailure::BadReply)?;
            Ok((payload, Some(seconds)))
        }
        _ => Err(HandshakeFailure::BadReply),
    }
}
