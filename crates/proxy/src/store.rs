//! Where what several routers must agree on is kept: in this process alone, or in etcd.
//! Every change of the registry that an engine asks for goes through here; reading never does.

#[cfg(feature = "etcd")]
mod etcd;
mod settings;

use std::future::Future;

use bytes::Bytes;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use settings::{StoreFault, StoreKind, StoreSettings};

use crate::Proxy;
use crate::registry::{Heartbeat, Rank, Receipt, Registered, Registration, Registry, RegistryError, Writer};

/// How engines' changes are made true for every router, on behalf of a writer who may make them. A change that was answered with success
/// is one that all of them know, or will as soon as they hear of it.
pub(crate) trait Storage {
    /// Takes an engine with all its ranks.
    fn register(
        &self,
        registration: Registration,
    ) -> impl Future<Output = Result<Receipt, RegistryError>> + Send;

    /// Takes one rank's payload.
    fn put_rank(
        &self,
        writer: &Writer,
        engine_id: &str,
        rank: Rank,
        payload: Bytes,
    ) -> impl Future<Output = Result<Registered, RegistryError>> + Send;

    /// Takes a sign of life.
    fn heartbeat(
        &self,
        writer: &Writer,
        engine_id: &str,
        heartbeat: &Heartbeat,
    ) -> impl Future<Output = Result<Receipt, RegistryError>> + Send;

    /// Lets an engine leave; whether it was there.
    fn remove(
        &self,
        writer: &Writer,
        engine_id: &str,
    ) -> impl Future<Output = Result<bool, RegistryError>> + Send;

    /// How the store is.
    fn view(&self) -> StoreView;
}

/// How the store is, as operators see it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StoreView {
    /// What it is.
    pub kind: StoreKind,
    /// Whether it can be reached; while it cannot, what was known before is used.
    pub up: bool,
    /// Seconds since it was last heard of; `None` when it never was.
    pub age_seconds: Option<f64>,
}

/// This process alone: nothing outlives it, and engines that it does not know register again with
/// their next sign of life.
#[derive(Debug)]
pub(crate) struct Memory {
    registry: Registry,
}

impl Storage for Memory {
    async fn register(&self, registration: Registration) -> Result<Receipt, RegistryError> {
        self.registry.register(registration)
    }

    async fn put_rank(
        &self,
        writer: &Writer,
        engine_id: &str,
        rank: Rank,
        payload: Bytes,
    ) -> Result<Registered, RegistryError> {
        self.registry.put_as(writer, engine_id, rank, payload)
    }

    async fn heartbeat(
        &self,
        writer: &Writer,
        engine_id: &str,
        heartbeat: &Heartbeat,
    ) -> Result<Receipt, RegistryError> {
        self.registry.check_writer(writer, engine_id)?;
        self.registry.heartbeat(engine_id, heartbeat)
    }

    async fn remove(&self, writer: &Writer, engine_id: &str) -> Result<bool, RegistryError> {
        self.registry.check_writer(writer, engine_id)?;
        Ok(self.registry.remove(engine_id))
    }

    fn view(&self) -> StoreView {
        StoreView { kind: StoreKind::Memory, up: true, age_seconds: Some(0.0) }
    }
}

/// The store that the settings ask for.
pub(crate) enum Store {
    Memory(Memory),
    #[cfg(feature = "etcd")]
    Etcd(std::sync::Arc<etcd::Etcd>),
}

impl Store {
    /// Starts to keep `registry`. Its tasks run in `tasks` and end with `stop`.
    pub(crate) fn start(
        settings: &StoreSettings,
        registry: Registry,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Self {
        match settings.kind {
            StoreKind::Memory => Self::Memory(Memory { registry }),
            #[cfg(feature = "etcd")]
            StoreKind::Etcd => Self::Etcd(etcd::Etcd::start(settings.clone(), registry, tasks, stop)),
            #[cfg(not(feature = "etcd"))]
            StoreKind::Etcd => {
                let _unused = (tasks, stop);
                tracing::error!("built without etcd: nothing is shared with other routers");
                Self::Memory(Memory { registry })
            }
        }
    }
}

impl Store {
    /// Shares what operators decide at this router and takes over what they decide at others.
    #[cfg_attr(not(feature = "etcd"), expect(unused_variables, reason = "memory shares nothing"))]
    pub(crate) fn share_decisions(&self, proxy: &Proxy, tasks: &TaskTracker, stop: &CancellationToken) {
        match self {
            Self::Memory(_) => {}
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => {
                tasks.spawn(std::sync::Arc::clone(etcd).share_decisions(proxy.clone(), stop.clone()));
            }
        }
    }
}

impl Storage for Store {
    async fn register(&self, registration: Registration) -> Result<Receipt, RegistryError> {
        match self {
            Self::Memory(memory) => memory.register(registration).await,
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.register(registration).await,
        }
    }

    async fn put_rank(
        &self,
        writer: &Writer,
        engine_id: &str,
        rank: Rank,
        payload: Bytes,
    ) -> Result<Registered, RegistryError> {
        match self {
            Self::Memory(memory) => memory.put_rank(writer, engine_id, rank, payload).await,
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.put_rank(writer, engine_id, rank, payload).await,
        }
    }

    async fn heartbeat(
        &self,
        writer: &Writer,
        engine_id: &str,
        heartbeat: &Heartbeat,
    ) -> Result<Receipt, RegistryError> {
        match self {
            Self::Memory(memory) => memory.heartbeat(writer, engine_id, heartbeat).await,
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.heartbeat(writer, engine_id, heartbeat).await,
        }
    }

    async fn remove(&self, writer: &Writer, engine_id: &str) -> Result<bool, RegistryError> {
        match self {
            Self::Memory(memory) => memory.remove(writer, engine_id).await,
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.remove(writer, engine_id).await,
        }
    }

    fn view(&self) -> StoreView {
        match self {
            Self::Memory(memory) => memory.view(),
            #[cfg(feature = "etcd")]
            Self::Etcd(etcd) => etcd.view(),
        }
    }
}
