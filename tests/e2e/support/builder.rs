//! What a deployment is made of, and its start.

use std::time::Duration;

use engine_sim::EngineConfig;
use kvbaton::config::{Config, Embedded};
use kvbaton_proxy::{PeerSpec, Role};

use super::{Cluster, Front, Log, client, engine_config, listen};

type Tune<T> = Box<dyn Fn(&mut T)>;

/// Describes a deployment.
pub(crate) struct Builder {
    prefill: usize,
    decode: usize,
    engine: Vec<Tune<EngineConfig>>,
    config: Vec<Tune<Config>>,
    peers: Vec<PeerSpec>,
    warnings: Vec<&'static str>,
    possible: Vec<&'static str>,
    wait: bool,
    logs_all: bool,
    front: Option<Front>,
    threads: Option<usize>,
}

impl Builder {
    pub(super) fn one_of_each() -> Self {
        Self {
            prefill: 1,
            decode: 1,
            engine: Vec::new(),
            config: Vec::new(),
            peers: Vec::new(),
            warnings: Vec::new(),
            possible: Vec::new(),
            wait: true,
            logs_all: false,
            front: None,
            threads: None,
        }
    }

    pub(crate) fn prefill(mut self, count: usize) -> Self {
        self.prefill = count;
        self
    }

    pub(crate) fn decode(mut self, count: usize) -> Self {
        self.decode = count;
        self
    }

    /// Changes the settings of every engine; called once per engine with its role set.
    pub(crate) fn engine(mut self, tune: impl Fn(&mut EngineConfig) + 'static) -> Self {
        self.engine.push(Box::new(tune));
        self
    }

    pub(crate) fn config(mut self, tune: impl Fn(&mut Config) + 'static) -> Self {
        self.config.push(Box::new(tune));
        self
    }

    /// Adds a peer that the cluster does not start.
    pub(crate) fn peer(mut self, role: Role, url: &str) -> Self {
        self.peers.push(PeerSpec::new(role, url));
        self
    }

    /// The router may warn with texts that contain one of these; any other warning fails the test.
    pub(crate) fn warns(mut self, texts: &[&'static str]) -> Self {
        self.warnings.extend(texts);
        self
    }

    /// Warnings that may come or not, depending on who is faster.
    pub(crate) fn may_warn(mut self, texts: &[&'static str]) -> Self {
        self.possible.extend(texts);
        self
    }

    /// Keeps the whole log, for [`Cluster::log`].
    pub(crate) fn logs_all(mut self) -> Self {
        self.logs_all = true;
        self
    }

    /// The router reaches the engines through TLS only.
    pub(crate) fn behind(mut self, front: Front) -> Self {
        self.front = Some(front);
        self
    }

    /// Clients are answered on so many threads; what is logged there goes nowhere.
    pub(crate) fn threads(mut self, count: usize) -> Self {
        self.threads = Some(count);
        self
    }

    /// Does not wait for the router to be ready.
    pub(crate) fn unready(mut self) -> Self {
        self.wait = false;
        self
    }

    pub(crate) async fn start(self) -> Cluster {
        let log = if self.logs_all { Log::capture_all } else { Log::capture }(self.warnings, self.possible);
        let router = listen().await;
        let addr = router.local_addr().unwrap();
        let mut config = Config { listen: addr, ..Config::default() };
        config.fleet.embedded = Embedded::Never;
        config.probe.interval = Duration::from_millis(100);
        config.shutdown.settle = Duration::ZERO;
        config.shutdown.limit = Duration::from_secs(10);
        // Tests that look at what engines were asked know of no such question.
        config.probe.metrics_interval = Duration::ZERO;
        // A loaded machine may be slow; whatever must be fast is measured by the test that says so.
        config.probe.timeout = Duration::from_secs(20);
        config.timeouts.prefill = Duration::from_secs(30);
        config.timeouts.decode_head = Duration::from_secs(30);
        config.timeouts.idle = Duration::from_secs(30);

        let mut waiting = Vec::new();
        for role in std::iter::repeat_n(Role::Prefill, self.prefill)
            .chain(std::iter::repeat_n(Role::Decode, self.decode))
        {
            let listener = listen().await;
            let engine = listener.local_addr().unwrap();
            let url = self.front.as_ref().map(|front| front.before(engine));
            let spec = PeerSpec::new(role, url.unwrap_or_else(|| format!("http://{engine}")));
            match role {
                Role::Prefill => config.prefill.push(spec),
                Role::Decode => config.decode.push(spec),
            }
            waiting.push((role, listener));
        }
        for peer in self.peers {
            match peer.role {
                Role::Prefill => config.prefill.push(peer),
                Role::Decode => config.decode.push(peer),
            }
        }
        for tune in &self.config {
            tune(&mut config);
        }
        let token = config.admin.token.clone();
        let mut app = config.build_on(router).await.unwrap();
        if let Some(threads) = self.threads {
            app = app.answer_on(kvbaton::Workers::start(threads).unwrap());
        }
        let running = app.spawn().await.unwrap();

        let (mut prefill, mut decode) = (Vec::new(), Vec::new());
        for (role, listener) in waiting {
            let mut engine = engine_config(running.registry_addr());
            engine.registry_token = token.clone();
            engine.role = match role {
                Role::Prefill => engine_sim::Role::Prefill,
                Role::Decode => engine_sim::Role::Decode,
            };
            for tune in &self.engine {
                tune(&mut engine);
            }
            let engine = engine_sim::spawn(engine, listener).await.unwrap();
            match role {
                Role::Prefill => prefill.push(engine),
                Role::Decode => decode.push(engine),
            }
        }
        let http = client::http();
        let _front = self.front;
        let cluster = Cluster { running, addr, prefill, decode, http, token, log, _front };
        if self.wait {
            cluster.wait_ready().await;
            cluster.wait_registered().await;
        }
        cluster
    }
}
