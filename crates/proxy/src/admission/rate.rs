//! How often requests come and how long they take. Pure: time is passed in.

use std::time::Duration;

use tokio::time::Instant;

/// How much the newest observation counts.
const NEWEST: f64 = 0.2;

/// A token bucket.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    rate: f64,
    burst: f64,
    level: f64,
    since: Instant,
}

impl Bucket {
    /// None for a rate of zero, which is no bound.
    pub(crate) fn new(rate: f64, burst: u32, now: Instant) -> Option<Self> {
        let burst = if burst == 0 { rate.max(1.0) } else { f64::from(burst) };
        (rate > 0.0).then_some(Self { rate, burst, level: burst, since: now })
    }

    /// How long until one more may come; zero for now.
    pub(crate) fn wait(&mut self, now: Instant) -> Duration {
        let earned = now.saturating_duration_since(self.since).as_secs_f64() * self.rate;
        self.level = (self.level + earned).min(self.burst);
        self.since = now;
        if self.level >= 1.0 {
            Duration::ZERO
        } else {
            Duration::from_secs_f64((1.0 - self.level) / self.rate)
        }
    }

    /// How many have come that are still counted.
    pub(crate) fn spent(&mut self, now: Instant) -> f64 {
        let _ = self.wait(now);
        self.burst - self.level
    }

    /// So many have come under another rate; as far as this one can count them.
    pub(crate) fn spend(&mut self, spent: f64) {
        self.level = (self.level - spent).max(0.0);
    }

    /// One came.
    pub(crate) fn take(&mut self) {
        self.level -= 1.0;
    }
}

/// How long requests hold their places.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Service {
    mean: Option<f64>,
}

impl Service {
    pub(crate) fn took(&mut self, held: Duration) {
        let held = held.as_secs_f64();
        self.mean = Some(self.mean.map_or(held, |mean| mean + NEWEST * (held - mean)));
    }

    /// When the last of so many that wait gets one of so many places; none without experience.
    pub(crate) fn turn_of(&self, waiting: usize, places: usize) -> Option<Duration> {
        let mean = self.mean?;
        Some(Duration::from_secs_f64(mean * waiting as f64 / places.max(1) as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_says_when_the_next_may_come() {
        let now = Instant::now();
        let mut bucket = Bucket::new(2.0, 3, now).unwrap();
        for _ in 0..3 {
            assert_eq!(bucket.wait(now), Duration::ZERO);
            bucket.take();
        }
        assert_eq!(bucket.wait(now), Duration::from_millis(500));
        assert_eq!(bucket.wait(now + Duration::from_millis(400)), Duration::from_millis(100));
        assert_eq!(bucket.wait(now + Duration::from_millis(500)), Duration::ZERO);
        assert!(Bucket::new(0.0, 3, now).is_none());
    }

    #[test]
    fn a_turn_comes_as_fast_as_places_get_free() {
        let mut service = Service::default();
        assert_eq!(service.turn_of(5, 1), None);
        service.took(Duration::from_secs(4));
        assert_eq!(service.turn_of(5, 2), Some(Duration::from_secs(10)));
        for _ in 0..100 {
            service.took(Duration::from_secs(1));
        }
        assert!(service.turn_of(10, 1).unwrap() < Duration::from_millis(10_100));
    }
}
