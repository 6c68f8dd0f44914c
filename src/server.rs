//! The HTTP listener: accepts, serves each connection as a tracked task, and ends in order.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

/// How long a client may take to send a request's head.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);

/// Pause after an accept that failed for want of file descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A running listener.
#[derive(Debug)]
pub(crate) struct Server {
    accepting: watch::Sender<bool>,
    done: JoinHandle<()>,
}

impl Server {
    /// Stops accepting and waits until every connection has answered what it was asked.
    pub(crate) async fn finish(self) {
        self.accepting.send_replace(false);
        if let Err(error) = self.done.await {
            tracing::error!(%error, "the listener ended badly");
        }
    }
}

/// Serves `app` on `listener` until [`Server::finish`].
pub(crate) fn serve(listener: TcpListener, app: Router, tasks: &TaskTracker) -> Server {
    let (accepting, stopping) = watch::channel(true);
    let connections = tasks.clone();
    let done = tasks.spawn(accept(listener, app, connections, stopping));
    Server { accepting, done }
}

async fn accept(listener: TcpListener, app: Router, tasks: TaskTracker, mut stopping: watch::Receiver<bool>) {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_DEADLINE);
    builder.http2().timer(TokioTimer::new());
    let graceful = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            _ = stopping.changed() => break,
            accepted = listener.accept() => accepted,
        };
        let (stream, client) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if is_of_one_connection(&error) => continue,
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let service = service(&app, client);
        let connection =
            builder.serve_connection(ready(stream), TowerToHyperService::new(service)).into_owned();
        let connection = graceful.watch(connection);
        tasks.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a client's connection ended early");
            }
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

fn ready(stream: TcpStream) -> TokioIo<TcpStream> {
    // Without it a token waits for the client's delayed acknowledgement of the one before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    TokioIo::new(stream)
}

fn service(
    app: &Router,
    client: SocketAddr,
) -> impl tower::Service<
    http::Request<Incoming>,
    Response = axum::response::Response,
    Error = Infallible,
    Future: Send + 'static,
> + Clone
+ use<> {
    let app = app.clone();
    tower::service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(client));
        app.clone().oneshot(request.map(axum::body::Body::new))
    })
}

/// Faults of the one connection that was being accepted, not of the listener.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    )
}
