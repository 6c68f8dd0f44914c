//! Reading `/v1/responses` and `/v1/messages`: other names for the same request, with their own refusals.

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::reject::{Rejection, python_input};
use super::request::{Endpoint, GenerationRequest, Prompt, stop_strings, token_list};
use crate::tokens;

/// A request with one prompt and every other field at its default.
fn bare(endpoint: Endpoint, messages: &[Value], tools: Option<&Value>) -> GenerationRequest {
    let rendered = tokens::chat_template(messages, tools);
    GenerationRequest {
        endpoint,
        model: None,
        prompts: vec![Prompt { text: tokens::decode(&rendered), tokens: rendered }],
        n: 1,
        max_tokens: None,
        max_tokens_name: "max_tokens",
        min_tokens: 0,
        temperature: 1.0,
        seed: None,
        stop: Vec::new(),
        stop_token_ids: Vec::new(),
        include_stop: false,
        ignore_eos: false,
        echo: false,
        logprobs: None,
        prompt_logprobs: None,
        stream: false,
        include_usage: true,
        continuous_usage: false,
        return_token_ids: false,
        request_id: None,
        cache_salt: None,
        kv_transfer_params: None,
        structure: None,
        refusal: None,
    }
}

/// Reads a body of `/v1/responses`.
///
/// # Errors
/// The schema's refusal of the first thing that does not fit.
pub(super) fn response(fields: &Fields<'_>) -> Result<GenerationRequest, Rejection> {
    let mut messages = Vec::new();
    if let Some(instructions) = fields.text("instructions")? {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match fields.get("input") {
        None => return Err(fields.missing("input")),
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => messages.extend(items.iter().cloned()),
        Some(other) => return Err(wrong_type("input", "string_type", "a valid string", other)),
    }
    let background = fields.boolean("background")?.unwrap_or(false);
    let refusal = match fields.text("previous_response_id")? {
        // Nothing is ever stored.
        Some(id) => Some(Rejection::unknown_response(&id)),
        None if background => {
            Some(Rejection::bad_value("background mode needs a response store".to_owned(), None))
        }
        None => None,
    };
    fields.boolean("store")?;
    let tools = fields.get("tools").filter(|tools| tools.as_array().is_none_or(|list| !list.is_empty()));
    Ok(GenerationRequest {
        model: fields.text("model")?,
        max_tokens: fields.integer("max_output_tokens")?,
        max_tokens_name: "max_output_tokens",
        temperature: fields.number("temperature")?.unwrap_or(1.0),
        seed: fields.integer("seed")?,
        stop: stop_strings(fields)?,
        stop_token_ids: token_list(fields, "stop_token_ids")?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        stream: fields.boolean("stream")?.unwrap_or(false),
        request_id: fields.text("request_id")?,
        cache_salt: fields.text("cache_salt")?,
        kv_transfer_params: fields.object("kv_transfer_params")?.cloned(),
        refusal,
        ..bare(Endpoint::Responses, &messages, tools)
    })
}

/// Reads a body of `/v1/messages`.
///
/// # Errors
/// The schema's refusal of the first thing that does not fit.
pub(super) fn message(fields: &Fields<'_>) -> Result<GenerationRequest, Rejection> {
    let model = fields.text("model")?.ok_or_else(|| fields.missing("model"))?;
    let mut messages = Vec::new();
    match fields.get("system") {
        None => {}
        Some(system) => messages.push(json!({"role": "system", "content": system})),
    }
    match fields.get("messages") {
        None => return Err(fields.missing("messages")),
        Some(Value::Array(given)) => messages.extend(given.iter().cloned()),
        Some(other) => return Err(wrong_type("messages", "list_type", "a valid list", other)),
    }
    let max_tokens = fields.integer("max_tokens")?.ok_or_else(|| fields.missing("max_tokens"))?;
    let params = fields.object("kv_transfer_params")?.cloned();
    if max_tokens <= 0 {
        return Err(value_error("body.max_tokens", "Value error, max_tokens must be positive"));
    }
    // One token is too little for any thinking; what only prefills is not held to it.
    let prefills = params.as_ref().is_some_and(|params| is_on(params, "do_remote_decode"));
    let budget = fields.object("thinking")?.and_then(|thinking| thinking.get("budget_tokens"));
    if !prefills && budget.and_then(Value::as_i64).is_some_and(|budget| budget >= max_tokens) {
        return Err(value_error("body", "Value error, thinking.budget_tokens must be less than max_tokens"));
    }
    let stop = match fields.get("stop_sequences") {
        None => Vec::new(),
        Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        Some(other) => return Err(wrong_type("stop_sequences", "list_type", "a valid list", other)),
    };
    Ok(GenerationRequest {
        model: Some(model),
        max_tokens: Some(max_tokens),
        temperature: fields.number("temperature")?.unwrap_or(1.0),
        stop,
        stream: fields.boolean("stream")?.unwrap_or(false),
        cache_salt: fields.text("cache_salt")?,
        kv_transfer_params: params,
        ..bare(Endpoint::Messages, &messages, fields.get("tools"))
    })
}

fn is_on(params: &Map<String, Value>, flag: &str) -> bool {
    params.get(flag).and_then(Value::as_bool).unwrap_or(false)
}

fn wrong_type(name: &str, kind: &str, expected: &str, given: &Value) -> Rejection {
    let message = format!("Input should be {expected}");
    Rejection::schema_error(kind, &format!("body.{name}"), &message, &python_input(given), "")
}

fn value_error(location: &str, message: &str) -> Rejection {
    Rejection::schema_error("value_error", location, message, "'<dict>'", "")
}
