//! The settings of models, and what in them cannot be used.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// Most models that one name may stand for.
const MOST_TARGETS: usize = 16;

/// The largest weight.
const HEAVIEST: u32 = 1000;

/// Most engines that either side of a ratio may name.
const MOST_ENGINES: u32 = 1000;

/// Which name of a model an answer shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerName {
    /// The one that the request names.
    #[default]
    Asked,
    /// The engine's own.
    Served,
}

/// One of the models that a name stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelTarget {
    /// The model, as engines list it.
    pub model: String,
    /// Its part of the requests, in relation to the others' weights; zero for none.
    #[serde(default = "one")]
    pub weight: u32,
}

const fn one() -> u32 {
    1
}

/// How many prefill engines stand for how many decode engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PdRatio {
    /// Prefill engines.
    pub prefill: u32,
    /// Decode engines.
    pub decode: u32,
}

/// What one name, and others for it, stand for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSettings {
    /// The name that requests use.
    pub name: String,
    /// Other names that requests may use.
    pub aliases: Vec<String>,
    /// The models that serve it; without any, the engines' model of that very name does.
    pub targets: Vec<ModelTarget>,
    /// Whether it serves requests that name no model.
    pub default: bool,
    /// Which name of the model answers show.
    pub answer: AnswerName,
    /// How many of the engines that list its models take their requests, as prefill engines in relation to
    /// decode engines; all when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pd_ratio: Option<PdRatio>,
}

impl ModelSettings {
    /// The models that it may become, each with its weight.
    pub(crate) fn served(&self) -> Vec<(&str, u32)> {
        if self.targets.is_empty() {
            return vec![(&self.name, 1)];
        }
        self.targets.iter().map(|target| (target.model.as_str(), target.weight)).collect()
    }

    /// All its names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.name).chain(&self.aliases).map(String::as_str)
    }

    /// What in a list of them cannot be used: its place in the list, what, and how it should be.
    #[must_use]
    pub fn faults(all: &[Self]) -> Vec<(usize, &'static str, &'static str)> {
        let (mut names, mut ratios) = (BTreeSet::new(), BTreeSet::new());
        let mut defaults = 0;
        let mut faults = Vec::new();
        for (at, entry) in all.iter().enumerate() {
            let mut wrong = |what, hint| faults.push((at, what, hint));
            // No early end: each name is to be remembered.
            if entry.names().filter(|name| name.is_empty() || !names.insert(*name)).count() > 0 {
                wrong(
                    "has a name that is empty or stands twice",
                    "each name and alias once in all [[models]]",
                );
            }
            let mut models = BTreeSet::new();
            if entry.targets.len() > MOST_TARGETS
                || !entry
                    .targets
                    .iter()
                    .all(|target| !target.model.is_empty() && models.insert(&target.model))
            {
                wrong("has targets without a model of their own, or too many", "at most 16, each once");
            }
            let weights = || entry.served().into_iter().map(|(_, weight)| weight);
            if weights().any(|weight| weight > HEAVIEST) || weights().all(|weight| weight == 0) {
                wrong("has weights that cannot be used", "whole numbers up to 1000, not all of them 0");
            }
            defaults += usize::from(entry.default);
            if entry.default && defaults > 1 {
                wrong("is a second default", "one of [[models]] at most has default = true");
            }
            let Some(ratio) = entry.pd_ratio else { continue };
            if [ratio.prefill, ratio.decode].iter().any(|side| !(1..=MOST_ENGINES).contains(side)) {
                wrong("has a pd_ratio that cannot be used", "such as { prefill = 1, decode = 3 }");
            }
            if entry.served().into_iter().filter(|(model, _)| !ratios.insert(*model)).count() > 0 {
                wrong(
                    "has a pd_ratio for a model that has one",
                    "one pd_ratio for each model of the engines",
                );
            }
        }
        faults
    }
}
