//! The router that is checked: one that runs, or one that is started for it.

use std::time::Duration;

use http::Method;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::cli::client::{Operators, Question};
use crate::cli::fault::CliError;
use crate::cli::peers::Peer;
use crate::config::{Flags, load};
use crate::{Running, StartError};

/// Longer than the router itself waits for a hand-off.
const TRIAL: Duration = Duration::from_secs(120);

/// How long engines that answer may take to register, without which less of a pair is foreseen.
const REGISTERED: Duration = Duration::from_secs(3);

/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// A pair and what is foreseen of it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Pair {
    pub(super) prefill: String,
    pub(super) decode: String,
    pub(super) verdict: String,
    pub(super) reason: Option<String>,
}

/// What came of a hand-off.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Trial {
    pub(super) result: String,
    pub(super) detail: Option<String>,
    pub(super) seconds: f64,
    pub(super) blocks: Option<u64>,
    pub(super) read: Option<bool>,
}

/// A source of engines' addresses.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Source {
    pub(super) source: String,
    pub(super) role: String,
    pub(super) heard: bool,
    pub(super) urls: Vec<String>,
    pub(super) failure: Option<String>,
}

pub(super) enum Target {
    Running(Box<Operators>),
    Own { running: Box<Running>, of: String },
}

impl Target {
    /// Starts a router from the settings and waits for its engines, at most so long.
    pub(super) async fn start(flags: Flags, wait: Duration) -> anyhow::Result<Self> {
        let of = match &flags.config {
            Some(path) => format!("the settings of {}", path.display()),
            None => "the settings of flags and environment".to_owned(),
        };
        let mut config = load(&flags, std::env::vars())?;
        // It is nobody's router: it needs no time to be left in.
        config.shutdown.settle = Duration::ZERO;
        let app = match config.build().await {
            Err(StartError::Listen { addr, source }) if source.kind() == std::io::ErrorKind::AddrInUse => {
                return Err(CliError::Taken { addr }.into());
            }
            built => built?,
        };
        let target = Self::Own { running: Box::new(app.spawn().await?), of };
        target.settle(wait).await?;
        Ok(target)
    }

    /// Waits until every engine answers, and then for what they register.
    async fn settle(&self, wait: Duration) -> Result<(), CliError> {
        let end = Instant::now() + wait;
        while Instant::now() < end && self.sources().await?.iter().any(|source| !source.heard) {
            tokio::time::sleep(LOOK).await;
        }
        while Instant::now() < end && self.peers().await?.iter().any(|peer| peer.state != "ready") {
            tokio::time::sleep(LOOK).await;
        }
        let end = end.min(Instant::now() + REGISTERED);
        while Instant::now() < end && self.pairs().await?.iter().any(|pair| pair.verdict == "unknown") {
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    pub(super) fn name(&self) -> String {
        match self {
            Self::Running(operators) => format!("the router at {}", operators.name()),
            Self::Own { of, .. } => of.clone(),
        }
    }

    pub(super) async fn peers(&self) -> Result<Vec<Peer>, CliError> {
        match self {
            Self::Running(operators) => {
                let answer = operators.ask(Question::new(Method::GET, &["admin", "peers"])).await?;
                operators.read_as(&answer["peers"])
            }
            Self::Own { running, .. } => again(&running.proxy().peers()),
        }
    }

    pub(super) async fn sources(&self) -> Result<Vec<Source>, CliError> {
        match self {
            Self::Running(operators) => {
                let answer = operators.ask(Question::new(Method::GET, &["admin", "discovery"])).await?;
                operators.read_as(&answer["sources"])
            }
            Self::Own { running, .. } => again(&running.proxy().sources()),
        }
    }

    pub(super) async fn pairs(&self) -> Result<Vec<Pair>, CliError> {
        match self {
            Self::Running(operators) => {
                let answer = operators.ask(Question::new(Method::GET, &["admin", "compatibility"])).await?;
                operators.read_as(&answer["pairs"])
            }
            Self::Own { running, .. } => again(&running.proxy().pairs()),
        }
    }

    /// Has one hand-off made.
    pub(super) async fn attempt(&self, prefill: &str, decode: &str) -> Result<Trial, CliError> {
        match self {
            Self::Running(operators) => {
                let path = ["admin", "pairs", prefill, decode, "try"];
                let question = Question { within: TRIAL, ..Question::new(Method::POST, &path) };
                operators.read_as(&operators.ask(question).await?)
            }
            Self::Own { running, .. } => match running.proxy().try_pair(prefill, decode).await {
                Ok(trial) => again(&trial),
                Err(gone) => Ok(Trial {
                    result: "gone".to_owned(),
                    detail: Some(gone.to_string()),
                    seconds: 0.0,
                    blocks: None,
                    read: None,
                }),
            },
        }
    }

    /// Ends what was started.
    pub(super) async fn end(self) {
        if let Self::Own { running, .. } = self {
            // Whether everything ended in time is nobody's question any more.
            let _ = running.drain().await;
        }
    }
}

/// The same as over HTTP.
fn again<T: DeserializeOwned>(value: &impl Serialize) -> Result<T, CliError> {
    let strange = |source| CliError::Strange { router: "the router".to_owned(), source };
    serde_json::from_value(serde_json::to_value(value).map_err(strange)?).map_err(strange)
}
