//! The answers of `/v1/responses` and `/v1/messages`: whole ones and the events of their streams, which have
//! names and no `[DONE]`.

use serde_json::{Map, Value, json};

use super::answer::Envelope;
use super::generate::EventStream;
use super::sequence::Sequence;

impl Envelope<'_> {
    fn text_item(&self, text: &str, status: &str) -> Value {
        json!({
            "id": format!("msg_{}", self.id), "role": "assistant", "status": status, "type": "message", "phase": null,
            "content": [{"annotations": [], "text": text, "type": "output_text", "logprobs": null}],
        })
    }

    /// A response object.
    pub(super) fn response(&self, sequences: &[Sequence], params: &Value) -> Value {
        let sequence = sequences.first();
        let reason = sequence.and_then(|sequence| sequence.ending.as_ref()).map(|ending| ending.reason);
        let status = match reason {
            None => "in_progress",
            Some("length") => "incomplete",
            Some(_) => "completed",
        };
        let (output, usage) = match sequence.filter(|_| reason.is_some()) {
            Some(sequence) => {
                (vec![self.text_item(&sequence.text, "completed")], self.response_usage(sequences))
            }
            None => (Vec::new(), Value::Null),
        };
        let incomplete =
            if status == "incomplete" { json!({"reason": "max_output_tokens"}) } else { Value::Null };
        json!({
            "id": self.id, "created_at": self.created, "incomplete_details": incomplete, "instructions": null,
            "metadata": null, "model": self.model(), "object": "response", "output": output,
            "parallel_tool_calls": true, "temperature": self.request.temperature, "tool_choice": "none",
            "tools": [], "top_p": 1.0, "background": false, "max_output_tokens": self.request.max_tokens,
            "max_tool_calls": null, "previous_response_id": null, "prompt": null, "reasoning": null,
            "service_tier": "auto", "status": status, "text": null, "top_logprobs": null,
            "truncation": "disabled", "usage": usage, "user": null, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "kv_transfer_params": params, "ec_transfer_params": null,
            "input_messages": null, "output_messages": null,
        })
    }

    fn response_usage(&self, sequences: &[Sequence]) -> Value {
        let (input, output) = self.counts(sequences);
        let cached = sequences.first().map_or(0, |sequence| sequence.cached_tokens);
        json!({
            "input_tokens": input,
            "input_tokens_details": {
                "cache_write_tokens": 0, "cached_tokens": cached, "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": output,
            "output_tokens_details": {
                "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": input + output,
        })
    }

    fn message_usage(&self, sequences: &[Sequence]) -> Value {
        let (input, output) = self.counts(sequences);
        let cached = sequences.first().map_or(0, |sequence| sequence.cached_tokens);
        let created = sequences.first().map_or(0, |sequence| sequence.created_tokens);
        let mut usage = Map::new();
        let fresh = input.saturating_sub(cached + created);
        usage.insert("input_tokens".to_owned(), fresh.into());
        usage.insert("output_tokens".to_owned(), output.into());
        if self.v14() {
            usage.insert("cache_creation_input_tokens".to_owned(), created.into());
        }
        usage.insert("cache_read_input_tokens".to_owned(), cached.into());
        usage.into()
    }

    /// A message; fields that are null are left out.
    pub(super) fn message_answer(&self, sequences: &[Sequence], params: &Value) -> Value {
        let sequence = sequences.first();
        let text = sequence.map_or("", |sequence| sequence.text.as_str());
        let mut map = Map::new();
        map.insert("id".to_owned(), self.id.into());
        map.insert("type".to_owned(), "message".into());
        map.insert("role".to_owned(), "assistant".into());
        map.insert("content".to_owned(), json!([{"type": "text", "text": text}]));
        map.insert("model".to_owned(), self.model().into());
        if let Some(sequence) = sequence {
            let (reason, stop) = stop_reason(sequence);
            map.insert("stop_reason".to_owned(), reason);
            if !stop.is_null() {
                map.insert("stop_sequence".to_owned(), stop);
            }
        }
        map.insert("usage".to_owned(), self.message_usage(sequences));
        if !params.is_null() {
            map.insert("kv_transfer_params".to_owned(), params.clone());
        }
        map.into()
    }
}

fn stop_reason(sequence: &Sequence) -> (Value, Value) {
    match &sequence.ending {
        Some(ending) if ending.reason == "length" => ("max_tokens".into(), Value::Null),
        Some(ending) if ending.stop_reason.is_string() => {
            ("stop_sequence".into(), ending.stop_reason.clone())
        }
        Some(_) => ("end_turn".into(), Value::Null),
        None => (Value::Null, Value::Null),
    }
}

impl EventStream {
    fn event(&mut self, name: &str, mut data: Value) {
        if self.job.request.endpoint == super::request::Endpoint::Responses {
            data["sequence_number"] = self.numbered.into();
            self.numbered += 1;
        }
        self.ready.push_back(format!("event: {name}\ndata: {data}\n\n"));
    }

    /// The next events of a response: it is announced before there is a token.
    pub(super) async fn advance_response(&mut self) {
        let item = |events: &Self, text: &str, status: &str| events.job.envelope().text_item(text, status);
        let text_of =
            |events: &Self| events.job.sequences.first().map_or(String::new(), |one| one.text.clone());
        if !std::mem::replace(&mut self.opened, true) {
            for name in ["response.created", "response.in_progress"] {
                let response = self.job.envelope().response(&self.job.sequences, &Value::Null);
                self.event(name, json!({"response": response, "type": name}));
            }
            return;
        }
        let Some((index, output)) = self.job.next_output().await else {
            let text = text_of(self);
            let done = json!({"content_index": 0, "output_index": 0, "text": text, "type": "response.output_text.done"});
            self.event("response.output_text.done", done);
            let done = json!({"item": item(self, &text, "completed"), "output_index": 0, "type": "response.output_item.done"});
            self.event("response.output_item.done", done);
            let params = self.job.handoff(&self.plan);
            let response = self.job.envelope().response(&self.job.sequences, &params);
            self.event("response.completed", json!({"response": response, "type": "response.completed"}));
            self.close();
            return;
        };
        let first = self.job.sequences.first().is_some_and(|sequence| sequence.tokens.is_empty());
        match self.job.take(index, output) {
            Ok(piece) => {
                if first {
                    let mut added = item(self, "", "in_progress");
                    added["content"] = json!([]);
                    let added =
                        json!({"item": added, "output_index": 0, "type": "response.output_item.added"});
                    self.event("response.output_item.added", added);
                }
                let delta = json!({
                    "content_index": 0, "delta": piece, "output_index": 0, "logprobs": [],
                    "type": "response.output_text.delta",
                });
                self.event("response.output_text.delta", delta);
            }
            Err(rejection) => {
                self.event("error", json!({"type": "error", "message": rejection.message, "param": null}));
                self.close();
            }
        }
    }

    /// The next events of a message.
    pub(super) async fn advance_message(&mut self) {
        let Some((index, output)) = self.job.next_output().await else {
            self.event("content_block_stop", json!({"type": "content_block_stop", "index": 0}));
            let usage = self.job.envelope().message_usage(&self.job.sequences);
            let (reason, stop) = self.job.sequences.first().map_or((Value::Null, Value::Null), stop_reason);
            let delta = json!({"stop_reason": reason, "stop_sequence": stop});
            self.event("message_delta", json!({"type": "message_delta", "delta": delta, "usage": usage}));
            self.event("message_stop", json!({"type": "message_stop"}));
            self.close();
            return;
        };
        if !std::mem::replace(&mut self.opened, true) {
            let (input, _) = self.job.envelope().counts(&[]);
            let mut message = self.job.envelope().message_answer(&[], &Value::Null);
            message["content"] = json!([]);
            message["usage"] = json!({"input_tokens": input, "output_tokens": 0});
            self.event("message_start", json!({"type": "message_start", "message": message}));
            let block = json!({"type": "text", "text": ""});
            self.event(
                "content_block_start",
                json!({"type": "content_block_start", "index": 0, "content_block": block}),
            );
        }
        match self.job.take(index, output) {
            Ok(piece) => {
                let delta = json!({"type": "text_delta", "text": piece});
                self.event(
                    "content_block_delta",
                    json!({"type": "content_block_delta", "index": 0, "delta": delta}),
                );
            }
            Err(rejection) => {
                let error = json!({"type": "internal_error", "message": rejection.message});
                self.event("error", json!({"type": "error", "error": error}));
                self.close();
            }
        }
    }
}
