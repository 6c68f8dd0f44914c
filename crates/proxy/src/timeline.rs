//! What happened to each request and when: a bounded ring of records, for operators. A step costs one look
//! at the clock and a lock that only a reader of this very request shares. Never holds a prompt.

mod track;
mod view;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::metrics::Outcome;
use crate::request_id::RequestId;

use track::Track;
pub use view::{RequestFacts, RequestTimeline, RequestView, StepView};

/// What is said of a client that left before its answer was complete.
pub(crate) const CLIENT_LEFT: u16 = 499;

/// Longest name of a model that is kept, in bytes.
const LONGEST_MODEL: usize = 128;

/// How many running requests may be moved on to make room for a new one.
const MOST_MOVED: usize = 16;

/// Something that happened to a request; `Why` says why something did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step<Why = &'static str> {
    /// Its head came.
    Received,
    /// Its body was read.
    Read,
    /// It got its places.
    Admitted,
    DecodeChosen,
    PrefillChosen,
    PrefillSent,
    /// The whole answer of the prefill engine came, with this status.
    PrefillAnswered(u16),
    PrefillFailed(Why),
    /// The prefill engine handed off so many blocks.
    HandedOff(u32),
    /// The hand-off is not used.
    HandOffRefused(Why),
    /// No prefill engine sees the request.
    Bypassed(Why),
    DecodeSent,
    /// The head of the decode engine's answer came, with this status.
    DecodeHead(u16),
    DecodeFailed(Why),
    /// The first bytes of a stream, or a whole answer, came.
    FirstByte,
    /// The first event of a stream that shows a token.
    FirstToken,
    Ended,
}

/// What was read of the request.
#[derive(Clone, Debug)]
struct About {
    model: Box<str>,
    stream: bool,
    bytes: usize,
    key: Option<Arc<str>>,
}

/// One request's record.
#[derive(Debug)]
pub(crate) struct Record {
    number: u64,
    request_id: RequestId,
    endpoint: &'static str,
    began: Instant,
    kept: bool,
    outcome: AtomicU8,
    status: AtomicU16,
    sent: AtomicU64,
    pieces: AtomicU64,
    /// Microseconds since it came; zero while it runs.
    ended: AtomicU64,
    track: Mutex<Track>,
}

impl Record {
    fn new(number: u64, request_id: RequestId, endpoint: &'static str, kept: bool) -> Self {
        let began = Instant::now();
        let mut track = Track::default();
        if kept {
            track.add(0, Step::Received, None);
        }
        Self {
            number,
            request_id,
            endpoint,
            began,
            kept,
            outcome: AtomicU8::new(Outcome::Abandoned as u8),
            status: AtomicU16::new(CLIENT_LEFT),
            sent: AtomicU64::new(0),
            pieces: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            track: Mutex::new(track),
        }
    }

    /// Something happened, perhaps with a peer of this name.
    pub(crate) fn step(&self, step: Step, peer: Option<&Arc<str>>) {
        if !self.kept {
            return;
        }
        let at = self.now();
        self.track.lock().add(at, step, peer);
    }

    /// Its body was read, and can be served.
    pub(crate) fn read(&self, model: &str, stream: bool, bytes: usize, key: Option<&Arc<str>>) {
        if !self.kept {
            return;
        }
        let model = beginning(model, LONGEST_MODEL);
        let about = About { model: model.into(), stream, bytes, key: key.cloned() };
        self.track.lock().about = Some(about);
        self.step(Step::Read, None);
    }

    /// Bytes of the answer's body went out.
    pub(crate) fn sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        self.pieces.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    pub(crate) fn set_status(&self, status: u16) {
        self.status.store(status, Ordering::Relaxed);
    }

    pub(crate) fn status(&self) -> u16 {
        self.status.load(Ordering::Relaxed)
    }

    pub(crate) fn set_outcome(&self, outcome: Outcome) {
        self.outcome.store(outcome as u8, Ordering::Relaxed);
    }

    pub(crate) fn outcome(&self) -> Outcome {
        Outcome::of_code(self.outcome.load(Ordering::Relaxed))
    }

    pub(crate) fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    pub(crate) fn endpoint(&self) -> &'static str {
        self.endpoint
    }

    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    fn ended(&self) -> Option<u64> {
        Some(self.ended.load(Ordering::Acquire)).filter(|ended| *ended != 0)
    }
}

/// As much of a text as fits into so many bytes.
fn beginning(text: &str, bytes: usize) -> &str {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// The records of the last requests, and of those that still run as long as there is room.
#[derive(Debug)]
pub(crate) struct Timelines {
    started: Instant,
    slots: Box<[ArcSwapOption<Record>]>,
    next: AtomicUsize,
    numbers: AtomicU64,
    running: AtomicUsize,
}

impl Timelines {
    /// Keeps so many records; zero keeps none.
    pub(crate) fn new(requests: usize) -> Arc<Self> {
        Arc::new(Self {
            started: Instant::now(),
            slots: (0..requests).map(|_| ArcSwapOption::empty()).collect(),
            next: AtomicUsize::new(0),
            numbers: AtomicU64::new(0),
            running: AtomicUsize::new(0),
        })
    }

    /// A request has come; to be told of its end with [`Timelines::close`].
    pub(crate) fn open(&self, request_id: RequestId, endpoint: &'static str) -> Arc<Record> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        self.running.fetch_add(1, Ordering::Relaxed);
        let record = Arc::new(Record::new(number, request_id, endpoint, !self.slots.is_empty()));
        if record.kept {
            self.keep(Arc::clone(&record));
        }
        record
    }

    pub(crate) fn close(&self, record: &Record) {
        self.running.fetch_sub(1, Ordering::Relaxed);
        record.step(Step::Ended, None);
        record.ended.store(record.now().max(1), Ordering::Release);
    }

    /// Takes the next place; a record there whose request still runs takes the one after it.
    fn keep(&self, mut record: Arc<Record>) {
        for _ in 0..MOST_MOVED {
            let place = self.next.fetch_add(1, Ordering::Relaxed) % self.slots.len();
            match self.slots[place].swap(Some(record)) {
                Some(old) if old.ended().is_none() => record = old,
                _ => return,
            }
        }
    }

    /// Whether anything is kept.
    pub(crate) fn keeps(&self) -> bool {
        !self.slots.is_empty()
    }

    /// How many requests run.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    /// Milliseconds on the router's own clock.
    pub(crate) fn millis(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.started).as_millis() as u64
    }

    /// All records, the newest first.
    fn newest_first(&self) -> Vec<Arc<Record>> {
        let mut all: Vec<Arc<Record>> = self.slots.iter().filter_map(ArcSwapOption::load_full).collect();
        all.sort_unstable_by_key(|record| std::cmp::Reverse(record.number));
        all
    }
}

#[cfg(test)]
mod tests;
