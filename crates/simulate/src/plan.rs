//! What is compared: the policies of both stages and whether requests are split, each a run of its own over the same
//! trace.

use kvbaton_proxy::{Disaggregation, DisaggregationMode, Policy, RoutingSettings};
use serde::Deserialize;
use serde::de::value::{Error, StrDeserializer};
use thiserror::Error;

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Its name in the table.
    pub name: String,
    /// How pairs are chosen.
    pub routing: RoutingSettings,
    /// Whether requests are split.
    pub disaggregation: Disaggregation,
}

/// A policy or mode that there is not.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{text:?} is neither a policy, nor two with a + between them, for prefill and for decode")]
pub struct NotAPlan {
    /// What was given.
    pub text: String,
}

impl Plan {
    /// The runs for these policies and modes, each with each; as the settings say where none is given.
    ///
    /// # Errors
    /// There is no such policy.
    pub fn all(
        routing: &RoutingSettings,
        disaggregation: &Disaggregation,
        policies: &[String],
        modes: &[DisaggregationMode],
    ) -> Result<Vec<Self>, NotAPlan> {
        let mut of_policies = Vec::new();
        for text in policies {
            let of_stages = text.split_once('+').unwrap_or((text, text));
            let not = || NotAPlan { text: text.clone() };
            let (Some(prefill), Some(decode)) = (policy(of_stages.0), policy(of_stages.1)) else {
                return Err(not());
            };
            let routing = RoutingSettings { prefill, decode, models: Vec::new(), ..routing.clone() };
            of_policies.push((text.clone(), routing));
        }
        if of_policies.is_empty() {
            let [prefill, decode] = [routing.prefill, routing.decode].map(Policy::label);
            let name = if prefill == decode { prefill.to_owned() } else { format!("{prefill}+{decode}") };
            of_policies.push((name, routing.clone()));
        }
        let given = [disaggregation.mode];
        let modes = if modes.is_empty() { &given[..] } else { modes };
        let plan = |policy: &(String, RoutingSettings), mode: DisaggregationMode| Self {
            name: match (of_policies.len(), modes.len()) {
                (_, 1) => policy.0.clone(),
                (1, _) => label(mode).to_owned(),
                _ => format!("{}, {}", policy.0, label(mode)),
            },
            routing: policy.1.clone(),
            disaggregation: Disaggregation { mode, ..disaggregation.clone() },
        };
        Ok(of_policies.iter().flat_map(|policy| modes.iter().map(move |mode| plan(policy, *mode))).collect())
    }
}

fn policy(name: &str) -> Option<Policy> {
    Policy::deserialize(StrDeserializer::<Error>::new(name.trim())).ok()
}

const fn label(mode: DisaggregationMode) -> &'static str {
    match mode {
        DisaggregationMode::Always => "always",
        DisaggregationMode::Auto => "auto",
        DisaggregationMode::Never => "never",
    }
}

/// A number for a text, the same in each run (FNV-1a).
pub(crate) fn spread(text: &[u8]) -> u64 {
    text.iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(policies: &[&str], modes: &[DisaggregationMode]) -> Result<Vec<String>, NotAPlan> {
        let policies: Vec<String> = policies.iter().map(|policy| (*policy).to_owned()).collect();
        let plans = Plan::all(&RoutingSettings::default(), &Disaggregation::default(), &policies, modes)?;
        Ok(plans.into_iter().map(|plan| plan.name).collect())
    }

    #[test]
    fn each_policy_runs_in_each_mode() {
        use DisaggregationMode::{Always, Auto};
        assert_eq!(names(&[], &[]).unwrap(), ["joint"]);
        assert_eq!(names(&["random", "kv_events+joint"], &[Auto]).unwrap(), ["random", "kv_events+joint"]);
        assert_eq!(names(&[], &[Always, Auto]).unwrap(), ["always", "auto"]);
        let both = names(&["random", "joint"], &[Always, Auto]).unwrap();
        assert_eq!(both, ["random, always", "random, auto", "joint, always", "joint, auto"]);
        assert_eq!(names(&["best"], &[]), Err(NotAPlan { text: "best".to_owned() }));
    }

    #[test]
    fn two_policies_are_of_prefill_and_of_decode() {
        let plans = Plan::all(
            &RoutingSettings::default(),
            &Disaggregation::default(),
            &["session+power_of_two".to_owned()],
            &[],
        );
        let routing = &plans.unwrap()[0].routing;
        assert_eq!((routing.prefill, routing.decode), (Policy::Session, Policy::PowerOfTwo));
    }
}
