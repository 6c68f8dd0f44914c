//! How the pair for a request is chosen: policies, what counts how much, and whether a request is split at all.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::prefix::PrefixSettings;
use super::score::Weights;

/// How a peer of one stage is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// With its partner, by the expected cost of both, for which counts who has probably cached the prompt's
    /// beginning; whoever has least to do where nothing else is known.
    #[default]
    Joint,
    /// One after the other.
    RoundRobin,
    /// Any.
    Random,
    /// Of any two the one that has less to do.
    PowerOfTwo,
    /// Who has least to do.
    LeastLoaded,
    /// Who has probably cached the prompt's beginning, unless others would be done sooner.
    PrefixAffinity,
    /// The same by what engines' own KV events tell of their caches; where none does, by what was routed.
    KvEvents,
    /// Always the same one for a value of the session header, unless it has far more to do than others.
    Session,
    /// Always the same one for a prompt's beginning, unless it has far more to do than others.
    ConsistentHash,
}

impl Policy {
    /// Whether it goes by who has probably cached a prompt's beginning.
    #[must_use]
    pub const fn goes_by_cache(self) -> bool {
        matches!(self, Self::Joint | Self::PrefixAffinity | Self::KvEvents)
    }

    /// Its name in settings and headers.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Joint => "joint",
            Self::RoundRobin => "round_robin",
            Self::Random => "random",
            Self::PowerOfTwo => "power_of_two",
            Self::LeastLoaded => "least_loaded",
            Self::PrefixAffinity => "prefix_affinity",
            Self::KvEvents => "kv_events",
            Self::Session => "session",
            Self::ConsistentHash => "consistent_hash",
        }
    }
}

/// The policies for requests of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelPolicies {
    /// The model's name, as requests name it.
    pub model: String,
    /// How its prefill engine is chosen.
    pub prefill: Policy,
    /// How its decode engine is chosen.
    pub decode: Policy,
}

/// What it costs that two peers differ in a label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LabelCost {
    /// The label's name.
    pub label: String,
    /// How much longer a hand-off is taken to last where both have the label and its values differ.
    #[serde(with = "humantime_serde")]
    pub cost: Duration,
}

/// How the pair for a request is chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RoutingSettings {
    /// How the prefill engine is chosen.
    pub prefill: Policy,
    /// How the decode engine is chosen.
    pub decode: Policy,
    /// Policies of single models.
    pub models: Vec<ModelPolicies>,
    /// Name of the header whose value the policy `session` goes by.
    pub session_header: String,
    /// How much more than its fair share a peer may have before `session` and `consistent_hash` pass it over.
    pub load_factor: f64,
    /// What it costs that two peers differ in a label.
    pub locality: Vec<LabelCost>,
    /// Whether clients may ask with `x-kvbaton-explain: 1` which peers were chosen, by their ids, and why.
    pub explain_header: bool,
    /// Prompt tokens a second of an engine of which no rate is learnt yet.
    pub prompt_tokens_per_second: f64,
    /// Bytes of KV a second between two engines of which no rate is learnt yet.
    pub bytes_per_second: f64,
    /// How much slower each sequence that a decode engine runs makes the next.
    #[serde(with = "humantime_serde")]
    pub sequence_cost: Duration,
    /// What each request costs that waits inside a decode engine.
    #[serde(with = "humantime_serde")]
    pub waiting_cost: Duration,
    /// What it costs that all KV blocks of a decode engine are in use; nothing below 70 percent.
    #[serde(with = "humantime_serde")]
    pub kv_full_cost: Duration,
    /// After how long a reading of an engine's metrics page counts half.
    #[serde(with = "humantime_serde")]
    pub reading_half_life: Duration,
    /// How prompts are remembered for `prefix_affinity`.
    pub prefix: PrefixSettings,
}

impl Default for RoutingSettings {
    fn default() -> Self {
        Self {
            prefill: Policy::Joint,
            decode: Policy::Joint,
            models: Vec::new(),
            session_header: "x-session-id".to_owned(),
            load_factor: 1.25,
            locality: Vec::new(),
            explain_header: false,
            prompt_tokens_per_second: 8000.0,
            bytes_per_second: 10e9,
            sequence_cost: Duration::from_millis(2),
            waiting_cost: Duration::from_millis(50),
            kv_full_cost: Duration::from_secs(1),
            reading_half_life: Duration::from_secs(10),
            prefix: PrefixSettings::default(),
        }
    }
}

impl RoutingSettings {
    /// The policies for a model: of the prefill and of the decode engine.
    #[must_use]
    pub fn policies(&self, model: Option<&str>) -> [Policy; 2] {
        let of_model = model.and_then(|model| self.models.iter().find(|entry| entry.model == model));
        of_model.map_or([self.prefill, self.decode], |entry| [entry.prefill, entry.decode])
    }

    pub(crate) fn weights(&self) -> Weights {
        Weights {
            prompt_token: 1.0 / self.prompt_tokens_per_second,
            byte: 1.0 / self.bytes_per_second,
            sequence: self.sequence_cost.as_secs_f64(),
            waiting: self.waiting_cost.as_secs_f64(),
            kv_full: self.kv_full_cost.as_secs_f64(),
        }
    }
}

/// Whether requests are split over two engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DisaggregationMode {
    /// All that can be.
    #[default]
    Always,
    /// Those for which it is expected to pay.
    Auto,
    /// None: decode engines compute prompts themselves.
    Never,
}

/// Whether a request is split over two engines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Disaggregation {
    /// Which requests are.
    pub mode: DisaggregationMode,
    /// With `auto`, prompts of fewer tokens that are not cached stay with the decode engine whatever is expected.
    pub min_uncached_tokens: u64,
    /// With `auto`, how fast decode engines compute prompts, in relation to prefill engines.
    pub decode_speed: f64,
    /// With `auto`, the part of a prompt's time on a decode engine that each sequence is taken to lose that runs
    /// there.
    pub interference: f64,
}

impl Default for Disaggregation {
    fn default() -> Self {
        Self {
            mode: DisaggregationMode::Always,
            min_uncached_tokens: 256,
            decode_speed: 1.0,
            interference: 1.0,
        }
    }
}
