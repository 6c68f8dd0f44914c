//! What the decisions on a request rest on: whether its hand-off can be shared, and what the prefill
//! engine has to answer itself.

use super::fields::{
    Field, asks_several_prompts, has_server_tools, is_falsish, is_one, is_zero, lax_bool, whole,
};
use super::plan::FromPrefill;
use super::prompt::PromptSpans;
use super::{BypassReason, Endpoint, Size};
use crate::json::{Kind, Member};
use crate::splice::Span;

/// What was seen of the body so far. Of duplicates the last counts, as in the engines' parser, except that
/// one unshareable occurrence is enough.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) model: Option<Option<Box<str>>>,
    /// Whom the client acts for, if that is a text.
    pub(super) user: Option<Span>,
    pub(super) stream: bool,
    pub(super) size: Size,
    /// The prompt if it is one text.
    pub(super) text: Option<Span>,
    pub(super) spans: PromptSpans,
    /// Bytes of all values that become the prompt.
    pub(super) prompt_bytes: usize,
    refused: Option<BypassReason>,
    prompt: bool,
    embeds: bool,
    echo: bool,
    logprobs: bool,
    prompt_logprobs: bool,
    token_ids: bool,
    no_output: bool,
    /// A field on which the prefill engine's part rests stands there twice.
    unclear: bool,
}

impl Seen {
    pub(super) fn note(&mut self, endpoint: Endpoint, field: Field, member: &Member<'_>) {
        let given = member.kind() != Kind::Null;
        if given {
            self.spans.note(field, member);
        }
        self.measure(field, member);
        if given && field.is_prompt() {
            self.prompt_bytes = self.prompt_bytes.saturating_add(member.value().len());
        }
        match field {
            Field::Model => self.model = Some(member.string().map(|model| model.into_owned().into())),
            Field::User => self.user = (member.kind() == Kind::String).then(|| member.value().into()),
            Field::Stream => self.stream = lax_bool(member) == Some(true),
            Field::N if given && !is_one(member) => self.refuse(BypassReason::N),
            Field::BestOf if given && !is_one(member) => self.refuse(BypassReason::BestOf),
            Field::UseBeamSearch if !is_falsish(member) => self.refuse(BypassReason::BeamSearch),
            // Cut to what the output leaves, and the legs' outputs differ: the blocks would be another prompt's.
            Field::TruncatePromptTokens if given => self.refuse(BypassReason::Truncation),
            _ => match endpoint {
                Endpoint::Completions => self.note_completion(field, member, given),
                Endpoint::ChatCompletions => self.note_chat(field, member, given),
                Endpoint::Responses => self.note_response(field, member, given),
                Endpoint::Messages => {}
            },
        }
    }

    /// Of limits that stand there twice the larger counts: another engine may read the other.
    fn measure(&mut self, field: Field, member: &Member<'_>) {
        let name = match field {
            Field::MaxTokens => "max_tokens",
            Field::MaxCompletionTokens => "max_completion_tokens",
            Field::MaxOutputTokens => "max_output_tokens",
            Field::Priority => return self.size.priority = whole(member),
            _ => return,
        };
        let asked = whole(member).and_then(|asked| u64::try_from(asked).ok());
        let most = self.size.max_tokens.map_or(0, |(_, most)| most);
        if let Some(asked) = asked.filter(|asked| *asked > most) {
            self.size.max_tokens = Some((name, asked));
        }
    }

    fn note_completion(&mut self, field: Field, member: &Member<'_>, given: bool) {
        match field {
            Field::Prompt if given => {
                self.prompt = true;
                self.text = (member.kind() == Kind::String).then(|| member.value().into());
                if asks_several_prompts(member) {
                    self.refuse(BypassReason::SeveralPrompts);
                }
            }
            Field::PromptEmbeds if given => {
                self.embeds = true;
                if asks_several_prompts(member) {
                    self.refuse(BypassReason::SeveralPrompts);
                }
            }
            Field::PromptLogprobs => self.note_prompt_logprobs(given),
            Field::Echo => {
                self.unclear |= self.echo;
                self.echo |= !is_falsish(member);
            }
            Field::Logprobs => {
                self.unclear |= self.logprobs;
                self.logprobs |= given;
            }
            Field::ReturnTokenIds => self.token_ids |= !is_falsish(member),
            Field::MaxTokens => self.no_output |= is_zero(member),
            _ => {}
        }
    }

    fn note_chat(&mut self, field: Field, member: &Member<'_>, given: bool) {
        match field {
            Field::PromptLogprobs => self.note_prompt_logprobs(given),
            // Here prompt log-probabilities come from `top_logprobs`, which is never null by default.
            Field::Echo if !is_falsish(member) => self.refuse(BypassReason::PromptLogprobs),
            _ => {}
        }
    }

    fn note_prompt_logprobs(&mut self, given: bool) {
        self.unclear |= self.prompt_logprobs;
        self.prompt_logprobs |= given;
    }

    fn note_response(&mut self, field: Field, member: &Member<'_>, given: bool) {
        match field {
            Field::Truncation if given && member.string().is_none_or(|how| how != "disabled") => {
                self.refuse(BypassReason::Truncation);
            }
            Field::PreviousResponseId if given => self.refuse(BypassReason::StoredResponse),
            Field::Background if !is_falsish(member) => self.refuse(BypassReason::Background),
            Field::Tools if has_server_tools(member) => self.refuse(BypassReason::ServerTools),
            _ => {}
        }
    }

    fn refuse(&mut self, reason: BypassReason) {
        self.refused.get_or_insert(reason);
    }

    /// Why one hand-off cannot serve, if so.
    pub(super) fn bypass(&self) -> Option<BypassReason> {
        // Embeddings come on top of a prompt, as one prompt more.
        let several = (self.prompt && self.embeds).then_some(BypassReason::SeveralPrompts);
        let echoed = self.echo && self.logprobs;
        let mergeable = self.text.is_some() && !self.token_ids && !self.no_output;
        let wanted = echoed || self.prompt_logprobs;
        let unmergeable = (echoed && !mergeable) || (wanted && (self.stream || self.unclear));
        self.refused.or(several).or(unmergeable.then_some(BypassReason::PromptLogprobs))
    }

    /// What the client is to get from the prefill engine's answer.
    pub(super) fn wanted_of_prefill(&self) -> FromPrefill {
        let echo = self.echo && self.logprobs;
        // The engines report them also where the echo asks for them.
        FromPrefill { prompt_logprobs: self.prompt_logprobs || echo, echo }
    }
}
