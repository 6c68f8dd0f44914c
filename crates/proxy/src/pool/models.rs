//! Which models the fleet serves, in the engines' own words.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;

use super::Pool;
use crate::client::ModelScope;
use crate::json::members;
use crate::models::ModelTable;
use crate::request::quoted;
use crate::splice::Splicer;

/// OpenAI's model list over the whole fleet.
#[derive(Clone, Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<Box<RawValue>>,
    #[serde(skip)]
    ids: Vec<String>,
}

impl ModelList {
    /// With the names of the settings, each with the entry of the first of its models that is in the list.
    pub(crate) fn with(mut self, models: &ModelTable) -> Self {
        let names =
            models.all().filter(|(name, _)| self.entry(name).is_none()).filter_map(|(name, entry)| {
                let of_target = entry.models().find_map(|model| self.entry(model))?;
                Some((name.to_string(), renamed(of_target, name)?))
            });
        let mut entries: Vec<(String, Box<RawValue>)> = names.collect();
        entries.extend(self.ids.into_iter().zip(self.data));
        entries.sort_by(|one, other| one.0.cmp(&other.0));
        (self.ids, self.data) = entries.into_iter().unzip();
        self
    }

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

/// An entry with another id.
fn renamed(entry: &RawValue, id: &str) -> Option<Box<RawValue>> {
    let entry = Bytes::copy_from_slice(entry.get().as_bytes());
    let mut splicer = Splicer::new(&entry);
    for member in members(&entry).ok()? {
        let member = member.ok()?;
        if member.key_is("id") {
            splicer.replace(member.value(), &quoted(id));
        }
    }
    let renamed = splicer.finish().into_bytes();
    RawValue::from_string(String::from_utf8(renamed.to_vec()).ok()?).ok()
}

impl Pool {
    /// The union of the ready peers' model lists, each entry as the first peer gave it.
    pub(crate) fn models(&self) -> ModelList {
        let mut entries: BTreeMap<String, Box<RawValue>> = BTreeMap::new();
        for peer in self.snapshot.load().all().filter(|peer| peer.is_ready()) {
            let observed = peer.observed.now();
            for served in observed.models.iter().filter(|served| peer.may_have(Some(&served.id))) {
                entries.entry(served.id.clone()).or_insert_with(|| served.entry.clone());
            }
        }
        let (ids, data) = entries.into_iter().unzip();
        ModelList { object: "list", data, ids }
    }
}
