//! Limits on requests: who runs, who waits, who is told to come again (field notes 53 and 54).

use std::time::{Duration, Instant};

use engine_sim::{Leg, Stage};
use kvbaton::config::{Config, Key};
use kvbaton_proxy::NamedLimits;
use kvbaton_routes::SecretDigest;
use serde_json::{Value, json};

use crate::support::{Answer, CHAT, COMPLETIONS, Cluster, PROMPT, bounded, chat, completion, generations};

fn limited(limit: impl Fn(&mut kvbaton_proxy::AdmissionSettings) + 'static) -> crate::support::Builder {
    Cluster::builder().config(move |config: &mut Config| limit(&mut config.admission))
}

async fn waiting(cluster: &Cluster, stage: &str, count: f64) {
    cluster
        .wait_for("so many wait", async || {
            cluster.metric("kvbaton_admission_waiting", &[("stage", stage)]).await == count
        })
        .await;
}

fn retry_after(answer: &Answer) -> u64 {
    answer.header("retry-after").parse().unwrap()
}

#[tokio::test]
async fn item_54_a_saturated_prefill_stage_says_429_at_once_and_when_to_come_again() {
    let cluster = limited(|limits| {
        limits.prefill.requests = 1;
        limits.prefill.waiting = 1;
    })
    .start()
    .await;
    // So that there is experience of how long a prefill takes.
    cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await;
    let gate = cluster.p().faults().hold(Stage::Arrival, Leg::Prefill);
    let body = completion(PROMPT, 2);
    let (first, second) = (cluster.post(COMPLETIONS, &body), cluster.post(COMPLETIONS, &body));
    let arrange = async {
        gate.arrived(1).await;
        waiting(&cluster, "prefill", 1.0).await;
        let mut fastest = Duration::MAX;
        for _ in 0..20 {
            let began = Instant::now();
            let answer = cluster.post(COMPLETIONS, &body).await;
            fastest = fastest.min(began.elapsed());
            cluster.assert_error(&answer, 429, "prefill_saturated");
            assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
            assert_eq!(retry_after(&answer), 1, "prefills take much less than a second here");
        }
        assert!(fastest < Duration::from_millis(50), "{fastest:?}");
        assert_eq!(cluster.metric("kvbaton_admission_running", &[("stage", "prefill")]).await, 1.0);
        assert_eq!(cluster.metric("kvbaton_admission_limit", &[("stage", "prefill")]).await, 1.0);
        assert!(cluster.metric("kvbaton_admission_waiting_tokens", &[("stage", "prefill")]).await > 10.0);
        let refused = [("limit", "prefill"), ("reason", "full")];
        assert_eq!(cluster.metric("kvbaton_admission_refused_total", &refused).await, 20.0);
        gate.release();
    };
    let (first, second, ()) = tokio::join!(first, second, arrange);
    assert_eq!((first.status, second.status), (200, 200));
    assert_eq!(cluster.metric("kvbaton_requests_total", &[("outcome", "limited")]).await, 20.0);
    waiting(&cluster, "prefill", 0.0).await;
    assert_eq!(generations(cluster.p()).len(), 3, "no refused request reached an engine");
    cluster.finish().await;
}

#[tokio::test]
async fn item_54_the_time_to_come_again_follows_the_engines_pace() {
    let cluster = limited(|limits| {
        limits.decode.requests = 1;
        limits.decode.waiting = 1;
        limits.longest_wait = Duration::from_secs(60);
    })
    .start()
    .await;
    let gate = cluster.d().faults().hold(Stage::Arrival, Leg::Decode);
    let body = completion(PROMPT, 2);
    let slow = async {
        gate.arrived(1).await;
        tokio::time::sleep(Duration::from_millis(2100)).await;
        gate.release();
    };
    // One that holds its place for more than two seconds.
    let (answer, ()) = tokio::join!(cluster.post(COMPLETIONS, &body), slow);
    assert_eq!(answer.status, 200);
    let gate = cluster.d().faults().hold(Stage::Arrival, Leg::Decode);
    let full = async {
        gate.arrived(1).await;
        waiting(&cluster, "decode", 1.0).await;
        let answer = cluster.post(COMPLETIONS, &body).await;
        cluster.assert_error(&answer, 429, "decode_saturated");
        assert!(retry_after(&answer) >= 5, "two turns of more than two seconds: {answer:?}");
        gate.release();
    };
    let (one, two, ()) =
        tokio::join!(cluster.post(COMPLETIONS, &body), cluster.post(COMPLETIONS, &body), full);
    assert_eq!((one.status, two.status), (200, 200));
    cluster.finish().await;
}

#[tokio::test]
async fn item_53_without_a_decode_engine_it_is_503_though_nothing_is_saturated() {
    let cluster = limited(|limits| limits.decode.requests = 1).decode(0).unready().warns(&["request failed"]);
    let cluster = cluster.start().await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await;
    cluster.assert_error(&answer, 503, "no_decode");
    assert_eq!(retry_after(&answer), 1);
    cluster.finish().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_frees_its_place_at_once() {
    let cluster = limited(|limits| {
        limits.decode.requests = 1;
        limits.decode.waiting = 1;
    })
    .start()
    .await;
    let gate = cluster.d().faults().hold(Stage::Arrival, Leg::Decode);
    let body = completion(PROMPT, 2);
    let first = cluster.post(COMPLETIONS, &body);
    let arrange = async {
        gate.arrived(1).await;
        {
            let second = cluster.post(COMPLETIONS, &body);
            tokio::select! {
                answer = second => panic!("{answer:?}"),
                () = waiting(&cluster, "decode", 1.0) => {}
            }
        }
        waiting(&cluster, "decode", 0.0).await;
        let third = cluster.post(COMPLETIONS, &body);
        let release = async {
            waiting(&cluster, "decode", 1.0).await;
            gate.release();
        };
        tokio::join!(third, release).0
    };
    let (first, third) = tokio::join!(first, arrange);
    assert_eq!((first.status, third.status), (200, 200));
    assert_eq!(generations(cluster.p()).len(), 2, "the one that left had no prefill");
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn whose_turn_does_not_come_gets_429_and_the_urgent_goes_first() {
    let cluster = limited(|limits| {
        limits.decode.requests = 1;
        limits.longest_wait = Duration::from_millis(300);
    })
    .start()
    .await;
    let gate = cluster.d().faults().hold(Stage::Arrival, Leg::Decode);
    let body = completion(PROMPT, 2);
    let arrange = async {
        gate.arrived(1).await;
        let answer = cluster.post(COMPLETIONS, &body).await;
        cluster.assert_error(&answer, 429, "queue_timeout");
        gate.release();
    };
    let (first, ()) = tokio::join!(cluster.post(COMPLETIONS, &body), arrange);
    assert_eq!(first.status, 200);
    cluster.finish().await;

    let cluster = limited(|limits| limits.decode.requests = 1).start().await;
    let gate = cluster.d().faults().hold(Stage::Arrival, Leg::Decode);
    let prompts = ["first first first", "second second second", "third third third"];
    let post = async |prompt: &'static str, headers: &[(&str, &str)]| {
        let body = completion(prompt, 2);
        cluster.post_bytes(COMPLETIONS, body.to_string(), headers).await.status
    };
    let second = async {
        gate.arrived(1).await;
        post(prompts[1], &[]).await
    };
    let third = async {
        waiting(&cluster, "decode", 1.0).await;
        post(prompts[2], &[("x-kvbaton-priority", "-1")]).await
    };
    let release = async {
        waiting(&cluster, "decode", 2.0).await;
        gate.release();
    };
    let all = tokio::join!(post(prompts[0], &[]), second, third, release);
    assert_eq!((all.0, all.1, all.2), (200, 200, 200));
    let order: Vec<String> = generations(cluster.p())
        .iter()
        .map(|seen| {
            serde_json::from_slice::<Value>(&seen.body).unwrap()["prompt"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(order, [prompts[0], prompts[2], prompts[1]]);
    let answer =
        cluster.post_bytes(COMPLETIONS, completion("x", 1).to_string(), &[("x-kvbaton-priority", "high")]);
    cluster.assert_error(&answer.await, 400, "invalid_priority");
    cluster.finish().await;
}

#[tokio::test]
async fn models_and_keys_have_limits_of_their_own() {
    let key = |name: &str, secret: &str| Key {
        name: name.into(),
        sha256: vec![SecretDigest::of(secret).unwrap().to_hex()],
        certificates: Vec::new(),
        models: Vec::new(),
    };
    let keys = vec![key("busy", "sk-busy-busy-busy"), key("calm", "sk-calm-calm-calm")];
    let cluster = limited(move |limits| {
        limits.keys =
            vec![NamedLimits { name: "busy".into(), rate: 0.001, burst: 2, ..NamedLimits::default() }];
        limits.models =
            vec![NamedLimits { name: "sim".into(), requests: 1, waiting: 1, ..NamedLimits::default() }];
        limits.longest_wait = Duration::ZERO;
    })
    .config(move |config| config.keys = keys.clone())
    .start()
    .await;
    let post = async |secret: &str| {
        let bearer = format!("Bearer {secret}");
        let body = completion(PROMPT, 2).to_string();
        cluster.post_bytes(COMPLETIONS, body, &[("authorization", &bearer)]).await
    };
    for _ in 0..2 {
        assert_eq!(post("sk-busy-busy-busy").await.status, 200);
    }
    let answer = post("sk-busy-busy-busy").await;
    cluster.assert_error(&answer, 429, "rate_limit_exceeded");
    assert!((900..=1000).contains(&retry_after(&answer)), "one in a thousand seconds: {answer:?}");
    assert_eq!(post("sk-calm-calm-calm").await.status, 200, "another key's rate is its own");
    let gate = cluster.d().faults().hold(Stage::Arrival, Leg::Decode);
    let arrange = async {
        gate.arrived(1).await;
        let answer = post("sk-calm-calm-calm").await;
        cluster.assert_error(&answer, 429, "model_saturated");
        gate.release();
    };
    assert_eq!(tokio::join!(post("sk-calm-calm-calm"), arrange).0.status, 200);
    cluster.finish().await;
}

#[tokio::test]
async fn what_asks_for_too_much_is_refused_before_any_engine() {
    let cluster = limited(|limits| {
        limits.max_tokens = 10;
        limits.prompt_bytes = 60;
    })
    .start()
    .await;
    let too_many = [
        (COMPLETIONS, completion("a", 11), "max_tokens"),
        (CHAT, chat("a", 11), "max_tokens"),
        (
            CHAT,
            json!({"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 11}),
            "max_completion_tokens",
        ),
        (
            "/v1/responses",
            json!({"model": "sim", "input": "a", "max_output_tokens": "11"}),
            "max_output_tokens",
        ),
    ];
    for (path, body, field) in too_many {
        let answer = cluster.post(path, &body).await;
        cluster.assert_error(&answer, 400, "max_tokens_too_large");
        assert_eq!(answer.json()["error"]["param"], field);
    }
    let long = "a".repeat(60);
    for (path, body) in [
        (COMPLETIONS, completion(&long, 2)),
        (CHAT, chat(&long, 2)),
        ("/v1/responses", json!({"model": "sim", "input": long})),
    ] {
        cluster.assert_error(&cluster.post(path, &body).await, 400, "prompt_too_large");
    }
    assert_eq!(cluster.post(COMPLETIONS, &completion("a", 10)).await.status, 200);
    assert_eq!(cluster.post(CHAT, &chat("a", 10)).await.status, 200);
    assert_eq!(generations(cluster.p()).len(), 2);
    cluster.finish().await;
}

#[tokio::test]
async fn the_limit_follows_the_engines_that_are_there() {
    let cluster = limited(|limits| limits.decode.per_engine = 3).decode(2).start().await;
    let limit = async || cluster.metric("kvbaton_admission_limit", &[("stage", "decode")]).await;
    cluster.wait_for("three places for each of two", async || limit().await == 6.0).await;
    let drained = cluster.send("POST", "/admin/peers/decode-2/drain?timeout=0", &[], "").await;
    assert_eq!(drained.status, 200, "{drained:?}");
    cluster.wait_for("three places for the one that is left", async || limit().await == 3.0).await;
    bounded("a request", cluster.post(COMPLETIONS, &completion(PROMPT, 2))).await;
    cluster.finish().await;
}
