//! Where what several routers must agree on is kept: in this process alone, or in etcd.
//! Every change of the registry that an engine asks for goes through here; reading never does.

#[cfg(feature = "etcd")]
mod etcd;
mod settings;

use std::pin::Pin;

use bytes::Bytes;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use settings::{StoreFault, StoreKind, StoreSettings};

use crate::Proxy;
use crate::registry::{Heartbeat, Rank, Receipt, Registered, Registration, Registry, RegistryError, Writer};

/// What becomes of a change.
pub(crate) type Changed<'a, T> = Pin<Box<dyn Future<Output = Result<T, RegistryError>> + Send + 'a>>;

/// How engines' changes are made true for every router, on behalf of a writer who may make them. A
/// change that was answered with success is one that all of them know, or will as soon as they hear of it.
pub(crate) trait Storage: Send + Sync {
    /// Takes an engine with all its ranks.
    fn register(&self, registration: Registration) -> Changed<'_, Receipt>;

    /// Takes one rank's payload.
    fn put_rank<'a>(
        &'a self,
        writer: &'a Writer,
        engine_id: &'a str,
        rank: Rank,
        payload: Bytes,
    ) -> Changed<'a, Registered>;

    /// Takes a sign of life.
    fn heartbeat<'a>(
        &'a self,
        writer: &'a Writer,
        engine_id: &'a str,
        heartbeat: &'a Heartbeat,
    ) -> Changed<'a, Receipt>;

    /// Lets an engine leave; whether it was there.
    fn remove<'a>(&'a self, writer: &'a Writer, engine_id: &'a str) -> Changed<'a, bool>;

    /// Shares what operators decide at this router and takes over what they decide at others.
    fn share_decisions(&self, proxy: &Proxy, tasks: &TaskTracker, stop: &CancellationToken);

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
    fn register(&self, registration: Registration) -> Changed<'_, Receipt> {
        Box::pin(async move { self.registry.register(registration) })
    }

    fn put_rank<'a>(
        &'a self,
        writer: &'a Writer,
        engine_id: &'a str,
        rank: Rank,
        payload: Bytes,
    ) -> Changed<'a, Registered> {
        Box::pin(async move { self.registry.put_as(writer, engine_id, rank, payload) })
    }

    fn heartbeat<'a>(
        &'a self,
        writer: &'a Writer,
        engine_id: &'a str,
        heartbeat: &'a Heartbeat,
    ) -> Changed<'a, Receipt> {
        Box::pin(async move {
            self.registry.check_writer(writer, engine_id)?;
            self.registry.heartbeat(engine_id, heartbeat)
        })
    }

    fn remove<'a>(&'a self, writer: &'a Writer, engine_id: &'a str) -> Changed<'a, bool> {
        Box::pin(async move {
            self.registry.check_writer(writer, engine_id)?;
            Ok(self.registry.remove(engine_id))
        })
    }

    /// There is nobody to share them with.
    fn share_decisions(&self, _proxy: &Proxy, _tasks: &TaskTracker, _stop: &CancellationToken) {}

    fn view(&self) -> StoreView {
        StoreView { kind: StoreKind::Memory, up: true, age_seconds: Some(0.0) }
    }
}

/// Starts to keep `registry` in the store that the settings ask for. Its tasks run in `tasks` and end
/// with `stop`.
pub(crate) fn start(
    settings: &StoreSettings,
    registry: Registry,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Box<dyn Storage> {
    match settings.kind {
        StoreKind::Memory => Box::new(Memory { registry }),
        #[cfg(feature = "etcd")]
        StoreKind::Etcd => Box::new(etcd::Etcd::start(settings.clone(), registry, tasks, stop)),
        #[cfg(not(feature = "etcd"))]
        StoreKind::Etcd => {
            let _unused = (tasks, stop);
            tracing::error!("built without etcd: nothing is shared with other routers");
            Box::new(Memory { registry })
        }
    }
}
