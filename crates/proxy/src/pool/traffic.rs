//! What each pair has handed off of late: how often, and how long the decode engine took to answer. Kept by
//! the decode peer, in a ring of seconds; bounded in partners and in time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;

/// Over how many seconds rates are taken, the running one not counted.
pub(crate) const SECONDS: u64 = 10;

/// Slots of the ring: one more, for the running second.
const SLOTS: usize = SECONDS as usize + 1;

/// Most prefill partners that are remembered; the one that was silent longest gives way.
const MOST_PARTNERS: usize = 512;

/// What happened within one second.
#[derive(Clone, Copy, Debug, Default)]
struct Second {
    number: u64,
    count: u32,
    timed: u32,
    sum: Duration,
    longest: Duration,
}

#[derive(Clone, Debug, Default)]
struct Window([Second; SLOTS]);

impl Window {
    fn at(&mut self, number: u64) -> &mut Second {
        let slot = &mut self.0[(number % SLOTS as u64) as usize];
        if slot.number != number {
            *slot = Second { number, ..Second::default() };
        }
        slot
    }

    fn last(&self) -> u64 {
        self.0.iter().map(|second| second.number).max().unwrap_or(0)
    }
}

/// A decode peer's hand-offs by the prefill peer that they came from.
#[derive(Debug)]
pub(crate) struct Traffic {
    began: Instant,
    partners: Mutex<HashMap<Arc<str>, Window, RandomState>>,
}

impl Default for Traffic {
    fn default() -> Self {
        Self { began: Instant::now(), partners: Mutex::default() }
    }
}

/// How a pair does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct PairRate {
    pub(crate) prefill: Arc<str>,
    pub(crate) decode: Arc<str>,
    /// Hand-offs a second.
    pub(crate) rate: f64,
    /// From the prefill engine's answer to the first byte of the decode engine's, where it streamed.
    pub(crate) mean_ms: Option<f64>,
    pub(crate) longest_ms: Option<f64>,
}

impl Traffic {
    /// Seconds since this began, from 1: a slot that was never used has 0.
    fn number(&self) -> u64 {
        self.began.elapsed().as_secs() + 1
    }

    /// A hand-off from this prefill peer was answered; after so long, where that says something of it.
    pub(crate) fn record(&self, prefill: &Arc<str>, took: Option<Duration>) {
        let number = self.number();
        let mut partners = self.partners.lock();
        if !partners.contains_key(prefill) && partners.len() >= MOST_PARTNERS {
            let silent = partners.iter().min_by_key(|(_, window)| window.last());
            if let Some(silent) = silent.map(|(name, _)| Arc::clone(name)) {
                partners.remove(&silent);
            }
        }
        let window = match partners.get_mut(prefill) {
            Some(window) => window,
            None => partners.entry(Arc::clone(prefill)).or_default(),
        };
        let second = window.at(number);
        second.count += 1;
        if let Some(took) = took {
            second.timed += 1;
            second.sum += took;
            second.longest = second.longest.max(took);
        }
    }

    /// The pairs with hand-offs in the last whole seconds.
    pub(crate) fn rates(&self, decode: &Arc<str>, into: &mut Vec<PairRate>) {
        let now = self.number();
        let from = now.saturating_sub(SECONDS);
        let over = (now - from.max(1)).max(1) as f64;
        for (prefill, window) in self.partners.lock().iter() {
            let recent = window.0.iter().filter(|second| second.number != 0 && second.number >= from);
            let mut all = Second::default();
            for second in recent.filter(|second| second.number < now || now == 1) {
                all.count += second.count;
                all.timed += second.timed;
                all.sum += second.sum;
                all.longest = all.longest.max(second.longest);
            }
            if all.count == 0 {
                continue;
            }
            let millis = |time: Duration| (time.as_secs_f64() * 1e5).round() / 100.0;
            into.push(PairRate {
                prefill: Arc::clone(prefill),
                decode: Arc::clone(decode),
                rate: (f64::from(all.count) / over * 100.0).round() / 100.0,
                mean_ms: (all.timed > 0).then(|| millis(all.sum / all.timed)),
                longest_ms: (all.timed > 0).then(|| millis(all.longest)),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(traffic: &Traffic) -> Vec<PairRate> {
        let mut all = Vec::new();
        traffic.rates(&"d".into(), &mut all);
        all
    }

    #[tokio::test(start_paused = true)]
    async fn rates_are_over_the_last_seconds_and_end() {
        let traffic = Traffic::default();
        let p: Arc<str> = "p".into();
        for second in 0..10_u64 {
            for _ in 0..5 {
                traffic.record(&p, Some(Duration::from_millis(2 + second)));
            }
            traffic.record(&p, None);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let rate = rates(&traffic).remove(0);
        assert_eq!((rate.rate, rate.mean_ms, rate.longest_ms), (6.0, Some(6.5), Some(11.0)));
        assert_eq!((&*rate.prefill, &*rate.decode), ("p", "d"));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(rates(&traffic)[0].rate, 3.0);
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!(rates(&traffic), []);
        traffic.record(&p, None);
        tokio::time::advance(Duration::from_secs(1)).await;
        let rate = rates(&traffic).remove(0);
        assert_eq!((rate.rate, rate.mean_ms), (0.1, None), "answers that came whole tell no latency");
    }

    #[tokio::test(start_paused = true)]
    async fn partners_are_bounded() {
        let traffic = Traffic::default();
        let old: Arc<str> = "old".into();
        traffic.record(&old, None);
        tokio::time::advance(Duration::from_secs(1)).await;
        for number in 0..MOST_PARTNERS {
            traffic.record(&format!("p{number}").into(), None);
        }
        let partners = traffic.partners.lock();
        assert_eq!((partners.len(), partners.contains_key(&old)), (MOST_PARTNERS, false));
    }
}
