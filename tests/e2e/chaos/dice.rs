//! Random choices that are the same for the same seed, whatever library is in use.

use std::time::Duration;

/// splitmix64.
pub(super) struct Dice(u64);

impl Dice {
    /// A sequence of its own for each (seed, subject).
    pub(super) fn new(seed: u64, subject: u64) -> Self {
        let mut dice = Self(seed ^ subject.wrapping_mul(0xA24B_AED4_963E_E407));
        dice.next();
        dice
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Less than the bound.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    pub(super) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// Up to so many milliseconds, short times more often than long ones.
    pub(super) fn moment(&mut self, millis: usize) -> Duration {
        let unit = self.below(1_000_000) as f64 / 1e6;
        Duration::from_secs_f64(unit * unit * millis as f64 / 1e3)
    }
}
