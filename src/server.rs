//! The HTTP listener: accepts, serves each connection as a tracked task, and ends in order.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

/// How long a client may take to send a request's head, and a kept connection may be idle.
const HEAD_DEADLINE: Duration = Duration::from_secs(60);

/// Pause after an accept that failed for want of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long a connection that never brought a request may still bring one when the program leaves.
const LAST_CALL: Duration = Duration::from_millis(100);

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

/// Serves `app` on `listener` until [`Server::finish`]. HTTP/1 only: that is what OpenAI's clients and
/// reverse proxies speak, and it lets a silent connection be told from a slow one.
///
/// With `half_close`, a client that has closed its sending side still gets its answer.
pub(crate) fn serve(listener: TcpListener, app: Router, half_close: bool, tasks: &TaskTracker) -> Server {
    let (accepting, stopping) = watch::channel(true);
    let connections = TaskTracker::new();
    let done = tasks.spawn(accept(listener, app, half_close, connections.clone(), stopping));
    Server { accepting, done, connections }
}

async fn accept(
    listener: TcpListener,
    app: Router,
    half_close: bool,
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
                connections.spawn(connection(stream, client, app.clone(), half_close, stopping.clone()));
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves one connection until it ends; when the program leaves, until it has answered.
async fn connection(
    stream: TcpStream,
    client: SocketAddr,
    app: Router,
    half_close: bool,
    mut stopping: watch::Receiver<bool>,
) {
    // Without it a token waits for the client's delayed acknowledgement of the one before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    let asked = Arc::new(AtomicBool::new(false));
    let service = service(&app, client, Arc::clone(&asked));
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_DEADLINE).half_close(half_close);
    let serving = builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
    tokio::pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => Some(ended),
        _ = stopping.changed() => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            serving.as_mut().graceful_shutdown();
            let unasked = async {
                tokio::time::sleep(LAST_CALL).await;
                if asked.load(Ordering::Relaxed) {
                    std::future::pending::<()>().await;
                }
            };
            // A connection that never brought a request would be waited for until its deadline.
            tokio::select! {
                ended = serving.as_mut() => ended,
                () = unasked => Ok(()),
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client's connection ended early");
    }
}

fn service(
    app: &Router,
    client: SocketAddr,
    asked: Arc<AtomicBool>,
) -> impl tower::Service<
    http::Request<Incoming>,
    Response = axum::response::Response,
    Error = Infallible,
    Future: Send + 'static,
> + Clone
+ use<> {
    let app = app.clone();
    tower::service_fn(move |mut request: http::Request<Incoming>| {
        asked.store(true, Ordering::Relaxed);
        request.extensions_mut().insert(ConnectInfo(client));
        app.clone().oneshot(request.map(Body::new))
    })
}

/// Faults of the one connection that was being accepted, not of the listener.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    )
}
