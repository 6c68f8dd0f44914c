//! What `response_format` and `tools` bind an answer to: a script of tokens in which only the insides of
//! strings are left to the model, and where in it the calls of tools stand.
//!
//! Everything in a script is ASCII, so that a position in it is a position in the answer's text.

mod instance;

use std::ops::Range;

use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::reject::Rejection;
use crate::tokens::Token;

/// One place of an answer: a token that is forced, or one that the model chooses.
pub(crate) type Place = Option<Token>;

/// A call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    pub(crate) name: String,
    /// Where its arguments stand in the text.
    pub(crate) arguments: Range<usize>,
    /// Where it ends.
    end: usize,
}

/// How an answer has to look.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Structure {
    pub(crate) script: Vec<Place>,
    pub(crate) calls: Vec<Call>,
    /// Whether the end of the answer is said to be a call; a tool that was asked for by name just stops.
    says_calls: bool,
}

/// Which tool a request wants.
enum Choice<'a> {
    None,
    Auto,
    Required,
    Named(&'a str),
}

impl Structure {
    /// The structure that the fields of a request ask for.
    ///
    /// # Errors
    /// The refusal of the first field that cannot be obeyed.
    pub(super) fn of(fields: &Fields<'_>, chat: bool) -> Result<Option<Self>, Rejection> {
        let format = response_format(fields)?;
        let tool = if chat { tool_call(fields)? } else { None };
        Ok(tool.or(format))
    }

    fn push(&mut self, text: &str) {
        self.script.extend(text.bytes().map(|byte| Some(Token::from(byte))));
    }

    fn call(
        tool: &Map<String, Value>,
        before: &str,
        after: &str,
        says_calls: bool,
    ) -> Result<Self, Rejection> {
        let name = tool.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        let mut structure = Self { says_calls, ..Self::default() };
        structure.push(before);
        let start = structure.script.len();
        let anything = json!({"type": "object"});
        let schema = tool.get("parameters").filter(|schema| !schema.is_null()).unwrap_or(&anything);
        structure.script.extend(instance::of(schema)?);
        let arguments = start..structure.script.len();
        structure.push(after);
        structure.calls.push(Call { name, arguments, end: structure.script.len() });
        Ok(structure)
    }

    /// The reason that is given for an end.
    pub(crate) fn reason(&self, reason: &'static str, length: usize) -> &'static str {
        let called = self.calls.iter().any(|call| call.end <= length);
        if called && self.says_calls && reason == "stop" { "tool_calls" } else { reason }
    }

    /// The calls that a whole text holds.
    pub(crate) fn calls_in(&self, text: &str, id: &str) -> Vec<Value> {
        let whole = |(index, call): (usize, &Call)| {
            let arguments = text.get(call.arguments.clone()).filter(|_| call.end <= text.len())?;
            Some(json!({
                "id": call_id(id, index), "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }))
        };
        self.calls.iter().enumerate().filter_map(whole).collect()
    }

    /// What a piece of the text, which ends at `end`, tells of calls.
    pub(crate) fn deltas(&self, piece: &str, end: usize, id: &str) -> Vec<Value> {
        let start = end.saturating_sub(piece.len());
        let mut deltas = Vec::new();
        for (index, call) in self.calls.iter().enumerate() {
            let inside = call.arguments.start.max(start)..call.arguments.end.min(end);
            if inside.is_empty() {
                continue;
            }
            let arguments = piece.get(inside.start - start..inside.end - start).unwrap_or_default();
            deltas.push(if inside.start == call.arguments.start {
                json!({
                    "id": call_id(id, index), "type": "function", "index": index,
                    "function": {"name": call.name, "arguments": arguments},
                })
            } else {
                json!({"index": index, "function": {"arguments": arguments}})
            });
        }
        deltas
    }
}

/// Ids of calls are random in vLLM; here they follow from the answer's id.
fn call_id(id: &str, index: usize) -> String {
    format!("call_{id}_{index}")
}

fn response_format(fields: &Fields<'_>) -> Result<Option<Structure>, Rejection> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    let script = match format.get("type").and_then(Value::as_str) {
        Some("text") => return Ok(None),
        Some("json_object") => {
            instance::of(&json!({"type": "object", "properties": {"answer": {"type": "string"}}}))?
        }
        Some("json_schema") => {
            let Some(given) = format.get("json_schema").filter(|given| !given.is_null()) else {
                let message =
                    "When response_format type is 'json_schema', the 'json_schema' field must be provided.";
                return Err(Rejection::bad_parameter(message, "response_format", None));
            };
            instance::of(given.get("schema").unwrap_or(&json!({"type": "object"})))?
        }
        _ => {
            let kind = format.get("type").cloned().unwrap_or_default();
            return Err(Rejection::schema_error(
                "literal_error",
                "body.response_format.type",
                "Input should be 'text', 'json_object', 'json_schema' or 'structural_tag'",
                &super::reject::python_input(&kind),
                "",
            ));
        }
    };
    Ok(Some(Structure { script, ..Structure::default() }))
}

fn tool_call(fields: &Fields<'_>) -> Result<Option<Structure>, Rejection> {
    let tools = tools(fields)?;
    let (tool, named) = match choice(fields, &tools)? {
        Choice::None => return Ok(None),
        // The simulated model asks its first tool, and answers once it has been told what the tool said.
        Choice::Auto if is_told(fields) => return Ok(None),
        Choice::Auto => {
            let Some(tool) = tools.first() else { return Ok(None) };
            let name = tool.get("name").and_then(Value::as_str).unwrap_or_default();
            let before = format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": ");
            return Structure::call(tool, &before, "}\n</tool_call>", true).map(Some);
        }
        Choice::Required => (tools.first(), false),
        Choice::Named(name) => {
            let is_meant =
                |tool: &&&Map<String, Value>| tool.get("name").and_then(Value::as_str) == Some(name);
            (tools.iter().find(is_meant), true)
        }
    };
    let Some(tool) = tool else {
        let message = "The tool specified in `tool_choice` does not match any of the specified `tools`";
        return Err(Rejection::bad_value(message.to_owned(), None));
    };
    if named {
        return Structure::call(tool, "", "", false).map(Some);
    }
    let name = tool.get("name").and_then(Value::as_str).unwrap_or_default();
    Structure::call(tool, &format!("[{{\"name\": \"{name}\", \"parameters\": "), "}]", true).map(Some)
}

/// The functions of the tools.
fn tools<'a>(fields: &Fields<'a>) -> Result<Vec<&'a Map<String, Value>>, Rejection> {
    let list = fields.get("tools").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let function = |(position, tool): (usize, &'a Value)| {
        let function = tool.get("function").and_then(Value::as_object);
        let legible = |name: &str| {
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
        };
        let named = |map: &&Map<String, Value>| map.get("name").and_then(Value::as_str).is_some_and(legible);
        function.filter(named).ok_or_else(|| {
            let location = format!("body.tools.{position}.function");
            let input = super::reject::python_input(tool);
            Rejection::schema_error("missing", &location, "Field required", &input, "")
        })
    };
    list.iter().enumerate().map(function).collect()
}

fn choice<'a>(fields: &Fields<'a>, tools: &[&Map<String, Value>]) -> Result<Choice<'a>, Rejection> {
    let refuse = |message: String| Err(Rejection::bad_value(message, None));
    let Some(given) = fields.get("tool_choice") else {
        return Ok(if tools.is_empty() { Choice::None } else { Choice::Auto });
    };
    if given == "none" {
        return Ok(Choice::None);
    }
    if tools.is_empty() {
        return refuse("When using `tool_choice`, `tools` must be set.".to_owned());
    }
    match given {
        Value::String(text) if text == "auto" => Ok(Choice::Auto),
        Value::String(text) if text == "required" => Ok(Choice::Required),
        Value::Object(map) => match map.get("function").and_then(|f| f.get("name")).and_then(Value::as_str) {
            Some(name) => Ok(Choice::Named(name)),
            None => refuse(
                "Expected field `name` in `function` in `tool_choice`! Correct usage: \
                     `{\"type\": \"function\", \"function\": {\"name\": \"my_function\"}}`"
                    .to_owned(),
            ),
        },
        other => {
            let said = other.as_str().map_or_else(|| other.to_string(), str::to_owned);
            refuse(format!(
                "Invalid value for `tool_choice`: {said}! Only named tools, \"none\", \"auto\" or \"required\" \
                 are supported."
            ))
        }
    }
}

/// Whether the conversation ends in what a tool said.
fn is_told(fields: &Fields<'_>) -> bool {
    let last = fields.get("messages").and_then(Value::as_array).and_then(|list| list.last());
    last.is_some_and(|message| message["role"] == "tool")
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILL: Token = b'x' as Token;

    fn structure(body: &Value) -> Result<Option<Structure>, Rejection> {
        Structure::of(&Fields { map: body.as_object().unwrap() }, true)
    }

    fn text(structure: &Structure) -> String {
        crate::tokens::decode(&structure.script.iter().map(|place| place.unwrap_or(FILL)).collect::<Vec<_>>())
    }

    fn tools() -> Value {
        let schema = json!({
            "type": "object", "required": ["city"],
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}, "days": {"type": "integer", "minimum": 9}},
        });
        json!([{"type": "function", "function": {"name": "weather", "parameters": schema}}])
    }

    #[test]
    fn a_call_is_found_in_the_whole_text_and_in_its_pieces() {
        for (choice, said) in [
            (json!("auto"), "tool_calls"),
            (json!("required"), "tool_calls"),
            (json!({"type": "function", "function": {"name": "weather"}}), "stop"),
        ] {
            let body = json!({"tools": tools(), "tool_choice": choice, "messages": [{"role": "user"}]});
            let structure = structure(&body).unwrap().unwrap();
            let text = text(&structure);
            let calls = structure.calls_in(&text, "a");
            assert_eq!(calls.len(), 1, "{text}");
            let arguments: Value =
                serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
            assert_eq!(arguments, json!({"city": "xxxxxxxx", "unit": "c", "days": 9}));
            assert_eq!(structure.reason("stop", text.len()), said);
            assert_eq!(structure.reason("length", text.len()), "length");
            assert!(structure.calls_in(&text[..text.len() - 1], "a").is_empty() || said == "stop");
            for width in [1, 7, text.len()] {
                let mut pieces = String::new();
                let mut heads = 0;
                let mut at = 0;
                while at < text.len() {
                    let end = (at + width).min(text.len());
                    for delta in structure.deltas(&text[at..end], end, "a") {
                        heads += usize::from(delta.get("id") == Some(&calls[0]["id"]));
                        pieces.push_str(delta["function"]["arguments"].as_str().unwrap());
                    }
                    at = end;
                }
                assert_eq!((heads, serde_json::from_str::<Value>(&pieces).unwrap()), (1, arguments.clone()));
            }
        }
    }

    #[test]
    fn a_tool_is_asked_once() {
        let told = json!([{"role": "user"}, {"role": "assistant"}, {"role": "tool"}]);
        assert_eq!(structure(&json!({"tools": tools(), "messages": told})).unwrap(), None);
        assert_eq!(structure(&json!({"tools": tools(), "tool_choice": "none"})).unwrap(), None);
        assert_eq!(structure(&json!({})).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_obeyed_is_refused() {
        for (body, message) in [
            (json!({"tool_choice": "auto"}), "When using `tool_choice`, `tools` must be set."),
            (json!({"tools": tools(), "tool_choice": "any"}), "Invalid value for `tool_choice`: any!"),
            (json!({"tools": tools(), "tool_choice": {"function": {"name": "x"}}}), "does not match any"),
            (json!({"response_format": {"type": "json_schema"}}), "'json_schema' field must be provided"),
            (json!({"response_format": {"type": "xml"}}), "Input should be 'text', 'json_object'"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "a"}}}}),
                "not supported by xgrammar",
            ),
        ] {
            let refusal = structure(&body).unwrap_err();
            assert!(refusal.message.contains(message), "{body}: {}", refusal.message);
        }
    }

    #[test]
    fn json_mode_is_json() {
        let structure = structure(&json!({"response_format": {"type": "json_object"}})).unwrap().unwrap();
        assert_eq!(serde_json::from_str::<Value>(&text(&structure)).unwrap(), json!({"answer": "xxxxxxxx"}));
        assert_eq!(structure.reason("stop", 99), "stop");
    }
}
