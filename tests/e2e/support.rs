//! A whole deployment in one process: the program on a free port and simulated engines that
//! register themselves with it. Waits are bounded; nothing sleeps for luck.

mod builder;
mod client;
mod collector;
mod credential;
mod dns;
#[cfg(feature = "etcd")]
mod etcd;
mod fake;
mod file;
#[cfg(feature = "kubernetes")]
pub(crate) mod kubernetes;
mod log;
mod pki;
pub(crate) mod process;
mod wire;

use std::future::Future;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use engine_sim::{Engine, EngineConfig, SeenRequest};
use kvbaton::Running;
use serde_json::{Value, json};
use tokio::net::TcpListener;

pub(crate) use builder::Builder;
pub(crate) use client::{Answer, events, http as http_client, stream_text};
pub(crate) use collector::{Collector, Mood, attribute};
pub(crate) use credential::credential;
pub(crate) use dns::{DnsServer, Mood as DnsMood, Rr};
#[cfg(feature = "etcd")]
pub(crate) use etcd::{Etcd, EtcdTls, Gate as EtcdGate};
pub(crate) use fake::{FakeEngine, Gate, Step, chunk, http_answer, sse_head};
pub(crate) use file::File;
pub(crate) use log::Log;
pub(crate) use pki::{Authority, Front, Identity, TlsWire};
pub(crate) use wire::{End, Wire, request};

pub(crate) const COMPLETIONS: &str = "/v1/completions";
pub(crate) const CHAT: &str = "/v1/chat/completions";
/// Far below every lease and every deadline, far above what a loaded machine needs.
pub(crate) const SOON: Duration = Duration::from_secs(10);

/// A running deployment.
pub(crate) struct Cluster {
    running: Running,
    pub(crate) addr: SocketAddr,
    pub(crate) prefill: Vec<Engine>,
    pub(crate) decode: Vec<Engine>,
    http: reqwest::Client,
    token: Option<String>,
    log: Log,
    _front: Option<Front>,
}

impl Cluster {
    pub(crate) fn builder() -> Builder {
        Builder::one_of_each()
    }

    /// The first prefill engine.
    pub(crate) fn p(&self) -> &Engine {
        &self.prefill[0]
    }

    /// The first decode engine.
    pub(crate) fn d(&self) -> &Engine {
        &self.decode[0]
    }

    pub(crate) fn url(&self, path: &str) -> String {
        let addr = if path.starts_with("/registry") {
            self.running.registry_addr()
        } else if path.starts_with("/admin") || path == "/metrics" {
            self.running.admin_addr().unwrap_or(self.addr)
        } else {
            self.addr
        };
        format!("http://{addr}{path}")
    }

    /// The program, for what it does not show over HTTP.
    pub(crate) fn running(&self) -> &Running {
        &self.running
    }

    /// Whether the router has warned of something.
    pub(crate) fn log_has(&self, text: &str) -> bool {
        self.log.lines().iter().any(|line| line.contains(text))
    }

    /// Everything that was logged so far.
    pub(crate) fn log(&self) -> String {
        self.log.whole()
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_bytes(path, body.to_string(), &[]).await
    }

    pub(crate) async fn post_bytes(
        &self,
        path: &str,
        body: impl Into<reqwest::Body>,
        headers: &[(&str, &str)],
    ) -> Answer {
        let mut request =
            self.http.post(self.url(path)).header("content-type", "application/json").body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Answer::read(request).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], "").await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<reqwest::Body>,
    ) -> Answer {
        let mut request = self.http.request(method.parse().unwrap(), self.url(path)).body(body);
        if let Some(token) = self.token.as_ref().filter(|_| !headers.iter().any(|h| h.0 == "authorization")) {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Answer::read(request).await
    }

    /// The sum of the samples of a metric that carry these labels; 0 when there is none.
    pub(crate) async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        sample(&self.get("/metrics").await.text(), name, labels)
    }

    /// The relayed hand-offs so far.
    pub(crate) async fn relayed(&self) -> f64 {
        self.metric("kvbaton_handoffs_total", &[("result", "relayed")]).await
    }

    /// The released hand-offs so far.
    pub(crate) async fn released(&self) -> f64 {
        self.metric("kvbaton_handoffs_total", &[("result", "released")]).await
    }

    pub(crate) async fn wait_ready(&self) {
        self.wait_for("the router is ready", async || self.get("/readyz").await.status == 200).await;
    }

    /// Waits until every engine of the cluster has put its handshake into the registry.
    pub(crate) async fn wait_registered(&self) {
        let ids: Vec<String> =
            self.prefill.iter().chain(&self.decode).map(|engine| engine.engine_id().to_owned()).collect();
        self.wait_for("all engines are registered", async || {
            let text = self.get("/registry/v1/engines").await.text();
            ids.iter().all(|id| text.contains(id.as_str()))
        })
        .await;
    }

    /// Polls until the condition holds.
    pub(crate) async fn wait_for(&self, what: &str, mut holds: impl AsyncFnMut() -> bool) {
        let end = Instant::now() + SOON;
        while !holds().await {
            assert!(Instant::now() < end, "not within {SOON:?}: {what}; {}", self.story());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until no request holds a block on any engine.
    pub(crate) async fn wait_no_blocks(&self) {
        let held = || {
            let all = self.prefill.iter().chain(&self.decode);
            let held = all.map(|engine| (engine.addr().port(), engine.stats()));
            held.filter(|(_, stats)| stats.blocks_held > 0).collect::<Vec<_>>()
        };
        let end = Instant::now() + SOON;
        while !held().is_empty() {
            assert!(Instant::now() < end, "blocks are still held: {:#?}; {}", held(), self.story());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// What happened, for a failed test's reader: the router's warnings, and each engine's requests.
    fn story(&self) -> String {
        let mut story = format!("log: {:#?}", self.log.lines());
        for engine in self.prefill.iter().chain(&self.decode) {
            for seen in generations(engine).iter().rev().take(4) {
                let body = String::from_utf8_lossy(&seen.body[..seen.body.len().min(600)]);
                story.push_str(&format!("\n{} {} {body}", engine.addr(), seen.path));
            }
        }
        story
    }

    /// Waits until the router accounts for nothing any more.
    pub(crate) async fn wait_idle(&self) {
        self.wait_for("no peer has anything in flight and no hand-off is live", async || {
            let peers = self.get("/admin/peers").await.json();
            let idle = peers["peers"].as_array().unwrap().iter().all(|peer| peer["in_flight"] == 0);
            idle && self.get("/admin/handoffs").await.json() == json!({"handoffs": []})
        })
        .await;
    }

    /// Fails when an answer tells where an engine is.
    pub(crate) fn assert_hides_engines(&self, answer: &Answer) {
        let said = answer.everything();
        for word in ["127.0.0.1", "localhost", "http://", "tcp://"] {
            assert!(!said.contains(word), "an answer contains {word:?}: {said}");
        }
        for engine in self.prefill.iter().chain(&self.decode) {
            let port = format!(":{}", engine.addr().port());
            assert!(!said.contains(&port), "an answer contains an engine's port: {said}");
        }
    }

    /// An error in OpenAI's shape, with this status and code, that tells nothing of the engines.
    pub(crate) fn assert_error(&self, answer: &Answer, status: u16, code: &str) {
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.header("content-type"), "application/json", "{answer:?}");
        let body = answer.json();
        let keys: Vec<&String> = body["error"].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"], "{answer:?}");
        assert_eq!(body["error"]["code"], code, "{answer:?}");
        assert!(body["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{answer:?}");
        assert!(body["error"]["type"].is_string(), "{answer:?}");
        self.assert_hides_engines(answer);
    }

    /// Ends everything and checks that no engine died and that the router warned of nothing else
    /// than the test expects.
    pub(crate) async fn finish(self) {
        self.end().await.check();
    }

    /// As [`Cluster::finish`] where warnings are not what the test is about.
    pub(crate) async fn finish_whatever_was_warned(self) {
        self.end().await.forget();
    }

    async fn end(self) -> Log {
        let Self { running, prefill, decode, http, log, .. } = self;
        drop(http);
        assert!(running.drain().await, "the router did not end in time");
        for engine in prefill.into_iter().chain(decode) {
            assert!(!engine.stats().dead, "an engine died");
            engine.shutdown().await;
        }
        log
    }
}

/// Settings of an engine that belongs to the router at this address.
pub(crate) fn engine_config(router: SocketAddr) -> EngineConfig {
    EngineConfig {
        registry: Some(format!("http://{router}").parse().unwrap()),
        registry_refresh: Duration::from_millis(50),
        request_log: 4096,
        keep_alive: Duration::from_secs(60),
        ..EngineConfig::default()
    }
}

/// A listener on a free port.
pub(crate) async fn listen() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

/// One engine that serves the request alone.
pub(crate) async fn single(path: &str, body: &Value) -> Answer {
    single_with(path, body, |_| {}).await
}

/// As [`single`] with other settings.
pub(crate) async fn single_with(path: &str, body: &Value, tune: impl Fn(&mut EngineConfig)) -> Answer {
    let mut config = EngineConfig::default();
    tune(&mut config);
    let engine = engine_sim::spawn(config, listen().await).await.unwrap();
    let url = format!("http://{}{path}", engine.addr());
    let request = client::http().post(url).header("content-type", "application/json").body(body.to_string());
    let answer = Answer::read(request).await;
    engine.shutdown().await;
    answer
}

/// The text that one engine alone generates.
pub(crate) async fn single_text(path: &str, body: &Value) -> String {
    single(path, body).await.generated()
}

/// The generation requests that an engine has seen.
pub(crate) fn generations(engine: &Engine) -> Vec<SeenRequest> {
    let paths = [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages"];
    let is_generation = |seen: &SeenRequest| paths.contains(&seen.path.as_str());
    engine.requests().into_iter().filter(is_generation).collect()
}

/// The only generation request that an engine has seen.
pub(crate) fn only(engine: &Engine) -> SeenRequest {
    let mut all = generations(engine);
    assert_eq!(all.len(), 1, "requests seen: {all:?}");
    all.remove(0)
}

pub(crate) fn parse(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(body)))
}

/// A sample of an engine's own metrics page.
pub(crate) async fn engine_metric(engine: &Engine, name: &str, labels: &[(&str, &str)]) -> f64 {
    let page = Answer::read(client::http().get(format!("http://{}/metrics", engine.addr()))).await.text();
    sample(&page, name, labels)
}

/// The sum of the samples of a metrics page that carry these labels.
pub(crate) fn sample(page: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let of_name = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    page.lines()
        .filter(of_name)
        .filter(|line| labels.iter().all(|(key, value)| line.contains(&format!("{key}=\"{value}\""))))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum()
}

/// Fails instead of hanging.
pub(crate) async fn bounded<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.unwrap_or_else(|_| panic!("not within {SOON:?}: {what}"))
}

/// A completion of so many tokens.
pub(crate) fn completion(prompt: &str, max_tokens: u64) -> Value {
    json!({"model": "sim", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
}

/// A chat completion of so many tokens.
pub(crate) fn chat(content: &str, max_tokens: u64) -> Value {
    json!({"model": "sim", "messages": [{"role": "user", "content": content}],
           "max_tokens": max_tokens, "temperature": 0})
}

/// A prompt of several blocks.
pub(crate) const PROMPT: &str =
    "The quick brown fox jumps over the lazy dog; then it sleeps in the warm sun.";
