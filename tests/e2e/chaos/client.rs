//! One client of many: what it asks, when it leaves, and whether what it got is right.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use engine_sim::{EngineConfig, Generation};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::dice::Dice;
use crate::support::{Answer, CHAT, COMPLETIONS, chat, completion, events, listen, request};

const PATHS: [&str; 2] = [COMPLETIONS, CHAT];
const PROMPTS: usize = 96;
const LENGTHS: [u64; 3] = [1, 7, 24];
/// Nothing takes longer, or it hangs.
const PATIENCE: Duration = Duration::from_secs(90);

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Question {
    path: &'static str,
    prompt: usize,
    max_tokens: u64,
}

impl Question {
    fn draw(dice: &mut Dice) -> Self {
        Self { path: *dice.pick(&PATHS), prompt: dice.below(PROMPTS), max_tokens: *dice.pick(&LENGTHS) }
    }

    fn body(&self) -> Value {
        let words = "the quick brown fox jumps over the lazy dog; ".repeat(1 + self.prompt % 7);
        let prompt = format!("{} {words}", self.prompt);
        match self.path {
            COMPLETIONS => completion(&prompt, self.max_tokens),
            _ => chat(&prompt, self.max_tokens),
        }
    }
}

/// What one engine alone answers to every question.
#[derive(Clone)]
pub(super) struct Truth(Arc<HashMap<Question, String>>);

impl Truth {
    pub(super) async fn learn(generation: Generation) -> Self {
        let engine =
            engine_sim::spawn(EngineConfig::for_generation(generation), listen().await).await.unwrap();
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        let mut truth = HashMap::new();
        for path in PATHS {
            for prompt in 0..PROMPTS {
                for max_tokens in LENGTHS {
                    let question = Question { path, prompt, max_tokens };
                    let asked = http.post(format!("{}{path}", engine.url())).json(&question.body());
                    truth.insert(question, Answer::read(asked).await.generated());
                }
            }
        }
        drop(http);
        engine.shutdown().await;
        Self(Arc::new(truth))
    }
}

/// When a client leaves before its answer is whole.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    Never,
    /// Having sent this share of its request, in thousandths.
    WhileSending(usize),
    After(Duration),
    /// Having read so many bytes.
    HavingRead(usize),
}

/// How it went for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Left,
    Right,
    /// It was told what is wrong.
    Told(String),
    /// Neither the right answer nor one clear error.
    Wronged(String),
}

/// A client.
pub(super) struct Client {
    question: Question,
    stream: bool,
    leaves: Leaves,
    truth: Truth,
}

impl Client {
    pub(super) fn draw(dice: &mut Dice, truth: &Truth) -> Self {
        let question = Question::draw(dice);
        let stream = dice.one_in(2);
        let leaves = match dice.below(10) {
            0 => Leaves::WhileSending(dice.below(1000)),
            1..=3 => Leaves::After(dice.moment(150)),
            4 => Leaves::HavingRead(1 + dice.below(1200)),
            _ => Leaves::Never,
        };
        Self { question, stream, leaves, truth: truth.clone() }
    }

    pub(super) async fn run(self, router: SocketAddr) -> Fate {
        match tokio::time::timeout(PATIENCE, self.ask(router)).await {
            Ok(Some(answer)) => self.judge(&answer),
            Ok(None) => Fate::Left,
            Err(_) => Fate::Wronged(format!("no end: {:?} stream={}", self.question, self.stream)),
        }
    }

    /// Everything that the router sent; none if the client left before the end.
    async fn ask(&self, router: SocketAddr) -> Option<Vec<u8>> {
        let mut body = self.question.body();
        body["stream"] = json!(self.stream);
        let bytes = request(self.question.path, &[("connection", "close")], &body.to_string());
        let mut socket = TcpStream::connect(router).await.unwrap();
        if let Leaves::WhileSending(share) = self.leaves {
            socket.write_all(&bytes[..bytes.len() * share / 1000]).await.unwrap();
            return None;
        }
        socket.write_all(&bytes).await.unwrap();
        let mut answer = Vec::new();
        let read = async {
            loop {
                match socket.read_buf(&mut answer).await {
                    Ok(0) | Err(_) => return true,
                    Ok(_) => {}
                }
                if matches!(self.leaves, Leaves::HavingRead(most) if answer.len() >= most) {
                    return false;
                }
            }
        };
        let whole = match self.leaves {
            Leaves::After(time) => tokio::time::timeout(time, read).await.unwrap_or(false),
            _ => read.await,
        };
        whole.then_some(answer)
    }

    fn judge(&self, answer: &[u8]) -> Fate {
        let wronged = |what: &str| {
            let answer = String::from_utf8_lossy(answer);
            Fate::Wronged(format!("{what}: {:?} stream={}: {answer:?}", self.question, self.stream))
        };
        let Some((status, body)) = unframe(answer) else { return wronged("not one whole answer") };
        let truth = &self.truth.0[&self.question];
        if status != 200 {
            let body: Value = serde_json::from_str(&body).unwrap_or_default();
            return match told(&body) {
                Some(told) => Fate::Told(format!("{status} {told}")),
                None => wronged("no clear error"),
            };
        }
        if !self.stream {
            let body: Value = serde_json::from_str(&body).unwrap_or_default();
            return if text(&body, "message") == Some(truth) { Fate::Right } else { wronged("wrong") };
        }
        let mut events = events(&body);
        let done = events.last().is_some_and(|last| last == "[DONE]");
        events.retain(|event| event != "[DONE]");
        let mut said = String::new();
        for event in &events {
            let event: Value = serde_json::from_str(event).unwrap_or_default();
            if let Some(told) = told(&event) {
                return if truth.starts_with(&said) {
                    Fate::Told(told)
                } else {
                    wronged("wrong before an error")
                };
            }
            said.push_str(text(&event, "delta").unwrap_or_default());
        }
        if done && said == *truth { Fate::Right } else { wronged("wrong stream") }
    }
}

fn text<'a>(answer: &'a Value, part: &str) -> Option<&'a str> {
    let choice = &answer["choices"][0];
    choice["text"].as_str().or_else(|| choice[part]["content"].as_str())
}

/// The error that an answer or an event tells.
fn told(body: &Value) -> Option<String> {
    let error = body.get("error")?;
    error["message"].as_str().filter(|message| !message.is_empty())?;
    Some(error["code"].to_string())
}

/// Status and body of exactly one answer with a whole body.
fn unframe(answer: &[u8]) -> Option<(u16, String)> {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&answer[..end]).ok()?.to_ascii_lowercase();
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let mut rest = &answer[end + 4..];
    if let Some(length) = head.lines().find_map(|line| line.strip_prefix("content-length: ")) {
        let whole = rest.len() == length.parse::<usize>().ok()?;
        return Some((status, String::from_utf8(rest.to_vec()).ok()?)).filter(|_| whole);
    }
    head.contains("transfer-encoding: chunked").then_some(())?;
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|window| window == b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).ok()?, 16).ok()?;
        rest = &rest[line + 2..];
        if size == 0 {
            return (rest == b"\r\n").then_some((status, String::from_utf8(body).ok()?));
        }
        body.extend_from_slice(rest.get(..size)?);
        rest = rest.get(size + 2..)?;
    }
}
