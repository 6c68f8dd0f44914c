//! The router and a real vLLM prefill engine: hand-offs that clients abandon are freed by the
//! router's own notification, long before their lease ends.
//!
//! Runs where KVBATON_VLLM_PREFILL names an engine (`http://127.0.0.1:8100`), KVBATON_VLLM_SIDE_CHANNEL
//! its side channel (`127.0.0.1:5600`) and KVBATON_VLLM_NIXL the NIXL it runs (`1.5.1`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kv_connector::protocol::Generation;
use kv_connector::protocol::handshake::NixlHandshakePayload;
use kv_connector::protocol::metadata::NixlAgentMetadata;
use kv_connector::side_channel::shake_hands;
use kv_connector::worker::HandshakeJob;
use kvbaton_proxy::{PeerSpec, Role};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::nixl::installation;
use crate::support::{COMPLETIONS, Cluster, FakeEngine, Step, Wire, http_answer, listen, request};

const ROUNDS: usize = 10;
/// The engine's metrics follow its steps; no lease of 30 s may end in here.
const PATIENCE: Duration = Duration::from_secs(15);

/// Stands between router and engine and holds back answers to generation requests.
struct Relay {
    addr: SocketAddr,
    /// One permit for each answer that has come.
    come: Arc<Semaphore>,
    /// One permit for each answer that may pass.
    pass: Arc<Semaphore>,
    _accept: JoinSet<()>,
}

impl Relay {
    async fn to(engine: String) -> Self {
        let listener = listen().await;
        let addr = listener.local_addr().unwrap();
        let (come, pass) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let mut accept = JoinSet::new();
        let gates = (Arc::clone(&come), Arc::clone(&pass));
        accept.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                connections.spawn(relay(client, engine.clone(), gates.clone()));
            }
        });
        Self { addr, come, pass, _accept: accept }
    }
}

async fn relay(client: TcpStream, engine: String, (come, pass): (Arc<Semaphore>, Arc<Semaphore>)) {
    let Ok(engine) = TcpStream::connect(engine).await else { return };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_engine, mut to_engine) = engine.into_split();
    let generates = AtomicBool::new(false);
    let asking = async {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(len @ 1..) = from_client.read(&mut bytes).await {
            if bytes.starts_with(b"POST ") {
                generates.store(true, Ordering::Relaxed);
            }
            if to_engine.write_all(&bytes[..len]).await.is_err() {
                return;
            }
        }
    };
    let answering = async {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(len @ 1..) = from_engine.read(&mut bytes).await {
            if generates.swap(false, Ordering::Relaxed) {
                come.add_permits(1);
                pass.acquire().await.unwrap().forget();
            }
            if to_client.write_all(&bytes[..len]).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = asking => {}
        () = answering => {}
    }
}

async fn metric(authority: &str, name: &str) -> f64 {
    let mut stream = TcpStream::connect(authority).await.unwrap();
    let ask = format!("GET /metrics HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await.unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).await.unwrap();
    let line = page.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

async fn ask_for_payload(side_channel: &str) -> Vec<u8> {
    let (host, port) = side_channel.rsplit_once(':').unwrap();
    let job = HandshakeJob {
        engine_id: String::new(),
        host: host.to_owned(),
        port: port.parse().unwrap(),
        generation: Generation::V14,
        tp_size: 1,
        pp_size: 1,
        ranks: vec![(0, 0)],
    };
    shake_hands(&job, || Duration::ZERO).await.unwrap().remove(0).payload
}

#[tokio::test]
async fn abandoned_hand_offs_of_a_real_vllm_are_freed_by_the_routers_notification() {
    let setting = |name: &str| std::env::var(name).ok();
    let (Some(url), Some(side_channel), Some(version)) =
        (setting("KVBATON_VLLM_PREFILL"), setting("KVBATON_VLLM_SIDE_CHANNEL"), setting("KVBATON_VLLM_NIXL"))
    else {
        eprintln!("skipped: KVBATON_VLLM_PREFILL, _SIDE_CHANNEL and _NIXL name no engine");
        return;
    };
    let Some(home) = installation() else { return };
    let model = setting("KVBATON_VLLM_SERVED").unwrap_or_else(|| "tiny".to_owned());
    let engine = url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    let relay = Relay::to(engine.clone()).await;
    let models = json!({"object": "list", "data": [{"id": model, "object": "model"}]}).to_string();
    let answer = http_answer("500 Internal Server Error", "application/json", "{}");
    let decode = FakeEngine::with_models(&models, vec![Step::Send(answer)]).await;
    let prefill = PeerSpec {
        notify: true,
        nixl_version: Some(version),
        ..PeerSpec::new(Role::Prefill, format!("http://{}", relay.addr))
    };
    let cluster = Cluster::builder()
        .prefill(0)
        .decode(0)
        .peer(Role::Decode, &decode.url())
        .config(move |config| config.prefill.push(prefill.clone()))
        .config(move |config| config.nixl.library = Some(home.join("python")))
        .start()
        .await;

    let payload = ask_for_payload(&side_channel).await;
    let outer = NixlHandshakePayload::decode(&payload).unwrap();
    let metadata = NixlAgentMetadata::decode_any(&outer.agent_metadata_bytes).unwrap();
    let path = format!("/registry/v1/engines/{}/ranks/0/0", metadata.engine_id());
    let msgpack = [("content-type", "application/msgpack")];
    assert_eq!(cluster.send("PUT", &path, &msgpack, payload).await.status, 201);

    let expired = metric(&engine, "vllm:nixl_num_kv_expired_reqs_total").await;
    let mut freed = Vec::new();
    for round in 0..ROUNDS {
        let prompt = format!("prompt {round}: ") + &"nobody will read these blocks; ".repeat(12);
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0});
        let wire = Wire::open(cluster.addr, &request(COMPLETIONS, &[], &body.to_string())).await;
        relay.come.acquire().await.unwrap().forget();
        assert!(metric(&engine, "vllm:kv_cache_usage_perc").await > 0.0, "the blocks are held");
        drop(wire);
        // Time for the router to notice that nobody waits any more.
        tokio::time::sleep(Duration::from_millis(100)).await;
        relay.pass.add_permits(1);
        let started = Instant::now();
        while metric(&engine, "vllm:kv_cache_usage_perc").await > 0.0 {
            assert!(started.elapsed() < PATIENCE, "the blocks are still held in round {round}");
        }
        freed.push(started.elapsed());
    }
    cluster
        .wait_for("the router has accounted for all", async || {
            let way = [("way", "notification")];
            cluster.metric("kvbaton_releases_total", &way).await == ROUNDS as f64
        })
        .await;
    assert_eq!(decode.seen().len(), 0, "no decode engine was needed");
    assert_eq!(metric(&engine, "vllm:nixl_num_kv_expired_reqs_total").await, expired);
    freed.sort();
    let (first, middle, last) = (freed[0], freed[ROUNDS / 2], freed[ROUNDS - 1]);
    println!(
        "{ROUNDS} abandoned hand-offs were freed by notification, from P's answer to P's metric: \
         best {first:?}, median {middle:?}, worst {last:?}"
    );
    cluster.wait_idle().await;
    cluster.finish().await;
}
