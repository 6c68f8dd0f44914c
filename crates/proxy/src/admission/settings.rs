//! How many requests may run, wait and come; zero means no bound everywhere.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Limits on requests, before any engine has work with them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionSettings {
    /// Requests whose prompt a prefill engine is computing.
    pub prefill: StageLimits,
    /// Requests that a decode engine serves, from before their prefill until their answer is out.
    pub decode: StageLimits,
    /// Requests for single models.
    pub models: Vec<NamedLimits>,
    /// Requests with single API keys.
    pub keys: Vec<NamedLimits>,
    /// Requests that may wait, over all.
    pub waiting: usize,
    /// How long one may wait; zero lets none wait.
    #[serde(with = "humantime_serde")]
    pub longest_wait: Duration,
    /// Whether clients say how urgent their requests are.
    pub client_priority: bool,
    /// The most tokens that a request may ask for.
    pub max_tokens: u64,
    /// The most bytes that a request's prompt, messages and tools may have.
    pub prompt_bytes: usize,
}

impl Default for AdmissionSettings {
    fn default() -> Self {
        Self {
            prefill: StageLimits::default(),
            decode: StageLimits::default(),
            models: Vec::new(),
            keys: Vec::new(),
            waiting: 1000,
            longest_wait: Duration::from_secs(10),
            client_priority: true,
            max_tokens: 0,
            prompt_bytes: 0,
        }
    }
}

/// Limits of one stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StageLimits {
    /// Requests at a time.
    pub requests: usize,
    /// Requests at a time for each engine that is open to new ones; the lower of both counts.
    pub per_engine: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Prompt tokens that wait, taken as a quarter of the prompts' bytes.
    pub waiting_tokens: u64,
    /// Requests a second.
    pub rate: f64,
    /// How many may come at once for all that; zero for one second's.
    pub burst: u32,
}

impl StageLimits {
    /// How many may run on so many engines; none for no bound. None at all that is open is another matter
    /// than too many requests.
    pub(crate) fn places(&self, engines: usize) -> Option<usize> {
        let of_engines = self.per_engine.saturating_mul(engines.max(1));
        match (self.requests, of_engines) {
            (0, 0) => None,
            (places, 0) | (0, places) => Some(places),
            (requests, of_engines) => Some(requests.min(of_engines)),
        }
    }
}

/// Limits of one model or API key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NamedLimits {
    /// The model, or the name of the key.
    pub name: String,
    /// Requests at a time.
    pub requests: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Prompt tokens that wait, taken as a quarter of the prompts' bytes.
    pub waiting_tokens: u64,
    /// Requests a second.
    pub rate: f64,
    /// How many may come at once for all that; zero for one second's.
    pub burst: u32,
}

/// What one scope may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Bounds {
    pub(crate) requests: usize,
    pub(crate) waiting: usize,
    pub(crate) waiting_tokens: u64,
    pub(crate) rate: f64,
    pub(crate) burst: u32,
}

impl Bounds {
    /// How many may run.
    pub(crate) const fn places(&self) -> usize {
        if self.requests == 0 { usize::MAX } else { self.requests }
    }
}

impl From<&StageLimits> for Bounds {
    fn from(limits: &StageLimits) -> Self {
        let StageLimits { requests, waiting, waiting_tokens, rate, burst, per_engine: _ } = *limits;
        Self { requests, waiting, waiting_tokens, rate, burst }
    }
}

impl From<&NamedLimits> for Bounds {
    fn from(limits: &NamedLimits) -> Self {
        let NamedLimits { requests, waiting, waiting_tokens, rate, burst, name: _ } = *limits;
        Self { requests, waiting, waiting_tokens, rate, burst }
    }
}
