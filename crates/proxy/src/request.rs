//! The client's request as bytes, the few fields that matter peeked, and the bodies of the two legs.
//!
//! Owns which fields each leg changes. It must never re-serialise, add a field beyond those the hand-off
//! needs, or judge fields that the engines judge themselves.

mod fields;
mod injected;
mod plan;
mod prompt;
mod seen;

use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use self::fields::Field;
use self::plan::{Changes, Plan};
use self::prompt::PromptSpans;
use self::seen::Seen;
use crate::json::{JsonFault, JsonFaultKind, members, push_string};
use crate::splice::{Span, Spliced};

pub(crate) use self::plan::pass_through_as;
pub use self::plan::{FromPrefill, MAX_EDITS, pass_through_body};
pub use self::prompt::PromptParts;

/// The endpoints whose requests run in two legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
}

impl Endpoint {
    /// The path, the same at the router and at the engines.
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
        }
    }

    /// The name in metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Completions => "completions",
            Self::ChatCompletions => "chat_completions",
            Self::Responses => "responses",
            Self::Messages => "messages",
        }
    }
}

/// What to do with a hand-off that a client put into its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InjectedHandOff {
    /// Answer 400.
    Refuse,
    /// Take it out and go on.
    Strip,
}

/// Why one hand-off cannot serve a request, so that it goes to a decode engine alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BypassReason {
    /// `n` is not 1.
    N,
    /// `best_of` is not 1.
    BestOf,
    /// Beam search.
    BeamSearch,
    /// More than one prompt.
    SeveralPrompts,
    /// Log-probabilities of the prompt in a form that cannot be taken from the prefill engine; a decode
    /// engine cannot give them for pulled blocks.
    PromptLogprobs,
    /// A prompt that is cut to fit the output, so differently on each leg.
    Truncation,
    /// The request continues a response that one engine has stored.
    StoredResponse,
    /// The answer is made after the exchange, for a later one.
    Background,
    /// Tools that the engine runs itself, generating several times.
    ServerTools,
    /// An engine of the pair takes no hand-off on this endpoint.
    Dialect,
    /// The prompt is shorter than what the operator lets be handed off.
    ShortPrompt,
    /// The operator lets nothing be handed off.
    Never,
}

impl BypassReason {
    /// The name in metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::N => "n",
            Self::BestOf => "best_of",
            Self::BeamSearch => "beam_search",
            Self::SeveralPrompts => "several_prompts",
            Self::PromptLogprobs => "prompt_logprobs",
            Self::Truncation => "truncation",
            Self::StoredResponse => "stored_response",
            Self::Background => "background",
            Self::ServerTools => "server_tools",
            Self::Dialect => "dialect",
            Self::ShortPrompt => "short_prompt",
            Self::Never => "never",
        }
    }
}

/// Why a request is refused before any leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// The body is not UTF-8.
    #[error("the body is not valid UTF-8 (byte {offset})")]
    Utf8 {
        /// Where the first invalid sequence begins.
        offset: usize,
    },
    /// The body is not JSON.
    #[error("the body is not valid JSON: {kind} (byte {offset})")]
    Json {
        /// Where.
        offset: usize,
        /// What.
        kind: JsonFaultKind,
    },
    /// The body is JSON but no object.
    #[error("the body must be a JSON object")]
    NotAnObject,
    /// There is no `model`.
    #[error("the field `model` is required")]
    MissingModel,
    /// A field that the router itself reads has an unusable type.
    #[error("the field `{field}` must be {expected}")]
    WrongType {
        /// The field.
        field: &'static str,
        /// The type it must have, with its article.
        expected: &'static str,
    },
    /// The client sent a hand-off of its own.
    #[error("`kv_transfer_params` (in {place}) is set by the router and must not be sent")]
    InjectedHandOff {
        /// The top-level field that holds it.
        place: &'static str,
    },
    /// More tokens than one request may ask for.
    #[error("`{field}` is more than the {limit} that this router allows")]
    TooManyTokens {
        /// The field that asks for them.
        field: &'static str,
        /// The most that one may.
        limit: u64,
    },
    /// A larger prompt than one request may have.
    #[error("the prompt has {bytes} bytes, more than the {limit} that this router allows")]
    PromptTooLarge {
        /// How many it has.
        bytes: usize,
        /// The most that one may.
        limit: usize,
    },
    /// A priority that is none.
    #[error("the header `x-kvbaton-priority` must be a whole number from -1000 to 1000")]
    Priority,
    /// So many repeated fields that rewriting would cost more than the request.
    #[error("the body repeats rewritten fields more than {limit} times")]
    TooManyEdits {
        /// The most edits that one leg may need.
        limit: usize,
    },
}

impl BadRequest {
    /// The field at fault, for the error body's `param`.
    pub fn param(&self) -> Option<&'static str> {
        match self {
            Self::MissingModel => Some("model"),
            Self::WrongType { field, .. } | Self::TooManyTokens { field, .. } => Some(field),
            Self::Priority => Some("x-kvbaton-priority"),
            Self::InjectedHandOff { .. } => Some("kv_transfer_params"),
            Self::Utf8 { .. }
            | Self::Json { .. }
            | Self::NotAnObject
            | Self::PromptTooLarge { .. }
            | Self::TooManyEdits { .. } => None,
        }
    }
}

impl From<JsonFault> for BadRequest {
    fn from(fault: JsonFault) -> Self {
        match fault.kind {
            JsonFaultKind::Utf8 => Self::Utf8 { offset: fault.offset },
            JsonFaultKind::NotAnObject => Self::NotAnObject,
            kind => Self::Json { offset: fault.offset, kind },
        }
    }
}

/// A client's request, checked as JSON and ready to be rewritten for either leg.
#[derive(Clone, Debug)]
pub struct ClientRequest {
    body: Bytes,
    model: Box<str>,
    /// Where the engines call the model otherwise than the client.
    renamed: Option<Renamed>,
    user: Option<Span>,
    stream: bool,
    bypass: Option<BypassReason>,
    from_prefill: FromPrefill,
    prompt: Option<Span>,
    spans: PromptSpans,
    prompt_bytes: usize,
    stripped: bool,
    size: Size,
    plan: Plan,
}

/// A model that clients and engines call by different names.
#[derive(Clone, Debug)]
struct Renamed {
    /// The client's name.
    asked: Box<str>,
    /// The engines', as raw JSON.
    served: Bytes,
}

/// What the limits on single requests look at.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    max_tokens: Option<(&'static str, u64)>,
    priority: Option<i64>,
}

impl ClientRequest {
    /// Reads a request in one pass over its body.
    ///
    /// # Errors
    /// When the body is not one JSON object, names no model, or holds a hand-off that policy refuses.
    pub fn parse(endpoint: Endpoint, body: Bytes, on_injected: InjectedHandOff) -> Result<Self, BadRequest> {
        Self::parse_or(endpoint, body, on_injected, None)
    }

    /// As [`Self::parse`], with a model for a request that names none.
    ///
    /// # Errors
    /// As [`Self::parse`].
    pub(crate) fn parse_or(
        endpoint: Endpoint,
        body: Bytes,
        on_injected: InjectedHandOff,
        default: Option<&str>,
    ) -> Result<Self, BadRequest> {
        let mut seen = Seen::default();
        let mut plan = Plan::new(endpoint);
        for member in members(&body)? {
            let member = member?;
            let field = Field::of(&member);
            if let Some(field) = field {
                seen.note(endpoint, field, &member);
            }
            plan.note(field, &member)?;
        }
        plan.finish()?;
        if let (Some(place), InjectedHandOff::Refuse) = (plan.injected(), on_injected) {
            return Err(BadRequest::InjectedHandOff { place });
        }
        let (bypass, stripped) = (seen.bypass(), plan.injected().is_some());
        let (from_prefill, prompt, size) = (seen.wanted_of_prefill(), seen.text, seen.size);
        let (prompt_bytes, spans, user) = (seen.prompt_bytes, seen.spans, seen.user);
        let mut renamed = None;
        let model: Box<str> = match (seen.model, default) {
            // Nothing could be added to a body without members, nor could any engine use it.
            (None, Some(default)) if !plan.is_empty() => {
                renamed = Some(Renamed { asked: Box::default(), served: quoted(default) });
                default.into()
            }
            (model, _) => named(model, endpoint)?,
        };
        Ok(Self {
            model,
            renamed,
            user,
            stream: seen.stream,
            bypass,
            from_prefill,
            prompt,
            spans,
            prompt_bytes,
            stripped,
            size,
            plan,
            body,
        })
    }

    /// The endpoint that it was sent to.
    pub fn endpoint(&self) -> Endpoint {
        self.plan.endpoint()
    }

    /// The model as engines call it, escapes resolved.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The engines call the model otherwise.
    pub(crate) fn serve_as(&mut self, served: &str) {
        if *self.model == *served {
            return;
        }
        let quoted = quoted(served);
        let model = std::mem::replace(&mut self.model, served.into());
        match &mut self.renamed {
            Some(renamed) => renamed.served = quoted,
            None => self.renamed = Some(Renamed { asked: model, served: quoted }),
        }
    }

    /// The client's name for the model as raw JSON, where the engines have another.
    pub(crate) fn asked_as(&self) -> Option<Bytes> {
        let asked = self.renamed.as_ref().map(|renamed| &*renamed.asked);
        asked.filter(|asked| !asked.is_empty()).map(quoted)
    }

    /// The `user` as it stands in the body.
    pub(crate) fn user(&self) -> Option<&[u8]> {
        self.user.map(|span| &self.body[Range::from(span)])
    }

    fn changes(&self) -> Changes<'_> {
        Changes { model: self.renamed.as_ref().map(|renamed| &renamed.served), ..Changes::default() }
    }

    /// Whether the engines would stream the answer, reading `stream` as leniently as they do.
    pub fn wants_stream(&self) -> bool {
        self.stream
    }

    /// The most tokens that it asks for, and the field that does.
    pub(crate) fn max_tokens(&self) -> Option<(&'static str, u64)> {
        self.size.max_tokens
    }

    /// Its `priority`, which engines read too.
    pub(crate) fn priority(&self) -> Option<i64> {
        self.size.priority
    }

    /// Why the hand-off cannot be shared, if so.
    pub fn bypass(&self) -> Option<BypassReason> {
        self.bypass
    }

    /// The bytes of everything that becomes the prompt, as it stands in the body.
    pub fn prompt_bytes(&self) -> usize {
        self.prompt_bytes
    }

    /// Why the request goes to a decode engine alone, if so: its own reasons, or a prompt of fewer than
    /// `least` bytes.
    pub fn bypass_below(&self, least: usize) -> Option<BypassReason> {
        self.bypass.or((self.prompt_bytes < least).then_some(BypassReason::ShortPrompt))
    }

    /// What the client is to get from the prefill engine's answer, if there is a hand-off.
    pub fn wanted_of_prefill(&self) -> FromPrefill {
        self.from_prefill
    }

    /// The prompt as it stands in the body, quotes included, if it is one text.
    pub(crate) fn prompt(&self) -> Option<Bytes> {
        self.prompt.map(|span| self.body.slice(Range::from(span)))
    }

    /// What becomes of its prompt, as it stands in the body.
    pub fn prompt_parts(&self) -> PromptParts<'_> {
        self.spans.parts(&self.model, &self.body)
    }

    /// Whether a hand-off sent by the client is left out of both legs.
    pub fn is_stripped(&self) -> bool {
        self.stripped
    }

    /// The client's bytes as they came.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The body for the prefill engine: one token, no stream, nothing that ends it for another reason.
    ///
    /// `ignore_eos` is for engines that hand off only what ended by length.
    pub fn prefill_body(&self, ignore_eos: bool) -> Spliced {
        self.plan.prefill_body(&self.body, Changes { ignore_eos, ..self.changes() })
    }

    /// The body that makes a decode engine read `hand_off` (raw JSON) and forget it: one token, no stream.
    ///
    /// `salt`, which must need no JSON escape, keeps what is read out of other requests' prefix cache: the
    /// blocks may already hold something else.
    pub fn release_body(&self, hand_off: Bytes, salt: &str) -> Spliced {
        let changes = Changes { without: self.from_prefill, ..self.changes() };
        self.plan.release_body(&self.body, hand_off, salt, changes)
    }

    /// The body for the decode engine: the client's, with `hand_off` (raw JSON) added if there is one, and
    /// then without what only the prefill engine can answer.
    pub fn decode_body(&self, hand_off: Option<Bytes>) -> Spliced {
        let changes = Changes { without: self.from_prefill, ..self.changes() };
        self.plan.decode_body(&self.body, hand_off, changes)
    }
}

/// The model of a request, which may be missing.
fn named(model: Option<Option<Box<str>>>, endpoint: Endpoint) -> Result<Box<str>, BadRequest> {
    match model {
        // There the engines use what they serve.
        None if endpoint == Endpoint::Responses => Ok(Box::default()),
        None => Err(BadRequest::MissingModel),
        Some(None) => Err(BadRequest::WrongType { field: "model", expected: "a string" }),
        Some(Some(model)) => Ok(model),
    }
}

/// A text as JSON.
pub(crate) fn quoted(text: &str) -> Bytes {
    let mut quoted = Vec::with_capacity(text.len() + 2);
    push_string(&mut quoted, text);
    quoted.into()
}
