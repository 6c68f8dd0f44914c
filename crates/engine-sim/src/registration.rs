//! Keeps the engine registered: registration, signs of life, registration anew, departure.
//!
//! The registry may start later than the engine or forget everything; a failure is only logged.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_connector::handshake::{
    Echo, EngineRole, EngineState, EngineTraits, Heartbeat, RankPayload, Receipt, Registration,
    RegistryClient, RegistryError,
};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::{Attention, EngineConfig, Role};

/// A registry that does not answer must not keep an engine from leaving.
const FAREWELL: Duration = Duration::from_secs(1);

/// However often an engine beats, a busy machine may be silent for a while.
const LEAST_TTL: Duration = Duration::from_secs(5);

/// One engine's side of its registration.
pub(crate) struct Registrar {
    registry: Arc<RegistryClient>,
    registration: Registration,
    refresh: Duration,
    /// The origin of the engine's clock.
    started: Instant,
    registered: bool,
    /// Set with the first registration, for good.
    known: Arc<AtomicBool>,
    echo: Option<Echo>,
}

/// The ends of a registration, in the order in which they come.
#[derive(Clone, Default)]
pub(crate) struct Endings {
    /// From now on the engine finishes what it has.
    pub(crate) drain: CancellationToken,
    /// The engine leaves.
    pub(crate) leave: CancellationToken,
    /// The engine is gone, without a word.
    pub(crate) kill: CancellationToken,
}

/// What an engine says of itself.
pub(crate) fn registration(
    config: &EngineConfig,
    engine_id: &str,
    addr: SocketAddr,
    payloads: Vec<Vec<u8>>,
    nixl_version: Option<String>,
) -> Registration {
    let ranks = (0..).zip(payloads).map(|(tp_rank, payload)| RankPayload { pp_rank: 0, tp_rank, payload });
    let ttl = config.registry_ttl.unwrap_or_else(|| (config.registry_refresh * 3).max(LEAST_TTL));
    Registration {
        engine_id: engine_id.to_owned(),
        // A wildcard is no address at which anybody reaches it.
        base_url: (!addr.ip().is_unspecified()).then(|| format!("http://{addr}")),
        role: Some(match config.role {
            Role::Prefill => EngineRole::Prefill,
            Role::Decode => EngineRole::Decode,
            Role::Both => EngineRole::Both,
        }),
        model: Some(config.model.clone()),
        dp_rank: 0,
        vllm_version: Some(config.version().to_owned()),
        traits: EngineTraits { nixl_version, ..traits(config, addr) },
        state: EngineState::Ready,
        ttl: Some(ttl),
        clock: None,
        ranks: Some(ranks.collect()),
    }
}

fn traits(config: &EngineConfig, addr: SocketAddr) -> EngineTraits {
    let host = config.advertise_host.clone().unwrap_or_else(|| addr.ip().to_string());
    EngineTraits {
        tp_size: Some(config.tp_size),
        pp_size: Some(1),
        dcp_size: Some(1),
        transfer_mode: Some(config.transfer_mode),
        kv_heads: u32::try_from(config.total_kv_heads()).ok(),
        is_mla: Some(config.attention == Attention::Mla),
        permute_received: Some(config.permute_received),
        hma_required: Some(false),
        host_buffer: Some(false),
        enforce_compat: Some(config.enforce_compat),
        nixl_version: None,
        side_channel_host: Some(host),
        side_channel_port: Some(config.advertise_port.unwrap_or_else(|| addr.port())),
    }
}

impl Registrar {
    pub(crate) fn new(
        registry: Arc<RegistryClient>,
        registration: Registration,
        refresh: Duration,
        started: Instant,
        known: Arc<AtomicBool>,
    ) -> Self {
        Self { registry, registration, refresh, started, registered: false, known, echo: None }
    }

    /// Registers and beats until the engine ends.
    pub(crate) async fn run(mut self, endings: Endings) {
        let mut healthy = true;
        loop {
            if endings.drain.is_cancelled() {
                self.registration.state = EngineState::Draining;
            }
            let told = tokio::select! {
                () = endings.kill.cancelled() => return,
                () = endings.leave.cancelled() => break,
                told = self.tell() => told,
            };
            match told {
                Ok(()) => healthy = true,
                Err(RegistryError::Unknown) if std::mem::take(&mut self.registered) => continue,
                Err(error) if std::mem::replace(&mut healthy, false) => {
                    let engine_id = &self.registration.engine_id;
                    tracing::info!(engine_id, %error, "the registry does not know the engine, trying again");
                }
                Err(_) => {}
            }
            // Until the registry has it, no pull can succeed, so failures are retried sooner.
            let pause = if healthy { self.refresh } else { self.refresh.min(Duration::from_millis(100)) };
            let is_draining = self.registration.state == EngineState::Draining;
            tokio::select! {
                () = endings.kill.cancelled() => return,
                () = endings.leave.cancelled() => break,
                () = endings.drain.cancelled(), if !is_draining => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        let farewell = self.registry.deregister(&self.registration.engine_id);
        tokio::select! {
            () = endings.kill.cancelled() => {}
            // Whether it worked or not: without signs of life the registry lets the engine go.
            _ = tokio::time::timeout(FAREWELL, farewell) => {}
        }
    }

    /// One registration or sign of life.
    async fn tell(&mut self) -> Result<(), RegistryError> {
        let sent = self.started.elapsed();
        let receipt = if self.registered {
            let state = Some(self.registration.state);
            let heartbeat = Heartbeat { state, clock: Some(sent), echo: self.echo };
            self.registry.heartbeat(&self.registration.engine_id, &heartbeat).await?
        } else {
            self.registration.clock = Some(sent);
            self.registry.register(&self.registration).await?
        };
        let Receipt { router_clock, .. } = receipt;
        self.echo = Some(Echo { router_clock, received: self.started.elapsed() });
        self.registered = true;
        self.known.store(true, Ordering::Relaxed);
        Ok(())
    }
}
