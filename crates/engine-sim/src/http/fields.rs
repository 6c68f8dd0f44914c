//! Typed access to the fields of a request body, with the schema's refusals.
//!
//! It knows JSON types and Python's coercions, and no endpoint.

use serde_json::{Map, Value};

use super::reject::{Rejection, python_input};

/// Typed access to the fields of a body; JSON null counts as absent.
pub(super) struct Fields<'a> {
    pub(super) map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn missing(&self, name: &str) -> Rejection {
        let input = format!("'<dict of {} items>'", self.map.len());
        Rejection::schema_error("missing", &format!("body.{name}"), "Field required", &input, "")
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<String>, Rejection> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => Err(not_a_string(name, other)),
        }
    }

    pub(super) fn boolean(&self, name: &str) -> Result<Option<bool>, Rejection> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(Value::Number(number)) if number.as_u64() == Some(0) => Ok(Some(false)),
            Some(Value::Number(number)) if number.as_u64() == Some(1) => Ok(Some(true)),
            Some(Value::String(text)) if text == "true" || text == "True" => Ok(Some(true)),
            Some(Value::String(text)) if text == "false" || text == "False" => Ok(Some(false)),
            Some(other) => Err(Rejection::schema_error(
                "bool_parsing",
                &format!("body.{name}"),
                "Input should be a valid boolean, unable to interpret input",
                &python_input(other),
                "",
            )),
        }
    }

    pub(super) fn integer(&self, name: &str) -> Result<Option<i64>, Rejection> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let parsed = match value {
            Value::Number(number) => number.as_i64().or_else(|| whole(number.as_f64()?)),
            Value::String(text) => text.trim().parse().ok(),
            Value::Bool(flag) => Some(i64::from(*flag)),
            _ => None,
        };
        parsed.map(Some).ok_or_else(|| integer_error(name, value))
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, Rejection> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let parsed = match value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => text.trim().parse().ok(),
            _ => None,
        };
        parsed.map(Some).ok_or_else(|| {
            Rejection::schema_error(
                "float_parsing",
                &format!("body.{name}"),
                "Input should be a valid number, unable to parse string as a number",
                &python_input(value),
                "",
            )
        })
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, Rejection> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(Rejection::schema_error(
                "dict_type",
                &format!("body.{name}"),
                "Input should be a valid dictionary",
                &python_input(other),
                "",
            )),
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the value is whole and in range")]
fn whole(number: f64) -> Option<i64> {
    (number.fract() == 0.0 && number.abs() < 9.0e15).then_some(number as i64)
}

/// A value that must be a string and is not.
pub(super) fn not_a_string(name: &str, value: &Value) -> Rejection {
    Rejection::schema_error(
        "string_type",
        &format!("body.{name}"),
        "Input should be a valid string",
        &python_input(value),
        "",
    )
}

/// A value that must be an integer and is not.
pub(super) fn integer_error(name: &str, value: &Value) -> Rejection {
    let (kind, message) = match value {
        Value::String(_) => {
            ("int_parsing", "Input should be a valid integer, unable to parse string as an integer")
        }
        Value::Number(_) => {
            ("int_from_float", "Input should be a valid integer, got a number with a fractional part")
        }
        _ => ("int_type", "Input should be a valid integer"),
    };
    Rejection::schema_error(kind, &format!("body.{name}"), message, &python_input(value), "")
}
