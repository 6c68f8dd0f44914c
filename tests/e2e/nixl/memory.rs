//! Thousands of hand-offs leave nothing behind in either process.

use futures_util::StreamExt as _;
use futures_util::stream;

use super::fleet::{Fleet, installation};
use crate::support::process::counted;
use crate::support::{COMPLETIONS, completion};

const FIRST: usize = 1_000;
const AT_ONCE: usize = 16;

/// As many as issue and documentation say, or as the environment says.
fn hand_offs() -> usize {
    let told = std::env::var("KVBATON_HANDOFFS").ok();
    told.map_or(10_000, |count| count.parse().expect("KVBATON_HANDOFFS is a number"))
}

async fn run(fleet: &Fleet, numbers: std::ops::Range<usize>) {
    let mut answers = stream::iter(numbers)
        .map(|i| async move {
            let body = completion(&format!("{i}: what is handed over must be let go"), 2);
            fleet.post(COMPLETIONS, &body).await
        })
        .buffer_unordered(AT_ONCE);
    while let Some(answer) = answers.next().await {
        assert_eq!(answer.status, 200, "{}", answer.everything());
    }
}

#[tokio::test]
async fn memory_stays_flat_over_thousands_of_hand_offs() {
    let Some(nixl) = installation() else { return };
    let mut fleet = Fleet::start(&nixl, &[]).await;
    for role in ["prefill", "decode"] {
        fleet.add(role, &[]).await;
    }
    fleet.wait_ready().await;
    let all = hand_offs();
    run(&fleet, 0..FIRST).await;
    let early = [fleet.prefill[0].resident(), fleet.decode[0].resident()];
    run(&fleet, FIRST..all).await;
    let late = [fleet.prefill[0].resident(), fleet.decode[0].resident()];
    let decode = &fleet.decode[0];
    let total = all as u64;
    assert_eq!(counted(&fleet.base, std::slice::from_ref(&decode.url)).await, (total, total));
    for node in [&fleet.prefill[0], decode] {
        node.wait_for("no block is held", |stats| stats["blocks_held"] == 0).await;
    }
    for (name, (early, late)) in ["prefill", "decode"].iter().zip(early.into_iter().zip(late)) {
        println!("{name}: {early} bytes after {FIRST} hand-offs, {late} after {all}");
        assert!(late < early + early / 20, "{name} grew from {early} to {late} bytes");
    }
    fleet.finish();
}
