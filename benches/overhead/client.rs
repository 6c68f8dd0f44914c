//! The load: so many kept connections, each with one request at a time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::engine::{find, length};

/// What one client sends again and again.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) name: String,
    request: Vec<u8>,
}

impl Load {
    /// A completion whose prompt has about so many bytes.
    pub(crate) fn new(name: &str, prompt: usize, stream: bool) -> Self {
        let text = "lorem ipsum dolor sit amet ".repeat(prompt.div_ceil(27));
        let stream = if stream { r#","stream":true"# } else { "" };
        let body = format!(r#"{{"model":"mock","prompt":"{}","max_tokens":16{stream}}}"#, &text[..prompt]);
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n\
             authorization: Bearer x\r\naccept: */*\r\nuser-agent: overhead\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        Self { name: name.to_owned(), request: [head.as_bytes(), body.as_bytes()].concat() }
    }

    /// As a prefill engine gets it.
    pub(crate) fn as_prefill(&self) -> Self {
        let at = find(&self.request, b"\r\n\r\n").unwrap() + 4;
        let (head, body) = (String::from_utf8_lossy(&self.request[..at]), &self.request[at..]);
        let field = r#","kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#;
        let body = [&body[..body.len() - 1], field.as_bytes()].concat();
        let (was, is) = (self.request.len() - at, body.len());
        let head = head.replace(&format!("content-length: {was}"), &format!("content-length: {is}"));
        Self { name: self.name.clone(), request: [head.as_bytes(), &body].concat() }
    }

    /// The three loads of the table.
    pub(crate) fn all() -> [Self; 3] {
        [Self::new("answer", 96, false), Self::new("stream", 96, true), Self::new("long", 64_800, true)]
    }
}

/// What came of a load.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) took: Duration,
    /// Of the good ones, sorted.
    latencies: Vec<Duration>,
    pub(crate) bad: usize,
}

impl Sample {
    pub(crate) fn good(&self) -> usize {
        self.latencies.len()
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.good() as f64 / self.took.as_secs_f64()
    }

    /// The latency that such a part of the requests did not exceed, in milliseconds.
    pub(crate) fn latency(&self, part: f64) -> f64 {
        let at = (self.latencies.len() as f64 * part) as usize;
        let at = at.min(self.latencies.len().saturating_sub(1));
        self.latencies.get(at).map_or(f64::NAN, |latency| latency.as_secs_f64() * 1e3)
    }
}

/// Until when requests are begun.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Until {
    Over(Duration),
    /// So many by each connection.
    Requests(usize),
}

/// Runs a load.
pub(crate) fn run(addr: SocketAddr, load: &Load, connections: usize, until: Until) -> Sample {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let began = Instant::now();
    let each = runtime.block_on(join_all((0..connections).map(|_| one(addr, load, began, until))));
    let mut all = Sample { took: began.elapsed(), ..Sample::default() };
    for sample in each {
        all.bad += sample.bad;
        all.latencies.extend(sample.latencies);
    }
    all.latencies.sort_unstable();
    all
}

async fn one(addr: SocketAddr, load: &Load, began: Instant, until: Until) -> Sample {
    let (mut sample, mut stream, mut answer) = (Sample::default(), None, Vec::new());
    for number in 0.. {
        let goes_on = match until {
            Until::Over(lasts) => began.elapsed() < lasts,
            Until::Requests(count) => number < count,
        };
        if !goes_on {
            break;
        }
        let sent = Instant::now();
        match ask(addr, &mut stream, &load.request, &mut answer).await {
            Ok(()) if answer.starts_with(b"HTTP/1.1 200 ") => sample.latencies.push(sent.elapsed()),
            _ => {
                stream = None;
                sample.bad += 1;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
    sample
}

/// One request; `answer` holds all of its answer then.
async fn ask(
    addr: SocketAddr,
    kept: &mut Option<TcpStream>,
    request: &[u8],
    answer: &mut Vec<u8>,
) -> std::io::Result<()> {
    let stream = match kept {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect(addr).await?;
            stream.set_nodelay(true)?;
            kept.insert(stream)
        }
    };
    answer.clear();
    stream.write_all(request).await?;
    while !is_whole(answer) {
        if stream.read_buf(answer).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

fn is_whole(answer: &[u8]) -> bool {
    let Some(head) = find(&answer[..answer.len().min(2048)], b"\r\n\r\n") else { return false };
    match length(&answer[..head]) {
        0 => answer.ends_with(b"\r\n0\r\n\r\n"),
        length => answer.len() >= head + 4 + length,
    }
}

/// Streams that are opened at once: fewer than the engines' sockets queue.
const WAVE: usize = 100;

/// Streams that are open at the same time.
pub(crate) struct Open {
    _streams: Vec<TcpStream>,
    _runtime: tokio::runtime::Runtime,
}

/// Opens so many streams, and waits until each has begun.
pub(crate) fn open(addr: SocketAddr, load: &Load, count: usize) -> Open {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let streams = runtime.block_on(async {
        let mut streams = Vec::with_capacity(count);
        // In waves, for which an engine's queue of connections has room.
        for wave in (0..count).step_by(WAVE) {
            for _ in wave..count.min(wave + WAVE) {
                let mut stream = TcpStream::connect(addr).await.unwrap();
                stream.write_all(&load.request).await.unwrap();
                streams.push(stream);
            }
            for stream in &mut streams[wave..] {
                let mut begun = Vec::new();
                while find(&begun, b"data: ").is_none() {
                    let read = stream.read_buf(&mut begun).await.unwrap();
                    assert_ne!(read, 0, "a stream ended: {:?}", String::from_utf8_lossy(&begun));
                }
            }
        }
        streams
    });
    Open { _streams: streams, _runtime: runtime }
}
