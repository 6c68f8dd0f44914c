//! Processes that are killed while blocks are handed over, and their successors.

use std::pin::pin;

use futures_util::future::{join, join_all};
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};

use super::fleet::{Fleet, Node, expected, installation};
use crate::support::{Answer, COMPLETIONS, PROMPT, completion};

const AT_ONCE: usize = 4;

fn bodies(word: &str) -> Vec<Value> {
    (0..AT_ONCE).map(|i| completion(&format!("{word} {i} {PROMPT}"), 12)).collect()
}

async fn check_texts(fleet: &Fleet, word: &str, generation: &str) {
    let bodies = bodies(word);
    let answers = join_all(bodies.iter().map(|body| fleet.post(COMPLETIONS, body))).await;
    for (body, answer) in bodies.iter().zip(answers) {
        assert_eq!(answer.generated(), expected(COMPLETIONS, body, generation).await, "{word}");
    }
}

/// Over TCP alone P has to send every byte itself, so that a read waits for it when it is stopped.
const ONLY_TCP: (&str, &str) = ("UCX_TLS", "tcp");

/// Kills P while D reads from it, then starts another at its address.
async fn prefill_dies_while_it_is_read(generation: &str) {
    let Some(nixl) = installation() else { return };
    let mut fleet = Fleet::start(&nixl, &[]).await.ucx(ONLY_TCP.0, ONLY_TCP.1);
    for role in ["prefill", "decode"] {
        fleet.add(role, &["--generation", generation]).await;
    }
    fleet.wait_ready().await;
    check_texts(&fleet, "before", generation).await;
    let mut victim = fleet.prefill.remove(0);
    let decode = &fleet.decode[0];
    let seen = decode.completions().await;
    decode.hold().await;
    let lost = bodies("lost");
    let asked = join_all(lost.iter().map(|body| fleet.post(COMPLETIONS, body)));
    let (answers, ()) = join(asked, async {
        decode.arrived(seen + AT_ONCE).await;
        victim.stop();
        decode.let_in().await;
        decode.wait_for("all wait for P", |stats| stats["waiting_for_remote_kv"] == AT_ONCE).await;
        victim.kill();
    })
    .await;
    for (body, answer) in lost.iter().zip(answers) {
        if generation == "v2" {
            // This generation computes what it could not load.
            assert_eq!(answer.generated(), expected(COMPLETIONS, body, generation).await);
        } else {
            assert_eq!(answer.status, 500, "{}", answer.everything());
            assert_eq!(answer.json()["error"]["type"], "InternalServerError", "{}", answer.everything());
        }
    }
    decode.wait_for("nothing is held", |stats| stats["blocks_held"] == 0).await;
    assert!(decode.metric("vllm:nixl_num_failed_transfers_total").await >= AT_ONCE as f64);

    let successor = fleet.successor(&victim);
    assert_ne!(successor.id, victim.id);
    fleet.prefill.push(successor);
    fleet.wait_ready().await;
    check_texts(&fleet, "after", generation).await;
    assert_eq!(fleet.decode[0].stats().await["kv_pulls"], 2 * AT_ONCE);
    assert_eq!(fleet.prefill[0].stats().await["prefill_requests"], AT_ONCE);
    fleet.finish();
}

#[tokio::test]
async fn a_prefill_engine_killed_in_the_middle_of_a_read_fails_it_and_its_successor_serves() {
    prefill_dies_while_it_is_read("v14").await;
}

#[tokio::test]
async fn a_v2_decode_engine_computes_what_a_killed_prefill_engine_cannot_give() {
    prefill_dies_while_it_is_read("v2").await;
}

#[tokio::test]
async fn a_killed_decode_engine_leaves_leases_that_end_and_its_successor_serves() {
    let Some(nixl) = installation() else { return };
    let mut fleet = Fleet::start(&nixl, &["hand_off.lease=8s"]).await;
    fleet.add("prefill", &["--lease", "8"]).await;
    fleet.add("decode", &[]).await;
    fleet.wait_ready().await;
    check_texts(&fleet, "before", "v14").await;
    let mut victim = fleet.decode.remove(0);
    let prefill = &fleet.prefill[0];
    let seen = victim.completions().await;
    victim.hold().await;
    let lost = bodies("lost");
    let asked = join_all(lost.iter().map(|body| fleet.post(COMPLETIONS, body)));
    let (answers, ()) = join(asked, async {
        victim.arrived(seen + AT_ONCE).await;
        assert_eq!(prefill.stats().await["leases"], AT_ONCE);
        victim.kill();
    })
    .await;
    for answer in answers {
        assert_eq!(answer.status, 502, "{}", answer.everything());
        assert_eq!(answer.json()["error"]["code"], "upstream_reset", "{}", answer.everything());
    }
    prefill.wait_for("no lease is left", |stats| stats["blocks_held"] == 0).await;
    assert_eq!(prefill.stats().await["kv_expired"], AT_ONCE);

    let successor = fleet.successor(&victim);
    fleet.decode.push(successor);
    fleet.wait_ready().await;
    check_texts(&fleet, "after", "v14").await;
    assert_eq!(fleet.decode[0].stats().await["kv_pulls"], AT_ONCE);
    fleet.finish();
}

#[tokio::test]
async fn hand_offs_of_a_killed_decode_engine_are_served_by_another_and_released() {
    let Some(nixl) = installation() else { return };
    let mut fleet = Fleet::start(&nixl, &["hand_off.lease=10m"]).await;
    fleet.add("prefill", &["--lease", "600"]).await;
    for _ in 0..2 {
        fleet.add("decode", &[]).await;
    }
    fleet.wait_ready().await;
    // Both decode engines have read from this prefill engine.
    for word in ["first", "second", "third"] {
        check_texts(&fleet, word, "v14").await;
    }
    let seen = [fleet.decode[0].completions().await, fleet.decode[1].completions().await];
    for decode in &fleet.decode {
        decode.hold().await;
    }
    let asked_for: Vec<Value> = ["one", "two", "three"].into_iter().flat_map(bodies).collect();
    let mut victim = fleet.decode.remove(0);
    let (prefill, other) = (&fleet.prefill[0], &fleet.decode[0]);
    let asked = join_all(asked_for.iter().map(|body| fleet.post(COMPLETIONS, body)));
    let (answers, of_victim) = join(asked, async {
        prefill.wait_for("all are handed over", |stats| stats["leases"] == asked_for.len()).await;
        victim.arrived(seen[0] + 1).await;
        other.arrived(seen[1] + 1).await;
        let of_victim = victim.completions().await - seen[0];
        victim.kill();
        other.arrived(seen[1] + asked_for.len()).await;
        other.let_in().await;
        of_victim
    })
    .await;
    assert!(of_victim > 0);
    for (body, answer) in asked_for.iter().zip(answers) {
        assert_eq!(answer.generated(), expected(COMPLETIONS, body, "v14").await);
    }
    // Nothing may wait for the end of these leases.
    prefill.wait_for("every lease is released", |stats| stats["blocks_held"] == 0).await;
    assert_eq!(prefill.stats().await["kv_expired"], json!(0));
    fleet.finish();
}

/// The text, or an error that says which engine failed.
async fn check_text_or_failure(body: &Value, answer: &Answer) {
    match answer.status {
        200 => assert_eq!(answer.generated(), expected(COMPLETIONS, body, "v14").await),
        500 => assert_eq!(answer.json()["error"]["type"], "InternalServerError", "{}", answer.everything()),
        502 => assert_eq!(answer.json()["error"]["type"], "upstream_error", "{}", answer.everything()),
        status => panic!("{status}: {}", answer.everything()),
    }
}

/// Posts all of them, and kills the victims on the way; how many requests failed.
async fn storm(fleet: &Fleet, bodies: &[Value], victims: [Node; 2]) -> (Vec<Node>, usize) {
    let (mut victims, mut killed) = (victims.into_iter(), Vec::new());
    let answers = stream::iter(bodies).map(async |body| (body, fleet.post(COMPLETIONS, body).await));
    let mut answers = pin!(answers.buffer_unordered(24));
    let (mut answered, mut failed) = (0, 0);
    while let Some((body, answer)) = answers.next().await {
        check_text_or_failure(body, &answer).await;
        answered += 1;
        failed += usize::from(answer.status != 200);
        if answered == 60 || answered == 140 {
            killed.extend(victims.next());
            killed.last_mut().unwrap().kill();
        }
    }
    (killed, failed)
}

#[tokio::test]
async fn engines_killed_in_a_storm_of_hand_offs_harm_no_other() {
    let Some(nixl) = installation() else { return };
    let mut fleet = Fleet::start(&nixl, &["hand_off.lease=8s"]).await;
    for role in ["prefill", "decode", "prefill", "decode"] {
        fleet.add(role, &["--lease", "8"]).await;
    }
    fleet.wait_ready().await;
    let bodies: Vec<Value> = (0..240).map(|i| completion(&format!("{i} in a storm: {PROMPT}"), 12)).collect();
    let victims = [fleet.prefill.remove(0), fleet.decode.remove(0)];
    let (killed, failed) = storm(&fleet, &bodies, victims).await;
    // Only what was under way when an engine was killed may be lost.
    assert!(failed <= 2 * 24, "{failed} requests failed");
    for node in [&fleet.prefill[0], &fleet.decode[0]] {
        node.wait_for("nothing is held", |stats| stats["blocks_held"] == 0).await;
    }
    let successors: Vec<_> = killed.iter().map(|victim| fleet.successor(victim)).collect();
    for (successor, engines) in successors.into_iter().zip([&mut fleet.prefill, &mut fleet.decode]) {
        engines.push(successor);
    }
    fleet.wait_ready().await;
    for word in ["after", "and again"] {
        check_texts(&fleet, word, "v14").await;
    }
    fleet.finish();
}
