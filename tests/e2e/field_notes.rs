//! Behaviours of docs/behaviours.md that no other file is about, by their numbers there.

use std::cell::Cell;
use std::time::Duration;

use engine_sim::{ArmedFault, Engine, EngineConfig, Fault, Generation, Leg, Role as SimRole, Stage};
use kvbaton::config::Config;
use kvbaton_proxy::{Authorization, PeerSpec, PeerSpecError, Role};
use serde_json::{Value, json};

use crate::malformed_handoff::sound;
use crate::support::{
    Answer, CHAT, COMPLETIONS, Cluster, FakeEngine, PROMPT, Step, Wire, chat, completion, generations,
    http_answer, listen, only, parse, request, single_text,
};

const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

fn response() -> Value {
    json!({"model": "sim", "input": PROMPT, "max_output_tokens": 4, "temperature": 0})
}

fn message() -> Value {
    json!({"model": "sim", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0})
}

fn v2(config: &mut EngineConfig) {
    let defaults = EngineConfig::for_generation(Generation::V2);
    (config.generation, config.idle_trap) = (Generation::V2, false);
    (config.lease, config.load_failure_policy) = (defaults.lease, defaults.load_failure_policy);
}

fn arm(engine: &Engine, leg: Leg, fault: Fault) {
    engine.faults().arm(ArmedFault { fault, leg, sticky: false });
}

fn refuse(status: u16) -> Fault {
    let body = json!({"error": {"message": "no", "type": "t", "param": null, "code": status}});
    Fault::Refuse { status, body }
}

async fn bypassed(cluster: &Cluster, reason: &str) -> f64 {
    let labels = [("decision", "decode_only"), ("reason", reason)];
    cluster.metric("kvbaton_pd_decisions_total", &labels).await
}

#[tokio::test]
async fn item_7_a_missing_hand_off_is_counted_on_every_path() {
    let cluster = Cluster::builder().warns(&["hand-off"]).start().await;
    let cases = [
        (COMPLETIONS, completion(PROMPT, 4)),
        (CHAT, chat(PROMPT, 4)),
        (RESPONSES, response()),
        (MESSAGES, message()),
    ];
    for (done, (path, body)) in cases.into_iter().enumerate() {
        arm(cluster.p(), Leg::Prefill, Fault::DropHandoff);
        assert_eq!(cluster.post(path, &body).await.status, 200, "{path}");
        assert_eq!(generations(cluster.p()).len(), done + 1, "{path} has a prefill leg");
        let missing = cluster.metric("kvbaton_handoffs_total", &[("result", "missing")]).await;
        assert_eq!(missing, done as f64 + 1.0, "{path}");
        let sent = parse(&generations(cluster.d())[done].body);
        assert_eq!(sent.get("kv_transfer_params"), None, "{path}");
    }
    assert_eq!(cluster.relayed().await, 0.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_27_an_absent_token_never_becomes_an_empty_one() {
    for token in [None, Some(""), Some("a\nb")] {
        let mut spec = PeerSpec::new(Role::Decode, "http://127.0.0.1:1");
        (spec.authorization, spec.token) = (Authorization::Replace, token.map(str::to_owned));
        assert_eq!(spec.check(), Err(PeerSpecError::Token), "{token:?}");
    }
}

#[tokio::test]
async fn item_28_a_requests_id_is_in_the_log() {
    let cluster = Cluster::builder().logs_all().start().await;
    let body = completion(PROMPT, 2).to_string();
    let answer = cluster.post_bytes(COMPLETIONS, body, &[("x-request-id", "abc-item-28")]).await;
    assert_eq!((answer.status, answer.header("x-request-id")), (200, "abc-item-28"));
    cluster.wait_idle().await;
    assert!(cluster.log().contains("abc-item-28"));
    cluster.finish_whatever_was_warned().await;
}

#[tokio::test]
async fn item_29_an_answer_names_its_peers_where_that_is_wanted() {
    let named = |config: &mut Config| {
        config.hand_off.show_peers = true;
        config.prefill[0].name = Some("p-left".into());
        config.decode[0].name = Some("d-right".into());
    };
    let cluster = Cluster::builder().config(named).start().await;
    let names =
        |answer: &Answer| [answer.header("x-pd-prefill"), answer.header("x-pd-decode")].map(str::to_owned);
    for stream in [false, true] {
        let mut body = completion(PROMPT, 3);
        body["stream"] = json!(stream);
        let answer = cluster.post(COMPLETIONS, &body).await;
        assert_eq!((answer.status, names(&answer)), (200, ["p-left".into(), "d-right".into()]));
        cluster.assert_hides_engines(&answer);
    }
    let mut alone = completion(PROMPT, 3);
    alone["n"] = json!(2);
    alone["temperature"] = json!(0.5);
    assert_eq!(names(&cluster.post(COMPLETIONS, &alone).await), [String::new(), "d-right".into()]);
    arm(cluster.p(), Leg::Prefill, refuse(400));
    let refused = cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await;
    assert_eq!((refused.status, names(&refused)), (400, ["p-left".into(), String::new()]));
    cluster.finish().await;

    let cluster = Cluster::builder().start().await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await;
    assert_eq!(
        (answer.status, names(&answer)),
        (200, [String::new(), String::new()]),
        "only where it is wanted"
    );
    cluster.finish().await;
}

/// The decode engine refuses before it admits the request: nobody but the router can free the blocks.
async fn refused_by_decode(status: u16, tune: fn(&mut EngineConfig)) {
    let cluster = Cluster::builder().engine(tune).start().await;
    let body = completion(PROMPT, 6);
    // A pair that has talked before, and one that has not.
    for _ in 0..2 {
        arm(cluster.d(), Leg::Decode, refuse(status));
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, status);
        cluster.wait_no_blocks().await;
        cluster.wait_idle().await;
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    }
    let stats = cluster.p().stats();
    assert_eq!((stats.prefill_requests, stats.kv_expired), (4, 0));
    let released = cluster.released().await;
    assert_eq!((cluster.relayed().await, released), (2.0, 2.0));
    cluster.finish().await;
}

#[tokio::test]
async fn item_33_what_decode_refuses_is_released_by_the_router() {
    refused_by_decode(400, |_| {}).await;
}

#[tokio::test]
async fn item_33_what_a_v2_decode_refuses_is_released_by_the_router() {
    refused_by_decode(400, v2).await;
}

#[tokio::test]
async fn item_38_a_429_of_decode_leaves_no_prefill_work_behind() {
    refused_by_decode(429, |_| {}).await;
}

#[tokio::test]
async fn item_35_and_37_while_prefill_fails_no_decode_leg_waits_for_it() {
    let cluster = Cluster::builder()
        .config(|config| config.retry.attempts = 0)
        .warns(&["engine failed", "prefill_failed"])
        .start()
        .await;
    for (status, shown) in [(400, 400), (429, 429), (503, 502)] {
        arm(cluster.p(), Leg::Prefill, refuse(status));
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await.status, shown);
    }
    assert_eq!(generations(cluster.d()).len(), 0, "the prefill engine's word is the answer");
    assert_eq!(cluster.d().stats().waiting_for_remote_kv, 0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_39_decode_is_asked_only_when_prefill_has_answered() {
    let cluster = Cluster::builder().start().await;
    let gate = cluster.p().faults().hold(Stage::BeforeHead, Leg::Prefill);
    let body = completion(PROMPT, 4);
    let held = async {
        gate.arrived(1).await;
        assert_eq!(generations(cluster.d()).len(), 0);
        let peers = cluster.get("/admin/peers").await.json();
        let heads = cluster.metric("kvbaton_decode_head_seconds_count", &[]).await;
        gate.release();
        (peers, heads)
    };
    let (answer, (peers, heads)) = tokio::join!(cluster.post(COMPLETIONS, &body), held);
    assert_eq!(answer.status, 200);
    assert_eq!((peers["peers"][0]["in_flight"].as_u64(), heads), (Some(1), 0.0));
    assert_eq!(cluster.metric("kvbaton_decode_head_seconds_count", &[]).await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_40_whether_an_abandoned_prefill_is_aborted_is_said_per_peer() {
    let abort = |config: &mut Config| {
        config.hand_off.abandon_grace = Duration::from_secs(3600);
        config.prefill[0].abandon_grace = Some(Duration::ZERO);
    };
    let cluster = Cluster::builder().config(abort).start().await;
    let gate = cluster.p().faults().hold(Stage::Arrival, Leg::Prefill);
    let wire = Wire::open(cluster.addr, &request(COMPLETIONS, &[], &completion(PROMPT, 4).to_string())).await;
    gate.arrived(1).await;
    drop(wire);
    // It is given up although it is still held.
    cluster.wait_idle().await;
    drop(gate);
    cluster.wait_no_blocks().await;
    assert_eq!(generations(cluster.d()).len(), 0);
    cluster.finish().await;
    let mut spec = PeerSpec::new(Role::Decode, "http://127.0.0.1:1");
    spec.abandon_grace = Some(Duration::ZERO);
    assert_eq!(spec.check(), Err(PeerSpecError::AbandonGrace));
}

/// All Rust files of the repository.
fn sources() -> Vec<std::path::PathBuf> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders: Vec<_> =
        ["crates", "routes", "src", "tests"].iter().map(|name| root.join(name)).collect();
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(extension) if extension == "rs" => files.push(path),
                _ => {}
            }
        }
    }
    assert!(files.len() > 300, "{} files", files.len());
    files
}

/// The page of all behaviours names at least one test of each, and none that does not exist.
#[test]
fn every_behaviour_of_the_page_has_a_test_of_its_number() {
    let page = include_str!("../../docs/behaviours.md");
    let code: String = sources().iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let mut tests: std::collections::BTreeMap<u32, usize> = std::collections::BTreeMap::new();
    let mut number = 0;
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("- **") {
            number = rest.split("**").next().unwrap().parse().unwrap();
            assert_eq!(tests.insert(number, 0), None, "{number} is there twice");
        } else if let Some(name) = line.strip_prefix("  - `").and_then(|rest| rest.strip_suffix('`')) {
            assert!(code.contains(&format!("fn {name}(")), "{name} does not exist");
            let numbers = name.strip_prefix("item_").unwrap();
            let is_its = numbers.split('_').any(|part| part.parse() == Ok(number));
            assert!(is_its, "{name} stands under {number}");
            *tests.get_mut(&number).unwrap() += 1;
        }
    }
    assert_eq!(tests.len(), 60);
    let without: Vec<u32> =
        tests.iter().filter(|(_, count)| **count == 0).map(|(number, _)| *number).collect();
    assert_eq!(without, Vec::<u32>::new(), "without a test");
}

/// Ports of side channels come from the engines.
#[test]
fn item_48_no_port_of_a_side_channel_is_a_constant() {
    for path in sources().iter().filter(|path| path.to_string_lossy().contains("/proxy/src/")) {
        let text = std::fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        let is_test = path.components().any(|part| part.as_os_str() == "tests") || path.ends_with("tests.rs");
        for port in ["5557", "5600"] {
            assert!(is_test || !code.contains(port), "{} holds {port}", path.display());
        }
    }
}

#[tokio::test]
async fn item_51_operators_see_the_mode_and_each_peers_part_in_it() {
    let cluster = Cluster::builder().start().await;
    let peers = cluster.get("/admin/peers").await.json();
    assert_eq!(peers["mode"], "prefill_decode");
    assert_eq!(
        (&peers["peers"][0]["role"], &peers["peers"][1]["role"]),
        (&json!("prefill"), &json!("decode"))
    );
    cluster.finish().await;
}

#[tokio::test]
async fn item_58_a_new_peer_gets_requests_only_after_a_good_probe() {
    let reserved = listen().await;
    let addr = reserved.local_addr().unwrap();
    drop(reserved);
    let mut cluster =
        Cluster::builder().decode(0).unready().may_warn(&["by its probes", "no_decode"]).start().await;
    let spec = json!({"role": "decode", "url": format!("http://{addr}"), "name": "new"});
    let added =
        cluster.send("POST", "/admin/peers", &[("content-type", "application/json")], spec.to_string()).await;
    assert_eq!((added.status, &added.json()["accepts"]), (201, &json!(false)), "{added:?}");
    cluster.assert_error(&cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await, 503, "no_decode");
    let mut config = crate::support::engine_config(cluster.addr);
    config.role = SimRole::Decode;
    let listener = tokio::net::TcpListener::bind(addr).await.unwrap();
    cluster.decode.push(engine_sim::spawn(config, listener).await.unwrap());
    cluster.wait_ready().await;
    cluster.wait_registered().await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await.status, 200);
    assert_eq!(generations(cluster.d()).len(), 1);
    cluster.finish().await;
}

/// Engines close what is idle for a moment; clients come just after.
#[tokio::test]
async fn item_60_engines_that_close_idle_connections_cost_no_request() {
    assert!(Config::default().timeouts.pool_idle < Duration::from_secs(5));
    let hasty = |config: &mut EngineConfig| config.keep_alive = Duration::from_millis(500);
    let cluster = Cluster::builder().engine(hasty).start().await;
    let body = completion(PROMPT, 2);
    for pause in 0..8 {
        let answer = cluster.post(COMPLETIONS, &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        // The traffic's own rhythm: before, at and after the engines' limit.
        tokio::time::sleep(Duration::from_millis(480 + 10 * pause)).await;
    }
    for stage in ["prefill", "decode"] {
        assert_eq!(cluster.metric("kvbaton_upstream_failures_total", &[("stage", stage)]).await, 0.0);
    }
    cluster.finish().await;
}

#[tokio::test]
async fn item_62_a_prefill_engine_of_more_ranks_is_left_out_where_that_is_wanted() {
    for wanted in [false, true] {
        let wide = |config: &mut EngineConfig| {
            config.kv_heads = 2;
            config.tp_size = if config.role == SimRole::Prefill { 2 } else { 1 };
        };
        let rule = move |config: &mut Config| config.pairing.prefill_tp_at_most_decode = wanted;
        let cluster = Cluster::builder()
            .engine(wide)
            .config(rule)
            .unready()
            .may_warn(&["no_compatible_pair"])
            .start()
            .await;
        cluster.wait_registered().await;
        cluster
            .wait_for("both engines are ready", async || {
                let ready = cluster.get("/readyz").await.json();
                ready["prefill_ready"] == 1 && ready["decode_ready"] == 1
            })
            .await;
        let pair = cluster.get("/admin/compatibility").await.json()["pairs"][0].clone();
        let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await;
        if wanted {
            assert_eq!(
                (&pair["verdict"], &pair["used"]),
                (&json!("prefill_tp_larger"), &json!(false)),
                "{pair}"
            );
            cluster.assert_error(&answer, 503, "no_compatible_pair");
            assert_eq!(generations(cluster.p()).len(), 0);
        } else {
            assert_eq!((&pair["used"], answer.status), (&json!(true), 200), "{pair}");
            assert_eq!(cluster.relayed().await, 1.0);
        }
        cluster.finish().await;
    }
}

#[tokio::test]
async fn item_65_a_short_prompt_is_left_to_the_decode_engine() {
    let least = |config: &mut Config| config.hand_off.min_prompt_bytes = 60;
    let cluster = Cluster::builder().config(least).start().await;
    // The quotes count too, and a list of messages as it stands.
    let short = [
        (COMPLETIONS, completion(&"a".repeat(57), 3)),
        (CHAT, chat("hi", 3)),
        (RESPONSES, json!({"model": "sim", "input": "hi", "max_output_tokens": 3})),
        (MESSAGES, json!({"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})),
    ];
    for (path, body) in &short {
        assert_eq!(cluster.post(path, body).await.status, 200, "{path}");
    }
    assert_eq!(generations(cluster.p()).len(), 0);
    assert_eq!(bypassed(&cluster, "short_prompt").await, 4.0);
    let long = completion(&"a".repeat(58), 3);
    assert_eq!(cluster.post(COMPLETIONS, &long).await.generated(), single_text(COMPLETIONS, &long).await);
    assert_eq!((cluster.relayed().await, generations(cluster.p()).len()), (1.0, 1));
    cluster.finish().await;
}

#[tokio::test]
async fn item_66_the_time_from_prefill_to_decodes_first_byte_is_measured() {
    let cluster = Cluster::builder().start().await;
    for stream in [false, true] {
        let mut body = completion(PROMPT, 3);
        body["stream"] = json!(stream);
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    }
    assert_eq!(cluster.metric("kvbaton_hand_over_seconds_count", &[]).await, 2.0);
    let mut alone = completion(PROMPT, 3);
    alone["n"] = json!(2);
    alone["temperature"] = json!(0.5);
    assert_eq!(cluster.post(COMPLETIONS, &alone).await.status, 200);
    assert_eq!(cluster.metric("kvbaton_hand_over_seconds_count", &[]).await, 2.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_67_a_pair_talks_before_the_first_client_comes() {
    let warm = |config: &mut Config| config.pairing.warm_up = true;
    let cluster = Cluster::builder().config(warm).may_warn(&["could not be warmed up"]).start().await;
    // Ready means that the pair is open.
    let (p, d) = (cluster.p().stats(), cluster.d().stats());
    assert_eq!((p.prefill_requests, d.kv_pulls, generations(cluster.d()).len()), (1, 1, 1));
    assert_eq!(only(cluster.p()).path, COMPLETIONS);
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 3)).await.status, 200);
    assert_eq!(cluster.relayed().await, 2.0);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

/// What a decode engine says of blocks of its own reaches neither the client nor a later prefill.
#[tokio::test]
async fn item_69_a_decode_engines_own_hand_off_goes_nowhere() {
    let cluster = Cluster::builder().start().await;
    let params = sound(&cluster, Generation::V14);
    cluster.finish().await;
    let said = json!({"id": "x", "usage": {}, "kv_transfer_params": params}).to_string();
    let engine = FakeEngine::start(vec![Step::Send(http_answer("200 OK", "application/json", &said))]).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).start().await;
    for _ in 0..2 {
        let answer = cluster.post(CHAT, &chat(PROMPT, 3)).await;
        assert_eq!((answer.status, answer.json().get("kv_transfer_params")), (200, None));
        cluster.assert_hides_engines(&answer);
    }
    for seen in generations(cluster.p()) {
        assert_eq!(parse(&seen.body)["kv_transfer_params"]["remote_engine_id"], Value::Null);
    }
    cluster.finish().await;
}

#[tokio::test]
async fn item_71_a_decode_engine_without_a_partner_is_not_chosen_though_it_is_idle() {
    let decode = Cell::new(0);
    let second_is_older = move |config: &mut EngineConfig| {
        if config.role == SimRole::Decode {
            decode.set(decode.get() + 1);
            if decode.get() == 2 {
                config.vllm_version = Some("0.32.1".to_owned());
            }
        }
    };
    let cluster = Cluster::builder().decode(2).engine(second_is_older).start().await;
    let gate = cluster.d().faults().hold(Stage::Arrival, Leg::Decode);
    let body = completion(PROMPT, 3);
    let both = async { tokio::join!(cluster.post(COMPLETIONS, &body), cluster.post(COMPLETIONS, &body)) };
    let held = async {
        // The second one goes to the busy engine.
        gate.arrived(2).await;
        gate.release();
    };
    let ((one, other), ()) = tokio::join!(both, held);
    assert_eq!((one.status, other.status), (200, 200));
    assert_eq!(generations(&cluster.decode[1]).len(), 0);
    assert_eq!((cluster.relayed().await, cluster.decode[0].stats().kv_pulls), (2.0, 2));
    cluster.finish().await;
}
