//! Where a request's prompt stands in its body, so that requests whose prompts begin alike can be told.

use std::ops::Range;

use super::fields::Field;
use crate::json::Member;
use crate::splice::Span;

/// Parts beside the one that grows: instructions, system prompt, tools, documents.
const MAX_CLOSED: usize = 4;

/// Where the prompt stands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PromptSpans {
    closed: [Option<Span>; MAX_CLOSED],
    open: Option<Span>,
    salt: Option<Span>,
}

impl PromptSpans {
    pub(super) fn note(&mut self, field: Field, member: &Member<'_>) {
        let span = Some(Span::from(member.value()));
        let grows = || member.key_is("messages") || member.key_is("input");
        match field {
            Field::Prompt => self.open = span,
            Field::Conversation if grows() => self.open = span,
            Field::Conversation | Field::Tools => {
                if let Some(free) = self.closed.iter_mut().find(|part| part.is_none()) {
                    *free = span;
                }
            }
            Field::CacheSalt => self.salt = span,
            _ => {}
        }
    }

    pub(super) fn parts<'a>(&self, model: &'a str, body: &'a [u8]) -> PromptParts<'a> {
        let text = |span: Option<Span>| span.map_or(&[][..], |span| &body[Range::from(span)]);
        // Without the bracket or quote that closes it, a longer conversation begins with the shorter one.
        let open = text(self.open);
        let open = open.split_last().map_or(open, |(_, open)| open.trim_ascii_end());
        PromptParts {
            model,
            salt: self.salt.map(|span| &body[Range::from(span)]),
            closed: self.closed.map(text),
            open,
        }
    }
}

/// What becomes of a request's prompt, as it stands in the body.
#[derive(Clone, Copy, Debug)]
pub struct PromptParts<'a> {
    /// The model, or the adapter, that reads it.
    pub model: &'a str,
    /// The salt under which engines cache it.
    pub salt: Option<&'a [u8]>,
    closed: [&'a [u8]; MAX_CLOSED],
    /// The prompt or the conversation without its end; what follows it continues it.
    pub open: &'a [u8],
}

impl<'a> PromptParts<'a> {
    /// A prompt that is one text.
    #[must_use]
    pub const fn of_text(model: &'a str, salt: Option<&'a [u8]>, open: &'a [u8]) -> Self {
        Self { model, salt, closed: [&[]; MAX_CLOSED], open }
    }

    /// What engines put before it: tools, instructions.
    pub fn closed(&self) -> impl Iterator<Item = &'a [u8]> {
        self.closed.into_iter().filter(|part| !part.is_empty())
    }
}
