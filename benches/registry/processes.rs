//! The processes that are measured: the router, and Python's listener beside it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/registry/zmq_listener.py");

/// A router without engines of its own; it is killed when dropped.
pub(super) struct Router {
    child: Child,
    pub(super) url: String,
}

impl Router {
    pub(super) fn start(settings: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbaton"));
        command.args(["--listen", "127.0.0.1:0", "--set", "fleet.embedded=never"]);
        // What pairs and probes cost is not what is measured here.
        command.args(["--set", "pairing.adopt_registered=false"]);
        command.args(settings.iter().flat_map(|setting| ["--set", setting]));
        let mut child = command.env_clear().stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("listens on") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "the router did not start");
        }
        let url = line.split_whitespace().find(|word| word.starts_with("http://")).unwrap().to_owned();
        // It goes on saying things, and must never wait for a reader.
        std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
        Self { child, url }
    }

    /// Memory that is resident now, in bytes.
    pub(super) fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap() * 1024
    }

    /// What all its threads have computed so far.
    pub(super) fn computed(&self) -> Duration {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let of_thread = threads.map(|thread| {
            let figures = std::fs::read_to_string(thread.unwrap().path().join("schedstat")).unwrap();
            figures.split_whitespace().next().unwrap().parse::<u64>().unwrap()
        });
        Duration::from_nanos(of_thread.sum())
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Python's listeners, all for one payload; they end when dropped.
pub(super) struct Python {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Python {
    /// `None` when this Python is missing or has not what a listener needs.
    pub(super) fn start(program: &str, payload: &[u8]) -> Option<Self> {
        let mut command = Command::new(program);
        command.arg(SCRIPT).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        let (orders, answers) = (child.stdin.take()?, BufReader::new(child.stdout.take()?));
        let mut python = Self { child, orders, answers };
        let hex: String = payload.iter().map(|byte| format!("{byte:02x}")).collect();
        (python.order(&hex).is_some() && python.answer()? == "ready").then_some(python)
    }

    /// Opens a listener and tells its port.
    pub(super) fn listen(&mut self) -> u16 {
        self.order("listen").unwrap();
        self.answer().unwrap().parse().unwrap()
    }

    /// Ends the last listener.
    pub(super) fn stop(&mut self) {
        self.order("stop").unwrap();
    }

    fn order(&mut self, order: &str) -> Option<()> {
        writeln!(self.orders, "{order}").ok()
    }

    fn answer(&mut self) -> Option<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).ok()?;
        Some(line.trim().to_owned())
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
