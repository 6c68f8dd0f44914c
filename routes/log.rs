//! What the program logs, shown to operators and changed by them. Must never touch the log output itself: the
//! program does, behind [`Logging`].

use std::fmt;
use std::sync::Arc;

use axum::Json;
use axum::extract::State as Shared;
use serde::{Deserialize, Serialize};

use crate::State;
use crate::error::RouteError;
use crate::extract::Json as JsonBody;

/// What is logged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogState {
    /// One level or a list of `target=level` directives.
    pub level: String,
    /// Whether each request makes a line.
    pub requests: bool,
}

/// Why nothing was changed: every directive that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LogFault(pub String);

/// What an operator wants changed.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogChange {
    level: Option<String>,
    requests: Option<bool>,
}

struct Switch {
    now: Box<dyn Fn() -> LogState + Send + Sync>,
    set: Box<dyn Fn(LogState) -> Result<LogState, LogFault> + Send + Sync>,
}

/// How the program is asked what it logs; the default is for one whose log is not its own.
#[derive(Clone, Default)]
pub struct Logging(Option<Arc<Switch>>);

impl fmt::Debug for Logging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Logging").field(&self.0.is_some()).finish()
    }
}

impl Logging {
    /// Asks by calling these.
    #[must_use]
    pub fn new(
        now: impl Fn() -> LogState + Send + Sync + 'static,
        set: impl Fn(LogState) -> Result<LogState, LogFault> + Send + Sync + 'static,
    ) -> Self {
        Self(Some(Arc::new(Switch { now: Box::new(now), set: Box::new(set) })))
    }

    /// What is logged now, where that is known.
    #[must_use]
    pub fn now(&self) -> Option<LogState> {
        self.0.as_ref().map(|switch| (switch.now)())
    }

    /// Changes what is logged, where that can be done.
    ///
    /// # Errors
    /// What of it cannot be used; then nothing has changed.
    #[must_use]
    pub fn set(&self, next: LogState) -> Option<Result<LogState, LogFault>> {
        self.0.as_ref().map(|switch| (switch.set)(next))
    }
}

/// What is logged.
pub(crate) async fn show(Shared(state): Shared<State>) -> Result<Json<LogState>, RouteError> {
    state.logging.now().map(Json).ok_or(RouteError::LogNotOurs)
}

/// Changes what is named, and shows all.
pub(crate) async fn change(
    Shared(state): Shared<State>,
    JsonBody(change): JsonBody<LogChange>,
) -> Result<Json<LogState>, RouteError> {
    let now = state.logging.now().ok_or(RouteError::LogNotOurs)?;
    let next = LogState {
        level: change.level.unwrap_or(now.level),
        requests: change.requests.unwrap_or(now.requests),
    };
    let changed = state.logging.set(next).ok_or(RouteError::LogNotOurs)?;
    Ok(Json(changed?))
}
