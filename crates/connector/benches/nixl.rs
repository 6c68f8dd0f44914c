//! READ throughput between two processes and the connector's own cost, beside Python's nixl.
//!
//! Per shape and pass, in one run: a source and one reader after the other, each in a process of
//! its own: Python's nixl, this crate's transport, this crate's worker (hand-off to blocks ready).
//! `cargo bench -p kv-connector --features nixl --bench nixl -- [ROUNDS [thread|polling]]`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed step ends the benchmark")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the result is printed")]

#[allow(dead_code, reason = "shared with the tests, which use more of it")]
#[path = "../tests/nixl/children.rs"]
mod children;
#[allow(dead_code, reason = "shared with the tests, which use more of it")]
#[path = "../tests/nixl/engine.rs"]
mod engine;
#[allow(dead_code, reason = "shared with the tests, which use more of it")]
#[path = "../tests/nixl/peer.rs"]
mod peer;

use serde_json::{Value, json};

use children::{STEERED, Started, Steered};

/// Blocks and the bytes of each.
const SHAPES: [(u64, u64); 2] = [(1024, 64 << 10), (16_384, 4 << 10)];
/// How often each reader gets its turn.
const PASSES: usize = 3;
const WARM_UP: u64 = 2;

struct Plan {
    rounds: u64,
    progress: String,
}

#[derive(Default)]
struct Samples {
    /// Whole reads, from making the transfer (or from the hand-off) to its end.
    micros: Vec<f64>,
    /// What NIXL itself took of each, from post to completion.
    inside: Vec<f64>,
}

impl Samples {
    fn add(&mut self, answer: &Value) {
        let numbers = |key: &str| -> Vec<f64> {
            answer[key].as_array().unwrap().iter().filter_map(Value::as_f64).collect()
        };
        self.micros.extend(numbers("micros"));
        self.inside.extend(numbers("inside"));
    }

    fn line(&self, reader: &str, bytes: u64) -> String {
        let whole = median(&self.micros);
        let best = self.micros.iter().copied().fold(f64::INFINITY, f64::min);
        let gibs = |micros: f64| bytes as f64 / f64::from(1 << 30) / (micros / 1e6);
        let own = if self.inside.is_empty() {
            "-".to_owned()
        } else {
            let own: Vec<f64> = self.micros.iter().zip(&self.inside).map(|(all, nixl)| all - nixl).collect();
            format!("{:.2} ms, {:.1} %", median(&own) / 1e3, median(&own) / whole * 100.0)
        };
        format!(
            "{reader:<24} median {:>7.2} ms {:>5.2} GiB/s  best {:>7.2} ms {:>5.2} GiB/s  on top of NIXL: {own}",
            whole / 1e3,
            gibs(whole),
            best / 1e3,
            gibs(best)
        )
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Every block once, in an order without neighbours, so that nothing can be merged.
fn scattered(count: u64) -> Vec<u64> {
    (0..count).map(|i| (i * 769 + 13) % count).collect()
}

fn start(child: &mut Steered, name: &str, len: u64, plan: &Plan) -> Started {
    child.start_with(json!({"do": "start", "name": name, "len": len, "progress": plan.progress}))
}

fn agent_reads(mut reader: Steered, source: &Started, (count, block): (u64, u64), plan: &Plan) -> Value {
    start(&mut reader, "reader", count * block, plan);
    reader.ask(json!({"do": "add", "blob": source.blob}));
    let mut rounds = |rounds| {
        reader.ask(json!({"do": "rounds", "agent": source.name, "base": source.base, "block": block,
            "count": count, "remote": scattered(count), "rounds": rounds}))
    };
    rounds(WARM_UP);
    rounds(plan.rounds)
}

fn worker_reads((count, block): (u64, u64), plan: &Plan) -> Value {
    let (mut p, mut d) = (Steered::rust(&[]), Steered::rust(&[]));
    let engine = |name: &str| {
        json!({"do": "engine", "name": name, "layers": 1, "blocks": count, "block_len": block,
            "progress": plan.progress, "lease": 600})
    };
    let payload = p.ask(engine("p"))["payload"].clone();
    d.ask(engine("d"));
    let local: Vec<u64> = (0..count).collect();
    let (mut micros, mut inside) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + plan.rounds {
        let request = format!("cmpl-{round}-0");
        let produced = p.ask(json!({"do": "produce", "request": request, "blocks": scattered(count)}));
        let done = d.ask(json!({"do": "consume", "request": request, "params": produced["params"],
            "blocks": local, "payload": payload, "seconds": 60}));
        assert_eq!(done["failed"], json!([]));
        p.ask(json!({"do": "serve", "count": 1, "seconds": 60}));
        if round >= WARM_UP {
            micros.push(done["micros"].clone());
            inside.push(done["inside"].clone());
        }
    }
    json!({"micros": micros, "inside": inside})
}

fn main() {
    if let Some(port) = std::env::var_os(STEERED) {
        return peer::serve(port.to_str().unwrap().parse().unwrap());
    }
    if !children::installed() {
        return;
    }
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let rounds = words.first().and_then(|word| word.parse().ok()).unwrap_or(10);
    let plan = Plan { rounds, progress: words.get(1).map_or("thread", String::as_str).to_owned() };
    println!("READ, two processes, UCX progress by {}, {PASSES} x {rounds} rounds", plan.progress);
    for shape in SHAPES {
        let bytes = shape.0 * shape.1;
        let [mut python, mut transport, mut worker] =
            [const { Samples { micros: Vec::new(), inside: Vec::new() } }; 3];
        for _ in 0..PASSES {
            {
                let mut source = Steered::rust(&[]);
                let source_agent = start(&mut source, "source", bytes, &plan);
                python.add(&agent_reads(Steered::python(&[]), &source_agent, shape, &plan));
                transport.add(&agent_reads(Steered::rust(&[]), &source_agent, shape, &plan));
            }
            worker.add(&worker_reads(shape, &plan));
        }
        println!("\n{} blocks of {} KiB, scattered", shape.0, shape.1 >> 10);
        println!("{}", python.line("Python nixl", bytes));
        println!("{}", transport.line("kv-connector transport", bytes));
        println!("{}", worker.line("kv-connector worker", bytes));
    }
}
