//! Reading a generation request: the schema with its refusals, then vLLM's own value checks.
//!
//! Schema refusals reach no handler and tell the prefill engine nothing; value refusals do.

use serde_json::{Map, Value};

use super::dialects;
use super::fields::{Fields, integer_error, not_a_string};
use super::reject::{Rejection, python_input};
use super::structure::Structure;
use crate::config::EngineConfig;
use crate::core::request::Sampling;
use crate::tokens::{self, Token};

/// The generation endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Completions,
    Chat,
    Responses,
    Messages,
}

/// One prompt, tokenised, with the text that `echo` repeats.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<Token>,
    pub(crate) text: String,
}

/// A request that passed the schema.
#[derive(Debug, Clone)]
pub(crate) struct GenerationRequest {
    pub(crate) endpoint: Endpoint,
    pub(crate) model: Option<String>,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) n: i64,
    pub(crate) max_tokens: Option<i64>,
    pub(crate) max_tokens_name: &'static str,
    pub(crate) min_tokens: i64,
    pub(crate) temperature: f64,
    pub(crate) seed: Option<i64>,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: Vec<Token>,
    pub(crate) include_stop: bool,
    pub(crate) ignore_eos: bool,
    pub(crate) echo: bool,
    /// Alternatives per token; `None` when log probabilities were not asked for.
    pub(crate) logprobs: Option<i64>,
    /// Alternatives per prompt token.
    pub(crate) prompt_logprobs: Option<i64>,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) return_token_ids: bool,
    pub(crate) request_id: Option<String>,
    pub(crate) cache_salt: Option<String>,
    pub(crate) kv_transfer_params: Option<Map<String, Value>>,
    /// What the output is bound to.
    pub(crate) structure: Option<Structure>,
    /// Why the handler refuses the request after it has found the model.
    pub(crate) refusal: Option<Rejection>,
}

/// Reads the JSON text.
///
/// # Errors
/// The schema's refusal of the first thing that does not fit.
pub(crate) fn parse(endpoint: Endpoint, body: &[u8]) -> Result<GenerationRequest, Rejection> {
    if body.is_empty() {
        return Err(Rejection::schema_error("missing", "body", "Field required", "'None'", ""));
    }
    let value: Value = serde_json::from_slice(body).map_err(|error| invalid_json(body, &error))?;
    let Value::Object(map) = value else {
        return Err(Rejection::schema_error(
            "model_attributes_type",
            "body",
            "Input should be a valid dictionary or object to extract fields from",
            &python_input(&value),
            "",
        ));
    };
    let fields = Fields { map: &map };
    match endpoint {
        Endpoint::Completions | Endpoint::Chat => {}
        Endpoint::Responses => return dialects::response(&fields),
        Endpoint::Messages => return dialects::message(&fields),
    }
    refuse_nulls(&fields, endpoint)?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let (include_usage, continuous_usage) = stream_options(&fields, stream)?;
    let prompts = match endpoint {
        Endpoint::Completions => completion_prompts(&fields)?,
        _ => vec![chat_prompt(&fields)?],
    };
    let logprobs = logprobs(&fields, endpoint)?;
    let (max_tokens, max_tokens_name) = output_limit(&fields, endpoint)?;
    let prompt_logprobs = prompt_logprobs(&fields, stream)?;
    Ok(GenerationRequest {
        endpoint,
        model: fields.text("model")?,
        prompts,
        n: fields.integer("n")?.unwrap_or(1),
        max_tokens,
        max_tokens_name,
        min_tokens: fields.integer("min_tokens")?.unwrap_or(0),
        temperature: fields.number("temperature")?.unwrap_or(1.0),
        seed: fields.integer("seed")?,
        stop: stop_strings(&fields)?,
        stop_token_ids: token_list(&fields, "stop_token_ids")?,
        include_stop: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        echo: fields.boolean("echo")?.unwrap_or(false),
        logprobs,
        prompt_logprobs,
        stream,
        include_usage,
        continuous_usage,
        return_token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
        request_id: fields.text("request_id")?,
        cache_salt: fields.text("cache_salt")?,
        kv_transfer_params: fields.object("kv_transfer_params")?.cloned(),
        structure: Structure::of(&fields, endpoint == Endpoint::Chat)?,
        refusal: None,
    })
}

/// Reads a `prompt` or `messages` as `/tokenize` takes them.
///
/// # Errors
/// The schema's refusal.
pub(crate) fn parse_tokenize(body: &[u8]) -> Result<Prompt, Rejection> {
    let map: Map<String, Value> = serde_json::from_slice(body).map_err(|error| invalid_json(body, &error))?;
    let fields = Fields { map: &map };
    if map.contains_key("messages") {
        return chat_prompt(&fields);
    }
    match fields.text("prompt")? {
        Some(text) => Ok(Prompt { tokens: tokens::encode(&text), text }),
        None => Err(fields.missing("prompt")),
    }
}

impl GenerationRequest {
    /// Whether log-probabilities of the prompt are wanted, in their own right or for the echo.
    pub(crate) fn reads_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs.is_some()
            || self.endpoint == Endpoint::Completions && self.echo && self.logprobs.is_some()
    }

    /// vLLM's checks inside the handler, in its order; gives one sampling record per prompt.
    ///
    /// # Errors
    /// The first check that fails.
    pub(crate) fn check(&self, config: &EngineConfig) -> Result<Vec<Sampling>, Rejection> {
        let (served, max_model_len) = (&config.model, config.max_model_len);
        let adapter = self.model.as_deref().filter(|asked| !asked.is_empty() && asked != served);
        if let Some(asked) = adapter.filter(|asked| !config.adapters.iter().any(|known| known == asked)) {
            return Err(Rejection::unknown_model(asked, served));
        }
        if let Some(refusal) = &self.refusal {
            return Err(refusal.clone());
        }
        let limit = i64::try_from(max_model_len).unwrap_or(i64::MAX);
        if let Some(asked) = self.max_tokens.filter(|asked| *asked > limit) {
            let name = self.max_tokens_name;
            let message = format!(
                "{name}={asked} cannot be greater than max_model_len={limit}. Please request fewer output tokens."
            );
            return Err(Rejection::bad_parameter(&message, name, Some(&asked.to_string())));
        }
        for prompt in &self.prompts {
            check_length(prompt, max_model_len)?;
        }
        let mut samplings: Vec<Sampling> =
            self.prompts.iter().map(|prompt| self.sampling(prompt, limit)).collect::<Result<_, _>>()?;
        // What one adapter computed is of no use to another.
        if let Some(adapter) = adapter {
            for sampling in &mut samplings {
                sampling.cache_salt = format!("{adapter}\0{}", sampling.cache_salt);
            }
        }
        Ok(samplings)
    }

    fn sampling(&self, prompt: &Prompt, limit: i64) -> Result<Sampling, Rejection> {
        let room = limit - i64::try_from(prompt.tokens.len()).unwrap_or(limit);
        let only_echo = self.echo && self.max_tokens == Some(0);
        let max_tokens = if only_echo { 1 } else { self.max_tokens.map_or(room, |asked| asked.min(room)) };
        if self.n < 1 {
            return Err(Rejection::bad_value(format!("n must be at least 1, got {}.", self.n), None));
        }
        if self.temperature < 0.0 {
            let value = self.temperature.to_string();
            let message = format!("temperature must be non-negative, got {value}.");
            return Err(Rejection::bad_parameter(&message, "temperature", Some(&value)));
        }
        if max_tokens < 1 {
            let message = format!("max_tokens must be at least 1, got {max_tokens}.");
            return Err(Rejection::bad_parameter(&message, "max_tokens", Some(&max_tokens.to_string())));
        }
        if self.min_tokens < 0 {
            let message = format!("min_tokens must be greater than or equal to 0, got {}.", self.min_tokens);
            return Err(Rejection::bad_value(message, None));
        }
        if self.min_tokens > max_tokens {
            let message = format!(
                "min_tokens must be less than or equal to max_tokens={max_tokens}, got {}.",
                self.min_tokens
            );
            return Err(Rejection::bad_value(message, None));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(Rejection::bad_value("stop cannot contain an empty string.".to_owned(), None));
        }
        let greedy = self.temperature < 1e-5;
        if greedy && self.n > 1 {
            let message = format!("n must be 1 when using greedy sampling, got {}.", self.n);
            return Err(Rejection::bad_value(message, None));
        }
        Ok(Sampling {
            max_tokens: usize::try_from(max_tokens).unwrap_or(1),
            min_tokens: usize::try_from(self.min_tokens).unwrap_or(0),
            stop_token_ids: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
            noise: if greedy { 0 } else { self.seed.unwrap_or(0).cast_unsigned() },
            cache_salt: self.cache_salt.clone().unwrap_or_default(),
            script: self
                .structure
                .as_ref()
                .map(|structure| structure.script.as_slice().into())
                .unwrap_or_default(),
        })
    }
}

fn check_length(prompt: &Prompt, max_model_len: usize) -> Result<(), Rejection> {
    let count = prompt.tokens.len();
    if count == 0 {
        return Err(Rejection::bad_value("The decoder prompt cannot be empty".to_owned(), None));
    }
    if count <= max_model_len {
        return Ok(());
    }
    // The tokenizer stops one token after the limit, so longer texts are not counted exactly.
    let count = max_model_len + 1;
    let message = format!(
        "This model's maximum context length is {max_model_len} tokens. However, your prompt contains \
         at least {count} input tokens, which exceeds this limit even without any output tokens. \
         Please reduce the length of the input prompt."
    );
    Err(Rejection::bad_parameter(&message, "input_tokens", Some(&count.to_string())))
}

/// Some fields have a default but no null.
fn refuse_nulls(fields: &Fields<'_>, endpoint: Endpoint) -> Result<(), Rejection> {
    let is_null = |name: &str| fields.map.get(name).is_some_and(Value::is_null);
    let mut integers = vec!["min_tokens"];
    let mut booleans = vec!["ignore_eos", "include_stop_str_in_output"];
    match endpoint {
        Endpoint::Completions => integers.push("n"),
        _ => booleans.push("echo"),
    }
    if let Some(name) = integers.into_iter().find(|name| is_null(name)) {
        return Err(integer_error(name, &Value::Null));
    }
    if let Some(name) = booleans.into_iter().find(|name| is_null(name)) {
        let location = format!("body.{name}");
        return Err(Rejection::schema_error(
            "bool_type",
            &location,
            "Input should be a valid boolean",
            "'None'",
            "",
        ));
    }
    if is_null("request_id") {
        return Err(not_a_string("request_id", &Value::Null));
    }
    Ok(())
}

fn invalid_json(body: &[u8], error: &serde_json::Error) -> Rejection {
    let before: usize =
        body.split(|byte| *byte == b'\n').take(error.line().saturating_sub(1)).map(|l| l.len() + 1).sum();
    // A text that ends too early is blamed on its end, anything else on the offending character.
    let position = if error.is_eof() { body.len() } else { before + error.column().saturating_sub(1) };
    Rejection::schema_error(
        "json_invalid",
        &format!("body.{position}"),
        "JSON decode error",
        "'<dict of 0 items>'",
        ", 'ctx': {'error': 'Expecting value'}",
    )
}

fn stream_options(fields: &Fields<'_>, stream: bool) -> Result<(bool, bool), Rejection> {
    let Some(options) = fields.object("stream_options")? else { return Ok((false, false)) };
    if !stream {
        return Err(Rejection::bad_parameter(
            "Stream options can only be defined when `stream=True`.",
            "stream_options",
            None,
        ));
    }
    let on = |name: &str| options.get(name).and_then(Value::as_bool).unwrap_or(false);
    let include = on("include_usage");
    Ok((include, include && on("continuous_usage_stats")))
}

fn output_limit(fields: &Fields<'_>, endpoint: Endpoint) -> Result<(Option<i64>, &'static str), Rejection> {
    let plain = fields.integer("max_tokens")?;
    if endpoint == Endpoint::Completions {
        return Ok((Some(plain.unwrap_or(16)), "max_tokens"));
    }
    match fields.integer("max_completion_tokens")? {
        Some(limit) => Ok((Some(limit), "max_completion_tokens")),
        None => Ok((plain, "max_completion_tokens")),
    }
}

fn prompt_logprobs(fields: &Fields<'_>, stream: bool) -> Result<Option<i64>, Rejection> {
    let wanted = fields.integer("prompt_logprobs")?;
    if stream && wanted.is_some_and(|count| count != 0) {
        let message = "`prompt_logprobs` are not available when `stream=True`.";
        return Err(Rejection::bad_parameter(message, "prompt_logprobs", None));
    }
    Ok(wanted)
}

fn logprobs(fields: &Fields<'_>, endpoint: Endpoint) -> Result<Option<i64>, Rejection> {
    if endpoint == Endpoint::Completions {
        return fields.integer("logprobs");
    }
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs")?.unwrap_or(0);
    if !wanted && top != 0 {
        return Err(Rejection::bad_parameter(
            "when using `top_logprobs`, `logprobs` must be set to true.",
            "top_logprobs",
            None,
        ));
    }
    Ok(wanted.then_some(top))
}

pub(super) fn stop_strings(fields: &Fields<'_>) -> Result<Vec<String>, Rejection> {
    match fields.get("stop") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text.clone()]),
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| item.as_str().map(str::to_owned).ok_or_else(|| not_a_string("stop", item)))
            .collect(),
        Some(other) => Err(not_a_string("stop", other)),
    }
}

pub(super) fn token_list(fields: &Fields<'_>, name: &str) -> Result<Vec<Token>, Rejection> {
    match fields.get(name) {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) => items.iter().map(|item| token_id(name, item)).collect(),
        Some(other) => Err(Rejection::schema_error(
            "list_type",
            &format!("body.{name}"),
            "Input should be a valid list",
            &python_input(other),
            "",
        )),
    }
}

fn token_id(name: &str, value: &Value) -> Result<Token, Rejection> {
    value.as_u64().and_then(|id| Token::try_from(id).ok()).ok_or_else(|| integer_error(name, value))
}

fn completion_prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, Rejection> {
    let empty = || {
        Rejection::bad_parameter(
            "Either prompt or prompt_embeds must be provided and non-empty.",
            "prompt",
            None,
        )
    };
    match fields.get("prompt") {
        None => Err(empty()),
        Some(Value::String(text)) if text.is_empty() => Err(empty()),
        Some(Value::String(text)) => Ok(vec![text_prompt(text)]),
        Some(Value::Array(items)) if items.is_empty() => {
            Err(Rejection::bad_value("The decoder prompt cannot be empty".to_owned(), None))
        }
        Some(Value::Array(items)) if items.iter().all(Value::is_number) => Ok(vec![id_prompt(items)?]),
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| match item {
                Value::String(text) => Ok(text_prompt(text)),
                Value::Array(ids) => id_prompt(ids),
                other => Err(not_a_string("prompt", other)),
            })
            .collect(),
        Some(other) => Err(not_a_string("prompt", other)),
    }
}

fn text_prompt(text: &str) -> Prompt {
    Prompt { tokens: tokens::encode(text), text: text.to_owned() }
}

fn id_prompt(items: &[Value]) -> Result<Prompt, Rejection> {
    let ids = items.iter().map(|item| token_id("prompt", item)).collect::<Result<Vec<_>, _>>()?;
    if let Some(id) = ids.iter().find(|id| **id >= tokens::VOCABULARY) {
        return Err(Rejection::bad_value(format!("Token id {id} is out of vocabulary"), None));
    }
    let text = tokens::decode(&ids);
    Ok(Prompt { tokens: ids, text })
}

fn chat_prompt(fields: &Fields<'_>) -> Result<Prompt, Rejection> {
    if fields.get("tools").and_then(Value::as_array).is_some_and(Vec::is_empty) {
        let message = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.";
        return Err(Rejection::bad_parameter(message, "tools", None));
    }
    match fields.get("messages") {
        None => Err(fields.missing("messages")),
        Some(Value::Array(messages)) => {
            if let Some(bad) =
                messages.iter().position(|message| !message.get("role").is_some_and(Value::is_string))
            {
                let location = format!("body.messages.{bad}.role");
                let input = python_input(&messages[bad]);
                return Err(Rejection::schema_error("missing", &location, "Field required", &input, ""));
            }
            let rendered = tokens::chat_template(messages, fields.get("tools"));
            Ok(Prompt { text: tokens::decode(&rendered), tokens: rendered })
        }
        Some(other) => Err(Rejection::schema_error(
            "list_type",
            "body.messages",
            "Input should be a valid list",
            &python_input(other),
            "",
        )),
    }
}
