//! The program: settings, wiring and lifecycle. `Config::build` binds everything,
//! `App::spawn` runs it, `Running::drain` ends it; tests use the same three calls.

pub mod cli;
pub mod config;
mod fleet;
mod server;
pub mod shutdown;
pub mod telemetry;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use kvbaton_proxy::{PeerSpec, PeerSpecError, Proxy, Role};
use kvbaton_routes::{Access, AdminToken, State, TokenError};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use config::{Config, ConfigFaults};
pub use fleet::EmbeddedEngine;

/// How long before the end of the budget what still runs is told to end.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Why the program cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Settings are wrong.
    #[error(transparent)]
    Config(#[from] ConfigFaults),
    /// A listener cannot be bound.
    #[error("cannot listen on {addr}")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// A peer of the settings cannot be used.
    #[error("a configured engine cannot be used")]
    Peer(#[from] PeerSpecError),
    /// The operators' token cannot be presented in a header.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// A simulated engine of the embedded fleet did not start.
    #[error("an embedded engine did not start")]
    Engine(#[from] engine_sim::EngineError),
}

/// Everything bound and built, not yet serving.
#[derive(Debug)]
pub struct App {
    config: Config,
    listener: TcpListener,
    addr: SocketAddr,
}

impl Config {
    /// Checks the settings and binds the listener.
    ///
    /// # Errors
    /// Settings are wrong or the address cannot be bound.
    pub async fn build(self) -> Result<App, StartError> {
        let addr = self.listen;
        let listener = TcpListener::bind(addr).await.map_err(|source| StartError::Listen { addr, source })?;
        self.build_on(listener).await
    }

    /// As [`Config::build`] with a listener that is already bound.
    ///
    /// # Errors
    /// Settings are wrong or the listener has no address.
    pub async fn build_on(self, listener: TcpListener) -> Result<App, StartError> {
        self.validate()?;
        let addr =
            listener.local_addr().map_err(|source| StartError::Listen { addr: self.listen, source })?;
        Ok(App { config: self, listener, addr })
    }
}

impl App {
    /// The bound address.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Starts serving, and the embedded fleet if the settings ask for one.
    ///
    /// # Errors
    /// An engine of the settings cannot be used, or an embedded one did not start.
    pub async fn spawn(self) -> Result<Running, StartError> {
        let Self { config, listener, addr } = self;
        let access = match &config.admin.token {
            None => Access::LoopbackOnly,
            Some(token) => Access::Token(AdminToken::new(token)?),
        };
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let proxy = Proxy::start(config.core(), tasks.clone(), stop.clone());
        let state = State {
            proxy: proxy.clone(),
            access,
            limits: kvbaton_routes::Limits {
                body_bytes: config.limits.body_bytes,
                payload_bytes: config.limits.payload_bytes,
                body_silence: config.timeouts.client_body,
                keep_alive: config.stream.keep_alive,
            },
        };
        let server = server::serve(listener, kvbaton_routes::app(state), config.stream.half_close, &tasks);
        for spec in config.prefill.iter().chain(&config.decode).flat_map(PeerSpec::ranks) {
            proxy.add_peer(spec)?;
        }
        let engines = if config.embeds_fleet() { fleet::start(&config, addr).await? } else { Vec::new() };
        for engine in &engines {
            proxy.add_peer(PeerSpec::new(engine.role, engine.engine.url()))?;
        }
        Ok(Running { addr, engines, proxy, config, server, tasks, stop })
    }
}

/// A serving program.
pub struct Running {
    addr: SocketAddr,
    engines: Vec<EmbeddedEngine>,
    proxy: Proxy,
    config: Config,
    server: server::Server,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Running {
    /// The bound address.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The embedded engines, if there are any.
    #[must_use]
    pub fn engines(&self) -> &[EmbeddedEngine] {
        &self.engines
    }

    /// Waits until a pair can serve, at most `limit` long; whether one can.
    pub async fn ready_within(&self, limit: Duration) -> bool {
        let ready = async {
            while !self.proxy.readiness().is_ready() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(limit, ready).await.is_ok()
    }

    /// How many engines the fleet has in a role, ready or not.
    #[must_use]
    pub fn fleet_size(&self, role: Role) -> usize {
        self.proxy.peers().iter().filter(|peer| peer.role == role).count()
    }

    /// The core, for tests that look behind the HTTP surface.
    #[must_use]
    pub fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    /// Leaves in order: not ready, settle, no new connections, finish what runs. Returns whether
    /// everything ended within the limit.
    pub async fn drain(self) -> bool {
        let Self { engines, proxy, config, server, tasks, stop, .. } = self;
        let deadline = tokio::time::Instant::now() + config.shutdown.limit;
        proxy.drain();
        tokio::time::sleep(config.shutdown.settle).await;
        let finished = {
            let finish = server.finish();
            tokio::pin!(finish);
            // What would be cut off is told so, and has its blocks freed.
            let last_words = deadline - LAST_WORDS.min(config.shutdown.limit / 4);
            match tokio::time::timeout_at(last_words, finish.as_mut()).await {
                Ok(()) => true,
                Err(_late) => {
                    proxy.cut();
                    tokio::time::timeout_at(deadline, finish).await.is_ok()
                }
            }
        };
        stop.cancel();
        // The last handle to the core: with it go the kept connections, whose tasks are waited for.
        drop(proxy);
        tasks.close();
        let ended = tokio::time::timeout_at(deadline, tasks.wait()).await.is_ok();
        for engine in engines {
            engine.engine.shutdown().await;
        }
        finished && ended
    }
}
