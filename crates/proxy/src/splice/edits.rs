//! Cutting members out of an object so that what stays is an object too.

use std::ops::Range;

/// A stretch of bytes, small and `Copy` where many are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl From<Range<usize>> for Span {
    fn from(range: Range<usize>) -> Self {
        Self { start: range.start, end: range.end }
    }
}

impl From<Span> for Range<usize> {
    fn from(span: Span) -> Self {
        span.start..span.end
    }
}

/// Told each member of an object in order, says what to cut: a member goes with the comma after it, the
/// last ones with the comma before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Removals {
    kept_until: Option<usize>,
    pending: Option<Span>,
}

impl Removals {
    /// This member stays; the answer is the cut that ends where it begins.
    pub(crate) fn keep(&mut self, member: Range<usize>) -> Option<Span> {
        self.kept_until = Some(member.end);
        let run = self.pending.take()?;
        Some(Span { start: run.start, end: member.start })
    }

    /// This member goes.
    pub(crate) fn remove(&mut self, member: Range<usize>) {
        let start = self.pending.map_or(member.start, |run| run.start);
        self.pending = Some(Span { start, end: member.end });
    }

    /// The object ends; the answer is the cut of its last members.
    pub(crate) fn finish(&mut self) -> Option<Span> {
        let run = self.pending.take()?;
        Some(Span { start: self.kept_until.unwrap_or(run.start), end: run.end })
    }
}
