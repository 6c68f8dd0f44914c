//! Python's nixl 1.5.1 at the other end: reads, writes and notifications both ways.

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::children::{Started, Steered, installed};
use crate::peer::{hex, pattern};
use crate::processes::read;

const BLOCK: usize = 16 << 10;
const BLOCKS: usize = 128;
const LEN: usize = BLOCK * BLOCKS;

fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn pair() -> [(Steered, Started); 2] {
    let (mut rust, mut python) = (Steered::rust(&[]), Steered::python(&[]));
    let r = rust.start("rust", LEN);
    let p = python.start("7f2e6e0c-9d5c-4b8b-8a51-0c1f53a3a3c2", LEN);
    [(rust, r), (python, p)]
}

#[test]
fn each_reads_and_writes_the_other_byte_for_byte() {
    if !installed() {
        return;
    }
    let [(mut rust, r), (mut python, p)] = pair();
    rust.ask(json!({"do": "add", "blob": p.blob, "version": "1.5.1"}));
    assert_eq!(python.ask(json!({"do": "add", "blob": r.blob}))["agent"], r.name);
    let all: Vec<u64> = (0..BLOCKS as u64).collect();
    let turned: Vec<u64> = all.iter().rev().copied().collect();
    let reversed =
        |seed: u64| -> Vec<u8> { pattern(seed, LEN).chunks(BLOCK).rev().flatten().copied().collect() };
    for (seed, op) in [(3, "READ"), (5, "READ"), (7, "WRITE"), (9, "WRITE")] {
        let (asker, other, peer) =
            if seed % 4 == 3 { (&mut rust, &mut python, &p) } else { (&mut python, &mut rust, &r) };
        let (from, to) = if op == "READ" { (&mut *other, &mut *asker) } else { (&mut *asker, &mut *other) };
        from.ask(json!({"do": "fill", "seed": seed}));
        to.ask(json!({"do": "fill", "seed": 1}));
        let mut ask = read(peer, BLOCK, BLOCKS, &all, &turned);
        ask["op"] = json!(op);
        asker.ask(ask);
        let done = asker.ask(json!({"do": "wait", "seconds": 10}));
        assert_eq!((&done["state"], &done["bytes"]), (&json!("done"), &json!(LEN)));
        let heard = other.ask(json!({"do": "take", "count": 1, "seconds": 10}));
        let asker_name = if peer.name == p.name { &r.name } else { &p.name };
        assert_eq!(heard["notifications"], json!([[asker_name, hex(b"req-1:1")]]));
        let target = if op == "READ" { asker } else { other };
        let seen = target.ask(json!({"do": "digest", "offset": 0, "len": LEN}));
        assert_eq!(seen["sha256"], digest(&reversed(seed)), "{op} with seed {seed}");
    }
}

#[test]
fn notifications_go_both_ways_without_a_transfer() {
    if !installed() {
        return;
    }
    let [(mut rust, r), (mut python, p)] = pair();
    rust.ask(json!({"do": "add", "blob": p.blob, "version": "1.5.1"}));
    python.ask(json!({"do": "add", "blob": r.blob}));
    for (from, to, sender, target) in [(0, 1, &r, &p), (1, 0, &p, &r)] {
        let ends = [&mut rust, &mut python];
        let sent: Vec<String> = [&b"HB:a,b"[..], b"a:1", b"\xff\x00\x01"].map(hex).to_vec();
        for message in &sent {
            ends[from].ask(json!({"do": "notify", "agent": target.name, "message": message}));
        }
        let heard = ends[to].ask(json!({"do": "take", "count": 3, "seconds": 10}));
        let expected: Vec<_> = sent.iter().map(|message| json!([sender.name, message])).collect();
        assert_eq!(heard["notifications"], json!(expected));
    }
}

#[test]
fn an_agent_that_tells_no_version_is_not_loaded() {
    if !installed() {
        return;
    }
    let [(mut rust, _), (_python, p)] = pair();
    let refused = rust.try_ask(&json!({"do": "add", "blob": p.blob}));
    assert_eq!(refused["error"], format!("agent {} runs an unknown version of NIXL", p.name));
    let refused = rust.try_ask(&json!({"do": "add", "blob": p.blob, "version": "1.3.1"}));
    assert_eq!(
        refused["error"],
        format!("agent {} runs a version of NIXL that this one cannot talk to", p.name)
    );
}
