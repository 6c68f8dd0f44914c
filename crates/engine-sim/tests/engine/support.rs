//! Engines on free ports, a registry that keeps bytes, and a client.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::routing::{get, post as post_to, put};
use axum::{Json, Router};
use bytes::Bytes;
use engine_sim::{Engine, EngineConfig, EngineStats, Generation, LoadFailurePolicy, Role};
use http::StatusCode;
use parking_lot::Mutex;
use reqwest::Client;
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

type Payloads = Arc<Mutex<HashMap<(String, u32, u32), Bytes>>>;

/// What the engines told the registry besides their payloads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Told {
    Registration(Value),
    Heartbeat(Value),
    Departure,
}

#[derive(Clone, Default)]
struct Book {
    payloads: Payloads,
    told: Arc<Mutex<Vec<Told>>>,
}

pub(crate) struct Registry {
    pub(crate) url: url::Url,
    pub(crate) payloads: Payloads,
    pub(crate) told: Arc<Mutex<Vec<Told>>>,
}

#[derive(serde::Deserialize)]
struct RankBody {
    pp_rank: u32,
    tp_rank: u32,
    payload: RawBytes,
}

/// The bytes of msgpack, which a plain list of numbers is not.
struct RawBytes(Bytes);

impl<'de> serde::Deserialize<'de> for RawBytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = RawBytes;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<RawBytes, E> {
                Ok(RawBytes(Bytes::copy_from_slice(bytes)))
            }
        }
        deserializer.deserialize_bytes(Visitor)
    }
}

#[derive(serde::Deserialize)]
struct RegisterBody {
    ranks: Vec<RankBody>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

async fn register(State(book): State<Book>, Path(engine): Path<String>, body: Bytes) -> Json<Value> {
    let body: RegisterBody = rmp_serde::from_slice(&body).unwrap();
    for rank in body.ranks {
        book.payloads.lock().insert((engine.clone(), rank.pp_rank, rank.tp_rank), rank.payload.0);
    }
    book.told.lock().push(Told::Registration(Value::Object(body.rest)));
    Json(json!({"revision": 1, "router_clock": 0.5}))
}

async fn heartbeat(
    State(book): State<Book>,
    Path(engine): Path<String>,
    body: Bytes,
) -> Result<Json<Value>, StatusCode> {
    if !book.payloads.lock().contains_key(&(engine, 0, 0)) {
        return Err(StatusCode::NOT_FOUND);
    }
    book.told.lock().push(Told::Heartbeat(rmp_serde::from_slice(&body).unwrap()));
    Ok(Json(json!({"revision": 1, "router_clock": 1.5})))
}

async fn leave(State(book): State<Book>, Path(engine): Path<String>) -> StatusCode {
    book.payloads.lock().retain(|(known, _, _), _| *known != engine);
    book.told.lock().push(Told::Departure);
    StatusCode::NO_CONTENT
}

async fn fetch(State(book): State<Book>, Path(key): Path<(String, u32, u32)>) -> Result<Bytes, StatusCode> {
    book.payloads.lock().get(&key).cloned().ok_or(StatusCode::NOT_FOUND)
}

impl Registry {
    pub(crate) async fn start(tracker: &TaskTracker) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::on(listener, tracker)
    }

    pub(crate) fn on(listener: TcpListener, tracker: &TaskTracker) -> Self {
        let book = Book::default();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let app = Router::new()
            .route("/registry/v1/engines/{engine}", put(register).delete(leave))
            .route("/registry/v1/engines/{engine}/heartbeat", post_to(heartbeat))
            .route("/registry/v1/engines/{engine}/ranks/{pp}/{tp}", get(fetch))
            .with_state(book.clone());
        tracker.spawn(async move { axum::serve(listener, app).await });
        Self { url, payloads: book.payloads, told: book.told }
    }

    /// The first thing told that fits.
    pub(crate) async fn hears(&self, what: &str, fits: impl Fn(&Told) -> bool) -> Told {
        eventually(what, || self.told.lock().iter().any(&fits)).await;
        self.told.lock().iter().find(|told| fits(told)).cloned().unwrap()
    }

    pub(crate) async fn knows(&self, engine_id: &str) {
        eventually("the registry knows the engine", || {
            self.payloads.lock().contains_key(&(engine_id.to_owned(), 0, 0))
        })
        .await;
    }
}

pub(crate) async fn start(config: EngineConfig) -> Engine {
    engine_sim::spawn(config, TcpListener::bind("127.0.0.1:0").await.unwrap()).await.unwrap()
}

pub(crate) fn config(generation: Generation) -> EngineConfig {
    EngineConfig { max_model_len: 2048, ..EngineConfig::for_generation(generation) }
}

pub(crate) struct Pair {
    pub(crate) p: Engine,
    pub(crate) d: Engine,
    pub(crate) registry: Registry,
    pub(crate) client: Client,
    _tracker: TaskTracker,
}

impl Pair {
    pub(crate) async fn start(generation: Generation) -> Self {
        Self::with(generation, |_| {}, |_| {}).await
    }

    pub(crate) async fn with(
        generation: Generation,
        tune_p: impl FnOnce(&mut EngineConfig),
        tune_d: impl FnOnce(&mut EngineConfig),
    ) -> Self {
        let tracker = TaskTracker::new();
        let registry = Registry::start(&tracker).await;
        let mut p =
            EngineConfig { role: Role::Prefill, registry: Some(registry.url.clone()), ..config(generation) };
        let mut d =
            EngineConfig { role: Role::Decode, load_failure_policy: LoadFailurePolicy::Fail, ..p.clone() };
        tune_p(&mut p);
        tune_d(&mut d);
        let (p, d) = (start(p).await, start(d).await);
        registry.knows(p.engine_id()).await;
        Self { p, d, registry, client: Client::new(), _tracker: tracker }
    }

    /// The prefill leg: the answer's transfer parameters.
    pub(crate) async fn prefill(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = post(&self.client, &self.p, path, &prefill_body(body)).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 1);
        answer["kv_transfer_params"].clone()
    }

    /// Both legs: the decode engine's answer.
    pub(crate) async fn relay(&self, path: &str, body: &Value) -> Value {
        let params = self.prefill(path, body).await;
        let (status, answer) = post(&self.client, &self.d, path, &with_params(body, &params)).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Puts both engines in touch, so that later notifications need no handshake.
    pub(crate) async fn introduce(&self) {
        self.relay("/v1/completions", &completion("hello, peer", 1)).await;
        self.settled(&self.p).await;
    }

    /// The same for a prefill engine that must be nudged to look.
    pub(crate) async fn introduce_blind(&self) {
        self.relay("/v1/completions", &completion("hello, peer", 1)).await;
        post(&self.client, &self.p, "/v1/completions", &completion("nudge", 2)).await;
        self.settled(&self.p).await;
    }

    pub(crate) async fn settled(&self, engine: &Engine) {
        eventually("no block is held", || engine.stats().blocks_held == 0).await;
    }
}

pub(crate) fn completion(prompt: &str, max_tokens: u32) -> Value {
    json!({"model": "sim", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
}

pub(crate) fn chat(text: &str, max_tokens: u32) -> Value {
    json!({
        "model": "sim", "max_tokens": max_tokens, "temperature": 0,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}],
    })
}

pub(crate) fn long_prompt(name: &str) -> String {
    format!("case {name}: ") + &"the quick brown fox jumps over the lazy dog. ".repeat(8)
}

pub(crate) fn set(body: &Value, fields: Value) -> Value {
    let mut map: Map<String, Value> = body.as_object().unwrap().clone();
    map.extend(fields.as_object().unwrap().clone());
    Value::Object(map)
}

pub(crate) fn prefill_body(body: &Value) -> Value {
    let mut body = body.clone();
    let map = body.as_object_mut().unwrap();
    map.remove("stream");
    map.remove("stream_options");
    map.insert("max_tokens".into(), 1.into());
    map.insert(
        "kv_transfer_params".into(),
        json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        }),
    );
    body
}

pub(crate) fn with_params(body: &Value, params: &Value) -> Value {
    set(body, json!({ "kv_transfer_params": params }))
}

pub(crate) async fn send(client: &Client, engine: &Engine, path: &str, body: &Value) -> reqwest::Response {
    client.post(format!("{}{path}", engine.url())).json(body).send().await.unwrap()
}

pub(crate) async fn post(client: &Client, engine: &Engine, path: &str, body: &Value) -> (u16, Value) {
    let response = send(client, engine, path, body).await;
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

pub(crate) fn text_of(answer: &Value) -> String {
    let choice = &answer["choices"][0];
    let text = if choice["text"].is_string() { &choice["text"] } else { &choice["message"]["content"] };
    text.as_str().expect("a text").to_owned()
}

/// The JSON events of a stream; the last line must be the end marker.
pub(crate) fn events(body: &str) -> Vec<Value> {
    let mut lines: Vec<&str> = body.split("\n\n").filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.pop(), Some("data: [DONE]"));
    lines.iter().map(|line| serde_json::from_str(line.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

pub(crate) fn streamed_text(events: &[Value]) -> String {
    events
        .iter()
        .filter_map(|event| event["choices"].get(0))
        .filter_map(|choice| choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str()))
        .collect()
}

/// Waits for something that happens by itself soon.
pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(10), async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(waited.await.is_ok(), "never happened: {what}");
}

pub(crate) async fn stats_when(
    engine: &Engine,
    what: &str,
    condition: impl Fn(&EngineStats) -> bool,
) -> EngineStats {
    eventually(what, || condition(&engine.stats())).await;
    engine.stats()
}

/// A file of the captures, without a trailing newline.
pub(crate) fn capture(name: &str) -> String {
    let path = format!("{}/../../tests/fixtures/captures/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}
