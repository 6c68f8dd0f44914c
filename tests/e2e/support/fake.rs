//! A socket that plays an engine byte by byte, for faults below HTTP and for bytes that no
//! simulated engine would send. Health, models and version are answered as an engine does.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::listen;

/// What is done with a request that is not a probe.
#[derive(Clone)]
pub(crate) enum Step {
    /// Send these bytes.
    Send(Vec<u8>),
    /// Wait for the gate.
    Wait(Gate),
    /// Open the gate: everything before has been taken by the router's side of the connection.
    Open(Gate),
    /// Reset the connection.
    Reset,
    /// Stay silent for ever.
    Hang,
}

/// Opened once by the test.
#[derive(Clone)]
pub(crate) struct Gate(watch::Sender<bool>);

impl Gate {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    pub(crate) fn open(&self) {
        self.0.send_replace(true);
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.0.borrow()
    }

    pub(crate) async fn pass(&self) {
        let mut open = self.0.subscribe();
        let _ = open.wait_for(|open| *open).await;
    }
}

/// A request as it came, head lines in their order.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) line: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Seen {
    /// All values of a header.
    pub(crate) fn values(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
    }
}

struct Script {
    version: String,
    models: String,
    steps: Vec<Step>,
    seen: Mutex<Vec<Seen>>,
}

/// The socket; it ends when dropped.
pub(crate) struct FakeEngine {
    pub(crate) addr: SocketAddr,
    script: Arc<Script>,
    _accept: JoinSet<()>,
}

impl FakeEngine {
    /// Plays the steps for every request that is not a probe, and closes the connection.
    pub(crate) async fn start(steps: Vec<Step>) -> Self {
        let models = r#"{"object":"list","data":[{"id":"sim","object":"model"}]}"#;
        Self::with_models(models, steps).await
    }

    /// As [`FakeEngine::start`] with another model list.
    pub(crate) async fn with_models(models: &str, steps: Vec<Step>) -> Self {
        let script = Arc::new(Script {
            version: r#"{"version":"0.32.0"}"#.to_owned(),
            models: models.to_owned(),
            steps,
            seen: Mutex::default(),
        });
        let listener = listen().await;
        let addr = listener.local_addr().unwrap();
        let mut accept = JoinSet::new();
        let shared = Arc::clone(&script);
        accept.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Self { addr, script, _accept: accept }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The requests that were no probes.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.script.seen.lock().clone()
    }
}

async fn serve(mut stream: TcpStream, script: Arc<Script>) {
    let Some(seen) = read_request(&mut stream).await else { return };
    let probe = |body: &str| http_answer("200 OK", "application/json", body);
    let answer = match seen.line.as_str() {
        "GET /health HTTP/1.1" => Some(http_answer("200 OK", "text/plain", "")),
        "GET /v1/models HTTP/1.1" => Some(probe(&script.models)),
        "GET /version HTTP/1.1" => Some(probe(&script.version)),
        _ => None,
    };
    if let Some(answer) = answer {
        let _ = stream.write_all(&answer).await;
        return;
    }
    script.seen.lock().push(seen);
    for step in &script.steps {
        match step {
            Step::Send(bytes) => {
                if stream.write_all(bytes).await.is_err() || stream.flush().await.is_err() {
                    return;
                }
            }
            Step::Wait(gate) => gate.pass().await,
            Step::Open(gate) => gate.open(),
            Step::Reset => {
                let _ = stream.set_zero_linger();
                return;
            }
            Step::Hang => std::future::pending().await,
        }
    }
    let _ = stream.shutdown().await;
}

async fn read_request(stream: &mut TcpStream) -> Option<Seen> {
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..head_end].to_vec()).ok()?;
    let mut lines = head.split("\r\n");
    let line = lines.next()?.to_owned();
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length: usize = length.map_or(0, |(_, value)| value.parse().unwrap());
    let mut body = bytes.split_off(head_end + 4);
    while body.len() < length {
        if stream.read_buf(&mut body).await.ok()? == 0 {
            return None;
        }
    }
    Some(Seen { line, headers, body })
}

/// A whole answer with a declared length.
pub(crate) fn http_answer(status: &str, content_type: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// The head of a chunked event stream.
pub(crate) fn sse_head() -> Vec<u8> {
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        .to_vec()
}

/// One chunk of a chunked body; an empty one ends it.
pub(crate) fn chunk(data: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()
}
