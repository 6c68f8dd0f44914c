//! Taking out of a prefill engine's answer what the client is to get of it.

use bytes::Bytes;

use super::PrefillAnswer;
use super::client::{ECHOED_LISTS, EchoedPrompt, PromptPart};
use crate::json::{Kind, Members, elements};
use crate::request::FromPrefill;

impl PromptPart {
    /// What is `wanted` of an answer that made one token; `prompt` is the client's prompt as it stands in its
    /// body. Copied, since an answer may be much larger than what is kept of it. None if the answer lacks it.
    pub(crate) fn take(answer: &PrefillAnswer, wanted: FromPrefill, prompt: Option<&Bytes>) -> Option<Self> {
        let mut part = Self { cached_tokens: answer.cached_tokens, ..Self::default() };
        if wanted.prompt_logprobs {
            part.prompt_logprobs = Some(Bytes::copy_from_slice(answer.prompt_logprobs.as_ref()?));
        }
        if wanted.echo {
            part.echo = Some(EchoedPrompt::take(answer.logprobs.as_ref()?, answer.prompt_tokens?, prompt?)?);
        }
        Some(part)
    }
}

impl EchoedPrompt {
    /// All but the last token, which is the generated one.
    fn take(logprobs: &Bytes, tokens: u64, prompt: &Bytes) -> Option<Self> {
        let text = std::str::from_utf8(logprobs).ok()?;
        let mut lists = [const { None }; 4];
        let mut width = None;
        for member in Members::open(text).ok()? {
            let member = member.ok()?;
            let Some(list) = ECHOED_LISTS.iter().position(|name| member.key_is(name)) else { continue };
            if member.kind() != Kind::Array {
                return None;
            }
            let raw = member.raw_value();
            let items = elements(raw).ok()?;
            let (last, of_prompt) = items.split_last()?;
            if of_prompt.len() as u64 != tokens {
                return None;
            }
            if list == 0 {
                width = raw[last.clone()].parse().ok();
            }
            let inside = match (of_prompt.first(), of_prompt.last()) {
                (Some(first), Some(end)) => &raw[first.start..end.end],
                _ => "",
            };
            lists[list] = Some(Bytes::copy_from_slice(inside.as_bytes()));
        }
        let [Some(offsets), Some(values), Some(tokens), Some(tops)] = lists else { return None };
        Some(Self { text: prompt.clone(), width: width?, lists: [offsets, values, tokens, tops] })
    }
}
