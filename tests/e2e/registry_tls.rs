//! Engines that register and shake hands over TLS: authorities, client certificates, and what goes wrong.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use engine_sim::{ClientIdentity, Engine, EngineConfig, RegistryTls, Role};
use kv_connector::handshake::{RegistryClient, RegistryError};
use kvbaton::Running;
use kvbaton::config::{Config, Credential, CredentialRole, Embedded, Tls};
use url::Url;

use crate::support::process::{Program, post, run};
use crate::support::{
    Authority, COMPLETIONS, Identity, Log, PROMPT, completion, engine_config, listen, single_text,
};

/// What the engines' certificates are known by.
const ENGINES: &str = "spiffe://fleet/engines";

/// A router whose registry speaks TLS, and the authorities of both sides.
struct Fleet {
    running: Running,
    servers: Authority,
    clients: Authority,
    log: Log,
}

impl Fleet {
    /// With client certificates wanted or not.
    async fn start(wants_certificates: bool) -> Self {
        let log = Log::capture(Vec::new(), vec!["not usable by its probes"]);
        let (servers, clients) = (Authority::new(), Authority::new());
        let server = servers.identity("server", &["localhost"]);
        let mut config = Config { listen: "127.0.0.1:0".parse().unwrap(), ..Config::default() };
        config.fleet.embedded = Embedded::Never;
        config.probe.interval = Duration::from_millis(100);
        config.probe.timeout = Duration::from_secs(20);
        config.shutdown.settle = Duration::ZERO;
        config.registry.listen = Some("127.0.0.1:0".parse().unwrap());
        config.registry.tls = Tls { cert: server.cert(), key: server.key(), ..Tls::default() };
        if wants_certificates {
            config.registry.tls.client_ca = Some(clients.certificate.clone());
            config.credentials = vec![Credential {
                name: "fleet".into(),
                role: CredentialRole::Engine,
                sha256: Vec::new(),
                token_file: None,
                certificates: vec![ENGINES.to_owned()],
                models: Vec::new(),
            }];
        }
        let running = config.build().await.unwrap().spawn().await.unwrap();
        Self { running, servers, clients, log }
    }

    fn registry(&self) -> SocketAddr {
        self.running.registry_addr()
    }

    fn url(&self) -> String {
        format!("https://{}", self.registry())
    }

    fn tls(&self, trusted: &Authority, shown: Option<&Identity>) -> RegistryTls {
        let identity = shown.map(|shown| ClientIdentity { cert: read(&shown.cert), key: read(&shown.key) });
        RegistryTls { ca: Some(read(&trusted.certificate)), identity }
    }

    fn client(&self, trusted: &Authority, shown: Option<&Identity>) -> RegistryClient {
        RegistryClient::with_tls(self.url(), None, &self.tls(trusted, shown)).unwrap()
    }

    async fn pair(&self, tls: &RegistryTls) -> Vec<Engine> {
        let mut engines = Vec::new();
        for role in [Role::Prefill, Role::Decode] {
            let config = EngineConfig {
                role,
                registry: Some(Url::parse(&self.url()).unwrap()),
                registry_tls: tls.clone(),
                ..engine_config(self.registry())
            };
            engines.push(engine_sim::spawn(config, listen().await).await.unwrap());
        }
        engines
    }

    async fn serves(&self) {
        assert!(self.running.ready_within(Duration::from_secs(60)).await, "{:#?}", self.log.lines());
        let body = completion(PROMPT, 6);
        let answer = post(&format!("http://{}", self.running.addr()), COMPLETIONS, &body).await;
        assert_eq!(answer.generated(), single_text(COMPLETIONS, &body).await);
    }

    async fn finish(self) {
        assert!(self.running.drain().await);
        self.log.check();
    }
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[tokio::test]
async fn engines_register_and_shake_hands_over_tls() {
    let fleet = Fleet::start(false).await;
    let engines = fleet.pair(&fleet.tls(&fleet.servers, None)).await;
    fleet.serves().await;
    assert_eq!(engines[1].stats().kv_pulls, 1);
    let strangers = Authority::new();
    let wrong = fleet.client(&strangers, None).fetch(engines[0].engine_id(), 0, 0).await;
    assert_eq!(wrong, Err(RegistryError::Untrusted));
    let public = RegistryClient::new(fleet.url(), None).unwrap();
    assert_eq!(public.fetch(engines[0].engine_id(), 0, 0).await, Err(RegistryError::Untrusted));
    let right = fleet.client(&fleet.servers, None).fetch(engines[0].engine_id(), 0, 0).await;
    assert!(right.is_ok(), "{right:?}");
    // TLS spoken to a listener that does not.
    let plain = format!("https://{}", fleet.running.addr());
    let tls = fleet.tls(&fleet.servers, None);
    let plain = RegistryClient::with_tls(plain, None, &tls).unwrap();
    assert_eq!(plain.fetch("e", 0, 0).await, Err(RegistryError::NoTls));
    for engine in engines {
        engine.shutdown().await;
    }
    fleet.finish().await;
}

#[tokio::test]
async fn engines_show_the_certificate_that_the_registry_wants() {
    let fleet = Fleet::start(true).await;
    let own = fleet.clients.identity("engine", &[ENGINES]);
    let engines = fleet.pair(&fleet.tls(&fleet.servers, Some(&own))).await;
    fleet.serves().await;
    let id = engines[0].engine_id();
    let fetch = async |shown: Option<&Identity>| fleet.client(&fleet.servers, shown).fetch(id, 0, 0).await;
    assert!(fetch(Some(&own)).await.is_ok());
    let known_to_nobody = fleet.clients.identity("other", &["spiffe://fleet/others"]);
    assert_eq!(fetch(Some(&known_to_nobody)).await, Err(RegistryError::Refused { status: 401 }));
    // With TLS 1.3 the refusal may overtake the handshake or come as the end of the connection.
    let strangers = Authority::new();
    let forged = strangers.identity("forged", &[ENGINES]);
    for shown in [None, Some(&forged)] {
        let refused = fetch(shown).await.unwrap_err();
        assert!(matches!(refused, RegistryError::NotLetIn | RegistryError::Unreachable), "{refused:?}");
    }
    for engine in engines {
        engine.shutdown().await;
    }
    fleet.finish().await;
}

#[tokio::test]
async fn the_engine_program_reads_its_certificates_from_files() {
    let fleet = Fleet::start(true).await;
    let own = fleet.clients.identity("engine", &[ENGINES]);
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (url, ca, cert, key) =
        (fleet.url(), text(&fleet.servers.certificate), text(&own.cert), text(&own.key));
    let args = ["engine", "--role", "prefill", "--registry", &url, "--engine-id", "of-a-program"];
    let tls = ["--registry-ca", &ca, "--registry-cert", &cert, "--registry-key", &key];
    let engine = Program::start(&[&args[..], &tls[..]].concat(), &[]);
    engine.line("simulated engine of-a-program");
    let client = fleet.client(&fleet.servers, Some(&own));
    let end = Instant::now() + Duration::from_secs(60);
    while client.fetch("of-a-program", 0, 0).await == Err(RegistryError::Unknown) {
        assert!(Instant::now() < end, "it does not register");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(client.fetch("of-a-program", 0, 0).await.is_ok());
    drop(engine);

    let half = run(&[&args[..], &tls[..4]].concat(), &[]);
    assert!(!half.status.success());
    assert!(String::from_utf8_lossy(&half.stderr).contains("--registry-key"), "{half:?}");
    let missing = [&args[..], &["--registry-ca", "/nowhere/ca.pem"]].concat();
    let missing = run(&missing, &[]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("/nowhere/ca.pem"), "{missing:?}");
    // A key is no certificate.
    let unusable = run(&[&args[..], &["--registry-ca", &key]].concat(), &[]);
    let said = String::from_utf8_lossy(&unusable.stderr).into_owned();
    assert!(!unusable.status.success() && said.contains("the authority for TLS cannot be used"), "{said}");
    fleet.finish().await;
}
