//! The addresses of configured peers: whose engines may register there.

use http::Method;
use kvbaton_proxy::{PeerSpec, Role, Settings, Writers};
use kvbaton_routes::{Duty, Rules};
use serde_json::{Value, json};

use crate::support::{Answer, Ask, Surface, credential};

const DENIED: &str = "permission_error";
const AT: &str = "http://10.0.0.1:8100";

/// A surface with these credentials of engines.
fn surface(engines: &[&str]) -> Surface {
    let names = engines.iter().map(|name| (*name).to_owned()).collect();
    let writers = Writers { engines: names, trusted: ["ops".to_owned()].into() };
    let all = engines.iter().map(|name| credential(name, Duty::Engine, &format!("{name}-token"), &[]));
    let ops = credential("ops", Duty::Operator, "ops-token", &[]);
    Surface::over(Settings { writers, ..Settings::default() }, Rules::new(all.chain([ops]).collect()))
}

fn configured(surface: &Surface, registered_by: Option<&str>) {
    let mut spec = PeerSpec::new(Role::Prefill, AT);
    (spec.name, spec.registered_by) = (Some("p".into()), registered_by.map(str::to_owned));
    surface.proxy.add_peer(spec).unwrap();
}

async fn register(surface: &Surface, token: &str, id: &str, base_url: &str) -> Answer {
    let body = json!({"base_url": base_url, "role": "prefill", "state": "draining"});
    let ask = Ask::new(Method::PUT, &format!("/registry/v1/engines/{id}")).json(&body.to_string());
    surface.ask(ask.bearer(token)).await
}

/// What the peer shows of its engines.
async fn shown(surface: &Surface) -> Value {
    let peer = surface.ask(Ask::get("/admin/peers/p").bearer("ops-token")).await.json();
    json!([peer["engine_ids"], peer["engine_state"]])
}

#[tokio::test]
async fn with_one_token_a_configured_peers_engine_registers_as_it_always_did() {
    let surface = surface(&["a"]);
    configured(&surface, None);
    assert_eq!(register(&surface, "a-token", "e", AT).await.status, 201);
    assert_eq!(shown(&surface).await, json!([["e"], "draining"]));
}

#[tokio::test]
async fn with_several_tokens_nobody_takes_a_configured_peer_that_has_not_registered_yet() {
    let surface = surface(&["a", "b"]);
    configured(&surface, Some("a"));
    let untouched = shown(&surface).await;
    for base_url in [AT, "HTTP://10.0.0.1:8100/"] {
        let denied = register(&surface, "b-token", "thief", base_url).await;
        let message = denied.expect_error(403, DENIED, Some("base_url"), "address_reserved");
        assert!(!message.contains("token"), "{message}");
    }
    assert_eq!(shown(&surface).await, untouched);
    let list = surface.ask(Ask::get("/registry/v1/engines").bearer("ops-token")).await.json();
    assert_eq!(list["engines"], json!([]));
    assert_eq!(register(&surface, "a-token", "e", AT).await.status, 201);
    assert_eq!(shown(&surface).await, json!([["e"], "draining"]));
    // Elsewhere the other is as free as ever.
    assert_eq!(register(&surface, "b-token", "own", "http://10.0.0.2:8100").await.status, 201);
}

#[tokio::test]
async fn a_configured_peer_that_names_none_of_several_is_for_operators() {
    let surface = surface(&["a", "b"]);
    configured(&surface, None);
    for token in ["a-token", "b-token"] {
        let denied = register(&surface, token, "thief", AT).await;
        denied.expect_error(403, DENIED, Some("base_url"), "address_reserved");
    }
    assert_eq!(register(&surface, "ops-token", "e", AT).await.status, 201);
    assert_eq!(shown(&surface).await, json!([["e"], "draining"]));
}

#[tokio::test]
async fn who_registered_before_an_operator_named_the_peer_does_not_speak_for_it() {
    let surface = surface(&["a", "b"]);
    assert_eq!(register(&surface, "b-token", "early", AT).await.status, 201);
    configured(&surface, Some("a"));
    let peer = shown(&surface).await;
    assert!(!peer.to_string().contains("early"), "{peer}");
    // What it has registered is its own still, but it does not come back once that has ended.
    let beat = Ask::post("/registry/v1/engines/early/heartbeat").json("{}").bearer("b-token");
    assert_eq!(surface.ask(beat).await.status, 200);
    let again = register(&surface, "b-token", "early", AT).await;
    again.expect_error(403, DENIED, Some("base_url"), "address_reserved");
}
