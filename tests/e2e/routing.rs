//! Which engines requests go to: policies, why a pair was chosen, and requests that stay on one engine.

use std::cell::Cell;
use std::time::Duration;

use engine_sim::{EngineConfig, Role};
use kvbaton::config::Config;
use kvbaton_proxy::{DisaggregationMode, LabelCost, Policy};
use serde_json::json;

use crate::support::{COMPLETIONS, Cluster, PROMPT, completion, generations};

async fn cluster(tune: impl Fn(&mut Config) + 'static) -> Cluster {
    Cluster::builder().prefill(2).decode(2).config(tune).start().await
}

/// How many requests each engine has had: of both stages.
fn counts(cluster: &Cluster) -> [Vec<usize>; 2] {
    let count =
        |engines: &[engine_sim::Engine]| engines.iter().map(|engine| generations(engine).len()).collect();
    [count(&cluster.prefill), count(&cluster.decode)]
}

async fn send(cluster: &Cluster, session: &str) {
    let body = completion(PROMPT, 2).to_string();
    let headers = [("content-type", "application/json"), ("x-session-id", session)];
    let answer = cluster.send("POST", COMPLETIONS, &headers, body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
}

#[tokio::test]
async fn taking_turns_gives_each_engine_its_part() {
    for policy in [Policy::RoundRobin, Policy::Joint, Policy::LeastLoaded] {
        let cluster = cluster(move |config| {
            (config.routing.prefill, config.routing.decode) = (policy, policy);
        })
        .await;
        // So few that no rate is learnt yet.
        for _ in 0..4 {
            send(&cluster, "").await;
        }
        assert_eq!(counts(&cluster), [[2, 2], [2, 2]], "{policy:?}");
        cluster.finish().await;
    }
}

/// Equal engines take turns until the router has learnt how long each of them takes.
#[tokio::test]
async fn a_slow_prefill_engine_gets_fewer_requests_once_that_is_learnt() {
    let made = Cell::new(0);
    let first_is_slow = move |config: &mut EngineConfig| {
        made.set(made.get() + 1);
        let is_slow = config.role == Role::Prefill && made.get() == 1;
        config.prefill_time_per_token = Duration::from_micros(if is_slow { 8000 } else { 20 });
    };
    let cluster = Cluster::builder().prefill(2).decode(2).engine(first_is_slow).start().await;
    // Each with a beginning of its own, so that nothing is cached.
    let send = async |number: usize| {
        let answer = cluster.post(COMPLETIONS, &completion(&format!("{number} {PROMPT}"), 2)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    };
    for number in 0..10 {
        send(number).await;
    }
    let [learnt, _] = counts(&cluster);
    assert!(learnt[0] >= 3, "it had its turns as long as nothing was known: {learnt:?}");
    for number in 10..20 {
        send(number).await;
    }
    let [of_prefill, _] = counts(&cluster);
    let slow = of_prefill[0] - learnt[0];
    assert!(slow <= 2, "{slow} of ten went to the slow one: {of_prefill:?}");
    let shown = cluster.get("/admin/explain?model=sim&prompt_tokens=80").await.json();
    let cheapest = |prefill: &str| {
        let pairs = shown["pairs"].as_array().unwrap().iter();
        let costs =
            pairs.filter(|pair| pair["prefill"] == prefill).map(|pair| pair["total"].as_f64().unwrap());
        costs.fold(f64::INFINITY, f64::min)
    };
    assert!(cheapest("prefill-1") > 2.0 * cheapest("prefill-2"), "{shown}");
    cluster.finish().await;
}

#[tokio::test]
async fn a_session_and_a_prompts_beginning_stay_with_their_engines() {
    for policy in [Policy::Session, Policy::ConsistentHash, Policy::PrefixAffinity] {
        let cluster = cluster(move |config| {
            (config.routing.prefill, config.routing.decode) = (policy, Policy::RoundRobin);
            config.routing.prefix.chunk_bytes = 16;
            // The prompt is short: what it costs must outweigh what counts as alike.
            config.routing.prompt_tokens_per_second = 100.0;
        })
        .await;
        for _ in 0..2 {
            send(&cluster, "one").await;
        }
        let [of_prefill, of_decode] = counts(&cluster);
        let most = of_prefill.iter().max().copied();
        assert_eq!((most, of_decode), (Some(2), vec![1, 1]), "{policy:?}");
        cluster.finish().await;
    }
}

#[tokio::test]
async fn a_model_can_have_policies_of_its_own() {
    let cluster = cluster(|config| {
        let entry = "model = \"sim\"\nprefill = \"session\"\ndecode = \"session\"";
        config.routing.models = vec![toml::from_str(entry).unwrap()];
    })
    .await;
    let shown = cluster.get("/admin/explain?model=sim").await.json();
    assert_eq!((&shown["prefill_policy"], &shown["decode_policy"]), (&json!("session"), &json!("session")));
    let shown = cluster.get("/admin/explain?model=other").await.json();
    assert_eq!(shown["prefill_policy"], "joint");
    cluster.finish().await;
}

#[tokio::test]
async fn an_explanation_names_the_pair_its_cost_and_who_was_ruled_out() {
    let cluster = cluster(|config| {
        config.routing.explain_header = true;
        config.routing.locality = vec![LabelCost { label: "zone".into(), cost: Duration::from_secs(5) }];
        for (list, zones) in [(&mut config.prefill, ["a", "b"]), (&mut config.decode, ["a", "a"])] {
            for (peer, zone) in list.iter_mut().zip(zones) {
                peer.labels.insert("zone".to_owned(), zone.to_owned());
            }
        }
    })
    .await;
    let ask = json!({"prompt": PROMPT, "prompt_tokens": 4000}).to_string();
    let json_type = [("content-type", "application/json")];
    let shown = cluster.send("POST", "/admin/explain", &json_type, ask).await.json();
    assert_eq!(shown["chosen"]["prefill"], "prefill-1", "{shown}");
    assert_eq!(shown["chosen"]["decision"], "disaggregated");
    let pairs = shown["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 4);
    assert_eq!(pairs[0]["cost"]["locality"], 0.0);
    assert_eq!((&pairs[3]["prefill"], &pairs[3]["cost"]["locality"]), (&json!("prefill-2"), &json!(5.0)));
    assert_eq!(shown["ruled_out"], json!([]));

    let drained = cluster.send("POST", "/admin/peers/prefill-1/drain?timeout=0", &[], "").await;
    assert_eq!(drained.status, 200, "{drained:?}");
    let shown = cluster.get("/admin/explain?prompt_tokens=4000").await.json();
    assert_eq!(shown["ruled_out"], json!([{"peer": "prefill-1", "reason": "drained"}]));
    assert_eq!(shown["chosen"]["prefill"], "prefill-2");

    let headers = [("content-type", "application/json"), ("x-kvbaton-explain", "1")];
    let answer = cluster.send("POST", COMPLETIONS, &headers, completion(PROMPT, 2).to_string()).await;
    assert!(answer.header("x-kvbaton-choice").starts_with("prefill=prefill-2; decode=decode-"), "{answer:?}");
    cluster.assert_hides_engines(&answer);
    let unasked = cluster.post(COMPLETIONS, &completion(PROMPT, 2)).await;
    assert!(!unasked.headers.contains_key("x-kvbaton-choice"));
    cluster.finish().await;
}

#[tokio::test]
async fn a_choice_is_not_told_unless_the_operator_lets_it() {
    let cluster = cluster(|_| {}).await;
    let headers = [("content-type", "application/json"), ("x-kvbaton-explain", "1")];
    let answer = cluster.send("POST", COMPLETIONS, &headers, completion(PROMPT, 2).to_string()).await;
    assert_eq!(answer.status, 200);
    assert!(!answer.headers.contains_key("x-kvbaton-choice"));
    cluster.finish().await;
}

#[tokio::test]
async fn item_65_each_request_that_stays_on_its_decode_engine_is_explained() {
    for (mode, reason, prefills) in [
        (DisaggregationMode::Never, "never", 0),
        (DisaggregationMode::Auto, "short_uncached", 0),
        (DisaggregationMode::Always, "pair", 3),
    ] {
        let cluster = cluster(move |config| config.disaggregation.mode = mode).await;
        for _ in 0..3 {
            send(&cluster, "").await;
        }
        let decision = if prefills == 0 { "decode_only" } else { "disaggregated" };
        let labels = [("decision", decision), ("reason", reason)];
        assert_eq!(cluster.metric("kvbaton_pd_decisions_total", &labels).await, 3.0, "{mode:?}");
        assert_eq!(counts(&cluster)[0].iter().sum::<usize>(), prefills, "{mode:?}");
        cluster.finish().await;
    }
}
