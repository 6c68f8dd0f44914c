//! The router frees an abandoned hand-off by telling the prefill engine itself, where it was asked
//! to and the NIXL versions are known to fit; in any other case the other ways are taken.

use kvbaton::config::Config;
use kvbaton_proxy::{PeerSpec, Role};
use serde_json::json;

use crate::support::{
    COMPLETIONS, Cluster, FakeEngine, Gate, PROMPT, Step, Wire, completion, http_answer, request,
};

const ENGINE: &str = "p-over-nixl";
const REQUEST: &str = "cmpl-abandoned-0-aaaaaaaa";

/// What a prefill engine answers on the first leg.
fn prefilled() -> Vec<u8> {
    let answer = json!({
        "choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 1},
        "kv_transfer_params": {
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": ENGINE, "remote_request_id": REQUEST, "remote_host": "127.0.0.1",
            "remote_port": 5600, "tp_size": 1, "remote_num_tokens": 40,
        },
    });
    http_answer("200 OK", "application/json", &answer.to_string())
}

/// A prefill engine whose client has left by the time it answers.
struct Abandoned {
    engine: FakeEngine,
    asked: Gate,
    go: Gate,
}

impl Abandoned {
    async fn start() -> Self {
        let (asked, go) = (Gate::new(), Gate::new());
        let steps = vec![Step::Open(asked.clone()), Step::Wait(go.clone()), Step::Send(prefilled())];
        Self { engine: FakeEngine::start(steps).await, asked, go }
    }

    fn spec(&self) -> PeerSpec {
        PeerSpec { notify: true, ..PeerSpec::new(Role::Prefill, self.engine.url()) }
    }

    async fn abandon(&self, cluster: &Cluster) {
        let bytes = request(COMPLETIONS, &[], &completion(PROMPT, 8).to_string());
        let wire = Wire::open(cluster.addr, &bytes).await;
        self.asked.pass().await;
        drop(wire);
        // Time for the router to notice, so that nobody waits for the answer any more.
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        self.go.open();
    }
}

/// A decode engine that serves everything at once.
async fn decode() -> FakeEngine {
    let answer = json!({"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 1}});
    FakeEngine::start(vec![Step::Send(http_answer("200 OK", "application/json", &answer.to_string()))]).await
}

async fn cluster(
    prefill: PeerSpec,
    decode: &FakeEngine,
    warns: &[&'static str],
    tune: impl Fn(&mut Config) + 'static,
) -> Cluster {
    Cluster::builder()
        .prefill(0)
        .decode(0)
        .peer(Role::Decode, &decode.url())
        .config(move |config| config.prefill.push(prefill.clone()))
        .config(tune)
        .warns(warns)
        .start()
        .await
}

async fn released(cluster: &Cluster, way: &str) {
    cluster.wait_for("the hand-off is released", async || cluster.released().await == 1.0).await;
    assert_eq!(cluster.metric("kvbaton_releases_total", &[("way", way)]).await, 1.0);
    assert_eq!(cluster.metric("kvbaton_releases_total", &[]).await, 1.0);
    cluster.wait_idle().await;
}

/// The router starts all the same, says once that it cannot notify, and frees the blocks in another way.
#[tokio::test]
async fn operators_see_whether_an_engine_can_be_notified() {
    let silent = |config: &mut Config| {
        config.prefill[0].notify = true;
        config.nixl.library = Some("/nowhere".into());
    };
    let cluster = Cluster::builder().config(silent).warns(&["cannot be notified"]).start().await;
    let of = async |peer: usize| cluster.get("/admin/peers").await.json()["peers"][peer]["notify"].clone();
    let tried = async || of(0).await["reason"] != "starting";
    cluster.wait_for("the router has looked for NIXL", tried).await;
    let prefill = of(0).await;
    assert_eq!((&prefill["configured"], &prefill["usable"]), (&json!(true), &json!(false)));
    assert_eq!(prefill["reason"], "unavailable", "{prefill}");
    assert!(prefill["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{prefill}");
    let off = json!({"configured": false, "usable": false, "reason": "off", "detail": null});
    assert_eq!(of(1).await, off);
    cluster.finish().await;
}

#[tokio::test]
async fn without_a_library_the_other_ways_are_taken() {
    let (prefill, decode) = (Abandoned::start().await, decode().await);
    let spec = PeerSpec { nixl_version: Some("1.5.1".into()), ..prefill.spec() };
    let cluster = cluster(spec, &decode, &["prefill engines cannot be notified"], |_| {}).await;
    register(&cluster, &payload(b"nixlSerDes|")).await;
    prefill.abandon(&cluster).await;
    released(&cluster, "read").await;
    assert_eq!(decode.seen().len(), 1);
    let failures = cluster.metric("kvbaton_notification_failures_total", &[("reason", "unavailable")]).await;
    assert_eq!(failures, 1.0);
    cluster.finish().await;
}

async fn register(cluster: &Cluster, payload: &[u8]) {
    let path = format!("/registry/v1/engines/{ENGINE}/ranks/0/0");
    let msgpack = [("content-type", "application/msgpack")];
    let answer = cluster.send("PUT", &path, &msgpack, payload.to_vec()).await;
    assert!(matches!(answer.status, 200 | 201 | 204), "{answer:?}");
}

fn payload(blob: &[u8]) -> Vec<u8> {
    use kv_connector::protocol::handshake::NixlHandshakePayload;
    use kv_connector::protocol::metadata::{AgentMetadataV14, NixlAgentMetadata};

    let metadata = AgentMetadataV14 {
        engine_id: ENGINE.to_owned(),
        agent_metadata: blob.to_vec(),
        ..AgentMetadataV14::default()
    };
    NixlHandshakePayload {
        compatibility_hash: "h".to_owned(),
        agent_metadata_bytes: NixlAgentMetadata::V14(Box::new(metadata)).encode(),
    }
    .encode()
}

#[cfg(feature = "nixl")]
mod nixl {
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use engine_sim::{EngineConfig, Generation, KvTransport, Leg, Stage};
    use kv_connector::fit::EngineTraits;
    use kv_connector::handshake::{RankPayload, Registration, RegistryClient};
    use kv_connector::transport::Transport as _;
    use kv_connector::transport::nixl::{
        LibrarySource, NixlAgent, NixlConfig, NixlLibrary, NixlMemory, Progress,
    };
    use tokio::time::sleep;

    use super::*;
    use crate::nixl::installation;
    use crate::support::generations;

    /// The engine's agent, as vLLM's worker has one.
    fn worker(library: &Path) -> NixlAgent {
        let library = NixlLibrary::load(&LibrarySource::Folders(vec![library.to_owned()])).unwrap();
        let progress = Progress::Polling(Duration::from_millis(2));
        let config = NixlConfig { progress, ..NixlConfig::new(ENGINE) };
        NixlAgent::new(config, &library, NixlMemory::none()).unwrap()
    }

    fn heard(worker: &mut NixlAgent) -> Vec<String> {
        let messages = worker.take_notifications().into_iter();
        messages.map(|(_, message)| String::from_utf8(message).unwrap()).collect()
    }

    fn with_library(library: PathBuf) -> impl Fn(&mut Config) + 'static {
        move |config| config.nixl.library = Some(library.clone())
    }

    #[tokio::test]
    async fn an_abandoned_hand_off_is_freed_by_the_router_itself() {
        let Some(library) = installation().map(|home| home.join("python")) else { return };
        let mut worker = worker(&library);
        let (prefill, decode) = (Abandoned::start().await, decode().await);
        let spec = PeerSpec { nixl_version: Some("1.5.1".into()), ..prefill.spec() };
        let cluster = cluster(spec, &decode, &[], with_library(library)).await;
        register(&cluster, &payload(&worker.agent_metadata())).await;
        prefill.abandon(&cluster).await;
        released(&cluster, "notification").await;
        let mut all = Vec::new();
        cluster
            .wait_for("the word and the small talk after it", async || {
                all.extend(heard(&mut worker));
                all.len() >= 2
            })
            .await;
        assert_eq!(all, [format!("{REQUEST}:1"), "HB:".to_owned()]);
        assert_eq!(decode.seen().len(), 0, "no decode engine was needed");
        cluster.finish().await;
    }

    /// Nothing else could free them: the only decode engine is gone, and where engines push no other may take its
    /// place. One that only broke off may be reading.
    #[tokio::test]
    async fn what_an_engine_had_that_runs_no_more_is_freed_by_the_router_itself() {
        let Some(library) = installation().map(|home| home.join("python")) else { return };
        let mut worker = worker(&library);
        for (mode, gone) in [("pull", true), ("push", true), ("push", false)] {
            let mut answer = String::from_utf8(prefilled()).unwrap();
            let body = answer.find("{").unwrap();
            let mode = format!(r#""transfer_mode":"{mode}","remote_host""#);
            let body =
                answer.split_off(body).replace(r#""remote_host""#, &mode).replace("[1,2,3]", "[1,2,4]");
            let prefill =
                FakeEngine::start(vec![Step::Send(http_answer("200 OK", "application/json", &body))]).await;
            let asked = Gate::new();
            let after = if gone { Step::Hang } else { Step::Reset };
            let decode = FakeEngine::start(vec![Step::Open(asked.clone()), after]).await;
            let spec = PeerSpec {
                notify: true,
                nixl_version: Some("1.5.1".into()),
                ..PeerSpec::new(Role::Prefill, prefill.url())
            };
            let once = |config: &mut Config| config.retry.attempts = 0;
            let library = with_library(library.clone());
            let tune = move |config: &mut Config| {
                once(config);
                library(config);
            };
            let cluster = cluster(spec, &decode, &["an engine failed"], tune).await;
            register(&cluster, &payload(&worker.agent_metadata())).await;
            let bytes = request(COMPLETIONS, &[("connection", "close")], &completion(PROMPT, 8).to_string());
            let mut wire = Wire::open(cluster.addr, &bytes).await;
            asked.pass().await;
            let decode = (!gone).then_some(decode);
            assert!(wire.everything().await.starts_with("HTTP/1.1 502"));
            if gone {
                released(&cluster, "notification").await;
                let mut all = Vec::new();
                cluster
                    .wait_for("the word", async || {
                        all.extend(heard(&mut worker));
                        all.contains(&format!("{REQUEST}:1"))
                    })
                    .await;
            } else {
                let pushed = [("result", "pushed")];
                let settled = async || cluster.metric("kvbaton_handoffs_total", &pushed).await == 1.0;
                cluster.wait_for("the hand-off is left to the engines", settled).await;
                assert!(!heard(&mut worker).contains(&format!("{REQUEST}:1")));
            }
            drop(decode);
            cluster.finish_whatever_was_warned().await;
        }
    }

    /// The engine is a NIXL that would crash, or may be one: not a byte reaches it.
    #[tokio::test]
    async fn an_engine_of_another_or_of_unknown_nixl_is_never_touched() {
        let Some(library) = installation().map(|home| home.join("python")) else { return };
        let mut worker = worker(&library);
        let cases = [
            (true, Some("1.3.0"), "version_incompatible", &["could not be notified"][..]),
            (true, None, "version_unknown", &["could not be notified"]),
            (false, Some("1.5.1"), "", &[]),
        ];
        for (notify, version, reason, warns) in cases {
            let (prefill, decode) = (Abandoned::start().await, decode().await);
            let spec = PeerSpec { notify, nixl_version: version.map(str::to_owned), ..prefill.spec() };
            let cluster = cluster(spec, &decode, warns, with_library(library.clone())).await;
            register(&cluster, &payload(&worker.agent_metadata())).await;
            prefill.abandon(&cluster).await;
            released(&cluster, "read").await;
            assert_eq!(decode.seen().len(), 1);
            let failures = cluster.metric("kvbaton_notification_failures_total", &[("reason", reason)]).await;
            assert_eq!(failures, f64::from(u8::from(notify)), "{reason}");
            cluster.finish().await;
            sleep(Duration::from_millis(20)).await;
            assert_eq!(heard(&mut worker), [""; 0], "{reason}");
        }
    }

    /// The engine says itself what it runs; that is enough, and it is believed when it is bad news.
    #[tokio::test]
    async fn what_an_engine_announces_counts() {
        let Some(library) = installation().map(|home| home.join("python")) else { return };
        let mut worker = worker(&library);
        for (configured, announced, warns, way) in [
            (None, "1.5.1", &[][..], "notification"),
            (Some("1.5.1"), "1.3.0", &["could not be notified"], "read"),
        ] {
            let (prefill, decode) = (Abandoned::start().await, decode().await);
            let spec = PeerSpec { nixl_version: configured.map(str::to_owned), ..prefill.spec() };
            let cluster = cluster(spec, &decode, warns, with_library(library.clone())).await;
            let payload = payload(&worker.agent_metadata());
            let registration = Registration {
                engine_id: ENGINE.to_owned(),
                ranks: Some(vec![RankPayload { pp_rank: 0, tp_rank: 0, payload }]),
                traits: EngineTraits { nixl_version: Some(announced.to_owned()), ..EngineTraits::default() },
                ..Registration::default()
            };
            let client = RegistryClient::new(cluster.url(""), None).unwrap();
            client.register(&registration).await.unwrap();
            prefill.abandon(&cluster).await;
            released(&cluster, way).await;
            cluster.finish().await;
            let told = heard(&mut worker).contains(&format!("{REQUEST}:1"));
            assert_eq!(told, way == "notification", "{announced}");
        }
    }

    /// A simulated engine over NIXL, which frees its blocks as vLLM's worker does.
    async fn a_simulated_engine_is_told(generation: Generation) {
        let Some(library) = installation().map(|home| home.join("python")) else { return };
        let over_nixl = library.clone();
        let cluster = Cluster::builder()
            .engine(move |config: &mut EngineConfig| {
                let lease = config.lease;
                *config = EngineConfig {
                    generation,
                    lease: if generation == Generation::V2 { Duration::from_secs(480) } else { lease },
                    ..config.clone()
                };
                if config.role == engine_sim::Role::Prefill {
                    config.transport = KvTransport::Nixl { library: Some(over_nixl.clone()) };
                }
            })
            .config(|config| {
                // The engine announces its version by itself.
                config.prefill[0].notify = true;
                // An engine over NIXL takes its time to start.
                config.probe.patience = 1000;
            })
            .config(with_library(library))
            .start()
            .await;
        let peer = |peers: serde_json::Value| peers["peers"][0]["notify"].clone();
        let usable = async || peer(cluster.get("/admin/peers").await.json())["usable"] == true;
        cluster.wait_for("the engine can be notified", usable).await;
        for round in 1..=3 {
            let gate = cluster.p().faults().hold(Stage::BeforeHead, Leg::Prefill);
            let bytes = request(COMPLETIONS, &[], &completion(PROMPT, 8).to_string());
            let wire = Wire::open(cluster.addr, &bytes).await;
            gate.arrived(1).await;
            assert!(cluster.p().stats().blocks_held > 0);
            drop(wire);
            // Time for the router to notice, so that nobody waits for the answer any more.
            sleep(Duration::from_millis(100)).await;
            drop(gate);
            cluster.wait_no_blocks().await;
            cluster.wait_idle().await;
            let told = cluster.metric("kvbaton_releases_total", &[("way", "notification")]).await;
            assert_eq!(told, f64::from(round));
        }
        let stats = cluster.p().stats();
        assert_eq!((stats.leases, stats.kv_expired), (0, 0));
        assert_eq!(generations(cluster.d()).len(), 0, "no decode engine was needed");
        cluster.finish().await;
    }

    #[tokio::test]
    async fn a_simulated_engine_frees_its_blocks() {
        a_simulated_engine_is_told(Generation::V14).await;
    }

    /// It is idle and would not look, but for the small request that it gets on top.
    #[tokio::test]
    async fn a_simulated_engine_of_version_2_frees_its_blocks() {
        a_simulated_engine_is_told(Generation::V2).await;
    }
}
