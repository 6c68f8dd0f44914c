//! What engines shake hands with, as msgpack: the metadata of a rank with 160 regions.
#![allow(clippy::unwrap_used, missing_docs, reason = "a bench")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use kv_connector::protocol::Generation;
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::{AgentMetadataV2, NixlAgentMetadata};

const REGIONS: usize = 160;

fn messages(c: &mut Criterion) {
    let metadata = NixlAgentMetadata::V2(AgentMetadataV2 {
        engine_id: "engine".into(),
        agent_metadata: vec![7; 1024],
        kv_caches_base_addr: (0..REGIONS as u64).map(|region| 0x7F00_0000_0000 + (region << 24)).collect(),
        device_id: 0,
        num_blocks: 10_000,
        block_lens: vec![65_536; REGIONS],
        kv_cache_layout: "HND".into(),
        block_size: 16,
    });
    let encoded = metadata.encode();
    let payload =
        NixlHandshakePayload { compatibility_hash: "a".repeat(64), agent_metadata_bytes: encoded.clone() };
    let sent = payload.encode();
    let mut group = c.benchmark_group("msgpack");
    group.bench_function("metadata, encoded", |b| b.iter(|| black_box(&metadata).encode()));
    group.bench_function("metadata, decoded", |b| {
        b.iter(|| NixlAgentMetadata::decode(Generation::V2, black_box(&encoded)).unwrap())
    });
    group.bench_function("payload, decoded", |b| {
        b.iter(|| NixlHandshakePayload::decode(black_box(&sent)).unwrap())
    });
    group.finish();
}

criterion_group!(benches, messages);
criterion_main!(benches);
