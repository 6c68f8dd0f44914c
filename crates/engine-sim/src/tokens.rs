//! The byte tokenizer and the chat template. One token is one byte; a few specials sit above 255.
//!
//! Prefill and decode engines must tokenise alike, so nothing here may depend on settings.

use serde_json::Value;

/// A token id: a byte, or one of the specials.
pub(crate) type Token = u32;

/// The end-of-sequence special.
pub(crate) const EOS: Token = 257;
const BOS: Token = 256;
const ROLE_SYSTEM: Token = 258;
const ROLE_USER: Token = 259;
const ROLE_ASSISTANT: Token = 260;
const ROLE_TOOL: Token = 261;
const ROLE_OTHER: Token = 262;
const END_OF_TURN: Token = 263;
/// The number of token ids.
pub(crate) const VOCABULARY: Token = 264;

/// The characters that generation draws from; none needs escaping in JSON.
const ALPHABET: &[u8; 64] = b" etaoinshrdlucmfwypvbgkjqxz/ETAOINSHRDLUCMFWYP0123456789.,;:-_()";

/// The printable token that 64 random bits select.
pub(crate) fn printable(entropy: u64) -> Token {
    let index = usize::try_from(entropy >> 58).unwrap_or(0);
    Token::from(ALPHABET[index])
}

/// Tokens of plain text.
pub(crate) fn encode(text: &str) -> Vec<Token> {
    text.bytes().map(Token::from).collect()
}

/// Text of tokens; specials decode to nothing and broken UTF-8 to replacement characters.
pub(crate) fn decode(tokens: &[Token]) -> String {
    let bytes: Vec<u8> = tokens.iter().filter_map(|token| u8::try_from(*token).ok()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The text of one token alone, as shown in log probabilities.
pub(crate) fn piece(token: Token) -> String {
    match u8::try_from(token) {
        Ok(byte) => String::from_utf8_lossy(&[byte]).into_owned(),
        Err(_) => special_name(token).to_owned(),
    }
}

fn special_name(token: Token) -> &'static str {
    match token {
        BOS => "<|bos|>",
        EOS => "<|eos|>",
        ROLE_SYSTEM => "<|system|>",
        ROLE_USER => "<|user|>",
        ROLE_ASSISTANT => "<|assistant|>",
        ROLE_TOOL => "<|tool|>",
        ROLE_OTHER => "<|role|>",
        END_OF_TURN => "<|end|>",
        _ => "<|unknown|>",
    }
}

/// Renders a conversation: one role marker, the content and an end marker per message, then the cue.
pub(crate) fn chat_template(messages: &[Value], tools: Option<&Value>) -> Vec<Token> {
    let mut tokens = vec![BOS];
    if let Some(tools) = tools {
        tokens.push(ROLE_TOOL);
        tokens.extend(encode(&tools.to_string()));
        tokens.push(END_OF_TURN);
    }
    for message in messages {
        let role = message.get("role").and_then(Value::as_str).unwrap_or("");
        match role {
            "system" | "developer" => tokens.push(ROLE_SYSTEM),
            "user" => tokens.push(ROLE_USER),
            "assistant" => tokens.push(ROLE_ASSISTANT),
            "tool" => tokens.push(ROLE_TOOL),
            other => {
                tokens.push(ROLE_OTHER);
                tokens.extend(encode(other));
            }
        }
        push_content(&mut tokens, message);
        tokens.push(END_OF_TURN);
    }
    tokens.push(ROLE_ASSISTANT);
    tokens
}

fn push_content(tokens: &mut Vec<Token>, message: &Value) {
    match message.get("content") {
        Some(Value::String(text)) => tokens.extend(encode(text)),
        Some(Value::Array(parts)) => {
            for part in parts {
                match part.get("text").and_then(Value::as_str) {
                    Some(text) => tokens.extend(encode(text)),
                    None => tokens.extend(encode(&part.to_string())),
                }
            }
        }
        _ => {}
    }
    if let Some(calls) = message.get("tool_calls") {
        tokens.extend(encode(&calls.to_string()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_survives_the_round_trip() {
        assert_eq!(decode(&encode("héllo")), "héllo");
        assert_eq!(decode(&[104, EOS, 105]), "hi");
    }

    #[test]
    fn template_separates_messages() {
        let one = chat_template(&[json!({"role":"user","content":"ab"})], None);
        let two = chat_template(
            &[json!({"role":"user","content":"a"}), json!({"role":"user","content":"b"})],
            None,
        );
        assert_eq!(one, vec![BOS, ROLE_USER, 97, 98, END_OF_TURN, ROLE_ASSISTANT]);
        assert_ne!(one, two);
    }

    #[test]
    fn content_parts_render_like_a_string() {
        let parts = json!({"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]});
        assert_eq!(
            chat_template(&[parts], None),
            chat_template(&[json!({"role":"user","content":"ab"})], None)
        );
    }

    #[test]
    fn every_selected_character_is_printable() {
        for top in 0..64_u64 {
            assert!((0x20..0x7f).contains(&printable(top << 58)));
        }
    }
}
