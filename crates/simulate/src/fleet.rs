//! The fleet that is simulated: groups of engines with their speeds, and the router's own settings for them.

use std::collections::BTreeMap;
use std::time::Duration;

use kvbaton_proxy::{AdmissionSettings, Disaggregation, Role, RoutingSettings};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Most engines of a fleet.
pub const LARGEST_FLEET: usize = 4096;

/// A fleet file (TOML).
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fleet {
    /// Groups of equal engines.
    pub engines: Vec<EngineGroup>,
    /// The model's name, for `[[routing.models]]` and `[[admission.models]]`.
    #[serde(default = "model")]
    pub model: String,
    /// Bytes that a token has in a request's body.
    #[serde(default = "bytes_per_token")]
    pub bytes_per_token: f64,
    /// Pause between two readings of the engines' metrics pages; zero does not read them.
    #[serde(default = "metrics_interval", with = "humantime_serde")]
    pub metrics_interval: Duration,
    /// As in the router's settings.
    #[serde(default)]
    pub routing: RoutingSettings,
    /// As in the router's settings.
    #[serde(default)]
    pub disaggregation: Disaggregation,
    /// As in the router's settings.
    #[serde(default)]
    pub admission: AdmissionSettings,
}

fn model() -> String {
    "sim".to_owned()
}

const fn bytes_per_token() -> f64 {
    4.0
}

const fn metrics_interval() -> Duration {
    Duration::from_secs(5)
}

/// Engines that are alike. The defaults are those of no certain machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineGroup {
    /// What they do.
    pub role: Role,
    /// How many there are.
    #[serde(default = "one")]
    pub count: usize,
    /// What their names begin with; the role when absent.
    #[serde(default)]
    pub name: Option<String>,
    /// Where they are.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// How fast they are.
    #[serde(flatten)]
    pub speed: EngineSettings,
}

const fn one() -> usize {
    1
}

/// How fast an engine is and how much it holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineSettings {
    /// Prompt tokens that it computes in a second.
    pub prefill_tokens_per_second: f64,
    /// What a step with prompt tokens takes beside them.
    #[serde(with = "humantime_serde")]
    pub prefill_start: Duration,
    /// What a step takes in which sequences get a token each.
    #[serde(with = "humantime_serde")]
    pub decode_step: Duration,
    /// What each of these sequences adds to the step.
    #[serde(with = "humantime_serde")]
    pub decode_sequence: Duration,
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Tokens that are computed in one step at most.
    pub max_num_batched_tokens: u32,
    /// How long the prompt tokens of one step may take; zero for no bound.
    #[serde(with = "humantime_serde")]
    pub longest_step: Duration,
    /// Tokens whose KV it holds, prefix cache and running sequences together.
    pub kv_tokens: u64,
    /// Tokens of a KV block.
    pub block_size: u32,
    /// Bytes of KV for a token, over all ranks.
    pub kv_bytes_per_token: u64,
    /// Bytes of KV that it sends or reads in a second.
    pub transfer_bytes_per_second: f64,
    /// What a transfer takes beside its bytes.
    #[serde(with = "humantime_serde")]
    pub transfer_start: Duration,
    /// What the first transfer between two engines takes more.
    #[serde(with = "humantime_serde")]
    pub handshake: Duration,
    /// How long a request, or an answer, is on its way between the router and the engine.
    #[serde(with = "humantime_serde")]
    pub network: Duration,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            prefill_tokens_per_second: 10_000.0,
            prefill_start: Duration::from_millis(5),
            decode_step: Duration::from_millis(15),
            decode_sequence: Duration::from_micros(100),
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            longest_step: Duration::ZERO,
            kv_tokens: 500_000,
            block_size: 16,
            kv_bytes_per_token: 131_072,
            transfer_bytes_per_second: 20e9,
            transfer_start: Duration::from_millis(1),
            handshake: Duration::from_millis(300),
            network: Duration::from_micros(500),
        }
    }
}

/// A fleet that cannot be used.
#[derive(Debug, Error)]
pub enum FleetError {
    /// The file cannot be read.
    #[error(transparent)]
    Toml(#[from] toml::de::Error),
    /// Settings that cannot be used, each with what it must be.
    #[error("{}", .0.join("; "))]
    Settings(Vec<String>),
}

impl Fleet {
    /// Reads a fleet file.
    ///
    /// # Errors
    /// It is no such file, or its engines cannot be; all faults are told. `[routing]`, `[disaggregation]` and
    /// `[admission]` are checked by whoever checks the router's settings.
    pub fn read(text: &str) -> Result<Self, FleetError> {
        let fleet: Self = toml::from_str(text)?;
        let faults = fleet.faults();
        if faults.is_empty() { Ok(fleet) } else { Err(FleetError::Settings(faults)) }
    }

    /// How many engines of a role there are.
    #[must_use]
    pub fn count(&self, role: Role) -> usize {
        self.engines.iter().filter(|group| group.role == role).map(|group| group.count).sum()
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.count(Role::Decode) == 0 {
            faults.push("engines: at least one has role = \"decode\"".to_owned());
        }
        if self.count(Role::Prefill) + self.count(Role::Decode) > LARGEST_FLEET {
            faults.push(format!("engines: at most {LARGEST_FLEET}"));
        }
        if !(0.25..=64.0).contains(&self.bytes_per_token) {
            faults.push("bytes_per_token: a number from 0.25 to 64".to_owned());
        }
        for (at, group) in self.engines.iter().enumerate() {
            let speed = &group.speed;
            let fits = [
                ("prefill_tokens_per_second", (1e-3..=1e12).contains(&speed.prefill_tokens_per_second)),
                ("transfer_bytes_per_second", (1.0..=1e15).contains(&speed.transfer_bytes_per_second)),
                ("decode_step", !speed.decode_step.is_zero()),
                ("max_num_seqs", speed.max_num_seqs > 0),
                ("max_num_batched_tokens", speed.max_num_batched_tokens > 0),
                ("block_size", (1..=65_536).contains(&speed.block_size)),
                ("kv_tokens", (u64::from(speed.block_size)..=1 << 40).contains(&speed.kv_tokens)),
                ("kv_bytes_per_token", speed.kv_bytes_per_token <= 1 << 40),
            ];
            let wrong = fits.iter().filter(|(_, fits)| !fits);
            faults.extend(wrong.map(|(name, _)| format!("engines[{at}].{name}: out of its range")));
            let longest = Duration::from_secs(3600);
            let durations = [
                speed.prefill_start,
                speed.decode_step,
                speed.decode_sequence,
                speed.longest_step,
                speed.transfer_start,
                speed.handshake,
                speed.network,
            ];
            if durations.iter().any(|duration| *duration > longest) {
                faults.push(format!("engines[{at}]: no duration is longer than an hour"));
            }
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_defaults_and_the_settings_are_the_routers() {
        let text = "[[engines]]\nrole = \"prefill\"\ncount = 4\nlabels = { zone = \"a\" }\n\
                    prefill_tokens_per_second = 12000.0\n[[engines]]\nrole = \"decode\"\ncount = 8\n\
                    decode_step = \"18ms\"\n[routing]\nprefill = \"prefix_affinity\"\n[disaggregation]\nmode = \"auto\"\n";
        let fleet = Fleet::read(text).unwrap();
        assert_eq!((fleet.count(Role::Prefill), fleet.count(Role::Decode)), (4, 8));
        assert_eq!(fleet.engines[0].speed.prefill_tokens_per_second, 12_000.0);
        assert_eq!(fleet.engines[1].speed.decode_step, Duration::from_millis(18));
        assert_eq!(fleet.engines[1].speed.kv_tokens, 500_000);
        assert_eq!(fleet.routing.prefill, kvbaton_proxy::Policy::PrefixAffinity);
    }

    #[test]
    fn what_cannot_be_is_all_told() {
        let text = "[[engines]]\nrole = \"prefill\"\nblock_size = 0\ndecode_step = \"0s\"\n";
        let FleetError::Settings(faults) = Fleet::read(text).unwrap_err() else { panic!() };
        assert_eq!(faults.len(), 3, "{faults:?}");
        assert!(
            Fleet::read("[[engines]]\nrole = \"decode\"\nspeed = 3\n").is_err(),
            "a name that there is not"
        );
    }
}
