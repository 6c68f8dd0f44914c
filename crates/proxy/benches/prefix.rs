//! The tree of prompts' beginnings: cutting a prompt, looking it up and recording it, by its length and by what
//! the tree holds already.
#![allow(clippy::unwrap_used, missing_docs, reason = "a bench")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvbaton_proxy::request::PromptParts;
use kvbaton_proxy::routing::PeerKey;
use kvbaton_proxy::routing::prefix::{PrefixSettings, PrefixTree};
use kvbaton_proxy::routing::ring::Ring;

/// A conversation of its own, after a system prompt that all have.
fn prompt(number: usize, length: usize) -> Vec<u8> {
    let system = b"You are a helpful assistant. ".repeat(1024 / 29);
    let own = format!("conversation {number} says this. ");
    system.into_iter().chain(own.bytes().cycle()).take(length).collect()
}

fn filled(entries: usize) -> PrefixTree {
    let tree = PrefixTree::new(PrefixSettings { entries: entries * 2, ..PrefixSettings::default() });
    let mut number = 0;
    while tree.entries() < entries {
        let text = prompt(number, 8 << 10);
        tree.record(&tree.chunks_of(&PromptParts::of_text("m", None, &text)), PeerKey(number as u32 % 100));
        number += 1;
    }
    tree
}

fn prefix(c: &mut Criterion) {
    let mut group = c.benchmark_group("prefix");
    for entries in [1_000, 100_000] {
        let tree = filled(entries);
        for length in [1 << 10, 8 << 10, 64 << 10, 1 << 20] {
            let text = prompt(1, length);
            let parts = PromptParts::of_text("m", None, &text);
            group.throughput(Throughput::Bytes(length as u64));
            let name = |what: &str| BenchmarkId::new(format!("{what}, {entries} entries"), length);
            if entries == 1_000 {
                group.bench_function(BenchmarkId::new("cut", length), |b| {
                    b.iter(|| black_box(tree.chunks_of(black_box(&parts))))
                });
            }
            let chunks = tree.chunks_of(&parts);
            group.bench_function(name("record"), |b| b.iter(|| tree.record(black_box(&chunks), PeerKey(1))));
            group.bench_function(name("look up"), |b| b.iter(|| black_box(tree.matched(black_box(&chunks)))));
        }
    }
    group.finish();
}

fn ring(c: &mut Criterion) {
    let mut group = c.benchmark_group("ring");
    for peers in [10_u32, 1_000] {
        let names: Vec<_> = (0..peers).map(|number| format!("http://10.0.0.{number}:8000")).collect();
        let members = || (0..peers).map(|number| (PeerKey(number), names[number as usize].as_str(), 1.0));
        let ring = Ring::new(members());
        group.bench_function(BenchmarkId::new("made", peers), |b| b.iter(|| Ring::new(members())));
        group.bench_function(BenchmarkId::new("bounded", peers), |b| {
            b.iter(|| black_box(ring.bounded(black_box(b"session-1"), |_| Some(1), u64::from(peers), 1.25)))
        });
    }
    group.finish();
}

criterion_group!(benches, prefix, ring);
criterion_main!(benches);
