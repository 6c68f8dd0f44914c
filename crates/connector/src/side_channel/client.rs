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
    let mut stream = connect(&job.host, port).await?;
    let mut replies = Vec::with_capacity(job.ranks.len());
    for &(pp_rank, tp_rank) in &job.ranks {
        let request = HandshakeRequest { pp_rank, tp_rank }.encode(job.generation);
        let sent = clock();
        let exchange = async {
            zmtp::send(&mut stream, &[b"", &request]).await?;
            zmtp::receive(&mut stream, zmtp::MAX_REPLY).await
        };
        let frames = timeout(RECEIVE_TIMEOUT, exchange)
            .await
            .map_err(|_| HandshakeFailure::Timeout)?
            .map_err(|error| failure(&error))?;
        let received = clock();
        let (payload, remote_seconds) = read_reply(job.generation, frames)?;
        let clock = remote_seconds.map(|remote_seconds| ClockSample { sent, received, remote_seconds });
        replies.push(RankReply { pp_rank, tp_rank, payload, clock });
    }
    Ok(replies)
}

/// A ZMQ socket keeps trying to connect in the background; so does this, for as long as it may wait.
async fn connect(host: &str, port: u16) -> Result<BufStream<TcpStream>, HandshakeFailure> {
    let deadline = Instant::now() + RECEIVE_TIMEOUT;
    let attempt = async {
        loop {
            match TcpStream::connect((host, port)).await {
                Ok(stream) => return stream,
                Err(error) => tracing::debug!(host, port, %error, "side channel cannot be reached yet"),
            }
            sleep(RETRY_PAUSE).await;
        }
    };
    let stream = timeout_at(deadline, attempt).await.map_err(|_| HandshakeFailure::Unreachable)?;
    stream.set_nodelay(true).map_err(|error| failure(&error))?;
    let mut stream = BufStream::new(stream);
    timeout_at(deadline, zmtp::greet(&mut stream, SocketType::Req))
        .await
        .map_err(|_| HandshakeFailure::Timeout)?
        .map_err(|error| failure(&error))?;
    Ok(stream)
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
