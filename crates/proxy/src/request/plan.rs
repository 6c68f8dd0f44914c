//! The edits that turn the client's body into the body of each leg.

use bytes::Bytes;
use kv_connector::protocol::params::prefill_request_params;

use super::fields::Field;
use super::injected::cuts_inside;
use super::{BadRequest, Endpoint, InjectedHandOff};
use crate::json::{Member, is_blank, members};
use crate::splice::{Removals, Span, Spliced, Splicer};

/// The most edits that one leg may need; only a body that repeats fields by the hundred needs more.
pub const MAX_EDITS: usize = 1024;

const HAND_OFF: &str = "kv_transfer_params";
const HAND_OFF_KEY: &[u8] = br#","kv_transfer_params":"#;
const MODEL_KEY: &[u8] = br#","model":"#;

/// What takes the place of an edited span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fill {
    Nothing,
    One,
    False,
    /// Applied only where EOS must not end the prefill.
    TrueToIgnoreEos,
    /// Applied only where blocks are read and the prefill engine has answered this.
    NullPromptLogprobs,
    FalseEcho,
    /// Applied only where the engines have another name for the model.
    Model,
}

/// How a body is changed beside what its leg always changes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Changes<'a> {
    /// EOS must not end the prefill.
    pub(super) ignore_eos: bool,
    /// The blocks are read, and the prefill engine has answered this.
    pub(super) without: FromPrefill,
    /// The engines' name for the model (raw JSON), where it is another one.
    pub(super) model: Option<&'a Bytes>,
}

/// What the client gets from the prefill engine's answer, because a decode engine cannot say it of a prompt
/// whose blocks it has pulled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FromPrefill {
    /// The log-probabilities of the prompt's tokens.
    pub prompt_logprobs: bool,
    /// The echoed prompt with its log-probabilities, before what was generated.
    pub echo: bool,
}

impl FromPrefill {
    /// Nothing of it.
    pub const NOTHING: Self = Self { prompt_logprobs: false, echo: false };

    /// Whether anything is to be taken.
    pub fn any(self) -> bool {
        self.prompt_logprobs || self.echo
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Edit {
    span: Span,
    fill: Fill,
}

/// The edits of one leg in the order of the body.
#[derive(Clone, Debug, Default)]
struct Leg {
    edits: Vec<Edit>,
    removals: Removals,
}

impl Leg {
    fn cut(&mut self, spans: impl IntoIterator<Item = Span>) {
        self.edits.extend(spans.into_iter().map(|span| Edit { span, fill: Fill::Nothing }));
    }

    fn keep(&mut self, member: &Member<'_>) {
        let cut = self.removals.keep(member.span());
        self.cut(cut);
    }

    fn fill(&mut self, member: &Member<'_>, fill: Fill) {
        self.keep(member);
        self.edits.push(Edit { span: member.value().into(), fill });
    }

    fn remove(&mut self, member: &Member<'_>) {
        self.removals.remove(member.span());
    }

    fn finish(&mut self) -> Result<(), BadRequest> {
        let cut = self.removals.finish();
        self.cut(cut);
        self.check()
    }

    fn applied_to<'a>(&self, body: &'a Bytes, changes: Changes<'_>) -> Splicer<'a> {
        let Changes { ignore_eos, without, model } = changes;
        let mut splicer = Splicer::new(body);
        for edit in &self.edits {
            let with: &[u8] = match edit.fill {
                Fill::Model => match model {
                    Some(model) => model,
                    None => continue,
                },
                Fill::Nothing => b"",
                Fill::One => b"1",
                Fill::False => b"false",
                Fill::TrueToIgnoreEos if ignore_eos => b"true",
                Fill::NullPromptLogprobs if without.prompt_logprobs => b"null",
                Fill::FalseEcho if without.echo => b"false",
                Fill::TrueToIgnoreEos | Fill::NullPromptLogprobs | Fill::FalseEcho => continue,
            };
            splicer.replace(edit.span.into(), with);
        }
        splicer
    }

    fn check(&self) -> Result<(), BadRequest> {
        if self.edits.len() > MAX_EDITS {
            return Err(BadRequest::TooManyEdits { limit: MAX_EDITS });
        }
        Ok(())
    }
}

/// Both legs' edits of one body.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    endpoint: Endpoint,
    prefill: Leg,
    decode: Leg,
    /// Where the last member ends, and new ones are added.
    end: usize,
    max_tokens: bool,
    max_completion_tokens: bool,
    max_output_tokens: bool,
    store: bool,
    ignore_eos: bool,
    injected: Option<&'static str>,
    model: bool,
}

impl Plan {
    pub(super) fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            prefill: Leg::default(),
            decode: Leg::default(),
            end: 0,
            max_tokens: false,
            max_completion_tokens: false,
            max_output_tokens: false,
            store: false,
            ignore_eos: false,
            injected: None,
            model: false,
        }
    }

    /// Plans for the next member of the body; `field` is none where the router doesn't know it.
    pub(super) fn note(&mut self, field: Option<Field>, member: &Member<'_>) -> Result<(), BadRequest> {
        self.end = member.value().end;
        match field {
            Some(Field::HandOff) => {
                if !is_blank(member.kind(), member.raw_value()) {
                    self.injected.get_or_insert(HAND_OFF);
                }
                self.prefill.remove(member);
                self.decode.remove(member);
                return Ok(());
            }
            Some(Field::Extra(place)) => return self.note_extra(place, member),
            Some(Field::Model) => {
                self.model = true;
                self.prefill.fill(member, Fill::Model);
                self.decode.fill(member, Fill::Model);
                return self.prefill.check();
            }
            Some(Field::PromptLogprobs) if self.has_prompt_logprobs() => {
                self.prefill.fill(member, Fill::NullPromptLogprobs);
                self.decode.fill(member, Fill::NullPromptLogprobs);
                return self.prefill.check();
            }
            Some(Field::Echo) if self.endpoint == Endpoint::Completions => {
                self.prefill.fill(member, Fill::FalseEcho);
                self.decode.fill(member, Fill::FalseEcho);
                return self.prefill.check();
            }
            _ => self.decode.keep(member),
        }
        match field {
            Some(Field::Stream) => self.prefill.fill(member, Fill::False),
            Some(Field::MaxTokens) => {
                self.max_tokens = true;
                self.prefill.fill(member, Fill::One);
            }
            Some(Field::MaxCompletionTokens) => {
                self.max_completion_tokens = true;
                self.prefill.fill(member, Fill::One);
            }
            Some(Field::MaxOutputTokens) => {
                self.max_output_tokens = true;
                self.prefill.fill(member, Fill::One);
            }
            // Nobody will ever ask for the prefill engine's one token.
            Some(Field::Store) if self.endpoint == Endpoint::Responses => {
                self.store = true;
                self.prefill.fill(member, Fill::False);
            }
            Some(Field::IgnoreEos) => {
                self.ignore_eos = true;
                self.prefill.fill(member, Fill::TrueToIgnoreEos);
            }
            Some(
                Field::StreamOptions
                | Field::MinTokens
                | Field::MinCompletionTokens
                | Field::Stop
                | Field::StopTokenIds
                | Field::StopSequences,
            ) => self.prefill.remove(member),
            _ => self.prefill.keep(member),
        }
        self.prefill.check()
    }

    fn has_prompt_logprobs(&self) -> bool {
        matches!(self.endpoint, Endpoint::Completions | Endpoint::ChatCompletions)
    }

    fn note_extra(&mut self, place: &'static str, member: &Member<'_>) -> Result<(), BadRequest> {
        self.prefill.keep(member);
        self.decode.keep(member);
        let cuts = cuts_inside(member)?;
        if !cuts.is_empty() {
            self.injected.get_or_insert(place);
            self.prefill.cut(cuts.iter().copied());
            self.decode.cut(cuts);
        }
        self.prefill.check()
    }

    /// The body has no more members.
    pub(super) fn finish(&mut self) -> Result<(), BadRequest> {
        self.prefill.finish()?;
        self.decode.finish()
    }

    /// The top-level field in which the client sent a hand-off of its own.
    pub(super) fn injected(&self) -> Option<&'static str> {
        self.injected
    }

    /// Whether the body has no members.
    pub(super) fn is_empty(&self) -> bool {
        self.end == 0
    }

    pub(super) fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    pub(super) fn prefill_body(&self, body: &Bytes, changes: Changes<'_>) -> Spliced {
        let mut splicer = self.one_token(body, changes);
        splicer.insert_static(self.end, HAND_OFF_KEY);
        splicer.insert_static(self.end, prefill_request_params());
        splicer.finish()
    }

    /// One token with a hand-off: reads the blocks and frees them. The salt comes last, and of
    /// duplicates the engines' parser takes the last.
    pub(super) fn release_body(
        &self,
        body: &Bytes,
        hand_off: Bytes,
        salt: &str,
        changes: Changes<'_>,
    ) -> Spliced {
        let mut splicer = self.one_token(body, changes);
        splicer.insert_static(self.end, HAND_OFF_KEY);
        splicer.insert(self.end, hand_off);
        splicer.insert(self.end, Bytes::from(format!(r#","cache_salt":"{salt}""#)));
        splicer.finish()
    }

    pub(super) fn decode_body(
        &self,
        body: &Bytes,
        hand_off: Option<Bytes>,
        mut changes: Changes<'_>,
    ) -> Spliced {
        let only_model = self.decode.edits.iter().all(|edit| edit.fill == Fill::Model);
        if only_model && hand_off.is_none() && changes.model.is_none() {
            return Spliced::from(body.clone());
        }
        if hand_off.is_none() {
            changes.without = FromPrefill::NOTHING;
        }
        let mut splicer = self.decode.applied_to(body, changes);
        self.name_model(&mut splicer, changes.model);
        if let Some(hand_off) = hand_off {
            splicer.insert_static(self.end, HAND_OFF_KEY);
            splicer.insert(self.end, hand_off);
        }
        splicer.finish()
    }

    /// Names the model in a body that names none.
    fn name_model(&self, splicer: &mut Splicer<'_>, model: Option<&Bytes>) {
        if let Some(model) = model.filter(|_| !self.model) {
            splicer.insert_static(self.end, MODEL_KEY);
            splicer.insert(self.end, model.clone());
        }
    }

    fn one_token<'a>(&self, body: &'a Bytes, changes: Changes<'_>) -> Splicer<'a> {
        let ignore_eos = changes.ignore_eos;
        let mut splicer = self.prefill.applied_to(body, changes);
        self.name_model(&mut splicer, changes.model);
        let limit: Option<&'static [u8]> = match self.endpoint {
            // This endpoint's engines know no other spelling.
            Endpoint::Completions if self.max_tokens => None,
            Endpoint::ChatCompletions if self.max_tokens || self.max_completion_tokens => None,
            Endpoint::Completions | Endpoint::ChatCompletions => Some(br#","max_tokens":1"#),
            Endpoint::Responses => (!self.max_output_tokens).then_some(br#","max_output_tokens":1"#),
            // The engines demand it: without one they refuse the request.
            Endpoint::Messages => None,
        };
        if let Some(limit) = limit {
            splicer.insert_static(self.end, limit);
        }
        if self.endpoint == Endpoint::Responses && !self.store {
            splicer.insert_static(self.end, br#","store":false"#);
        }
        if ignore_eos && !self.ignore_eos {
            splicer.insert_static(self.end, br#","ignore_eos":true"#);
        }
        splicer
    }
}

/// The body for an endpoint without a prefill leg: the client's, less a hand-off of its own.
///
/// A body that no engine could read as a JSON object passes unchanged.
///
/// # Errors
/// When policy refuses a hand-off that the body holds, or when an engine might read the body although it
/// is not strict JSON, so that nobody can tell what it holds.
pub fn pass_through_body(body: Bytes, on_injected: InjectedHandOff) -> Result<Spliced, BadRequest> {
    pass_through_as(body, on_injected, None)
}

/// As [`pass_through_body`], with the engines' name for the model (raw JSON) wherever the body names one.
pub(crate) fn pass_through_as(
    body: Bytes,
    on_injected: InjectedHandOff,
    model: Option<&Bytes>,
) -> Result<Spliced, BadRequest> {
    if !may_be_an_object(&body) {
        return Ok(Spliced::from(body));
    }
    let mut leg = Leg::default();
    let mut injected = None;
    for member in members(&body)? {
        let member = member?;
        match Field::of(&member) {
            Some(Field::HandOff) if !is_blank(member.kind(), member.raw_value()) => {
                injected.get_or_insert(HAND_OFF);
                leg.remove(&member);
            }
            Some(Field::Extra(place)) => {
                leg.keep(&member);
                let cuts = cuts_inside(&member)?;
                if !cuts.is_empty() {
                    injected.get_or_insert(place);
                    leg.cut(cuts);
                }
            }
            Some(Field::Model) if model.is_some() => leg.fill(&member, Fill::Model),
            _ => leg.keep(&member),
        }
        leg.check()?;
    }
    leg.finish()?;
    match (injected, on_injected) {
        (None, _) if model.is_none() => Ok(Spliced::from(body)),
        (Some(place), InjectedHandOff::Refuse) => Err(BadRequest::InjectedHandOff { place }),
        (None, _) | (Some(_), InjectedHandOff::Strip) => {
            Ok(leg.applied_to(&body, Changes { model, ..Changes::default() }).finish())
        }
    }
}

/// Whether some engine's JSON parser may find an object here; Python's also knows UTF-16, UTF-32 and a
/// byte order mark.
fn may_be_an_object(body: &[u8]) -> bool {
    let start = body.trim_ascii_start();
    matches!(start, [b'{' | 0, ..] | [0xEF, 0xBB, 0xBF, ..] | [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..])
}
