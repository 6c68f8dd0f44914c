//! HTTP/1.1 as it is spoken to engines: one exchange at a time on a connection, polled by whoever waits for
//! it, so that neither a task nor a channel lies between an engine and its client.
//! Knows nothing of peers, legs or retries, and never sends a request twice.

mod body;
mod chunked;
mod exchange;
mod head;
mod kept;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderMap;
use http::uri::{Authority, Scheme, Uri};
use http::{Method, Response};
use tokio_util::task::TaskTracker;

pub(crate) use self::body::EngineBody;
use self::kept::{Kept, Shelf};
use crate::connection::{ConnectError, Dialer, Stream};
use crate::splice::Spliced;

/// Why an exchange did not come to its answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("no connection")]
    Connect(#[from] ConnectError),
    #[error("the target cannot stand in a request")]
    Target,
    /// The engine cannot have seen any of it.
    #[error("the connection was at its end")]
    Unsent(#[source] io::Error),
    /// `silent`: before a byte of the answer, on a connection that had been kept.
    #[error("the connection ended early")]
    Reset { silent: bool },
    #[error("the answer is not HTTP")]
    Protocol,
}

/// Where requests to one address go, and what stands in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    secure: bool,
    authority: Authority,
    /// Of the authority: to hash one costs a step for each of its bytes, and each exchange looks one up.
    hash: u64,
}

impl Hash for Place {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Place {
    pub(crate) fn new(secure: bool, authority: Authority) -> Self {
        let mut hash = DefaultHasher::new();
        authority.hash(&mut hash);
        Self { secure, authority, hash: hash.finish() }
    }

    const fn implied_port(&self) -> u16 {
        if self.secure { 443 } else { 80 }
    }

    /// The port that it listens on.
    pub(crate) fn port(&self) -> u16 {
        self.authority.port_u16().unwrap_or(self.implied_port())
    }

    /// The authority as a `Host` header has it: without a port that the scheme implies.
    fn host(&self) -> &str {
        match self.authority.port_u16() {
            Some(port) if port != self.implied_port() => self.authority.as_str(),
            _ => self.authority.host(),
        }
    }

    fn uri(&self) -> Result<Uri, WireError> {
        let scheme = if self.secure { Scheme::HTTPS } else { Scheme::HTTP };
        let uri = Uri::builder().scheme(scheme).authority(self.authority.clone()).path_and_query("/").build();
        uri.map_err(|_| WireError::Target)
    }
}

/// One request; `prefix` comes before the path.
pub(crate) struct Outgoing<'a> {
    pub(crate) place: &'a Place,
    pub(crate) method: &'a Method,
    pub(crate) prefix: &'a str,
    pub(crate) path: &'a str,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: &'a Spliced,
}

/// The two ends of the connection that an answer came on; in the answer's extensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) remote: SocketAddr,
    pub(crate) local: SocketAddr,
}

/// A connection between two exchanges.
#[derive(Debug)]
struct Link {
    stream: Stream,
    ends: Option<Ends>,
    /// How many answers it has carried.
    answers: u32,
}

/// The client; clones share its connections.
#[derive(Clone, Debug)]
pub(crate) struct Wire {
    dialer: Dialer,
    kept: Arc<Kept>,
}

impl Wire {
    /// Connections that are idle for longer than `lasts` are closed.
    pub(crate) fn new(dialer: Dialer, lasts: Duration, tasks: TaskTracker) -> Self {
        Self { dialer, kept: Arc::new(Kept::new(lasts, tasks)) }
    }

    /// Sends a request, on a kept connection if there is one, and waits for the answer's head. Dropping the
    /// future closes the connection, as dropping the body does before its end.
    ///
    /// # Errors
    /// Why there is no answer.
    pub(crate) async fn send(&self, request: &Outgoing<'_>) -> Result<Response<EngineBody>, WireError> {
        let head = head::encode(request)?;
        let shelf = self.kept.shelf(request.place);
        loop {
            let link = match shelf.take() {
                Some(link) => link,
                None => self.dial_or_wait(request.place, &shelf).await?,
            };
            let kept = link.answers > 0;
            match exchange::exchange(link, &head, request, Some(&shelf)).await {
                // It had ended while nobody looked; the next one may not have.
                Err(WireError::Unsent(_)) if kept => {}
                done => return done,
            }
        }
    }

    /// As [`Wire::send`] on a connection of its own, which is not kept.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn send_anew(&self, request: &Outgoing<'_>) -> Result<Response<EngineBody>, WireError> {
        let head = head::encode(request)?;
        let link = Box::pin(self.dial(request.place)).await?;
        exchange::exchange(link, &head, request, None).await
    }

    async fn dial(&self, place: &Place) -> Result<Link, WireError> {
        let stream = self.dialer.dial(place.uri()?).await?;
        let ends = stream.ends().map(|(remote, local)| Ends { remote, local });
        Ok(Link { stream, ends, answers: 0 })
    }

    /// A new connection, or one that another request gives back before that is made.
    async fn dial_or_wait(&self, place: &Place, shelf: &Arc<Shelf>) -> Result<Link, WireError> {
        let waiting = shelf.wait();
        // Seldom, and large: apart from the future of each request.
        let dialling = Box::pin(self.dial(place));
        tokio::select! {
            biased;
            dialled = dialling => dialled,
            link = waiting.returned() => Ok(link),
        }
    }
}

/// The length of an answer's head; inner none while it is not whole, none where it is not HTTP.
#[cfg(fuzzing)]
#[must_use]
pub fn head_length(bytes: &[u8]) -> Option<Option<usize>> {
    head::parse(bytes, &Method::POST).ok().map(|head| head.map(|head| head.length))
}

/// What chunks in pieces of this size hold, how many bytes they were and whether their end came.
#[cfg(fuzzing)]
#[must_use]
pub fn chunked(bytes: &[u8], piece: usize) -> Option<(Vec<u8>, usize, bool)> {
    let (mut chunked, mut data, mut used) = (chunked::Chunked::new(), bytes::BytesMut::new(), 0);
    for piece in bytes.chunks(piece) {
        used += chunked.take(piece, &mut data).ok()?;
    }
    Some((data.to_vec(), used, chunked.is_done()))
}

#[cfg(test)]
mod tests;
