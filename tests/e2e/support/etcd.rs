//! A real etcd with a directory of its own, and gates that cut a router off from it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::{Answer, Identity, http_client, listen};

/// An etcd of one member; gone with the value.
pub(crate) struct Etcd {
    process: Option<Child>,
    directory: PathBuf,
    client: SocketAddr,
    peer: SocketAddr,
    /// Where it tells whether it is well, always in plain.
    health: SocketAddr,
    tls: Option<EtcdTls>,
}

/// TLS towards etcd's clients.
#[derive(Clone)]
pub(crate) struct EtcdTls {
    pub(crate) server: Identity,
    /// The authority whose certificates clients must show, where they must.
    pub(crate) client_ca: Option<PathBuf>,
}

impl Etcd {
    /// `None` when there is none on this machine, unless one is required.
    pub(crate) async fn start() -> Option<Self> {
        Self::start_with(None).await
    }

    /// As [`Etcd::start`] with TLS towards its clients.
    pub(crate) async fn start_with(tls: Option<EtcdTls>) -> Option<Self> {
        let is_required = std::env::var("KVBATON_REQUIRE_ETCD").is_ok_and(|value| value == "1");
        if !is_required && Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_err() {
            return None;
        }
        let (client, peer, health) = (free_address().await, free_address().await, free_address().await);
        let name = format!("kvbaton-etcd-{}-{}", std::process::id(), client.port());
        let mut etcd =
            Self { process: None, directory: std::env::temp_dir().join(name), client, peer, health, tls };
        etcd.launch().await;
        Some(etcd)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.client
    }

    /// Starts it, with what it knew before.
    pub(crate) async fn launch(&mut self) {
        let url = |address: SocketAddr| format!("http://{address}");
        let (client, peer, health) = (url(self.client), url(self.peer), url(self.health));
        let client = if self.tls.is_some() { client.replace("http:", "https:") } else { client };
        let mut command = Command::new("etcd");
        if let Some(tls) = &self.tls {
            command.arg("--cert-file").arg(&tls.server.cert).arg("--key-file").arg(&tls.server.key);
            if let Some(client_ca) = &tls.client_ca {
                command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(client_ca);
            }
        }
        let process = command
            .args(["--name", "e", "--logger", "zap", "--log-level", "error"])
            .arg("--data-dir")
            .arg(&self.directory)
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-metrics-urls", &health])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("e={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("etcd starts (Debian: etcd-server)");
        self.process = Some(process);
        let end = Instant::now() + Duration::from_secs(60);
        let url = format!("{health}/health");
        loop {
            let answer = http_client().get(&url).send().await;
            if answer.is_ok_and(|answer| answer.status().is_success()) {
                return;
            }
            assert!(Instant::now() < end, "etcd does not answer");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Ends it without a word.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Forgets all that it knew; only when it was killed.
    pub(crate) fn wipe(&self) {
        std::fs::remove_dir_all(&self.directory).unwrap();
    }

    async fn call(&self, path: &str, body: &Value) -> Value {
        let request = http_client().post(format!("http://{}{path}", self.client)).body(body.to_string());
        let answer = Answer::read(request).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    /// Its revision.
    pub(crate) async fn revision(&self) -> i64 {
        let answer = self.call("/v3/kv/range", &json!({"key": "AA=="})).await;
        answer["header"]["revision"].as_str().unwrap().parse().unwrap()
    }

    /// Forgets how it came to be as it is.
    pub(crate) async fn compact(&self) {
        let revision = self.revision().await;
        self.call("/v3/kv/compaction", &json!({"revision": revision, "physical": true})).await;
    }

    /// The names of its keys, in order.
    pub(crate) async fn keys(&self) -> Vec<String> {
        let everything = json!({"key": "AA==", "range_end": "AA==", "keys_only": true});
        let answer = self.call("/v3/kv/range", &everything).await;
        let keys = answer["kvs"].as_array().cloned().unwrap_or_default();
        keys.iter().map(|key| text_of_base64(key["key"].as_str().unwrap())).collect()
    }

    /// The names of its keys that belong to engines.
    pub(crate) async fn engines_keys(&self) -> Vec<String> {
        let mut keys = self.keys().await;
        let of_engines = ["/engines/", "/addresses/", "/clocks/", "/payloads/"];
        keys.retain(|key| of_engines.iter().any(|level| key.contains(level)));
        keys
    }
}

fn text_of_base64(text: &str) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for digit in text.bytes().filter(|digit| *digit != b'=') {
        let value = DIGITS.iter().position(|known| *known == digit).unwrap();
        (bits, count) = (bits << 6 | u32::try_from(value).unwrap(), count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 0xff).unwrap());
        }
    }
    String::from_utf8(bytes).unwrap()
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// An address that was free a moment ago: etcd cannot be handed a listener.
async fn free_address() -> SocketAddr {
    listen().await.local_addr().unwrap()
}

/// A way to an address, or to several in turn, that can be cut.
pub(crate) struct Gate {
    address: SocketAddr,
    open: watch::Sender<bool>,
    _task: AbortOnDropHandle<()>,
}

impl Gate {
    pub(crate) async fn to(targets: Vec<SocketAddr>) -> Self {
        let listener = listen().await;
        let address = listener.local_addr().unwrap();
        let open = watch::Sender::new(true);
        let task = AbortOnDropHandle::new(spawn(accept(listener, Arc::new(targets), open.clone())));
        Self { address, open, _task: task }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all connections and lets none through.
    pub(crate) fn cut(&self) {
        self.open.send_replace(false);
    }

    pub(crate) fn mend(&self) {
        self.open.send_replace(true);
    }
}

async fn accept(listener: TcpListener, targets: Arc<Vec<SocketAddr>>, open: watch::Sender<bool>) {
    let mut next = 0;
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        next += 1;
        if *open.borrow() {
            spawn(relay(client, Arc::clone(&targets), next, open.subscribe()));
        }
    }
}

async fn relay(
    mut client: TcpStream,
    targets: Arc<Vec<SocketAddr>>,
    first: usize,
    mut open: watch::Receiver<bool>,
) {
    for offset in 0..targets.len() {
        let target = targets[(first + offset) % targets.len()];
        if let Ok(mut server) = TcpStream::connect(target).await {
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                _ = open.wait_for(|open| !open) => {}
            }
            return;
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a test's own tasks end with its runtime")]
fn spawn(future: impl Future<Output = ()> + Send + 'static) -> tokio::task::JoinHandle<()> {
    tokio::spawn(future)
}
