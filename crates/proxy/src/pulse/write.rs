//! One frame's JSON, of which only what has changed stays.

use std::hash::{DefaultHasher, Hasher as _};

use serde::Serialize;

/// A frame that is being written.
pub(super) struct Frame {
    text: Vec<u8>,
    /// Where the list that is being written begins.
    list: usize,
    items: usize,
    changed: bool,
}

impl Frame {
    pub(super) fn new(now_ms: u64) -> Self {
        let text = format!("{{\"now_ms\":{now_ms}").into_bytes();
        Self { text, list: 0, items: 0, changed: false }
    }

    /// A member whose value is left out if it is what it was.
    pub(super) fn section(&mut self, name: &str, value: &impl Serialize, known: &mut u64) {
        let before = self.text.len();
        self.text.extend_from_slice(format!(",\"{name}\":").as_bytes());
        let hash = self.value(value);
        if hash == *known {
            return self.text.truncate(before);
        }
        *known = hash;
        self.changed = true;
    }

    pub(super) fn begin_list(&mut self, name: &str) {
        self.list = self.text.len();
        self.items = 0;
        self.text.extend_from_slice(format!(",\"{name}\":[").as_bytes());
    }

    /// An item of the list, left out if it is what it was; its hash.
    pub(super) fn item(&mut self, value: &impl Serialize, known: Option<&u64>) -> u64 {
        let before = self.text.len();
        if self.items > 0 {
            self.text.push(b',');
        }
        let hash = self.value(value);
        if known == Some(&hash) {
            self.text.truncate(before);
        } else {
            self.items += 1;
        }
        hash
    }

    pub(super) fn end_list(&mut self) {
        if self.items == 0 {
            return self.text.truncate(self.list);
        }
        self.text.push(b']');
        self.changed = true;
    }

    /// The frame, unless nothing has changed.
    pub(super) fn finish(mut self) -> Option<String> {
        self.text.push(b'}');
        String::from_utf8(self.text).ok().filter(|_| self.changed)
    }

    fn value(&mut self, value: &impl Serialize) -> u64 {
        let before = self.text.len();
        if let Err(error) = serde_json::to_writer(&mut self.text, value) {
            tracing::error!(%error, "a part of a frame cannot be written");
            self.text.truncate(before);
            self.text.extend_from_slice(b"null");
        }
        let mut hasher = DefaultHasher::new();
        hasher.write(&self.text[before..]);
        // Zero stands for nothing known.
        hasher.finish().max(1)
    }
}
