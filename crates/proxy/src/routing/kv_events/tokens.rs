//! A prompt's tokens: its own where it is given so, else as an engine makes them, remembered for a while.

use std::collections::HashMap;
use std::sync::Arc;

use ahash::RandomState;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, StatusCode};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::time::timeout;

use crate::Core;
use crate::error::Stage;
use crate::pool::peer::Peer;
use crate::request::{ClientRequest, Endpoint};
use crate::request_id::RequestId;
use crate::splice::Spliced;
use crate::upstream::{Leg, own_headers};

/// Most bytes of an answer for each byte of the request, and for an empty one.
const ANSWER_RATIO: usize = 16;
const ANSWER_LEAST: usize = 4096;

/// The token ids of a prompt that is a list of them; the bracket that closes it is left out.
pub(super) fn given(open: &[u8]) -> Option<Vec<u32>> {
    let inside = open.strip_prefix(b"[")?.trim_ascii_start();
    let inside = match inside.strip_prefix(b"[") {
        Some(inner) => inner.trim_ascii_end().strip_suffix(b"]")?,
        None => inside,
    };
    let inside = std::str::from_utf8(inside).ok()?;
    inside.split(',').map(|number| number.trim().parse().ok()).collect()
}

/// The tokens of recent requests, in two generations.
#[derive(Debug)]
pub(super) struct Recent {
    keys: RandomState,
    generations: Mutex<[HashMap<u64, Arc<[u32]>>; 2]>,
}

impl Recent {
    pub(super) fn new(keys: RandomState) -> Self {
        Self { keys, generations: Mutex::default() }
    }

    fn get(&self, key: u64) -> Option<Arc<[u32]>> {
        let generations = self.generations.lock();
        generations.iter().find_map(|generation| generation.get(&key)).cloned()
    }

    fn insert(&self, key: u64, tokens: Arc<[u32]>, room: usize) {
        let mut generations = self.generations.lock();
        if generations[0].len() >= room / 2 {
            generations.swap(0, 1);
            generations[0].clear();
        }
        if room >= 2 {
            generations[0].insert(key, tokens);
        }
    }
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

impl Core {
    /// Has an engine make the tokens of a request's prompt.
    pub(super) async fn tokenized(&self, request: &ClientRequest, peer: &Peer) -> Option<Arc<[u32]>> {
        let settings = &self.settings().kv_events;
        let (endpoint, body) = (request.endpoint(), request.body());
        let is_known = matches!(endpoint, Endpoint::Completions | Endpoint::ChatCompletions);
        if !is_known || body.len() > settings.tokenize_bytes {
            return None;
        }
        let recent = &self.kv_events.recent;
        let key = recent.keys.hash_one((endpoint.path(), &body[..]));
        if let Some(tokens) = recent.get(key) {
            return Some(tokens);
        }
        let id = RequestId::accept(None);
        let mut headers = own_headers(&id);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let leg = Leg {
            stage: peer.spec.role.stage(),
            peer,
            method: Method::POST,
            path: "/tokenize",
            headers,
            body: Spliced::from(body.clone()),
        };
        let most = ANSWER_LEAST + body.len() * ANSWER_RATIO;
        let tokens = timeout(settings.tokenize_within, self.ask_for_tokens(leg, most)).await.ok()??;
        recent.insert(key, Arc::clone(&tokens), settings.recent_prompts);
        Some(tokens)
    }

    async fn ask_for_tokens(&self, leg: Leg<'_>, most: usize) -> Option<Arc<[u32]>> {
        let head = self.settings().kv_events.tokenize_within;
        let answer = self.upstream.send(leg, head).await.ok()?;
        if answer.status() != StatusCode::OK {
            return None;
        }
        let body = self.upstream.collect(Stage::Decode, answer.into_body(), most).await.ok()?;
        let answer: Tokenized = serde_json::from_slice(&body).ok()?;
        Some(answer.tokens.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_token_ids_are_read_as_they_stand() {
        for (open, tokens) in [
            ("[1, 2,3", Some(vec![1, 2, 3])),
            ("[ [7,8 ]", Some(vec![7, 8])),
            ("[4294967295", Some(vec![u32::MAX])),
            ("[1,\"a\"", None),
            ("[[1],[2]", None),
            ("[-1", None),
            ("[", None),
            ("\"text", None),
            ("[{\"role\":\"user\"}", None),
        ] {
            assert_eq!(given(open.as_bytes()), tokens, "{open}");
        }
    }

    #[test]
    fn recent_prompts_are_bounded() {
        let recent = Recent::new(RandomState::with_seeds(1, 2, 3, 4));
        for key in 0..100 {
            recent.insert(key, Arc::from([key as u32]), 10);
        }
        assert_eq!(recent.get(99).as_deref(), Some(&[99][..]));
        assert_eq!(recent.get(50), None);
        assert!(recent.generations.lock().iter().map(HashMap::len).sum::<usize>() <= 10);
    }
}
