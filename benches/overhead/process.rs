//! The routers that are measured, as processes: ours, and those that are installed.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::client::{self, Load, Until};
use crate::engine::Engines;

/// How long a router may take to serve its first request.
const PATIENCE: Duration = Duration::from_secs(60);

/// Of the kernel's clock for CPU times, on every Linux of this kind.
const TICKS_PER_SECOND: f64 = 100.0;

/// Who stands between the client and the engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// Nobody: the decode engine itself.
    Direct,
    /// One leg only: what any proxy costs.
    Nginx,
    VllmRouter,
    Kvbaton,
}

impl Who {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Nginx => "nginx, one leg",
            Self::VllmRouter => "vllm-router",
            Self::Kvbaton => "kvbaton",
        }
    }

    fn program(self) -> Option<PathBuf> {
        let on_path = |name: &str| {
            let path = std::env::var_os("PATH")?;
            std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
        };
        match self {
            Self::Direct => None,
            Self::Nginx => on_path("nginx"),
            Self::VllmRouter => std::env::var_os("KVBATON_BENCH_VLLM_ROUTER")
                .map(PathBuf::from)
                .or_else(|| on_path("vllm-router")),
            Self::Kvbaton => Some(kvbaton()),
        }
    }

    /// Those that can be measured here.
    pub(crate) fn installed() -> Vec<Self> {
        let all = [Self::Direct, Self::Nginx, Self::VllmRouter, Self::Kvbaton];
        all.into_iter().filter(|who| *who == Self::Direct || who.program().is_some()).collect()
    }
}

/// The program that is measured; another build of it by `KVBATON_BENCH_PROGRAM`.
pub(crate) fn kvbaton() -> PathBuf {
    let named = std::env::var_os("KVBATON_BENCH_PROGRAM");
    named.map_or_else(|| env!("CARGO_BIN_EXE_kvbaton").into(), PathBuf::from)
}

/// A running router; killed when dropped.
pub(crate) struct Router {
    child: Option<Child>,
    pub(crate) addr: SocketAddr,
    /// From the start of the process to the first answer.
    pub(crate) first_answer: Duration,
}

impl Router {
    /// Starts it and waits until it serves.
    pub(crate) fn start(who: Who, engines: &Engines) -> Self {
        if who == Who::Direct {
            return Self { child: None, addr: engines.decode_addr(), first_answer: Duration::ZERO };
        }
        let addr = free();
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let (prefill, decode) = (url(engines.prefill), url(engines.decode));
        let port = addr.port().to_string();
        let mut command = Command::new(who.program().unwrap());
        match who {
            Who::Nginx => {
                command.args(["-c", nginx_settings(addr, engines).to_str().unwrap(), "-e", "stderr"]);
            }
            Who::VllmRouter => {
                command.args(["--vllm-pd-disaggregation", "--prefill", &prefill, "--decode", &decode]);
                command.args(["--policy", "round_robin", "--kv-connector", "nixl", "--port", &port]);
                let metrics = free().port().to_string();
                command.args(["--log-level", "warning", "--max-concurrent-requests", "100000"]);
                command.args(["--prometheus-port", &metrics]);
            }
            Who::Direct | Who::Kvbaton => {
                command.args(["--listen", &addr.to_string(), "--prefill", &prefill, "--decode", &decode]);
                command.args(["--set", "log.level=error"]);
            }
        }
        Self::run(command, addr)
    }

    /// Our router with peers and settings of the caller's.
    pub(crate) fn kvbaton(arguments: &[String]) -> Self {
        let addr = free();
        let mut command = Command::new(kvbaton());
        command.args(["--listen", &addr.to_string(), "--set", "log.level=error"]).args(arguments);
        Self::run(command, addr)
    }

    pub(crate) fn run(mut command: Command, addr: SocketAddr) -> Self {
        // What tests and benchmarks are told by, our program would take for settings.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("KVBATON_") {
                command.env_remove(name);
            }
        }
        let began = Instant::now();
        let said = std::env::temp_dir().join(format!("kvbaton-overhead-said-{}", addr.port()));
        let errors = std::fs::File::create(&said).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors).spawn().unwrap();
        let mut router = Self { child: Some(child), addr, first_answer: Duration::ZERO };
        let load = Load::new("first", 96, false);
        loop {
            if std::net::TcpStream::connect(addr).is_ok()
                && client::run(addr, &load, 1, Until::Requests(1)).good() == 1
            {
                router.first_answer = began.elapsed();
                let _ = std::fs::remove_file(said);
                return router;
            }
            let ended = router.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_some());
            if ended || began.elapsed() > PATIENCE {
                let why = std::fs::read_to_string(&said).unwrap_or_default();
                panic!(
                    "{command:?} does not serve (it {}): {why}",
                    if ended { "ended" } else { "is silent" }
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Asks it to end and waits until it has.
    pub(crate) fn end(mut self) {
        if let Some(mut child) = self.child.take() {
            let asked = Command::new("kill").arg(child.id().to_string()).status().unwrap();
            assert!(asked.success() && child.wait().unwrap().success());
        }
    }

    /// CPU time of it and of its children so far.
    pub(crate) fn cpu(&self) -> Duration {
        let ticks: u64 = self.tree().into_iter().filter_map(ticks).sum();
        Duration::from_secs_f64(ticks as f64 / TICKS_PER_SECOND)
    }

    /// Memory that is resident now, in bytes.
    pub(crate) fn resident(&self) -> u64 {
        self.tree().into_iter().filter_map(|pid| status(pid, "VmRSS:")).sum()
    }

    /// The most memory that was ever resident, in bytes.
    pub(crate) fn most_resident(&self) -> u64 {
        self.tree().into_iter().filter_map(|pid| status(pid, "VmHWM:")).sum()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    fn tree(&self) -> Vec<u32> {
        let (mut all, mut next) = (Vec::new(), Vec::from_iter(self.child.as_ref().map(Child::id)));
        while let Some(pid) = next.pop() {
            all.push(pid);
            let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            next.extend(
                children.unwrap_or_default().split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()),
            );
        }
        all
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let children = self.tree();
        if let Some(child) = &mut self.child {
            let mut others = Command::new("kill");
            // A master process ends its workers; one that is killed cannot.
            let _ = others.args(children.iter().map(u32::to_string)).stderr(Stdio::null()).status();
            std::thread::sleep(Duration::from_millis(200));
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}

fn status(pid: u32, field: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// An address that nobody listens on now.
pub(crate) fn free() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

fn nginx_settings(addr: SocketAddr, engines: &Engines) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("kvbaton-overhead-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let text = format!(
        "worker_processes 1; daemon off; pid {0}/nginx.pid; events {{ worker_connections 4096; }}\n\
         http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 1m; proxy_buffering off;\n\
         upstream engine {{ server 127.0.0.1:{1}; keepalive 512; }}\n\
         server {{ listen {addr} reuseport; location / {{ proxy_pass http://engine; proxy_http_version 1.1; \
         proxy_set_header Connection \"\"; }} }} }}\n",
        folder.display(),
        engines.decode
    );
    let file = folder.join("nginx.conf");
    std::fs::write(&file, text).unwrap();
    file
}
