//! The settings of models, made ready for requests: what a name stands for this time.

use std::collections::HashMap;
use std::sync::Arc;

use super::settings::{AnswerName, ModelSettings};
use super::turns::Turns;

/// What keeps a client's requests together.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Key<'a> {
    /// The value of the session header.
    Session(&'a [u8]),
    /// The request's `user`, as it stands in the body.
    User(&'a [u8]),
}

/// One entry of the settings.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) answer: AnswerName,
    targets: Vec<(Arc<str>, u32)>,
    turns: Turns,
}

impl Entry {
    /// The models, the one first that shall serve a request of this key.
    pub(crate) fn choose(&self, key: Option<Key<'_>>) -> impl Iterator<Item = &Arc<str>> {
        let first = match key {
            Some(Key::Session(value) | Key::User(value)) => self.of_key(value),
            None => self.turns.take(),
        };
        let first = first.min(self.targets.len() - 1);
        let (before, after) = self.targets.split_at(first);
        let others = before.iter().chain(&after[1..]).filter(|(_, weight)| *weight > 0);
        std::iter::once(&after[0]).chain(others).map(|(model, _)| model)
    }

    /// Every model that has any part of the requests, the first of the settings first.
    pub(crate) fn models(&self) -> impl Iterator<Item = &Arc<str>> {
        self.targets.iter().filter(|(_, weight)| *weight > 0).map(|(model, _)| model)
    }

    /// A key's place on a line on which each target has a stretch as long as its share: where shares change, only
    /// those move whose stretch does.
    fn of_key(&self, key: &[u8]) -> usize {
        let total: u128 = self.targets.iter().map(|(_, weight)| u128::from(*weight)).sum();
        let point = (u128::from(hash(key)) * total) >> 64;
        let mut end = 0;
        let ends = |(_, weight): &(Arc<str>, u32)| {
            end += u128::from(*weight);
            point < end
        };
        self.targets.iter().position(ends).unwrap_or(0)
    }
}

/// The same on every router and in every version of it.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let mut mixed = bytes.iter().fold(0xcbf2_9ce4_8422_2325, fnv);
    // Keys that differ in their last characters only would lie close together.
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    mixed ^ (mixed >> 33)
}

/// All entries by each of their names.
#[derive(Debug, Default)]
pub(crate) struct ModelTable {
    entries: Vec<Arc<Entry>>,
    names: HashMap<Arc<str>, usize>,
    in_order: Vec<Arc<str>>,
    default: Option<Arc<str>>,
}

impl ModelTable {
    pub(crate) fn of(settings: &[ModelSettings]) -> Self {
        let mut table = Self::default();
        for (at, entry) in settings.iter().enumerate() {
            let targets: Vec<(Arc<str>, u32)> =
                entry.served().into_iter().map(|(model, weight)| (Arc::from(model), weight)).collect();
            let weights: Vec<u32> = targets.iter().map(|(_, weight)| *weight).collect();
            let turns = Turns::of(&weights);
            table.entries.push(Arc::new(Entry { answer: entry.answer, targets, turns }));
            for name in entry.names().map(Arc::<str>::from) {
                table.in_order.push(Arc::clone(&name));
                table.names.insert(name, at);
            }
            if entry.default {
                table.default = Some(entry.name.as_str().into());
            }
        }
        table
    }

    /// Whether nothing is said of any model.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The name that a request is taken to use that uses none.
    pub(crate) fn default_name(&self) -> Option<&Arc<str>> {
        self.default.as_ref()
    }

    /// What a name stands for, with the name as the settings have it.
    pub(crate) fn entry(&self, name: &str) -> Option<(&Arc<str>, &Arc<Entry>)> {
        let (name, at) = self.names.get_key_value(name)?;
        Some((name, self.entries.get(*at)?))
    }

    /// Every name in the order of the settings, with what it stands for.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<Entry>)> {
        self.in_order.iter().filter_map(|name| self.entry(name))
    }
}
