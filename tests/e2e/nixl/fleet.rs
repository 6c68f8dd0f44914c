//! A router and engines over NIXL, each in a process of its own.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::process::{PATIENCE, Program, get, post, wait_ready};
use crate::support::{Answer, COMPLETIONS, completion, sample, single_with};

/// Where scripts/nixl-setup installs, unless it was told otherwise. `None`, and said so, where NIXL is
/// not installed and nobody insists on it.
pub(crate) fn installation() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let home = variable("KVBATON_NIXL_HOME").or_else(|| {
        let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")))?;
        Some(cache.join("kvbaton/nixl-1.5.1"))
    });
    let installed = home.filter(|home| home.join("complete").exists());
    if installed.is_none() {
        assert!(variable("KVBATON_REQUIRE_NIXL").is_none(), "NIXL is required but not installed");
        eprintln!("skipped: NIXL is not installed (scripts/nixl-setup installs it)");
    }
    installed
}

/// One engine's process.
pub(super) struct Node {
    pub(super) program: Program,
    pub(super) url: String,
    pub(super) id: String,
    role: String,
    args: Vec<String>,
}

impl Node {
    pub(super) async fn stats(&self) -> Value {
        get(&self.url, "/sim/stats").await.json()
    }

    pub(super) async fn metric(&self, name: &str) -> f64 {
        sample(&get(&self.url, "/metrics").await.text(), name, &[])
    }

    /// Stops all its threads, and waits until they have.
    pub(super) fn stop(&self) {
        self.program.signal("STOP");
        let tasks = format!("/proc/{}/task", self.program.child.id());
        let stopped = |task: std::io::Result<std::fs::DirEntry>| {
            // One that has ended meanwhile does nothing either.
            let Ok(status) = std::fs::read_to_string(task.unwrap().path().join("status")) else {
                return true;
            };
            status.lines().any(|line| line.starts_with("State:\tT"))
        };
        while !std::fs::read_dir(&tasks).unwrap().all(stopped) {
            std::thread::yield_now();
        }
    }

    /// Polls the engine's statistics until they are as they should be.
    pub(super) async fn wait_for(&self, what: &str, holds: impl Fn(&Value) -> bool) {
        let end = Instant::now() + PATIENCE;
        loop {
            let stats = self.stats().await;
            if holds(&stats) {
                return;
            }
            assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}; {stats}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until no request holds a block. An idle engine of generation v2 hears nothing, so it is
    /// kept from being idle.
    pub(super) async fn wait_no_blocks(&self) {
        let end = Instant::now() + PATIENCE;
        loop {
            post(&self.url, COMPLETIONS, &completion("nothing", 1)).await;
            let stats = self.stats().await;
            if stats["blocks_held"] == 0 {
                return;
            }
            assert!(Instant::now() < end, "blocks are held: {stats}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Holds decode legs that arrive until they are let in.
    pub(super) async fn hold(&self) {
        self.order(json!({"hold": [{"stage": "arrival", "leg": "decode"}]})).await;
    }

    /// Waits until so many completions have ever arrived.
    pub(super) async fn arrived(&self, count: usize) {
        let end = Instant::now() + PATIENCE;
        while self.completions().await < count {
            assert!(Instant::now() < end, "{count} requests did not arrive");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub(super) async fn completions(&self) -> usize {
        let seen = get(&self.url, "/sim/requests").await.json();
        let of_path = |request: &&Value| request["path"] == COMPLETIONS;
        seen.as_array().unwrap().iter().filter(of_path).count()
    }

    pub(super) async fn let_in(&self) {
        self.order(json!({"release": ["arrival"]})).await;
    }

    async fn order(&self, order: Value) {
        let answer = post(&self.url, "/sim/faults", &order).await;
        assert!(answer.status < 300, "{}", answer.everything());
    }

    /// Kills the process; whatever it was doing is cut off.
    pub(super) fn kill(&mut self) {
        self.program.child.kill().unwrap();
        self.program.child.wait().unwrap();
    }

    /// Resident memory in bytes.
    pub(super) fn resident(&self) -> u64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.program.child.id())).unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }
}

/// A router and its engines.
pub(super) struct Fleet {
    router: Program,
    pub(super) base: String,
    library: String,
    env: Vec<(&'static str, &'static str)>,
    pub(super) prefill: Vec<Node>,
    pub(super) decode: Vec<Node>,
}

impl Fleet {
    /// A router with these settings and no engine yet.
    pub(super) async fn start(nixl: &std::path::Path, settings: &[&str]) -> Self {
        let mut args = vec!["--listen", "127.0.0.1:0", "--set", "fleet.embedded=never"];
        args.extend(["--set", "probe.interval=200ms", "--set", "shutdown.settle=0s"]);
        args.extend(settings.iter().flat_map(|setting| ["--set", setting]));
        let router = Program::start(&args, &[]);
        let base = router.url("listens on");
        let library = nixl.to_str().unwrap().to_owned();
        let env = vec![("UCX_NET_DEVICES", "lo")];
        Self { router, base, library, env, prefill: Vec::new(), decode: Vec::new() }
    }

    /// Engines that are added from now on get a setting of UCX.
    pub(super) fn ucx(mut self, name: &'static str, value: &'static str) -> Self {
        self.env.push((name, value));
        self
    }

    /// Adds an engine and makes it the router's peer.
    pub(super) async fn add(&mut self, role: &str, args: &[&str]) {
        let node = self.engine(role, "127.0.0.1:0", args.iter().map(|arg| (*arg).to_owned()).collect());
        let answer = post(&self.base, "/admin/peers", &json!({"role": role, "url": node.url})).await;
        assert_eq!(answer.status, 201, "{}", answer.everything());
        if role == "prefill" { &mut self.prefill } else { &mut self.decode }.push(node);
    }

    fn engine(&self, role: &str, listen: &str, args: Vec<String>) -> Node {
        let mut all = vec!["engine", "--transport", "nixl", "--nixl-library", &self.library];
        all.extend(["--role", role, "--listen", listen, "--registry", &self.base]);
        all.extend(args.iter().map(String::as_str));
        let program = Program::start(&all, &self.env);
        let line = program.line("simulated engine");
        let (id, url) = line.strip_prefix("simulated engine ").unwrap().split_once(" on ").unwrap();
        let (id, url, role) = (id.to_owned(), url.to_owned(), role.to_owned());
        Node { program, url, id, role, args }
    }

    /// A new process at the address of one that was killed.
    pub(super) fn successor(&self, node: &Node) -> Node {
        self.engine(&node.role, node.url.strip_prefix("http://").unwrap(), node.args.clone())
    }

    /// Waits until the router has pairs and knows the handshakes of all engines.
    pub(super) async fn wait_ready(&self) {
        wait_ready(&self.base).await;
        let end = Instant::now() + PATIENCE;
        loop {
            let known = get(&self.base, "/registry/v1/engines").await.text();
            let peers = get(&self.base, "/admin/peers").await.json();
            let probed = peers["peers"].as_array().unwrap().iter().all(|peer| peer["state"] == "ready");
            if probed && self.prefill.iter().chain(&self.decode).all(|node| known.contains(&node.id)) {
                return;
            }
            assert!(Instant::now() < end, "{peers} and {known} do not hold all engines");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> Answer {
        post(&self.base, path, body).await
    }

    /// Asks every process to leave; none may have crashed.
    pub(super) fn finish(self) {
        let engines = self.prefill.into_iter().chain(self.decode).map(|node| node.program);
        for mut program in engines.chain([self.router]) {
            program.signal("TERM");
            assert_eq!(program.wait().code(), Some(0));
        }
    }
}

/// What one engine of a generation generates alone.
pub(super) async fn expected(path: &str, body: &Value, generation: &str) -> String {
    let v2 = generation == "v2";
    let answer = single_with(path, body, |config| {
        if v2 {
            *config = engine_sim::EngineConfig::for_generation(engine_sim::Generation::V2);
        }
    });
    answer.await.generated()
}
