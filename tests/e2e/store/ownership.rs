//! Whose an engine is, is known to every router of the store, and so is what its credential is for.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kvbaton::Running;
use kvbaton::config::CredentialRole;
use serde_json::{Value, json};

use super::routers::{Engines, config_of};
use crate::support::{Answer, Etcd, Log, credential, http_client, listen};

/// A router on this etcd that knows two teams and an operator.
async fn launch(etcd: SocketAddr) -> Running {
    let listener = listen().await;
    let mut config = config_of(&listener, format!("http://{etcd}"), Engines::Known);
    config.credentials = vec![
        credential("x", CredentialRole::Engine, &["m"]),
        credential("y", CredentialRole::Engine, &["n"]),
        credential("z", CredentialRole::Engine, &[]),
        credential("ops", CredentialRole::Operator, &[]),
    ];
    config.build_on(listener).await.unwrap().spawn().await.unwrap()
}

async fn send(router: &Running, token: &str, method: &str, path: &str, body: Value) -> Answer {
    let url = format!("http://{}/registry/v1/{path}", router.addr());
    let request = http_client().request(method.parse().unwrap(), url).bearer_auth(token);
    let request = request.header("content-type", "application/json");
    Answer::read(if body.is_null() { request } else { request.body(body.to_string()) }).await
}

async fn ids(router: &Running, token: &str) -> Vec<String> {
    let list = send(router, token, "GET", "engines", Value::Null).await.json();
    let id = |engine: &Value| engine["engine_id"].as_str().unwrap().to_owned();
    list["engines"].as_array().unwrap().iter().map(id).collect()
}

async fn wait(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds().await {
        assert!(Instant::now() < end, "not so: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn body(base_url: &str, model: &str) -> Value {
    json!({"base_url": base_url, "role": "prefill", "model": model, "ttl_seconds": 300})
}

#[tokio::test]
async fn an_engine_is_its_credentials_at_every_router_and_after_a_restart() {
    // Whatever answers at the addresses of nobody is no engine.
    let log = Log::capture(Vec::new(), vec!["not usable by its probes"]);
    let Some(etcd) = Etcd::start().await else { return log.check() };
    let (a, b) = (launch(etcd.address()).await, launch(etcd.address()).await);
    for router in [&a, &b] {
        let url = format!("http://{}/readyz", router.addr());
        let up = async || Answer::read(http_client().get(&url)).await.json()["store"]["up"] == true;
        wait("the router reaches the store", up).await;
    }
    let (here, there) = ("http://10.0.0.1:1", "http://10.0.0.2:1");
    assert_eq!(send(&a, "x", "PUT", "engines/e", body(here, "m")).await.status, 201);
    assert_eq!(send(&b, "y", "PUT", "engines/f", body(there, "n")).await.status, 201);
    wait("both know both", async || ids(&a, "ops").await == ["e", "f"] && ids(&b, "ops").await == ["e", "f"])
        .await;

    // The settings of both name a peer that has not registered yet, for x: nobody else is that, at either.
    let reserved = async |router: &Running| {
        let peer =
            json!({"role": "prefill", "url": "http://10.0.0.9:1", "name": "named", "registered_by": "x"});
        let url = format!("http://{}/admin/peers", router.addr());
        let request = http_client().post(url).bearer_auth("ops").header("content-type", "application/json");
        let status = Answer::read(request.body(peer.to_string())).await.status;
        // The store tells the other router, perhaps before it is asked.
        assert!(status == 201 || status == 409, "{status}");
        let thief = send(router, "z", "PUT", "engines/thief", body("http://10.0.0.9:1", "m")).await;
        assert_eq!((thief.status, &thief.json()["error"]["code"]), (403, &json!("address_reserved")));
    };
    reserved(&a).await;
    reserved(&b).await;

    let foreign = async |router: &Running| {
        // The id and the address are x's at whichever router: neither registered over, nor joined, nor
        // kept alive, nor removed.
        for (token, method, path, body) in [
            ("z", "PUT", "engines/e", body(here, "m")),
            ("y", "PUT", "engines/e", body("http://10.0.0.3:1", "n")),
            ("z", "PUT", "engines/other", body(here, "m")),
            ("z", "POST", "engines/e/heartbeat", json!({})),
            ("y", "DELETE", "engines/e", Value::Null),
        ] {
            let answer = send(router, token, method, path, body).await;
            assert_eq!(answer.status, 403, "{token} {method} {path}: {answer:?}");
            assert_eq!(answer.json()["error"]["code"], "not_owner", "{answer:?}");
        }
        // Who is for one model sees no other.
        assert_eq!(ids(router, "x").await, ["e"]);
        assert_eq!(ids(router, "y").await, ["f"]);
        assert_eq!(ids(router, "z").await, ["e", "f"]);
        assert_eq!(send(router, "y", "GET", "engines/e", Value::Null).await.status, 404);
        assert_eq!(send(router, "y", "GET", "engines/e/ranks/0/0", Value::Null).await.status, 404);
        // A model that is not the credential's is no way around it.
        let answer = send(router, "x", "PUT", "engines/e", body(here, "n")).await;
        assert_eq!((answer.status, &answer.json()["error"]["code"]), (403, &json!("model_not_allowed")));
    };
    foreign(&a).await;
    foreign(&b).await;
    // The owner may go on at any of them.
    assert_eq!(send(&b, "x", "POST", "engines/e/heartbeat", json!({})).await.status, 200);
    assert!(b.drain().await);
    let b = launch(etcd.address()).await;
    wait("the restarted router knows both", async || ids(&b, "ops").await == ["e", "f"]).await;
    foreign(&b).await;
    assert_eq!(send(&b, "x", "DELETE", "engines/e", Value::Null).await.status, 204);
    wait("it has left everywhere", async || ids(&a, "ops").await == ["f"]).await;
    assert!(a.drain().await && b.drain().await);
    log.check();
}
