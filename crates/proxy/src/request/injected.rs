//! Finds hand-offs hidden at any depth inside the containers of extra arguments.

use crate::json::{Event, JsonFault, Kind, Member, key_is, walk};
use crate::splice::{Removals, Span};

/// A container that is open.
#[derive(Debug, Default)]
struct Frame {
    object: bool,
    blank: bool,
    key: usize,
    wanted: bool,
    removals: Removals,
}

/// The cuts that take every hand-off out of one container, sorted and disjoint; empty if it holds none.
pub(super) fn cuts_inside(member: &Member<'_>) -> Result<Vec<Span>, JsonFault> {
    if !matches!(member.kind(), Kind::Object | Kind::Array) {
        return Ok(Vec::new());
    }
    let text = member.text();
    let mut finder = Finder::default();
    walk(text, member.value().start, |event| finder.note(text, event))?;
    Ok(finder.into_cuts())
}

#[derive(Debug, Default)]
struct Finder {
    open: Vec<Frame>,
    cuts: Vec<Span>,
}

impl Finder {
    fn note(&mut self, text: &str, event: Event) {
        match event {
            Event::Open { object } => {
                if let Some(parent) = self.open.last_mut() {
                    parent.blank = false;
                }
                self.open.push(Frame { object, blank: true, ..Frame::default() });
            }
            Event::Key { raw, escaped } => {
                if let Some(frame) = self.open.last_mut() {
                    frame.key = raw.start - 1;
                    frame.wanted = key_is(&text[raw], escaped, "kv_transfer_params");
                }
            }
            Event::Scalar { kind, span } => self.value_ended(span.end, kind == Kind::Null),
            Event::Close { end } => {
                if let Some(mut frame) = self.open.pop() {
                    self.cuts.extend(frame.removals.finish());
                    self.value_ended(end, frame.object && frame.blank);
                }
            }
        }
    }

    fn value_ended(&mut self, end: usize, blank: bool) {
        let Some(frame) = self.open.last_mut() else {
            return;
        };
        frame.blank = false;
        if !frame.object {
            return;
        }
        let member = frame.key..end;
        if frame.wanted && !blank {
            frame.removals.remove(member);
        } else {
            self.cuts.extend(frame.removals.keep(member));
        }
    }

    fn into_cuts(mut self) -> Vec<Span> {
        self.cuts.sort_unstable();
        let mut apart: Vec<Span> = Vec::with_capacity(self.cuts.len());
        for cut in self.cuts {
            match apart.last_mut() {
                Some(last) if cut.start <= last.end => last.end = last.end.max(cut.end),
                _ => apart.push(cut),
            }
        }
        apart
    }
}
