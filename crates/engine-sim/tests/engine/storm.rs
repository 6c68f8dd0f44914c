//! Many requests at once on small engines, some of whose clients leave at any moment.

use std::time::Duration;

use engine_sim::{EngineConfig, Generation};
use reqwest::Client;
use serde_json::{Value, json};

use crate::support::{
    Pair, chat, completion, config, events, eventually, long_prompt, post, send, set, start, streamed_text,
    text_of, with_params,
};

/// Every seventh client leaves after so many milliseconds.
fn patience(index: u64) -> Option<Duration> {
    index.is_multiple_of(7).then(|| Duration::from_millis(index * 37 % 40))
}

fn case(index: u64) -> (&'static str, Value) {
    let length = usize::try_from(20 + index * 53 % 330).unwrap();
    // Few names, so that prefixes are shared.
    let text = long_prompt(&format!("n{}", index % 5))[..length].to_owned();
    if index.is_multiple_of(3) {
        ("/v1/chat/completions", chat(&text, 20))
    } else {
        ("/v1/completions", completion(&text, 20))
    }
}

async fn ask_decode(pair: &Pair, index: u64, path: &str, body: &Value) -> String {
    if index.is_multiple_of(2) {
        let streaming = set(body, json!({"stream": true}));
        let text = send(&pair.client, &pair.d, path, &streaming).await.text().await.unwrap();
        return streamed_text(&events(&text));
    }
    text_of(&post(&pair.client, &pair.d, path, body).await.1)
}

async fn one(pair: &Pair, index: u64, expected: &str) -> bool {
    let (path, body) = case(index);
    let params = pair.prefill(path, &body).await;
    let relayed = with_params(&body, &params);
    let asked = ask_decode(pair, index, path, &relayed);
    // A v2 decode engine frees blocks that a transfer still writes, so there nobody may leave.
    let leaves = pair.d.config().generation == Generation::V14;
    let Some(patience) = patience(index).filter(|_| leaves) else {
        assert_eq!(asked.await, expected, "request {index}");
        return true;
    };
    match tokio::time::timeout(patience, asked).await {
        Ok(text) => {
            assert_eq!(text, expected, "request {index}");
            true
        }
        Err(_) => false,
    }
}

async fn storm(generation: Generation) {
    const REQUESTS: u64 = 70;
    let (client, single) = (Client::new(), start(config(generation)).await);
    let mut expected = Vec::new();
    for index in 0..REQUESTS {
        let (path, body) = case(index);
        expected.push(text_of(&post(&client, &single, path, &body).await.1));
    }
    let small = |config: &mut EngineConfig| {
        config.num_blocks = 120;
        config.max_num_seqs = 8;
        config.max_num_batched_tokens = 100;
        config.lease = Duration::from_secs(if generation == Generation::V14 { 6 } else { 480 });
        config.idle_trap = false;
        config.decode_time_per_token = Duration::from_millis(1);
    };
    let pair = Pair::with(generation, small, small).await;
    let all = expected.iter().zip(0..).map(|(text, index)| one(&pair, index, text));
    let answered = futures_util::future::join_all(all).await.into_iter().filter(|answered| *answered).count();
    assert!(answered >= 60, "{answered}");
    eventually("the decode engine holds nothing", || pair.d.stats().blocks_held == 0).await;
    assert!(!pair.d.stats().dead && !pair.p.stats().dead);
    if generation == Generation::V14 {
        eventually("the prefill engine holds nothing", || pair.p.stats().blocks_held == 0).await;
    }
}

#[tokio::test]
async fn v14_storm_leaves_nothing_behind() {
    storm(Generation::V14).await;
}

#[tokio::test]
async fn v2_storm_leaves_nothing_behind_on_the_decode_side() {
    storm(Generation::V2).await;
}
