//! The counts of tokens that an engine's answer ends with, found without reading the rest of it.

use std::sync::LazyLock;

use kv_connector::json::{Kind, Member, Members};
use memchr::memmem::FinderRev;

/// A member's name: as a text inside of a JSON string its quotes would be escaped.
static NAME: LazyLock<FinderRev<'static>> = LazyLock::new(|| FinderRev::new("\"usage\""));

/// What an answer has said so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) prompt: Option<u64>,
    pub(super) output: Option<u64>,
}

impl Usage {
    /// Takes in the last counts of a piece of an answer, if it has any.
    pub(super) fn look_in(&mut self, piece: &[u8]) {
        let Some(at) = NAME.rfind(piece) else { return };
        let Some(value) = piece[at + NAME.needle().len()..].trim_ascii_start().strip_prefix(b":") else {
            return;
        };
        // The counts themselves are ASCII, whatever comes after them.
        let valid = std::str::from_utf8(value)
            .unwrap_or_else(|fault| std::str::from_utf8(&value[..fault.valid_up_to()]).unwrap_or_default());
        let Ok(members) = Members::beginning(valid) else { return };
        let (mut prompt, mut output, mut read) = (None, None, None);
        for member in members {
            let Ok(member) = member else { return };
            let slot = match member.raw_key() {
                "prompt_tokens" | "input_tokens" => &mut prompt,
                "completion_tokens" | "output_tokens" => &mut output,
                "cache_read_input_tokens" => &mut read,
                _ => continue,
            };
            let Ok(count) = count(&member) else { return };
            *slot = count;
        }
        let prompt: Option<u64> = prompt.map(|tokens: u64| tokens.saturating_add(read.unwrap_or(0)));
        self.prompt = prompt.or(self.prompt);
        self.output = output.or(self.output);
    }
}

/// A count, or none where there is `null`.
fn count(member: &Member<'_>) -> Result<Option<u64>, std::num::ParseIntError> {
    if member.kind() == Kind::Null { Ok(None) } else { member.raw_value().parse().map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pieces: &[&str]) -> (Option<u64>, Option<u64>) {
        let mut usage = Usage::default();
        pieces.iter().for_each(|piece| usage.look_in(piece.as_bytes()));
        (usage.prompt, usage.output)
    }

    #[test]
    fn the_counts_of_every_dialect_are_found() {
        let whole = r#"{"choices":[{"text":"\"usage\": {\"completion_tokens\":9}"}],"usage": {"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":1}},"x":1}"#;
        assert_eq!(found(&[whole]), (Some(7), Some(3)));
        let response = r#"data: {"response":{"usage":{"input_tokens":5,"output_tokens":2,"input_tokens_details":null}}}"#;
        assert_eq!(found(&[response]), (Some(5), Some(2)));
        let start = r#"data: {"message":{"usage":{"input_tokens":0,"output_tokens":0,"cache_read_input_tokens":10}}}"#;
        let end = r#"data: {"usage":{"output_tokens":8}}"#;
        assert_eq!(found(&[start, end]), (Some(10), Some(8)));
    }

    #[test]
    fn what_are_no_counts_says_nothing() {
        for piece in [
            "",
            r#"{"usage":null}"#,
            r#"{"usage":"#,
            r#"{"name":"usage"}"#,
            r#"{"usage":{"prompt_tokens":"many"}}"#,
            r#"{"usage":{"prompt_tokens":-1}}"#,
        ] {
            assert_eq!(found(&[piece]), (None, None), "{piece}");
        }
    }
}
