//! One accepted connection: HTTP/1.1 over a socket that can be cut at a byte or all at once.
//!
//! It knows nothing about requests; whoever answers one sets the byte budget through `ConnControl`.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

const UNLIMITED: u64 = u64::MAX;

/// The handle by which a request's handler cuts its connection.
pub(crate) struct ConnControl {
    budget: AtomicU64,
    abrupt: AtomicBool,
}

impl ConnControl {
    fn new() -> Self {
        Self { budget: AtomicU64::new(UNLIMITED), abrupt: AtomicBool::new(false) }
    }

    /// Lets so many more bytes out, then resets the connection; or all, where the answer before this one was
    /// shorter than it might have been.
    pub(crate) fn reset_after(&self, bytes: Option<u64>) {
        self.budget.store(bytes.map_or(UNLIMITED, |bytes| bytes.min(UNLIMITED - 1)), Ordering::Relaxed);
    }

    fn make_abrupt(&self) {
        self.abrupt.store(true, Ordering::Relaxed);
    }
}

struct CuttableStream {
    stream: TcpStream,
    control: Arc<ConnControl>,
}

impl Drop for CuttableStream {
    fn drop(&mut self) {
        if self.control.abrupt.load(Ordering::Relaxed) {
            // A failure here only means that the peer sees an orderly end.
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for CuttableStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for CuttableStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let budget = self.control.budget.load(Ordering::Relaxed);
        if budget == UNLIMITED {
            return Pin::new(&mut self.stream).poll_write(cx, buf);
        }
        let allowed = usize::try_from(budget).unwrap_or(usize::MAX).min(buf.len());
        if allowed == 0 {
            self.control.make_abrupt();
            return Poll::Ready(Err(io::Error::from(io::ErrorKind::ConnectionReset)));
        }
        let written = std::task::ready!(Pin::new(&mut self.stream).poll_write(cx, &buf[..allowed]))?;
        self.control.budget.store(budget - written as u64, Ordering::Relaxed);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.control.budget.load(Ordering::Relaxed) == 0 {
            self.control.make_abrupt();
            return Poll::Ready(Err(io::Error::from(io::ErrorKind::ConnectionReset)));
        }
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// When an engine stops listening, and how.
#[derive(Clone, Default)]
pub(crate) struct StopTokens {
    /// Finish what runs, accept nothing new.
    pub(crate) drain: CancellationToken,
    /// Reset everything now.
    pub(crate) kill: CancellationToken,
}

/// Accepts connections until told to stop; every connection is a tracked task.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Router,
    keep_alive: Duration,
    stop: StopTokens,
    tracker: TaskTracker,
) {
    loop {
        let accepted = tokio::select! {
            () = stop.drain.cancelled() => return,
            () = stop.kill.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "nodelay not set");
                }
                tracker.spawn(serve_connection(stream, app.clone(), keep_alive, stop.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                // Out of descriptors: yielding lets connections end before the next attempt.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, app: Router, keep_alive: Duration, stop: StopTokens) {
    let control = Arc::new(ConnControl::new());
    let io = TokioIo::new(CuttableStream { stream, control: Arc::clone(&control) });
    let for_requests = Arc::clone(&control);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Arc::clone(&for_requests));
        app.clone().oneshot(request)
    });
    // The wait for the next head is what an idle connection does.
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(keep_alive)
        .serve_connection(io, service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        // Errors here are the peer's or an armed fault's doing.
        _ = connection.as_mut() => return,
        () = stop.kill.cancelled() => {
            control.make_abrupt();
            return;
        }
        () = stop.drain.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::select! {
        _ = connection.as_mut() => {}
        () = stop.kill.cancelled() => control.make_abrupt(),
    }
}
