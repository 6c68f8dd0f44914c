//! The program in processes of its own, and how tests talk to them.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Answer;

const BINARY: &str = env!("CARGO_BIN_EXE_kvbaton");
/// Far above what a loaded machine needs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A started program; it is killed when dropped.
pub(crate) struct Program {
    pub(crate) child: Child,
    lines: mpsc::Receiver<String>,
    /// What it logs, where that is kept.
    log: Option<mpsc::Receiver<String>>,
}

impl Program {
    pub(crate) fn start(args: &[&str], env: &[(&str, &str)]) -> Self {
        Self::start_with(args, env, false)
    }

    /// As [`Program::start`], and keeps the log for [`Program::log_until`].
    pub(crate) fn start_logging(args: &[&str], env: &[(&str, &str)]) -> Self {
        Self::start_with(args, env, true)
    }

    fn start_with(args: &[&str], env: &[(&str, &str)], logs: bool) -> Self {
        let mut command = Command::new(BINARY);
        command.args(args).env_clear().env("PATH", std::env::var("PATH").unwrap());
        command.envs(env.iter().copied()).stdout(Stdio::piped()).stderr(if logs {
            Stdio::piped()
        } else {
            Stdio::inherit()
        });
        let mut child = command.spawn().unwrap();
        let lines = lines_of(child.stdout.take().unwrap());
        let log = child.stderr.take().map(lines_of);
        Self { child, lines, log }
    }

    /// All lines of the log until the condition holds; each line is given once.
    pub(crate) fn log_until(&self, holds: impl Fn(&[String]) -> bool) -> Vec<String> {
        let (end, mut log) = (Instant::now() + PATIENCE, Vec::new());
        while !holds(&log) {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.log.as_ref().unwrap().recv_timeout(left);
            log.push(line.unwrap_or_else(|_| panic!("not in the log: {log:#?}")));
        }
        log
    }

    /// The first line that contains the mark.
    pub(crate) fn line(&self, mark: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|_| panic!("no line with {mark:?}"));
            if line.contains(mark) {
                return line;
            }
        }
    }

    /// The base URL in the first line that contains the mark.
    pub(crate) fn url(&self, mark: &str) -> String {
        let line = self.line(mark);
        let at = line.find("http://").unwrap_or_else(|| panic!("no URL in {line:?}"));
        line[at..].split_whitespace().next().unwrap().to_owned()
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "the program did not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines_of(out: impl std::io::Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    lines
}

/// Runs the program to its end.
pub(crate) fn run(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(BINARY);
    command.args(args).env_clear().envs(env.iter().copied());
    command.output().unwrap()
}

pub(crate) fn http() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30)).build().unwrap()
}

pub(crate) async fn post(base: &str, path: &str, body: &Value) -> Answer {
    let request = http().post(format!("{base}{path}")).header("content-type", "application/json");
    Answer::read(request.body(body.to_string())).await
}

pub(crate) async fn get(base: &str, path: &str) -> Answer {
    Answer::read(http().get(format!("{base}{path}"))).await
}

pub(crate) async fn wait_ready(base: &str) {
    let end = Instant::now() + PATIENCE;
    while get(base, "/readyz").await.status != 200 {
        assert!(Instant::now() < end, "{base} is not ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn wait_registered(base: &str, engines: usize) {
    let end = Instant::now() + PATIENCE;
    while get(base, "/registry/v1/engines").await.json()["engines"].as_array().unwrap().len() < engines {
        assert!(Instant::now() < end, "the engines of {base} are not registered");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How many hand-offs were relayed and how many pulls the engines at these URLs made.
pub(crate) async fn counted(base: &str, decode: &[String]) -> (u64, u64) {
    let page = get(base, "/metrics").await.text();
    let relayed =
        page.lines().find_map(|line| line.strip_prefix("kvbaton_handoffs_total{result=\"relayed\"} "));
    let mut pulls = 0;
    for url in decode {
        let page = get(url, "/metrics").await.text();
        let mut lines = page.lines().filter(|line| line.starts_with("vllm:nixl_xfer_time_seconds_count"));
        pulls += lines.next().unwrap().rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64;
    }
    (relayed.map_or(0, |count| count.parse().unwrap()), pulls)
}
