//! The time and the chance of choices: the host's, or those of a simulation, which are told and repeat.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Where a choice's time and chance come from.
#[derive(Debug, Default)]
pub(crate) struct Surroundings(Option<Simulated>);

#[derive(Debug)]
struct Simulated {
    began: Instant,
    nanoseconds: AtomicU64,
    dice: AtomicU64,
}

impl Surroundings {
    /// A time that begins now and goes on when it is told; a chance that repeats with the seed.
    pub(crate) fn simulated(seed: u64) -> Self {
        let (nanoseconds, dice) = (AtomicU64::new(0), AtomicU64::new(seed));
        Self(Some(Simulated { began: Instant::now(), nanoseconds, dice }))
    }

    pub(crate) fn now(&self) -> Instant {
        match &self.0 {
            None => Instant::now(),
            Some(told) => told.began + Duration::from_nanos(told.nanoseconds.load(Ordering::Relaxed)),
        }
    }

    /// Any number below `count`, which is not zero.
    pub(crate) fn below(&self, count: usize) -> usize {
        match &self.0 {
            None => rand::random_range(0..count),
            Some(told) => {
                let step = 0x9E37_79B9_7F4A_7C15;
                let drawn = mixed(told.dice.fetch_add(step, Ordering::Relaxed).wrapping_add(step));
                ((u128::from(drawn) * count as u128) >> 64) as usize
            }
        }
    }

    /// From now on it is so long after the beginning of a simulation.
    pub(crate) fn tell(&self, since_began: Duration) {
        if let Some(told) = &self.0 {
            let nanoseconds = u64::try_from(since_began.as_nanos()).unwrap_or(u64::MAX);
            told.nanoseconds.store(nanoseconds, Ordering::Relaxed);
        }
    }
}

/// The finalizer of splitmix64.
const fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulation_repeats_and_its_time_is_told() {
        let draws = |seed| {
            let around = Surroundings::simulated(seed);
            (0..64).map(|_| around.below(10)).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
        assert!((0..10).all(|number| draws(3).contains(&number)));
        let around = Surroundings::simulated(1);
        let before = around.now();
        assert_eq!(around.now(), before);
        around.tell(Duration::from_secs(5));
        assert_eq!(around.now() - before, Duration::from_secs(5));
    }
}
