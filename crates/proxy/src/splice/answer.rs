//! What the router reads from, and takes out of, an engine's JSON answer.

use bytes::Bytes;

use super::{Removals, Spliced, Splicer};
use crate::json::{JsonFault, Kind, Member, Members, members, push_string};

const HAND_OFF: &str = "kv_transfer_params";

/// Why an engine's answer cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerDefect {
    /// The answer is not one JSON object.
    #[error("the answer is not a JSON object: {0}")]
    Json(#[from] JsonFault),
}

/// The parts of a prefill engine's answer that the hand-off depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefillAnswer {
    /// `kv_transfer_params` as it stands in the answer, of whatever type; none if absent or null.
    pub hand_off: Option<Bytes>,
    /// `usage.completion_tokens`
    pub completion_tokens: Option<u64>,
    /// `usage.prompt_tokens`
    pub prompt_tokens: Option<u64>,
    /// `usage.prompt_tokens_details.cached_tokens`
    pub cached_tokens: Option<u64>,
}

impl PrefillAnswer {
    /// Reads an answer; of duplicated fields the last one counts, a count that is no integer is none.
    ///
    /// # Errors
    /// When the body is not one JSON object.
    pub fn parse(body: &Bytes) -> Result<Self, AnswerDefect> {
        let mut answer = Self::default();
        for member in members(body)? {
            let member = member?;
            if member.key_is(HAND_OFF) {
                let given = member.kind() != Kind::Null;
                answer.hand_off = given.then(|| body.slice(member.value()));
            } else if member.key_is("usage") {
                answer.read_usage(&member)?;
            }
        }
        Ok(answer)
    }

    fn read_usage(&mut self, usage: &Member<'_>) -> Result<(), JsonFault> {
        (self.completion_tokens, self.prompt_tokens, self.cached_tokens) = (None, None, None);
        if usage.kind() != Kind::Object {
            return Ok(());
        }
        for member in Members::open(usage.raw_value())? {
            let member = member?;
            if member.key_is("completion_tokens") {
                self.completion_tokens = count(&member);
            } else if member.key_is("prompt_tokens") {
                self.prompt_tokens = count(&member);
            } else if member.key_is("prompt_tokens_details") {
                self.cached_tokens = cached(&member)?;
            }
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

/// An engine's answer without its top-level `kv_transfer_params`; all other bytes stay.
///
/// A body that is not one JSON object comes back unchanged.
pub fn answer_without_hand_off(body: Bytes) -> Spliced {
    match cut_hand_off(&body) {
        Ok(Some(spliced)) => spliced,
        Ok(None) | Err(_) => Spliced::from(body),
    }
}

fn cut_hand_off(body: &Bytes) -> Result<Option<Spliced>, JsonFault> {
    let mut removals = Removals::default();
    let mut cuts = Vec::new();
    for member in members(body)? {
        let member = member?;
        if member.key_is(HAND_OFF) {
            removals.remove(member.span());
        } else {
            cuts.extend(removals.keep(member.span()));
        }
    }
    cuts.extend(removals.finish());
    if cuts.is_empty() {
        return Ok(None);
    }
    let mut splicer = Splicer::new(body);
    for cut in cuts {
        splicer.replace(cut.into(), b"");
    }
    Ok(Some(splicer.finish()))
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
