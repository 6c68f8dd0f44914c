//! A failed leg is tried again where that can help and cannot harm (field notes 19 and 56).

use std::time::Duration;

use engine_sim::{ArmedFault, Engine, Fault, Leg};
use kvbaton::config::Config;
use kvbaton_proxy::OnMissing;
use serde_json::{Value, json};

use crate::support::{COMPLETIONS, Cluster, PROMPT, completion, generations, parse, single_text};

fn quiet_probes(config: &mut Config) {
    // The first failure must be seen by the request, not by a probe.
    config.probe.interval = Duration::from_secs(60);
}

fn arm(engine: &Engine, leg: Leg, fault: Fault) {
    engine.faults().arm(ArmedFault { fault, leg, sticky: false });
}

fn refuse(status: u16) -> Fault {
    Fault::Refuse {
        status,
        body: json!({"error": {"message": "no", "type": "t", "param": null, "code": status}}),
    }
}

async fn retries(cluster: &Cluster, stage: &str) -> f64 {
    cluster.metric("kvbaton_retries_total", &[("stage", stage)]).await
}

/// The hand-offs that the decode engines were given, in no particular order.
fn hand_offs(cluster: &Cluster) -> Vec<Value> {
    let bodies = cluster.decode.iter().flat_map(generations).map(|seen| parse(&seen.body));
    bodies
        .filter(|body| body["max_tokens"] == 6 && body["model"] == "sim")
        .map(|body| body["kv_transfer_params"]["remote_request_id"].clone())
        .collect()
}

async fn is_right(cluster: &Cluster) {
    let body = completion(PROMPT, 6);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
}

/// Both prefill engines get the fault; whichever is asked first fails, the other is disarmed.
async fn another_prefill(fault: Fault, tune: fn(&mut Config)) {
    // Nothing is warned of a kept connection that ends.
    let warnings: &[&str] = if matches!(fault, Fault::Reset { .. }) { &[] } else { &["engine failed"] };
    let cluster = Cluster::builder().prefill(2).config(tune).warns(warnings).start().await;
    for engine in &cluster.prefill {
        engine.faults().arm(ArmedFault { fault: fault.clone(), leg: Leg::Prefill, sticky: true });
    }
    // The second engine's fault is taken away as soon as the first has met its own.
    let body = completion(PROMPT, 6);
    let answer = {
        let first = cluster.prefill[0].faults().hold(engine_sim::Stage::Arrival, Leg::Prefill);
        let second = cluster.prefill[1].faults().hold(engine_sim::Stage::Arrival, Leg::Prefill);
        let post = cluster.post(COMPLETIONS, &body);
        let arrange = async {
            let spared = tokio::select! {
                () = first.arrived(1) => &cluster.prefill[1],
                () = second.arrived(1) => &cluster.prefill[0],
            };
            spared.faults().clear();
            first.release();
            second.release();
        };
        tokio::join!(post, arrange).0
    };
    assert_eq!(answer.generated(), single_text(COMPLETIONS, &body).await);
    // A kept connection that ends so is taken for an idle one, whose end is no failure.
    if !matches!(fault, Fault::Reset { .. }) {
        assert_eq!(retries(&cluster, "prefill").await, 1.0);
    }
    assert_eq!(cluster.relayed().await, 1.0);
    assert_eq!(hand_offs(&cluster).len(), 1);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_56_a_prefill_engine_that_answers_503_is_replaced() {
    another_prefill(refuse(503), quiet_probes).await;
}

#[tokio::test]
async fn item_56_a_prefill_engine_that_resets_is_replaced() {
    another_prefill(Fault::Reset { after_bytes: 0 }, quiet_probes).await;
}

#[tokio::test]
async fn item_56_a_prefill_engine_that_is_silent_is_replaced() {
    let impatient = |config: &mut Config| {
        quiet_probes(config);
        config.timeouts.prefill = Duration::from_secs(2);
        // Nobody listens to it any longer.
        config.hand_off.abandon_grace = Duration::ZERO;
    };
    another_prefill(Fault::Stall { stage: engine_sim::Stage::Arrival }, impatient).await;
}

#[tokio::test]
async fn item_56_a_failing_fleet_is_not_stormed_with_new_tries() {
    let poor = |config: &mut Config| {
        quiet_probes(config);
        config.retry.attempts = 2;
        config.retry.burst = 2;
        config.retry.per_request = 0.0;
        config.retry.per_second = 0.0;
        config.breaker.failures = 1000;
    };
    let warned = &["engine failed", "prefill_failed"];
    let cluster = Cluster::builder().prefill(3).config(poor).warns(warned).start().await;
    for engine in &cluster.prefill {
        engine.faults().arm(ArmedFault { fault: refuse(503), leg: Leg::Prefill, sticky: true });
    }
    for _ in 0..6 {
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 502);
    }
    let tried: usize = cluster.prefill.iter().map(|engine| generations(engine).len()).sum();
    assert_eq!(
        (tried, retries(&cluster, "prefill").await),
        (8, 2.0),
        "six requests and what the fleet may add"
    );
    cluster.finish().await;
}

#[tokio::test]
async fn item_56_a_prefill_engine_that_is_gone_costs_one_try() {
    let mut cluster =
        Cluster::builder().prefill(2).config(quiet_probes).warns(&["engine failed"]).start().await;
    cluster.prefill.remove(0).kill().await;
    for _ in 0..4 {
        is_right(&cluster).await;
    }
    assert_eq!(retries(&cluster, "prefill").await, 1.0, "after that it is known to be gone");
    cluster.finish().await;
}

#[tokio::test]
async fn item_56_a_4xx_is_never_tried_again() {
    let cluster = Cluster::builder().prefill(2).config(quiet_probes).start().await;
    for engine in &cluster.prefill {
        arm(engine, Leg::Prefill, refuse(429));
    }
    assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.status, 429);
    let met = cluster.prefill.iter().filter(|engine| engine.faults().armed().is_empty()).count();
    assert_eq!(met, 1);
    assert_eq!(retries(&cluster, "prefill").await, 0.0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_decode_engine_that_is_gone_leaves_the_hand_off_to_another() {
    let mut cluster =
        Cluster::builder().decode(2).config(quiet_probes).warns(&["engine failed"]).start().await;
    cluster.decode.remove(0).kill().await;
    for _ in 0..2 {
        is_right(&cluster).await;
    }
    assert_eq!(retries(&cluster, "decode").await, 1.0);
    assert_eq!(cluster.p().stats().prefill_requests, 2, "no prompt was computed twice");
    assert_eq!(cluster.relayed().await, 2.0);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

/// A decode engine that had the hand-off and failed: the next one gets a new one.
async fn another_hand_off(fault: Fault) {
    let cluster = Cluster::builder().decode(2).config(quiet_probes).warns(&["engine failed"]).start().await;
    // Acquaint both decode engines with the prefill engine, so that releases work at once.
    for _ in 0..4 {
        is_right(&cluster).await;
    }
    let before = hand_offs(&cluster).len();
    for engine in &cluster.decode {
        arm(engine, Leg::Decode, fault.clone());
    }
    let gates: Vec<_> =
        cluster.decode.iter().map(|d| d.faults().hold(engine_sim::Stage::Arrival, Leg::Decode)).collect();
    let body = completion(PROMPT, 6);
    let arrange = async {
        let spared = tokio::select! {
            () = gates[0].arrived(1) => &cluster.decode[1],
            () = gates[1].arrived(1) => &cluster.decode[0],
        };
        spared.faults().clear();
        gates.iter().for_each(engine_sim::Gate::release);
    };
    let answer = tokio::join!(cluster.post(COMPLETIONS, &body), arrange).0;
    assert_eq!(answer.generated(), single_text(COMPLETIONS, &body).await);
    let given = hand_offs(&cluster);
    assert_eq!(given.len(), before + 2);
    let distinct: std::collections::BTreeSet<String> = given.iter().map(Value::to_string).collect();
    assert_eq!(distinct.len(), given.len(), "no hand-off was given twice: {given:?}");
    assert_eq!(retries(&cluster, "decode").await, 1.0);
    cluster.wait_no_blocks().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_19_after_a_503_the_next_decode_engine_gets_a_new_hand_off() {
    another_hand_off(refuse(503)).await;
}

#[tokio::test]
async fn item_19_an_answer_that_breaks_off_before_the_client_has_any_is_made_anew() {
    another_hand_off(Fault::Reset { after_bytes: 400 }).await;
}

#[tokio::test]
async fn item_60_a_kept_connection_that_ends_under_a_request_costs_nothing() {
    let cluster = Cluster::builder().config(quiet_probes).start().await;
    is_right(&cluster).await;
    arm(cluster.p(), Leg::Prefill, Fault::Reset { after_bytes: 0 });
    is_right(&cluster).await;
    arm(cluster.d(), Leg::Decode, Fault::Reset { after_bytes: 0 });
    is_right(&cluster).await;
    assert_eq!(retries(&cluster, "prefill").await + retries(&cluster, "decode").await, 0.0);
    cluster.wait_no_blocks().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    cluster.finish().await;
}

#[tokio::test]
async fn without_tries_the_first_failure_is_the_answer() {
    let once = |config: &mut Config| {
        quiet_probes(config);
        config.retry.attempts = 0;
    };
    let cluster = Cluster::builder().prefill(2).config(once).warns(&["engine"]).start().await;
    for engine in &cluster.prefill {
        arm(engine, Leg::Prefill, refuse(503));
    }
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_error(&answer, 502, "prefill_failed");
    cluster.finish().await;
}

#[tokio::test]
async fn item_52_without_a_prefill_engine_the_policy_decides() {
    let alone = |config: &mut Config| config.hand_off.on_no_prefill = OnMissing::DecodeOnly;
    let cluster =
        Cluster::builder().prefill(0).config(alone).unready().warns(&["no prefill engine"]).start().await;
    cluster
        .wait_for("the decode engine is ready", async || {
            cluster.get("/readyz").await.json()["decode_ready"] == 1
        })
        .await;
    is_right(&cluster).await;
    assert_eq!(cluster.metric("kvbaton_pd_bypass_total", &[("reason", "no_prefill")]).await, 1.0);
    cluster.finish().await;
}
