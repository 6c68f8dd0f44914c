//! Keys, tokens and listeners of the whole program, and a router that is its own engine.

use std::time::Duration;

use kvbaton::config::{Config, Credential, CredentialRole, Embedded, Key};
use kvbaton_proxy::{Authorization, PeerSpec, Role};
use kvbaton_routes::SecretDigest;
use serde_json::json;

use crate::support::{
    Authority, CHAT, COMPLETIONS, Cluster, FakeEngine, PROMPT, Step, Wire, completion, generations,
    http_answer, single_text,
};

const KEY: (&str, &str) = ("authorization", "Bearer sk-team");

fn digest(secret: &str) -> Vec<String> {
    vec![SecretDigest::of(secret).unwrap().to_hex()]
}

fn key(name: &str, secret: &str, models: &[&str]) -> Key {
    let models = models.iter().map(|model| (*model).to_owned()).collect();
    Key { name: name.into(), sha256: digest(secret), certificates: Vec::new(), models }
}

#[tokio::test]
async fn a_clients_key_opens_inference_and_never_reaches_an_engine() {
    let set = |config: &mut Config| {
        config.keys = vec![key("team", "sk-team", &["sim"]), key("others", "sk-others", &["else"])];
    };
    let cluster = Cluster::builder().config(set).start().await;
    let body = completion(PROMPT, 6);
    let expected = single_text(COMPLETIONS, &body).await;
    for header in [KEY, ("x-api-key", "sk-team")] {
        let answer = cluster.post_bytes(COMPLETIONS, body.to_string(), &[header]).await;
        assert_eq!(answer.generated(), expected);
    }
    for engine in [cluster.p(), cluster.d()] {
        let seen = generations(engine);
        assert_eq!(seen.len(), 2);
        for name in ["authorization", "x-api-key"] {
            assert!(seen.iter().all(|seen| !seen.headers.contains_key(name)), "{name} reached an engine");
        }
    }
    let answer = cluster.post(COMPLETIONS, &body).await;
    cluster.assert_error(&answer, 401, "invalid_api_key");
    assert_eq!(answer.header("www-authenticate"), "Bearer");
    let answer = cluster.post_bytes(CHAT, "{}", &[("authorization", "Bearer sk-tea")]).await;
    cluster.assert_error(&answer, 401, "invalid_api_key");
    let others = [("authorization", "Bearer sk-others")];
    let answer = cluster.post_bytes(COMPLETIONS, body.to_string(), &others).await;
    cluster.assert_error(&answer, 404, "model_not_found");
    let list = cluster.send("GET", "/v1/models", &others, "").await.json();
    assert_eq!(list, json!({"object": "list", "data": []}));
    let list = cluster.send("GET", "/v1/models", &[KEY], "").await.json();
    assert_eq!(list["data"][0]["id"], "sim");
    assert_eq!((generations(cluster.p()).len(), generations(cluster.d()).len()), (2, 2));
    cluster.finish().await;
}

#[tokio::test]
async fn an_engines_own_token_goes_with_the_request_whoever_the_client_is() {
    let answer = http_answer("200 OK", "application/json", r#"{"choices":[{"index":0},{"index":1}]}"#);
    let engine = FakeEngine::start(vec![Step::Send(answer)]).await;
    let mut peer = PeerSpec::new(Role::Decode, engine.url());
    (peer.authorization, peer.token) = (Authorization::Replace, Some("of-the-engine".into()));
    let set = move |config: &mut Config| {
        config.keys = vec![key("team", "sk-team", &[])];
        config.decode = vec![peer.clone()];
    };
    let cluster = Cluster::builder().decode(0).config(set).start().await;
    let body = json!({"model": "sim", "prompt": "a", "n": 2}).to_string();
    let headers = [KEY, ("origin", "https://chat.example.org"), ("proxy-connection", "keep-alive")];
    assert_eq!(cluster.post_bytes(COMPLETIONS, body, &headers).await.status, 200);
    let seen = engine.seen();
    assert_eq!(seen[0].values("authorization"), ["Bearer of-the-engine"]);
    assert_eq!((seen[0].values("origin").len(), seen[0].values("proxy-connection").len()), (0, 0));
    assert_eq!(seen[0].values("via").len(), 1);
    cluster.finish().await;
}

#[tokio::test]
async fn what_an_engine_says_of_origins_and_addresses_stays_with_the_router() {
    let answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\naccess-control-allow-origin: *\r\n\
        access-control-allow-credentials: true\r\nlocation: http://10.0.0.1/\r\nlink: <http://10.0.0.1/>\r\n\
        alt-svc: h3=\"10.0.0.1:1\"\r\nrefresh: 0;url=http://10.0.0.1\r\nx-private: 1\r\nx-public: 2\r\n\
        connection: close, x-private\r\ncontent-length: 2\r\n\r\n{}";
    let engine = FakeEngine::start(vec![Step::Send(answer.to_vec())]).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).start().await;
    let answer = cluster.post("/v1/embeddings", &json!({"model": "sim", "input": "a"})).await;
    assert_eq!((answer.status, answer.header("x-public")), (200, "2"));
    assert!(!answer.everything().contains("10.0.0.1"), "{answer:?}");
    for name in ["access-control-allow-origin", "access-control-allow-credentials", "x-private"] {
        assert_eq!(answer.header(name), "", "{name}");
    }
    cluster.finish().await;
}

#[tokio::test]
async fn item_42_operators_and_engines_have_listeners_and_tokens_of_their_own() {
    let set = |config: &mut Config| {
        config.admin.listen = Some("127.0.0.1:0".parse().unwrap());
        config.registry.listen = Some("127.0.0.1:0".parse().unwrap());
        config.admin.token = Some("operators".into());
        config.registry.token = Some("engines".into());
    };
    let engine = |config: &mut engine_sim::EngineConfig| config.registry_token = Some("engines".into());
    let cluster = Cluster::builder().config(set).engine(engine).start().await;
    let body = completion(PROMPT, 4);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    let running = cluster.running();
    let (admin, registry) = (running.admin_addr().unwrap(), running.registry_addr());
    assert_ne!(admin, registry);
    for (addr, path, token, status) in [
        (cluster.addr, "/admin/peers", "operators", 404),
        (cluster.addr, "/registry/v1/engines", "engines", 404),
        (cluster.addr, "/metrics", "", 404),
        (cluster.addr, "/readyz", "", 200),
        (admin, "/admin/peers", "operators", 200),
        (admin, "/admin/peers", "engines", 401),
        (admin, "/metrics", "", 200),
        (admin, "/v1/models", "", 404),
        (admin, "/registry/v1/engines", "operators", 404),
        (admin, "/livez", "", 200),
        (registry, "/registry/v1/engines", "engines", 200),
        (registry, "/registry/v1/engines", "operators", 200),
        (registry, "/admin/peers", "operators", 404),
        (registry, "/readyz", "", 200),
    ] {
        let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n");
        let mut wire = Wire::open(addr, head.as_bytes()).await;
        assert_eq!(wire.head().await.0, status, "{addr} {path} {token}");
    }
    cluster.finish().await;
}

#[tokio::test]
async fn a_listener_that_others_reach_has_no_operators_endpoints_unless_told() {
    let everywhere = || {
        let mut config = Config { listen: "0.0.0.0:0".parse().unwrap(), ..Config::default() };
        config.fleet.embedded = Embedded::Never;
        config
    };
    let ask = async |addr: std::net::SocketAddr| {
        let head = b"GET /admin/peers HTTP/1.1\r\nhost: x\r\nauthorization: Bearer operators\r\n\r\n";
        let here = std::net::SocketAddr::from(([127, 0, 0, 1], addr.port()));
        Wire::open(here, head).await.head().await.0
    };
    let mut config = everywhere();
    config.admin.token = Some("operators".into());
    let running = config.clone().build().await.unwrap().spawn().await.unwrap();
    assert_eq!((running.admin_addr(), ask(running.addr()).await), (None, 404));
    assert!(running.drain().await);
    config.admin.on_public = true;
    let running = config.build().await.unwrap().spawn().await.unwrap();
    assert_eq!((running.admin_addr(), ask(running.addr()).await), (Some(running.addr()), 200));
    assert!(running.drain().await);
    let mut config = everywhere();
    config.admin.on_public = true;
    let faults = config.validate().unwrap_err().0;
    assert_eq!(faults[0].key, "admin.on_public");
}

#[tokio::test]
async fn tokens_and_keys_in_files_rotate_without_a_restart() {
    let files = Authority::new();
    let tokens = files.file("tokens", "# operators\nold\n");
    let keys =
        |name: &str| format!("[[keys]]\nname = \"{name}\"\nsha256 = [\"sha256:{}\"]\n", digest(name)[0]);
    let keys_file = files.file("keys.toml", &keys("sk-old"));
    let set = move |config: &mut Config| {
        config.secrets.refresh = Duration::ZERO;
        config.keys_file = Some(keys_file.clone());
        config.credentials = vec![Credential {
            name: "ops".into(),
            role: CredentialRole::Operator,
            sha256: digest("always"),
            token_file: Some(tokens.clone()),
            certificates: Vec::new(),
            models: Vec::new(),
        }];
    };
    let engine = |config: &mut engine_sim::EngineConfig| config.registry_token = Some("always".into());
    let cluster = Cluster::builder().config(set).engine(engine).unready().start().await;
    let status = async |path: &str, token: &str| {
        cluster.send("GET", path, &[("authorization", &format!("Bearer {token}"))], "").await.status
    };
    assert_eq!((status("/admin/peers", "old").await, status("/v1/models", "sk-old").await), (200, 200));
    files.file("tokens", "old\nnew\n");
    files.file("keys.toml", &keys("sk-new"));
    assert!(cluster.running().refresh_secrets().await.unwrap());
    for (path, token, expected) in [
        ("/admin/peers", "old", 200),
        ("/admin/peers", "new", 200),
        ("/admin/peers", "always", 200),
        ("/v1/models", "sk-old", 401),
        ("/v1/models", "sk-new", 200),
    ] {
        assert_eq!(status(path, token).await, expected, "{path} {token}");
    }
    // Neither an emptied nor a broken file opens anything.
    files.file("tokens", "# none\n");
    let error = cluster.running().refresh_secrets().await.unwrap_err().to_string();
    assert!(error.contains("tokens") && !error.contains("new"), "{error}");
    files.file("tokens", "new\n");
    files.file("keys.toml", "");
    assert!(cluster.running().refresh_secrets().await.unwrap());
    assert_eq!((status("/admin/peers", "old").await, status("/v1/models", "sk-new").await), (401, 401));
    cluster.finish().await;
}

#[tokio::test]
async fn a_router_that_is_its_own_engine_finds_out() {
    let cluster = Cluster::builder().warns(&["an engine is not usable"]).start().await;
    let own = format!("http://{}", cluster.addr);
    let body = json!({"role": "decode", "url": own, "name": "itself"}).to_string();
    let json = ("content-type", "application/json");
    assert_eq!(cluster.send("POST", "/admin/peers", &[json], body).await.status, 201);
    cluster
        .wait_for("the router knows itself", async || {
            let peer = cluster.get("/admin/peers/itself").await.json();
            peer["last_error"]["kind"].as_str().is_some_and(|kind| kind.contains("leads back to this router"))
        })
        .await;
    assert_eq!(cluster.get("/admin/peers/itself").await.json()["state"], "unreachable");
    for _ in 0..4 {
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await.status, 200);
    }
    // Nor does it take a request that comes back over another proxy.
    let seen = generations(cluster.d()).pop().unwrap();
    let via = format!("1.0 front, {}", seen.headers["via"].to_str().unwrap());
    let answer = cluster.post_bytes(COMPLETIONS, completion(PROMPT, 2).to_string(), &[("via", &via)]).await;
    cluster.assert_error(&answer, 508, "loop_detected");
    let other = [("via", "1.1 kvbaton-of-somebody-else")];
    let answer = cluster.post_bytes(COMPLETIONS, completion(PROMPT, 2).to_string(), &other).await;
    assert_eq!(answer.status, 200);
    cluster.finish().await;
}

#[test]
fn the_routers_own_address_is_no_engine() {
    for (listen, url, own) in [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", true),
        ("127.0.0.1:8000", "http://localhost:8000/", true),
        ("0.0.0.0:8000", "http://127.0.0.1:8000", true),
        ("[::]:8000", "http://[::1]:8000", true),
        ("10.0.0.1:443", "https://10.0.0.1", true),
        ("127.0.0.1:8000", "http://127.0.0.1:8001", false),
        ("10.0.0.1:8000", "http://localhost:8000", false),
        ("0.0.0.0:8000", "http://engine:8000", false),
    ] {
        let mut config = Config { listen: listen.parse().unwrap(), ..Config::default() };
        config.decode = vec![PeerSpec::new(Role::Decode, url)];
        assert_eq!(config.validate().is_err(), own, "{listen} {url}");
    }
}
