//! The registry's time: leases that are renewed and run out, the clock that engines are told, and the
//! end of waiting. Whoever is silent for too long has left before anybody reads or writes.

use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::RwLockWriteGuard;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Registry;
use super::clock::Echo;
use super::record::EngineRecord;
use super::state::State;

impl Registry {
    /// Lets silent engines leave in time, though nobody reads, until told to stop.
    pub(crate) async fn expire_until(self, stop: CancellationToken) {
        loop {
            let moved = self.shared.expiry_moved.notified();
            self.sweep_if_due();
            let due = match self.shared.next_expiry.load(Ordering::Acquire) {
                u64::MAX => None,
                micros => Some(self.shared.origin + Duration::from_micros(micros)),
            };
            let expiry = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = moved => {}
                () = expiry => {}
            }
        }
    }

    /// Ends all that wait and watch, now and from now on; everything else goes on.
    pub(crate) fn close(&self) {
        self.shared.closing.cancel();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.shared.closing.is_cancelled()
    }

    /// The router's clock in seconds.
    pub(super) fn now(&self) -> f64 {
        self.shared.origin.elapsed().as_secs_f64()
    }

    /// Rounded up: what is due then has ended.
    pub(super) fn micros_until(&self, moment: Instant) -> u64 {
        let nanos = moment.duration_since(self.shared.origin).as_nanos();
        u64::try_from(nanos.div_ceil(1000)).unwrap_or(u64::MAX)
    }

    /// Renews the lease and takes the clock in; the router's clock for the answer.
    pub(super) fn beat(&self, record: &EngineRecord, clock: Option<f64>, echo: Option<Echo>) -> f64 {
        let now = self.now();
        let mut pulse = record.pulse.lock();
        pulse.deadline = record.ttl.filter(|_| pulse.is_timed_here()).map(|ttl| Instant::now() + ttl);
        if let Some(deadline) = pulse.deadline {
            self.expires_at(deadline);
        }
        if let Some(sent) = clock {
            pulse.clock.observe(sent, now, echo);
        }
        pulse.clock.answer(now)
    }

    /// Somebody's time runs out then.
    pub(super) fn expires_at(&self, deadline: Instant) {
        let micros = self.micros_until(deadline);
        if self.shared.next_expiry.fetch_min(micros, Ordering::AcqRel) > micros {
            self.shared.expiry_moved.notify_one();
        }
    }

    /// The state for a change, with nobody in it whose time ran out.
    pub(super) fn write(&self) -> RwLockWriteGuard<'_, State> {
        let mut state = self.shared.state.write();
        self.sweep(&mut state);
        state
    }

    pub(super) fn sweep_if_due(&self) {
        let due = self.shared.next_expiry.load(Ordering::Acquire);
        if self.shared.origin.elapsed().as_micros() >= u128::from(due) {
            drop(self.write());
        }
    }

    fn sweep(&self, state: &mut State) {
        let now = Instant::now();
        let due = self.shared.next_expiry.load(Ordering::Acquire);
        if now.duration_since(self.shared.origin).as_micros() < u128::from(due) {
            return;
        }
        let micros = state.expire(now).map_or(u64::MAX, |next| self.micros_until(next));
        // Heartbeats, which may move it too, are shut out by the state's lock.
        self.shared.next_expiry.store(micros, Ordering::Release);
        self.publish(state);
    }

    pub(super) fn publish(&self, state: &State) {
        let revision = state.history.revision();
        self.shared.revision.send_if_modified(|published| std::mem::replace(published, revision) != revision);
    }
}
