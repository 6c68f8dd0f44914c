//! The hand-off itself: an answer that passed through P, a pull and D is the single engine's answer.

use std::collections::BTreeSet;

use engine_sim::{ArmedFault, Corrupt, EngineConfig, Fault, Leg, Stage};
use futures_util::future::join_all;
use kvbaton_proxy::Generation;
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETIONS, Cluster, PROMPT, chat, completion, engine_metric, generations, only, parse, single,
    single_text, single_with,
};

const SOURCES: &str = "vllm:prompt_tokens_by_source_total";
const EXTERNAL: [(&str, &str); 1] = [("source", "external_kv_transfer")];
const COMPUTED: [(&str, &str); 1] = [("source", "local_compute")];

fn v2(config: &mut EngineConfig) {
    let defaults = EngineConfig::for_generation(Generation::V2);
    config.generation = Generation::V2;
    config.lease = defaults.lease;
    config.load_failure_policy = defaults.load_failure_policy;
    // An idle engine of this generation frees blocks only with its next request.
    config.idle_trap = false;
}

async fn one_hand_off(tune: fn(&mut EngineConfig), path: &str, mut body: Value, stream: bool) {
    let cluster = Cluster::builder().engine(tune).start().await;
    if stream {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
    }
    let alone = single_with(path, &body, tune).await;
    let answer = cluster.post(path, &body).await;
    let text = answer.generated();
    assert_eq!(text, alone.generated());
    assert_eq!(text.len(), 24);

    let prefill = only(cluster.p());
    assert_eq!((prefill.method.as_str(), prefill.path.as_str()), ("POST", path));
    let sent = parse(&prefill.body);
    assert_eq!(sent["max_tokens"], 1);
    assert_ne!(sent["stream"], true);
    assert_eq!(sent.get("stream_options"), None);
    assert_eq!(sent["kv_transfer_params"]["do_remote_decode"], true);
    let stats = cluster.p().stats();
    assert_eq!((stats.prefill_requests, stats.plain_requests, stats.tokens_generated), (1, 0, 1));

    let decode = only(cluster.d());
    assert_eq!(decode.path, path);
    assert_eq!(parse(&decode.body)["kv_transfer_params"]["remote_engine_id"], cluster.p().engine_id());
    let stats = cluster.d().stats();
    assert_eq!((stats.decode_requests, stats.plain_requests, stats.kv_pulls), (1, 0, 1));
    let pulled = engine_metric(cluster.d(), SOURCES, &EXTERNAL).await;
    let computed = engine_metric(cluster.d(), SOURCES, &COMPUTED).await;
    assert!(pulled >= PROMPT.len() as f64 - 1.0, "pulled only {pulled} tokens");
    assert!(computed <= 1.0, "the decode engine computed {computed} prompt tokens again");

    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    assert_eq!(cluster.relayed().await, 1.0);
    assert_eq!(cluster.metric("kvbaton_handoffs_total", &[]).await, 1.0);
    assert_eq!(cluster.metric("kvbaton_pd_bypass_total", &[]).await, 0.0);
    cluster.finish().await;
}

async fn v14_cluster() -> Cluster {
    Cluster::builder().start().await
}

#[tokio::test]
async fn completion_is_handed_off() {
    one_hand_off(|_| {}, COMPLETIONS, completion(PROMPT, 24), false).await;
}

#[tokio::test]
async fn streamed_completion_is_handed_off() {
    one_hand_off(|_| {}, COMPLETIONS, completion(PROMPT, 24), true).await;
}

#[tokio::test]
async fn chat_is_handed_off() {
    one_hand_off(|_| {}, CHAT, chat(PROMPT, 24), false).await;
}

#[tokio::test]
async fn streamed_chat_is_handed_off() {
    one_hand_off(|_| {}, CHAT, chat(PROMPT, 24), true).await;
}

#[tokio::test]
async fn v2_completion_is_handed_off() {
    one_hand_off(v2, COMPLETIONS, completion(PROMPT, 24), false).await;
}

#[tokio::test]
async fn v2_streamed_completion_is_handed_off() {
    one_hand_off(v2, COMPLETIONS, completion(PROMPT, 24), true).await;
}

#[tokio::test]
async fn v2_chat_is_handed_off() {
    one_hand_off(v2, CHAT, chat(PROMPT, 24), false).await;
}

#[tokio::test]
async fn v2_streamed_chat_is_handed_off() {
    one_hand_off(v2, CHAT, chat(PROMPT, 24), true).await;
}

#[tokio::test]
async fn usage_and_finish_reason_are_the_single_engines() {
    let body = completion(PROMPT, 24);
    let alone = single(COMPLETIONS, &body).await.json();
    let cluster = v14_cluster().await;
    let answer = cluster.post(COMPLETIONS, &body).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], alone["choices"][0]["finish_reason"]);
    for field in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(answer["usage"][field], alone["usage"][field], "{field}");
    }
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    cluster.finish().await;
}

#[tokio::test]
async fn prompts_of_every_length_around_the_block_size_are_handed_off() {
    let cluster = v14_cluster().await;
    let text: String = PROMPT.chars().cycle().take(200).collect();
    let lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 127, 128, 129, 200];
    for (done, length) in lengths.into_iter().enumerate() {
        // The first character differs, so that no prompt profits from another's cached blocks.
        let prompt = format!("{}{}", char::from(b'a' + done as u8), &text[1..length]);
        let body = completion(&prompt, 12);
        assert_eq!(
            cluster.post(COMPLETIONS, &body).await.generated(),
            single_text(COMPLETIONS, &body).await,
            "a prompt of {length} tokens"
        );
        assert_eq!(cluster.relayed().await, done as f64 + 1.0);
    }
    assert_eq!(cluster.d().stats().plain_requests, 0);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn prefix_caches_of_both_engines_are_used_and_the_text_stays() {
    let cluster = v14_cluster().await;
    let body = completion(PROMPT, 24);
    let expected = single_text(COMPLETIONS, &body).await;
    let hits = "vllm:prefix_cache_hits_total";
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), expected);
    let pulled_first = engine_metric(cluster.d(), "vllm:nixl_bytes_transferred_sum", &[]).await;
    assert_eq!(engine_metric(cluster.p(), hits, &[]).await, 0.0);
    assert_eq!(engine_metric(cluster.d(), hits, &[]).await, 0.0);

    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), expected);
    let whole_blocks = (PROMPT.len() / 16 * 16) as f64;
    assert_eq!(engine_metric(cluster.p(), hits, &[]).await, whole_blocks);
    assert_eq!(engine_metric(cluster.d(), hits, &[]).await, whole_blocks);
    let pulled_both = engine_metric(cluster.d(), "vllm:nixl_bytes_transferred_sum", &[]).await;
    assert!(pulled_both - pulled_first < pulled_first / 2.0, "{pulled_first} bytes, then {pulled_both}");
    assert_eq!(cluster.relayed().await, 2.0);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn every_dispatch_has_a_hand_off_of_its_own() {
    let cluster = v14_cluster().await;
    for _ in 0..3 {
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await.status, 200);
    }
    let ids: BTreeSet<String> = generations(cluster.d())
        .iter()
        .map(|seen| parse(&seen.body)["kv_transfer_params"]["remote_request_id"].to_string())
        .collect();
    assert_eq!(ids.len(), 3, "{ids:?}");
    cluster.finish().await;
}

#[tokio::test]
async fn end_of_sequence_as_first_token_is_still_handed_off_by_v14() {
    first_token_ends(|config| config.eos_every = Some(1)).await;
}

#[tokio::test]
async fn end_of_sequence_as_first_token_is_still_handed_off_by_v2() {
    first_token_ends(|config| {
        v2(config);
        config.eos_every = Some(1);
    })
    .await;
}

async fn first_token_ends(tune: fn(&mut EngineConfig)) {
    let body = completion(PROMPT, 24);
    let alone = single_with(COMPLETIONS, &body, tune).await.json();
    assert_eq!(alone["choices"][0]["finish_reason"], "stop");
    assert_eq!(alone["usage"]["completion_tokens"], 1);

    let cluster = Cluster::builder().engine(tune).start().await;
    let answer = cluster.post(COMPLETIONS, &body).await.json();
    assert_eq!(answer["choices"], alone["choices"]);
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    assert_eq!(cluster.relayed().await, 1.0);
    assert_eq!(cluster.d().stats().kv_pulls, 1);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_72_two_prefill_and_two_decode_engines_all_work() {
    let cluster = Cluster::builder().prefill(2).decode(2).start().await;
    let gates: Vec<_> =
        cluster.prefill.iter().map(|engine| engine.faults().hold(Stage::Arrival, Leg::Prefill)).collect();
    let bodies: Vec<Value> = (0..8).map(|i| completion(&format!("{i} {PROMPT}"), 16)).collect();
    let answers = join_all(bodies.iter().map(|body| cluster.post(COMPLETIONS, body)));
    let release = async {
        cluster
            .wait_for("all eight are at the prefill engines", async || {
                gates.iter().map(engine_sim::Gate::arrivals).sum::<usize>() == 8
            })
            .await;
        let spread: Vec<usize> = gates.iter().map(engine_sim::Gate::arrivals).collect();
        assert_eq!(spread, [4, 4]);
        gates.iter().for_each(engine_sim::Gate::release);
    };
    let (answers, ()) = tokio::join!(answers, release);
    for (body, answer) in bodies.iter().zip(answers) {
        assert_eq!(answer.generated(), single_text(COMPLETIONS, body).await);
    }
    let pulls: Vec<u64> = cluster.decode.iter().map(|engine| engine.stats().kv_pulls).collect();
    assert_eq!(pulls.iter().sum::<u64>(), 8, "{pulls:?}");
    assert!(pulls.iter().all(|pulls| *pulls > 0), "{pulls:?}");
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn many_concurrent_requests_never_mix() {
    let cluster = Cluster::builder().prefill(2).decode(2).start().await;
    let mut requests = Vec::new();
    for i in 0..48 {
        // A shared beginning of whole blocks and an own end, so that caches and hand-offs mix.
        let prompt = format!("{PROMPT} {} request {i}", "x".repeat(i % 19));
        let (path, mut body) =
            if i % 2 == 0 { (COMPLETIONS, completion(&prompt, 20)) } else { (CHAT, chat(&prompt, 20)) };
        body["stream"] = json!(i % 3 == 0);
        requests.push((path, body));
    }
    let answers = join_all(requests.iter().map(|(path, body)| cluster.post(path, body))).await;
    for ((path, body), answer) in requests.iter().zip(answers) {
        assert_eq!(answer.generated(), single_text(path, body).await, "{body}");
    }
    assert_eq!(cluster.relayed().await, 48.0);
    let pulls: u64 = cluster.decode.iter().map(|engine| engine.stats().kv_pulls).sum();
    assert_eq!(pulls, 48);
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

/// Shows that the other tests would notice wrong KV.
async fn falsified(bytes: Corrupt, leg: Leg) {
    let body = completion(PROMPT, 24);
    let expected = single_text(COMPLETIONS, &body).await;
    let cluster = v14_cluster().await;
    let engine = if leg == Leg::Prefill { cluster.p() } else { cluster.d() };
    engine.faults().arm(ArmedFault { fault: Fault::CorruptKv { bytes }, leg, sticky: false });
    let wrong = cluster.post(COMPLETIONS, &body).await.generated();
    assert_ne!(wrong, expected);
    assert_eq!(wrong.len(), expected.len());
    cluster.finish().await;
}

#[tokio::test]
async fn falsely_written_kv_changes_the_text() {
    falsified(Corrupt::Written, Leg::Prefill).await;
}

#[tokio::test]
async fn falsely_pulled_kv_changes_the_text() {
    falsified(Corrupt::Pulled, Leg::Decode).await;
}

#[tokio::test]
async fn hand_off_is_listed_while_it_lives() {
    let cluster = v14_cluster().await;
    let gate = cluster.d().faults().hold(Stage::BeforeHead, Leg::Decode);
    let body = completion(PROMPT, 4).to_string();
    let post = cluster.post_bytes(COMPLETIONS, body, &[("x-request-id", "seen-in-admin")]);
    let look = async {
        gate.arrived(1).await;
        let list = cluster.get("/admin/handoffs").await.json();
        gate.release();
        list
    };
    let (answer, list) = tokio::join!(post, look);
    assert_eq!(answer.status, 200);
    let hand_off = &list["handoffs"][0];
    assert_eq!(list["handoffs"].as_array().unwrap().len(), 1, "{list}");
    assert_eq!(hand_off["request_id"], "seen-in-admin");
    assert_eq!(hand_off["engine_id"], cluster.p().engine_id());
    assert_eq!(hand_off["state"], "dispatched");
    assert_eq!(hand_off["blocks"], PROMPT.len().div_ceil(16));
    let left = hand_off["lease_left_seconds"].as_f64().unwrap();
    assert!(left > 20.0 && left <= 30.0, "{list}");
    cluster.wait_idle().await;
    cluster.finish().await;
}

/// Every part of an answer, not only its text.
async fn whole_choices(path: &str, mut body: Value, more: Value) {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let alone = single(path, &body).await.json();
    let cluster = v14_cluster().await;
    let answer = cluster.post(path, &body).await.json();
    assert_eq!(answer["choices"], alone["choices"]);
    assert_eq!(answer["usage"]["completion_tokens"], alone["usage"]["completion_tokens"]);
    assert_eq!(cluster.relayed().await, 1.0);
    assert_eq!(cluster.d().stats().kv_pulls, 1);
    cluster.finish().await;
}

#[tokio::test]
async fn log_probabilities_are_the_single_engines() {
    whole_choices(COMPLETIONS, completion(PROMPT, 9), json!({"logprobs": 3})).await;
}

#[tokio::test]
async fn log_probabilities_of_chat_are_the_single_engines() {
    whole_choices(CHAT, chat(PROMPT, 9), json!({"logprobs": true, "top_logprobs": 2})).await;
}

#[tokio::test]
async fn an_echoed_prompt_is_the_single_engines() {
    whole_choices(COMPLETIONS, completion(PROMPT, 9), json!({"echo": true})).await;
}

#[tokio::test]
async fn a_stop_string_ends_the_text_where_the_single_engine_ends() {
    let text = single_text(COMPLETIONS, &completion(PROMPT, 24)).await;
    let stop = &text[7..9];
    whole_choices(COMPLETIONS, completion(PROMPT, 24), json!({"stop": [stop]})).await;
}

#[tokio::test]
async fn a_seed_gives_the_single_engines_text() {
    whole_choices(COMPLETIONS, completion(PROMPT, 24), json!({"seed": 5, "temperature": 0.9})).await;
}

#[tokio::test]
async fn a_conversation_of_several_turns_is_the_single_engines() {
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Und auf Deutsch? Gr\u{fc}\u{df}e \u{1f600}"},
    ]);
    whole_choices(CHAT, chat("", 24), json!({"messages": messages})).await;
}

#[tokio::test]
async fn engines_that_close_every_connection_are_no_fault() {
    let cluster = v14_cluster().await;
    for engine in [cluster.p(), cluster.d()] {
        engine.faults().always(Fault::ConnectionClose);
    }
    let body = completion(PROMPT, 4);
    let expected = single_text(COMPLETIONS, &body).await;
    for _ in 0..10 {
        assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), expected);
    }
    assert_eq!(cluster.relayed().await, 10.0);
    cluster.finish().await;
}

/// An idle v2 prefill engine sees no notification; its next request lets it see all of them.
#[tokio::test]
async fn an_idle_v2_prefill_engine_frees_blocks_with_its_next_request() {
    let trapped = |config: &mut EngineConfig| {
        v2(config);
        config.idle_trap = true;
    };
    let cluster = Cluster::builder().engine(trapped).start().await;
    for done in 1..=4 {
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await.status, 200);
        assert_eq!(cluster.relayed().await, f64::from(done));
        cluster.wait_for("one lease is left", async || cluster.p().stats().leases == 1).await;
    }
    cluster.wait_idle().await;
    cluster.finish().await;
}
