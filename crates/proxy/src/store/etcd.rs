//! etcd as the store of several routers. Engines' changes are transactions that compare what they
//! replace; every router follows them and answers from its own copy. Leases are etcd's.
//! Must never stand between a request and an engine: while etcd is away, the copy is what holds.

mod background;
mod commit;
mod diagnosis;
mod follow;
mod link;
mod operator;
mod wire;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::settings::{StoreKind, StoreSettings};
use super::{Changed, Storage, StoreView};
use crate::Proxy;
use crate::registry::{Heartbeat, Rank, Receipt, Registered, Registration, Registry, RegistryError, Writer};
use background::Background;
use link::Link;
use operator::Decided;
use wire::{Keys, RankValue};

/// How long another router's measurement of an engine's clock is good enough.
const CLOCK_PAUSE: Duration = Duration::from_secs(600);

/// One router's end of etcd.
#[derive(Debug)]
pub(crate) struct Etcd {
    registry: Registry,
    link: Link,
    keys: Keys,
    clock_skew: Duration,
    /// This router among those that share the store.
    router: String,
    /// The revision up to which the copy holds all changes; 0 before the first.
    applied: watch::Sender<i64>,
    /// Which store was listed.
    store_name: Mutex<Option<Vec<u8>>>,
    up: watch::Sender<bool>,
    heard: Mutex<Option<Instant>>,
    /// Where the payloads of each engine lie, and at which revision they did.
    places: Mutex<HashMap<String, (i64, Vec<RankValue>)>>,
    /// What operators decided, as the store has it; `None` before it was listed.
    decided: watch::Sender<Option<Decided>>,
    background: Background,
}

impl Etcd {
    /// Makes `registry` a copy of what etcd has, and keeps it one until `stop`.
    pub(crate) fn start(
        settings: StoreSettings,
        registry: Registry,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Arc<Self> {
        registry.follow_store();
        let etcd = Arc::new(Self {
            registry,
            keys: Keys::new(&settings.prefix),
            clock_skew: settings.clock_skew,
            link: Link::new(settings),
            router: uuid::Uuid::new_v4().to_string(),
            applied: watch::Sender::new(0),
            store_name: Mutex::default(),
            up: watch::Sender::new(false),
            heard: Mutex::new(None),
            places: Mutex::default(),
            decided: watch::Sender::new(None),
            background: Background::default(),
        });
        tasks.spawn(Arc::clone(&etcd).follow_until(stop.clone()));
        tasks.spawn(Arc::clone(&etcd).work_until(stop.clone()));
        etcd
    }

    fn is_up(&self) -> bool {
        *self.up.borrow()
    }

    fn heard(&self) {
        *self.heard.lock() = Some(Instant::now());
    }

    /// Waits for an engine that is not known here though the store has it: it may have registered at
    /// another router a moment ago.
    async fn catch_up(&self, engine_id: &str) {
        if self.registry.engine(engine_id).is_some() || !self.is_up() {
            return;
        }
        match self.link.revision_of(&self.keys.engine(engine_id)).await {
            Ok(Some(revision)) => drop(self.applied_within_deadline(revision).await),
            Ok(None) => {}
            Err(fault) => tracing::debug!(%fault, "an unknown engine was not looked for in the store"),
        }
    }

    /// Waits until the copy holds what was changed at a revision; whether it does in time.
    async fn applied_within_deadline(&self, revision: i64) -> bool {
        let mut applied = self.applied.subscribe();
        let applied = applied.wait_for(|applied| *applied >= revision);
        matches!(tokio::time::timeout(self.link.timeout(), applied).await, Ok(Ok(_)))
    }
}

impl Etcd {
    async fn put(
        &self,
        writer: &Writer,
        engine_id: &str,
        rank: Rank,
        payload: Bytes,
    ) -> Result<Registered, RegistryError> {
        let mut first = None;
        let plan = self
            .commit(|registry| {
                let (plan, outcome) = registry.plan_rank(writer, engine_id, rank, payload.clone())?;
                // Another try may find what the one before did.
                first.get_or_insert(outcome);
                Ok(plan)
            })
            .await?;
        self.renew(&plan.record.engine_id);
        Ok(first.unwrap_or(Registered::Unchanged))
    }

    async fn beat(
        &self,
        writer: &Writer,
        engine_id: &str,
        heartbeat: &Heartbeat,
    ) -> Result<Receipt, RegistryError> {
        heartbeat.check()?;
        self.catch_up(engine_id).await;
        self.registry.check_writer(writer, engine_id)?;
        if self.registry.engine(engine_id).is_some() && self.registry.stored(engine_id).is_none() {
            return self.registry.heartbeat(engine_id, heartbeat);
        }
        let plan = match self.commit(|registry| registry.plan_heartbeat(engine_id, heartbeat)).await {
            // It lives, whatever becomes of the store; but what it wants to be known is not known.
            Err(RegistryError::StoreUnavailable) => {
                let plan = self.registry.plan_heartbeat(engine_id, heartbeat)?;
                let receipt = self.registry.acknowledge(&plan, heartbeat.clock, heartbeat.echo);
                self.renew(engine_id);
                return if plan.changes_state() { Err(RegistryError::StoreUnavailable) } else { Ok(receipt) };
            }
            plan => plan?,
        };
        self.renew(engine_id);
        let receipt = self.registry.acknowledge(&plan, heartbeat.clock, heartbeat.echo);
        self.tell_clock(engine_id);
        Ok(receipt)
    }
}

impl Storage for Arc<Etcd> {
    fn register(&self, registration: Registration) -> Changed<'_, Receipt> {
        Box::pin(async move {
            let clock = registration.clock;
            let plan = self.commit(|registry| registry.plan_registration(registration.clone())).await?;
            self.renew(&plan.record.engine_id);
            Ok(self.registry.acknowledge(&plan, clock, None))
        })
    }

    fn put_rank<'a>(
        &'a self,
        writer: &'a Writer,
        engine_id: &'a str,
        rank: Rank,
        payload: Bytes,
    ) -> Changed<'a, Registered> {
        Box::pin(self.put(writer, engine_id, rank, payload))
    }

    fn heartbeat<'a>(
        &'a self,
        writer: &'a Writer,
        engine_id: &'a str,
        heartbeat: &'a Heartbeat,
    ) -> Changed<'a, Receipt> {
        Box::pin(self.beat(writer, engine_id, heartbeat))
    }

    fn remove<'a>(&'a self, writer: &'a Writer, engine_id: &'a str) -> Changed<'a, bool> {
        Box::pin(async move {
            self.catch_up(engine_id).await;
            self.commit_removal(writer, engine_id).await
        })
    }

    fn share_decisions(&self, proxy: &Proxy, tasks: &TaskTracker, stop: &CancellationToken) {
        tasks.spawn(Self::clone(self).follow_decisions(proxy.clone(), stop.clone()));
    }

    fn view(&self) -> StoreView {
        let age = self.heard.lock().map(|heard| heard.elapsed().as_secs_f64());
        StoreView { kind: StoreKind::Etcd, up: self.is_up(), age_seconds: age }
    }
}
