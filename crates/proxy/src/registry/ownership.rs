//! Whose an engine is: the credential that registers it first is the only one that may change it
//! or take its address, until it has left. Operators may change everything and own what they add.

use std::sync::Arc;

use super::change::RegistryChange;
use super::error::RegistryError;
use super::record::EngineRecord;
use super::state::State;
use super::{Missing, Registry};
use crate::client::ModelScope;

/// On whose behalf the registry is written and read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Writer {
    /// The router itself, or a client on this host where no credentials are configured.
    #[default]
    Trusted,
    /// The router, of what an engine that cannot register says of itself: no owner's engine is touched.
    Observer,
    /// An operator, by the name of the credential.
    Operator(Arc<str>),
    /// An engine.
    Engine {
        /// The name of its credential.
        credential: Arc<str>,
        /// The models whose engines it may register and see.
        models: ModelScope,
    },
}

impl Writer {
    /// Whether an engine may be changed.
    ///
    /// # Errors
    /// It is another's, or of a model that is not the writer's.
    pub(crate) fn may_change(&self, engine: &EngineRecord) -> Result<(), RegistryError> {
        let (credential, models) = match self {
            Self::Trusted | Self::Operator(_) => return Ok(()),
            Self::Observer => (None, &ModelScope::All),
            Self::Engine { credential, models } => (Some(credential), models),
        };
        if engine.owner.is_some() && engine.owner.as_ref() != credential {
            return Err(RegistryError::NotOwner { engine_id: engine.engine_id.clone() });
        }
        match &engine.model {
            Some(model) if !models.allows(model) => {
                Err(RegistryError::ModelNotAllowed { model: model.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Makes a record the writer's, unless it or whoever is at its address is another's.
    ///
    /// # Errors
    /// It is; nothing has changed then.
    pub(super) fn claim(&self, record: &mut EngineRecord, state: &State) -> Result<(), RegistryError> {
        let known = state.engines.get(&record.engine_id);
        // Those of other data-parallel ranks too: they are one peer, and decide about it together.
        let there = record.base_url.as_deref().into_iter().flat_map(|base_url| state.at(base_url));
        for engine in known.into_iter().chain(there) {
            self.may_change(engine)?;
        }
        record.owner = known.and_then(|known| known.owner.clone());
        record.bound = match self {
            Self::Engine { models, .. } => models.clone(),
            Self::Trusted | Self::Observer | Self::Operator(_) => {
                known.map(|known| known.bound.clone()).unwrap_or_default()
            }
        };
        self.may_change(record)?;
        if record.owner.is_none() {
            record.owner = match self {
                Self::Trusted | Self::Observer => None,
                Self::Operator(credential) | Self::Engine { credential, .. } => Some(Arc::clone(credential)),
            };
        }
        Ok(())
    }

    /// Whether an engine is shown to the reader: one of its models, or its own.
    #[must_use]
    pub fn sees_engine(&self, engine: &EngineRecord) -> bool {
        self.sees(engine.model.as_deref(), engine.owner.as_ref())
    }

    /// How a change looks to the reader.
    #[must_use]
    pub fn sees_change(&self, change: &RegistryChange) -> Sight {
        if self.sees(change.engine.about.model.as_deref(), change.owner.as_ref()) {
            return Sight::Shown;
        }
        let saw_before = change.model_before.as_deref().is_some_and(|model| self.sees(Some(model), None));
        if saw_before { Sight::Lost } else { Sight::Hidden }
    }

    fn sees(&self, model: Option<&str>, owner: Option<&Arc<str>>) -> bool {
        match self {
            Self::Trusted | Self::Observer | Self::Operator(_) => true,
            Self::Engine { credential, models } => owner == Some(credential) || models.covers(model),
        }
    }
}

/// How a change looks to somebody who does not see everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// As it is.
    Shown,
    /// Not at all.
    Hidden,
    /// An engine that was seen is not seen any more.
    Lost,
}

impl Registry {
    /// Whether an engine may be known to somebody.
    ///
    /// # Errors
    /// To the reader there is no such engine.
    pub fn check_reader(&self, reader: &Writer, engine_id: &str) -> Result<(), Missing> {
        let seen = self.engine(engine_id).is_some_and(|engine| reader.sees_engine(&engine));
        if seen { Ok(()) } else { Err(Missing::Unknown) }
    }

    /// Whether an engine may be changed on somebody's behalf; one that is not known may.
    ///
    /// # Errors
    /// It is another's.
    pub fn check_writer(&self, writer: &Writer, engine_id: &str) -> Result<(), RegistryError> {
        self.engine(engine_id).map_or(Ok(()), |engine| writer.may_change(&engine))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{EngineRole, Registration, RegistryLimits};
    use super::*;

    fn engine(name: &str) -> Writer {
        Writer::Engine { credential: name.into(), models: ModelScope::All }
    }

    fn bound(name: &str, model: &str) -> Writer {
        Writer::Engine { credential: name.into(), models: ModelScope::of(&[model.to_owned()]) }
    }

    fn registration(writer: Writer, id: &str, base_url: Option<&str>) -> Registration {
        Registration {
            engine_id: id.into(),
            base_url: base_url.map(str::to_owned),
            role: Some(EngineRole::Prefill),
            model: Some("m".into()),
            writer,
            ..Registration::default()
        }
    }

    fn not_owner(id: &str) -> RegistryError {
        RegistryError::NotOwner { engine_id: id.into() }
    }

    fn owner(registry: &Registry, id: &str) -> Option<String> {
        registry.engine(id).unwrap().owner.as_deref().map(str::to_owned)
    }

    #[tokio::test]
    async fn who_registers_first_owns_the_identity_and_its_address() {
        let registry = Registry::new(RegistryLimits::default());
        let here = Some("http://h:1");
        assert!(registry.register(registration(engine("a"), "e", here)).unwrap().created);
        assert_eq!(owner(&registry, "e").as_deref(), Some("a"));
        let before = registry.revision();
        assert_eq!(registry.register(registration(engine("b"), "e", None)), Err(not_owner("e")));
        assert_eq!(registry.register(registration(engine("b"), "other", here)), Err(not_owner("e")));
        assert_eq!(registry.check_writer(&engine("b"), "e"), Err(not_owner("e")));
        assert_eq!(registry.revision(), before);
        assert_eq!(registry.check_writer(&engine("a"), "e"), Ok(()));
        // A restart of the same engine under the same credential takes the address over.
        assert!(registry.register(registration(engine("a"), "e2", here)).unwrap().created);
        assert!(registry.engine("e").is_none());
        // What has left is nobody's.
        registry.register(registration(engine("b"), "e", None)).unwrap();
        assert_eq!(owner(&registry, "e").as_deref(), Some("b"));
    }

    #[tokio::test]
    async fn operators_change_everything_and_take_nothing_away() {
        let registry = Registry::new(RegistryLimits::default());
        registry.register(registration(engine("a"), "e", None)).unwrap();
        registry.register(registration(Writer::Operator("ops".into()), "e", None)).unwrap();
        assert_eq!(owner(&registry, "e").as_deref(), Some("a"));
        assert_eq!(registry.register(registration(Writer::Observer, "e", None)), Err(not_owner("e")));
        registry.register(registration(Writer::Operator("ops".into()), "f", None)).unwrap();
        assert_eq!(registry.register(registration(engine("a"), "f", None)), Err(not_owner("f")));
    }

    #[tokio::test]
    async fn what_nobody_owns_is_claimed_by_the_first_credential() {
        let registry = Registry::new(RegistryLimits::default());
        registry.register(registration(Writer::Observer, "e", None)).unwrap();
        assert_eq!(owner(&registry, "e"), None);
        registry.register(registration(engine("a"), "e", None)).unwrap();
        assert_eq!(owner(&registry, "e").as_deref(), Some("a"));
    }

    #[tokio::test]
    async fn who_sees_one_model_follows_that_model_only() {
        let registry = Registry::new(RegistryLimits::default());
        let start = registry.revision();
        registry.register(registration(engine("a"), "e", None)).unwrap();
        let other = Registration { model: Some("x".into()), ..registration(engine("a"), "e", None) };
        registry.register(other).unwrap();
        registry.remove("e");
        let super::super::Changes::After(changes) = registry.changes_since(start) else {
            panic!("forgotten")
        };
        let sights = |reader: &Writer| changes.iter().map(|c| reader.sees_change(c)).collect::<Vec<_>>();
        assert_eq!(sights(&bound("b", "m")), [Sight::Shown, Sight::Lost, Sight::Hidden]);
        assert_eq!(sights(&bound("b", "x")), [Sight::Hidden, Sight::Shown, Sight::Shown]);
        assert_eq!(sights(&bound("a", "z")), [Sight::Shown; 3]);
        assert_eq!(sights(&Writer::Operator("ops".into())), [Sight::Shown; 3]);
    }

    #[tokio::test]
    async fn nobody_else_joins_an_address_at_another_data_parallel_rank() {
        let registry = Registry::new(RegistryLimits::default());
        let at = |writer, id: &str, dp_rank| Registration {
            dp_rank,
            ..registration(writer, id, Some("http://h:1"))
        };
        registry.register(at(engine("a"), "e0", 0)).unwrap();
        assert_eq!(registry.register(at(engine("b"), "e1", 1)), Err(not_owner("e0")));
        registry.register(at(engine("a"), "e1", 1)).unwrap();
        assert_eq!(registry.engines_at("http://h:1").len(), 2);
    }

    #[tokio::test]
    async fn an_engine_stays_bound_to_its_credentials_models_whoever_changes_it() {
        let registry = Registry::new(RegistryLimits::default());
        let bound_of = |id: &str| registry.engine(id).unwrap().bound.clone();
        let m = ModelScope::of(&["m".to_owned()]);
        // An engine that names no model is bound all the same.
        let silent = Registration { model: None, ..registration(bound("a", "m"), "e", None) };
        registry.register(silent.clone()).unwrap();
        assert_eq!(bound_of("e"), m);
        registry.register(Registration { writer: Writer::Operator("ops".into()), ..silent }).unwrap();
        assert_eq!(bound_of("e"), m);
        registry.register(registration(engine("a"), "e", None)).unwrap();
        assert_eq!(bound_of("e"), ModelScope::All, "the credential was given all models");
        registry.register(registration(Writer::Observer, "read", None)).unwrap();
        assert_eq!(bound_of("read"), ModelScope::All);
    }

    #[tokio::test]
    async fn a_credential_for_one_model_touches_and_sees_no_other() {
        let registry = Registry::new(RegistryLimits::default());
        registry.register(registration(bound("a", "m"), "e", None)).unwrap();
        registry.register(registration(Writer::Trusted, "free", None)).unwrap();
        let denied = Err(RegistryError::ModelNotAllowed { model: "m".into() });
        assert_eq!(registry.register(registration(bound("b", "x"), "free", None)), denied);
        assert_eq!(registry.register(registration(bound("b", "x"), "new", None)), denied);
        assert!(registry.engine("new").is_none());
        let record = registry.engine("e").unwrap();
        assert!(bound("c", "m").sees_engine(&record) && !bound("b", "x").sees_engine(&record));
        assert!(bound("a", "x").sees_engine(&record), "its own");
    }
}
