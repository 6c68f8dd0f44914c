//! Who may use the operator's endpoints, and what they find at the admin ones.

use http::Method;
use kvbaton_routes::{Audience, ENDPOINTS};

use crate::support::{Answer, Ask, Surface, TOKEN};

const INVALID: &str = "invalid_request_error";
const PEER: &str = r#"{"role":"prefill","url":"http://127.0.0.1:1","name":"p-1"}"#;

fn guarded() -> impl Iterator<Item = (Method, String)> {
    let closed = |audience| matches!(audience, Audience::Operators | Audience::Engines);
    ENDPOINTS.iter().filter(move |endpoint| closed(endpoint.audience)).map(|endpoint| {
        let path = endpoint.path.replace("{pp_rank}", "0").replace("{tp_rank}", "0").replace(['{', '}'], "");
        (endpoint.method.clone(), path)
    })
}

fn expect_not_local(answer: &Answer) {
    answer.expect_error(403, "permission_error", None, "not_local");
}

#[tokio::test]
async fn without_a_token_only_this_host_is_let_in() {
    let surface = Surface::new();
    for (method, path) in guarded() {
        for address in ["10.0.0.9:40000", "[::ffff:10.0.0.9]:40000", "[2001:db8::1]:40000"] {
            expect_not_local(&surface.ask(Ask::new(method.clone(), &path).sent_from(address)).await);
        }
        expect_not_local(&surface.ask(Ask::new(method.clone(), &path).sent_from_nowhere()).await);
    }
    for address in ["127.0.0.1:40000", "127.8.9.10:40000", "[::1]:40000", "[::ffff:127.0.0.1]:40000"] {
        assert_eq!(surface.ask(Ask::get("/admin/peers").sent_from(address)).await.status, 200, "{address}");
    }
}

#[tokio::test]
async fn a_proxy_on_this_host_does_not_make_its_clients_local() {
    let surface = Surface::new();
    for name in ["x-forwarded-for", "forwarded", "via", "x-real-ip"] {
        expect_not_local(&surface.ask(Ask::get("/admin/peers").header(name, "127.0.0.1")).await);
    }
}

#[tokio::test]
async fn a_page_that_bound_its_own_name_to_this_host_is_kept_out() {
    let surface = Surface::new();
    for host in ["rebind.example.com:8000", "localhost.example.com", "127.0.0.1.example.com", "box", "%%"] {
        expect_not_local(&surface.ask(Ask::get("/admin/peers").header("host", host)).await);
    }
    expect_not_local(&surface.ask(Ask::get("http://rebind.example.com/admin/peers")).await);
    for host in ["127.0.0.1:8000", "[::1]:8000", "localhost:8000", "10.1.2.3"] {
        assert_eq!(surface.ask(Ask::get("/admin/peers").header("host", host)).await.status, 200, "{host}");
    }
}

#[tokio::test]
async fn a_page_in_a_browser_of_this_host_is_kept_out() {
    let surface = Surface::new();
    for (name, value) in [
        ("origin", "https://example.org"),
        ("origin", "http://localhost:9000"),
        ("origin", "null"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
    ] {
        let ask = Ask::get("/admin/peers").header("host", "localhost:8000").header(name, value);
        expect_not_local(&surface.ask(ask).await);
    }
    let own = Ask::get("/admin/peers").header("host", "localhost:8000");
    let own = own.header("origin", "http://localhost:8000").header("sec-fetch-site", "same-origin");
    assert_eq!(surface.ask(own).await.status, 200);
}

#[tokio::test]
async fn with_a_token_everybody_needs_it() {
    let surface = Surface::with_token();
    for (method, path) in guarded() {
        let answer = surface.ask(Ask::new(method.clone(), &path)).await;
        answer.expect_error(401, "authentication_error", None, "token_required");
        assert_eq!(answer.header("www-authenticate"), "Bearer");
    }
    for (value, code) in [
        ("Bearer other", "token_wrong"),
        ("Bearer s3cre", "token_wrong"),
        ("Bearer", "token_required"),
        ("Basic s3cret", "token_required"),
    ] {
        let answer = surface.ask(Ask::get("/admin/peers").header("authorization", value)).await;
        answer.expect_error(401, "authentication_error", None, code);
    }
    for address in ["127.0.0.1:40000", "10.0.0.9:40000"] {
        let ask = Ask::get("/admin/peers").header("authorization", &format!("bearer {TOKEN}"));
        let answer = surface.ask(ask.sent_from(address).header("x-forwarded-for", "10.0.0.1")).await;
        assert_eq!(answer.status, 200, "{address}");
        assert_eq!(answer.header("cache-control"), "no-store");
    }
    assert_eq!(surface.ask(Ask::get("/livez").sent_from("10.0.0.9:1")).await.status, 200);
}

#[tokio::test]
async fn a_peer_is_added_shown_and_removed() {
    let surface = Surface::new();
    let added = surface.ask(Ask::post("/admin/peers").json(PEER)).await;
    assert_eq!(added.status, 201);
    assert_eq!(added.header("location"), "/admin/peers/p-1");
    assert_eq!(added.json()["id"], "p-1");
    assert_eq!(added.json()["role"], "prefill");
    assert_eq!(added.json()["state"], "unknown");

    let twin = surface.ask(Ask::post("/admin/peers").json(PEER)).await;
    twin.expect_error(409, INVALID, None, "peer_exists");

    let shown = surface.ask(Ask::get("/admin/peers/p-1")).await;
    assert_eq!((shown.status.as_u16(), shown.json()["url"].as_str()), (200, Some("http://127.0.0.1:1")));
    let all = surface.ask(Ask::get("/admin/peers")).await;
    assert_eq!(all.json()["peers"].as_array().unwrap().len(), 1);

    let removed = surface.ask(Ask::new(Method::DELETE, "/admin/peers/p-1")).await;
    assert_eq!((removed.status.as_u16(), removed.json()["id"].as_str()), (200, Some("p-1")));
    for method in [Method::GET, Method::DELETE] {
        let gone = surface.ask(Ask::new(method, "/admin/peers/p-1")).await;
        gone.expect_error(404, "not_found_error", Some("id"), "unknown_peer");
    }
}

#[tokio::test]
async fn a_peers_token_is_never_shown() {
    let surface = Surface::new();
    let body =
        r#"{"role":"decode","url":"http://127.0.0.1:1","authorization":"replace","token":"hush-hush"}"#;
    let added = surface.ask(Ask::post("/admin/peers").json(body)).await;
    assert_eq!(added.status, 201);
    let all = surface.ask(Ask::get("/admin/peers")).await;
    for answer in [added, all] {
        let text = String::from_utf8(answer.body.to_vec()).unwrap();
        assert!(text.contains("replace") && !text.contains("hush-hush"), "{text}");
    }
}

#[tokio::test]
async fn a_peer_that_cannot_be_used_is_refused_with_the_place() {
    let surface = Surface::new();
    for (body, param, code, named) in [
        ("{\"role\":\"prefill\",\n \"url\":}", None, "invalid_json", "line 2 column 8"),
        ("", None, "invalid_json", "line 1 column 0"),
        (r#"{"role":"prefill"}"#, None, "invalid_json", "`url`"),
        (r#"{"role":"prefill","url":"http://h:1","ur1":1}"#, Some("ur1"), "invalid_json", "`ur1`"),
        (r#"{"role":"both","url":"http://h:1"}"#, Some("role"), "invalid_json", "`both`"),
        (r#"{"role":"decode","url":7}"#, Some("url"), "invalid_json", "integer `7`"),
        (r#"{"role":"decode","url":"h:1"}"#, Some("url"), "invalid_peer", "h:1"),
        (r#"{"role":"decode","url":"ftp://h:1"}"#, Some("url"), "invalid_peer", "http://"),
        (r#"{"role":"decode","url":"http://h:1","name":"a/b"}"#, Some("name"), "invalid_peer", "a/b"),
        (
            r#"{"role":"decode","url":"http://h:1","authorization":"replace"}"#,
            Some("token"),
            "invalid_peer",
            "token",
        ),
    ] {
        let answer = surface.ask(Ask::post("/admin/peers").json(body)).await;
        let message = answer.expect_error(400, INVALID, param, code);
        assert!(message.contains(named), "{message}");
    }
}

#[tokio::test]
async fn a_form_from_a_web_page_adds_no_peer() {
    let surface = Surface::new();
    for media_type in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"] {
        let ask = Ask::post("/admin/peers").header("content-type", media_type).body(PEER);
        surface.ask(ask).await.expect_error(415, INVALID, None, "unsupported_content_type");
    }
    let untyped = surface.ask(Ask::post("/admin/peers").body(PEER)).await;
    untyped.expect_error(415, INVALID, None, "unsupported_content_type");
    assert!(surface.proxy.peers().is_empty());
}

#[tokio::test]
async fn there_are_no_hand_offs_without_requests() {
    let answer = Surface::new().ask(Ask::get("/admin/handoffs")).await;
    assert_eq!((answer.status.as_u16(), answer.json()), (200, serde_json::json!({"handoffs": []})));
}
