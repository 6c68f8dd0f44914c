//! Golden files of the test suite.

use std::path::PathBuf;

use serde_json::Value;

fn fixture(path: &str) -> Vec<u8> {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(path);
    std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

pub(crate) fn vectors(name: &str) -> Value {
    serde_json::from_slice(&fixture(&format!("vectors/{name}"))).unwrap()
}

pub(crate) fn capture(name: &str) -> Vec<u8> {
    fixture(&format!("captures/{name}"))
}

pub(crate) fn unhex(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

pub(crate) fn strings(value: &Value) -> Vec<String> {
    list(value).iter().map(|item| item.as_str().unwrap().to_owned()).collect()
}

pub(crate) fn groups(value: &Value) -> Vec<Vec<u64>> {
    list(value).iter().map(|group| list(group).iter().map(|id| id.as_u64().unwrap()).collect()).collect()
}
