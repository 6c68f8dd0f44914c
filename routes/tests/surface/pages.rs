//! Pages of other origins in a browser, and requests that two servers may read differently.

use http::Method;
use kvbaton_routes::{Duty, Mounts, Rules};

use crate::support::{Answer, Ask, Surface, credential};

const PAGE: &str = "https://chat.example.org";

fn surface() -> Surface {
    let rules = Rules::new(vec![credential("team", Duty::Client, "sk-team", &[])]);
    Surface::mounting(rules, Mounts::ALL, &[PAGE, "http://localhost:3000"])
}

fn asks_first(path: &str, origin: &str) -> Ask {
    Ask::new(Method::OPTIONS, path)
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type,x-stainless-lang")
}

fn allows(answer: &Answer) -> &str {
    answer.header("access-control-allow-origin")
}

#[tokio::test]
async fn a_page_asks_first_without_a_key() {
    let surface = surface();
    let answer = surface.ask(asks_first("/v1/chat/completions", PAGE)).await;
    assert_eq!((answer.status.as_u16(), allows(&answer)), (204, PAGE));
    assert_eq!(answer.header("access-control-allow-methods"), "GET, POST");
    let asked = "authorization,content-type,x-stainless-lang";
    assert_eq!(answer.header("access-control-allow-headers"), asked);
    assert_eq!(answer.header("access-control-max-age"), "60");
    assert_eq!(answer.header("vary"), "origin");
    assert_eq!(answer.header("access-control-allow-credentials"), "");
    let stranger = surface.ask(asks_first("/v1/chat/completions", "https://evil.example.org")).await;
    stranger.expect_error(405, "invalid_request_error", None, "method_not_allowed");
    assert_eq!(allows(&stranger), "");
}

#[tokio::test]
async fn a_page_reads_answers_and_refusals() {
    let surface = surface();
    let good = surface.ask(Ask::get("/v1/models").bearer("sk-team").header("origin", PAGE)).await;
    assert_eq!((good.status.as_u16(), allows(&good)), (200, PAGE));
    assert!(good.header("access-control-expose-headers").contains("x-request-id"));
    let refused = surface.ask(Ask::get("/v1/models").header("origin", PAGE)).await;
    refused.expect_error(401, "invalid_request_error", None, "invalid_api_key");
    assert_eq!(allows(&refused), PAGE);
    let stranger = Ask::get("/v1/models").bearer("sk-team").header("origin", "https://evil.example.org");
    let stranger = surface.ask(stranger).await;
    assert_eq!((stranger.status.as_u16(), allows(&stranger), stranger.header("vary")), (200, "", "origin"));
}

#[tokio::test]
async fn operators_and_engines_endpoints_speak_to_no_page() {
    let surface = Surface::mounting(Rules::default(), Mounts::ALL, &["*"]);
    for path in ["/admin/peers", "/registry/v1/engines"] {
        let answer = surface.ask(asks_first(path, PAGE)).await;
        answer.expect_error(405, "invalid_request_error", None, "method_not_allowed");
        assert_eq!(allows(&answer), "");
    }
    let answer = surface.ask(Ask::get("/v1/models").header("origin", PAGE)).await;
    assert_eq!((answer.status.as_u16(), allows(&answer)), (200, "*"));
}

#[tokio::test]
async fn without_the_setting_nothing_is_said_of_origins() {
    let surface = Surface::new();
    let answer = surface.ask(Ask::get("/v1/models").header("origin", PAGE)).await;
    assert_eq!((allows(&answer), answer.header("vary")), ("", ""));
    let answer = surface.ask(asks_first("/v1/models", PAGE)).await;
    answer.expect_error(405, "invalid_request_error", None, "method_not_allowed");
}

#[tokio::test]
async fn an_ambiguous_request_is_refused_and_its_connection_closed() {
    let surface = Surface::new();
    for lines in [
        [("host", "a"), ("host", "b")],
        [("content-length", "2"), ("content-length", "2")],
        [("transfer-encoding", "chunked"), ("content-length", "2")],
        [("transfer-encoding", "gzip"), ("transfer-encoding", "chunked")],
    ] {
        let ask = lines
            .into_iter()
            .fold(Ask::post("/v1/completions"), |ask, (name, value)| ask.header(name, value));
        let answer = surface.ask(ask.body("{}")).await;
        answer.expect_error(400, "invalid_request_error", None, "ambiguous_request");
        assert_eq!(answer.header("connection"), "close", "{lines:?}");
    }
    let chunked =
        surface.ask(Ask::post("/v1/completions").header("transfer-encoding", "chunked").body("{}")).await;
    chunked.expect_error(400, "invalid_request_error", Some("model"), "model_required");
    assert_eq!(chunked.header("connection"), "close");
}
