//! What the router reads from a prefill engine's JSON answer, and the hand-off's address put right.

use bytes::Bytes;
use kv_connector::protocol::handoff::{HandOff, HandOffDefect};

use super::Splicer;
use crate::json::{Fields, JsonFault, Kind, Member, Members, members, push_string};

const HAND_OFF: &str = "kv_transfer_params";

/// Why an engine's answer cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerDefect {
    /// The answer is not one JSON object.
    #[error("the answer is not a JSON object: {0}")]
    Json(#[from] JsonFault),
}

/// The parts of a prefill engine's answer that the hand-off depends on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PrefillAnswer {
    /// `kv_transfer_params`, of whatever type; none if absent or null.
    pub hand_off: Option<Granted>,
    /// `usage.completion_tokens`
    pub completion_tokens: Option<u64>,
    /// `usage.prompt_tokens`
    pub prompt_tokens: Option<u64>,
    /// `usage.prompt_tokens_details.cached_tokens`, by whatever name the dialect has for it.
    pub cached_tokens: Option<u64>,
    /// Log-probabilities of the prompt, where the answer has them: a list, of the answer or its first choice.
    pub prompt_logprobs: Option<Bytes>,
    /// `choices[0].logprobs`, if it is an object.
    pub logprobs: Option<Bytes>,
}

/// A hand-off in an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Granted {
    /// As it stands there.
    pub raw: Bytes,
    /// What it says, or why no decode engine may have it.
    pub read: Result<HandOff, HandOffDefect>,
}

impl PrefillAnswer {
    /// Reads an answer; of duplicated fields the last one counts, a count that is no integer is none.
    ///
    /// # Errors
    /// When the body is not one JSON object.
    pub fn parse(body: &Bytes) -> Result<Self, AnswerDefect> {
        let mut answer = Self::default();
        let mut fields = Fields::of(body)?;
        while let Some(key) = fields.key()? {
            // Read where it stands: it is long, and every byte of it is looked at once.
            if key.is(HAND_OFF) && fields.rest().starts_with('{') {
                let start = fields.offset();
                let read = HandOff::parse_next(&mut fields)?;
                answer.hand_off = Some(Granted { raw: body.slice(start..fields.offset()), read });
                continue;
            }
            let member = fields.pass(key)?;
            if member.key_is(HAND_OFF) {
                answer.hand_off = (member.kind() != Kind::Null).then(|| {
                    let raw = body.slice(member.value());
                    Granted { read: HandOff::parse(&raw), raw }
                });
            } else if member.key_is("usage") {
                answer.read_usage(&member)?;
            } else if member.key_is("prompt_logprobs") && member.kind() == Kind::Array {
                answer.prompt_logprobs = Some(body.slice(member.value()));
            } else if member.key_is("choices") && member.kind() == Kind::Array {
                answer.read_choice(body, &member)?;
            }
        }
        Ok(answer)
    }

    fn read_choice(&mut self, body: &Bytes, choices: &Member<'_>) -> Result<(), JsonFault> {
        let raw = choices.raw_value();
        let first = raw[1..].trim_ascii_start();
        if !first.starts_with('{') {
            return Ok(());
        }
        let base = choices.value().end - first.len();
        for member in Members::beginning(first)? {
            let member = member?;
            let slice = || body.slice(base + member.value().start..base + member.value().end);
            if member.key_is("prompt_logprobs") && member.kind() == Kind::Array {
                self.prompt_logprobs = Some(slice());
            } else if member.key_is("logprobs") && member.kind() == Kind::Object {
                self.logprobs = Some(slice());
            }
        }
        Ok(())
    }

    fn read_usage(&mut self, usage: &Member<'_>) -> Result<(), JsonFault> {
        (self.completion_tokens, self.prompt_tokens, self.cached_tokens) = (None, None, None);
        if usage.kind() != Kind::Object {
            return Ok(());
        }
        let (mut read, mut written) = (None, None);
        for member in Members::open(usage.raw_value())? {
            let member = member?;
            if member.key_is("completion_tokens") || member.key_is("output_tokens") {
                self.completion_tokens = count(&member);
            } else if member.key_is("prompt_tokens") || member.key_is("input_tokens") {
                self.prompt_tokens = count(&member);
            } else if member.key_is("prompt_tokens_details") || member.key_is("input_tokens_details") {
                self.cached_tokens = cached(&member)?;
            } else if member.key_is("cache_read_input_tokens") {
                read = count(&member);
            } else if member.key_is("cache_creation_input_tokens") {
                written = count(&member);
            }
        }
        // Where these stand beside the input tokens, they are no part of them.
        if read.is_some() || written.is_some() {
            self.cached_tokens = read;
            self.prompt_tokens =
                self.prompt_tokens.map(|input| input + read.unwrap_or(0) + written.unwrap_or(0));
        }
        Ok(())
    }
}

fn cached(details: &Member<'_>) -> Result<Option<u64>, JsonFault> {
    let mut cached = None;
    if details.kind() == Kind::Object {
        for member in Members::open(details.raw_value())? {
            let member = member?;
            if member.key_is("cached_tokens") {
                cached = count(&member);
            }
        }
    }
    Ok(cached)
}

fn count(member: &Member<'_>) -> Option<u64> {
    (member.kind() == Kind::Number).then(|| member.raw_value().parse().ok()).flatten()
}

/// A raw hand-off with the values of `remote_host` and `remote_port` replaced where one is given.
///
/// Every occurrence is replaced, none is added, all other bytes stay.
///
/// # Errors
/// When `raw` is not one JSON object.
pub fn rewrite_address(raw: &Bytes, host: Option<&str>, port: Option<u16>) -> Result<Bytes, AnswerDefect> {
    let host = host.map(|host| {
        let mut quoted = Vec::with_capacity(host.len() + 2);
        push_string(&mut quoted, host);
        quoted
    });
    let port = port.map(|port| port.to_string().into_bytes());
    let mut splicer = Splicer::new(raw);
    for member in members(raw)? {
        let member = member?;
        let with = if member.key_is("remote_host") {
            host.as_deref()
        } else if member.key_is("remote_port") {
            port.as_deref()
        } else {
            None
        };
        if let Some(with) = with {
            splicer.replace(member.value(), with);
        }
    }
    Ok(splicer.finish().into_bytes())
}
