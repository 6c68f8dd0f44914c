//! Who asks, as far as credentials tell, and which models are theirs.
//! Holds names only: credentials themselves never come this far.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::ProxyError;
use crate::json::members;
use crate::request::BadRequest;

/// The models that somebody may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ModelScope {
    /// Every model.
    #[default]
    All,
    /// These.
    Only(Arc<BTreeSet<String>>),
}

impl ModelScope {
    /// The scope of a list in the settings; an empty one means every model.
    #[must_use]
    pub fn of(models: &[String]) -> Self {
        if models.is_empty() { Self::All } else { Self::Only(Arc::new(models.iter().cloned().collect())) }
    }

    /// Whether a model is in it.
    #[must_use]
    pub fn allows(&self, model: &str) -> bool {
        match self {
            Self::All => true,
            Self::Only(models) => models.contains(model),
        }
    }

    /// Whether something whose model may not be known is in it.
    pub(crate) fn covers(&self, model: Option<&str>) -> bool {
        match (self, model) {
            (Self::All, _) => true,
            (Self::Only(_), None) => false,
            (Self::Only(_), Some(model)) => self.allows(model),
        }
    }
}

/// The one model that a body names; `None` when it names none or several, or cannot be read.
pub(crate) fn only_model(body: &[u8]) -> Option<String> {
    let mut found: Option<String> = None;
    for member in members(body).ok()? {
        let member = member.ok()?;
        if member.key_is("model") {
            let model = member.string()?.to_string();
            if found.as_ref().is_some_and(|found| *found != model) {
                return None;
            }
            found = Some(model);
        }
    }
    found
}

/// A client of the inference endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// The name of its API key; none where no keys are configured.
    pub key: Option<Arc<str>>,
    /// The models that it may use.
    pub models: ModelScope,
}

impl Client {
    /// Refuses a model that is not the client's, as if it did not exist.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn check_model(&self, model: &str) -> Result<(), ProxyError> {
        if self.models.allows(model) {
            return Ok(());
        }
        Err(ProxyError::ModelDenied { model: model.into() })
    }

    /// As [`Client::check_model`] for a body that an engine will read by itself: every `model` in
    /// it must be the client's, and there must be one.
    ///
    /// # Errors
    /// A model is not, or nobody can tell which one the engine would take.
    pub(crate) fn check_body(&self, body: &Bytes) -> Result<(), ProxyError> {
        // Without a body, nothing is asked of a model.
        if self.models == ModelScope::All || body.is_empty() {
            return Ok(());
        }
        let mut named = false;
        for member in members(body).map_err(BadRequest::from)? {
            let member = member.map_err(BadRequest::from)?;
            if !member.key_is("model") {
                continue;
            }
            let wrong = BadRequest::WrongType { field: "model", expected: "a string" };
            self.check_model(&member.string().ok_or(wrong)?)?;
            named = true;
        }
        if named { Ok(()) } else { Err(BadRequest::MissingModel.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound() -> Client {
        Client { key: Some("team".into()), models: ModelScope::of(&["a".to_owned(), "b/c".to_owned()]) }
    }

    fn denied(model: &str) -> Result<(), ProxyError> {
        Err(ProxyError::ModelDenied { model: model.into() })
    }

    #[test]
    fn a_body_names_one_model_or_none() {
        let only = |body: &str| only_model(body.as_bytes());
        assert_eq!(only(r#"{"input":"x","model":"a"}"#).as_deref(), Some("a"));
        assert_eq!(only(r#"{"model":"a","model":"a"}"#).as_deref(), Some("a"));
        for body in [r#"{"model":"a","model":"b"}"#, r#"{"model":1}"#, "{}", "[]", "", r#"{"model":"a""#] {
            assert_eq!(only(body), None, "{body}");
        }
    }

    #[test]
    fn an_empty_list_is_every_model() {
        assert!(ModelScope::of(&[]).allows("anything"));
        assert!(ModelScope::All.covers(None));
        assert!(!bound().models.covers(None));
        assert!(bound().models.covers(Some("b/c")));
        assert!(!bound().models.allows("A"));
    }

    #[test]
    fn every_model_of_a_body_counts() {
        let check = |body: &'static str| bound().check_body(&Bytes::from_static(body.as_bytes()));
        assert_eq!(check(r#"{"model":"a","input":"x"}"#), Ok(()));
        assert_eq!(check(""), Ok(()));
        assert_eq!(check(r#"{"model":"z"}"#), denied("z"));
        assert_eq!(check(r#"{"model":"a","model":"z"}"#), denied("z"));
        assert_eq!(check(r#"{"model":"z","model":"a"}"#), denied("z"));
        assert_eq!(check(r#"{"m\u006fdel":"z"}"#), denied("z"));
        assert_eq!(check(r#"{"model":"\u0061"}"#), Ok(()));
        assert_eq!(check(r#"{"input":"x"}"#), Err(BadRequest::MissingModel.into()));
        assert_eq!(check("[1]"), Err(BadRequest::NotAnObject.into()));
        assert!(matches!(check("model=a"), Err(ProxyError::BadRequest(_))));
        assert_eq!(Client::default().check_body(&Bytes::from_static(b"model=a")), Ok(()));
    }
}
