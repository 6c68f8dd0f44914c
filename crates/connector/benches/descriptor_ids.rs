//! Descriptor ids of one request over all regions: 80 layers, keys and values, 4,096 blocks.
//!
//! The budget is 1 ms on one core; `descriptor_ids_numpy.py` is the same computation in numpy.
#![allow(clippy::unwrap_used, missing_docs, reason = "a bench")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_connector::regions::DescriptorIndex;

const REGIONS: usize = 80 * 2;
const POOL: u64 = 10_000;
const BLOCKS: u64 = 4_096;

/// Blocks of a request in no particular order, as a pool hands them out.
fn block_ids() -> Vec<u64> {
    (0..BLOCKS).map(|i| i * 7_919 % POOL).collect()
}

fn descriptor_ids(c: &mut Criterion) {
    let mut group = c.benchmark_group("descriptor_ids_80x2x4096");
    group.throughput(Throughput::Elements(REGIONS as u64 * BLOCKS));
    let shared = DescriptorIndex::new(vec![POOL; REGIONS], vec![0; REGIONS]).unwrap();
    let one = [block_ids()];
    group.bench_function("shared", |b| b.iter(|| shared.ids(black_box(&one)).unwrap()));
    let mut buffer = Vec::new();
    group.bench_function("shared, reused buffer", |b| {
        b.iter(|| {
            shared.ids_into(black_box(&one), &mut buffer).unwrap();
            black_box(buffer.last().copied())
        });
    });
    // Two groups that own every other region each, with all blocks in both.
    let mapped =
        DescriptorIndex::new(vec![POOL; REGIONS], (0..REGIONS as i64).map(|i| i % 2).collect()).unwrap();
    let two = [block_ids(), block_ids()];
    group.bench_function("mapped", |b| b.iter(|| mapped.ids(black_box(&two)).unwrap()));
    group.finish();
}

criterion_group!(benches, descriptor_ids);
criterion_main!(benches);
