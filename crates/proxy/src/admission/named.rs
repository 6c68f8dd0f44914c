//! The scopes of models and API keys. A name keeps its scope over reloads, so that what runs and waits under
//! it stays counted; one that has no limits any more keeps it too, unbounded.

use std::collections::HashMap;

use super::queue::{NONE, ScopeId};
use super::settings::{AdmissionSettings, Bounds, NamedLimits};

/// Scopes by name.
#[derive(Clone, Debug, Default)]
pub(super) struct Named {
    models: HashMap<String, Scope>,
    keys: HashMap<String, Scope>,
}

#[derive(Clone, Copy, Debug)]
struct Scope {
    id: ScopeId,
    limited: bool,
}

impl Named {
    /// The scopes under other settings, and the bounds of all scopes by their ids, the stages' first.
    pub(super) fn with(&self, settings: &AdmissionSettings) -> (Self, Vec<Bounds>) {
        let mut named = self.clone();
        let known = named.models.len() + named.keys.len();
        let mut bounds = vec![Bounds::default(); 2 + known];
        bounds[0] = Bounds::from(&settings.prefill);
        bounds[1] = Bounds::from(&settings.decode);
        for (scopes, all) in [(&mut named.models, &settings.models), (&mut named.keys, &settings.keys)] {
            scopes.values_mut().for_each(|scope| scope.limited = false);
            for limits in all {
                limit(scopes, limits, &mut bounds);
            }
        }
        (named, bounds)
    }

    /// The scope of a model that has limits.
    pub(super) fn model(&self, name: &str) -> Option<ScopeId> {
        limited(&self.models, name)
    }

    /// The scope of an API key that has limits.
    pub(super) fn key(&self, name: &str) -> Option<ScopeId> {
        limited(&self.keys, name)
    }

    pub(super) fn is_model(&self, id: ScopeId) -> bool {
        self.models.values().any(|scope| scope.id == id)
    }
}

fn limited(scopes: &HashMap<String, Scope>, name: &str) -> Option<ScopeId> {
    scopes.get(name).filter(|scope| scope.limited).map(|scope| scope.id)
}

fn limit(scopes: &mut HashMap<String, Scope>, limits: &NamedLimits, bounds: &mut Vec<Bounds>) {
    if let Some(scope) = scopes.get_mut(&limits.name) {
        scope.limited = true;
        bounds[usize::from(scope.id)] = Bounds::from(limits);
    } else if let Ok(id) = ScopeId::try_from(bounds.len())
        && id != NONE
    {
        scopes.insert(limits.name.clone(), Scope { id, limited: true });
        bounds.push(Bounds::from(limits));
    }
}
