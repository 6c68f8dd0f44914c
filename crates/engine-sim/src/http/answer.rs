//! The bodies of answers: whole ones and stream events, in each version's field order.
//!
//! Pure rendering; what is said has been decided elsewhere.

use serde_json::{Map, Value, json};

use super::request::{Endpoint, GenerationRequest};
use super::sequence::{Sequence, chat_logprobs, completion_logprobs, prompt_entropies, prompt_logprobs};
use super::structure::Structure;
use crate::shared::Shared;
use crate::tokens;

/// What all bodies of one answer have in common.
pub(crate) struct Envelope<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) request: &'a GenerationRequest,
    pub(crate) id: &'a str,
    /// Unix time in seconds.
    pub(crate) created: u64,
}

impl Envelope<'_> {
    pub(super) fn v14(&self) -> bool {
        self.shared.config.is_v14()
    }

    fn is_chat(&self) -> bool {
        self.request.endpoint == Endpoint::Chat
    }

    fn choices_per_prompt(&self) -> usize {
        usize::try_from(self.request.n).unwrap_or(1).max(1)
    }

    /// The name by which the request called its model.
    pub(super) fn model(&self) -> &str {
        self.request.model.as_deref().filter(|model| !model.is_empty()).unwrap_or(&self.shared.config.model)
    }

    fn head(&self, object: &str) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".to_owned(), self.id.into());
        map.insert("object".to_owned(), object.into());
        map.insert("created".to_owned(), self.created.into());
        map.insert("model".to_owned(), self.model().into());
        map
    }

    /// The whole answer of a request that did not stream.
    pub(crate) fn whole(&self, sequences: &[Sequence], params: &Value) -> Value {
        match self.request.endpoint {
            Endpoint::Completions | Endpoint::Chat => {}
            Endpoint::Responses => return self.response(sequences, params),
            Endpoint::Messages => return self.message_answer(sequences, params),
        }
        let object = if self.is_chat() { "chat.completion" } else { "text_completion" };
        let mut map = self.head(object);
        let choices: Vec<Value> =
            sequences.iter().enumerate().map(|(index, sequence)| self.choice(index, sequence)).collect();
        map.insert("choices".to_owned(), choices.into());
        map.insert("service_tier".to_owned(), Value::Null);
        map.insert("system_fingerprint".to_owned(), self.shared.fingerprint.clone().into());
        map.insert("usage".to_owned(), self.usage(sequences));
        if self.is_chat() {
            map.insert("prompt_logprobs".to_owned(), self.prompt_logprobs(0));
            map.insert("prompt_token_ids".to_owned(), self.prompt_ids(0));
            if self.v14() {
                map.insert("prompt_text".to_owned(), Value::Null);
            }
        }
        map.insert("kv_transfer_params".to_owned(), params.clone());
        if self.v14() {
            map.insert("ec_transfer_params".to_owned(), Value::Null);
            map.insert("metrics".to_owned(), Value::Null);
        }
        Value::Object(map)
    }

    fn choice(&self, index: usize, sequence: &Sequence) -> Value {
        let (reason, stop_reason) = self.ending(sequence);
        let ids = self.token_ids(&sequence.tokens);
        if self.is_chat() {
            let logprobs = self
                .request
                .logprobs
                .map_or(Value::Null, |top| chat_logprobs(&sequence.tokens, &sequence.entropies, top));
            let mut choice = json!({
                "index": index, "message": self.message(sequence), "logprobs": logprobs,
                "finish_reason": reason, "stop_reason": stop_reason, "token_ids": ids,
            });
            if self.v14() {
                choice["routed_experts"] = Value::Null;
            }
            return choice;
        }
        let prompt = index / self.choices_per_prompt();
        let mut choice = json!({
            "index": index, "text": self.echoed(prompt, &sequence.text),
            "logprobs": self.whole_logprobs(prompt, sequence),
            "finish_reason": reason, "stop_reason": stop_reason, "token_ids": ids,
            "prompt_logprobs": self.prompt_logprobs(prompt), "prompt_token_ids": self.prompt_ids(prompt),
        });
        if self.v14() {
            choice["routed_experts"] = Value::Null;
        }
        choice
    }

    fn message(&self, sequence: &Sequence) -> Value {
        let structure = self.request.structure.as_ref();
        let calls = structure.map_or_else(Vec::new, |structure| structure.calls_in(&sequence.text, self.id));
        let content = if calls.is_empty() { Value::from(sequence.text.as_str()) } else { Value::Null };
        if self.v14() {
            let mut message = json!({
                "role": "assistant", "content": content, "refusal": null, "annotations": null,
                "audio": null, "function_call": null, "reasoning": null,
            });
            // Left out where there is none.
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            return message;
        }
        json!({
            "role": "assistant", "content": content, "refusal": null, "annotations": null, "audio": null,
            "function_call": null, "tool_calls": calls, "reasoning": null, "reasoning_content": null,
        })
    }

    fn ending(&self, sequence: &Sequence) -> (Value, Value) {
        let Some(ending) = &sequence.ending else { return (Value::Null, Value::Null) };
        let said = |structure: &Structure| structure.reason(ending.reason, sequence.text.len());
        let reason = self.request.structure.as_ref().map_or(ending.reason, said);
        (reason.into(), ending.stop_reason.clone())
    }

    fn echoed(&self, prompt: usize, text: &str) -> String {
        if !self.request.echo || self.request.return_token_ids {
            return text.to_owned();
        }
        let prompt_text = self.request.prompts.get(prompt).map_or("", |prompt| prompt.text.as_str());
        if self.only_echo() { prompt_text.to_owned() } else { format!("{prompt_text}{text}") }
    }

    /// True when nothing but the prompt is wanted back.
    pub(crate) fn only_echo(&self) -> bool {
        !self.is_chat() && self.request.echo && self.request.max_tokens == Some(0)
    }

    fn whole_logprobs(&self, prompt: usize, sequence: &Sequence) -> Value {
        let Some(top) = self.request.logprobs else { return Value::Null };
        let mut all_tokens = Vec::new();
        let mut entropies = Vec::new();
        if self.request.echo
            && let Some(prompt) = self.request.prompts.get(prompt)
        {
            all_tokens.extend(&prompt.tokens);
            entropies.extend(prompt_entropies(&prompt.tokens));
        }
        if !self.only_echo() {
            all_tokens.extend(&sequence.tokens);
            entropies.extend(sequence.entropies.iter().map(|entropy| Some(*entropy)));
        }
        completion_logprobs(&all_tokens, &entropies, top, 0)
    }

    /// The echo's log probabilities show here too, as far as they were asked for.
    fn prompt_logprobs(&self, prompt: usize) -> Value {
        if !self.request.reads_prompt_logprobs() {
            return Value::Null;
        }
        let top = self.request.prompt_logprobs.or(self.request.logprobs).unwrap_or(0);
        let prompt = self.request.prompts.get(prompt).map_or(&[][..], |prompt| &prompt.tokens);
        prompt_logprobs(prompt, top)
    }

    fn token_ids(&self, ids: &[tokens::Token]) -> Value {
        if self.request.return_token_ids { ids.into() } else { Value::Null }
    }

    fn prompt_ids(&self, prompt: usize) -> Value {
        self.request.prompts.get(prompt).map_or(Value::Null, |prompt| self.token_ids(&prompt.tokens))
    }

    pub(super) fn counts(&self, sequences: &[Sequence]) -> (usize, usize) {
        let prompt = self.request.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let completion = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        (prompt, completion)
    }

    fn usage(&self, sequences: &[Sequence]) -> Value {
        let (prompt, completion) = self.counts(sequences);
        let cached = sequences.last().map_or(0, |sequence| sequence.cached_tokens);
        let mut usage = plain_usage(prompt, completion);
        if self.v14() {
            let created = match sequences.last() {
                Some(sequence) if self.is_chat() => Value::from(sequence.created_tokens),
                _ => Value::Null,
            };
            usage["prompt_tokens_details"] =
                json!({"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": null});
            usage["completion_tokens_details"] = Value::Null;
        } else {
            usage["prompt_tokens_details"] = json!({ "cached_tokens": cached });
        }
        usage
    }

    /// The event that opens a chat stream for one choice.
    pub(crate) fn role_event(&self, index: usize) -> Value {
        let mut map = self.head("chat.completion.chunk");
        let choice = json!({
            "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null,
        });
        map.insert("choices".to_owned(), vec![choice].into());
        map.insert("prompt_token_ids".to_owned(), self.prompt_ids(0));
        if self.v14() {
            map.insert("prompt_text".to_owned(), Value::Null);
        }
        Value::Object(map)
    }

    /// One event of a stream: the text shown for the newest token of a choice.
    pub(crate) fn token_event(&self, index: usize, sequence: &Sequence, piece: &str, offset: usize) -> Value {
        let (reason, stop_reason) = self.ending(sequence);
        let newest = sequence.tokens.len().saturating_sub(1);
        let ids = self.token_ids(&sequence.tokens[newest..]);
        let finished = sequence.ending.is_some();
        let object = if self.is_chat() { "chat.completion.chunk" } else { "text_completion" };
        let mut map = self.head(object);
        let choice = if self.is_chat() {
            self.chat_delta(index, sequence, piece, reason, stop_reason, ids)
        } else {
            let first = newest == 0;
            let prompt = index / self.choices_per_prompt();
            let text = if first { self.echoed(prompt, piece) } else { piece.to_owned() };
            let prompt_ids = if first && (self.request.echo || self.request.return_token_ids) {
                self.request.prompts.get(prompt).map_or(Value::Null, |prompt| prompt.tokens.as_slice().into())
            } else {
                Value::Null
            };
            json!({
                "index": index, "text": text, "logprobs": self.delta_logprobs(prompt, sequence, offset),
                "finish_reason": reason, "stop_reason": stop_reason,
                "prompt_token_ids": prompt_ids, "token_ids": ids,
            })
        };
        map.insert("choices".to_owned(), vec![choice].into());
        if self.request.continuous_usage {
            let prompt = self.request.prompts.get(index / self.choices_per_prompt());
            let usage = plain_usage(prompt.map_or(0, |prompt| prompt.tokens.len()), sequence.tokens.len());
            map.insert("usage".to_owned(), usage);
        }
        if finished && !self.request.include_usage && self.shared.fingerprint.is_some() {
            map.insert("system_fingerprint".to_owned(), self.shared.fingerprint.clone().into());
        }
        Value::Object(map)
    }

    fn chat_delta(
        &self,
        index: usize,
        sequence: &Sequence,
        piece: &str,
        reason: Value,
        stop_reason: Value,
        ids: Value,
    ) -> Value {
        let newest = sequence.tokens.len().saturating_sub(1);
        let logprobs = self.request.logprobs.map_or(Value::Null, |top| {
            chat_logprobs(&sequence.tokens[newest..], &sequence.entropies[newest..], top)
        });
        let delta = match self.request.structure.as_ref().filter(|structure| !structure.calls.is_empty()) {
            None => json!({ "content": piece }),
            Some(structure) => match structure.deltas(piece, sequence.shown, self.id) {
                // What frames a call is shown to nobody.
                calls if calls.is_empty() => json!({}),
                calls => json!({ "tool_calls": calls }),
            },
        };
        let mut choice = json!({
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason,
        });
        if sequence.ending.is_some() {
            choice["stop_reason"] = stop_reason;
        }
        choice["token_ids"] = ids;
        choice
    }

    fn delta_logprobs(&self, prompt: usize, sequence: &Sequence, offset: usize) -> Value {
        let Some(top) = self.request.logprobs else { return Value::Null };
        let newest = sequence.tokens.len().saturating_sub(1);
        if newest == 0 && self.request.echo {
            return self.whole_logprobs(prompt, sequence);
        }
        let entropies: Vec<Option<u64>> =
            sequence.entropies[newest..].iter().map(|entropy| Some(*entropy)).collect();
        completion_logprobs(&sequence.tokens[newest..], &entropies, top, offset)
    }

    /// The last event of a stream that reports usage.
    pub(crate) fn usage_event(&self, sequences: &[Sequence]) -> Value {
        let object = if self.is_chat() { "chat.completion.chunk" } else { "text_completion" };
        let mut map = self.head(object);
        let (prompt, completion) = self.counts(sequences);
        let mut usage = plain_usage(prompt, completion);
        let first = sequences.first();
        let mut details = json!({ "cached_tokens": first.map_or(0, |sequence| sequence.cached_tokens) });
        if self.v14() && self.is_chat() {
            details["created_cache_tokens"] = first.map_or(0, |sequence| sequence.created_tokens).into();
        }
        usage["prompt_tokens_details"] = details;
        map.insert("choices".to_owned(), Value::Array(Vec::new()));
        map.insert("usage".to_owned(), usage);
        if self.shared.fingerprint.is_some() {
            map.insert("system_fingerprint".to_owned(), self.shared.fingerprint.clone().into());
        }
        Value::Object(map)
    }
}

fn plain_usage(prompt: usize, completion: usize) -> Value {
    json!({"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion})
}
