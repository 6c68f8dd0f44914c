//! A Kubernetes API that plays recorded answers: lists in pages, and watches that a test feeds, breaks and ends.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures_util::stream;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::listen;

/// The recorded list at the beginning, and a later one.
pub(crate) const LIST: &str = include_str!("../../fixtures/kubernetes/list.json");
pub(crate) const LIST_LATER: &str = include_str!("../../fixtures/kubernetes/list-later.json");
pub(crate) const FORBIDDEN: &str = include_str!("../../fixtures/kubernetes/forbidden.json");
pub(crate) const EXPIRED: &str = include_str!("../../fixtures/kubernetes/expired.json");
const WATCH: &str = include_str!("../../fixtures/kubernetes/watch.jsonl");

/// What a watch sends.
type Part = Result<Bytes, std::io::Error>;

#[derive(Default)]
struct Played {
    /// The engines' port in place of the recorded one.
    port: u16,
    list: String,
    /// In place of a list or of a watch: a recorded status.
    refuse: HashMap<&'static str, &'static str>,
    /// Answers of these watches begin with this event.
    greeting: Option<String>,
    /// The queries of lists and of watches.
    lists: Vec<HashMap<String, String>>,
    watches: Vec<HashMap<String, String>>,
    authorization: Vec<Option<String>>,
    open: Vec<mpsc::UnboundedSender<Part>>,
}

#[derive(Clone)]
pub(crate) struct KubeApi {
    pub(crate) addr: SocketAddr,
    played: Arc<Mutex<Played>>,
    _serving: Arc<JoinSet<()>>,
}

impl KubeApi {
    /// Serves the recorded list, whose engines listen on this port.
    pub(crate) async fn start(port: u16) -> Self {
        let listener = listen().await;
        let addr = listener.local_addr().unwrap();
        let played = Arc::new(Mutex::new(Played { port, list: LIST.to_owned(), ..Played::default() }));
        let app = Router::new()
            .route("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", get(answer))
            .with_state(Arc::clone(&played));
        let mut serving = JoinSet::new();
        serving.spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { addr, played, _serving: Arc::new(serving) }
    }

    /// Lists are this one from now on.
    pub(crate) fn list(&self, recorded: &str) {
        self.played.lock().list = recorded.to_owned();
    }

    /// `list` or `watch` is answered with this status, or with none any more.
    pub(crate) fn refuse(&self, verb: &'static str, status: Option<&'static str>) {
        let mut played = self.played.lock();
        match status {
            Some(status) => drop(played.refuse.insert(verb, status)),
            None => drop(played.refuse.remove(verb)),
        }
    }

    /// The next watches begin with this event of type ERROR.
    pub(crate) fn greet(&self, status: Option<&str>) {
        let event = |status: &str| {
            let object: Value = serde_json::from_str(status).unwrap();
            json!({"type": "ERROR", "object": object}).to_string() + "\n"
        };
        self.played.lock().greeting = status.map(event);
    }

    /// Sends the recorded event of this number to all watches.
    pub(crate) fn event(&self, number: usize) {
        let mut played = self.played.lock();
        let line = with_port(WATCH.lines().nth(number).unwrap(), played.port) + "\n";
        // In two pieces: the network does not know of lines.
        let (one, other) = line.split_at(line.len() / 2);
        played.open.retain(|watch| {
            watch.send(Ok(Bytes::copy_from_slice(one.as_bytes()))).is_ok()
                && watch.send(Ok(Bytes::copy_from_slice(other.as_bytes()))).is_ok()
        });
    }

    /// Ends all watches in order.
    pub(crate) fn end(&self) {
        self.played.lock().open.clear();
    }

    /// Breaks all watches off.
    pub(crate) fn break_off(&self) {
        for watch in self.played.lock().open.drain(..) {
            let _ = watch.send(Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset)));
        }
    }

    pub(crate) fn lists(&self) -> Vec<HashMap<String, String>> {
        self.played.lock().lists.clone()
    }

    pub(crate) fn watches(&self) -> Vec<HashMap<String, String>> {
        self.played.lock().watches.clone()
    }

    pub(crate) fn authorization(&self) -> Vec<Option<String>> {
        self.played.lock().authorization.clone()
    }
}

fn with_port(recorded: &str, port: u16) -> String {
    recorded.replace("\"port\": 8000", "\"port\":8000").replace("\"port\":8000", &format!("\"port\":{port}"))
}

async fn answer(
    State(played): State<Arc<Mutex<Played>>>,
    Path(namespace): Path<String>,
    Query(query): Query<HashMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    assert_eq!(namespace, "llm");
    let mut played = played.lock();
    let authorization = headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
    played.authorization.push(authorization);
    let watches = query.get("watch").is_some_and(|watch| watch == "true");
    let verb = if watches { "watch" } else { "list" };
    if watches { &mut played.watches } else { &mut played.lists }.push(query.clone());
    let json = [("content-type", "application/json")];
    if let Some(status) = played.refuse.get(verb) {
        let code = serde_json::from_str::<Value>(status).unwrap()["code"].as_u64().unwrap();
        return (StatusCode::from_u16(code.try_into().unwrap()).unwrap(), json, *status).into_response();
    }
    if !watches {
        return (json, page(&with_port(&played.list, played.port), query.get("continue"))).into_response();
    }
    let (tell, told) = mpsc::unbounded_channel();
    if let Some(greeting) = played.greeting.clone() {
        tell.send(Ok(greeting.into())).unwrap();
    }
    played.open.push(tell);
    let parts = stream::unfold(told, |mut told| async move { Some((told.recv().await?, told)) });
    (json, Body::from_stream(parts)).into_response()
}

/// One item of a list, with a token for the next one.
fn page(list: &str, token: Option<&String>) -> String {
    let mut list: Value = serde_json::from_str(list).unwrap();
    let at: usize = token.map_or(0, |token| token.parse().unwrap());
    let items = list["items"].as_array().unwrap().clone();
    list["items"] = items.get(at).map_or_else(|| json!([]), |item| json!([item]));
    if at + 1 < items.len() {
        list["metadata"]["continue"] = (at + 1).to_string().into();
    }
    list.to_string()
}
