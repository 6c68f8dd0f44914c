//! An etcd that speaks TLS and asks who is there: certificates and passwords, right and wrong.

use std::time::{Duration, Instant};

use kvbaton::Running;
use kvbaton_proxy::StoreSettings;
use serde_json::{Value, json};

use super::routers::{Engines, config_of};
use crate::support::{Answer, Authority, Etcd, EtcdTls, Log, TlsWire, http_client, listen};

const AWAY: &str = "the store cannot be followed";
const PASSWORD: &str = "correct-horse-battery";

/// A router on an etcd that is not up yet, or never.
async fn launch(etcd: &Etcd, tune: impl FnOnce(&mut StoreSettings)) -> Running {
    let listener = listen().await;
    let mut config = config_of(&listener, format!("https://{}", etcd.address()), Engines::Known);
    tune(&mut config.store);
    config.build_on(listener).await.unwrap().spawn().await.unwrap()
}

async fn wait(log: &Log, what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds().await {
        assert!(Instant::now() < end, "not so: {what}; {:#?}", log.lines());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn is_up(router: &Running) -> bool {
    let url = format!("http://{}/readyz", router.addr());
    Answer::read(http_client().get(url)).await.json()["store"]["up"] == true
}

async fn register(router: &Running, id: &str) -> Answer {
    let url = format!("http://{}/registry/v1/engines/{id}", router.addr());
    let body = json!({"model": "m", "ttl_seconds": 60}).to_string();
    Answer::read(http_client().put(url).header("content-type", "application/json").body(body)).await
}

async fn knows(router: &Running, id: &str) -> bool {
    let url = format!("http://{}/registry/v1/engines/{id}", router.addr());
    Answer::read(http_client().get(url)).await.status == 200
}

/// Sends etcd an administrator's word.
async fn tell(etcd: &Etcd, authority: &Authority, path: &str, body: Value) {
    let wire = TlsWire::connect_in(etcd.address(), authority, None, &[b"http/1.1"]).await.unwrap();
    let (status, answer) = wire.ask_abrupt(&format!("POST /v3/{path}"), &body.to_string()).await.unwrap();
    assert_eq!(status, 200, "{path}: {answer}");
}

/// Gives etcd a root, and a user that may use one prefix, and has it ask everybody for a password.
async fn close(etcd: &Etcd, authority: &Authority) {
    // etcd takes bytes as base64: `/kvbaton/` to the next key after all that begin with it.
    let permission = json!({"permType": "READWRITE", "key": "L2t2YmF0b24v", "range_end": "L2t2YmF0b24w"});
    for (path, body) in [
        ("auth/user/add", json!({"name": "root", "password": "root-password"})),
        ("auth/role/add", json!({"name": "root"})),
        ("auth/user/grant", json!({"user": "root", "role": "root"})),
        ("auth/user/add", json!({"name": "kvbaton", "password": PASSWORD})),
        ("auth/role/add", json!({"name": "router"})),
        ("auth/role/grant", json!({"name": "router", "perm": permission})),
        ("auth/user/grant", json!({"user": "kvbaton", "role": "router"})),
        ("auth/enable", json!({})),
    ] {
        tell(etcd, authority, path, body).await;
    }
}

#[tokio::test]
async fn routers_log_in_to_an_etcd_with_tls_and_a_password() {
    let log = Log::capture_all(vec![AWAY, "store_unavailable"], Vec::new());
    let (authority, strangers) = (Authority::new(), Authority::new());
    let server = authority.identity("etcd", &["localhost"]);
    let tls = EtcdTls { server, client_ca: None };
    let Some(etcd) = Etcd::start_with(Some(tls)).await else { return log.forget() };
    close(&etcd, &authority).await;
    let with = |user: &'static str, password: &'static str, ca: &Authority| {
        let ca = ca.certificate.clone();
        move |store: &mut StoreSettings| {
            (store.user, store.password) = (Some(user.to_owned()), Some(password.to_owned()));
            store.ca = Some(ca);
        }
    };
    // One that may do only what it needs.
    let one = launch(&etcd, with("kvbaton", PASSWORD, &authority)).await;
    let two = launch(&etcd, with("root", "root-password", &authority)).await;
    wait(&log, "the first logs in", async || is_up(&one).await).await;
    wait(&log, "the second logs in", async || is_up(&two).await).await;
    let answer = register(&one, "e").await;
    assert_eq!(answer.status, 201, "{answer:?}");
    wait(&log, "both know the engine", async || knows(&two, "e").await).await;
    assert_eq!(log.lines(), Vec::<String>::new());

    let denied = launch(&etcd, with("kvbaton", "wrong-password", &authority)).await;
    let said = |text: &'static str| log.lines().iter().any(|line| line.contains(AWAY) && line.contains(text));
    wait(&log, "a wrong password is said", async || said("user or password")).await;
    let answer = register(&denied, "f").await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("store_unavailable")));
    let nobody = launch(&etcd, |store| store.ca = Some(authority.certificate.clone())).await;
    wait(&log, "that etcd wants a user is said", async || said("asks for a user")).await;
    let deceived = launch(&etcd, with("kvbaton", PASSWORD, &strangers)).await;
    wait(&log, "a wrong authority is said", async || said("certificate")).await;
    for router in [&denied, &nobody, &deceived] {
        assert!(!is_up(router).await);
    }
    for router in [one, two, denied, nobody, deceived] {
        assert!(router.drain().await);
    }
    let whole = log.whole();
    for secret in [PASSWORD, "wrong-password", "root-password"] {
        assert!(!whole.contains(secret), "{secret} is in the log");
    }
    log.check();
}

#[tokio::test]
async fn routers_show_a_certificate_to_an_etcd_that_wants_one() {
    let log = Log::capture(vec![AWAY], Vec::new());
    let (authority, clients) = (Authority::new(), Authority::new());
    let server = authority.identity("etcd", &["localhost"]);
    let tls = EtcdTls { server, client_ca: Some(clients.certificate.clone()) };
    let Some(etcd) = Etcd::start_with(Some(tls)).await else { return log.forget() };
    let own = clients.identity("router", &["router.fleet"]);
    let ca = authority.certificate.clone();
    let one = launch(&etcd, |store| {
        (store.ca, store.cert, store.key) = (Some(ca.clone()), own.cert(), own.key());
    })
    .await;
    wait(&log, "the certificate is taken", async || is_up(&one).await).await;
    assert_eq!(register(&one, "e").await.status, 201);
    assert_eq!(log.lines(), Vec::<String>::new());
    let without = launch(&etcd, |store| store.ca = Some(ca.clone())).await;
    let said = || log.lines().iter().any(|line| line.contains(AWAY) && line.contains("certificate"));
    wait(&log, "that etcd wants a certificate is said", async || said()).await;
    assert!(!is_up(&without).await);
    assert!(one.drain().await && without.drain().await);
    log.check();
}
