//! The registry over HTTP, with the payload that a running vLLM 0.32.0 engine gave.

use http::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Ask, Surface};

const INVALID: &str = "invalid_request_error";
pub(crate) const ENGINE: &str = "05128764-30d7-4145-ad5e-c0584e128e35";

fn vectors() -> Value {
    serde_json::from_str(include_str!("../../../tests/fixtures/vectors/handshake.json")).unwrap()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2);
    digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// The first frame that the captured engine answered.
pub(crate) fn payload() -> Vec<u8> {
    bytes(vectors()["captured_replies"][0]["frames_hex"][0].as_str().unwrap())
}

pub(crate) fn rank_path(engine: &str, pp_rank: &str, tp_rank: &str) -> String {
    format!("/registry/v1/engines/{engine}/ranks/{pp_rank}/{tp_rank}")
}

async fn put(surface: &Surface, path: &str, body: Vec<u8>) -> Answer {
    surface.ask(Ask::new(Method::PUT, path).header("content-type", "application/msgpack").body(body)).await
}

#[tokio::test]
async fn the_bytes_that_were_put_come_back() {
    let surface = Surface::new();
    let path = rank_path(ENGINE, "0", "0");
    let created = put(&surface, &path, payload()).await;
    let receipt = |result| json!({"engine_id": ENGINE, "pp_rank": 0, "tp_rank": 0, "result": result});
    assert_eq!((created.status.as_u16(), created.json()), (201, receipt("created")));
    let again = put(&surface, &path, payload()).await;
    assert_eq!((again.status.as_u16(), again.json()), (200, receipt("unchanged")));

    let found = surface.ask(Ask::get(&path)).await;
    assert_eq!(found.status, 200);
    assert_eq!(found.header("content-type"), "application/msgpack");
    assert_eq!(found.body, payload());
}

#[tokio::test]
async fn people_get_json_when_they_ask_for_it() {
    let surface = Surface::new();
    let path = rank_path(ENGINE, "0", "0");
    put(&surface, &path, payload()).await;
    let view = surface.ask(Ask::get(&path).header("accept", "application/json")).await;
    assert_eq!(view.status, 200);
    assert_eq!(view.header("content-type"), "application/json");
    assert_eq!(view.header("vary"), "accept");
    let hash = "068b5762fa946f5efa342fd67e25daa63a77976468c4e997c5bf384140204883";
    assert_eq!(view.json()["compatibility_hash"], hash);
    assert_eq!(view.json()["payload_bytes"], payload().len());

    let list = surface.ask(Ask::get("/registry/v1/engines")).await.json();
    assert_eq!(list["engines"][0]["engine_id"], ENGINE);
    assert_eq!(list["engines"][0]["ranks"][0], view.json());
}

#[tokio::test]
async fn what_is_not_registered_is_a_404_at_once() {
    let surface = Surface::new();
    put(&surface, &rank_path(ENGINE, "0", "0"), payload()).await;
    for path in [rank_path(ENGINE, "0", "1"), rank_path(ENGINE, "1", "0"), rank_path("other", "0", "0")] {
        surface.ask(Ask::get(&path)).await.expect_error(404, "not_found_error", None, "unknown_rank");
    }
    let encoded = surface.ask(Ask::get(&rank_path("a%2Fb%20c", "0", "0"))).await;
    let message = encoded.expect_error(404, "not_found_error", None, "unknown_rank");
    assert!(message.contains("`a/b c`"), "{message}");
}

#[tokio::test]
async fn an_engine_is_forgotten_once() {
    let surface = Surface::new();
    put(&surface, &rank_path(ENGINE, "0", "0"), payload()).await;
    let path = format!("/registry/v1/engines/{ENGINE}");
    let gone = surface.ask(Ask::new(Method::DELETE, &path)).await;
    assert_eq!((gone.status.as_u16(), gone.body.len()), (204, 0));
    let again = surface.ask(Ask::new(Method::DELETE, &path)).await;
    again.expect_error(404, "not_found_error", Some("engine_id"), "unknown_engine");
    let rank = surface.ask(Ask::get(&rank_path(ENGINE, "0", "0"))).await;
    rank.expect_error(404, "not_found_error", None, "unknown_rank");
}

#[tokio::test]
async fn a_payload_that_cannot_be_decoded_is_refused_with_the_layer() {
    let surface = Surface::new();
    let path = rank_path(ENGINE, "0", "0");
    for body in [b"this is not valid msgpack data".to_vec(), Vec::new(), payload()[..40].to_vec()] {
        let answer = put(&surface, &path, body).await;
        let message = answer.expect_error(400, INVALID, None, "malformed_payload");
        assert!(message.contains("NixlHandshakePayload"), "{message}");
    }
    // {"compatibility_hash": "h", "agent_metadata_bytes": b"\xc1"}
    let mut inner = vec![0x82, 0xb2];
    inner.extend(b"compatibility_hash\xa1h\xb4agent_metadata_bytes\xc4\x01\xc1");
    let message = put(&surface, &path, inner).await.expect_error(400, INVALID, None, "malformed_payload");
    assert!(message.contains("NixlAgentMetadata"), "{message}");
    assert!(surface.proxy.registry().list().is_empty());
}

#[tokio::test]
async fn a_payload_of_another_engine_is_a_conflict() {
    let surface = Surface::new();
    let answer = put(&surface, &rank_path("other", "0", "0"), payload()).await;
    let message = answer.expect_error(409, INVALID, Some("engine_id"), "engine_id_mismatch");
    assert!(message.contains(ENGINE), "{message}");
}

#[tokio::test]
async fn a_rank_that_is_no_number_is_refused() {
    let surface = Surface::new();
    for (pp_rank, tp_rank, param) in [
        ("x", "0", "pp_rank"),
        ("0", "-1", "tp_rank"),
        ("0", "+1", "tp_rank"),
        ("0", "4294967296", "tp_rank"),
    ] {
        let path = rank_path(ENGINE, pp_rank, tp_rank);
        surface.ask(Ask::get(&path)).await.expect_error(400, INVALID, Some(param), "invalid_rank");
        put(&surface, &path, payload()).await.expect_error(400, INVALID, Some(param), "invalid_rank");
    }
}

#[tokio::test]
async fn a_payload_must_say_that_it_is_msgpack_and_be_small() {
    let surface = Surface::new();
    let path = rank_path(ENGINE, "0", "0");
    let untyped = surface.ask(Ask::new(Method::PUT, &path).body(payload())).await;
    untyped.expect_error(415, INVALID, None, "unsupported_content_type");
    let json = surface.ask(Ask::new(Method::PUT, &path).json("{}")).await;
    json.expect_error(415, INVALID, None, "unsupported_content_type");
    let big = put(&surface, &path, vec![0; 16 * 1024 + 1]).await;
    big.expect_error(413, INVALID, None, "body_too_large");
}
