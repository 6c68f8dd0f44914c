//! Starting and stopping one engine, and the handle that its owner keeps.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use kv_connector::handshake::RegistryClient;
use kv_connector::kv_events::EventPublisher;
use kv_connector::scheduler::{Scheduler, SchedulerConfig};
use kv_connector::side_channel::SideChannelServer;
use kv_connector::transport::loopback;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cache_events::CacheEvents;
use crate::config::EngineConfig;
use crate::conn::{self, StopTokens};
use crate::core::{Core, CoreParts};
use crate::error::EngineError;
use crate::faults::Faults;
use crate::http;
use crate::kv::KvCache;
use crate::listener::ListenerState;
use crate::ranks::Ranks;
use crate::registration::{Endings, Registrar, registration};
use crate::shared::{EngineStats, SeenRequest, Shared};
use crate::transport::KvTransport;

/// Commands that may wait for the core.
const COMMAND_QUEUE: usize = 4096;

/// Batches of KV events that are kept for replays, as in vLLM.
const KEPT_EVENTS: usize = 10_000;

/// A running engine; dropping it stops it abruptly, like [`Engine::kill`] without the waiting.
pub struct Engine {
    shared: Arc<Shared>,
    addr: SocketAddr,
    side_channel_addr: Option<SocketAddr>,
    kv_events_addrs: [Option<SocketAddr>; 2],
    listener_state: ListenerState,
    stop: StopTokens,
    /// The listener and its connections.
    connections: TaskTracker,
    /// The core, its handshakes and the registrar.
    background: TaskTracker,
    /// Ends when the engine has left the registry.
    registrar: Option<JoinHandle<()>>,
    leave: CancellationToken,
    transport_faults: Vec<loopback::Faults>,
}

/// Starts an engine on a listener that is already bound.
///
/// The engine registers in the background, so the registry may come up later.
///
/// # Errors
/// An impossible setting, a listener without an address, or no transport for the KV blocks.
pub async fn spawn(config: EngineConfig, listener: TcpListener) -> Result<Engine, EngineError> {
    if let Some((setting, expected)) = config.fault() {
        return Err(EngineError::Setting { setting, expected });
    }
    let addr = listener.local_addr().map_err(EngineError::Listener)?;
    let config = fit_context(config);
    let engine_id = config.engine_id.clone().unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let registry = match &config.registry {
        None => None,
        Some(url) => {
            let token = config.registry_token.clone();
            let client = RegistryClient::with_tls(url.as_str(), token, &config.registry_tls);
            Some(Arc::new(client.map_err(EngineError::Registry)?))
        }
    };
    let (ranks, kv, transport_faults) = build_ranks(&config, &engine_id).await?;
    let payloads = ranks.handshake_payloads();
    let nixl_version = ranks.nixl_version().map(str::to_owned);
    let side_channel = match config.side_channel {
        None => None,
        Some(addr) => Some(SideChannelServer::bind(addr).await.map_err(EngineError::SideChannel)?),
    };
    let side_channel_addr = side_channel.as_ref().map(SideChannelServer::local_addr).transpose();
    let side_channel_addr = side_channel_addr.map_err(EngineError::SideChannel)?;

    let events = EventPorts::bind(&config).await.map_err(EngineError::KvEvents)?;
    let kv_events_addrs = events.addrs;

    let (stop, leave, started) = (StopTokens::default(), CancellationToken::new(), Instant::now());
    let (connections, background) = (TaskTracker::new(), TaskTracker::new());
    let (command_sender, commands) = mpsc::channel(COMMAND_QUEUE);
    let scheduler = Scheduler::new(scheduler_config(&config, &engine_id, side_channel_addr.unwrap_or(addr)));
    let shared = Shared::new(config, engine_id.clone(), command_sender);
    let core = Core::new(CoreParts {
        shared: Arc::clone(&shared),
        commands,
        scheduler,
        ranks,
        kv,
        registry: registry.clone(),
        tracker: background.clone(),
        stop: stop.kill.clone(),
        events: events.serve(&background, &stop.kill),
        started,
    });
    run_core(core, &shared.config.transport, &background);
    let listener_state = ListenerState::default();
    if let Some(server) = side_channel {
        let serving = listener_state.serve(server, shared.config.generation, &payloads, started);
        let kill = stop.kill.clone();
        background.spawn(async move {
            tokio::select! {
                () = kill.cancelled() => {}
                () = serving => {}
            }
        });
    }
    let registrar = registry.map(|registry| {
        let registration = registration(&shared.config, &engine_id, addr, payloads, nixl_version);
        let registrar = Registrar::new(
            registry,
            registration,
            shared.config.registry_refresh,
            started,
            Arc::clone(&shared.known),
        );
        let (drain, kill) = (stop.drain.clone(), stop.kill.clone());
        background.spawn(registrar.run(Endings { drain, leave: leave.clone(), kill }))
    });
    let app = http::app(Arc::clone(&shared));
    let keep_alive = shared.config.keep_alive;
    connections.spawn(conn::serve(listener, app, keep_alive, stop.clone(), connections.clone()));
    Ok(Engine {
        shared,
        addr,
        side_channel_addr,
        kv_events_addrs,
        listener_state,
        stop,
        connections,
        background,
        registrar,
        leave,
        transport_faults,
    })
}

impl Engine {
    /// The address that it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The address of its ZMQ side channel, if it has one.
    pub fn side_channel_addr(&self) -> Option<SocketAddr> {
        self.side_channel_addr
    }

    /// Where it publishes its KV events and where it replays them, if it does.
    pub fn kv_events_addrs(&self) -> [Option<SocketAddr>; 2] {
        self.kv_events_addrs
    }

    /// What became of its ZMQ side channel.
    pub fn side_channel(&self) -> &ListenerState {
        &self.listener_state
    }

    /// The base URL of its HTTP API, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The id under which its handshake payload is published.
    pub fn engine_id(&self) -> &str {
        &self.shared.engine_id
    }

    /// The settings that it runs with.
    pub fn config(&self) -> &EngineConfig {
        &self.shared.config
    }

    /// Its scripted faults.
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// The scripted faults of its loopback transport, at rank 0; those of NIXL script nothing.
    pub fn transport_faults(&self) -> loopback::Faults {
        self.transport_faults.first().cloned().unwrap_or_default()
    }

    /// The scripted faults of the loopback transport of each rank; empty with NIXL.
    pub fn transport_faults_by_rank(&self) -> &[loopback::Faults] {
        &self.transport_faults
    }

    /// What it holds and has done.
    pub fn stats(&self) -> EngineStats {
        self.shared.read_stats()
    }

    /// The newest requests that arrived, oldest first, those to `/sim` left out.
    pub fn requests(&self) -> Vec<SeenRequest> {
        self.shared.seen()
    }

    /// Finishes what runs, leaves the registry, then stops; dropping the future stops at once, as
    /// held requests may need.
    pub async fn shutdown(mut self) {
        self.stop.drain.cancel();
        self.connections.close();
        self.connections.wait().await;
        self.leave.cancel();
        if let Some(registrar) = self.registrar.take() {
            // A registrar that broke has nothing left to say.
            let _ = registrar.await;
        }
        self.kill().await;
    }

    /// Stops at once, as a killed process does: sockets are reset and the transport is gone.
    pub async fn kill(self) {
        self.stop.kill.cancel();
        self.connections.close();
        self.background.close();
        self.connections.wait().await;
        self.background.wait().await;
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop.kill.cancel();
    }
}

/// The bound ports of the KV events.
struct EventPorts {
    listeners: [Option<TcpListener>; 2],
    addrs: [Option<SocketAddr>; 2],
}

impl EventPorts {
    async fn bind(config: &EngineConfig) -> io::Result<Self> {
        let mut ports = Self { listeners: [None, None], addrs: [None, None] };
        for (at, addr) in [config.kv_events, config.kv_events_replay].into_iter().enumerate() {
            if let Some(addr) = addr {
                let listener = TcpListener::bind(addr).await?;
                ports.addrs[at] = Some(listener.local_addr()?);
                ports.listeners[at] = Some(listener);
            }
        }
        Ok(ports)
    }

    /// Serves until the engine is killed.
    fn serve(self, background: &TaskTracker, kill: &CancellationToken) -> Option<CacheEvents> {
        let [live, replays] = self.listeners;
        let publisher = EventPublisher::new(if replays.is_some() { KEPT_EVENTS } else { 0 });
        let is_any = live.is_some();
        let live = live.map(|listener| publisher.clone().serve(listener));
        let replays = replays.map(|listener| publisher.clone().serve_replays(listener));
        if let Some(live) = live {
            background.spawn(kill.clone().run_until_cancelled_owned(live));
        }
        if let Some(replays) = replays {
            background.spawn(kill.clone().run_until_cancelled_owned(replays));
        }
        is_any.then(|| CacheEvents::new(publisher))
    }
}

/// NIXL's library takes its time to load and its agents to start, so that is done off the runtime.
async fn build_ranks(
    config: &EngineConfig,
    engine_id: &str,
) -> Result<(Ranks, KvCache, Vec<loopback::Faults>), EngineError> {
    match config.transport {
        KvTransport::Loopback => Ranks::build(config, engine_id),
        KvTransport::Nixl { .. } => {
            let (config, engine_id) = (config.clone(), engine_id.to_owned());
            let build = tokio::task::spawn_blocking(move || Ranks::build(&config, &engine_id));
            build.await.map_err(EngineError::Start)?
        }
    }
}

/// A core over NIXL gets a thread of its own, because connecting to a peer waits for NIXL.
fn run_core(core: Core, transport: &KvTransport, background: &TaskTracker) {
    match transport {
        KvTransport::Loopback => {
            background.spawn(core.run());
        }
        KvTransport::Nixl { .. } => {
            let runtime = Handle::current();
            background.spawn_blocking(move || runtime.block_on(core.run()));
        }
    }
}

/// A context that does not fit into the blocks could never be served.
fn fit_context(mut config: EngineConfig) -> EngineConfig {
    let room = (config.num_blocks - 1) * config.block_size;
    if room < config.max_model_len {
        tracing::info!(asked = config.max_model_len, room, "context limit lowered to what the blocks hold");
        config.max_model_len = room;
    }
    config
}

fn scheduler_config(config: &EngineConfig, engine_id: &str, addr: SocketAddr) -> SchedulerConfig {
    let host = config.advertise_host.clone().unwrap_or_else(|| addr.ip().to_string());
    let port = config.advertise_port.unwrap_or_else(|| addr.port());
    let mut scheduler = SchedulerConfig::new(config.generation, engine_id, host, port);
    scheduler.lease = config.lease;
    scheduler.tp_size = config.tp_size;
    (scheduler.mode, scheduler.push_registration_timeout) = (config.transfer_mode, config.push_timeout);
    scheduler
}
