//! Inference, models, health: what clients get from a router whose fleet is empty or dead.

use kvbaton_proxy::{PeerSpec, Role};

use crate::support::{Ask, BODY_BYTES, Surface};

const INVALID: &str = "invalid_request_error";
const CHAT: &str = r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}]}"#;
const PROMPT: &str = r#"{"model":"tiny","prompt":"hi"}"#;

#[tokio::test]
async fn an_empty_fleet_is_a_503_that_asks_to_come_back() {
    let surface = Surface::new();
    for (path, body) in
        [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT), ("/v1/embeddings", PROMPT)]
    {
        let answer = surface.ask(Ask::post(path).json(body)).await;
        let code = answer.json()["error"]["code"].as_str().unwrap().to_owned();
        answer.expect_error(503, "unavailable_error", None, "no_decode");
        assert_eq!(answer.header("retry-after"), "1", "{path} {code}");
    }
}

#[tokio::test]
async fn a_body_that_cannot_be_routed_is_refused_with_its_reason() {
    let surface = Surface::new();
    let hidden =
        r#"{"model":"tiny","prompt":"hi","vllm_xargs":{"kv_transfer_params":{"do_remote_prefill":true}}}"#;
    let open = r#"{"model":"tiny","prompt":"hi","kv_transfer_params":{"do_remote_prefill":true}}"#;
    for (body, param, code) in [
        (&b"{\"model\":\"tiny\","[..], None, "invalid_json"),
        (b"[1]", None, "invalid_json"),
        (b"", None, "invalid_json"),
        (b"{\"model\":\"\xff\"}", None, "invalid_utf8"),
        (b"{\"prompt\":\"hi\"}", Some("model"), "model_required"),
        (b"{\"model\":7,\"prompt\":\"hi\"}", Some("model"), "invalid_type"),
        (open.as_bytes(), Some("kv_transfer_params"), "kv_transfer_params_not_allowed"),
        (hidden.as_bytes(), Some("kv_transfer_params"), "kv_transfer_params_not_allowed"),
    ] {
        for path in ["/v1/completions", "/v1/chat/completions"] {
            let answer =
                surface.ask(Ask::post(path).header("content-type", "application/json").body(body)).await;
            answer.expect_error(400, INVALID, param, code);
        }
    }
}

#[tokio::test]
async fn item_68_a_hand_off_is_refused_on_passed_through_endpoints_too() {
    let surface = Surface::new();
    let body = r#"{"model":"tiny","input":"hi","kv_transfer_params":{"do_remote_prefill":true}}"#;
    let answer = surface.ask(Ask::post("/v1/responses").json(body)).await;
    answer.expect_error(400, INVALID, Some("kv_transfer_params"), "kv_transfer_params_not_allowed");
}

#[tokio::test]
async fn a_body_over_the_limit_is_a_413_and_one_at_the_limit_is_not() {
    let surface = Surface::new();
    let body = |length: usize| format!("{PROMPT}{}", " ".repeat(length - PROMPT.len()));
    for path in ["/v1/completions", "/v1/embeddings"] {
        let at_limit = surface.ask(Ask::post(path).json(&body(BODY_BYTES))).await;
        at_limit.expect_error(503, "unavailable_error", None, "no_decode");
        let over = surface.ask(Ask::post(path).json(&body(BODY_BYTES + 1))).await;
        over.expect_error(413, INVALID, None, "body_too_large");
    }
}

#[tokio::test]
async fn a_compressed_body_is_refused_where_it_would_have_to_be_rewritten() {
    let surface = Surface::new();
    let answer = surface.ask(Ask::post("/v1/completions").header("content-encoding", "gzip").json("x")).await;
    answer.expect_error(415, INVALID, None, "unsupported_content_encoding");
}

#[tokio::test]
async fn an_engine_that_refuses_connections_is_never_named() {
    let surface = Surface::new();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    surface.proxy.add_peer(PeerSpec::new(Role::Decode, format!("http://{closed}"))).unwrap();
    let answer = surface.ask(Ask::post("/v1/completions").json(PROMPT)).await;
    let message = answer.expect_error(503, "unavailable_error", None, "no_decode");
    assert!(!message.contains("127.0.0.1"), "{message}");
}

#[tokio::test]
async fn unknown_paths_and_engines_own_controls_are_404() {
    let surface = Surface::new();
    for path in [
        "/",
        "/v1",
        "/v1/completions/",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/collective_rpc",
        "/start_profile",
        "/pause",
        "/abort_requests",
        "/update_weights",
        "/shutdown",
        "/inference/v1/generate",
        "/v1/models/",
    ] {
        surface.ask(Ask::post(path).json(PROMPT)).await.expect_error(
            404,
            "not_found_error",
            None,
            "unknown_endpoint",
        );
    }
}

#[tokio::test]
async fn a_request_about_no_path_is_a_404() {
    let answer = Surface::new().ask(Ask::new(http::Method::OPTIONS, "*")).await;
    answer.expect_error(404, "not_found_error", None, "unknown_endpoint");
}

#[tokio::test]
async fn head_is_answered_without_a_body_where_get_is() {
    let surface = Surface::new();
    for (path, status) in [("/livez", 200), ("/readyz", 503), ("/v1/models", 200)] {
        let answer = surface.ask(Ask::new(http::Method::HEAD, path)).await;
        assert_eq!((answer.status.as_u16(), answer.body.len()), (status, 0), "{path}");
    }
}

#[tokio::test]
async fn the_clients_request_id_comes_back_and_an_unusable_one_is_replaced() {
    let surface = Surface::new();
    for path in ["/livez", "/nowhere", "/v1/models"] {
        let kept = surface.ask(Ask::get(path).header("x-request-id", "abc-1")).await;
        assert_eq!(kept.header("x-request-id"), "abc-1");
        let doubled = Ask::get(path).header("x-request-id", "abc-1").header("x-request-id", "abc-2");
        assert_eq!(surface.ask(doubled).await.header("x-request-id"), "abc-1");
        let replaced = surface.ask(Ask::get(path).header("x-request-id", "a,b")).await;
        assert_eq!(replaced.header("x-request-id").len(), 32);
    }
    let first = surface.ask(Ask::get("/livez")).await;
    let second = surface.ask(Ask::get("/livez")).await;
    assert_ne!(first.header("x-request-id"), second.header("x-request-id"));
}

#[tokio::test]
async fn models_of_an_empty_fleet_are_an_empty_list() {
    let surface = Surface::new();
    let list = surface.ask(Ask::get("/v1/models")).await;
    assert_eq!(list.status, 200);
    assert_eq!(list.json(), serde_json::json!({"object": "list", "data": []}));
    let message = surface.ask(Ask::get("/v1/models/org/model%20x")).await.expect_error(
        404,
        "not_found_error",
        Some("model"),
        "model_not_found",
    );
    assert!(message.contains("`org/model x`"), "{message}");
    surface.ask(Ask::get("/v1/models/%ff")).await.expect_error(400, INVALID, None, "invalid_path");
}

#[tokio::test]
async fn health_says_what_is_the_case() {
    let surface = Surface::new();
    let live = surface.ask(Ask::get("/livez").sent_from("10.0.0.9:1")).await;
    assert_eq!((live.status.as_u16(), live.json()), (200, serde_json::json!({"status": "ok"})));
    let ready = surface.ask(Ask::get("/readyz").sent_from("10.0.0.9:1")).await;
    assert_eq!(ready.status, 503);
    let counts = serde_json::json!({"ready": false, "prefill_ready": 0, "decode_ready": 0, "draining": false, "store": {"kind": "memory", "up": true, "age_seconds": 0.0}});
    assert_eq!(ready.json(), counts);
    let metrics = surface.ask(Ask::get("/metrics").sent_from("10.0.0.9:1")).await;
    assert_eq!(metrics.status, 200);
    assert_eq!(metrics.header("content-type"), kvbaton_proxy::MetricsFormat::Prometheus.content_type());
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    assert!(text.contains("kvbaton_handoffs"), "{text}");
}

#[tokio::test]
async fn errors_are_told_in_the_dialect_of_the_endpoint() {
    let surface = Surface::new();
    let messages = r#"{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}"#;
    for (body, status, class) in [(messages, 503, "overloaded_error"), ("[]", 400, "invalid_request_error")] {
        let answer = surface.ask(Ask::post("/v1/messages").json(body)).await;
        assert_eq!(answer.status, status);
        let value = answer.json();
        assert_eq!((&value["type"], &value["error"]["type"]), (&"error".into(), &class.into()), "{value}");
        assert!(value["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{value}");
    }
    let absent = surface.ask(Ask::get("/v1/messages/nothing")).await.json();
    assert_eq!((&absent["type"], &absent["error"]["type"]), (&"error".into(), &"not_found_error".into()));
    let responses =
        surface.ask(Ask::post("/v1/responses").json(r#"{"model":"m","input":"hi"}"#)).await.json();
    assert_eq!((&responses["type"], &responses["error"]["type"]), (&().into(), &"unavailable_error".into()));
    assert_eq!(responses["error"]["param"], serde_json::Value::Null);
}
