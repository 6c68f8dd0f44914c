//! The instance of a JSON schema that the simulated model writes: every property, the first of what can be
//! chosen, and strings whose insides the model fills in.

use serde_json::{Map, Value, json};

use super::Place;
use crate::http::reject::Rejection;
use crate::tokens::Token;

/// Length of a string that may have any.
const LENGTH: u64 = 8;

/// Deeper schemas are taken for endless ones.
const DEPTH: usize = 32;

/// Longest instance, in tokens.
const LONGEST: usize = 16 * 1024;

/// What can be done with a schema.
type Written = Result<(), Rejection>;

/// The script of an instance.
///
/// # Errors
/// The schema holds what cannot be followed here.
pub(super) fn of(schema: &Value) -> Result<Vec<Place>, Rejection> {
    let mut writer = Writer { root: schema, script: Vec::new() };
    writer.value(schema, 0)?;
    Ok(writer.script)
}

struct Writer<'a> {
    root: &'a Value,
    script: Vec<Place>,
}

fn unsupported() -> Rejection {
    let message = "The provided JSON schema contains features not supported by xgrammar.";
    Rejection::bad_value(message.to_owned(), None)
}

impl<'a> Writer<'a> {
    fn text(&mut self, text: &str) {
        self.script.extend(text.bytes().map(|byte| Some(Token::from(byte))));
    }

    /// A value that is given, in ASCII.
    fn given(&mut self, value: &Value) {
        for unit in value.to_string().encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => self.script.push(Some(Token::from(byte))),
                _ => self.text(&format!("\\u{unit:04x}")),
            }
        }
    }

    fn value(&mut self, schema: &'a Value, depth: usize) -> Written {
        if depth > DEPTH || self.script.len() > LONGEST {
            return Err(unsupported());
        }
        let schema = match schema {
            Value::Object(schema) => schema,
            Value::Bool(true) => {
                self.text("{}");
                return Ok(());
            }
            _ => return Err(unsupported()),
        };
        if let Some(reference) = schema.get("$ref") {
            let pointer = reference.as_str().and_then(|text| text.strip_prefix('#'));
            let target = pointer.and_then(|pointer| self.root.pointer(pointer)).ok_or_else(unsupported)?;
            return self.value(target, depth + 1);
        }
        if let Some(value) = schema.get("const") {
            self.given(value);
            return Ok(());
        }
        if let Some(values) = schema.get("enum") {
            self.given(values.get(0).ok_or_else(unsupported)?);
            return Ok(());
        }
        for choice in ["anyOf", "oneOf", "allOf"] {
            if let Some(options) = schema.get(choice) {
                return self.value(options.get(0).ok_or_else(unsupported)?, depth + 1);
            }
        }
        self.typed(schema, depth)
    }

    fn typed(&mut self, schema: &'a Map<String, Value>, depth: usize) -> Written {
        let implied = if schema.contains_key("items") { "array" } else { "object" };
        let kind = match schema.get("type") {
            None => implied,
            Some(Value::Array(kinds)) => kinds.first().and_then(Value::as_str).ok_or_else(unsupported)?,
            Some(kind) => kind.as_str().ok_or_else(unsupported)?,
        };
        match kind {
            "object" => self.object(schema, depth)?,
            "array" => {
                let count = schema.get("minItems").and_then(Value::as_u64).unwrap_or(1);
                let item = schema.get("items").unwrap_or(&Value::Bool(true));
                self.text("[");
                for position in 0..count {
                    if position > 0 {
                        self.text(", ");
                    }
                    self.value(item, depth + 1)?;
                }
                self.text("]");
            }
            "string" => self.string(schema)?,
            "integer" | "number" => self.number(schema),
            "boolean" => self.text("true"),
            "null" => self.text("null"),
            _ => return Err(unsupported()),
        }
        Ok(())
    }

    fn object(&mut self, schema: &'a Map<String, Value>, depth: usize) -> Written {
        let properties = schema.get("properties").and_then(Value::as_object);
        self.text("{");
        for (position, (name, property)) in properties.into_iter().flatten().enumerate() {
            if position > 0 {
                self.text(", ");
            }
            self.given(&json!(name));
            self.text(": ");
            self.value(property, depth + 1)?;
        }
        self.text("}");
        Ok(())
    }

    fn string(&mut self, schema: &Map<String, Value>) -> Written {
        if schema.contains_key("pattern") || schema.contains_key("format") {
            return Err(unsupported());
        }
        let bound = |name: &str| schema.get(name).and_then(Value::as_u64);
        let length = LENGTH.min(bound("maxLength").unwrap_or(LENGTH)).max(bound("minLength").unwrap_or(0));
        let length =
            usize::try_from(length).ok().filter(|length| *length <= LONGEST).ok_or_else(unsupported)?;
        self.text("\"");
        self.script.extend(std::iter::repeat_n(None, length));
        self.text("\"");
        Ok(())
    }

    fn number(&mut self, schema: &Map<String, Value>) {
        let bound = |name: &str| schema.get(name).filter(|bound| bound.is_number());
        let above = |bound: &Value| bound.as_i64().map_or_else(|| bound.clone(), |bound| json!(bound + 1));
        let below = |bound: &Value| bound.as_i64().map_or_else(|| bound.clone(), |bound| json!(bound - 1));
        let least = bound("minimum").cloned().or_else(|| bound("exclusiveMinimum").map(above));
        let most = || bound("maximum").cloned().or_else(|| bound("exclusiveMaximum").map(below));
        let value = least.or_else(most).unwrap_or_else(|| json!(7));
        self.given(&value);
    }
}
