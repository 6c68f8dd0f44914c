//! An engine's answer, or one event of its stream, as the client gets it: without the hand-off, and with what
//! only the prefill engine can say of the prompt. All other bytes stay.

use std::ops::Range;

use bytes::Bytes;

use super::{Removals, Span, Spliced, Splicer};
use crate::json::{JsonFault, Kind, Member, Members, elements, members};
use crate::request::Endpoint;

const HAND_OFF: &str = "kv_transfer_params";

/// What a prefill engine said of the prompt, kept for the decode engine's answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptPart {
    /// How many of the prompt's tokens it found in its cache; a decode engine counts what it pulled.
    pub cached_tokens: Option<u64>,
    /// The log-probabilities of the prompt's tokens (raw JSON), where they were asked for.
    pub prompt_logprobs: Option<Bytes>,
    /// What goes before the generated text, where the prompt is to be echoed with log-probabilities.
    pub echo: Option<EchoedPrompt>,
}

/// The echoed prompt: raw JSON, ready to go before what a decode engine generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EchoedPrompt {
    /// The text as a JSON string, quotes included.
    pub text: Bytes,
    /// The length of the text in the engine's own count, by which later offsets shift.
    pub width: u64,
    /// The elements of `text_offset`, `token_logprobs`, `tokens` and `top_logprobs`, without brackets.
    pub lists: [Bytes; 4],
}

pub(super) const ECHOED_LISTS: [&str; 4] = ["text_offset", "token_logprobs", "tokens", "top_logprobs"];

#[derive(Debug)]
struct Edit {
    at: Span,
    with: Bytes,
}

/// A whole JSON answer as the client gets it; `part` if it was generated from pulled blocks.
///
/// # Errors
/// When the answer is not one JSON object.
pub fn client_answer(
    body: &Bytes,
    endpoint: Endpoint,
    part: Option<&PromptPart>,
) -> Result<Spliced, JsonFault> {
    client_answer_as(body, endpoint, Told { part, model: None })
}

/// What of an answer is not the decode engine's to tell.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told<'a> {
    /// Of the prompt, where it was generated from pulled blocks.
    pub(crate) part: Option<&'a PromptPart>,
    /// The model's name as raw JSON, where clients call it otherwise.
    pub(crate) model: Option<&'a Bytes>,
}

/// As [`client_answer`], with the client's name for the model.
///
/// # Errors
/// As [`client_answer`].
pub(crate) fn client_answer_as(
    body: &Bytes,
    endpoint: Endpoint,
    told: Told<'_>,
) -> Result<Spliced, JsonFault> {
    let mut edits = Edits::new(endpoint, told);
    edits.answer(members(body)?, 0)?;
    Ok(edits.applied_to(body))
}

/// An engine's answer without its top-level `kv_transfer_params`; all other bytes stay.
///
/// A body that is not one JSON object comes back unchanged.
pub fn answer_without_hand_off(body: Bytes) -> Spliced {
    client_answer(&body, Endpoint::Completions, None).unwrap_or_else(|_| Spliced::from(body))
}

/// As [`client_answer`] for the JSON of one event of a stream.
pub(crate) fn client_event(data: &Bytes, endpoint: Endpoint, told: Told<'_>) -> Result<Spliced, JsonFault> {
    let mut edits = Edits::new(endpoint, told);
    edits.event(members(data)?)?;
    Ok(edits.applied_to(data))
}

struct Edits<'a> {
    endpoint: Endpoint,
    part: Option<&'a PromptPart>,
    model: Option<&'a Bytes>,
    made: Vec<Edit>,
}

impl<'a> Edits<'a> {
    fn new(endpoint: Endpoint, told: Told<'a>) -> Self {
        Self { endpoint, part: told.part, model: told.model, made: Vec::new() }
    }

    fn applied_to(self, body: &Bytes) -> Spliced {
        if self.made.is_empty() {
            return Spliced::from(body.clone());
        }
        let mut splicer = Splicer::new(body);
        for edit in self.made {
            let at = Range::from(edit.at);
            splicer.replace(at.clone(), b"");
            splicer.insert(at.end, edit.with);
        }
        splicer.finish()
    }

    fn cut(&mut self, span: Option<Span>) {
        self.made.extend(span.map(|at| Edit { at, with: Bytes::new() }));
    }

    fn put(&mut self, at: Range<usize>, with: impl Into<Bytes>) {
        self.made.push(Edit { at: at.into(), with: with.into() });
    }

    /// The members of an answer that begins at `base`.
    fn answer(&mut self, answer: Members<'_>, base: usize) -> Result<(), JsonFault> {
        let mut removals = Removals::default();
        let mut end = base + 1;
        let (mut empty, mut logprobs) = (true, false);
        for member in answer {
            let member = member?;
            let span = shifted(member.span(), base);
            if member.key_is(HAND_OFF) {
                removals.remove(span);
                continue;
            }
            (end, empty) = (span.end, false);
            let cut = removals.keep(span);
            self.cut(cut);
            if let Some(model) = self.model
                && member.key_is("model")
                && member.kind() == Kind::String
            {
                self.put(shifted(member.value(), base), model.clone());
                continue;
            }
            let Some(part) = self.part else { continue };
            let at = base + member.value().start;
            if member.key_is("usage") {
                self.usage(&member, at, part)?;
            } else if self.endpoint == Endpoint::Completions && member.key_is("choices") {
                self.choices(&member, at, part)?;
            } else if self.endpoint == Endpoint::ChatCompletions && member.key_is("prompt_logprobs") {
                logprobs = true;
                if let Some(value) = &part.prompt_logprobs {
                    self.put(at..at + member.raw_value().len(), value.clone());
                }
            }
        }
        if self.endpoint == Endpoint::ChatCompletions && !logprobs {
            self.add_prompt_logprobs(end, empty);
        }
        self.cut(removals.finish());
        Ok(())
    }

    /// Adds the member where the engine left it out; `at` is where the last member that stays ends.
    fn add_prompt_logprobs(&mut self, at: usize, first: bool) {
        if let Some(value) = self.part.and_then(|part| part.prompt_logprobs.as_ref()) {
            let key: &[u8] = if first { br#""prompt_logprobs":"# } else { br#","prompt_logprobs":"# };
            self.put(at..at, [key, value].concat());
        }
    }

    /// The members of an event: an answer, or one that holds an answer.
    fn event(&mut self, event: Members<'_>) -> Result<(), JsonFault> {
        let holder = match self.endpoint {
            Endpoint::Responses => Some("response"),
            Endpoint::Messages => Some("message"),
            Endpoint::Completions | Endpoint::ChatCompletions => None,
        };
        let mut removals = Removals::default();
        for member in event {
            let member = member?;
            if member.key_is(HAND_OFF) {
                removals.remove(member.span());
                continue;
            }
            let cut = removals.keep(member.span());
            self.cut(cut);
            let at = member.value().start;
            if member.kind() == Kind::Object && holder.is_some_and(|holder| member.key_is(holder)) {
                self.answer(Members::open(member.raw_value())?, at)?;
            } else if let Some(model) = self.model
                && member.key_is("model")
                && member.kind() == Kind::String
            {
                self.put(member.value(), model.clone());
            } else if let Some(part) = self.part
                && member.key_is("usage")
            {
                self.usage(&member, at, part)?;
            }
        }
        self.cut(removals.finish());
        Ok(())
    }

    fn usage(&mut self, usage: &Member<'_>, at: usize, part: &PromptPart) -> Result<(), JsonFault> {
        if usage.kind() != Kind::Object {
            return Ok(());
        }
        match self.endpoint {
            Endpoint::Completions | Endpoint::ChatCompletions => {
                self.details(usage, at, "prompt_tokens_details", part)
            }
            Endpoint::Responses => self.details(usage, at, "input_tokens_details", part),
            Endpoint::Messages => self.message_usage(usage, at, part),
        }
    }

    fn details(
        &mut self,
        usage: &Member<'_>,
        at: usize,
        name: &str,
        part: &PromptPart,
    ) -> Result<(), JsonFault> {
        for details in Members::open(usage.raw_value())? {
            let details = details?;
            if details.key_is(name) && details.kind() == Kind::Object {
                self.count(details.raw_value(), at + details.value().start, "cached_tokens", part)?;
            }
        }
        Ok(())
    }

    /// Puts P's count in place of D's in the object `raw`, or takes D's out where P has none.
    fn count(&mut self, raw: &str, base: usize, name: &str, part: &PromptPart) -> Result<(), JsonFault> {
        let mut removals = Removals::default();
        for member in Members::open(raw)? {
            let member = member?;
            let ours = member.key_is(name) && member.kind() == Kind::Number;
            if ours && part.cached_tokens.is_none() {
                removals.remove(shifted(member.span(), base));
                continue;
            }
            let cut = removals.keep(shifted(member.span(), base));
            self.cut(cut);
            if let Some(count) = part.cached_tokens.filter(|_| ours) {
                self.put(shifted(member.value(), base), count.to_string());
            }
        }
        self.cut(removals.finish());
        Ok(())
    }

    /// In this dialect cached tokens are no part of the input tokens: what one loses the other gains.
    fn message_usage(&mut self, usage: &Member<'_>, base: usize, part: &PromptPart) -> Result<(), JsonFault> {
        let raw = usage.raw_value();
        let (mut input, mut cached) = (None, None);
        for member in Members::open(raw)? {
            let member = member?;
            let count = || member.raw_value().parse::<u64>().ok();
            if member.key_is("input_tokens") {
                input = count();
            } else if member.key_is("cache_read_input_tokens") {
                cached = count();
            }
        }
        let (Some(input), Some(cached)) = (input, cached) else { return Ok(()) };
        let input = (input + cached).saturating_sub(part.cached_tokens.unwrap_or(0));
        let mut removals = Removals::default();
        for member in Members::open(raw)? {
            let member = member?;
            let is_cached = member.key_is("cache_read_input_tokens");
            if is_cached && part.cached_tokens.is_none() {
                removals.remove(shifted(member.span(), base));
                continue;
            }
            let cut = removals.keep(shifted(member.span(), base));
            self.cut(cut);
            if member.key_is("input_tokens") {
                self.put(shifted(member.value(), base), input.to_string());
            } else if let Some(count) = part.cached_tokens.filter(|_| is_cached) {
                self.put(shifted(member.value(), base), count.to_string());
            }
        }
        self.cut(removals.finish());
        Ok(())
    }

    fn choices(&mut self, choices: &Member<'_>, at: usize, part: &PromptPart) -> Result<(), JsonFault> {
        if part.prompt_logprobs.is_none() && part.echo.is_none() || choices.kind() != Kind::Array {
            return Ok(());
        }
        let raw = choices.raw_value();
        for choice in elements(raw)? {
            let base = at + choice.start;
            if raw.as_bytes()[choice.start] == b'{' {
                self.choice(&raw[choice], base, part)?;
            }
        }
        Ok(())
    }

    fn choice(&mut self, raw: &str, base: usize, part: &PromptPart) -> Result<(), JsonFault> {
        let mut end = base + 1;
        let (mut empty, mut seen) = (true, false);
        for member in Members::open(raw)? {
            let member = member?;
            let value = shifted(member.value(), base);
            (end, empty) = (value.end, false);
            if member.key_is("prompt_logprobs") {
                seen = true;
                if let Some(logprobs) = &part.prompt_logprobs {
                    self.put(value, logprobs.clone());
                }
            } else if let Some(echo) = &part.echo {
                if member.key_is("text") && member.kind() == Kind::String {
                    let inside = value.start + 1;
                    self.put(inside..inside, echo.text.slice(1..echo.text.len() - 1));
                } else if member.key_is("logprobs") && member.kind() == Kind::Object {
                    self.logprobs(member.raw_value(), value.start, echo)?;
                }
            }
        }
        if !seen {
            self.add_prompt_logprobs(end, empty);
        }
        Ok(())
    }

    fn logprobs(&mut self, raw: &str, base: usize, echo: &EchoedPrompt) -> Result<(), JsonFault> {
        for member in Members::open(raw)? {
            let member = member?;
            let Some(list) = ECHOED_LISTS.iter().position(|name| member.key_is(name)) else { continue };
            if member.kind() != Kind::Array {
                continue;
            }
            let value = shifted(member.value(), base);
            let (items, before) = (elements(member.raw_value())?, &echo.lists[list]);
            let comma: &[u8] = if items.is_empty() || before.is_empty() { b"" } else { b"," };
            if list > 0 {
                let inside = value.start + 1;
                self.put(inside..inside, [before, comma].concat());
                continue;
            }
            let later = items.into_iter().map(|item| {
                let text = &member.raw_value()[item];
                text.parse::<u64>().map_or_else(|_| text.to_owned(), |at| (at + echo.width).to_string())
            });
            let later = later.collect::<Vec<_>>().join(",");
            self.put(value, [b"[", &before[..], comma, later.as_bytes(), b"]"].concat());
        }
        Ok(())
    }
}

fn shifted(range: Range<usize>, base: usize) -> Range<usize> {
    range.start + base..range.end + base
}
