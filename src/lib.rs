//! The program: settings, wiring and lifecycle. `Config::build` binds everything,
//! `App::spawn` runs it, `Running::drain` ends it; tests use the same three calls.

pub mod cli;
pub mod config;
mod fleet;
mod listeners;
mod reload;
mod secrets;
mod server;
pub mod shutdown;
pub mod telemetry;
mod tls;
mod workers;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvbaton_proxy::{PeerSpec, PeerSpecError, Proxy, Role};
use kvbaton_routes::{Cors, Logging, NotReloaded, Origins, Reloaded, SharedLimits, State};
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use config::{Config, ConfigFaults};
pub use fleet::EmbeddedEngine;
use listeners::Listeners;
use reload::Reloader;
use secrets::SecretStore;
pub use secrets::SecretsError;
use telemetry::{CollectorFault, Exporter};
pub use tls::{TlsError, TlsFault};
pub use workers::Workers;

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
    /// A certificate, token or key cannot be used.
    #[error(transparent)]
    Secrets(#[from] SecretsError),
    /// Traces cannot be exported.
    #[error("traces cannot be exported")]
    Traces(#[from] CollectorFault),
    /// A simulated engine of the embedded fleet did not start.
    #[error("an embedded engine did not start")]
    Engine(#[from] engine_sim::EngineError),
}

/// Everything bound and built, not yet serving.
pub struct App {
    config: Config,
    listeners: Listeners,
    secrets: SecretStore,
    embedded_token: String,
    source: Option<reload::Source>,
    logging: Logging,
    workers: Option<Arc<Workers>>,
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
        let listeners = Listeners::bind(&self, listener).await?;
        let embedded_token = secrets::random_secret();
        let embedded = self.embeds_fleet().then(|| fleet::credential(&embedded_token)).transpose()?;
        let secrets = SecretStore::load(&self, embedded, listeners.tls())?;
        Ok(App {
            config: self,
            listeners,
            secrets,
            embedded_token,
            source: None,
            logging: Logging::default(),
            workers: None,
        })
    }
}

impl App {
    /// The public listener's address.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.listeners.public.addr
    }

    /// Says where the settings can be read again; without this they stay as they are.
    #[must_use]
    pub fn reload_from(
        mut self,
        source: impl Fn() -> Result<Config, ConfigFaults> + Send + Sync + 'static,
    ) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// Says how the log is changed; without this it stays as it is.
    #[must_use]
    pub fn log_through(mut self, logging: Logging) -> Self {
        self.logging = logging;
        self
    }

    /// Answers clients on these threads instead of on the runtime that starts the program.
    #[must_use]
    pub fn answer_on(mut self, workers: Workers) -> Self {
        self.workers = Some(Arc::new(workers));
        self
    }

    /// Starts serving, and the embedded fleet if the settings ask for one.
    ///
    /// # Errors
    /// An engine of the settings cannot be used, or an embedded one did not start.
    pub async fn spawn(self) -> Result<Running, StartError> {
        let Self { config, listeners, secrets, embedded_token, source, logging, workers } = self;
        let secrets = Arc::new(secrets);
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let mut core = config.core();
        core.engine_tls = secrets.engine_tls();
        let exporter = Exporter::start(&config.telemetry)?;
        core.traces = exporter.as_ref().map(Exporter::traces).unwrap_or_default();
        let traces = core.traces.clone();
        let proxy = Proxy::start(core, tasks.clone(), stop.clone());
        let limits = SharedLimits::from(limits(&config, &config));
        let reloader = Arc::new(Reloader {
            source,
            proxy: proxy.clone(),
            secrets: Arc::clone(&secrets),
            traces,
            limits: limits.clone(),
            started: config.clone(),
            now: Mutex::new(config.clone()),
        });
        let state = State {
            proxy: proxy.clone(),
            access: secrets.access(),
            cors: Cors {
                // Validation has seen the list.
                origins: Origins::new(&config.cors.origins).unwrap_or_default(),
                max_age: config.cors.max_age,
            },
            limits,
            reload: reloader.endpoint(),
            logging,
        };
        let addrs = listeners.addrs();
        let bounds = (&config.connections, config.stream.half_close);
        let servers = listeners.serve(&state, bounds, workers.as_ref(), &tasks);
        tasks.spawn({
            let (secrets, stop) = (Arc::clone(&secrets), stop.clone());
            async move { stop.run_until_cancelled(secrets.follow()).await.unwrap_or(()) }
        });
        for spec in config.prefill.iter().chain(&config.decode).flat_map(PeerSpec::ranks) {
            proxy.add_peer(spec)?;
        }
        let engines = if config.embeds_fleet() {
            fleet::start(&config, addrs.of_engines, &embedded_token).await?
        } else {
            Vec::new()
        };
        for engine in &engines {
            proxy.add_peer(PeerSpec::new(engine.role, engine.engine.url()))?;
        }
        Ok(Running {
            addrs,
            engines,
            proxy,
            config,
            servers,
            secrets,
            reloader,
            exporter,
            tasks,
            stop,
            workers,
        })
    }
}

/// The surface's bounds; the registry keeps the payload size that it started with.
fn limits(config: &Config, started: &Config) -> kvbaton_routes::Limits {
    kvbaton_routes::Limits {
        body_bytes: config.limits.body_bytes,
        payload_bytes: started.limits.payload_bytes,
        body_silence: config.timeouts.client_body,
        body_whole: config.timeouts.client_body_whole,
        keep_alive: config.stream.keep_alive,
    }
}

/// A serving program.
pub struct Running {
    addrs: listeners::Addrs,
    engines: Vec<EmbeddedEngine>,
    proxy: Proxy,
    config: Config,
    servers: Vec<server::Server>,
    secrets: Arc<SecretStore>,
    reloader: Arc<Reloader>,
    exporter: Option<Exporter>,
    tasks: TaskTracker,
    stop: CancellationToken,
    workers: Option<Arc<Workers>>,
}

impl Running {
    /// The public listener's address.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addrs.public
    }

    /// The address of the operators' endpoints, if there are any.
    #[must_use]
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.addrs.of_operators
    }

    /// The address of the registry.
    #[must_use]
    pub fn registry_addr(&self) -> SocketAddr {
        self.addrs.registry
    }

    /// Whether the public listener speaks TLS.
    #[must_use]
    pub fn is_secure(&self) -> bool {
        self.config.tls.is_on()
    }

    /// Whether clients need an API key.
    #[must_use]
    pub fn needs_keys(&self) -> bool {
        !self.config.keys.is_empty() || self.config.keys_file.is_some()
    }

    /// Reads the files with certificates, tokens and keys again; whether one had changed. Happens by
    /// itself every `secrets.refresh`.
    ///
    /// # Errors
    /// What cannot be used; everything stays as it was then.
    pub async fn refresh_secrets(&self) -> Result<bool, SecretsError> {
        self.secrets.refresh().await
    }

    /// Reads the settings again and takes over what can change now.
    ///
    /// # Errors
    /// Every fault; everything stays as it was then.
    pub async fn reload(&self) -> Result<Reloaded, NotReloaded> {
        self.reloader.reload().await
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

    /// What becomes of requests while no prefill engine can be had.
    #[must_use]
    pub fn on_no_prefill(&self) -> kvbaton_proxy::OnMissing {
        self.config.hand_off.on_no_prefill
    }

    /// The core, for tests that look behind the HTTP surface.
    #[must_use]
    pub fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    /// Leaves in order: not ready, settle, no new connections, finish what runs. Returns whether
    /// everything ended within the limit.
    pub async fn drain(self) -> bool {
        let Self { engines, proxy, servers, reloader, exporter, tasks, stop, workers, .. } = self;
        let config = reloader.now.lock().await.clone();
        drop(reloader);
        let deadline = tokio::time::Instant::now() + config.shutdown.limit;
        proxy.drain();
        tokio::time::sleep(config.shutdown.settle).await;
        // The public one first: operators can look on while requests end.
        let finish = async {
            for server in servers {
                server.finish().await;
            }
        };
        let finished = {
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
        // The last requests have told theirs by now.
        if let Some(exporter) = exporter {
            exporter.flush(deadline).await;
        }
        drop(workers);
        for engine in engines {
            engine.engine.shutdown().await;
        }
        finished && ended
    }
}
