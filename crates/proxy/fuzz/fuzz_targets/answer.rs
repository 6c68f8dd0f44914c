//! Any bytes as an engine's answer: read, stripped of the hand-off, and the hand-off's address rewritten.
#![no_main]

use bytes::Bytes;
use kv_connector::protocol::handoff::HandOff;
use kvbaton_proxy::json::members;
use kvbaton_proxy::splice::{PrefillAnswer, answer_without_hand_off, rewrite_address};
use libfuzzer_sys::fuzz_target;

fn count(body: &[u8], name: &str) -> Option<usize> {
    let mut found = 0;
    for member in members(body).ok()? {
        found += usize::from(member.ok()?.key_is(name));
    }
    Some(found)
}

fuzz_target!(|data: &[u8]| {
    let body = Bytes::copy_from_slice(data);
    let left = answer_without_hand_off(body.clone()).into_bytes();
    let Ok(answer) = PrefillAnswer::parse(&body) else {
        assert_eq!(left, body, "what is no JSON object passes unchanged");
        return;
    };
    assert_eq!(count(&left, "kv_transfer_params"), Some(0));
    let without = PrefillAnswer::parse(&left).expect("a stripped answer is still an object");
    assert_eq!(without, PrefillAnswer { hand_off: None, ..answer.clone() });
    if let Some(granted) = &answer.hand_off {
        assert_eq!(granted.read, HandOff::parse(&granted.raw), "read in its place it says the same");
    }
    for raw in answer.hand_off.map(|granted| granted.raw).into_iter().chain([body]) {
        let Ok(rewritten) = rewrite_address(&raw, Some("h\"\\\u{1}\u{e9}"), Some(5600)) else {
            continue;
        };
        for name in ["remote_host", "remote_port", "remote_engine_id"] {
            assert_eq!(count(&rewritten, name), count(&raw, name));
        }
        let twice = rewrite_address(&rewritten, Some("h\"\\\u{1}\u{e9}"), Some(5600));
        assert_eq!(twice.as_ref(), Ok(&rewritten), "rewriting twice is rewriting once");
    }
});
