//! TLS of the listeners and towards engines, with certificates made for each test.

use std::time::Duration;

use kvbaton::config::{ClientAuth, Config, Credential, CredentialRole, Embedded, Tls};
use serde_json::Value;

use crate::support::{
    Authority, COMPLETIONS, Cluster, Front, Identity, PROMPT, TlsWire, Wire, completion, listen, single_text,
};

fn tls(identity: &Identity) -> Tls {
    Tls { cert: identity.cert(), key: identity.key(), ..Tls::default() }
}

fn body_of(answer: &str) -> Value {
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

fn operator(certificate: &str) -> Credential {
    Credential {
        name: "ops".into(),
        role: CredentialRole::Operator,
        sha256: Vec::new(),
        token_file: None,
        certificates: vec![certificate.to_owned()],
        models: Vec::new(),
    }
}

#[tokio::test]
async fn the_public_listener_serves_over_tls_and_http_1_only() {
    let authority = Authority::new();
    let server = authority.identity("server", &["localhost"]);
    let (identity, registry) = (server.clone(), "127.0.0.1:0".parse().unwrap());
    // The simulated engines register in plain, on a listener of their own.
    let set = move |config: &mut Config| {
        config.tls = tls(&identity);
        config.registry.listen = Some(registry);
    };
    let cluster = Cluster::builder().config(set).unready().start().await;
    assert!(cluster.running().ready_within(Duration::from_secs(20)).await);
    cluster.wait_registered().await;
    let wire = TlsWire::connect(cluster.addr, &authority, None).await.unwrap();
    let shown = wire.shown();
    assert_eq!((shown.certificate, shown.protocol.as_deref()), (server.der(), Some(&b"http/1.1"[..])));
    let body = completion(PROMPT, 6);
    let (status, answer) = wire.ask(&format!("POST {COMPLETIONS}"), &body.to_string()).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(body_of(&answer)["choices"][0]["text"], single_text(COMPLETIONS, &body).await);

    let mut plain = Wire::open(cluster.addr, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(!plain.everything().await.contains("HTTP/1.1"), "plain HTTP is not answered");
    let strangers = Authority::new();
    assert!(TlsWire::connect(cluster.addr, &strangers, None).await.is_err());
    cluster.finish().await;
}

#[tokio::test]
async fn the_operators_listener_lets_in_who_has_the_right_certificate() {
    let (servers, clients, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let server = servers.identity("server", &["localhost"]);
    let client_ca = clients.certificate.clone();
    let set = move |config: &mut Config| {
        config.admin.listen = Some("127.0.0.1:0".parse().unwrap());
        config.admin.tls = Tls { client_ca: Some(client_ca.clone()), ..tls(&server) };
        config.credentials = vec![operator("spiffe://fleet/ops")];
    };
    // Of the program only: a cluster asks for metrics in plain.
    let mut config = Config { listen: "127.0.0.1:0".parse().unwrap(), ..Config::default() };
    config.fleet.embedded = Embedded::Never;
    set(&mut config);
    assert_eq!(config.admin.tls.client_auth, ClientAuth::Required);
    let running = config.build().await.unwrap().spawn().await.unwrap();
    let admin = running.admin_addr().unwrap();
    let ask = async |shown: Option<&Identity>| {
        let wire = TlsWire::connect(admin, &servers, shown).await?;
        wire.ask("GET /admin/peers", "").await.map(|(status, _)| status)
    };
    let ops = clients.identity("ops", &["spiffe://fleet/ops"]);
    let other = clients.identity("other", &["ops.fleet", "spiffe://fleet/ops2"]);
    let forged = strangers.identity("ops", &["spiffe://fleet/ops"]);
    assert_eq!(ask(Some(&ops)).await.unwrap(), 200);
    assert_eq!(ask(Some(&other)).await.unwrap(), 401, "it is known, and nobody's");
    assert!(ask(Some(&forged)).await.is_err());
    assert!(ask(None).await.is_err());
    let mut public = Wire::open(running.addr(), b"GET /admin/peers HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(public.head().await.0, 404);
    assert!(running.drain().await);
}

#[tokio::test]
async fn changed_certificates_serve_new_connections_and_broken_ones_change_nothing() {
    let authority = Authority::new();
    let server = authority.identity("server", &["localhost"]);
    let before = server.der();
    let mut config =
        Config { listen: "127.0.0.1:0".parse().unwrap(), tls: tls(&server), ..Config::default() };
    config.fleet.embedded = Embedded::Never;
    config.secrets.refresh = Duration::ZERO;
    let running = config.build().await.unwrap().spawn().await.unwrap();
    let connect = async || TlsWire::connect(running.addr(), &authority, None).await.unwrap();
    let kept = connect().await;
    assert_eq!(kept.shown().certificate, before);
    assert!(!running.refresh_secrets().await.unwrap());

    server.become_like(&authority.identity("next", &["localhost"]));
    let after = server.der();
    assert_ne!(before, after);
    assert!(running.refresh_secrets().await.unwrap());
    assert_eq!(connect().await.shown().certificate, after);
    assert_eq!(kept.ask("GET /livez", "").await.unwrap().0, 200, "an open connection stays");

    authority.file("server.key", "nonsense");
    let error = running.refresh_secrets().await.unwrap_err().to_string();
    assert!(error.contains("server.key"), "{error}");
    assert_eq!(connect().await.shown().certificate, after);
    // The same fault is said once.
    assert!(!running.refresh_secrets().await.unwrap());
    assert!(running.drain().await);
}

#[tokio::test]
async fn who_does_not_shake_hands_is_let_go() {
    let authority = Authority::new();
    let server = authority.identity("server", &["localhost"]);
    let mut config =
        Config { listen: "127.0.0.1:0".parse().unwrap(), tls: tls(&server), ..Config::default() };
    config.fleet.embedded = Embedded::Never;
    config.connections.handshake = Duration::from_millis(200);
    let running = config.build().await.unwrap().spawn().await.unwrap();
    let mut silent = Wire::open(running.addr(), b"\x16\x03\x01").await;
    assert_eq!(silent.everything().await, "");
    assert!(running.drain().await);
}

#[tokio::test]
async fn engines_are_reached_over_tls_with_a_certificate_of_the_router() {
    let (engines, routers) = (Authority::new(), Authority::new());
    let router = routers.identity("router", &["router.fleet"]);
    let front = Front::new(&engines.identity("engine", &["localhost"]), Some(&routers));
    let ca = engines.certificate.clone();
    let set = move |config: &mut Config| {
        config.pairing.adopt_registered = false;
        config.engine_tls.ca = Some(ca.clone());
        config.engine_tls.cert = router.cert();
        config.engine_tls.key = router.key();
    };
    let cluster = Cluster::builder().behind(front).config(set).start().await;
    for stream in [false, true] {
        let mut body = completion(PROMPT, 8);
        body["stream"] = stream.into();
        let answer = cluster.post(COMPLETIONS, &body).await;
        assert_eq!(answer.generated(), single_text(COMPLETIONS, &body).await);
    }
    assert_eq!(cluster.relayed().await, 2.0);
    let peers = cluster.get("/admin/peers").await.json();
    assert!(peers["peers"][0]["url"].as_str().unwrap().starts_with("https://"), "{peers}");
    cluster.finish().await;
}

#[tokio::test]
async fn an_engine_whose_certificate_nobody_trusts_gets_no_request() {
    let (engines, others) = (Authority::new(), Authority::new());
    let front = Front::new(&engines.identity("engine", &["localhost"]), None);
    let ca = others.certificate.clone();
    let set = move |config: &mut Config| {
        // Where they listen in plain is not to be found out from their registration.
        config.pairing.adopt_registered = false;
        config.engine_tls.ca = Some(ca.clone());
    };
    let builder = Cluster::builder().behind(front).config(set).unready();
    let cluster = builder.warns(&["an engine is not usable", "no_decode"]).start().await;
    cluster
        .wait_for("the probes have failed", async || {
            let peers = cluster.get("/admin/peers").await.json();
            let states = peers["peers"].as_array().unwrap();
            states.iter().all(|peer| peer["state"] == "unreachable")
        })
        .await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await;
    cluster.assert_error(&answer, 503, "no_decode");
    assert_eq!(cluster.p().requests().len() + cluster.d().requests().len(), 0);
    cluster.finish().await;
}

#[tokio::test]
async fn an_embedded_fleet_works_behind_tls_and_tokens() {
    let authority = Authority::new();
    let server = authority.identity("server", &["localhost"]);
    let mut config =
        Config { listen: "127.0.0.1:0".parse().unwrap(), tls: tls(&server), ..Config::default() };
    config.registry.token = Some("engines-only".into());
    let listener = listen().await;
    let running = config.build_on(listener).await.unwrap().spawn().await.unwrap();
    assert!(running.ready_within(Duration::from_secs(20)).await);
    let body = completion(PROMPT, 6);
    let wire = TlsWire::connect(running.addr(), &authority, None).await.unwrap();
    let (status, answer) = wire.ask(&format!("POST {COMPLETIONS}"), &body.to_string()).await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(body_of(&answer)["choices"][0]["text"], single_text(COMPLETIONS, &body).await);
    let wire = TlsWire::connect(running.addr(), &authority, None).await.unwrap();
    assert_eq!(wire.ask("GET /registry/v1/engines", "").await.unwrap().0, 401);
    assert!(running.drain().await);
}
