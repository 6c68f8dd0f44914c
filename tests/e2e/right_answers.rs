//! What the client gets is what one engine alone would have said, on every dialect: counts and
//! log-probabilities of the prompt come from the engine that computed it.

use engine_sim::{EngineConfig, Generation};
use kvbaton_proxy::Role;
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETIONS, Cluster, FakeEngine, PROMPT, Step, chat, completion, events, generations, http_answer,
    parse, single, single_with,
};

const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

fn response(max_tokens: u64) -> Value {
    json!({"model": "sim", "input": PROMPT, "max_output_tokens": max_tokens, "temperature": 0})
}

fn message(max_tokens: u64) -> Value {
    json!({"model": "sim", "messages": [{"role": "user", "content": PROMPT}],
           "max_tokens": max_tokens, "temperature": 0})
}

fn v2(config: &mut EngineConfig) {
    let defaults = EngineConfig::for_generation(Generation::V2);
    config.generation = Generation::V2;
    config.lease = defaults.lease;
    config.load_failure_policy = defaults.load_failure_policy;
    config.idle_trap = false;
}

/// Tokens of a prompt of this length that a second request finds in the cache: whole blocks, not the last token.
fn cached(tokens: u64) -> u64 {
    (tokens - 1) / 16 * 16
}

fn usage_of_stream(stream: &str) -> Value {
    let data = events(stream);
    let last: Value = serde_json::from_str(&data[data.len() - 2]).unwrap();
    last["usage"].clone()
}

/// A version 2 decode engine counts what it pulled as cached.
#[tokio::test]
async fn item_20_cached_tokens_are_ps() {
    for (path, body) in [(COMPLETIONS, completion(PROMPT, 4)), (CHAT, chat(PROMPT, 4))] {
        let cluster = Cluster::builder().engine(v2).start().await;
        for round in 0..2 {
            let usage = cluster.post(path, &body).await.json()["usage"].clone();
            let expected = if round == 0 { 0 } else { cached(usage["prompt_tokens"].as_u64().unwrap()) };
            assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], expected, "{path} {usage}");
            assert_eq!(usage["completion_tokens"], 4);
        }
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        streamed["stream_options"] = json!({"include_usage": true});
        let usage = usage_of_stream(&cluster.post(path, &streamed).await.text());
        let expected = cached(usage["prompt_tokens"].as_u64().unwrap());
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], expected, "{path} {usage}");
        assert_eq!(cluster.relayed().await, 3.0);
        cluster.finish().await;
    }
}

/// The answer of a decode engine that counts everything as cached, and what the client makes of it.
async fn through_fake(path: &str, body: &Value, content_type: &str, answer: &str) -> String {
    let engine = FakeEngine::start(vec![Step::Send(http_answer("200 OK", content_type, answer))]).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).start().await;
    let shown = cluster.post(path, body).await;
    assert_eq!(shown.status, 200, "{shown:?}");
    assert_eq!(generations(cluster.p()).len(), 1, "{path} goes through a prefill engine");
    let sent = parse(&engine.seen()[0].body);
    assert_eq!(sent["kv_transfer_params"]["do_remote_prefill"], true, "{sent}");
    cluster.finish().await;
    shown.text()
}

#[tokio::test]
async fn item_20_cached_tokens_are_ps_in_responses_and_messages() {
    let response_answer = r#"{"object":"response","usage":{"input_tokens":90,"input_tokens_details":{"cached_tokens":90},"output_tokens":4},"kv_transfer_params":null}"#;
    let shown = through_fake(RESPONSES, &response(4), "application/json", response_answer).await;
    let expected = r#"{"object":"response","usage":{"input_tokens":90,"input_tokens_details":{"cached_tokens":0},"output_tokens":4}}"#;
    assert_eq!(shown, expected);
    let message_answer =
        r#"{"type":"message","usage":{"input_tokens":1,"output_tokens":4,"cache_read_input_tokens":89}}"#;
    let shown = through_fake(MESSAGES, &message(4), "application/json", message_answer).await;
    let expected =
        r#"{"type":"message","usage":{"input_tokens":90,"output_tokens":4,"cache_read_input_tokens":0}}"#;
    assert_eq!(shown, expected);
    let mut streamed = message(4);
    streamed["stream"] = json!(true);
    let stream = "event: message_delta\ndata: {\"usage\":{\"input_tokens\":1,\"output_tokens\":4,\"cache_read_input_tokens\":89}}\n\nevent: message_stop\ndata: {}\n\n";
    let shown = through_fake(MESSAGES, &streamed, "text/event-stream", stream).await;
    let expected = stream.replace(
        "\"input_tokens\":1,\"output_tokens\":4,\"cache_read_input_tokens\":89",
        "\"input_tokens\":90,\"output_tokens\":4,\"cache_read_input_tokens\":0",
    );
    assert_eq!(shown, expected);
}

/// Whole and streamed answers of one dialect over two legs, against one engine alone.
async fn dialect(path: &str, body: Value, text: impl Fn(&Value) -> String, delta: impl Fn(&Value) -> String) {
    let alone = text(&single(path, &body).await.json());
    assert!(!alone.is_empty());
    let cluster = Cluster::builder().start().await;
    let answer = cluster.post(path, &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(text(&answer.json()), alone);
    assert!(!answer.text().contains("kv_transfer_params"), "{answer:?}");
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let stream = cluster.post(path, &streamed).await.text();
    assert!(!stream.contains("kv_transfer_params"), "{stream}");
    let events = stream.split("\n\n").filter_map(|event| event.split_once("\ndata: "));
    let generated: String = events.map(|(_, data)| delta(&serde_json::from_str(data).unwrap())).collect();
    assert_eq!(generated, alone, "{stream}");
    assert_eq!((cluster.relayed().await, cluster.d().stats().kv_pulls), (2.0, 2));
    let label = [("decision", "disaggregated")];
    assert_eq!(cluster.metric("kvbaton_pd_decisions_total", &label).await, 2.0);
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

fn text_at(value: &Value, pointer: &str) -> String {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

#[tokio::test]
async fn item_70_responses_run_in_two_legs() {
    let text = |answer: &Value| text_at(answer, "/output/0/content/0/text");
    dialect(RESPONSES, response(12), text, |event| match event["type"].as_str() {
        Some("response.output_text.delta") => text_at(event, "/delta"),
        _ => String::new(),
    })
    .await;
}

#[tokio::test]
async fn messages_run_in_two_legs() {
    let text = |answer: &Value| text_at(answer, "/content/0/text");
    dialect(MESSAGES, message(12), text, |event| text_at(event, "/delta/text")).await;
}

#[tokio::test]
async fn item_70_an_engine_that_cannot_hand_off_on_a_dialect_answers_alone() {
    let cluster = Cluster::builder().engine(v2).start().await;
    for (path, body) in [(RESPONSES, response(4)), (MESSAGES, message(4))] {
        assert_eq!(cluster.post(path, &body).await.status, 200);
    }
    assert_eq!(generations(cluster.p()).len(), 0);
    let label = [("decision", "decode_only"), ("reason", "dialect")];
    assert_eq!(cluster.metric("kvbaton_pd_decisions_total", &label).await, 2.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_64_each_bypass_is_a_decision_with_its_reason() {
    let cluster = Cluster::builder().start().await;
    let with = |mut body: Value, key: &str, value: Value| {
        body[key] = value;
        body
    };
    let cases = [
        ("stored_response", RESPONSES, with(response(2), "previous_response_id", json!("resp_1")), 404),
        ("server_tools", RESPONSES, with(response(2), "tools", json!([{"type": "web_search_preview"}])), 200),
        ("truncation", RESPONSES, with(response(2), "truncation", json!("auto")), 200),
        ("several_prompts", COMPLETIONS, with(completion("", 2), "prompt", json!(["a", "b"])), 200),
        ("truncation", COMPLETIONS, with(completion("a", 2), "truncate_prompt_tokens", json!(-1)), 200),
        ("prompt_logprobs", CHAT, with(chat("a", 2), "echo", json!(true)), 200),
    ];
    for (reason, path, body, status) in cases {
        let label = [("decision", "decode_only"), ("reason", reason)];
        let before = cluster.metric("kvbaton_pd_decisions_total", &label).await;
        let answer = cluster.post(path, &body).await;
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        assert_eq!(cluster.metric("kvbaton_pd_decisions_total", &label).await, before + 1.0, "{reason}");
    }
    assert_eq!(generations(cluster.p()).len(), 0);
    cluster.finish().await;
}

/// The whole answer but for ids and times, against one engine alone.
async fn as_alone(path: &str, body: Value) {
    let alone = single_with(path, &body, |_| {}).await.json();
    let cluster = Cluster::builder().start().await;
    let answer = cluster.post(path, &body).await.json();
    assert_eq!(answer["choices"], alone["choices"], "{path}");
    assert_eq!(answer["prompt_logprobs"], alone["prompt_logprobs"], "{path}");
    assert_eq!((cluster.relayed().await, cluster.d().stats().kv_pulls), (1.0, 1));
    // A decode engine that is asked for log-probabilities of pulled tokens dies.
    assert!(!cluster.d().stats().dead);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_21_prompt_logprobs_of_a_completion() {
    let mut body = completion(PROMPT, 5);
    body["prompt_logprobs"] = json!(2);
    as_alone(COMPLETIONS, body).await;
}

#[tokio::test]
async fn item_21_prompt_logprobs_of_a_chat() {
    let mut body = chat(PROMPT, 5);
    body["prompt_logprobs"] = json!(1);
    as_alone(CHAT, body).await;
}

#[tokio::test]
async fn item_21_an_echo_with_logprobs() {
    let mut body = completion("q\u{e9}\"\\n end", 5);
    body["echo"] = json!(true);
    body["logprobs"] = json!(3);
    as_alone(COMPLETIONS, body).await;
}

#[tokio::test]
async fn item_21_a_stream_with_prompt_logprobs_goes_to_one_engine() {
    let mut body = completion(PROMPT, 5);
    body["stream"] = json!(true);
    body["echo"] = json!(true);
    body["logprobs"] = json!(1);
    let cluster = Cluster::builder().start().await;
    assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 200);
    assert_eq!(generations(cluster.p()).len(), 0);
    assert_eq!(cluster.metric("kvbaton_pd_bypass_total", &[("reason", "prompt_logprobs")]).await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_63_each_leg_names_its_own_peers_rank() {
    let engine = FakeEngine::start(vec![Step::Send(http_answer("200 OK", "application/json", "{}"))]).await;
    let url = engine.url();
    let cluster = Cluster::builder()
        .decode(0)
        .config(move |config| {
            config.prefill[0].dp_rank = Some(5);
            let mut all = kvbaton_proxy::PeerSpec::new(Role::Decode, url.clone());
            (all.dp_size, all.dp_split) = (Some(2), true);
            config.decode.push(all);
        })
        .start()
        .await;
    let peers = cluster.get("/admin/peers").await.json();
    let ranks: Vec<&Value> = peers["peers"].as_array().unwrap().iter().map(|peer| &peer["dp_rank"]).collect();
    assert_eq!(ranks, [5, 0, 1], "{peers}");
    for _ in 0..2 {
        let headers = [("x-data-parallel-rank", "9")];
        let answer = cluster.post_bytes(COMPLETIONS, completion(PROMPT, 2).to_string(), &headers).await;
        assert_eq!(answer.status, 200);
    }
    let mut named: Vec<String> =
        engine.seen().iter().map(|seen| seen.values("x-data-parallel-rank").join(",")).collect();
    named.sort_unstable();
    assert_eq!(named, ["0", "1"], "one line each, of its own peer");
    for seen in generations(cluster.p()) {
        let values: Vec<_> = seen.headers.get_all("x-data-parallel-rank").iter().collect();
        assert_eq!(values, ["5"]);
    }
    cluster.finish().await;
}

#[tokio::test]
async fn item_63_a_clients_rank_passes_only_where_it_is_allowed() {
    for (allowed, expected) in [(false, vec![]), (true, vec!["9"])] {
        let engine =
            FakeEngine::start(vec![Step::Send(http_answer("200 OK", "application/json", "{}"))]).await;
        let cluster = Cluster::builder()
            .decode(0)
            .peer(Role::Decode, &engine.url())
            .config(move |config| config.pairing.client_dp_rank = allowed)
            .start()
            .await;
        let headers = [("x-data-parallel-rank", "9")];
        let answer = cluster.post_bytes(COMPLETIONS, completion(PROMPT, 2).to_string(), &headers).await;
        assert_eq!(answer.status, 200);
        assert_eq!(engine.seen()[0].values("x-data-parallel-rank"), expected);
        assert!(generations(cluster.p())[0].headers.get("x-data-parallel-rank").is_none());
        cluster.finish().await;
    }
}
