//! Two processes with agents of this crate: bytes, notifications, and what a killed peer leaves.

use std::time::{Duration, Instant};

use kv_connector::transport::nixl::{LibrarySource, NixlError, NixlLibrary};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::children::{Started, Steered, installed};
use crate::peer::{hex, pattern};

const BLOCK: usize = 4096;

fn digest(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(crate) fn read(agent: &Started, block: usize, count: usize, local: &[u64], remote: &[u64]) -> Value {
    json!({"do": "post", "op": "READ", "agent": agent.name, "base": agent.base, "block": block,
        "count": count, "local": local, "remote": remote, "notification": hex(b"req-1:1")})
}

#[test]
fn blocks_move_between_processes_and_both_sides_hear_of_it() {
    if !installed() {
        return;
    }
    for progress in ["thread", "polling"] {
        let (mut source, mut reader) = (Steered::rust(&[]), Steered::rust(&[]));
        let start =
            |name: &str| json!({"do": "start", "name": name, "len": 64 * BLOCK, "progress": progress});
        let p = source.start_with(start("p"));
        let d = reader.start_with(start("d"));
        source.ask(json!({"do": "fill", "seed": 3}));
        assert_eq!(reader.ask(json!({"do": "add", "blob": p.blob}))["agent"], p.name);
        reader.ask(read(&p, BLOCK, 64, &[0, 1, 2, 9], &[63, 5, 6, 7]));
        let done = reader.ask(json!({"do": "wait", "seconds": 10}));
        assert_eq!((&done["state"], &done["bytes"]), (&json!("done"), &json!(4 * BLOCK)));
        assert_eq!(done["descriptors"], 4);
        let bytes = pattern(3, 64 * BLOCK);
        for (local, remote) in [(0, 63), (1, 5), (2, 6), (9, 7)] {
            let block = json!({"do": "digest", "offset": local * BLOCK, "len": BLOCK});
            let expected = digest(&bytes[remote * BLOCK..(remote + 1) * BLOCK]);
            assert_eq!(reader.ask(block)["sha256"], expected, "block {local}");
        }
        let untouched = json!({"do": "digest", "offset": 3 * BLOCK, "len": BLOCK});
        assert_eq!(reader.ask(untouched)["sha256"], digest(&[0; BLOCK]));
        let heard = source.ask(json!({"do": "take", "count": 1, "seconds": 10}));
        assert_eq!(heard["notifications"], json!([[d.name, hex(b"req-1:1")]]));
        source.ask(json!({"do": "add", "blob": d.blob}));
        source.ask(json!({"do": "notify", "agent": d.name, "message": hex(b"back")}));
        let heard = reader.ask(json!({"do": "take", "count": 1, "seconds": 10}));
        assert_eq!(heard["notifications"], json!([[p.name, hex(b"back")]]));
    }
}

#[test]
fn a_killed_source_fails_reads_within_seconds_and_a_new_one_serves() {
    if !installed() {
        return;
    }
    let (mut source, mut reader) = (Steered::rust(&[]), Steered::rust(&[]));
    let p = source.start("p", 64 * BLOCK);
    reader.start("d", 64 * BLOCK);
    reader.ask(json!({"do": "add", "blob": p.blob}));
    reader.ask(read(&p, BLOCK, 64, &[0], &[0]));
    assert_eq!(reader.ask(json!({"do": "wait", "seconds": 10}))["state"], "done");
    assert_eq!(reader.ask(json!({"do": "knows", "agent": p.name}))["knows"], true);
    source.kill();
    reader.ask(read(&p, BLOCK, 64, &[0], &[0]));
    let ended = reader.ask(json!({"do": "wait", "seconds": 20}));
    assert_eq!(ended["state"], "failed");
    assert!(ended["micros"].as_f64().unwrap() < 5e6, "{ended}");
    assert_eq!(reader.ask(json!({"do": "knows", "agent": p.name}))["knows"], false);
    reader.ask(json!({"do": "notify", "agent": p.name, "message": hex(b"into the void")}));
    reader.ask(json!({"do": "remove", "agent": p.name}));

    let mut again = Steered::rust(&[]);
    let p = again.start("p", 64 * BLOCK);
    again.ask(json!({"do": "fill", "seed": 5}));
    reader.ask(json!({"do": "add", "blob": p.blob}));
    reader.ask(read(&p, BLOCK, 64, &[1], &[2]));
    assert_eq!(reader.ask(json!({"do": "wait", "seconds": 10}))["state"], "done");
    let block = reader.ask(json!({"do": "digest", "offset": BLOCK, "len": BLOCK}));
    assert_eq!(block["sha256"], digest(&pattern(5, 3 * BLOCK)[2 * BLOCK..]));
}

#[test]
fn a_source_killed_in_the_middle_of_a_read_fails_it() {
    if !installed() {
        return;
    }
    // Over TCP alone the source has to send every byte itself, so the read can be cut.
    let tcp = [("UCX_TLS", "tcp")];
    let (mut source, mut reader) = (Steered::rust(&tcp), Steered::rust(&tcp));
    let len = 1 << 30;
    let p = source.start("p", len);
    reader.start("d", len);
    reader.ask(json!({"do": "add", "blob": p.blob}));
    reader.ask(read(&p, len / 1024, 1024, &[0], &[0]));
    assert_eq!(reader.ask(json!({"do": "wait", "seconds": 10}))["state"], "done");
    let all: Vec<u64> = (0..1024).collect();
    reader.ask(read(&p, len / 1024, 1024, &all, &all));
    assert_eq!(reader.ask(json!({"do": "wait", "seconds": 0}))["state"], "moving");
    source.kill();
    let ended = reader.ask(json!({"do": "wait", "seconds": 30}));
    assert_eq!(ended["state"], "failed", "{ended}");
    assert!(ended["micros"].as_f64().unwrap() < 15e6, "{ended}");
    assert!(reader.lives());
}

#[test]
fn a_killed_reader_leaves_its_source_unharmed() {
    if !installed() {
        return;
    }
    let (mut source, mut reader) = (Steered::rust(&[]), Steered::rust(&[]));
    let p = source.start("p", 64 * BLOCK);
    reader.start("d", 64 * BLOCK);
    reader.ask(json!({"do": "add", "blob": p.blob}));
    reader.ask(read(&p, BLOCK, 64, &[0], &[0]));
    reader.kill();
    let mut other = Steered::rust(&[]);
    let d = other.start("other", 64 * BLOCK);
    other.ask(json!({"do": "add", "blob": p.blob}));
    other.ask(read(&p, BLOCK, 64, &[0], &[0]));
    assert_eq!(other.ask(json!({"do": "wait", "seconds": 10}))["state"], "done");
    assert!(source.lives());
    let heard = source.ask(json!({"do": "take", "count": 2, "seconds": 2}));
    let last = heard["notifications"].as_array().unwrap().last().unwrap();
    assert_eq!(last[0], json!(d.name));
}

/// Here and not beside the code, because a process that has loaded NIXL refuses any other library.
#[test]
fn a_file_that_is_no_library_is_not_taken_for_one() {
    let source = LibrarySource::Path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").into());
    let error = NixlLibrary::load(&source).unwrap_err();
    assert!(matches!(error, NixlError::NotAvailable { .. }), "{error}");
}

#[test]
fn an_agent_without_memory_notifies_and_leaves() {
    if !installed() {
        return;
    }
    let (mut source, mut notifier) = (Steered::rust(&[]), Steered::rust(&[]));
    let p = source.start("p", BLOCK);
    let n = notifier.start("router", 0);
    notifier.ask(json!({"do": "add", "blob": p.blob}));
    notifier.ask(json!({"do": "notify", "agent": p.name, "message": hex(b"cmpl-9:1")}));
    let heard = source.ask(json!({"do": "take", "count": 1, "seconds": 10}));
    assert_eq!(heard["notifications"], json!([[n.name, hex(b"cmpl-9:1")]]));
}

fn is_taken(notifier: &mut Steered, agent: &Started) -> bool {
    let notify = json!({"do": "notify_heard", "agent": agent.name, "message": hex(b"cmpl-9:1")});
    notifier.try_ask(&notify)["error"].is_null()
}

/// Notifies until one is refused; how many were taken before.
fn taken_by_nobody(notifier: &mut Steered, agent: &Started) -> u32 {
    let started = Instant::now();
    let mut taken = 0;
    while is_taken(notifier, agent) {
        taken += 1;
        assert!(started.elapsed() < Duration::from_secs(20), "{taken} notifications to nobody");
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("{taken} notifications were taken in {:?}", started.elapsed());
    taken
}

/// What a sender can know: NIXL may take a word to an agent that has gone, and refuses the ones that
/// follow once the connection is known to be broken.
#[test]
fn notifications_to_a_killed_agent_are_refused_sooner_or_later() {
    if !installed() {
        return;
    }
    for progress in ["thread", "polling"] {
        let mut source = Steered::rust(&[]);
        let p = source.start("p", BLOCK);
        let start = |name: &str| {
            let mut notifier = Steered::rust(&[]);
            notifier.start_with(json!({"do": "start", "name": name, "len": 0, "progress": progress}));
            notifier.ask(json!({"do": "add", "blob": p.blob}));
            notifier
        };
        let (mut acquainted, mut stranger) = (start("acquainted"), start("stranger"));
        assert!(is_taken(&mut acquainted, &p));
        let heard = source.ask(json!({"do": "take", "count": 1, "seconds": 10}));
        assert_eq!(heard["notifications"].as_array().unwrap().len(), 1);
        source.kill();
        for notifier in [&mut acquainted, &mut stranger] {
            taken_by_nobody(notifier, &p);
            let knows = json!({"do": "knows", "agent": p.name});
            assert_eq!(notifier.ask(knows)["knows"], json!(false));
        }
    }
}
