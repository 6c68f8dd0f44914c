//! Clocks of engines that the router asks by itself: one exchange bounds the offset from both sides.

use std::time::Duration;

use super::Registry;

impl Registry {
    /// Longest time after which a silent engine may leave.
    pub(crate) fn longest_ttl(&self) -> Duration {
        self.shared.limits.most_ttl
    }

    /// The router's clock in seconds, for [`Self::clock_sampled`].
    pub(crate) fn moment(&self) -> f64 {
        self.now()
    }

    /// Takes a clock that an engine told in an answer, with the router's clock when it was asked and
    /// when the answer had come.
    pub(crate) fn clock_sampled(&self, engine_id: &str, told: f64, asked: f64, answered: f64) {
        if let Some(engine) = self.engine(engine_id)
            && told.is_finite()
        {
            engine.pulse.lock().clock.sampled(told, asked, answered);
        }
    }
}
