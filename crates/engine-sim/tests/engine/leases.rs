//! How long a prefill engine keeps blocks, and what frees them early.

use std::time::Duration;

use engine_sim::Generation;
use serde_json::{Value, json};

use crate::support::{
    Pair, completion, config, eventually, long_prompt, post, prefill_body, send, set, start, stats_when,
    text_of, with_params,
};

#[tokio::test]
async fn lease_ends_and_what_is_read_then_is_wrong_without_an_error() {
    let pair = Pair::with(
        Generation::V14,
        |p| {
            p.lease = Duration::from_secs(1);
            p.num_blocks = 32;
        },
        |_| {},
    )
    .await;
    let body = completion(&long_prompt("late"), 20);
    let good = text_of(&pair.relay("/v1/completions", &body).await);
    let params = pair.prefill("/v1/completions", &body).await;
    stats_when(&pair.p, "the lease runs out", |stats| stats.leases == 0).await;
    assert_eq!(pair.p.stats().kv_expired, 1);
    // Another prompt takes the blocks.
    let other = completion(&"somebody else's words. ".repeat(20), 1);
    post(&pair.client, &pair.p, "/v1/completions", &other).await;
    let reader = start(engine_sim::EngineConfig {
        registry: Some(pair.registry.url.clone()),
        ..config(Generation::V14)
    })
    .await;
    let (status, answer) = post(&pair.client, &reader, "/v1/completions", &with_params(&body, &params)).await;
    assert_eq!(status, 200);
    assert_ne!(text_of(&answer), good);
    post(&pair.client, &pair.p, "/v1/completions", &completion("an idle engine sees nothing", 2)).await;
    stats_when(&pair.p, "the late notification is counted", |stats| stats.late_notifications == 1).await;
}

#[tokio::test]
async fn heartbeats_of_a_queued_request_keep_the_lease() {
    let pair = Pair::with(
        Generation::V14,
        |p| p.lease = Duration::from_secs(2),
        |d| {
            d.lease = Duration::from_secs(2);
            d.max_num_seqs = 1;
            d.decode_time_per_token = Duration::from_millis(10);
        },
    )
    .await;
    pair.introduce().await;
    let busy = completion("keep busy", 350);
    let body = completion(&long_prompt("queued"), 4);
    let params = pair.prefill("/v1/completions", &body).await;
    let (_, queued) = tokio::join!(post(&pair.client, &pair.d, "/v1/completions", &busy), async {
        eventually("the decode engine is busy", || pair.d.stats().running == 1).await;
        post(&pair.client, &pair.d, "/v1/completions", &with_params(&body, &params)).await
    });
    assert_eq!(queued.0, 200);
    assert_eq!(pair.p.stats().kv_expired, 0);
}

#[tokio::test]
async fn streamed_prefill_leg_strands_its_blocks_until_the_lease() {
    let pair = Pair::with(Generation::V14, |p| p.lease = Duration::from_secs(1), |_| {}).await;
    let body = set(&prefill_body(&completion(&long_prompt("sse"), 1)), json!({"stream": true}));
    let text = send(&pair.client, &pair.p, "/v1/completions", &body).await.text().await.unwrap();
    assert!(!text.contains("kv_transfer_params"));
    assert_eq!(pair.p.stats().leases, 1);
    stats_when(&pair.p, "the lease runs out", |stats| stats.leases == 0 && stats.kv_expired == 1).await;
}

#[tokio::test]
async fn aborted_prefill_frees_at_once() {
    let pair =
        Pair::with(Generation::V14, |p| p.prefill_time_per_token = Duration::from_millis(10), |_| {}).await;
    let body = prefill_body(&completion(&long_prompt("abort"), 1));
    tokio::select! {
        _ = post(&pair.client, &pair.p, "/v1/completions", &body) => panic!("it takes seconds"),
        () = eventually("it runs", || pair.p.stats().running == 1) => {}
    }
    pair.settled(&pair.p).await;
    assert_eq!((pair.p.stats().kv_expired, pair.p.stats().aborted), (0, 1));
}

/// Sends a body that the decode engine refuses, and says whether the prefill engine was told.
async fn released_by_refusal(pair: &Pair, extra: Value) -> bool {
    let body = completion(&long_prompt("refused"), 4);
    let params = pair.prefill("/v1/completions", &body).await;
    assert_eq!(pair.p.stats().leases, 1);
    let refused = set(&with_params(&body, &params), extra);
    let (status, answer) = post(&pair.client, &pair.d, "/v1/completions", &refused).await;
    assert!(status == 400 || status == 404, "{answer}");
    let told =
        tokio::time::timeout(Duration::from_secs(2), eventually("it is told", || pair.p.stats().leases == 0));
    told.await.is_ok()
}

#[tokio::test]
async fn refusal_inside_the_handler_releases_and_refusal_by_the_schema_does_not() {
    let pair = Pair::start(Generation::V14).await;
    pair.introduce().await;
    assert!(released_by_refusal(&pair, json!({"model": "nope"})).await);
    assert!(released_by_refusal(&pair, json!({"prompt": "x".repeat(2049)})).await);
    assert!(released_by_refusal(&pair, json!({"min_tokens": 9})).await);
    assert!(!released_by_refusal(&pair, json!({"stream_options": {"include_usage": true}})).await);
    assert_eq!(pair.d.stats().blocks_held, 0);
    assert_eq!(pair.d.stats().kv_pulls, 1, "only the introduction moved bytes");
}

#[tokio::test]
async fn refusal_tells_nothing_in_v2() {
    let pair = Pair::start(Generation::V2).await;
    pair.introduce_blind().await;
    let body = completion(&long_prompt("refused"), 4);
    let params = pair.prefill("/v1/completions", &body).await;
    let refused = set(&with_params(&body, &params), json!({"model": "nope"}));
    let (status, _) = post(&pair.client, &pair.d, "/v1/completions", &refused).await;
    assert_eq!(status, 404);
    // Two more requests let both engines step.
    post(&pair.client, &pair.d, "/v1/completions", &completion("step", 1)).await;
    post(&pair.client, &pair.p, "/v1/completions", &completion("step", 1)).await;
    assert_eq!(pair.p.stats().leases, 1);
}

#[tokio::test]
async fn idle_v2_prefill_engine_sees_the_notification_with_its_next_request() {
    let pair = Pair::start(Generation::V2).await;
    let body = completion(&long_prompt("trap"), 4);
    pair.relay("/v1/completions", &body).await;
    assert_eq!(pair.p.stats().leases, 1, "nobody looks at the notification");
    post(&pair.client, &pair.p, "/v1/completions", &completion("nudge", 2)).await;
    stats_when(&pair.p, "the nudge lets it look", |stats| stats.leases == 0).await;
    let seeing = Pair::with(Generation::V2, |p| p.idle_trap = false, |_| {}).await;
    seeing.relay("/v1/completions", &body).await;
    seeing.settled(&seeing.p).await;
}

#[tokio::test]
async fn first_contact_by_a_refusal_waits_for_the_next_request() {
    let pair = Pair::with(Generation::V14, |_| {}, |d| d.idle_trap = true).await;
    assert!(!released_by_refusal(&pair, json!({"model": "nope"})).await);
    post(&pair.client, &pair.d, "/v1/completions", &completion("nudge", 2)).await;
    pair.settled(&pair.p).await;
}

#[tokio::test]
async fn client_that_leaves_the_decode_leg_frees_both_sides() {
    let pair =
        Pair::with(Generation::V14, |_| {}, |d| d.decode_time_per_token = Duration::from_millis(20)).await;
    pair.introduce().await;
    let body = completion(&long_prompt("leave"), 500);
    let relayed = with_params(&body, &pair.prefill("/v1/completions", &body).await);
    tokio::select! {
        _ = post(&pair.client, &pair.d, "/v1/completions", &relayed) => panic!("too fast"),
        () = eventually("it runs", || pair.d.stats().running == 1) => {}
    }
    pair.settled(&pair.d).await;
    pair.settled(&pair.p).await;
    // The clean-up of a request that did start says it once more, to an engine that has to look.
    stats_when(&pair.d, "the decode engine is idle", |stats| stats.aborted == 1).await;
    post(&pair.client, &pair.p, "/v1/completions", &completion("look", 2)).await;
    stats_when(&pair.p, "the second notification is late", |stats| stats.late_notifications == 1).await;
}

#[tokio::test]
async fn client_that_leaves_while_blocks_move_keeps_them_until_the_move_ends() {
    let pair = Pair::start(Generation::V14).await;
    pair.introduce().await;
    let body = completion(&long_prompt("moving"), 500);
    let relayed = with_params(&body, &pair.prefill("/v1/completions", &body).await);
    let transport = pair.d.transport_faults();
    transport.hold_transfers(true);
    tokio::select! {
        _ = post(&pair.client, &pair.d, "/v1/completions", &relayed) => panic!("it is held"),
        () = eventually("it is parked", || pair.d.stats().waiting_for_remote_kv == 1) => {}
    }
    stats_when(&pair.d, "it is aborted", |stats| stats.aborted == 1 && stats.waiting == 0).await;
    assert!(pair.d.stats().blocks_held > 0, "the transfer may still write");
    transport.hold_transfers(false);
    pair.settled(&pair.d).await;
}
