//! How long the choice of a pair takes, by policy and size of the fleet: the functions that a request calls, on
//! peers that are all ready, of which 64 requests are on their way. `--smoke` is over at once and means nothing.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark ends at what fails, and prints")]

use std::collections::{BTreeMap, VecDeque};
use std::hint::black_box;
use std::time::{Duration, Instant};

use kvbaton_proxy::simulated::{Admitted, Routed, SimulatedPeer, SimulatedPrompt, SimulatedRouter};
use kvbaton_proxy::{Policy, Role, Settings};

/// Requests that are on their way at any time.
const RUNNING: usize = 64;

/// Bytes of a prompt: eight of the pieces by which prefixes are known.
const PROMPT: usize = 4096;

/// Prompts that have been routed before, which make a hundred thousand such pieces.
const ROUTED: u64 = 12_500;

fn main() {
    let smoke = std::env::args().any(|argument| argument == "--smoke");
    let (fleets, choices, routed): (&[usize], usize, u64) =
        if smoke { (&[2, 20], 200, 10) } else { (&[2, 20, 200, 1000], 200_000, ROUTED) };
    println!("| policy | peers | p50 µs | p99 µs |\n|---|--:|--:|--:|");
    for policy in [Policy::Joint, Policy::LeastLoaded, Policy::PrefixAffinity, Policy::ConsistentHash] {
        for peers in fleets {
            let [p50, p99] = measure(policy, *peers, choices, routed).map(|took| took.as_secs_f64() * 1e6);
            println!("| {policy:?} | {peers} | {p50:.2} | {p99:.2} |");
        }
    }
}

fn measure(policy: Policy, peers: usize, choices: usize, routed: u64) -> [Duration; 2] {
    let mut settings = Settings::default();
    settings.routing.prefill = policy;
    let stage = |role: Role| (0..peers / 2).map(move |number| peer(role, number));
    let all = stage(Role::Prefill).chain(stage(Role::Decode)).collect();
    let mut router = SimulatedRouter::new(settings, "m", all, 1).unwrap();
    for number in 0..routed {
        let text = prompt(number);
        let chosen = choose(&router, &text);
        let Admitted::Runs(mut permit) = router.admit(number, PROMPT) else { continue };
        let mut chosen = chosen.unwrap();
        router.prefilled(&mut chosen, &mut permit, PROMPT as u64 / 4, 0);
        router.ended(Some(chosen), &permit);
    }
    let mut running = VecDeque::with_capacity(RUNNING);
    let mut times: Vec<Duration> = (0..choices as u64)
        .map(|number| {
            let text = prompt(number * 7919 % routed);
            let began = Instant::now();
            let chosen = black_box(choose(&router, &text));
            let took = began.elapsed();
            running.push_back(chosen);
            if running.len() > RUNNING {
                running.pop_front();
            }
            took
        })
        .collect();
    times.sort_unstable();
    [times[choices / 2], times[choices * 99 / 100]]
}

fn choose(router: &SimulatedRouter, text: &[u8]) -> Option<Routed> {
    router.choose(&SimulatedPrompt { bytes: text.len(), text, session: None }, PROMPT as u64 / 4, None)
}

/// A prompt unlike all others from its first bytes.
fn prompt(number: u64) -> Vec<u8> {
    format!("{number:016}").into_bytes().repeat(PROMPT / 16)
}

fn peer(role: Role, number: usize) -> SimulatedPeer {
    let name = format!("{role:?}-{number}").to_lowercase();
    let labels = BTreeMap::from([("zone".to_owned(), (number % 3).to_string())]);
    SimulatedPeer { role, name, labels, kv_bytes_per_token: 1 << 17 }
}
