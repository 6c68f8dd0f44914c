//! The request fields that the router knows, and how leniently the engines read their values.

use crate::json::{Kind, Member, Members, Unescape, elements};

/// A field that the router reads or changes; every other one passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Model,
    Stream,
    StreamOptions,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    MinTokens,
    MinCompletionTokens,
    Stop,
    StopTokenIds,
    StopSequences,
    IgnoreEos,
    HandOff,
    N,
    BestOf,
    UseBeamSearch,
    Prompt,
    PromptEmbeds,
    PromptLogprobs,
    Echo,
    Logprobs,
    ReturnTokenIds,
    TruncatePromptTokens,
    Truncation,
    Store,
    Background,
    PreviousResponseId,
    Tools,
    /// What becomes the prompt in the dialects other than completions.
    Conversation,
    /// How urgent it is.
    Priority,
    CacheSalt,
    /// Whom the client acts for.
    User,
    /// A container whose contents engines or SDKs merge into the request; the name is the field's.
    Extra(&'static str),
}

/// Longer than any known name.
const NAME_ROOM: usize = 32;

impl Field {
    pub(super) fn of(member: &Member<'_>) -> Option<Self> {
        let raw = member.raw_key();
        if !member.is_escaped() {
            return Self::named(raw.as_bytes());
        }
        let mut name = [0; NAME_ROOM];
        let mut length = 0;
        for character in Unescape::new(raw) {
            *name.get_mut(length)? = u8::try_from(character).ok().filter(u8::is_ascii)?;
            length += 1;
        }
        Self::named(&name[..length])
    }

    fn named(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"model" => Self::Model,
            b"stream" => Self::Stream,
            b"stream_options" => Self::StreamOptions,
            b"max_tokens" => Self::MaxTokens,
            b"max_completion_tokens" => Self::MaxCompletionTokens,
            b"max_output_tokens" => Self::MaxOutputTokens,
            b"min_tokens" => Self::MinTokens,
            b"min_completion_tokens" => Self::MinCompletionTokens,
            b"stop" => Self::Stop,
            b"stop_token_ids" => Self::StopTokenIds,
            b"stop_sequences" => Self::StopSequences,
            b"ignore_eos" => Self::IgnoreEos,
            b"kv_transfer_params" => Self::HandOff,
            b"n" => Self::N,
            b"best_of" => Self::BestOf,
            b"use_beam_search" => Self::UseBeamSearch,
            b"prompt" => Self::Prompt,
            b"prompt_embeds" => Self::PromptEmbeds,
            b"prompt_logprobs" => Self::PromptLogprobs,
            b"echo" => Self::Echo,
            b"logprobs" => Self::Logprobs,
            b"return_token_ids" => Self::ReturnTokenIds,
            b"truncate_prompt_tokens" => Self::TruncatePromptTokens,
            b"truncation" => Self::Truncation,
            b"store" => Self::Store,
            b"background" => Self::Background,
            b"previous_response_id" => Self::PreviousResponseId,
            b"tools" => Self::Tools,
            b"messages" | b"input" | b"instructions" | b"system" | b"documents" => Self::Conversation,
            b"priority" => Self::Priority,
            b"cache_salt" => Self::CacheSalt,
            b"user" => Self::User,
            b"extra_body" => Self::Extra("extra_body"),
            b"vllm_xargs" => Self::Extra("vllm_xargs"),
            b"extra_args" => Self::Extra("extra_args"),
            b"sampling_params" => Self::Extra("sampling_params"),
            _ => return None,
        })
    }
}

impl Field {
    /// Whether the engines make a part of the prompt of it.
    pub(super) fn is_prompt(self) -> bool {
        matches!(self, Self::Prompt | Self::PromptEmbeds | Self::Conversation | Self::Tools)
    }
}

/// A boolean as the engines read it; none where they would refuse the value, or for null.
pub(super) fn lax_bool(member: &Member<'_>) -> Option<bool> {
    match member.kind() {
        Kind::True => Some(true),
        Kind::False => Some(false),
        Kind::Number => match member.raw_value().parse::<f64>() {
            Ok(1.0) => Some(true),
            Ok(0.0) => Some(false),
            _ => None,
        },
        Kind::String => {
            let word = member.string()?;
            let is_any = |words: &[&str]| words.iter().any(|known| word.eq_ignore_ascii_case(known));
            if is_any(&["1", "on", "t", "true", "y", "yes"]) {
                Some(true)
            } else if is_any(&["0", "off", "f", "false", "n", "no"]) {
                Some(false)
            } else {
                None
            }
        }
        Kind::Null | Kind::Object | Kind::Array => None,
    }
}

/// Whether the value surely switches a flag off.
pub(super) fn is_falsish(member: &Member<'_>) -> bool {
    member.kind() == Kind::Null || lax_bool(member) == Some(false)
}

/// Whether the engines surely read the value as the integer 1.
pub(super) fn is_one(member: &Member<'_>) -> bool {
    match member.kind() {
        Kind::Number => member.raw_value().parse() == Ok(1.0),
        Kind::String => member.string().is_some_and(|text| text.trim() == "1"),
        _ => false,
    }
}

/// A whole number, as leniently as the engines read one.
pub(super) fn whole(member: &Member<'_>) -> Option<i64> {
    let number = match member.kind() {
        Kind::Number => member.raw_value().parse::<f64>().ok()?,
        Kind::String => member.string()?.trim().parse::<f64>().ok()?,
        _ => return None,
    };
    number.is_finite().then_some(number as i64)
}

/// Whether the engines surely read the value as zero.
pub(super) fn is_zero(member: &Member<'_>) -> bool {
    member.kind() == Kind::Number && member.raw_value().parse() == Ok(0.0)
}

/// Whether some tool of a list may be run by the engine itself, which then generates several times.
pub(super) fn has_server_tools(member: &Member<'_>) -> bool {
    let raw = member.raw_value();
    match member.kind() {
        Kind::Null => false,
        Kind::Array => match elements(raw) {
            Ok(tools) => !tools.into_iter().all(|tool| is_client_tool(&raw[tool])),
            Err(_) => true,
        },
        _ => true,
    }
}

fn is_client_tool(tool: &str) -> bool {
    let Ok(members) = Members::open(tool) else { return false };
    let kinds = members.filter_map(Result::ok).filter(|member| member.key_is("type"));
    kinds.last().and_then(|kind| kind.string()).is_some_and(|kind| kind == "function" || kind == "custom")
}

/// Whether a prompt is anything but one text or one list of token ids.
pub(super) fn asks_several_prompts(member: &Member<'_>) -> bool {
    match member.kind() {
        Kind::String => false,
        Kind::Array => !is_one_prompt(member.raw_value()),
        _ => true,
    }
}

/// `list` is a checked array: `[1,2]`, `["text"]` and `[[1,2]]` are one prompt.
fn is_one_prompt(list: &str) -> bool {
    let inside = list[1..list.len() - 1].trim_ascii();
    match inside.as_bytes().first() {
        Some(b'"') => closing_quote(inside) == Some(inside.len() - 1),
        Some(b'[') => inside.ends_with(']') && are_numbers(&inside[1..inside.len() - 1]),
        _ => are_numbers(inside),
    }
}

fn closing_quote(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut at = 1;
    loop {
        at += memchr::memchr2(b'"', b'\\', bytes.get(at..)?)?;
        if bytes[at] == b'"' {
            return Some(at);
        }
        at += 2;
    }
}

/// Whether the inside of a checked array holds numbers only, at least one.
fn are_numbers(inside: &str) -> bool {
    // No early exit, so that a prompt of a hundred thousand token ids is judged by vector code.
    let strange = inside.bytes().fold(false, |strange, byte| {
        strange | matches!(byte, b'"' | b'[' | b']' | b'{' | b't' | b'f' | b'n')
    });
    !strange && !inside.trim_ascii().is_empty()
}
