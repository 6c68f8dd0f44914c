//! The two legs' bodies and the engines' answers, as byte-faithful edits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod answers;
mod captures;
mod cases;
mod legs;
mod oracle;
mod pinned;
mod properties;
mod scanner;

use bytes::Bytes;
use kvbaton_proxy::request::{BadRequest, ClientRequest, Endpoint, InjectedHandOff};

const BOTH: [Endpoint; 2] = [Endpoint::Completions, Endpoint::ChatCompletions];

const PREFILL_HAND_OFF: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

fn parse(endpoint: Endpoint, body: &str) -> Result<ClientRequest, BadRequest> {
    ClientRequest::parse(endpoint, Bytes::copy_from_slice(body.as_bytes()), InjectedHandOff::Refuse)
}

fn parse_stripping(endpoint: Endpoint, body: &str) -> Result<ClientRequest, BadRequest> {
    ClientRequest::parse(endpoint, Bytes::copy_from_slice(body.as_bytes()), InjectedHandOff::Strip)
}

fn text(body: kvbaton_proxy::splice::Spliced) -> String {
    String::from_utf8(body.into_bytes().to_vec()).unwrap()
}

/// The prefill body without the hand-off at its end, which every one must carry.
fn prefill(endpoint: Endpoint, body: &str) -> String {
    let whole = text(parse(endpoint, body).unwrap().prefill_body(false));
    let added = format!(r#","kv_transfer_params":{PREFILL_HAND_OFF}"#);
    assert_eq!(whole.matches(&added).count(), 1, "{whole}");
    whole.replace(&added, "")
}

fn decode(endpoint: Endpoint, body: &str) -> String {
    let hand_off = Bytes::from_static(br#"{"remote_port":1}"#);
    let whole = text(parse(endpoint, body).unwrap().decode_body(Some(hand_off)));
    let added = r#","kv_transfer_params":{"remote_port":1}"#;
    assert_eq!(whole.matches(added).count(), 1, "{whole}");
    whole.replace(added, "")
}
