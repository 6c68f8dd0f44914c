//! A request's name for its model becomes the engines'.

use std::sync::Arc;

use bytes::Bytes;

use super::{AnswerName, Key, ModelSettings, ModelTable};
use crate::Core;
use crate::client;
use crate::disagg::Exchange;
use crate::error::{ProxyError, Stage};
use crate::request::{ClientRequest, quoted};
use crate::settings::Settings;

/// The model of a body that is passed to an engine as it is.
pub(crate) struct NamedModel {
    /// As engines call it.
    pub(crate) model: Arc<str>,
    /// The same as raw JSON, where the body calls it otherwise.
    pub(crate) served_as: Option<Bytes>,
    /// The body's name as raw JSON, where it is to be shown.
    pub(crate) asked_as: Option<Bytes>,
}

impl Core {
    /// Other names from now on.
    pub(crate) fn take_models(&self, settings: &[ModelSettings]) {
        let ratios = settings.iter().filter_map(|entry| Some((entry.served(), entry.pd_ratio?)));
        let each = ratios.flat_map(|(served, ratio)| {
            served.into_iter().map(move |(model, _)| (Arc::from(model), ratio)).collect::<Vec<_>>()
        });
        self.pool.set_ratios(each.collect());
        self.models.store(Arc::new(ModelTable::of(settings)));
    }

    /// Gives a request the engines' name for its model, and says what is to stand in its answer instead.
    ///
    /// # Errors
    /// No engine of the fleet lists the model, and all have told what they list.
    pub(crate) fn name_model(
        &self,
        models: &ModelTable,
        request: &mut ClientRequest,
        settings: &Settings,
        exchange: &Exchange,
    ) -> Result<Option<Bytes>, ProxyError> {
        let mut shows = None;
        let unknown = ProxyError::ModelDenied { model: request.model().into() };
        if let Some((name, entry)) = models.entry(request.model()) {
            let key = session(settings, exchange).or_else(|| request.user().map(Key::User));
            let served = self.served(entry.choose(key));
            self.metrics.model_named(name, &served);
            request.serve_as(&served);
            shows = request.asked_as().filter(|_| entry.answer == AnswerName::Asked);
        }
        if !request.model().is_empty() && self.is_unknown(request.model()) {
            return Err(unknown);
        }
        Ok(shows)
    }

    /// What engines call the model of a body that is passed on; none where nothing depends on it, or where the
    /// body names no model or several.
    pub(crate) fn named_in(
        &self,
        body: &[u8],
        settings: &Settings,
        exchange: &Exchange,
    ) -> Option<NamedModel> {
        let models = self.models.load();
        // Engines of a credential for certain models get no request of which that is not known.
        if models.is_empty() && !self.pool.has_bound() {
            return None;
        }
        let asked = client::only_model(body)?;
        let Some((name, entry)) = models.entry(&asked) else {
            return Some(NamedModel { model: asked.into(), served_as: None, asked_as: None });
        };
        let model = self.served(entry.choose(session(settings, exchange)));
        self.metrics.model_named(name, &model);
        let differs = model != *name;
        Some(NamedModel {
            served_as: differs.then(|| quoted(&model)),
            asked_as: (differs && entry.answer == AnswerName::Asked).then(|| quoted(name)),
            model,
        })
    }

    /// The model that would serve a name, if the settings have that.
    pub(crate) fn would_serve(&self, name: &str, session: Option<&str>) -> Option<Arc<str>> {
        let models = self.models.load();
        let (_, entry) = models.entry(name)?;
        match session {
            Some(session) => Some(self.served(entry.choose(Some(Key::Session(session.as_bytes()))))),
            None => Some(self.served(entry.models())),
        }
    }

    /// The first model that an open decode engine lists, or else the first.
    fn served<'a>(&self, mut wanted: impl Iterator<Item = &'a Arc<str>>) -> Arc<str> {
        let Some(first) = wanted.next() else { return Arc::from("") };
        let roster = self.pool.roster();
        let is_served =
            |model: &Arc<str>| roster.serving(Stage::Decode, model).iter().any(|peer| peer.is_open());
        if is_served(first) {
            return Arc::clone(first);
        }
        Arc::clone(wanted.find(|model| is_served(model)).unwrap_or(first))
    }

    fn is_unknown(&self, model: &str) -> bool {
        if !self.pool.roster().is_unknown(model) {
            return false;
        }
        // An engine may have begun to list it just now.
        self.pool.learn(&self.registry);
        self.pool.roster().is_unknown(model)
    }
}

fn session<'a>(settings: &Settings, exchange: &'a Exchange) -> Option<Key<'a>> {
    let value = exchange.headers.get(settings.routing.session_header.as_str())?;
    (!value.is_empty()).then(|| Key::Session(value.as_bytes()))
}
