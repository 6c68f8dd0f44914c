//! Measures from outside, with the router in a process of its own; the sides of a comparison take turns, so
//! that whatever else the machine does hits all of them.

mod processes;
mod report;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use kv_connector::handshake::{
    Echo, EngineRole, Fetched, Heartbeat, RankPayload, Receipt, Registration, RegistryClient,
};
use kv_connector::protocol::Generation;
use kv_connector::protocol::handshake::{HandshakeRequest, NixlHandshakePayload};
use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::side_channel::SideChannelClient;
use tokio::task::JoinSet;

use processes::{Python, Router};
pub(crate) use report::{Beats, Handshakes, Ranks, Report, Samples, Side};

/// What vLLM 0.32.0 answers for one rank of a four-layer model.
const CAPTURED: &[u8] = include_bytes!("../../tests/fixtures/captures/sidechannel_P.response.frame0.bin");
const FIRST: HandshakeRequest = HandshakeRequest { pp_rank: 0, tp_rank: 0 };
/// Far above what a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(30);

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Exchanges of each side on a kept connection.
    pub(crate) kept: usize,
    /// Exchanges of each side on a new connection, and registrations.
    pub(crate) fresh: usize,
    /// Engines with ranks to look up.
    pub(crate) engines: usize,
    /// Ranks of each.
    pub(crate) ranks: u32,
    /// Look-ups among all ranks.
    pub(crate) look_ups: usize,
    /// Engines that give signs of life.
    pub(crate) beating: usize,
    /// How often each does.
    pub(crate) interval: Duration,
    /// How many intervals are measured.
    pub(crate) intervals: u32,
}

impl Plan {
    /// What `docs/performance.md` shows.
    pub(crate) const FULL: Self = Self {
        kept: 5000,
        fresh: 500,
        engines: 1250,
        ranks: 8,
        look_ups: 10_000,
        beating: 1000,
        interval: Duration::from_secs(5),
        intervals: 4,
    };
    /// Shows that it runs.
    pub(crate) const SMOKE: Self = Self {
        kept: 8,
        fresh: 3,
        engines: 5,
        ranks: 2,
        look_ups: 20,
        beating: 4,
        interval: Duration::from_millis(250),
        intervals: 2,
    };
}

/// Measures everything; `python` is the one that may have vLLM's ZMQ library.
pub(crate) async fn run(plan: Plan, python: &str) -> Report {
    let (handshakes, small) = handshakes(&plan, python).await;
    let ranks = many_ranks(&plan, &small).await;
    drop(small);
    let beats = many_beats(&plan).await;
    Report { plan, handshakes, ranks, beats }
}

async fn handshakes(plan: &Plan, python: &str) -> (Handshakes, Router) {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ports = format!("side_channel.front.ports={port}-{port}");
    let (enabled, listen) = ("side_channel.front.enabled=true", "side_channel.front.listen=127.0.0.1");
    // A router of its own: engines that come and go at the other one must not have it look for ports.
    let fronted = Router::start(&[enabled, listen, &ports]);
    let router = Router::start(&[]);
    let (prefill, decode) = (client(&router), client(&router));
    let payload = payload("measured");
    client(&fronted).register(&registration("measured", 1, None)).await.unwrap();
    prefill.register(&registration("measured", 1, None)).await.unwrap();
    let mut front = front_of(port).await;
    let mut python = Python::start(python, &payload);
    let python_port = python.as_mut().map(Python::listen);
    let mut listener = match python_port {
        Some(port) => Some(connect(port).await),
        None => None,
    };

    let mut sides = [Side::default(), Side::default(), Side::default()];
    let [http, vllm, own] = &mut sides;
    for round in warming(plan.kept) {
        for turn in 0..3 {
            let got = match (round.number + turn) % 3 {
                0 => http.kept.timed(round, fetch(&decode, "measured", 0)).await,
                1 => match &mut listener {
                    Some(listener) => vllm.kept.timed(round, ask(listener)).await,
                    None => continue,
                },
                _ => own.kept.timed(round, ask(&mut front)).await,
            };
            assert_eq!(got, payload);
        }
    }
    for round in warming(plan.fresh) {
        for turn in 0..3 {
            let got = match (round.number + turn) % 3 {
                0 => {
                    let decode = client(&router);
                    http.fresh.timed(round, fetch(&decode, "measured", 0)).await
                }
                1 => match python_port {
                    Some(port) => {
                        vllm.fresh.timed(round, async { ask(&mut connect(port).await).await }).await
                    }
                    None => continue,
                },
                _ => own.fresh.timed(round, async { ask(&mut connect(port).await).await }).await,
            };
            assert_eq!(got, payload);
        }
    }
    for round in warming(plan.fresh) {
        let engine_id = format!("new-{}", round.number);
        let registration = registration(&engine_id, 1, None);
        let whole = async {
            prefill.register(&registration).await.unwrap();
            fetch(&decode, &engine_id, 0).await
        };
        let got = http.whole.timed(round, whole).await;
        assert_eq!(got, registration.ranks.as_ref().unwrap()[0].payload);
        prefill.deregister(&engine_id).await.unwrap();
        if let Some(python) = &mut python {
            let whole = async {
                let port = python.listen();
                ask(&mut connect(port).await).await
            };
            assert_eq!(vllm.whole.timed(round, whole).await, payload);
            python.stop();
        }
    }
    let [http, vllm, own] = sides;
    (Handshakes { http, vllm: python.is_some().then_some(vllm), front: own }, router)
}

/// `small` has hardly any ranks, and is looked up in turn.
async fn many_ranks(plan: &Plan, small: &Router) -> Ranks {
    let large = Router::start(&[]);
    let (at_small, at_large) = (client(small), client(&large));
    at_large.register(&registration("before", 1, None)).await.unwrap();
    let empty = large.resident();
    let started = Instant::now();
    for engine in 0..plan.engines {
        at_large.register(&registration(&format!("engine-{engine}"), plan.ranks, None)).await.unwrap();
    }
    let registering = started.elapsed();
    let (mut among_few, mut among_many) = (Samples::default(), Samples::default());
    for round in warming(plan.look_ups) {
        // A prime that no count of engines here is a multiple of: every engine has its turn.
        let engine_id = format!("engine-{}", round.number * 7919 % plan.engines);
        let tp_rank = round.number as u32 % plan.ranks;
        assert_eq!(among_many.timed(round, fetch(&at_large, &engine_id, tp_rank)).await, payload(&engine_id));
        among_few.timed(round, fetch(&at_small, "measured", 0)).await;
    }
    let memory = large.resident().saturating_sub(empty);
    Ranks { registering, among_few, among_many, memory }
}

async fn many_beats(plan: &Plan) -> Beats {
    let router = Router::start(&[]);
    let clients: Vec<RegistryClient> = (0..plan.beating).map(|_| client(&router)).collect();
    let origin = Instant::now();
    let ttl = plan.interval * 3 + PATIENCE;
    let mut engines = JoinSet::new();
    let mut registered = Vec::new();
    for (number, client) in clients.iter().enumerate() {
        let registration = registration(&format!("engine-{number}"), 1, Some(ttl));
        registered.push((client.register(&registration).await.unwrap(), origin.elapsed()));
    }
    let begin = Instant::now();
    for ((number, client), receipt) in clients.into_iter().enumerate().zip(registered) {
        // Evenly over the interval, as engines that started at different times are.
        let offset = plan.interval.mul_f64(number as f64 / plan.beating as f64);
        engines.spawn(beat(client, format!("engine-{number}"), receipt, origin, begin + offset, *plan));
    }
    tokio::time::sleep_until((begin + plan.interval).into()).await;
    let (computed, from) = (router.computed(), Instant::now());
    tokio::time::sleep_until((begin + plan.interval * (plan.intervals + 1)).into()).await;
    let (computed, span) = (router.computed() - computed, from.elapsed());
    let mut answers = Samples::default();
    while let Some(of_engine) = engines.join_next().await {
        answers.extend(of_engine.unwrap());
    }
    Beats { answers, computed, span }
}

/// One engine's signs of life; the first, on a connection that it has from registering, is not counted.
async fn beat(
    client: RegistryClient,
    engine_id: String,
    (mut receipt, mut received): (Receipt, Duration),
    origin: Instant,
    first: Instant,
    plan: Plan,
) -> Samples {
    let mut answers = Samples::default();
    for number in 0..=plan.intervals {
        tokio::time::sleep_until((first + plan.interval * number).into()).await;
        let echo = Some(Echo { router_clock: receipt.router_clock, received });
        let heartbeat = Heartbeat { state: None, clock: Some(origin.elapsed()), echo };
        let round = Round { number: number as usize, counts: number > 0 };
        receipt = answers.timed(round, client.heartbeat(&engine_id, &heartbeat)).await.unwrap();
        received = origin.elapsed();
    }
    answers
}

/// One round of a measurement.
#[derive(Clone, Copy)]
struct Round {
    number: usize,
    counts: bool,
}

/// So many rounds that count, after a tenth as many that do not.
fn warming(rounds: usize) -> impl Iterator<Item = Round> {
    let before = rounds.div_ceil(10);
    (0..before + rounds).map(move |number| Round { number, counts: number >= before })
}

impl Samples {
    async fn timed<T>(&mut self, round: Round, exchange: impl Future<Output = T>) -> T {
        let started = Instant::now();
        let result = exchange.await;
        if round.counts {
            self.push(started.elapsed());
        }
        result
    }
}

fn client(router: &Router) -> RegistryClient {
    RegistryClient::new(router.url.clone(), None).unwrap()
}

async fn fetch(client: &RegistryClient, engine_id: &str, tp_rank: u32) -> Vec<u8> {
    let Fetched { payload, .. } = client.fetch(engine_id, 0, tp_rank).await.unwrap();
    payload
}

async fn ask(client: &mut SideChannelClient) -> Vec<u8> {
    client.ask(Generation::V14, FIRST).await.unwrap().0
}

async fn connect(port: u16) -> SideChannelClient {
    SideChannelClient::connect("127.0.0.1", port).await.unwrap()
}

/// A connection to the router's own side channel, which opens soon after the engine has registered.
async fn front_of(port: u16) -> SideChannelClient {
    let connecting = async {
        loop {
            match SideChannelClient::connect("127.0.0.1", port).await {
                Ok(client) => return client,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    tokio::time::timeout(PATIENCE, connecting).await.expect("the router opens a side channel")
}

fn registration(engine_id: &str, ranks: u32, ttl: Option<Duration>) -> Registration {
    let payload = payload(engine_id);
    let rank = |tp_rank| RankPayload { pp_rank: 0, tp_rank, payload: payload.clone() };
    Registration {
        engine_id: engine_id.to_owned(),
        role: Some(EngineRole::Prefill),
        model: Some("tiny".to_owned()),
        vllm_version: Some("0.32.0".to_owned()),
        ttl,
        ranks: Some((0..ranks).map(rank).collect()),
        ..Registration::default()
    }
}

fn payload(engine_id: &str) -> Vec<u8> {
    let mut payload = NixlHandshakePayload::decode(CAPTURED).unwrap();
    let metadata = NixlAgentMetadata::decode(Generation::V14, &payload.agent_metadata_bytes).unwrap();
    let NixlAgentMetadata::V14(mut metadata) = metadata else { panic!("vLLM 0.32.0 speaks v14") };
    metadata.engine_id = engine_id.to_owned();
    payload.agent_metadata_bytes = NixlAgentMetadata::V14(metadata).encode();
    payload.encode()
}
