//! Credentials of operators, engines and clients: what each is good for, and what its holder sees.

use http::Method;
use kvbaton_routes::{Access, Duty, Mounts, Rules};
use serde_json::{Value, json};

use crate::support::{Ask, Surface, credential};

const AUTH: &str = "authentication_error";
const INVALID: &str = "invalid_request_error";

fn rules() -> Rules {
    Rules::new(vec![
        credential("ops", Duty::Operator, "ops-token", &[]),
        credential("a", Duty::Engine, "a-token", &["m-a"]),
        credential("b", Duty::Engine, "b-token", &["m-b"]),
        credential("team", Duty::Client, "sk-team", &["m-a"]),
        credential("all", Duty::Client, "sk-all", &[]),
    ])
}

fn register(id: &str, model: &str) -> Ask {
    let body = json!({"base_url": format!("http://{id}:1"), "role": "decode", "model": model});
    Ask::new(Method::PUT, &format!("/registry/v1/engines/{id}")).json(&body.to_string())
}

fn ids(list: &Value) -> Vec<&str> {
    list["engines"].as_array().unwrap().iter().map(|engine| engine["engine_id"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn each_credential_is_good_for_its_endpoints_only() {
    let surface = Surface::with(rules());
    for (token, admin, registry) in
        [("ops-token", 200, 200), ("a-token", 401, 200), ("sk-all", 401, 401), ("nonsense", 401, 401)]
    {
        let status = async |path: &str| surface.ask(Ask::get(path).bearer(token)).await.status.as_u16();
        assert_eq!(status("/admin/peers").await, admin, "{token}");
        assert_eq!(status("/registry/v1/engines").await, registry, "{token}");
    }
    for (token, models) in [("sk-all", 200), ("sk-team", 200), ("ops-token", 401), ("a-token", 401)] {
        let answer = surface.ask(Ask::get("/v1/models").bearer(token)).await;
        assert_eq!(answer.status.as_u16(), models, "{token}");
    }
    let missing = surface.ask(Ask::get("/registry/v1/engines")).await;
    missing.expect_error(401, AUTH, None, "token_required");
    let engines_token = surface.ask(Ask::get("/admin/peers").bearer("a-token")).await;
    engines_token.expect_error(401, AUTH, None, "token_wrong");
}

#[tokio::test]
async fn without_credentials_for_a_duty_the_others_change_nothing_for_it() {
    let surface = Surface::with(Rules::new(vec![credential("team", Duty::Client, "sk-team", &[])]));
    assert_eq!(surface.ask(Ask::get("/admin/peers")).await.status, 200);
    let far = surface.ask(Ask::get("/registry/v1/engines").sent_from("10.0.0.9:1").bearer("sk-team")).await;
    far.expect_error(403, "permission_error", None, "not_local");
    let surface = Surface::with(Rules::new(vec![credential("a", Duty::Engine, "a-token", &[])]));
    assert_eq!(surface.ask(Ask::get("/admin/peers")).await.status, 200, "no operator's credential exists");
    assert_eq!(surface.ask(Ask::get("/registry/v1/engines")).await.status, 401);
    assert_eq!(surface.ask(Ask::get("/v1/models")).await.status, 200);
}

#[tokio::test]
async fn a_missing_or_wrong_key_is_answered_as_openai_does() {
    let surface = Surface::with(rules());
    for path in ["/v1/models", "/v1/models/m", "/version"] {
        let answer = surface.ask(Ask::get(path)).await;
        let message = answer.expect_error(401, INVALID, None, "invalid_api_key");
        assert!(message.contains("API key"), "{message}");
        assert_eq!(answer.header("www-authenticate"), "Bearer");
    }
    for ask in [
        Ask::post("/v1/chat/completions").bearer("sk-teaM"),
        Ask::post("/v1/completions").header("x-api-key", "sk-tea"),
        Ask::post("/v1/embeddings").bearer(""),
    ] {
        let answer = surface.ask(ask.json("{")).await;
        let message = answer.expect_error(401, INVALID, None, "invalid_api_key");
        assert!(!message.contains("sk-"), "{message}");
    }
    let refused =
        surface.ask(Ask::post("/v1/chat/completions").header("x-api-key", "sk-team").json("{")).await;
    refused.expect_error(400, INVALID, None, "invalid_json");
    for path in ["/livez", "/metrics"] {
        assert_eq!(surface.ask(Ask::get(path)).await.status, 200, "{path} needs no key");
    }
}

#[tokio::test]
async fn a_model_of_others_does_not_exist_for_a_key() {
    let surface = Surface::with(rules());
    let ask = |path: &str, body: &str| Ask::post(path).bearer("sk-team").json(body);
    let not_found = "not_found_error";
    for (path, body) in [
        ("/v1/completions", r#"{"model":"m-b","prompt":"a"}"#),
        ("/v1/chat/completions", r#"{"model":"m-b","messages":[]}"#),
        ("/v1/embeddings", r#"{"model":"m-b","input":"a"}"#),
        ("/v1/responses", r#"{"model":"m-a","input":"a","model":"m-b"}"#),
    ] {
        let answer = surface.ask(ask(path, body)).await;
        answer.expect_error(404, not_found, Some("model"), "model_not_found");
    }
    let answer = surface.ask(ask("/tokenize", r#"{"prompt":"a"}"#)).await;
    answer.expect_error(400, INVALID, Some("model"), "model_required");
    // Its own model comes as far as the fleet, which is empty.
    let answer = surface.ask(ask("/v1/embeddings", r#"{"model":"m-a","input":"a"}"#)).await;
    answer.expect_error(503, "unavailable_error", None, "no_decode");
    let answer = surface.ask(Ask::post("/v1/embeddings").bearer("sk-all").json(r#"{"input":"a"}"#)).await;
    answer.expect_error(503, "unavailable_error", None, "no_decode");
}

#[tokio::test]
async fn only_its_owner_changes_an_engine() {
    let surface = Surface::with(rules());
    let ask = async |ask: Ask| surface.ask(ask).await;
    assert_eq!(ask(register("e", "m-a").bearer("a-token")).await.status, 201);
    let denied = ask(register("e", "m-b").bearer("b-token")).await;
    denied.expect_error(403, "permission_error", Some("engine_id"), "not_owner");
    for (method, path) in
        [(Method::POST, "/registry/v1/engines/e/heartbeat"), (Method::DELETE, "/registry/v1/engines/e")]
    {
        let denied = ask(Ask::new(method, path).bearer("b-token").json("{}")).await;
        denied.expect_error(403, "permission_error", Some("engine_id"), "not_owner");
    }
    // Neither by taking its address under another name.
    let there = json!({"base_url": "http://e:1", "role": "decode", "model": "m-b"}).to_string();
    let denied = ask(Ask::new(Method::PUT, "/registry/v1/engines/f").bearer("b-token").json(&there)).await;
    denied.expect_error(403, "permission_error", Some("engine_id"), "not_owner");
    let denied = ask(register("g", "m-a").bearer("b-token")).await;
    denied.expect_error(403, "permission_error", Some("model"), "model_not_allowed");
    let beat = Ask::post("/registry/v1/engines/e/heartbeat").json("{}");
    assert_eq!(ask(beat.bearer("a-token")).await.status, 200);
    let removed = ask(Ask::new(Method::DELETE, "/registry/v1/engines/e").bearer("ops-token")).await;
    assert_eq!(removed.status, 204);
}

#[tokio::test]
async fn engines_of_one_model_are_not_listed_to_the_holders_of_another() {
    let surface = Surface::with(rules());
    assert_eq!(surface.ask(register("ea", "m-a").bearer("a-token")).await.status, 201);
    assert_eq!(surface.ask(register("eb", "m-b").bearer("b-token")).await.status, 201);
    for (token, seen) in [("a-token", &["ea"][..]), ("b-token", &["eb"]), ("ops-token", &["ea", "eb"])] {
        let list = surface.ask(Ask::get("/registry/v1/engines").bearer(token)).await.json();
        assert_eq!(ids(&list), seen, "{token}");
        let list = surface.ask(Ask::get("/registry/v1/engines?model=m-b").bearer(token)).await.json();
        assert_eq!(ids(&list).contains(&"eb"), seen.contains(&"eb"), "{token}");
    }
    for path in ["/registry/v1/engines/eb", "/registry/v1/engines/eb/ranks/0/0"] {
        let hidden = surface.ask(Ask::get(path).bearer("a-token")).await;
        let absent = surface.ask(Ask::get(&path.replace("eb", "no")).bearer("a-token")).await;
        assert_eq!(hidden.status, 404);
        let same = |answer: &crate::support::Answer| answer.json()["error"]["code"].clone();
        assert_eq!(same(&hidden), same(&absent));
    }
    let reset = surface.events(Ask::get("/registry/v1/watch?since=0").bearer("a-token"), 1).await;
    assert_eq!(ids(&reset[0].data), ["ea"]);
    let since = reset[0].id;
    assert_eq!(surface.ask(register("eb2", "m-b").bearer("b-token")).await.status, 201);
    assert_eq!(surface.ask(register("ea2", "m-a").bearer("a-token")).await.status, 201);
    let watch = Ask::get(&format!("/registry/v1/watch?since={since}")).bearer("a-token");
    let events = surface.events(watch, 1).await;
    assert_eq!(
        (events[0].name.as_str(), &events[0].data["engine"]["engine_id"]),
        ("registered", &json!("ea2"))
    );
}

#[tokio::test]
async fn a_verified_certificate_is_as_good_as_a_token() {
    let surface = Surface::with(rules());
    let admin = |name: &str| Ask::get("/admin/peers").certified(name);
    assert_eq!(surface.ask(admin("ops.example.org")).await.status, 200);
    let other = surface.ask(admin("a.example.org")).await;
    other.expect_error(401, AUTH, None, "token_required");
    let wrong = surface.ask(admin("ops.example.org").bearer("nonsense")).await;
    wrong.expect_error(401, AUTH, None, "token_wrong");
    assert_eq!(surface.ask(register("e", "m-a").certified("a.example.org")).await.status, 201);
    assert_eq!(surface.ask(Ask::get("/v1/models").certified("team.example.org")).await.status, 200);
    // A browser shows its certificate for any page.
    let page = surface.ask(admin("ops.example.org").header("sec-fetch-site", "cross-site")).await;
    page.expect_error(403, "permission_error", None, "not_local");
}

#[tokio::test]
async fn rules_are_exchanged_while_the_router_runs() {
    let access = Access::new(Rules::new(vec![credential("ops", Duty::Operator, "old", &[])]));
    let surface = Surface::sharing(&access);
    let status =
        async |token: &str| surface.ask(Ask::get("/admin/peers").bearer(token)).await.status.as_u16();
    assert_eq!((status("old").await, status("new").await), (200, 401));
    access.replace(Rules::new(vec![credential("ops", Duty::Operator, "new", &[])]));
    assert_eq!((status("old").await, status("new").await), (401, 200));
}

#[tokio::test]
async fn a_listener_has_its_own_endpoints_and_no_others() {
    let paths = ["/v1/models", "/registry/v1/engines", "/admin/peers", "/metrics", "/livez", "/readyz"];
    for (mounts, statuses) in [
        (Mounts { clients: true, ..Mounts::NONE }, [200, 404, 404, 404, 200, 503]),
        (Mounts { engines: true, ..Mounts::NONE }, [404, 200, 404, 404, 200, 503]),
        (Mounts { operators: true, metrics: true, ..Mounts::NONE }, [404, 404, 200, 200, 200, 503]),
        (Mounts::ALL, [200, 200, 200, 200, 200, 503]),
    ] {
        let surface = Surface::mounting(Rules::default(), mounts, &[]);
        for (path, status) in paths.iter().zip(statuses) {
            assert_eq!(surface.ask(Ask::get(path)).await.status.as_u16(), status, "{mounts:?} {path}");
        }
    }
}
