//! Warnings and errors that the router logs on this test's thread.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// The log of one test; each test has its own thread and a runtime that stays on it.
pub(crate) struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    whole: Arc<Mutex<String>>,
    expected: Vec<&'static str>,
    possible: Vec<&'static str>,
    checked: bool,
    _guard: DefaultGuard,
}

impl Log {
    pub(crate) fn capture(expected: Vec<&'static str>, possible: Vec<&'static str>) -> Self {
        Self::capture_from(LevelFilter::WARN, expected, possible)
    }

    /// Also keeps everything that anybody says at any level.
    pub(crate) fn capture_all(expected: Vec<&'static str>, possible: Vec<&'static str>) -> Self {
        Self::capture_from(LevelFilter::TRACE, expected, possible)
    }

    fn capture_from(level: LevelFilter, expected: Vec<&'static str>, possible: Vec<&'static str>) -> Self {
        let (lines, whole) = (Arc::default(), Arc::default());
        let capture = Capture { lines: Arc::clone(&lines), whole: Arc::clone(&whole) };
        let subscriber = tracing_subscriber::registry().with(level).with(capture);
        let guard = tracing::subscriber::set_default(subscriber);
        Self { lines, whole, expected, possible, checked: false, _guard: guard }
    }

    /// Every event and span so far.
    pub(crate) fn whole(&self) -> String {
        self.whole.lock().clone()
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().clone()
    }

    /// Ends without looking at the lines.
    pub(crate) fn forget(mut self) {
        self.checked = true;
    }

    /// Fails on a line that the test does not expect, and on an expected line that never came.
    pub(crate) fn check(mut self) {
        self.checked = true;
        let lines = self.lines();
        let expected =
            |line: &&String| self.expected.iter().chain(&self.possible).any(|text| line.contains(text));
        let unexpected: Vec<&String> = lines.iter().filter(|line| !expected(line)).collect();
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

struct Capture {
    lines: Arc<Mutex<Vec<String>>>,
    whole: Arc<Mutex<String>>,
}

impl<S: Subscriber> Layer<S> for Capture {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut line = Line(format!("{} {}:", metadata.level(), metadata.target()));
        event.record(&mut line);
        self.whole.lock().push_str(&format!("{}\n", line.0));
        if metadata.target().starts_with("kvbaton") && *metadata.level() <= Level::WARN {
            self.lines.lock().push(line.0);
        }
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut line = Line(format!("span {}:", attributes.metadata().name()));
        attributes.record(&mut line);
        self.whole.lock().push_str(&format!("{}\n", line.0));
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}
