//! `kvbaton check`: its verdicts, of a router that runs and of settings alone.

use engine_sim::{Fault, LoadFailurePolicy, Role};
use serde_json::Value;

use super::{Said, ask, kvbaton};
use crate::support::Cluster;
use crate::support::process::Program;

async fn check(cluster: &Cluster, more: &[&str]) -> Said {
    kvbaton(&[&["check", "--router", &cluster.url("")], more].concat(), &[]).await
}

/// The results by pair.
fn results(report: &Value) -> Vec<(String, String)> {
    let pairs = report["pairs"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    pairs
        .map(|pair| (format!("{} {}", text(&pair["prefill"]), text(&pair["decode"])), text(&pair["result"])))
        .collect()
}

#[tokio::test]
async fn every_pair_of_a_running_router_hands_off_once() {
    let cluster = Cluster::builder().prefill(2).decode(2).start().await;
    let said = check(&cluster, &[]).await;
    assert_eq!(said.code, 0, "{said:?}");
    said.has(&["prefill-2  decode-1  compatible  works", "good: 4 of 4 pairs hand off"]);
    assert_eq!(said.err, "", "no progress bar where there is no terminal");
    let report = check(&cluster, &["--output", "json"]).await.json();
    assert_eq!(report["good"], true);
    for pair in report["pairs"].as_array().unwrap() {
        assert_eq!((&pair["result"], &pair["read"]), (&"works".into(), &true.into()), "{pair}");
        assert!(pair["blocks"].as_u64().unwrap() > 0, "{pair}");
    }
    let pulls: u64 = cluster.prefill.iter().map(|engine| engine.stats().prefill_requests).sum();
    assert_eq!(pulls, 8, "two rounds over four pairs");
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    for pair in ["prefill-1/prefill-2", "decode-1/prefill-1", "prefill-1/nobody"] {
        let answer = cluster.send("POST", &format!("/admin/pairs/{pair}/try"), &[], "").await;
        cluster.assert_error(&answer, 404, "unknown_peer");
    }
    cluster.finish().await;
}

#[tokio::test]
async fn a_verdict_names_what_is_wrong_and_what_to_do() {
    let cluster = Cluster::builder().start().await;
    cluster.p().faults().once(Fault::DropHandoff);
    let said = check(&cluster, &[]).await;
    assert_eq!(said.code, 1, "{said:?}");
    said.has(&["prefill-1 to decode-1: hand off refused", "--kv-transfer-config", "not good: 0 of 1 pairs"]);

    cluster.d().faults().once(Fault::Refuse { status: 500, body: Value::Null });
    let said = check(&cluster, &[]).await;
    assert_eq!(said.code, 1);
    said.has(&["prefill-1 to decode-1: decode failed: the decode engine answered 500"]);

    assert_eq!(ask(&cluster, &["peers", "quarantine", "prefill-1"]).await.code, 0);
    let report = check(&cluster, &["--output", "json"]).await;
    assert_eq!((report.code, results(&report.json())[0].1.as_str()), (1, "quarantined"));
    assert!(report.json()["findings"][0]["advice"].as_str().unwrap().contains("peers resume"));
    cluster.wait_idle().await;
    cluster.finish_whatever_was_warned().await;
}

#[tokio::test]
async fn an_engine_that_computes_the_prompt_itself_does_not_pass_for_one_that_reads() {
    // Nobody can shake hands with the prefill engine, and the decode engine helps itself.
    let deaf = |engine: &mut engine_sim::EngineConfig| {
        if engine.role == Role::Prefill {
            engine.registry = None;
        }
        engine.load_failure_policy = LoadFailurePolicy::Recompute;
    };
    let cluster = Cluster::builder().engine(deaf).unready().start().await;
    cluster.wait_ready().await;
    let said = check(&cluster, &["--output", "json"]).await;
    assert_eq!(said.code, 1, "{said:?}");
    let report = said.json();
    let pair = &report["pairs"][0];
    assert_eq!((&pair["result"], &pair["read"]), (&"not_read".into(), &false.into()), "{pair}");
    assert!(report["findings"][0]["advice"].as_str().unwrap().contains("VLLM_NIXL_SIDE_CHANNEL_HOST"));
    cluster.finish_whatever_was_warned().await;
}

#[tokio::test]
async fn engines_that_do_not_fit_or_do_not_answer_are_not_sent_anything() {
    let differs = |engine: &mut engine_sim::EngineConfig| {
        if engine.role == Role::Decode {
            engine.model = "another".into();
        }
    };
    let cluster = Cluster::builder()
        .engine(differs)
        .peer(kvbaton_proxy::Role::Decode, "http://127.0.0.1:9")
        .unready()
        .start()
        .await;
    cluster.wait_registered().await;
    cluster
        .wait_for("the engines answer", async || {
            let peers = cluster.get("/admin/peers").await.json();
            let peers = peers["peers"].as_array().unwrap();
            peers.iter().filter(|peer| peer["state"] == "ready").count() == 2
                && peers.iter().any(|peer| peer["state"] == "unreachable")
        })
        .await;
    let said = check(&cluster, &["--output", "json"]).await;
    assert_eq!(said.code, 1, "{said:?}");
    let report = said.json();
    let expected = [("prefill-1 decode-1", "incompatible"), ("prefill-1 decode-2", "decode_unready")];
    assert_eq!(results(&report), expected.map(|(pair, result)| (pair.to_owned(), result.to_owned())));
    let findings = report["findings"].to_string();
    assert!(findings.contains("decode-2 does not answer: probe: connect"), "{findings}");
    assert!(findings.contains("http://127.0.0.1:9/health"), "{findings}");
    assert!(findings.contains("docs/compatibility.md"), "{findings}");
    assert_eq!(cluster.p().stats().prefill_requests, 0);
    cluster.finish_whatever_was_warned().await;
}

#[tokio::test]
async fn settings_are_checked_without_a_running_router() {
    // The simulated fleet of the program itself.
    let said = kvbaton(&["check", "--listen", "127.0.0.1:0"], &[]).await;
    assert_eq!(said.code, 0, "{said:?}");
    said.has(&["checked: the settings of flags and environment", "good: 1 of 1 pairs hand off"]);

    let engine = |role: &str, registry: &str| {
        let args = ["engine", "--role", role, "--registry", registry];
        let program = Program::start(&args, &[]);
        let url = program.url("simulated engine");
        (program, url)
    };
    let reserved = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = reserved.local_addr().unwrap().to_string();
    let base = format!("http://{addr}");
    let (prefill, decode) = (engine("prefill", &base), engine("decode", &base));
    let args = ["check", "--listen", &addr, "--prefill", &prefill.1, "--decode", &decode.1];
    let taken = kvbaton(&args, &[]).await;
    assert_eq!(taken.code, 1, "{taken:?}");
    assert!(taken.err.contains(&format!("kvbaton check --router {base}")), "{taken:?}");
    drop(reserved);
    let said = kvbaton(&args, &[]).await;
    assert_eq!(said.code, 0, "{said:?}");
    said.has(&["compatible  works", "good: 1 of 1 pairs hand off"]);
}

#[tokio::test]
async fn settings_that_cannot_work_are_told_from_engines_that_do_not_answer() {
    let wrong = kvbaton(&["check", "--set", "timeouts.idle=0s", "--prefill", "ftp://x"], &[]).await;
    assert_eq!(wrong.code, 2, "{wrong:?}");
    assert!(wrong.err.contains("timeouts.idle") && wrong.err.contains("prefill"), "{wrong:?}");
    let both = kvbaton(&["check", "--router", "http://127.0.0.1:9", "--listen", "127.0.0.1:0"], &[]).await;
    assert_eq!(both.code, 2, "{both:?}");

    let args = ["check", "--listen", "127.0.0.1:0", "--prefill", "http://127.0.0.1:9", "--wait", "0.5"];
    let said = kvbaton(&args, &[]).await;
    assert_eq!(said.code, 1, "{said:?}");
    said.has(&["there is no decode engine", "prefill-1 does not answer", "not good: 0 of 0 pairs hand off"]);
}
