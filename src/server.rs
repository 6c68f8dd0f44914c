//! The HTTP listeners: accept within bounds, shake hands, serve each connection as a tracked task, and
//! end in order.

mod lending;
mod reread;
mod streaming;

use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Poll, ready};
use std::time::Duration;

use axum::body::Body;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use kvbaton_routes::{CertificateNames, Surface};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, unconstrained};
use tokio::time::Sleep;
use tokio_util::task::TaskTracker;

use self::lending::{Answering, Lender};
use self::reread::Reread;
use self::streaming::Passing;
use crate::config::Connections;
use crate::tls::{self, ServerTls};
use crate::workers::Workers;

/// Pause after an accept that failed for want of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long a connection that never brought a request may still bring one when the program leaves.
const LAST_CALL: Duration = Duration::from_millis(100);

/// A stream that lasts for longer goes on without hyper. To begin a connection of hyper's anew costs less than a
/// token, but it reads its next request in small pieces, which short streams are to be spared.
const LASTS: Duration = Duration::from_millis(100);

/// A running listener.
#[derive(Debug)]
pub(crate) struct Server {
    accepting: watch::Sender<bool>,
    done: JoinHandle<()>,
    connections: TaskTracker,
}

impl Server {
    /// Stops accepting and waits until every connection has answered what it was asked.
    pub(crate) async fn finish(self) {
        self.accepting.send_replace(false);
        if let Err(error) = self.done.await {
            tracing::error!(%error, "the listener ended badly");
        }
        self.connections.close();
        self.connections.wait().await;
    }
}

/// What all connections of one listener share.
struct Shared {
    surface: Surface,
    tls: Option<Arc<ServerTls>>,
    bounds: Connections,
    half_close: bool,
    /// None for the runtime that listens.
    workers: Option<Arc<Workers>>,
    open: parking_lot::Mutex<Open>,
}

/// The connections that are open now.
#[derive(Default)]
struct Open {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
    /// Said once, until there is room again.
    full: bool,
}

/// One open connection's place; free when dropped.
struct Place {
    shared: Arc<Shared>,
    address: IpAddr,
}

impl Shared {
    fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let mut open = self.open.lock();
        let of_address = open.by_address.get(&address).copied().unwrap_or(0);
        let per_address = self.bounds.per_address;
        if per_address > 0 && of_address >= per_address {
            tracing::debug!("a client has too many connections");
            return None;
        }
        if open.all >= self.bounds.most {
            if !std::mem::replace(&mut open.full, true) {
                tracing::warn!(most = self.bounds.most, "too many connections, further ones are closed");
            }
            return None;
        }
        open.all += 1;
        if per_address > 0 {
            open.by_address.insert(address, of_address + 1);
        }
        Some(Place { shared: Arc::clone(self), address })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.shared.open.lock();
        open.all -= 1;
        open.full = false;
        if let Some(count) = open.by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                open.by_address.remove(&self.address);
            }
        }
    }
}

/// Serves `surface` on `listener` until [`Server::finish`]. HTTP/1 only: that is what OpenAI's clients and
/// reverse proxies speak, and it lets a silent connection be told from a slow one.
///
/// With `half_close`, a client that has closed its sending side still gets its answer.
pub(crate) fn serve(
    listener: TcpListener,
    surface: Surface,
    tls: Option<Arc<ServerTls>>,
    (bounds, half_close): (Connections, bool),
    workers: Option<Arc<Workers>>,
    tasks: &TaskTracker,
) -> Server {
    let (accepting, stopping) = watch::channel(true);
    let connections = TaskTracker::new();
    let open = parking_lot::Mutex::default();
    let shared = Arc::new(Shared { surface, tls, bounds, half_close, workers, open });
    let done = tasks.spawn(accept(listener, shared, connections.clone(), stopping));
    Server { accepting, done, connections }
}

async fn accept(
    listener: TcpListener,
    shared: Arc<Shared>,
    connections: TaskTracker,
    mut stopping: watch::Receiver<bool>,
) {
    loop {
        let accepted = tokio::select! {
            _ = stopping.changed() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, client)) => {
                if let Some(place) = shared.enter(client.ip().to_canonical()) {
                    start(stream, client, place, &connections, stopping.clone());
                }
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Begins to serve a connection, on the thread that has the fewest.
fn start(
    stream: TcpStream,
    client: SocketAddr,
    place: Place,
    connections: &TaskTracker,
    stopping: watch::Receiver<bool>,
) {
    let workers = place.shared.workers.clone();
    let Some((runtime, busy)) = workers.as_deref().and_then(Workers::least_busy) else {
        connections.spawn(connection(stream, client, place, stopping));
        return;
    };
    // A socket is bound to the runtime that waits for it.
    let moved = stream.into_std();
    let serving = async move {
        let _busy = busy;
        match moved.and_then(TcpStream::from_std) {
            Ok(stream) => connection(stream, client, place, stopping).await,
            Err(error) => tracing::warn!(%error, "a client's connection cannot be served"),
        }
    };
    connections.spawn_on(serving, runtime);
}

/// Serves one connection until it ends; when the program leaves, until it has answered.
async fn connection(stream: TcpStream, client: SocketAddr, place: Place, stopping: watch::Receiver<bool>) {
    let shared = &*place.shared;
    // Without it a token waits for the client's delayed acknowledgement of the one before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    match &shared.tls {
        // The future is large, and a plain connection has no need of its room.
        Some(tls) => Box::pin(shake_hands(stream, tls, shared, client, stopping)).await,
        None => answer(stream, shared, client, None, stopping).await,
    }
}

async fn shake_hands(
    stream: TcpStream,
    tls: &ServerTls,
    shared: &Shared,
    client: SocketAddr,
    mut stopping: watch::Receiver<bool>,
) {
    let shaking = tokio::time::timeout(shared.bounds.handshake, tls.accept(stream));
    let shaken = tokio::select! {
        shaken = shaking => shaken,
        _ = stopping.changed() => return,
    };
    match shaken {
        Ok(Ok(stream)) => {
            let names = tls::names(&stream);
            answer(Box::new(stream), shared, client, names, stopping).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, "a client's TLS handshake failed"),
        Err(_) => tracing::debug!("a client's TLS handshake took too long"),
    }
}

/// Answers the requests of one connection.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    shared: &Shared,
    client: SocketAddr,
    names: Option<CertificateNames>,
    mut stopping: watch::Receiver<bool>,
) {
    let (asked, lender) = (AtomicBool::new(false), Lender::default());
    let service = service_fn(|request: http::Request<hyper::body::Incoming>| {
        asked.store(true, Ordering::Relaxed);
        let lender = lending::is_plain(&request).then(|| lender.clone());
        Answering { answer: shared.surface.answer(request.map(Body::new), client, names.clone()), lender }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(shared.bounds.head).half_close(shared.half_close);
    let mut stream = Reread::new(stream, lender.clone(), shared.bounds.stall);
    let now = stopping.clone();
    // Whether it is polled at all is decided below, so not by how much the task has done already.
    let mut stop = pin!(unconstrained(stopping.changed()));
    let (mut awaits_stop, mut leaves) = (false, false);
    loop {
        // Boxed: a stream that goes on without it need not keep its room.
        let mut serving = Box::new(builder.serve_connection(TokioIo::new(stream), &service));
        let turn = {
            let mut turn = pin!(next_turn(&mut *serving, &lender));
            poll_fn(|context| {
                if let Poll::Ready(turn) = turn.as_mut().poll(context) {
                    return Poll::Ready(Some(turn));
                }
                // A task keeps its waker: to leave it once is enough, and to do so at each token costs something.
                if !std::mem::replace(&mut awaits_stop, true) || now.has_changed().unwrap_or(true) {
                    return stop.as_mut().poll(context).map(|_| None);
                }
                Poll::Pending
            })
            .await
        };
        let turn = match turn {
            Some(turn) => turn,
            None => {
                leaves = true;
                Pin::new(&mut *serving).graceful_shutdown();
                let unasked = async {
                    tokio::time::sleep(LAST_CALL).await;
                    if asked.load(Ordering::Relaxed) {
                        std::future::pending::<()>().await;
                    }
                };
                // A connection that never brought a request would be waited for until its deadline.
                tokio::select! {
                    turn = next_turn(&mut *serving, &lender) => turn,
                    () = unasked => Turn::Ended(Ok(())),
                }
            }
        };
        let body = match turn {
            Turn::Lasts(body) => body,
            Turn::Ended(Ok(())) => return,
            Turn::Ended(Err(error)) => {
                tracing::debug!(%error, "a client's connection ended early");
                return;
            }
        };
        tracing::trace!("a stream goes on without hyper");
        let parts = serving.into_parts();
        stream = parts.io.into_inner().with_early(&parts.read_buf);
        drop(parts.read_buf);
        if let Err(error) = Passing::new(&mut stream, body, !shared.half_close).await {
            tracing::debug!(%error, "a client's connection ended early");
            return;
        }
        if leaves || now.has_changed().unwrap_or(true) {
            let _ = stream.shutdown().await;
            return;
        }
        // Of the new one, which waits for a first request as an untouched connection does.
        asked.store(false, Ordering::Relaxed);
    }
}

/// What a connection that hyper serves comes to.
enum Turn {
    Ended(hyper::Result<()>),
    /// A stream goes on for so long that hyper is not to hold its buffers for it.
    Lasts(Body),
}

async fn next_turn(serving: &mut (impl Future<Output = hyper::Result<()>> + Unpin), lender: &Lender) -> Turn {
    let mut begun: Option<Pin<Box<Sleep>>> = None;
    poll_fn(|context| {
        if let Poll::Ready(ended) = Pin::new(&mut *serving).poll(context) {
            return Poll::Ready(Turn::Ended(ended));
        }
        if !lender.lends() {
            begun = None;
            return Poll::Pending;
        }
        let begun = begun.get_or_insert_with(|| Box::pin(tokio::time::sleep(LASTS)));
        if !begun.is_elapsed() {
            ready!(begun.as_mut().poll(context));
        }
        lender.take_back().map_or(Poll::Pending, |body| Poll::Ready(Turn::Lasts(body)))
    })
    .await
}

/// Faults of the one connection that was being accepted, not of the listener.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    )
}
