//! Child processes that hold an agent, and the lines of JSON that steer them.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// Set for a child: where its steering socket is.
pub(crate) const STEERED: &str = "KVBATON_TEST_PEER_PORT";

/// Where scripts/nixl-setup installs, unless it was told otherwise.
pub(crate) fn home() -> PathBuf {
    std::env::var_os("KVBATON_NIXL_HOME").map(PathBuf::from).unwrap_or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
        cache.unwrap_or_default().join("kvbaton/nixl-1.5.1")
    })
}

/// False, and said so, where NIXL is not installed and nobody insists on it.
pub(crate) fn installed() -> bool {
    let complete = home().join("complete").exists();
    if !complete {
        assert!(std::env::var_os("KVBATON_REQUIRE_NIXL").is_none(), "NIXL is required but not installed");
        eprintln!("skipped: NIXL is not installed (scripts/nixl-setup installs it)");
    }
    complete
}

/// A child and its steering socket; it is killed when dropped.
pub(crate) struct Steered {
    process: Child,
    lines: BufReader<TcpStream>,
}

impl Steered {
    /// A child that runs an agent of this crate.
    pub(crate) fn rust(env: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "peer::serves_its_parent", "--nocapture"]);
        Self::spawn(command, env)
    }

    /// A child that runs an agent of Python's nixl.
    pub(crate) fn python(env: &[(&str, &str)]) -> Self {
        let venv = home().join("venv/bin/python");
        let mut command = Command::new(if venv.exists() { venv } else { "python3".into() });
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/python/nixl_peer.py"));
        command.env("PYTHONPATH", home().join("python"));
        Self::spawn(command, env)
    }

    fn spawn(mut command: Command, env: &[(&str, &str)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        command.arg(&port).env(STEERED, &port).env("UCX_NET_DEVICES", "lo").stdout(Stdio::null());
        command.envs(env.iter().copied());
        let mut process = command.spawn().unwrap();
        listener.set_nonblocking(true).unwrap();
        let connection = loop {
            match listener.accept() {
                Ok((connection, _)) => break connection,
                Err(_) => assert_eq!(process.try_wait().unwrap(), None, "the child has ended"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        connection.set_nonblocking(false).unwrap();
        connection.set_nodelay(true).unwrap();
        connection.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self { process, lines: BufReader::new(connection) }
    }

    /// The child's answer, which may be an error.
    pub(crate) fn try_ask(&mut self, ask: &Value) -> Value {
        self.lines.get_mut().write_all(format!("{ask}\n").as_bytes()).unwrap();
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("no answer to {}", ask["do"]))
    }

    /// The child's answer, which must not be an error.
    pub(crate) fn ask(&mut self, ask: Value) -> Value {
        let answer = self.try_ask(&ask);
        assert_eq!(answer["error"], Value::Null, "{}", ask["do"]);
        answer
    }

    /// Starts the agent; `len` bytes of memory are registered.
    pub(crate) fn start(&mut self, name: &str, len: usize) -> Started {
        self.start_with(json!({"do": "start", "name": name, "len": len, "progress": "thread"}))
    }

    pub(crate) fn start_with(&mut self, ask: Value) -> Started {
        let answer = self.ask(ask);
        Started {
            name: answer["name"].as_str().unwrap().to_owned(),
            blob: answer["blob"].as_str().unwrap().to_owned(),
            base: answer["base"].as_u64().unwrap(),
        }
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Whether the process still runs.
    pub(crate) fn lives(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }
}

impl Drop for Steered {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What an agent says of itself.
#[derive(Debug, Clone)]
pub(crate) struct Started {
    pub(crate) name: String,
    pub(crate) blob: String,
    pub(crate) base: u64,
}
