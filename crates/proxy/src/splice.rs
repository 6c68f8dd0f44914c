//! Bodies made of shared slices of other bodies, and the edits that make them.
//!
//! Owns where bytes are cut and joined. It must not decide which fields are edited (see `request`), and it
//! never copies a long slice.

mod answer;
mod client;
mod edits;
mod prompt;

use std::convert::Infallible;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};

pub use self::answer::{AnswerDefect, Granted, PrefillAnswer, rewrite_address};
pub use self::client::{EchoedPrompt, PromptPart, answer_without_hand_off, client_answer};
pub(crate) use self::client::{Told, client_answer_as, client_event};
pub(crate) use self::edits::{Removals, Span};

/// Slices below this many bytes are copied together: one write is cheaper than a reference each.
const SHARE_FROM: usize = 1024;

/// A body of a few shared segments; cloning it costs one reference count, so that a retry can send it again.
#[derive(Clone, Debug)]
pub struct Spliced {
    segments: Arc<[Bytes]>,
    next: usize,
    left: u64,
}

impl Spliced {
    /// Bytes that are still to be sent; all of them if the body was not polled.
    pub fn len(&self) -> u64 {
        self.left
    }

    /// Whether nothing is left to send.
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }

    /// The segments that are still to be sent.
    pub fn segments(&self) -> &[Bytes] {
        &self.segments[self.next..]
    }

    /// Everything that is still to be sent, in one piece; copies unless there is one segment.
    pub fn into_bytes(self) -> Bytes {
        match self.segments() {
            [only] => only.clone(),
            several => Bytes::from(several.concat()),
        }
    }
}

impl From<Bytes> for Spliced {
    fn from(body: Bytes) -> Self {
        let left = body.len() as u64;
        let segments = if body.is_empty() { Arc::from([]) } else { Arc::from([body]) };
        Self { segments, next: 0, left }
    }
}

impl Body for Spliced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(segment) = self.segments.get(self.next).cloned() else {
            return Poll::Ready(None);
        };
        self.next += 1;
        self.left -= segment.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(segment))))
    }

    fn is_end_stream(&self) -> bool {
        self.next == self.segments.len()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// Joins pieces of `body` with new bytes; edits must come in the order of the body.
#[derive(Debug)]
pub(crate) struct Splicer<'a> {
    body: &'a Bytes,
    taken: usize,
    small: BytesMut,
    segments: Vec<Bytes>,
}

impl<'a> Splicer<'a> {
    pub(crate) fn new(body: &'a Bytes) -> Self {
        Self { body, taken: 0, small: BytesMut::new(), segments: Vec::with_capacity(4) }
    }

    /// Puts `with` where `span` of the body was.
    pub(crate) fn replace(&mut self, span: Range<usize>, with: &[u8]) {
        debug_assert!(self.taken <= span.start && span.start <= span.end, "edits out of order");
        self.keep_until(span.start);
        self.small.extend_from_slice(with);
        self.taken = span.end;
    }

    /// Adds `piece` just before offset `at` of the body.
    pub(crate) fn insert_static(&mut self, at: usize, piece: &'static [u8]) {
        self.keep_until(at);
        self.small.extend_from_slice(piece);
    }

    /// Adds `piece` just before offset `at` of the body, shared if it is long.
    pub(crate) fn insert(&mut self, at: usize, piece: Bytes) {
        self.keep_until(at);
        self.push(piece);
    }

    /// The body with all edits made.
    pub(crate) fn finish(mut self) -> Spliced {
        self.keep_until(self.body.len());
        self.flush();
        let left = self.segments.iter().map(|segment| segment.len() as u64).sum();
        Spliced { segments: Arc::from(self.segments), next: 0, left }
    }

    fn keep_until(&mut self, end: usize) {
        if self.taken < end {
            self.push(self.body.slice(self.taken..end));
            self.taken = end;
        }
    }

    fn push(&mut self, piece: Bytes) {
        if piece.len() < SHARE_FROM {
            self.small.extend_from_slice(&piece);
        } else {
            self.flush();
            self.segments.push(piece);
        }
    }

    fn flush(&mut self) {
        if !self.small.is_empty() {
            self.segments.push(self.small.split().freeze());
        }
    }
}
