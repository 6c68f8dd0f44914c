//! Log output as the settings ask. Never a prompt, never a token of an operator.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::{Log, LogFormat};

/// Why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `log.level` is not a list of directives.
    #[error("log.level is not a level or a list of target=level directives")]
    Level(#[from] tracing_subscriber::filter::ParseError),
    /// Something else has taken the process's log output.
    #[error("the process already has a log output")]
    Taken(#[from] tracing_subscriber::util::TryInitError),
}

/// Starts logging to standard error.
///
/// # Errors
/// The level cannot be read, or logging was started before.
pub fn start(log: &Log) -> Result<(), TelemetryError> {
    let filter = EnvFilter::try_new(&log.level)?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match log.format {
        LogFormat::Human => lines.finish().try_init()?,
        LogFormat::Json => lines.json().flatten_event(true).finish().try_init()?,
    }
    Ok(())
}
