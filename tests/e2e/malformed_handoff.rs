//! A hand-off with a defect kills a decode engine: none may reach one, and none is silent.

use std::time::Duration;

use engine_sim::{ArmedFault, Engine, EngineConfig, Fault, Generation, Leg};
use kvbaton::config::Config;
use kvbaton_proxy::OnMissing;
use serde_json::{Value, json};

use crate::support::{
    COMPLETIONS, Cluster, PROMPT, completion, generations, parse, single_text, single_with,
};

/// A hand-off as the cluster's prefill engine makes it, but for the blocks' numbers.
pub(crate) fn sound(cluster: &Cluster, generation: Generation) -> Value {
    let blocks: Vec<u64> = (1..=PROMPT.len().div_ceil(16) as u64).collect();
    let mut object = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [blocks],
        "remote_engine_id": cluster.p().engine_id(), "remote_request_id": "cmpl-x-0-9ea99d2e",
        "remote_host": "127.0.0.1", "remote_port": cluster.p().addr().port(), "tp_size": 1,
    });
    match generation {
        Generation::V2 => object["remote_block_ids"] = json!(blocks),
        Generation::V14 => {
            let more = json!({"dcp_size": 1, "pp_size": 1, "remote_num_tokens": PROMPT.len(),
                "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0});
            object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        }
    }
    object
}

/// Every defect that kills, parks or misleads a decode engine.
fn defects(sound: &Value) -> Vec<(String, Value)> {
    let mut cases = Vec::new();
    let mut case = |name: String, value: Value| cases.push((name, value));
    let with = |key: &str, value: Value| {
        let mut object = sound.clone();
        object[key] = value;
        object
    };
    for key in ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"] {
        let mut object = sound.clone();
        object.as_object_mut().unwrap().shift_remove(key);
        case(format!("{key} missing"), object);
        case(format!("{key} null"), with(key, Value::Null));
        case(format!("{key} a bool"), with(key, json!(true)));
        case(format!("{key} an object"), with(key, json!({})));
    }
    for key in ["remote_engine_id", "remote_request_id", "remote_host"] {
        case(format!("{key} empty"), with(key, json!("")));
        case(format!("{key} a number"), with(key, json!(7)));
    }
    for port in [json!(-1), json!(0), json!(70000), json!(1.5), json!("http")] {
        case(format!("remote_port {port}"), with("remote_port", port));
    }
    for blocks in [
        json!([]),
        json!([[]]),
        json!([[], []]),
        json!("1,2"),
        json!(5),
        json!([["a"]]),
        json!([[-1, 2, 3, 4, 5]]),
        json!([[1.5, 2, 3, 4, 5]]),
        json!([[1, null]]),
        json!([[[[1]]]]),
    ] {
        case(format!("remote_block_ids {blocks}"), with("remote_block_ids", blocks));
    }
    case("do_remote_prefill false".into(), with("do_remote_prefill", json!(false)));
    case("do_remote_prefill a text".into(), with("do_remote_prefill", json!("yes")));
    case("tp_size 0".into(), with("tp_size", json!(0)));
    case("tp_size a text".into(), with("tp_size", json!("one")));
    case("a text".into(), json!("hand-off"));
    case("a list".into(), json!([1]));
    case("a number".into(), json!(1));
    case("true".into(), json!(true));
    case("an empty object".into(), json!({}));
    cases
}

async fn never_reach_decode(generation: Generation) {
    let tune = move |config: &mut EngineConfig| {
        config.generation = generation;
        config.idle_trap = false;
    };
    let cluster =
        Cluster::builder().engine(tune).warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    let expected = single_with(COMPLETIONS, &completion(PROMPT, 6), tune).await.generated();
    for (done, (name, params)) in defects(&sound(&cluster, generation)).into_iter().enumerate() {
        let fault = Fault::HandoffOverride { params };
        cluster.p().faults().arm(ArmedFault { fault, leg: Leg::Prefill, sticky: false });
        let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
        assert_eq!(answer.status, 200, "{name}: {answer:?}");
        assert_eq!(answer.generated(), expected, "{name}");
        let seen = of_clients(cluster.d());
        assert_eq!((seen.len(), seen.last()), (done + 1, Some(&completion(PROMPT, 6))), "{name}");
        assert!(!cluster.d().stats().dead, "{name} killed the decode engine");
        assert_eq!(cluster.relayed().await, 0.0, "{name}");
        assert_eq!(cluster.metric("kvbaton_handoffs_total", &[]).await, done as f64 + 1.0, "{name}");
    }
    let sane = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    assert_eq!(sane.generated(), expected);
    assert_eq!(cluster.relayed().await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_8_no_defect_reaches_decode() {
    never_reach_decode(Generation::V14).await;
}

#[tokio::test]
async fn item_8_no_v2_defect_reaches_decode() {
    never_reach_decode(Generation::V2).await;
}

fn fail(config: &mut Config) {
    config.hand_off.on_missing = OnMissing::Fail;
}

#[tokio::test]
async fn under_the_policy_fail_a_defect_is_a_502() {
    let cluster =
        Cluster::builder().config(fail).warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    for (name, params) in defects(&sound(&cluster, Generation::V14)) {
        let fault = Fault::HandoffOverride { params };
        cluster.p().faults().arm(ArmedFault { fault, leg: Leg::Prefill, sticky: false });
        let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
        assert_eq!(answer.status, 502, "{name}: {answer:?}");
        cluster.assert_error(&answer, 502, "bad_handoff");
    }
    assert_eq!(generations(cluster.d()).len(), 0);
    assert_eq!(cluster.relayed().await, 0.0);
    cluster.finish().await;
}

/// The client's requests that a decode engine has seen; a release of blocks is none of them.
fn of_clients(engine: &Engine) -> Vec<Value> {
    let bodies = generations(engine).into_iter().map(|seen| parse(&seen.body));
    bodies.filter(|body| body["max_tokens"] == 6).collect()
}

/// A request whose prefill meets a fault; the decode engine must do all by itself and be right.
async fn decode_alone(cluster: &Cluster, fault: Fault, result: &str) {
    let body = completion(PROMPT, 6);
    cluster.p().faults().arm(ArmedFault { fault, leg: Leg::Prefill, sticky: false });
    let answer = cluster.post(COMPLETIONS, &body).await;
    let seen: Vec<Value> = generations(cluster.d()).iter().map(|seen| parse(&seen.body)).collect();
    assert_eq!(answer.status, 200, "the decode engine saw {seen:#?}");
    assert_eq!(answer.generated(), single_text(COMPLETIONS, &body).await);
    assert_eq!(of_clients(cluster.d()), [body]);
    assert!(!cluster.d().stats().dead);
    assert_eq!(cluster.metric("kvbaton_handoffs_total", &[("result", result)]).await, 1.0);
    assert_eq!(cluster.relayed().await, 0.0);
}

#[tokio::test]
async fn item_6_a_missing_hand_off_is_counted_and_decode_does_it_alone() {
    let cluster = Cluster::builder().warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    decode_alone(&cluster, Fault::DropHandoff, "missing").await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_null_hand_off_is_a_missing_one() {
    let cluster = Cluster::builder().warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    decode_alone(&cluster, Fault::HandoffOverride { params: Value::Null }, "missing").await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_6_under_the_policy_fail_a_missing_hand_off_is_a_502() {
    let cluster =
        Cluster::builder().config(fail).warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    cluster.p().faults().arm(ArmedFault { fault: Fault::DropHandoff, leg: Leg::Prefill, sticky: false });
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_error(&answer, 502, "no_hand_off");
    assert_eq!(generations(cluster.d()).len(), 0);
    assert_eq!(cluster.metric("kvbaton_handoffs_total", &[("result", "missing")]).await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_prefill_of_two_tokens_is_refused_and_its_blocks_are_freed() {
    let cluster = Cluster::builder().warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    decode_alone(&cluster, Fault::ExtraTokens { count: 1 }, "refused").await;
    cluster.wait_no_blocks().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_hand_off_of_fewer_blocks_than_the_prompt_needs_kills_no_engine() {
    let cluster = Cluster::builder().warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    let mut params = sound(&cluster, Generation::V14);
    params["remote_block_ids"] = json!([[1]]);
    decode_alone(&cluster, Fault::HandoffOverride { params }, "refused").await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_hand_off_of_more_tokens_than_the_prompt_has_is_refused() {
    let cluster = Cluster::builder().warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    let mut params = sound(&cluster, Generation::V14);
    params["remote_num_tokens"] = json!(PROMPT.len() + 1);
    decode_alone(&cluster, Fault::HandoffOverride { params }, "refused").await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_19_a_hand_off_that_outlived_its_lease_is_never_sent() {
    outlived(|config| config.hand_off.lease = Duration::from_nanos(1)).await;
}

#[tokio::test]
async fn item_19_a_prefill_engines_own_lease_counts_before_the_general_one() {
    outlived(|config| config.prefill[0].lease = Some(Duration::from_nanos(1))).await;
}

async fn outlived(tune: fn(&mut Config)) {
    let short = move |config: &mut Config| {
        config.hand_off.lease_margin = Duration::from_secs(5);
        tune(config);
    };
    let cluster =
        Cluster::builder().config(short).warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    assert_eq!(
        cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.generated(),
        single_text(COMPLETIONS, &completion(PROMPT, 6)).await
    );
    assert_eq!(of_clients(cluster.d()), [completion(PROMPT, 6)]);
    assert_eq!(cluster.relayed().await, 0.0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_66_fields_that_the_router_does_not_know_are_carried_on() {
    let cluster = Cluster::builder().start().await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 200);
    let by_itself = parse(&generations(cluster.d())[0].body)["kv_transfer_params"].clone();
    let mut params = by_itself.clone();
    params["first_token_ids"] = json!([[104]]);
    params["x_future"] = json!({"a": [1, 2.5, "z"]});
    cluster.p().faults().arm(ArmedFault {
        fault: Fault::HandoffOverride { params: params.clone() },
        leg: Leg::Prefill,
        sticky: false,
    });
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 200);
    assert_eq!(parse(&generations(cluster.d())[1].body)["kv_transfer_params"], params);
    cluster.finish().await;
}

#[tokio::test]
async fn item_46_a_hand_off_of_an_engine_that_was_replaced_reaches_nobody() {
    let cluster = Cluster::builder().warns(&["hand-off"]).may_warn(&["failed too often"]).start().await;
    let before = json!({"base_url": cluster.p().url(), "role": "prefill"});
    let path = "/registry/v1/engines/the-one-before";
    let json = ("content-type", "application/json");
    assert_eq!(cluster.send("PUT", path, &[json], before.to_string()).await.status, 201);
    // The engine finds itself unknown, registers again, and has its address back.
    cluster.wait_for("the other is replaced", async || cluster.get(path).await.status == 404).await;
    cluster.wait_ready().await;
    let mut params = sound(&cluster, Generation::V14);
    params["remote_engine_id"] = json!("the-one-before");
    decode_alone(&cluster, Fault::HandoffOverride { params }, "refused").await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_46_an_engine_that_is_only_not_registered_is_not_taken_for_gone() {
    let cluster = Cluster::builder().may_warn(&["hand-off", "could release"]).start().await;
    let mut params = sound(&cluster, Generation::V14);
    params["remote_engine_id"] = json!("not-registered-yet");
    cluster.p().faults().arm(ArmedFault {
        fault: Fault::HandoffOverride { params: params.clone() },
        leg: Leg::Prefill,
        sticky: false,
    });
    cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    let sent = of_clients_with_hand_off(cluster.d());
    assert_eq!(sent, ["not-registered-yet"]);
    cluster.finish().await;
}

/// The engines that the hand-offs in the client's requests name.
fn of_clients_with_hand_off(engine: &Engine) -> Vec<String> {
    let named = |body: Value| body["kv_transfer_params"]["remote_engine_id"].as_str().map(str::to_owned);
    let bodies = generations(engine).into_iter().map(|seen| parse(&seen.body));
    bodies.filter(|body| body["max_tokens"] == 6).filter_map(named).collect()
}

/// The host that a decode engine is told, when the prefill engine reports this one.
async fn told_host(reported: &'static str) -> Value {
    let cluster = Cluster::builder()
        .engine(move |config| config.advertise_host = Some(reported.to_owned()))
        .start()
        .await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 200);
    let host = parse(&generations(cluster.d())[0].body)["kv_transfer_params"]["remote_host"].clone();
    cluster.finish().await;
    host
}

#[tokio::test]
async fn an_address_for_itself_is_left_alone_when_the_engine_is_on_this_host() {
    assert_eq!(told_host("localhost").await, "localhost");
    assert_eq!(told_host("127.0.0.1").await, "127.0.0.1");
}

#[tokio::test]
async fn the_side_channels_address_of_the_settings_replaces_the_reported_one() {
    let set = |config: &mut Config| {
        config.prefill[0].kv_host = Some("kv.example".to_owned());
        config.prefill[0].kv_port = Some(5601);
    };
    let cluster = Cluster::builder().config(set).start().await;
    // The simulated engines find each other by engine id, so the address is only carried.
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 200);
    let params = parse(&generations(cluster.d())[0].body)["kv_transfer_params"].clone();
    assert_eq!((&params["remote_host"], &params["remote_port"]), (&json!("kv.example"), &json!(5601)));
    cluster.finish().await;
}

#[tokio::test]
async fn the_registrys_address_replaces_every_other() {
    let set = |config: &mut Config| {
        config.prefill[0].kv_host = Some("kv.example".to_owned());
        config.hand_off.registry_address = Some("[fd00::2]:8000".parse().unwrap());
    };
    let cluster = Cluster::builder().config(set).start().await;
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 200);
    let params = parse(&generations(cluster.d())[0].body)["kv_transfer_params"].clone();
    assert_eq!((&params["remote_host"], &params["remote_port"]), (&json!("fd00::2"), &json!(8000)));
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}
