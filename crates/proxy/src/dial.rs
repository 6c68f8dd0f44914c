//! Connection attempts by address: one address that swallows them holds up one request, not all
//! that were sent there. Decides nothing about engines that answer.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use http::Uri;
use http::uri::Authority;
use parking_lot::Mutex;
use tokio::time::Instant;

/// The addresses that peers have; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Dials {
    slow: Duration,
    by_authority: Arc<Mutex<HashMap<Authority, Weak<Dial>>>>,
}

impl Dials {
    /// `slow` is how long an attempt may take before others avoid the address.
    pub(crate) fn new(slow: Duration) -> Self {
        Self { slow, by_authority: Arc::default() }
    }

    /// The address of a new peer.
    pub(crate) fn of(&self, authority: &Authority) -> Arc<Dial> {
        let mut all = self.by_authority.lock();
        if let Some(dial) = all.get(authority).and_then(Weak::upgrade) {
            return dial;
        }
        all.retain(|_, dial| dial.strong_count() > 0);
        let dial = Arc::new(Dial { slow: self.slow, count: AtomicUsize::new(0), attempts: Mutex::default() });
        all.insert(authority.clone(), Arc::downgrade(&dial));
        dial
    }

    /// An attempt that begins now; none for an address that is no peer's any more.
    pub(crate) fn begin(&self, uri: &Uri) -> Option<Attempt> {
        let dial = self.by_authority.lock().get(uri.authority()?)?.upgrade()?;
        Some(dial.begin())
    }
}

#[derive(Debug, Default)]
struct Attempts {
    next: u64,
    /// Those that are under way, oldest first, with their beginnings.
    running: BTreeMap<u64, Instant>,
    /// When one last succeeded.
    connected: Option<Instant>,
}

/// The attempts to connect to one address.
#[derive(Debug)]
pub(crate) struct Dial {
    slow: Duration,
    /// How many attempts are under way, for who only asks whether any is.
    count: AtomicUsize,
    attempts: Mutex<Attempts>,
}

impl Dial {
    fn begin(self: Arc<Self>) -> Attempt {
        let mut attempts = self.attempts.lock();
        let number = attempts.next;
        attempts.next += 1;
        attempts.running.insert(number, Instant::now());
        self.count.store(attempts.running.len(), Ordering::Relaxed);
        drop(attempts);
        Attempt { dial: self, number }
    }

    /// Whether the address swallows attempts, as far as can be told yet.
    pub(crate) fn is_silent(&self, now: Instant) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let attempts = self.attempts.lock();
        attempts.running.first_key_value().is_some_and(|(_, began)| {
            let answered = attempts.connected.is_some_and(|connected| connected >= *began);
            !answered && now.saturating_duration_since(*began) >= self.slow
        })
    }
}

/// One attempt to connect; it ends when dropped.
#[derive(Debug)]
pub(crate) struct Attempt {
    dial: Arc<Dial>,
    number: u64,
}

impl Attempt {
    /// Ends when the attempt has become slow and an older one already waits.
    pub(crate) async fn is_one_too_many(&self) {
        tokio::time::sleep(self.dial.slow).await;
        let first = self.dial.attempts.lock().running.first_key_value().map(|(number, _)| *number);
        if first == Some(self.number) {
            std::future::pending::<()>().await;
        }
    }

    pub(crate) fn connected(&self) {
        self.dial.attempts.lock().connected = Some(Instant::now());
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let mut attempts = self.dial.attempts.lock();
        attempts.running.remove(&self.number);
        self.dial.count.store(attempts.running.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_attempt_waits_and_the_others_give_up() {
        let dials = Dials::new(Duration::from_millis(500));
        let uri: Uri = "http://10.0.0.1:8100/health".parse().unwrap();
        assert!(dials.begin(&uri).is_none(), "nobody's address");
        let dial = dials.of(uri.authority().unwrap());
        let (first, second) = (dials.begin(&uri).unwrap(), dials.begin(&uri).unwrap());
        assert!(!dial.is_silent(Instant::now()));
        let began = Instant::now();
        second.is_one_too_many().await;
        assert_eq!(began.elapsed(), Duration::from_millis(500));
        assert!(dial.is_silent(Instant::now()));
        let waits = tokio::time::timeout(Duration::from_secs(60), first.is_one_too_many()).await;
        assert!(waits.is_err(), "the first may wait as long as connecting may take");
        drop((first, second));
        assert!(!dial.is_silent(Instant::now()));
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_answers_another_attempt_is_not_silent() {
        let dials = Dials::new(Duration::from_millis(500));
        let uri: Uri = "http://10.0.0.1:8100".parse().unwrap();
        let dial = dials.of(uri.authority().unwrap());
        let _lost = dials.begin(&uri).unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(dial.is_silent(Instant::now()));
        dials.begin(&uri).unwrap().connected();
        assert!(!dial.is_silent(Instant::now()));
        assert!(Arc::ptr_eq(&dial, &dials.of(uri.authority().unwrap())), "ranks share their address");
    }
}
