//! Mock engines: as little as an engine can do and still be taken for one. They answer at once, or with a
//! pause before each chunk, and share one thread.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::TaskTracker;

const MODELS: &str =
    r#"{"object":"list","data":[{"id":"mock","object":"model","created":1,"owned_by":"vllm"}]}"#;
const ANSWER: &str = r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"mock","choices":[{"index":0,"text":" hello world","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":8,"completion_tokens":2,"total_tokens":10}}"#;
const EVENT: &str = "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1,\"model\":\"mock\",\"choices\":[{\"index\":0,\"text\":\"token \",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";

/// Blocks of each hand-off.
const BLOCKS: u64 = 64;

/// A running pair of engines. They listen on every address of this host, so that a fleet of a thousand can be
/// made of them.
pub(crate) struct Engines {
    pub(crate) prefill: u16,
    pub(crate) decode: u16,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    chunks: AtomicU64,
    /// Before each chunk but the first, in microseconds.
    pause: AtomicU64,
    prefills: AtomicU64,
    decodes: AtomicU64,
}

impl Engines {
    pub(crate) fn start() -> Self {
        let bind = || std::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let (prefill, decode) = (bind(), bind());
        let shared = Arc::new(Shared::default());
        shared.chunks.store(16, Ordering::Relaxed);
        let started = Self {
            prefill: prefill.local_addr().unwrap().port(),
            decode: decode.local_addr().unwrap().port(),
            shared: Arc::clone(&shared),
        };
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async { tokio::join!(serve(prefill, &shared), serve(decode, &shared)) });
        });
        started
    }

    /// From now on streams have so many chunks, with a pause before each but the first.
    pub(crate) fn stream(&self, chunks: u64, pause: Duration) {
        self.shared.chunks.store(chunks, Ordering::Relaxed);
        self.shared.pause.store(pause.as_micros() as u64, Ordering::Relaxed);
    }

    /// Prefills and decodes from pulled blocks so far.
    pub(crate) fn served(&self) -> (u64, u64) {
        (self.shared.prefills.load(Ordering::Relaxed), self.shared.decodes.load(Ordering::Relaxed))
    }

    pub(crate) fn decode_addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.decode).into()
    }
}

async fn serve(listener: std::net::TcpListener, shared: &Arc<Shared>) {
    listener.set_nonblocking(true).unwrap();
    let (listener, connections) = (TcpListener::from_std(listener).unwrap(), TaskTracker::new());
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        stream.set_nodelay(true).unwrap();
        let shared = Arc::clone(shared);
        connections.spawn(async move {
            // Whoever leaves in the middle is no failure.
            let _ = answer_all(stream, &shared).await;
        });
    }
}

async fn answer_all(mut stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    let mut came = BytesMut::with_capacity(128 << 10);
    loop {
        let head = loop {
            if let Some(end) = find(&came, b"\r\n\r\n") {
                break end + 4;
            }
            if stream.read_buf(&mut came).await? == 0 {
                return Ok(());
            }
        };
        let length = length(&came[..head]);
        while came.len() < head + length {
            if stream.read_buf(&mut came).await? == 0 {
                return Ok(());
            }
        }
        let request = came.split_to(head + length);
        let (head, body) = request.split_at(head);
        let answer = match body {
            [] if find(head, b" /v1/models").is_some() => json(MODELS),
            [] => json(r#"{"version":"0.14.0"}"#),
            body if find(body, b"\"do_remote_decode\":true").is_some() => {
                shared.prefills.fetch_add(1, Ordering::Relaxed);
                json(&prefilled(head))
            }
            body => {
                if find(body, b"\"do_remote_prefill\":true").is_some() {
                    shared.decodes.fetch_add(1, Ordering::Relaxed);
                }
                if find(body, b"\"stream\":true").is_some() {
                    events(&mut stream, shared).await?;
                    continue;
                }
                json(ANSWER)
            }
        };
        stream.write_all(answer.as_bytes()).await?;
    }
}

fn json(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn prefilled(head: &[u8]) -> String {
    let name = b"x-request-id: ";
    let id = find(head, name).map_or(&b"none"[..], |at| {
        head[at + name.len()..].split(|byte| *byte == b'\r').next().unwrap_or_default()
    });
    let id = String::from_utf8_lossy(id);
    let blocks: Vec<String> = (0..BLOCKS).map(|block| (1000 + block * 7).to_string()).collect();
    format!(
        r#"{{"id":"cmpl-{id}","object":"text_completion","created":1,"model":"mock","choices":[{{"index":0,"text":"x","logprobs":null,"finish_reason":"length"}}],"usage":{{"prompt_tokens":8,"completion_tokens":1,"total_tokens":9}},"kv_transfer_params":{{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[{}]],"remote_engine_id":"p0","remote_request_id":"cmpl-{id}-0","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}}}}"#,
        blocks.join(",")
    )
}

async fn events(stream: &mut TcpStream, shared: &Shared) -> std::io::Result<()> {
    let (chunks, pause) = (shared.chunks.load(Ordering::Relaxed), shared.pause.load(Ordering::Relaxed));
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    for chunk in 0..chunks {
        if pause > 0 && chunk > 0 {
            tokio::time::sleep(Duration::from_micros(pause)).await;
        } else {
            // Each chunk is a segment of its own, as a token is.
            tokio::task::yield_now().await;
        }
        stream.write_all(format!("{:x}\r\n{EVENT}\r\n", EVENT.len()).as_bytes()).await?;
    }
    stream.write_all(format!("{:x}\r\n{DONE}\r\n0\r\n\r\n", DONE.len()).as_bytes()).await
}

pub(crate) fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

/// What a head says of its body's length.
pub(crate) fn length(head: &[u8]) -> usize {
    let lines = head.split(|byte| *byte == b'\n');
    let mut value = lines.filter_map(|line| {
        let at = line.iter().position(|byte| *byte == b':')?;
        line[..at].eq_ignore_ascii_case(b"content-length").then(|| line[at + 1..].trim_ascii())
    });
    value.next_back().and_then(|value| std::str::from_utf8(value).ok()?.parse().ok()).unwrap_or(0)
}
