//! Warnings and errors that the router logs on this test's thread.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// The log of one test; each test has its own thread and a runtime that stays on it.
pub(crate) struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    expected: Vec<&'static str>,
    tolerated: Vec<&'static str>,
    checked: bool,
    _guard: DefaultGuard,
}

impl Log {
    pub(crate) fn capture(expected: Vec<&'static str>) -> Self {
        let lines = Arc::default();
        let subscriber =
            tracing_subscriber::registry().with(LevelFilter::WARN).with(Capture(Arc::clone(&lines)));
        let guard = tracing::subscriber::set_default(subscriber);
        Self { lines, expected, tolerated: Vec::new(), checked: false, _guard: guard }
    }

    /// Lines that contain this may come or not: it is a matter of who is first.
    #[cfg(feature = "etcd")]
    pub(crate) fn tolerate(&mut self, text: &'static str) {
        self.tolerated.push(text);
    }

    fn tolerates(&self, line: &str) -> bool {
        self.tolerated.iter().any(|text| line.contains(text))
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().clone()
    }

    /// Fails on a line that the test does not expect, and on an expected line that never came.
    pub(crate) fn check(mut self) {
        self.checked = true;
        let lines = self.lines();
        let expected = |line: &&String| self.expected.iter().any(|text| line.contains(text));
        let unexpected: Vec<&String> =
            lines.iter().filter(|line| !expected(line) && !self.tolerates(line)).collect();
        assert!(unexpected.is_empty(), "unexpected log lines: {unexpected:#?}");
        for text in &self.expected {
            assert!(
                lines.iter().any(|line| line.contains(text)),
                "no log line contains {text:?}: {lines:#?}"
            );
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        assert!(self.checked || std::thread::panicking(), "the test did not call `finish`");
    }
}

struct Capture(Arc<Mutex<Vec<String>>>);

impl<S: Subscriber> Layer<S> for Capture {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        if metadata.target().starts_with("kvbaton") {
            let mut line = Line(format!("{} {}:", metadata.level(), metadata.target()));
            event.record(&mut line);
            self.0.lock().push(line.0);
        }
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}
