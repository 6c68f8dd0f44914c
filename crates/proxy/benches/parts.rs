//! The pure parts of a request: reading it, both legs' bodies, the hand-off out of the prefill answer, and
//! the decode answer as the client gets it.
#![allow(clippy::unwrap_used, missing_docs, reason = "a bench")]

use std::hint::black_box;

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kv_connector::protocol::handoff::HandOff;
use kvbaton_proxy::request::ClientRequest;
use kvbaton_proxy::splice::{PrefillAnswer, PromptPart, client_answer};
use kvbaton_proxy::{Endpoint, InjectedHandOff};

fn request(prompt: usize) -> Bytes {
    let text = "lorem ipsum dolor sit amet ".repeat(prompt.div_ceil(27));
    Bytes::from(format!(
        r#"{{"model":"mock","prompt":"{}","max_tokens":16,"temperature":0.7,"stream":true}}"#,
        &text[..prompt]
    ))
}

fn hand_off(blocks: u64) -> Bytes {
    let blocks: Vec<String> = (0..blocks).map(|block| (1000 + block * 7).to_string()).collect();
    Bytes::from(format!(
        r#"{{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[{}]],"remote_engine_id":"p0","remote_request_id":"cmpl-1-0","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1}}"#,
        blocks.join(",")
    ))
}

fn rewriting(c: &mut Criterion) {
    let mut group = c.benchmark_group("rewriting");
    for prompt in [100, 10_000, 1_000_000] {
        let body = request(prompt);
        group.throughput(Throughput::Bytes(body.len() as u64));
        let parse =
            || ClientRequest::parse(Endpoint::Completions, body.clone(), InjectedHandOff::Refuse).unwrap();
        group.bench_function(BenchmarkId::new("read", prompt), |b| b.iter(|| black_box(parse())));
        let (read, raw) = (parse(), hand_off(64));
        group.bench_function(BenchmarkId::new("both legs", prompt), |b| {
            b.iter(|| black_box((read.prefill_body(false), read.decode_body(Some(raw.clone())))))
        });
    }
    group.finish();
}

fn splicing(c: &mut Criterion) {
    let mut group = c.benchmark_group("hand-off");
    for blocks in [64, 4096] {
        let raw = hand_off(blocks);
        let answer = [
            br#"{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"x","logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":8,"completion_tokens":1,"total_tokens":9},"kv_transfer_params":"#,
            &raw[..],
            b"}",
        ];
        let answer = Bytes::from(answer.concat());
        group.throughput(Throughput::Elements(blocks));
        group.bench_function(BenchmarkId::new("out of the answer", blocks), |b| {
            b.iter(|| PrefillAnswer::parse(black_box(&answer)).unwrap())
        });
        group.bench_function(BenchmarkId::new("checked", blocks), |b| {
            b.iter(|| HandOff::parse(black_box(&raw)).unwrap())
        });
    }
    let answer = Bytes::from_static(
        br#"{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" hello world","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":8,"completion_tokens":2,"total_tokens":10,"prompt_tokens_details":{"cached_tokens":8}}}"#,
    );
    let part = PromptPart { cached_tokens: Some(4), ..PromptPart::default() };
    group.bench_function("the client's answer", |b| {
        b.iter(|| client_answer(black_box(&answer), Endpoint::Completions, Some(&part)).unwrap())
    });
    group.finish();
}

criterion_group!(benches, rewriting, splicing);
criterion_main!(benches);
