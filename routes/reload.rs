//! Settings that change while the program runs: the endpoint that asks for it, and the bounds that
//! it changes here. Must never read settings itself: the program does, behind [`Reload`].

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use arc_swap::ArcSwap;
use axum::Json;
use axum::extract::State as Shared;
use kvbaton_proxy::PeerChanges;
use serde::Serialize;

use crate::error::RouteError;
use crate::extract::BodyBound;
use crate::{Limits, State};

/// What a reload did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reloaded {
    /// Settings that changed and hold from now on, as dotted names.
    pub applied: Vec<String>,
    /// Settings that changed and hold only after a restart.
    pub needs_restart: Vec<String>,
    /// The engines of the settings.
    pub peers: PeerChanges,
}

/// Why nothing was changed: every fault, in the words that a start with these settings would have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotReloaded(pub String);

type Asked = Pin<Box<dyn Future<Output = Result<Reloaded, NotReloaded>> + Send>>;

/// How the program is asked to read its settings again.
#[derive(Clone, Default)]
pub struct Reload(Option<Arc<dyn Fn() -> Asked + Send + Sync>>);

impl fmt::Debug for Reload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reload").field(&self.0.is_some()).finish()
    }
}

impl Reload {
    /// Asks by calling this; [`Reload::default`] is for a program whose settings come from nowhere.
    #[must_use]
    pub fn new(ask: impl Fn() -> Asked + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(ask)))
    }
}

/// [`Limits`] that can be exchanged; requests that have begun keep those that they began with.
#[derive(Clone, Debug)]
pub struct SharedLimits(Arc<ArcSwap<Limits>>);

impl From<Limits> for SharedLimits {
    fn from(limits: Limits) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(limits)))
    }
}

impl SharedLimits {
    /// As they are now.
    #[must_use]
    pub fn now(&self) -> Limits {
        **self.0.load()
    }

    /// Others from now on.
    pub fn replace(&self, limits: Limits) {
        self.0.store(Arc::new(limits));
    }

    pub(crate) fn body_bound(&self) -> BodyBound {
        self.now().body_bound()
    }

    pub(crate) fn payload_bound(&self) -> BodyBound {
        self.now().payload_bound()
    }
}

/// Reads the settings again.
pub(crate) async fn reload(Shared(state): Shared<State>) -> Result<Json<Reloaded>, RouteError> {
    let ask = state.reload.0.ok_or(RouteError::NotReloadable)?;
    Ok(Json(ask().await?))
}
