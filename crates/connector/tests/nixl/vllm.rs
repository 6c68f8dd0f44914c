//! A real vLLM prefill engine at the other end: this crate's decode side pulls what it prefilled.
//!
//! Runs where KVBATON_VLLM_PREFILL names one (`http://127.0.0.1:8100`) and KVBATON_VLLM_MODEL the
//! model argument it was started with. KVBATON_VLLM_FACTORS (JSON) says what else enters its hash
//! where it is not the four-layer model of the compatibility capture; KVBATON_VLLM_REGISTRY names a
//! kvbaton whose registry the payload goes through as well; `scripts/interop-vllm` sets all of them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kv_connector::compat::CompatFactors;
use kv_connector::handshake::RegistryClient;
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
    let served = std::env::var("KVBATON_VLLM_SERVED").unwrap_or_else(|_| "tiny".to_owned());
    let body = json!({"model": served, "prompt": prompt, "max_tokens": 1, "temperature": 0,
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
    let mut replies = runtime().block_on(shake_hands(&job, || Duration::ZERO)).unwrap();
    replies.remove(0).payload
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// The payload as it comes out of the HTTP registry that it was put into.
fn through_registry(registry: &str, engine_id: &str, payload: &[u8]) -> Vec<u8> {
    let client = RegistryClient::new(registry, std::env::var("KVBATON_VLLM_TOKEN").ok()).unwrap();
    let fetched = runtime().block_on(async {
        client.publish(engine_id, 0, 0, payload.to_vec()).await.unwrap();
        client.fetch(engine_id, 0, 0).await.unwrap()
    });
    assert_eq!(fetched.payload, payload, "byte for byte");
    fetched.payload
}

/// What enters the engine's compatibility hash.
fn factors(model: String) -> CompatFactors {
    let told: Value = std::env::var("KVBATON_VLLM_FACTORS")
        .map_or(Value::Null, |text| serde_json::from_str(&text).expect("KVBATON_VLLM_FACTORS is JSON"));
    let text = |key: &str, usual: &str| told[key].as_str().unwrap_or(usual).to_owned();
    let count = |key: &str, usual: u64| told[key].as_u64().unwrap_or(usual);
    CompatFactors {
        generation: Generation::V14,
        connector_version: 14,
        vllm_version: text("vllm_version", "0.32.0"),
        model,
        dtype: text("dtype", "torch.bfloat16"),
        num_kv_heads: count("num_kv_heads", 2),
        head_size: count("head_size", 64),
        num_hidden_layers: count("num_hidden_layers", 4),
        attn_backend_name: text("attn_backend_name", "CPU_ATTN"),
        cache_dtype: text("cache_dtype", "auto"),
        is_hma_enabled: told["is_hma_enabled"].as_bool().unwrap_or(true),
        speculative_config: None,
        transfer_mode: TransferMode::Pull,
    }
}

/// A decode engine of this crate whose regions are like the peer's.
fn decode_engine(payload: &[u8], factors: &CompatFactors) -> Steered {
    let mut d = Steered::rust(&[]);
    let version = std::env::var("KVBATON_VLLM_NIXL").unwrap_or_else(|_| "1.5.1".to_owned());
    d.ask(json!({"do": "engine", "name": "kvbaton-d", "blocks": 256, "like": hex(payload),
        "heads": factors.num_kv_heads, "version": version, "hash": factors.digest(),
        "progress": "polling", "lease": 30}));
    d
}

/// Pulls the hand-offs' blocks one after the other; what each block but the last holds.
fn pull(d: &mut Steered, handed: &[Value], payload: &[u8], way: &str) -> Vec<Value> {
    let mut digests = Vec::new();
    for (n, params) in handed.iter().enumerate() {
        let remote = params["remote_block_ids"][0].as_array().unwrap().len() as u64;
        let local: Vec<u64> = (0..remote).map(|i| 1 + n as u64 * remote + i).collect();
        let done = d.ask(json!({"do": "consume", "request": format!("d-{n}"), "params": params,
            "tokens": number(params, "remote_num_tokens"), "blocks": local, "payload": hex(payload),
            "seconds": 30}));
        assert_eq!((&done["finished"], &done["failed"]), (&json!([format!("d-{n}")]), &json!([])));
        assert_eq!(done["handshakes"], json!(u64::from(n == 0)));
        println!(
            "{way}: hand-off {n}: {remote} blocks ready after {:.2} ms, {:.2} ms of it in NIXL",
            done["micros"].as_f64().unwrap() / 1e3,
            done["inside"].as_f64().unwrap_or(f64::NAN) / 1e3
        );
        // The last block is full only in part.
        digests.push(d.ask(json!({"do": "digest", "blocks": local[..local.len() - 1]})));
    }
    digests
}

fn wait_until_free(authority: &str, held: f64) {
    let started = Instant::now();
    while metric(authority, "vllm:kv_cache_usage_perc") > held {
        assert!(started.elapsed() < Duration::from_secs(10), "the blocks are still held");
    }
    println!("P's KV usage is back at {held} after {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
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
    let free = metric(authority, "vllm:kv_cache_usage_perc");
    let prompt = |n: usize| format!("prompt {n}: ") + &"the name is bound in the local scope; ".repeat(12);
    let hand_over = || [0, 1, 2, 0].map(|n| prefill(authority, &prompt(n)));
    let handed = hand_over();
    assert!(metric(authority, "vllm:kv_cache_usage_perc") > free, "the blocks are held");

    let factors = factors(model);
    let started = Instant::now();
    let payload = ask_for_payload(&handed[0]);
    println!("handshake over the side channel: {} bytes in {:?}", payload.len(), started.elapsed());
    let theirs = NixlHandshakePayload::decode(&payload).unwrap().compatibility_hash;
    assert_eq!(theirs, factors.digest(), "the compatibility hash of the engine's real factors");
    println!("compatibility hash {theirs}: equal");

    let digests = pull(&mut decode_engine(&payload, &factors), &handed, &payload, "side channel");
    assert!(digests.iter().all(|digest| digest["zeros"].as_u64().unwrap() < 10_000), "{digests:?}");
    assert_eq!(digests[0], digests[3], "one prompt, one content");
    assert!(digests[0] != digests[1] && digests[1] != digests[2], "other prompts, other contents");
    wait_until_free(authority, free);

    if let Ok(registry) = std::env::var("KVBATON_VLLM_REGISTRY") {
        let handed = hand_over();
        let started = Instant::now();
        let engine_id = handed[0]["remote_engine_id"].as_str().unwrap();
        let fetched = through_registry(&registry, engine_id, &payload);
        println!("put into the HTTP registry and fetched in {:?}: equal", started.elapsed());
        let again = pull(&mut decode_engine(&fetched, &factors), &handed, &fetched, "registry");
        assert_eq!(again, digests, "the same prompts, the same contents");
        wait_until_free(authority, free);
    }
    assert_eq!(metric(authority, "vllm:nixl_num_kv_expired_reqs_total"), expired, "no lease ran out");
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
    println!("an agent that only notifies: freed within {:?}", started.elapsed());
}
