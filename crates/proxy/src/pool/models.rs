//! Which models the fleet serves, in the engines' own words.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::value::RawValue;

use super::Pool;
use crate::client::ModelScope;

/// OpenAI's model list over the whole fleet.
#[derive(Clone, Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<Box<RawValue>>,
    #[serde(skip)]
    ids: Vec<String>,
}

impl ModelList {
    /// Those that are in a scope.
    #[must_use]
    pub fn only(self, scope: &ModelScope) -> Self {
        let entries = self.ids.into_iter().zip(self.data).filter(|(id, _)| scope.allows(id));
        let (ids, data) = entries.unzip();
        Self { object: self.object, data, ids }
    }

    /// The models' ids in order.
    #[must_use]
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// The entry of one model, as its peer gave it.
    #[must_use]
    pub fn entry(&self, id: &str) -> Option<&RawValue> {
        let position = self.ids.iter().position(|known| known == id)?;
        self.data.get(position).map(AsRef::as_ref)
    }
}

impl Pool {
    /// The union of the ready peers' model lists, each entry as the first peer gave it.
    pub(crate) fn models(&self) -> ModelList {
        let mut entries: BTreeMap<String, Box<RawValue>> = BTreeMap::new();
        for peer in self.snapshot.load().all().filter(|peer| peer.is_ready()) {
            let observed = peer.observed.read();
            for served in observed.models.iter().filter(|served| peer.may_have(Some(&served.id))) {
                entries.entry(served.id.clone()).or_insert_with(|| served.entry.clone());
            }
        }
        let (ids, data) = entries.into_iter().unzip();
        ModelList { object: "list", data, ids }
    }
}
