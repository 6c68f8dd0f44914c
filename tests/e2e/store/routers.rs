//! Routers on one etcd, and a load balancer before them.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use engine_sim::{Engine, EngineConfig};
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::{AgentMetadataV2, NixlAgentMetadata};
use kvbaton::Running;
use kvbaton::config::{Config, Embedded};
use kvbaton_proxy::{StoreKind, UnknownPairs};
use serde_json::Value;
use tokio::net::TcpListener;

use crate::support::{Answer, Etcd, EtcdGate, Log, engine_config, http_client, listen};

/// etcd, three routers, each with a gate between itself and etcd, and the balancer.
pub(super) struct Routers {
    pub(super) etcd: Etcd,
    pub(super) addrs: Vec<SocketAddr>,
    pub(super) gates: Vec<EtcdGate>,
    pub(super) balancer: EtcdGate,
    running: Vec<Option<Running>>,
    engines: Engines,
    http: reqwest::Client,
    log: Log,
}

/// What the routers do with engines that register.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Engines {
    /// They use them.
    Used,
    /// They only know them: the engines are made up.
    Known,
}

/// A deployment is on one machine with many others: what is awaited is far below this.
const SOON: Duration = Duration::from_secs(60);

impl Routers {
    /// `None` without an etcd on this machine. The routers may warn of what contains these texts.
    pub(super) async fn start(engines: Engines, warnings: &[&'static str]) -> Option<Self> {
        // Of an engine that leaves either its departure is seen first or that it does not answer.
        let log = Log::capture(warnings.to_vec(), vec!["not usable by its probes"]);
        let Some(etcd) = Etcd::start().await else {
            log.check();
            return None;
        };
        let (mut addrs, mut gates, mut running, mut listeners) = (vec![], vec![], vec![], vec![]);
        for _router in 0..3 {
            let listener = listen().await;
            addrs.push(listener.local_addr().unwrap());
            gates.push(EtcdGate::to(vec![etcd.address()]).await);
            listeners.push(listener);
        }
        for (listener, gate) in listeners.into_iter().zip(&gates) {
            running.push(Some(launch(listener, gate.address(), engines).await));
        }
        let balancer = EtcdGate::to(addrs.clone()).await;
        let routers = Self { etcd, addrs, gates, balancer, running, engines, http: http_client(), log };
        for router in 0..3 {
            routers.wait_up(router, true).await;
        }
        Some(routers)
    }

    /// Ends a router.
    pub(super) async fn stop(&mut self, router: usize) {
        assert!(self.running[router].take().unwrap().drain().await, "the router did not end in time");
    }

    /// Starts a router that was ended, at its address.
    pub(super) async fn restart(&mut self, router: usize) {
        let listener = TcpListener::bind(self.addrs[router]).await.unwrap();
        self.running[router] = Some(launch(listener, self.gates[router].address(), self.engines).await);
    }

    pub(super) async fn send(&self, router: usize, method: &str, path: &str, body: &Value) -> Answer {
        let url = format!("http://{}{path}", self.addrs[router]);
        let mut request = self.http.request(method.parse().unwrap(), url);
        if !body.is_null() {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        Answer::read(request).await
    }

    pub(super) async fn get(&self, router: usize, path: &str) -> Answer {
        self.send(router, "GET", path, &Value::Null).await
    }

    /// Polls every router until the condition holds at it.
    pub(super) async fn all(&self, what: &str, mut holds: impl AsyncFnMut(usize) -> bool) {
        for router in (0..self.addrs.len()).filter(|router| self.running[*router].is_some()) {
            let end = Instant::now() + SOON;
            while !holds(router).await {
                assert!(Instant::now() < end, "not at router {router}: {what}; {:#?}", self.log.lines());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    /// The engine as a router shows it.
    pub(super) async fn engine(&self, router: usize, engine_id: &str) -> Answer {
        self.get(router, &format!("/registry/v1/engines/{engine_id}")).await
    }

    /// Waits until every router knows an engine, or none does.
    pub(super) async fn all_know(&self, engine_id: &str, known: bool) {
        let status = if known { 200 } else { 404 };
        let what = format!("{engine_id} is {status}");
        self.all(&what, async |router| self.engine(router, engine_id).await.status == status).await;
    }

    /// Whether a router reaches etcd, as it says itself.
    pub(super) async fn store(&self, router: usize) -> Value {
        self.get(router, "/readyz").await.json()["store"].clone()
    }

    pub(super) async fn wait_up(&self, router: usize, up: bool) {
        let end = Instant::now() + SOON;
        while self.store(router).await["up"] != up {
            assert!(Instant::now() < end, "the store is not {up} at {router}: {:#?}", self.log.lines());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends everything; the routers must not have warned of anything unexpected.
    pub(super) async fn finish(mut self, engines: Vec<Engine>) {
        for router in 0..self.running.len() {
            if self.running[router].is_some() {
                self.stop(router).await;
            }
        }
        for engine in engines {
            engine.shutdown().await;
        }
        self.log.check();
    }
}

async fn launch(listener: TcpListener, etcd: SocketAddr, engines: Engines) -> Running {
    let config = config_of(&listener, format!("http://{etcd}"), engines);
    config.build_on(listener).await.unwrap().spawn().await.unwrap()
}

/// The settings of a router on an etcd.
pub(super) fn config_of(listener: &TcpListener, etcd: String, engines: Engines) -> Config {
    let mut config = Config { listen: listener.local_addr().unwrap(), ..Config::default() };
    config.fleet.embedded = Embedded::Never;
    config.probe.interval = Duration::from_millis(100);
    config.probe.timeout = Duration::from_secs(20);
    config.shutdown.settle = Duration::ZERO;
    // Engines are used because the registry knows them, or not at all.
    config.pairing.unknown = UnknownPairs::Deny;
    config.store.kind = StoreKind::Etcd;
    config.store.endpoints = vec![etcd];
    config.store.timeout = Duration::from_secs(10);
    config.pairing.adopt_registered = engines == Engines::Used;
    config
}

/// Starts a prefill and a decode engine that register at `registry`.
pub(super) async fn spawn_pair(registry: SocketAddr, tune: impl Fn(&mut EngineConfig)) -> Vec<Engine> {
    let mut engines = Vec::new();
    for role in [engine_sim::Role::Prefill, engine_sim::Role::Decode] {
        let mut config = EngineConfig { role, ..engine_config(registry) };
        tune(&mut config);
        engines.push(engine_sim::spawn(config, listen().await).await.unwrap());
    }
    engines
}

/// A payload of so many bytes and somewhat more.
pub(super) fn payload(engine_id: &str, mark: u8, bytes: usize) -> Vec<u8> {
    let metadata = AgentMetadataV2 {
        engine_id: engine_id.to_owned(),
        agent_metadata: vec![mark; bytes],
        ..AgentMetadataV2::default()
    };
    let agent_metadata_bytes = NixlAgentMetadata::V2(metadata).encode();
    NixlHandshakePayload { compatibility_hash: "h".to_owned(), agent_metadata_bytes }.encode()
}
