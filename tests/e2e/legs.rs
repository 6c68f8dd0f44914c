//! What each engine gets at its socket: bodies to the byte, headers to the line.

use engine_sim::{EngineConfig, Generation};
use kvbaton_proxy::Role;
use serde_json::{Map, Value, json};

use crate::support::{
    CHAT, COMPLETIONS, Cluster, FakeEngine, PROMPT, Step, Wire, chat, completion, generations, http_answer,
    only, parse, request, single_with,
};

/// The object that asks a prefill engine for a hand-off.
fn asked() -> Value {
    json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
           "remote_block_ids": null, "remote_host": null, "remote_port": null})
}

/// The members in their order, without the asked hand-off and without `stream: false`.
fn members(body: &[u8]) -> Vec<(String, Value)> {
    let mut body: Map<String, Value> = serde_json::from_slice(body).unwrap();
    assert_eq!(body.shift_remove("kv_transfer_params"), Some(asked()));
    if body.get("stream") == Some(&json!(false)) {
        body.shift_remove("stream");
    }
    body.into_iter().collect()
}

fn expected(members: Value) -> Vec<(String, Value)> {
    members.as_object().unwrap().clone().into_iter().collect()
}

/// The decode leg's body without the hand-off, which must stand in it exactly once.
fn without_hand_off(body: &[u8]) -> String {
    let text = std::str::from_utf8(body).unwrap();
    let key = "\"kv_transfer_params\":";
    assert_eq!(text.matches(key).count(), 1, "{text}");
    let start = text.find(key).unwrap();
    let mut values = serde_json::Deserializer::from_str(&text[start + key.len()..]).into_iter::<Value>();
    let hand_off = values.next().unwrap().unwrap();
    assert_eq!(hand_off["do_remote_prefill"], true);
    let end = start + key.len() + values.byte_offset();
    match (text[..start].strip_suffix(','), text[end..].strip_prefix(',')) {
        (Some(before), _) => format!("{before}{}", &text[end..]),
        (None, Some(after)) => format!("{}{after}", &text[..start]),
        (None, None) => panic!("nothing but the hand-off: {text}"),
    }
}

/// Sends a body and compares what both engines saw.
async fn legs(cluster: Cluster, path: &str, body: &str, at_prefill: Value) {
    let answer = cluster.post_bytes(path, body.to_owned(), &[]).await;
    assert_eq!(answer.status, 200, "{}", answer.everything());
    assert_eq!(members(&only(cluster.p()).body), expected(at_prefill));
    assert_eq!(without_hand_off(&only(cluster.d()).body), body);
    assert_eq!(cluster.relayed().await, 1.0);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

async fn legs_v14(path: &str, body: &str, at_prefill: Value) {
    legs(Cluster::builder().start().await, path, body, at_prefill).await;
}

async fn legs_v2(path: &str, body: &str, at_prefill: Value) {
    let v2 = |config: &mut EngineConfig| {
        config.generation = Generation::V2;
        config.idle_trap = false;
    };
    legs(Cluster::builder().engine(v2).start().await, path, body, at_prefill).await;
}

#[tokio::test]
async fn item_1_min_tokens_stays_off_the_prefill_leg() {
    let body = r#"{"model":"sim","prompt":"abc","max_tokens":100,"min_tokens":5}"#;
    legs_v14(COMPLETIONS, body, json!({"model": "sim", "prompt": "abc", "max_tokens": 1})).await;
}

#[tokio::test]
async fn item_2_min_tokens_stays_off_the_prefill_leg_of_chat() {
    let body =
        r#"{"model":"sim","messages":[{"role":"user","content":"abc"}],"max_tokens":100,"min_tokens":5}"#;
    let messages = json!([{"role": "user", "content": "abc"}]);
    legs_v14(CHAT, body, json!({"model": "sim", "messages": messages, "max_tokens": 1})).await;
}

#[tokio::test]
async fn item_2_min_completion_tokens_stays_off_the_prefill_leg() {
    let body = r#"{"min_completion_tokens":3,"model":"sim","prompt":"abc","max_tokens":9}"#;
    legs_v14(COMPLETIONS, body, json!({"model": "sim", "prompt": "abc", "max_tokens": 1})).await;
}

#[tokio::test]
async fn item_3_only_max_completion_tokens_is_capped_in_its_own_spelling() {
    let body = r#"{"model":"sim","messages":[{"role":"user","content":"abc"}],"max_completion_tokens":50}"#;
    let messages = json!([{"role": "user", "content": "abc"}]);
    legs_v14(CHAT, body, json!({"model": "sim", "messages": messages, "max_completion_tokens": 1})).await;
}

#[tokio::test]
async fn item_4_every_spelling_of_the_limit_is_capped() {
    let body = r#"{"max_completion_tokens":20,"model":"sim","messages":[{"role":"user","content":"abc"}],"max_tokens":30}"#;
    let messages = json!([{"role": "user", "content": "abc"}]);
    let at_prefill =
        json!({"max_completion_tokens": 1, "model": "sim", "messages": messages, "max_tokens": 1});
    legs_v14(CHAT, body, at_prefill).await;
}

#[tokio::test]
async fn item_4_a_limit_is_set_where_none_is() {
    let body = r#"{"model":"sim","prompt":"abc"}"#;
    legs_v14(COMPLETIONS, body, json!({"model": "sim", "prompt": "abc", "max_tokens": 1})).await;
}

#[tokio::test]
async fn a_null_limit_is_capped() {
    let body = r#"{"model":"sim","prompt":"abc","max_tokens":null}"#;
    legs_v14(COMPLETIONS, body, json!({"model": "sim", "prompt": "abc", "max_tokens": 1})).await;
}

#[tokio::test]
async fn item_4_a_repeated_limit_cannot_get_past_the_cap() {
    let body = r#"{"model":"sim","max_tokens":3,"prompt":"abc","max_tokens":7}"#;
    let cluster = Cluster::builder().start().await;
    let answer = cluster.post_bytes(COMPLETIONS, body, &[]).await;
    assert_eq!(answer.json()["usage"]["completion_tokens"], 7);
    let seen = only(cluster.p());
    assert_eq!(parse(&seen.body)["max_tokens"], 1);
    assert_eq!(cluster.p().stats().tokens_generated, 1);
    assert_eq!(without_hand_off(&only(cluster.d()).body), body);
    cluster.finish().await;
}

#[tokio::test]
async fn an_escaped_spelling_of_the_limit_is_capped() {
    let body = r#"{"model":"sim","prompt":"abc","m\u0061x_tokens":7}"#;
    legs_v14(COMPLETIONS, body, json!({"model": "sim", "prompt": "abc", "max_tokens": 1})).await;
}

#[tokio::test]
async fn item_5_stop_conditions_stay_off_the_prefill_leg() {
    let body = r#"{"model":"sim","prompt":"abc","max_tokens":9,"stop":["zzz"],"stop_token_ids":[7]}"#;
    legs_v14(COMPLETIONS, body, json!({"model": "sim", "prompt": "abc", "max_tokens": 1})).await;
}

#[tokio::test]
async fn item_5_v2_prefill_is_told_to_ignore_the_end_of_sequence() {
    let body = r#"{"model":"sim","prompt":"abc","max_tokens":9}"#;
    let at_prefill = json!({"model": "sim", "prompt": "abc", "max_tokens": 1, "ignore_eos": true});
    legs_v2(COMPLETIONS, body, at_prefill).await;
}

#[tokio::test]
async fn a_client_cannot_have_a_v2_prefill_end_at_the_end_of_sequence() {
    let body = r#"{"model":"sim","ignore_eos":false,"prompt":"abc","max_tokens":9}"#;
    let at_prefill = json!({"model": "sim", "ignore_eos": true, "prompt": "abc", "max_tokens": 1});
    legs_v2(COMPLETIONS, body, at_prefill).await;
}

/// The one token of the prefill leg is the client's stop string: the hand-off must not suffer.
async fn stop_at_the_first_token(tune: fn(&mut EngineConfig)) {
    let first = &single_with(COMPLETIONS, &completion(PROMPT, 1), tune).await.generated();
    let mut body = completion(PROMPT, 8);
    body["stop"] = json!([first]);
    let cluster = Cluster::builder().engine(tune).start().await;
    let answer = cluster.post(COMPLETIONS, &body).await.json();
    assert_eq!(answer["choices"][0]["text"], "");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(parse(&only(cluster.d()).body)["stop"], json!([first]));
    assert_eq!((cluster.relayed().await, cluster.d().stats().kv_pulls), (1.0, 1));
    cluster.finish().await;
}

#[tokio::test]
async fn item_5_a_stop_string_as_first_token_is_still_handed_off_by_v14() {
    stop_at_the_first_token(|_| {}).await;
}

#[tokio::test]
async fn item_5_a_stop_string_as_first_token_is_still_handed_off_by_v2() {
    stop_at_the_first_token(|config| config.generation = Generation::V2).await;
}

#[tokio::test]
async fn item_10_unknown_fields_keep_their_order_and_spelling_on_both_legs() {
    let unknown = concat!(
        r#""x":{"z":1,"a":[1.50,-0,1E+2,0.10000000000000000055511151231257827],"u":"\u00e9\/","big":12345678901234567890123},"#,
        r#""temperature":0.0,"seed":7,"return_token_ids":false,"#,
        r#""chat_template_kwargs":{"b":true,"a":null},"user":"ü""#,
    );
    let body = format!(
        r#"{{"model":"sim",{unknown},"messages":[{{"role":"user","content":"abc"}}],"max_tokens":4}}"#
    );
    let cluster = Cluster::builder().start().await;
    let answer = cluster.post_bytes(CHAT, body.clone(), &[]).await;
    assert_eq!(answer.status, 200, "{}", answer.everything());
    let prefill = String::from_utf8(only(cluster.p()).body.to_vec()).unwrap();
    assert!(prefill.contains(unknown), "{prefill}");
    let names: Vec<String> = members(prefill.as_bytes()).into_iter().map(|(name, _)| name).collect();
    let sent = [
        "model",
        "x",
        "temperature",
        "seed",
        "return_token_ids",
        "chat_template_kwargs",
        "user",
        "messages",
        "max_tokens",
    ];
    assert_eq!(names, sent);
    assert_eq!(without_hand_off(&only(cluster.d()).body), body);
    cluster.finish().await;
}

#[tokio::test]
async fn stream_options_stay_off_the_prefill_leg() {
    let body = r#"{"model":"sim","prompt":"abc","stream":true,"stream_options":{"include_usage":true},"max_tokens":3}"#;
    legs_v14(COMPLETIONS, body, json!({"model": "sim", "prompt": "abc", "max_tokens": 1})).await;
}

#[tokio::test]
async fn white_space_of_the_client_reaches_the_decode_engine() {
    let body = "\n{ \"model\" : \"sim\",\t\"prompt\" :\"abc\" , \"max_tokens\": 3\r\n}";
    let cluster = Cluster::builder().start().await;
    assert_eq!(cluster.post_bytes(COMPLETIONS, body, &[]).await.status, 200);
    let seen = String::from_utf8(only(cluster.d()).body.to_vec()).unwrap();
    assert!(seen.contains("{ \"model\" : \"sim\",\t\"prompt\" :\"abc\" , \"max_tokens\": 3"), "{seen}");
    cluster.finish().await;
}

async fn request_ids(cluster: &Cluster, lines: &[(&str, &str)]) -> (Vec<String>, Vec<String>, String) {
    let body = completion(PROMPT, 2).to_string();
    let mut wire = Wire::open(cluster.addr, &request(COMPLETIONS, lines, &body)).await;
    let (status, head) = wire.head().await;
    assert_eq!(status, 200, "{head}");
    let echoed: Vec<&str> = head.lines().filter_map(|line| line.strip_prefix("x-request-id: ")).collect();
    assert_eq!(echoed.len(), 1, "{head}");
    let ids = |engine| {
        let seen = generations(engine).pop().unwrap();
        seen.headers.get_all("x-request-id").iter().map(|id| id.to_str().unwrap().to_owned()).collect()
    };
    (ids(cluster.p()), ids(cluster.d()), echoed[0].to_owned())
}

#[tokio::test]
async fn item_28_the_clients_request_id_is_on_both_legs_and_in_the_answer() {
    let cluster = Cluster::builder().start().await;
    let (prefill, decode, echoed) = request_ids(&cluster, &[("x-request-id", "abc-1")]).await;
    assert_eq!((prefill, decode, echoed), (vec!["abc-1".into()], vec!["abc-1".into()], "abc-1".into()));
    cluster.finish().await;
}

#[tokio::test]
async fn item_28_a_missing_request_id_is_made_once_per_request() {
    let cluster = Cluster::builder().start().await;
    let (prefill, decode, first) = request_ids(&cluster, &[]).await;
    assert_eq!((&prefill, &decode), (&vec![first.clone()], &vec![first.clone()]));
    let (_, _, second) = request_ids(&cluster, &[]).await;
    assert!(first.len() >= 16 && first != second, "{first} {second}");
    cluster.finish().await;
}

#[tokio::test]
async fn two_request_id_lines_become_one() {
    let cluster = Cluster::builder().start().await;
    let (prefill, decode, echoed) =
        request_ids(&cluster, &[("X-Request-Id", "a1"), ("x-request-id", "b2")]).await;
    assert_eq!((&prefill, &decode), (&vec![echoed.clone()], &vec![echoed.clone()]));
    assert!(!echoed.contains(','), "{echoed}");
    cluster.finish().await;
}

#[tokio::test]
async fn the_routers_own_errors_carry_the_request_id_too() {
    let cluster = Cluster::builder().start().await;
    let answer = cluster.post_bytes(COMPLETIONS, "{", &[("x-request-id", "abc-2")]).await;
    assert_eq!((answer.status, answer.header("x-request-id")), (400, "abc-2"));
    cluster.finish().await;
}

#[tokio::test]
async fn trace_context_passes_and_hop_by_hop_headers_do_not() {
    let cluster = Cluster::builder().start().await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let sent = [
        ("traceparent", trace),
        ("tracestate", "a=b"),
        ("x-custom", "kept"),
        ("connection", "x-private, keep-alive"),
        ("x-private", "dropped"),
        ("keep-alive", "timeout=5"),
        ("te", "trailers"),
        ("proxy-authorization", "Basic eDp5"),
        ("upgrade", "h2c"),
    ];
    let body = completion(PROMPT, 2).to_string();
    let mut wire = Wire::open(cluster.addr, &request(COMPLETIONS, &sent, &body)).await;
    assert_eq!(wire.head().await.0, 200);
    for engine in [cluster.p(), cluster.d()] {
        let headers = only(engine).headers;
        assert_eq!(headers.get_all("traceparent").iter().count(), 1);
        assert_eq!(headers["traceparent"], trace);
        assert_eq!(headers["tracestate"], "a=b");
        assert_eq!(headers["x-custom"], "kept");
        for name in ["x-private", "keep-alive", "te", "proxy-authorization", "upgrade", "transfer-encoding"] {
            assert_eq!(headers.get(name), None, "{name}");
        }
        assert_eq!(headers["host"], engine.addr().to_string());
        assert_eq!(headers["content-type"], "application/json");
    }
    cluster.finish().await;
}

#[tokio::test]
async fn a_body_announced_with_expect_is_taken() {
    let cluster = Cluster::builder().start().await;
    let body = completion(PROMPT, 2).to_string();
    let bytes = request(COMPLETIONS, &[("expect", "100-continue")], &body);
    let (head, body) = bytes.split_at(bytes.len() - body.len());
    let mut wire = Wire::open(cluster.addr, head).await;
    assert_eq!(wire.head().await.0, 100);
    wire.send(body).await;
    assert_eq!(wire.head().await.0, 200);
    for engine in [cluster.p(), cluster.d()] {
        assert_eq!(only(engine).headers.get("expect"), None);
    }
    cluster.finish().await;
}

/// The `Authorization` that an engine sees under a policy; the client sends `Bearer client`.
async fn authorization(policy: Value) -> Option<String> {
    let hello = http_answer("200 OK", "application/json", r#"{"choices":[]}"#);
    let engine = FakeEngine::start(vec![Step::Send(hello)]).await;
    let cluster = Cluster::builder().decode(0).unready().start().await;
    let mut spec = json!({"role": "decode", "url": engine.url()});
    spec.as_object_mut().unwrap().extend(policy.as_object().unwrap().clone());
    let added =
        cluster.send("POST", "/admin/peers", &[("content-type", "application/json")], spec.to_string());
    assert_eq!(added.await.status, 201);
    cluster.wait_ready().await;
    let answer = cluster
        .post_bytes("/tokenize", r#"{"model":"sim","prompt":"a"}"#, &[("authorization", "Bearer client")])
        .await;
    assert_eq!(answer.status, 200);
    let seen = engine.seen();
    let values = seen[0].values("authorization");
    assert!(values.len() <= 1, "{values:?}");
    let value = values.first().map(|value| (*value).to_owned());
    assert!(!cluster.get("/admin/peers").await.text().contains("engine-secret"));
    cluster.finish().await;
    value
}

#[tokio::test]
async fn item_27_authorization_is_forwarded_by_default() {
    assert_eq!(authorization(json!({})).await.as_deref(), Some("Bearer client"));
}

#[tokio::test]
async fn item_27_authorization_can_be_replaced_per_peer() {
    let policy = json!({"authorization": "replace", "token": "engine-secret"});
    assert_eq!(authorization(policy).await.as_deref(), Some("Bearer engine-secret"));
}

#[tokio::test]
async fn item_27_authorization_can_be_kept_from_a_peer() {
    assert_eq!(authorization(json!({"authorization": "none"})).await, None);
}

#[tokio::test]
async fn both_legs_carry_the_clients_authorization() {
    let cluster = Cluster::builder().start().await;
    let body = completion(PROMPT, 2).to_string();
    cluster.post_bytes(COMPLETIONS, body, &[("authorization", "Bearer client")]).await;
    for engine in [cluster.p(), cluster.d()] {
        assert_eq!(only(engine).headers["authorization"], "Bearer client");
    }
    cluster.finish().await;
}

/// A decode engine's answer that carries transfer parameters, and what the client gets of it.
async fn answer_of_decode(body: &str) -> String {
    let answer = http_answer("200 OK", "application/json", body);
    let answer = String::from_utf8(answer).unwrap().replace(
        "connection: close",
        "connection: close, x-private\r\nx-private: 1\r\nkeep-alive: timeout=5\r\nx-custom: kept",
    );
    let engine = FakeEngine::start(vec![Step::Send(answer.into_bytes())]).await;
    let cluster = Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).start().await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-custom"), "kept");
    assert_eq!((answer.header("x-private"), answer.header("keep-alive")), ("", ""));
    assert_eq!(answer.header("content-length"), answer.body.len().to_string());
    let seen = engine.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].values("host"), [engine.addr.to_string()]);
    cluster.finish().await;
    answer.text()
}

#[tokio::test]
async fn null_transfer_parameters_are_cut_out_of_the_answer() {
    let body = r#"{"id":"x","usage":{"a":1.50},"kv_transfer_params":null,"metrics":null}"#;
    assert_eq!(answer_of_decode(body).await, r#"{"id":"x","usage":{"a":1.50},"metrics":null}"#);
}

#[tokio::test]
async fn item_69_transfer_parameters_are_cut_out_of_the_answer() {
    let body = r#"{"id":"x","kv_transfer_params":{"remote_host":"10.0.0.1","n":[1,{"}":"]"}]}}"#;
    assert_eq!(answer_of_decode(body).await, r#"{"id":"x"}"#);
}

#[tokio::test]
async fn an_answer_without_transfer_parameters_keeps_every_byte() {
    let body = "{ \"id\":\"x\", \"zzz\":[1.50, 1E2],\n \"ü\":\"\\u00e9\" }\n";
    assert_eq!(answer_of_decode(body).await, body);
}

#[tokio::test]
async fn a_simulated_engines_answer_shows_no_transfer_parameters() {
    let cluster = Cluster::builder().start().await;
    for (path, body) in [(COMPLETIONS, completion(PROMPT, 3)), (CHAT, chat(PROMPT, 3))] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            let answer = cluster.post(path, &body).await;
            assert_eq!(answer.status, 200);
            assert!(!answer.everything().contains("kv_transfer_params"), "{answer:?}");
            cluster.assert_hides_engines(&answer);
        }
    }
    cluster.finish().await;
}

#[tokio::test]
async fn a_request_id_that_no_header_should_carry_is_replaced() {
    let cluster = Cluster::builder().start().await;
    let long = "x".repeat(300);
    for bad in ["a,b", "", "a b", long.as_str()] {
        let (prefill, decode, echoed) = request_ids(&cluster, &[("x-request-id", bad)]).await;
        assert_ne!(echoed, bad);
        assert_eq!((&prefill, &decode), (&vec![echoed.clone()], &vec![echoed.clone()]));
    }
    cluster.finish().await;
}

/// The router reads and edits both answers, so no engine may compress one.
#[tokio::test]
async fn no_engine_is_asked_for_a_compressed_answer() {
    let cluster = Cluster::builder().start().await;
    let body = completion(PROMPT, 2).to_string();
    let answer = cluster.post_bytes(COMPLETIONS, body, &[("accept-encoding", "gzip, br")]).await;
    assert_eq!((answer.status, answer.header("content-encoding")), (200, ""));
    for engine in [cluster.p(), cluster.d()] {
        let headers = only(engine).headers;
        let asked = headers.get("accept-encoding").map_or("identity", |value| value.to_str().unwrap());
        assert_eq!(asked, "identity");
    }
    cluster.finish().await;
}

#[tokio::test]
async fn a_query_does_not_keep_a_request_from_its_two_legs() {
    let cluster = Cluster::builder().start().await;
    let answer = cluster.post("/v1/completions?tenant=a%20b", &completion(PROMPT, 2)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!((cluster.relayed().await, cluster.d().stats().kv_pulls), (1.0, 1));
    cluster.finish().await;
}
