//! Hand-offs between engines of every pair of topologies: the text must be the single engine's.
//!
//! `KVBATON_TOPOLOGY_REQUESTS=1000` asks for as many requests per pair, `KVBATON_TOPOLOGY_SEED`
//! repeats a run.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a failed step fails the test, and its seed is told"
)]

#[path = "engine/support.rs"]
#[allow(dead_code, reason = "shared with the other tests of engines")]
mod support;

use engine_sim::{Attention, Engine, EngineConfig, Generation, Layout};
use futures_util::StreamExt as _;
use reqwest::Client;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use support::{Registry, completion, eventually, post, prefill_body, start, text_of, with_params};

const PATH: &str = "/v1/completions";
const SIZES: [u32; 3] = [1, 2, 4];
const BLOCK: usize = 4;
/// Requests per pair unless more are asked for.
const REQUESTS: usize = 200;
const IN_FLIGHT: usize = 8;

/// One side of a pair.
#[derive(Debug, Clone, Copy)]
struct Side {
    tp: u32,
    block_size: usize,
    layout: Layout,
}

impl Side {
    fn of(tp: u32, layout: Layout) -> Self {
        Self { tp, block_size: BLOCK, layout }
    }

    fn blocks(self, ratio: usize) -> Self {
        Self { block_size: self.block_size * ratio, ..self }
    }
}

/// What both engines of a pair run.
#[derive(Debug, Clone, Copy)]
struct Model {
    generation: Generation,
    attention: Attention,
    kv_heads: usize,
}

const FULL: Model = Model { generation: Generation::V14, attention: Attention::Full, kv_heads: 4 };
const MLA: Model = Model { attention: Attention::Mla, ..FULL };

impl Model {
    fn v2(self) -> Self {
        Self { generation: Generation::V2, ..self }
    }

    fn config(self, side: Side) -> EngineConfig {
        EngineConfig {
            attention: self.attention,
            kv_heads: self.kv_heads,
            head_dim: 4,
            tp_size: side.tp,
            block_size: side.block_size,
            kv_layout: Some(side.layout),
            permute_received: true,
            num_blocks: 400,
            max_model_len: 128,
            idle_trap: false,
            request_log: 1,
            ..EngineConfig::for_generation(self.generation)
        }
    }
}

/// A generator of numbers that a seed repeats.
struct Draws(u64);

impl Draws {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }

    fn text(&mut self, len: usize) -> String {
        (0..len).map(|_| char::from(b'!' + u8::try_from(self.below(90)).unwrap())).collect()
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// A model's requests with the text that a single engine answers.
struct Lab {
    model: Model,
    client: Client,
    registry: Registry,
    cases: Vec<(Value, String)>,
    _tracker: TaskTracker,
}

impl Lab {
    /// `shares` has prompts begin alike, so that engines find a part of them in their caches.
    async fn new(model: Model, shares: bool) -> Self {
        let requests = number("KVBATON_TOPOLOGY_REQUESTS").map_or(REQUESTS, |n| usize::try_from(n).unwrap());
        Self::of(model, requests, shares).await
    }

    async fn of(model: Model, requests: usize, shares: bool) -> Self {
        let seed = number("KVBATON_TOPOLOGY_SEED").unwrap_or_else(rand::random);
        eprintln!("KVBATON_TOPOLOGY_SEED={seed}");
        let mut draws = Draws(seed);
        let stems: Vec<String> = (0..4).map(|_| draws.text(24)).collect();
        let (tracker, client) = (TaskTracker::new(), Client::new());
        let layout = EngineConfig::for_generation(model.generation).layout();
        let single = start(model.config(Side::of(1, layout))).await;
        let mut cases = Vec::new();
        for index in 0..requests {
            let stem = if shares && index % 2 == 1 { &stems[draws.below(4)][..draws.below(25)] } else { "" };
            let len = 1 + draws.below(40);
            let body = completion(&format!("{stem}{}", draws.text(len)), 5);
            let (status, answer) = post(&client, &single, PATH, &body).await;
            assert_eq!(status, 200, "{answer}");
            cases.push((body, text_of(&answer)));
        }
        let registry = Registry::start(&tracker).await;
        Self { model, client, registry, cases, _tracker: tracker }
    }

    async fn engine(&self, side: Side) -> Engine {
        let registry = Some(self.registry.url.clone());
        let engine = start(EngineConfig { registry, ..self.model.config(side) }).await;
        self.registry.knows(engine.engine_id()).await;
        engine
    }

    async fn hand_off(&self, p: &Engine, d: &Engine, body: &Value) -> (u16, Value) {
        let (status, answer) = post(&self.client, p, PATH, &prefill_body(body)).await;
        assert_eq!(status, 200, "{answer}");
        let params = &answer["kv_transfer_params"];
        assert_eq!(params["tp_size"], p.config().tp_size);
        post(&self.client, d, PATH, &with_params(body, params)).await
    }

    /// Every request over one pair; afterwards nothing is held.
    async fn serves(&self, p_side: Side, d_side: Side) {
        let (p, d) = (self.engine(p_side).await, self.engine(d_side).await);
        let pair = format!("{:?}: {p_side:?} to {d_side:?}", self.model);
        let (p, d, told) = (&p, &d, &pair);
        futures_util::stream::iter(&self.cases)
            .for_each_concurrent(IN_FLIGHT, async |(body, expected)| {
                let (status, answer) = self.hand_off(p, d, body).await;
                assert_eq!(status, 200, "{told}: {answer}");
                assert_eq!(&text_of(&answer), expected, "{told}: {body}");
            })
            .await;
        eventually(&format!("nothing is held, {pair}"), || {
            p.stats().blocks_held == 0 && d.stats().blocks_held == 0
        })
        .await;
        assert!(d.stats().kv_pulls > 0 && p.stats().kv_expired == 0, "{pair}");
    }

    /// The pair is refused as vLLM refuses it: the request fails, and a v2 engine dies.
    async fn refuses(&self, p_side: Side, d_side: Side) {
        let (p, d) = (self.engine(p_side).await, self.engine(d_side).await);
        let pair = format!("{:?}: {p_side:?} to {d_side:?}", self.model);
        let (status, answer) = self.hand_off(&p, &d, &completion(&"refused ".repeat(5), 3)).await;
        assert_eq!(status, 500, "{pair}: {answer}");
        let is_v2 = self.model.generation == Generation::V2;
        eventually(&format!("it is over, {pair}"), || {
            let stats = d.stats();
            stats.dead == is_v2 && (is_v2 || stats.blocks_held == 0)
        })
        .await;
        assert_eq!(d.stats().kv_pulls, 0, "{pair}");
    }
}

fn pairs() -> impl Iterator<Item = (u32, u32)> {
    SIZES.into_iter().flat_map(|p| SIZES.map(|d| (p, d)))
}

#[tokio::test]
async fn full_attention_of_every_width() {
    let lab = Lab::new(FULL, true).await;
    for (p, d) in pairs() {
        lab.serves(Side::of(p, Layout::Lbhnc), Side::of(d, Layout::Lbhnc)).await;
    }
}

#[tokio::test]
async fn full_attention_with_larger_decode_blocks() {
    let lab = Lab::new(FULL, true).await;
    for (p, d) in pairs() {
        let (p_side, d_side) = (Side::of(p, Layout::Lbhnc), Side::of(d, Layout::Lbhnc).blocks(2));
        // Slices of several ranks cannot be put into pieces of blocks.
        if p > d { lab.refuses(p_side, d_side).await } else { lab.serves(p_side, d_side).await }
    }
    lab.serves(Side::of(1, Layout::Lbhnc), Side::of(2, Layout::Lbhnc).blocks(4)).await;
}

#[tokio::test]
async fn latent_attention_of_every_width() {
    let lab = Lab::new(MLA, true).await;
    for (p, d) in pairs() {
        lab.serves(Side::of(p, Layout::Lbhnc), Side::of(d, Layout::Lbhnc)).await;
        // A latent has no heads, so that the layouts do not matter.
        lab.serves(Side::of(p, Layout::Lbnhc), Side::of(d, Layout::Lbhnc)).await;
    }
}

#[tokio::test]
async fn latent_attention_with_larger_decode_blocks() {
    let lab = Lab::new(MLA, true).await;
    for (p, d) in pairs() {
        lab.serves(Side::of(p, Layout::Lbhnc), Side::of(d, Layout::Lbhnc).blocks(2)).await;
        lab.serves(Side::of(p, Layout::Lbhnc), Side::of(d, Layout::Lbnhc).blocks(2)).await;
    }
}

#[tokio::test]
async fn token_major_caches() {
    let lab = Lab::new(FULL, true).await;
    for (p, d) in pairs() {
        // What is received head-major is permuted.
        let (p_side, d_side) = (Side::of(p, Layout::Lbhnc), Side::of(d, Layout::Lbnhc));
        lab.serves(p_side, d_side).await;
        if p <= d {
            lab.serves(p_side, d_side.blocks(2)).await;
        }
    }
    for tp in SIZES {
        let side = Side::of(tp, Layout::Lbnhc);
        lab.serves(side, side).await;
        lab.serves(side, side.blocks(2)).await;
        lab.refuses(side, Side::of(tp, Layout::Lbhnc)).await;
    }
}

#[tokio::test]
async fn heads_that_ranks_share() {
    let lab = Lab::new(Model { kv_heads: 2, ..FULL }, true).await;
    for (p, d) in pairs() {
        let (p_side, d_side) = (Side::of(p, Layout::Lbhnc), Side::of(d, Layout::Lbhnc));
        if p == 4 && d < 4 { lab.refuses(p_side, d_side).await } else { lab.serves(p_side, d_side).await }
    }
}

#[tokio::test]
async fn smaller_decode_blocks_are_refused() {
    for model in [FULL, MLA, FULL.v2(), MLA.v2()] {
        let lab = Lab::of(model, 0, false).await;
        let layout = EngineConfig::for_generation(model.generation).layout();
        lab.refuses(Side::of(1, layout).blocks(2), Side::of(1, layout)).await;
        lab.refuses(Side::of(1, layout).blocks(2), Side::of(2, layout)).await;
    }
}

#[tokio::test]
async fn v2_of_every_width_that_it_knows() {
    for model in [FULL.v2(), MLA.v2()] {
        let lab = Lab::new(model, true).await;
        for (p, d) in pairs() {
            let (p_side, d_side) = (Side::of(p, Layout::Hnd), Side::of(d, Layout::Hnd));
            if p > d {
                lab.refuses(p_side, d_side).await;
                continue;
            }
            lab.serves(p_side, d_side).await;
            lab.serves(p_side, d_side.blocks(2)).await;
        }
    }
}

#[tokio::test]
async fn v2_token_major_caches() {
    let lab = Lab::new(FULL.v2(), true).await;
    for tp in SIZES {
        let (hnd, nhd) = (Side::of(tp, Layout::Hnd), Side::of(tp, Layout::Nhd));
        lab.serves(nhd, nhd).await;
        lab.serves(nhd, nhd.blocks(2)).await;
        lab.serves(hnd, nhd).await;
        lab.serves(hnd, nhd.blocks(2)).await;
        lab.refuses(nhd, hnd).await;
    }
}

#[tokio::test]
async fn settings_that_no_engine_can_have() {
    let v14 = FULL.config(Side::of(1, Layout::Lbhnc));
    let settings = [
        (EngineConfig { tp_size: 3, ..v14.clone() }, "tp_size"),
        (EngineConfig { tp_size: 0, ..v14.clone() }, "tp_size"),
        (EngineConfig { kv_layout: Some(Layout::Hnd), ..v14.clone() }, "kv_layout"),
        (EngineConfig { kv_layout: Some(Layout::Blhnc), ..v14.clone() }, "kv_layout"),
    ];
    for (config, setting) in settings {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let error = engine_sim::spawn(config, listener).await.err().unwrap();
        assert!(error.to_string().contains(setting), "{error}");
    }
}

#[tokio::test]
async fn all_ranks_are_published_at_once() {
    let lab = Lab::of(FULL, 0, false).await;
    let engine = lab.engine(Side::of(4, Layout::Lbhnc)).await;
    let mut ranks: Vec<(u32, u32)> = lab
        .registry
        .payloads
        .lock()
        .keys()
        .filter(|(id, _, _)| id == engine.engine_id())
        .map(|(_, pp, tp)| (*pp, *tp))
        .collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [(0, 0), (0, 1), (0, 2), (0, 3)]);
    let told = lab.registry.told.lock().len();
    assert_eq!(told, 1, "one registration");
    assert_eq!(json!(engine.stats().dead), json!(false));
}
