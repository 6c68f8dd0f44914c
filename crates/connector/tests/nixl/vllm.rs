//! A real vLLM prefill engine at the other end: this crate's decode side pulls what it prefilled.
//!
//! Runs where KVBATON_VLLM_PREFILL names one (`http://127.0.0.1:8100`) and KVBATON_VLLM_MODEL the
//! model argument it was started with; its model is the four-layer one of the compatibility capture.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kv_connector::compat::CompatFactors;
use kv_connector::protocol::Generation;
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::protocol::notification;
use kv_connector::protocol::params::{TransferMode, prefill_request_params};
use kv_connector::side_channel::shake_hands;
use kv_connector::worker::HandshakeJob;
use serde_json::{Value, json};

use crate::children::{Steered, installed};
use crate::peer::{hex, number};

/// One exchange; the engine closes the connection after it.
fn http(authority: &str, method: &str, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(authority).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    body.to_owned()
}

fn metric(authority: &str, name: &str) -> f64 {
    let metrics = http(authority, "GET", "/metrics", "");
    let line = metrics.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn prefill(authority: &str, prompt: &str) -> Value {
    let params: Value = serde_json::from_slice(prefill_request_params()).unwrap();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0,
        "kv_transfer_params": params});
    let answer: Value =
        serde_json::from_str(&http(authority, "POST", "/v1/completions", &body.to_string())).unwrap();
    answer["kv_transfer_params"].clone()
}

fn ask_for_payload(params: &Value) -> Vec<u8> {
    let job = HandshakeJob {
        engine_id: params["remote_engine_id"].as_str().unwrap().to_owned(),
        host: params["remote_host"].as_str().unwrap().to_owned(),
        port: params["remote_port"].as_i64().unwrap(),
        generation: Generation::V14,
        tp_size: 1,
        pp_size: 1,
        ranks: vec![(0, 0)],
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut replies = runtime.block_on(shake_hands(&job, || Duration::ZERO)).unwrap();
    replies.remove(0).payload
}

fn factors(model: String) -> CompatFactors {
    CompatFactors {
        generation: Generation::V14,
        connector_version: 14,
        vllm_version: "0.32.0".to_owned(),
        model,
        dtype: "torch.bfloat16".to_owned(),
        num_kv_heads: 2,
        head_size: 64,
        num_hidden_layers: 4,
        attn_backend_name: "CPU_ATTN".to_owned(),
        cache_dtype: "auto".to_owned(),
        is_hma_enabled: true,
        speculative_config: None,
        transfer_mode: TransferMode::Pull,
    }
}

#[test]
fn blocks_of_a_real_vllm_are_pulled_and_freed() {
    let (Ok(url), Ok(model)) = (std::env::var("KVBATON_VLLM_PREFILL"), std::env::var("KVBATON_VLLM_MODEL"))
    else {
        eprintln!("skipped: KVBATON_VLLM_PREFILL and KVBATON_VLLM_MODEL name no engine");
        return;
    };
    if !installed() {
        return;
    }
    let authority = url.trim_start_matches("http://").trim_end_matches('/');
    let expired = metric(authority, "vllm:nixl_num_kv_expired_reqs_total");
    let prompt = |n: usize| format!("prompt {n}: ") + &"the name is bound in the local scope; ".repeat(12);
    let mut handed: Vec<Value> = (0..3).map(|n| prefill(authority, &prompt(n))).collect();
    handed.push(prefill(authority, &prompt(0)));
    assert!(metric(authority, "vllm:kv_cache_usage_perc") > 0.0, "the blocks are held");

    let payload = ask_for_payload(&handed[0]);
    let hash = factors(model).digest();
    assert_eq!(NixlHandshakePayload::decode(&payload).unwrap().compatibility_hash, hash);
    let mut d = Steered::rust(&[]);
    d.ask(json!({"do": "engine", "name": "kvbaton-d", "blocks": 128, "like": hex(&payload), "heads": 2,
        "version": "1.5.1", "hash": hash, "progress": "polling", "lease": 30}));
    let mut digests = Vec::new();
    for (n, params) in handed.iter().enumerate() {
        let remote = params["remote_block_ids"][0].as_array().unwrap().len() as u64;
        let local: Vec<u64> = (0..remote).map(|i| 1 + n as u64 * remote + i).collect();
        let done = d.ask(json!({"do": "consume", "request": format!("d-{n}"), "params": params,
            "tokens": number(params, "remote_num_tokens"), "blocks": local, "payload": hex(&payload),
            "seconds": 30}));
        assert_eq!((&done["finished"], &done["failed"]), (&json!([format!("d-{n}")]), &json!([])));
        assert_eq!(done["handshakes"], json!(u64::from(n == 0)));
        println!("hand-off {n}: {remote} blocks, {} us, in NIXL {} us", done["micros"], done["inside"]);
        // The last block is full only in part.
        digests.push(d.ask(json!({"do": "digest", "blocks": local[..local.len() - 1]})));
    }
    assert!(digests.iter().all(|digest| digest["zeros"].as_u64().unwrap() < 10_000), "{digests:?}");
    assert_eq!(digests[0], digests[3], "one prompt, one content");
    assert!(digests[0] != digests[1] && digests[1] != digests[2], "other prompts, other contents");

    let started = Instant::now();
    while metric(authority, "vllm:kv_cache_usage_perc") > 0.0 {
        assert!(started.elapsed() < Duration::from_secs(10), "the blocks are still held");
    }
    println!("freed within {:?}", started.elapsed());
    assert_eq!(metric(authority, "vllm:nixl_num_kv_expired_reqs_total"), expired);
}

#[test]
fn an_agent_that_only_notifies_frees_the_blocks_of_a_real_vllm() {
    let Ok(url) = std::env::var("KVBATON_VLLM_PREFILL") else {
        eprintln!("skipped: KVBATON_VLLM_PREFILL names no engine");
        return;
    };
    if !installed() {
        return;
    }
    let authority = url.trim_start_matches("http://").trim_end_matches('/');
    let params = prefill(authority, &"nobody will read these blocks; ".repeat(12));
    let held = metric(authority, "vllm:kv_cache_usage_perc");
    assert!(held > 0.0, "the blocks are held");
    let payload = NixlHandshakePayload::decode(&ask_for_payload(&params)).unwrap();
    let metadata = NixlAgentMetadata::decode(Generation::V14, &payload.agent_metadata_bytes).unwrap();
    let NixlAgentMetadata::V14(metadata) = metadata else { panic!("not of v14") };
    let mut notifier = Steered::rust(&[]);
    notifier.start("router", 0);
    let blob = hex(&metadata.agent_metadata);
    let agent = notifier.ask(json!({"do": "add", "blob": blob, "version": "1.5.1"}))["agent"].clone();
    let message = notification::completion(params["remote_request_id"].as_str().unwrap(), 1);
    let started = Instant::now();
    notifier.ask(json!({"do": "notify", "agent": agent, "message": hex(&message)}));
    while metric(authority, "vllm:kv_cache_usage_perc") >= held {
        assert!(started.elapsed() < Duration::from_secs(10), "the blocks are still held");
    }
    println!("freed within {:?}", started.elapsed());
}
