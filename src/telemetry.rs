//! Log output as the settings ask. Never a prompt, never a token of an operator.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::{Log, LogFormat};

/// Why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `log.level` is not a list of directives.
    #[error("is neither a level nor a list of target=level directives")]
    Level,
    /// Something else has taken the process's log output.
    #[error("the process already has a log output")]
    Taken(#[from] tracing_subscriber::util::TryInitError),
}

/// Reads a list of directives. A word that is no level is refused: the library takes it for the name
/// of a target, and nothing would be logged.
pub(crate) fn filter(level: &str) -> Result<EnvFilter, TelemetryError> {
    let is_level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
    let sound = level.split(',').all(|directive| {
        let directive = directive.trim();
        directive.rsplit_once('=').map_or_else(|| is_level(directive), |(_, level)| is_level(level))
    });
    let filter = EnvFilter::builder().parse(level).map_err(|_| TelemetryError::Level)?;
    if sound { Ok(filter) } else { Err(TelemetryError::Level) }
}

/// Starts logging to standard error.
///
/// # Errors
/// The level cannot be read, or logging was started before.
pub fn start(log: &Log) -> Result<(), TelemetryError> {
    let filter = filter(&log.level)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_is_no_level_is_refused() {
        for good in ["info", "WARN", "off", "kvbaton=debug,warn", "info,hyper=off"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in ["warning", "verbose", "loud", "", "info,", "kvbaton=loud"] {
            assert!(filter(bad).is_err(), "{bad}");
        }
    }
}
