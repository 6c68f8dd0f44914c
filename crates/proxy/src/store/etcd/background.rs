//! What signs of life leave to be done: leases renewed, clocks told. Waits for etcd while it is
//! away, keeps one entry per engine whatever their number of signs, and never holds an answer up.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, Error as EtcdError, PutOptions, Txn, TxnOp};
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::follow::unix_now;
use super::link::LinkFault;
use super::wire::{ClockValue, SCHEMA, write};
use super::{CLOCK_PAUSE, Etcd};

/// Exchanges at a time.
const AT_ONCE: usize = 16;

/// Pause after a failure, so that it is noticed before the next try.
const PAUSE: Duration = Duration::from_millis(200);

/// What is to be done.
#[derive(Debug, Default)]
pub(super) struct Background {
    due: Mutex<Due>,
    more: Notify,
}

#[derive(Debug, Default)]
struct Due {
    leases: BTreeSet<i64>,
    /// With the lease of the engine.
    clocks: BTreeMap<String, (i64, ClockValue)>,
}

impl Etcd {
    /// Has an engine's lease renewed soon, unless that was done a moment ago.
    pub(super) fn renew(&self, engine_id: &str) {
        let Some(engine) = self.registry.engine(engine_id) else { return };
        if let Some(lease) = self.registry.lease_to_renew(&engine) {
            self.background.due.lock().leases.insert(lease);
            self.background.more.notify_one();
        }
    }

    /// Has the other routers told an engine's clock soon, unless they were told of late.
    pub(super) fn tell_clock(&self, engine_id: &str) {
        let Some(engine) = self.registry.engine(engine_id).filter(|_| self.is_up()) else { return };
        let Some(stored) = self.registry.stored(engine_id) else { return };
        let before = unix_now();
        let Some(reading) = self.registry.clock_to_tell(&engine, CLOCK_PAUSE) else { return };
        let between = (unix_now() - before).max(0.0);
        let Some(error) = reading.error else { return };
        let value = ClockValue {
            schema: SCHEMA,
            generation: engine.generation,
            seconds: reading.seconds,
            // Two clocks cannot be read at once.
            error: error + between,
            unix: before,
            router: self.router.clone(),
        };
        self.background.due.lock().clocks.insert(engine_id.to_owned(), (stored.lease, value));
        self.background.more.notify_one();
    }

    pub(super) async fn work_until(self: Arc<Self>, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.work() => {}
        }
    }

    async fn work(&self) {
        let mut up = self.up.subscribe();
        loop {
            self.background.more.notified().await;
            // Its sender is a part of `self`.
            let _ = up.wait_for(|up| *up).await;
            let Due { leases, clocks } = std::mem::take(&mut *self.background.due.lock());
            let renewals = futures_util::stream::iter(leases).map(|lease| self.renew_now(lease));
            let all_renewed = renewals.buffer_unordered(AT_ONCE).all(std::future::ready);
            let all_renewed = all_renewed.await;
            let tellings = futures_util::stream::iter(clocks).map(|(id, clock)| self.tell_now(id, clock));
            tellings.buffer_unordered(AT_ONCE).for_each(std::future::ready).await;
            if !all_renewed {
                tokio::time::sleep(PAUSE).await;
                self.background.more.notify_one();
            }
        }
    }

    /// Renews a lease; whether etcd could be asked. If not it stays due.
    async fn renew_now(&self, lease: i64) -> bool {
        match self.link.renew(lease).await {
            Ok(()) => true,
            // It ran out, and the engine's departure says the rest.
            Err(LinkFault::Etcd(EtcdError::LeaseKeepAliveError(_))) => true,
            Err(fault) => {
                tracing::debug!(%fault, "a lease was not renewed");
                self.background.due.lock().leases.insert(lease);
                false
            }
        }
    }

    async fn tell_now(&self, engine_id: String, (lease, value): (i64, ClockValue)) {
        // An engine that left must not leave a clock behind.
        let is_there = Compare::version(self.keys.engine(&engine_id), CompareOp::Greater, 0);
        let options = Some(PutOptions::new().with_lease(lease));
        let put = TxnOp::put(self.keys.clock(&engine_id), write(&value), options);
        if let Err(fault) = self.link.transact(Txn::new().when([is_there]).and_then([put])).await {
            tracing::debug!(%fault, "a clock was not told");
        }
    }
}
