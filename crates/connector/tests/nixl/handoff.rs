//! A prefill and a decode engine's halves in two processes: blocks are handed over by NIXL.

use serde_json::{Value, json};

use crate::children::{Steered, installed};

const BLOCK_LEN: u64 = 4096;

fn engine(child: &mut Steered, name: &str, generation: &str) -> String {
    let answer = child.ask(json!({"do": "engine", "name": name, "generation": generation, "layers": 3,
        "blocks": 32, "block_len": BLOCK_LEN, "progress": "polling", "lease": 60}));
    answer["payload"].as_str().unwrap().to_owned()
}

fn consume(request: &str, params: &Value, blocks: &[u64], payload: &str) -> Value {
    json!({"do": "consume", "request": request, "params": params, "blocks": blocks, "payload": payload,
        "seconds": 20})
}

#[test]
fn blocks_are_handed_over_in_both_generations() {
    if !installed() {
        return;
    }
    for generation in ["v14", "v2"] {
        let (mut p, mut d) = (Steered::rust(&[]), Steered::rust(&[]));
        let payload = engine(&mut p, "p", generation);
        engine(&mut d, "d", generation);
        p.ask(json!({"do": "fill", "seed": 7, "blocks": [4, 9, 2]}));
        let produced = p.ask(json!({"do": "produce", "request": "cmpl-x-0", "blocks": [4, 9, 2]}));
        assert_eq!(produced["leases"], 1);
        let done = d.ask(consume("d-1", &produced["params"], &[1, 2, 3], &payload));
        assert_eq!((&done["finished"], &done["failed"]), (&json!(["d-1"]), &json!([])));
        assert_eq!(done["handshakes"], 1);
        let there = p.ask(json!({"do": "digest", "blocks": [4, 9, 2]}));
        assert_eq!(d.ask(json!({"do": "digest", "blocks": [1, 2, 3]})), there, "{generation}");
        let served = p.ask(json!({"do": "serve", "count": 1, "seconds": 10}));
        assert_eq!(served, json!({"sent": ["cmpl-x-0"], "leases": 0}));
        // The second hand-off needs no handshake.
        let produced = p.ask(json!({"do": "produce", "request": "cmpl-y-0", "blocks": [9]}));
        let done = d.ask(consume("d-2", &produced["params"], &[8], &payload));
        assert_eq!((&done["finished"], &done["handshakes"]), (&json!(["d-2"]), &json!(0)));
        let served = p.ask(json!({"do": "serve", "count": 1, "seconds": 10}));
        assert_eq!(served["sent"], json!(["cmpl-y-0"]));
    }
}

#[test]
fn a_prefill_engine_that_was_killed_fails_the_receive_and_its_successor_serves() {
    if !installed() {
        return;
    }
    let (mut p, mut d) = (Steered::rust(&[]), Steered::rust(&[]));
    let payload = engine(&mut p, "p", "v14");
    engine(&mut d, "d", "v14");
    let first = p.ask(json!({"do": "produce", "request": "cmpl-a-0", "blocks": [4]}));
    assert_eq!(d.ask(consume("d-1", &first["params"], &[1], &payload))["failed"], json!([]));
    let second = p.ask(json!({"do": "produce", "request": "cmpl-b-0", "blocks": [5]}));
    p.kill();
    let failed = d.ask(consume("d-2", &second["params"], &[2], &payload));
    assert_eq!((&failed["failed"], &failed["invalid"]), (&json!(["d-2"]), &json!([2])));

    // Another engine takes over the address: D shakes hands anew and reads from it.
    let mut successor = Steered::rust(&[]);
    let payload = engine(&mut successor, "p-again", "v14");
    successor.ask(json!({"do": "fill", "seed": 2, "blocks": [6]}));
    let third = successor.ask(json!({"do": "produce", "request": "cmpl-c-0", "blocks": [6]}));
    let done = d.ask(consume("d-3", &third["params"], &[3], &payload));
    assert_eq!((&done["finished"], &done["failed"]), (&json!(["d-3"]), &json!([])));
    let there = successor.ask(json!({"do": "digest", "blocks": [6]}));
    assert_eq!(d.ask(json!({"do": "digest", "blocks": [3]})), there);
    let served = successor.ask(json!({"do": "serve", "count": 1, "seconds": 10}));
    assert_eq!(served, json!({"sent": ["cmpl-c-0"], "leases": 0}));
}

#[test]
fn a_prefill_engine_restarted_under_its_name_serves_after_one_failure() {
    if !installed() {
        return;
    }
    let (mut p, mut d) = (Steered::rust(&[]), Steered::rust(&[]));
    let payload = engine(&mut p, "p", "v14");
    engine(&mut d, "d", "v14");
    let first = p.ask(json!({"do": "produce", "request": "cmpl-a-0", "blocks": [4]}));
    assert_eq!(d.ask(consume("d-1", &first["params"], &[1], &payload))["failed"], json!([]));
    p.kill();
    let mut p = Steered::rust(&[]);
    let payload = engine(&mut p, "p", "v14");
    p.ask(json!({"do": "fill", "seed": 3, "blocks": [5]}));
    let mut outcomes = Vec::new();
    for request in ["d-2", "d-3", "d-4"] {
        let remote = format!("cmpl-{request}-0");
        let produced = p.ask(json!({"do": "produce", "request": remote, "blocks": [5]}));
        let done = d.ask(consume(request, &produced["params"], &[2], &payload));
        outcomes.push((done["failed"] == json!([]), done["handshakes"].as_u64().unwrap()));
    }
    // The old connection breaks once, is given up, and is made anew; then all is as before.
    assert_eq!(outcomes, [(false, 0), (true, 1), (true, 0)]);
    let there = p.ask(json!({"do": "digest", "blocks": [5]}));
    assert_eq!(d.ask(json!({"do": "digest", "blocks": [2]})), there);
}

#[test]
fn memory_stays_flat_over_many_handoffs() {
    if !installed() {
        return;
    }
    let rounds = std::env::var("KVBATON_SOAK_ROUNDS").ok().map_or(1000, |rounds| rounds.parse().unwrap());
    let (mut p, mut d) = (Steered::rust(&[]), Steered::rust(&[]));
    let payload = engine(&mut p, "p", "v14");
    engine(&mut d, "d", "v14");
    let mut run = |rounds: std::ops::Range<u64>| {
        for round in rounds {
            let request = format!("cmpl-{round}-0");
            let blocks: Vec<u64> = (0..8).map(|i| (round + i * 3) % 32).collect();
            let produced = p.ask(json!({"do": "produce", "request": request, "blocks": blocks}));
            let done = d.ask(consume(&request, &produced["params"], &blocks, &payload));
            assert_eq!((&done["finished"], &done["failed"]), (&json!([request]), &json!([])));
            let served = p.ask(json!({"do": "serve", "count": 1, "seconds": 10}));
            assert_eq!(served, json!({"sent": [request], "leases": 0}));
        }
        [&mut p, &mut d].map(|child| child.ask(json!({"do": "resident"}))["bytes"].as_u64().unwrap())
    };
    let before = run(0..200);
    let after = run(200..rounds);
    println!("resident bytes of P and D after 200 hand-offs {before:?}, after {rounds} {after:?}");
    for (before, after) in before.into_iter().zip(after) {
        assert!(after < before + (4 << 20), "grew from {before} to {after}");
    }
}

#[test]
fn a_decode_engine_that_was_killed_strands_no_lease_of_another() {
    if !installed() {
        return;
    }
    let (mut p, mut doomed, mut d) = (Steered::rust(&[]), Steered::rust(&[]), Steered::rust(&[]));
    let payload = engine(&mut p, "p", "v14");
    engine(&mut doomed, "d-1", "v14");
    engine(&mut d, "d-2", "v14");
    let first = p.ask(json!({"do": "produce", "request": "cmpl-a-0", "blocks": [1]}));
    assert_eq!(doomed.ask(consume("r-1", &first["params"], &[1], &payload))["failed"], json!([]));
    assert_eq!(p.ask(json!({"do": "serve", "count": 1, "seconds": 10}))["sent"], json!(["cmpl-a-0"]));
    let lost = p.ask(json!({"do": "produce", "request": "cmpl-b-0", "blocks": [2]}));
    doomed.kill();
    // Nobody read it: another decode engine still can, and its lease ends with that.
    assert_eq!(d.ask(consume("r-2", &lost["params"], &[1], &payload))["failed"], json!([]));
    let served = p.ask(json!({"do": "serve", "count": 1, "seconds": 10}));
    assert_eq!(served, json!({"sent": ["cmpl-b-0"], "leases": 0}));
}
