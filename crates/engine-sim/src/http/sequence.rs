//! One choice of an answer as it grows: text, stop strings, and what may be shown already.
//!
//! Stop strings are matched here and not in the core, as vLLM does: the core may have finished
//! for another reason by then.

use kv_connector::protocol::KvTransferParams;
use serde_json::{Value, json};

use crate::core::request::{FinishReason, Generated};
use crate::kv::mix;
use crate::tokens::{self, Token};

/// How a choice ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ending {
    pub(crate) reason: &'static str,
    pub(crate) stop_reason: Value,
}

/// What a choice needs to know of its request.
#[derive(Debug, Clone)]
pub(crate) struct SequenceRules {
    pub(crate) stop: Vec<String>,
    pub(crate) include_stop: bool,
    pub(crate) min_tokens: usize,
}

/// One choice.
pub(crate) struct Sequence {
    rules: SequenceRules,
    pub(crate) tokens: Vec<Token>,
    pub(crate) entropies: Vec<u64>,
    pub(crate) text: String,
    pub(crate) shown: usize,
    pub(crate) ending: Option<Ending>,
    pub(crate) params: Option<KvTransferParams>,
    pub(crate) cached_tokens: usize,
    pub(crate) created_tokens: usize,
}

impl Sequence {
    pub(crate) fn new(rules: SequenceRules) -> Self {
        Self {
            rules,
            tokens: Vec::new(),
            entropies: Vec::new(),
            text: String::new(),
            shown: 0,
            ending: None,
            params: None,
            cached_tokens: 0,
            created_tokens: 0,
        }
    }

    /// Takes one token in and returns the text that may be shown now.
    pub(crate) fn push(&mut self, generated: Generated) -> String {
        self.cached_tokens = generated.cached_tokens;
        self.created_tokens = generated.created_tokens;
        self.tokens.push(generated.token);
        self.entropies.push(generated.entropy);
        let stop_token = match &generated.finish {
            Some(finish) => matches!(finish.reason, FinishReason::Stop(Some(_))),
            None => false,
        };
        if !stop_token || self.rules.include_stop {
            self.text.push_str(&tokens::decode(&[generated.token]));
        }
        if let Some(finish) = generated.finish {
            self.params = finish.params;
            self.ending = Some(match finish.reason {
                FinishReason::Length => Ending { reason: "length", stop_reason: Value::Null },
                FinishReason::Stop(token) => {
                    Ending { reason: "stop", stop_reason: token.map_or(Value::Null, Value::from) }
                }
            });
        }
        self.match_stop_strings();
        let end = if self.ending.is_some() {
            self.text.len()
        } else {
            self.text.len().saturating_sub(self.held_back())
        };
        let piece = self.text.get(self.shown..end).unwrap_or_default().to_owned();
        self.shown = self.shown.max(end);
        piece
    }

    fn held_back(&self) -> usize {
        if self.rules.include_stop {
            return 0;
        }
        self.rules.stop.iter().map(|stop| stop.len().saturating_sub(1)).max().unwrap_or(0)
    }

    fn match_stop_strings(&mut self) {
        if self.tokens.len() <= self.rules.min_tokens {
            return;
        }
        let found = self
            .rules
            .stop
            .iter()
            .filter_map(|stop| self.text.find(stop.as_str()).map(|at| (at, stop)))
            .min_by_key(|(at, _)| *at);
        let Some((at, stop)) = found else { return };
        let keep = if self.rules.include_stop { at + stop.len() } else { at };
        self.ending = Some(Ending { reason: "stop", stop_reason: Value::from(stop.as_str()) });
        self.text.truncate(keep.max(self.shown));
    }
}

/// The log probability shown for a token that these random bits chose.
pub(crate) fn logprob(entropy: u64) -> f64 {
    let thousandths = u32::try_from(mix(entropy) % 700).unwrap_or(0);
    -(f64::from(thousandths) + 1.0) / 1000.0
}

/// The chosen token and its alternatives, best first, `count` in all but at least one.
pub(crate) fn candidates(token: Token, entropy: u64, count: i64) -> Vec<(Token, f64)> {
    let best = logprob(entropy);
    let mut all = vec![(token, best)];
    let mut step = 1_u32;
    while i64::try_from(all.len()).unwrap_or(i64::MAX) < count && step < 64 {
        let other = tokens::printable(entropy.wrapping_add(u64::from(step) << 58));
        if other != token {
            all.push((other, best - 0.25 * f64::from(step)));
        }
        step += 1;
    }
    all
}

/// Stand-in entropies for prompt tokens, for `echo` with log probabilities.
pub(crate) fn prompt_entropies(prompt: &[Token]) -> Vec<Option<u64>> {
    let mut state = 0;
    prompt
        .iter()
        .enumerate()
        .map(|(index, token)| {
            state = mix(state ^ u64::from(*token));
            (index > 0).then_some(state)
        })
        .collect()
}

/// Log probabilities of a prompt: none for its first token, then the token's own and its alternatives.
pub(crate) fn prompt_logprobs(prompt: &[Token], top: i64) -> Value {
    let entropies = prompt_entropies(prompt);
    let of_token = |(token, entropy): (&Token, &Option<u64>)| match entropy {
        None => Value::Null,
        Some(entropy) => {
            let ranked = (1..).zip(candidates(*token, *entropy, top));
            let entry = |(rank, (token, value)): (u32, (Token, f64))| {
                let said = json!({"logprob": value, "rank": rank, "decoded_token": tokens::piece(token)});
                (token.to_string(), said)
            };
            ranked.map(entry).collect()
        }
    };
    prompt.iter().zip(&entropies).map(of_token).collect()
}

/// Log probabilities in the completions endpoint's shape.
pub(crate) fn completion_logprobs(
    tokens: &[Token],
    entropies: &[Option<u64>],
    top: i64,
    offset: usize,
) -> Value {
    let pieces: Vec<String> = tokens.iter().map(|token| tokens::piece(*token)).collect();
    let mut offsets = Vec::with_capacity(pieces.len());
    let mut at = offset;
    for piece in &pieces {
        offsets.push(at);
        at += piece.len();
    }
    let values: Vec<Option<f64>> = entropies.iter().map(|entropy| entropy.map(logprob)).collect();
    let tops: Vec<Value> = tokens
        .iter()
        .zip(entropies)
        .map(|(token, entropy)| match entropy {
            None => Value::Null,
            Some(entropy) => candidates(*token, *entropy, top)
                .into_iter()
                .map(|(token, value)| (tokens::piece(token), Value::from(value)))
                .collect(),
        })
        .collect();
    json!({"text_offset": offsets, "token_logprobs": values, "tokens": pieces, "top_logprobs": tops})
}

/// Log probabilities in the chat endpoint's shape.
pub(crate) fn chat_logprobs(tokens: &[Token], entropies: &[u64], top: i64) -> Value {
    let entry = |token: Token, value: f64| {
        let piece = tokens::piece(token);
        json!({"token": piece, "logprob": value, "bytes": piece.as_bytes()})
    };
    let content: Vec<Value> = tokens
        .iter()
        .zip(entropies)
        .map(|(token, entropy)| {
            let mut main = entry(*token, logprob(*entropy));
            let tops: Vec<Value> = if top > 0 {
                candidates(*token, *entropy, top)
                    .into_iter()
                    .map(|(token, value)| entry(token, value))
                    .collect()
            } else {
                Vec::new()
            };
            main["top_logprobs"] = Value::from(tops);
            main
        })
        .collect();
    json!({ "content": content })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::request::Finish;

    fn sequence(stop: &[&str], min_tokens: usize) -> Sequence {
        Sequence::new(SequenceRules {
            stop: stop.iter().map(|s| (*s).to_owned()).collect(),
            include_stop: false,
            min_tokens,
        })
    }

    fn token(byte: u8) -> Generated {
        Generated { token: byte.into(), entropy: 0, cached_tokens: 0, created_tokens: 0, finish: None }
    }

    #[test]
    fn text_that_may_be_a_stop_string_is_held_back() {
        let mut one = sequence(&["xyz"], 0);
        let shown: Vec<String> = b"abxyz".iter().map(|byte| one.push(token(*byte))).collect();
        assert_eq!(shown.concat(), "ab");
        assert_eq!(one.text, "ab");
        assert_eq!(one.ending, Some(Ending { reason: "stop", stop_reason: "xyz".into() }));
        assert_eq!(one.tokens.len(), 5);
    }

    #[test]
    fn stop_string_waits_for_the_minimum() {
        let mut one = sequence(&["a"], 2);
        one.push(token(b'a'));
        assert_eq!(one.ending, None);
    }

    #[test]
    fn finish_shows_everything() {
        let mut one = sequence(&["xyz"], 0);
        one.push(token(b'x'));
        let mut last = token(b'y');
        last.finish = Some(Finish { reason: FinishReason::Length, params: None });
        assert_eq!(one.push(last), "xy");
    }

    #[test]
    fn alternatives_are_distinct() {
        let all = candidates(u32::from(b'e'), 1 << 58, 5);
        let mut pieces: Vec<Token> = all.iter().map(|(token, _)| *token).collect();
        pieces.sort_unstable();
        pieces.dedup();
        assert_eq!(pieces.len(), 5);
        assert!(all.windows(2).all(|pair| pair[0].1 > pair[1].1));
    }
}
