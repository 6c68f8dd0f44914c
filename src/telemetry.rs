//! Log output as the settings and operators ask, and traces (`export.rs`) on their way to a collector.
//! Never a prompt, never a token of an operator.

mod clock;
mod collector;
mod encode;
mod export;
mod filter;

use std::io::IsTerminal as _;
use std::sync::Arc;

use kvbaton_routes::{LogFault, LogState, Logging};
use parking_lot::Mutex;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, reload};

use crate::config::{Log, LogFormat};
use clock::UtcMillis;
pub use collector::CollectorFault;
pub(crate) use export::Exporter;
pub(crate) use filter::filter;
pub use filter::{NotADirective, NotAFilter};

/// Why logging cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `log.level` is not a list of directives.
    #[error(transparent)]
    Level(#[from] NotAFilter),
    /// Something else has taken the process's log output.
    #[error("the process already has a log output")]
    Taken(#[from] tracing_subscriber::util::TryInitError),
}

/// Starts logging to standard error; what is logged can be changed by the answer.
///
/// # Errors
/// The level cannot be read, or logging was started before.
pub fn start(log: &Log) -> Result<Logging, TelemetryError> {
    let (filter, handle) = reload::Layer::new(filter(&log.level, log.requests)?);
    let lines = tracing_subscriber::fmt::layer()
        .with_timer(UtcMillis)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let log_of = tracing_subscriber::registry().with(filter);
    match log.format {
        LogFormat::Human => log_of.with(lines).try_init()?,
        LogFormat::Json => {
            log_of.with(lines.json().flatten_event(true).with_span_list(false)).try_init()?;
        }
    }
    let now = LogState { level: log.level.clone(), requests: log.requests };
    Ok(logging(now, move |filter| handle.reload(filter).is_ok()))
}

/// How the log is changed while the program runs: `exchange` puts another filter in place.
fn logging(now: LogState, exchange: impl Fn(EnvFilter) -> bool + Send + Sync + 'static) -> Logging {
    let now = Arc::new(Mutex::new(now));
    let shown = Arc::clone(&now);
    Logging::new(
        move || shown.lock().clone(),
        move |next| {
            let filter = filter(&next.level, next.requests).map_err(|fault| LogFault(fault.to_string()))?;
            let mut now = now.lock();
            if !exchange(filter) {
                return Err(LogFault("the log output is gone".to_owned()));
            }
            tracing::info!(level = %next.level, requests = next.requests, "the log was changed");
            *now = next;
            Ok(now.clone())
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_with_faults_changes_nothing() {
        let exchanged = Arc::new(Mutex::new(0));
        let counted = Arc::clone(&exchanged);
        let start = LogState { level: "info".into(), requests: true };
        let logging = logging(start.clone(), move |_| {
            *counted.lock() += 1;
            true
        });
        let fault = logging.set(LogState { level: "warn,verbose,kvbaton=loud".into(), requests: true });
        let text = fault.unwrap().unwrap_err().0;
        assert!(text.contains("\"verbose\"") && text.contains("\"kvbaton=loud\""), "{text}");
        assert_eq!(logging.now(), Some(start));
        let next = LogState { level: "kvbaton=debug,warn".into(), requests: false };
        assert_eq!(logging.set(next.clone()), Some(Ok(next.clone())));
        assert_eq!((logging.now(), *exchanged.lock()), (Some(next), 1));
    }
}
