use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const MODEL: &str = "m";

fn tree(entries: usize, chunk_bytes: usize) -> PrefixTree {
    PrefixTree::new(PrefixSettings { entries, chunk_bytes, chunks: 512 })
}

fn cut(tree: &PrefixTree, text: &str) -> Chunks {
    tree.chunks_of(&PromptParts::of_text(MODEL, None, text.as_bytes()))
}

/// Remembers every prompt whole.
#[derive(Default)]
struct Naive(HashMap<PeerKey, Vec<String>>);

impl Naive {
    fn seen(&self, peer: PeerKey, prompt: &str, chunk: usize) -> u64 {
        let common = |other: &String| {
            let alike = other.bytes().zip(prompt.bytes()).take_while(|(a, b)| a == b).count();
            (alike / chunk * chunk) as u64
        };
        self.0.get(&peer).into_iter().flatten().map(common).max().unwrap_or(0)
    }
}

#[derive(Clone, Debug)]
enum Step {
    Record(u32, String),
    Forget(u32),
    Look(String),
}

fn step() -> impl Strategy<Value = Step> {
    let prompt = || "[ab]{0,40}";
    prop_oneof![
        6 => (0..6_u32, prompt()).prop_map(|(peer, prompt)| Step::Record(peer, prompt)),
        1 => (0..6_u32).prop_map(Step::Forget),
        6 => prompt().prop_map(Step::Look),
    ]
}

proptest! {
    /// While there is room the tree knows what a list of all prompts knows, to the chunk.
    #[test]
    fn it_agrees_with_a_list_of_all_prompts(steps in proptest::collection::vec(step(), 1..80), chunk in 1..5_usize) {
        let (tree, mut naive) = (tree(100_000, chunk), Naive::default());
        for step in steps {
            match step {
                Step::Record(peer, prompt) => {
                    tree.record(&cut(&tree, &prompt), PeerKey(peer));
                    naive.0.entry(PeerKey(peer)).or_default().push(prompt);
                }
                Step::Forget(peer) => {
                    tree.forget(PeerKey(peer));
                    naive.0.remove(&PeerKey(peer));
                }
                Step::Look(prompt) => {
                    let matched = tree.matched(&cut(&tree, &prompt));
                    for peer in (0..6).map(PeerKey) {
                        prop_assert_eq!(matched.of(peer), naive.seen(peer, &prompt, chunk));
                    }
                    let seen: Vec<u64> = matched.peers().map(|(_, bytes)| bytes).collect();
                    prop_assert!(seen.is_sorted_by(|a, b| a >= b) && seen.iter().all(|bytes| *bytes > 0));
                }
            }
        }
    }

    /// Where there is no room it forgets, but never claims what was not there, and stays within its bound.
    #[test]
    fn without_room_it_only_forgets(
        prompts in proptest::collection::vec((0..30_u32, "[ab]{0,40}"), 1..120), entries in 2..60_usize,
    ) {
        let (tree, mut naive) = (tree(entries, 2), Naive::default());
        for (peer, prompt) in prompts {
            let chunks = cut(&tree, &prompt);
            let matched = tree.matched(&chunks);
            prop_assert!(matched.peers().count() <= MAX_MATCHES);
            for (peer, bytes) in matched.peers() {
                prop_assert!(bytes <= naive.seen(peer, &prompt, 2));
            }
            tree.record(&chunks, PeerKey(peer));
            naive.0.entry(PeerKey(peer)).or_default().push(prompt);
            prop_assert!(tree.entries() <= entries);
        }
    }

    /// Wherever a prompt is cut in two, its beginning's chunks are the first of its own.
    #[test]
    fn a_longer_prompt_extends_a_shorter_one(length in 0..20_000_usize, longer in 0..20_000_usize) {
        let tree = tree(100, 8);
        let text: String = ('a'..='z').cycle().take(length + longer).collect();
        let (short, long) = (cut(&tree, &text[..length]), cut(&tree, &text));
        prop_assert_eq!(&long.0[..short.len()], &short.0[..]);
        prop_assert!(short.bytes() <= length as u64 && short.len() <= 512);
        // No coarser than one chunk of 64 of those before it.
        prop_assert!((length as u64) < short.bytes() + 8 + short.bytes() / 32);
    }
}

#[test]
fn nothing_is_shared_between_salts_models_and_tools() {
    let tree = tree(1000, 4);
    let text = b"the same text for all".as_slice();
    let of = |model, salt: Option<&'static str>| {
        tree.chunks_of(&PromptParts::of_text(model, salt.map(str::as_bytes), text))
    };
    tree.record(&of("m", Some("\"a\"")), PeerKey(1));
    assert_eq!(tree.matched(&of("m", Some("\"a\""))).of(PeerKey(1)), 20);
    for other in [of("m", None), of("m", Some("\"b\"")), of("n", Some("\"a\""))] {
        assert_eq!(tree.matched(&other), Matched::default());
    }
}

#[test]
fn keys_differ_from_tree_to_tree() {
    let hashes = |tree: &PrefixTree| cut(tree, "some prompt of a client").0;
    assert_ne!(hashes(&tree(100, 4)), hashes(&tree(100, 4)));
}

#[test]
fn a_peer_holds_no_more_than_its_cache() {
    let (tree, peer) = (tree(100_000, 10), PeerKey(3));
    tree.set_capacity(peer, Some(1000));
    let prompt = |number: usize| cut(&tree, &format!("{number:03}").repeat(40));
    for number in 0..50 {
        tree.record(&prompt(number), peer);
    }
    assert_eq!(tree.matched(&prompt(49)).of(peer), 120);
    assert_eq!(tree.matched(&prompt(43)).of(peer), 120, "within the last 1000 bytes");
    assert_eq!(tree.matched(&prompt(30)).of(peer), 0);
    // Of the one that is just being lost the beginning stays longest.
    let partly = tree.matched(&prompt(41)).of(peer);
    assert!(partly > 0 && partly < 120, "{partly}");
    // What is used stays.
    for number in 50..90 {
        tree.record(&prompt(49), peer);
        tree.record(&prompt(number), peer);
    }
    assert_eq!(tree.matched(&prompt(49)).of(peer), 120);
    tree.set_capacity(peer, None);
    assert_eq!(tree.matched(&prompt(0)).of(peer), 120);
}

#[test]
fn of_many_peers_those_that_have_seen_most_are_named() {
    let tree = tree(100_000, 4);
    let text = "abcdefghijklmnopqrstuvwxyz".repeat(8);
    for peer in 0..100_u32 {
        let length = 4 + 2 * peer as usize;
        tree.record(&cut(&tree, &text[..length]), PeerKey(peer));
    }
    let matched: Vec<_> = tree.matched(&cut(&tree, &text)).peers().collect();
    assert_eq!(matched.len(), MAX_MATCHES);
    assert!(matched.iter().all(|(peer, _)| peer.0 >= 84), "{matched:?}");
}

#[test]
fn threads_share_it() {
    let tree = tree(5_000, 4);
    std::thread::scope(|scope| {
        for thread in 0..8_u32 {
            let tree = &tree;
            scope.spawn(move || {
                for number in 0..2_000_u32 {
                    let chunks =
                        cut(tree, &format!("a system prompt for all; {thread} asks {}", number % 100));
                    let _ = tree.matched(&chunks);
                    tree.record(&chunks, PeerKey(thread % 3));
                    if number == 1000 {
                        tree.forget(PeerKey(2));
                    }
                }
            });
        }
    });
    assert!(tree.entries() <= 5_000);
    assert_eq!(tree.matched(&cut(&tree, "a system prompt for all; ")).peers().count(), 3);
}

#[test]
fn requests_of_one_conversation_share_its_beginning() {
    use crate::request::{ClientRequest, Endpoint, InjectedHandOff};
    let tree = tree(1000, 16);
    let chunks = |body: &str| {
        let body = bytes::Bytes::copy_from_slice(body.as_bytes());
        let request = ClientRequest::parse(Endpoint::ChatCompletions, body, InjectedHandOff::Refuse).unwrap();
        tree.chunks_of(&request.prompt_parts())
    };
    let turns =
        r#"{"role":"user","content":"Hello, who are you?"},{"role":"assistant","content":"A model."}"#;
    let first = chunks(&format!(r#"{{"model":"m","messages":[{turns}],"temperature":0}}"#));
    tree.record(&first, PeerKey(1));
    let more = r#"{"role":"user","content":"And then?"}"#;
    let second = chunks(&format!(r#"{{"temperature":1,"messages":[{turns},{more}],"model":"m"}}"#));
    assert_eq!(tree.matched(&second).of(PeerKey(1)), first.bytes());
    assert!(first.bytes() as usize > turns.len() - 16);
    for other in [
        format!(r#"{{"model":"m","cache_salt":"x","messages":[{turns}]}}"#),
        format!(r#"{{"model":"lora","messages":[{turns}]}}"#),
        format!(r#"{{"model":"m","tools":[{{"type":"function"}}],"messages":[{turns}]}}"#),
    ] {
        assert_eq!(tree.matched(&chunks(&other)), Matched::default(), "{other}");
    }
}
