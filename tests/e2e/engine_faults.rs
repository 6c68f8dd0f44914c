//! Engines that refuse, break, stay silent or are gone: a clear error in bounded time, and no KV left.

use std::time::{Duration, Instant};

use engine_sim::{ArmedFault, Fault, Leg, Stage};
use kvbaton_proxy::Role;
use serde_json::{Value, json};

use crate::support::{
    CHAT, COMPLETIONS, Cluster, FakeEngine, PROMPT, Step, chat, completion, generations, http_answer,
    single_text,
};

const SHORT: Duration = Duration::from_millis(800);

async fn cluster(warnings: &[&'static str]) -> Cluster {
    let impatient = |config: &mut kvbaton::config::Config| {
        config.timeouts.prefill = SHORT;
        config.timeouts.decode_head = SHORT;
        // The first failure must be seen by the request, not by a probe.
        config.probe.interval = Duration::from_secs(60);
    };
    Cluster::builder().config(impatient).warns(warnings).start().await
}

fn arm(engine: &engine_sim::Engine, leg: Leg, fault: Fault) {
    engine.faults().arm(ArmedFault { fault, leg, sticky: false });
}

/// The fault must give this error for both dialects, streamed and not, and leave nothing behind.
async fn gives(leg: Leg, fault: Fault, status: u16, code: &str) {
    let cluster = cluster(&["engine"]).await;
    for (path, body) in [(COMPLETIONS, completion(PROMPT, 6)), (CHAT, chat(PROMPT, 6))] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            let engine = if leg == Leg::Prefill { cluster.p() } else { cluster.d() };
            arm(engine, leg, fault.clone());
            if let Fault::Reset { .. } = fault {
                // A kept connection that ends so is taken for an idle one, and the request sent again.
                engine.faults().clear();
                assert_eq!(cluster.post(path, &body).await.status, 200);
                arm(engine, leg, fault.clone());
                arm(engine, leg, fault.clone());
            }
            let start = Instant::now();
            let answer = cluster.post(path, &body).await;
            assert!(start.elapsed() < Duration::from_secs(4), "took {:?}", start.elapsed());
            cluster.assert_error(&answer, status, code);
            assert_eq!(answer.json()["error"]["type"], "upstream_error");
            cluster.wait_no_blocks().await;
            cluster.wait_idle().await;
        }
    }
    if leg == Leg::Prefill && !matches!(fault, Fault::Reset { .. }) {
        assert_eq!(generations(cluster.d()).len(), 0);
    }
    assert_eq!(cluster.p().stats().kv_expired, 0);
    assert_eq!(
        cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.generated(),
        single_text(COMPLETIONS, &completion(PROMPT, 6)).await
    );
    cluster.finish().await;
}

fn broken(status: u16) -> Fault {
    Fault::Refuse {
        status,
        body: json!({"error": {"message": "http://10.0.0.1:5600 broke", "code": status}}),
    }
}

#[tokio::test]
async fn a_prefill_engine_that_answers_500_gives_502() {
    gives(Leg::Prefill, broken(500), 502, "prefill_failed").await;
}

#[tokio::test]
async fn a_prefill_engine_that_resets_gives_502() {
    gives(Leg::Prefill, Fault::Reset { after_bytes: 0 }, 502, "upstream_reset").await;
}

#[tokio::test]
async fn a_prefill_engine_that_is_silent_gives_504() {
    gives(Leg::Prefill, Fault::Stall { stage: Stage::Arrival }, 504, "upstream_timeout").await;
}

#[tokio::test]
async fn a_decode_engine_that_resets_before_its_head_gives_502() {
    let engine = FakeEngine::start(vec![Step::Reset]).await;
    let cluster =
        Cluster::builder().decode(0).peer(Role::Decode, &engine.url()).warns(&["decode"]).start().await;
    for (path, body) in [(COMPLETIONS, completion(PROMPT, 6)), (CHAT, chat(PROMPT, 6))] {
        let answer = cluster.post(path, &body).await;
        cluster.assert_error(&answer, 502, "upstream_reset");
        assert_eq!(answer.json()["error"]["type"], "upstream_error");
    }
    cluster.finish().await;
}

#[tokio::test]
async fn a_decode_engine_that_is_silent_gives_504() {
    gives(Leg::Decode, Fault::Stall { stage: Stage::Arrival }, 504, "upstream_timeout").await;
}

#[tokio::test]
async fn item_45_a_decode_engine_that_keeps_its_head_back_gives_504() {
    gives(Leg::Decode, Fault::Stall { stage: Stage::BeforeHead }, 504, "upstream_timeout").await;
}

#[tokio::test]
async fn a_prefill_engines_4xx_is_relayed() {
    let cluster = cluster(&[]).await;
    for status in [400, 404, 422, 429] {
        let body = json!({"error": {"message": "no", "type": "X", "param": null, "code": status}});
        arm(cluster.p(), Leg::Prefill, Fault::Refuse { status, body: body.clone() });
        let mut sent = completion(PROMPT, 6);
        sent["stream"] = json!(status == 422);
        let answer = cluster.post(COMPLETIONS, &sent).await;
        assert_eq!((answer.status, answer.json()), (status, body));
        assert!(answer.header("content-type").starts_with("application/json"));
    }
    assert_eq!(generations(cluster.d()).len(), 0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_prompt_over_the_context_is_refused_as_the_engine_says_it() {
    let cluster = cluster(&[]).await;
    let body = completion(&"x".repeat(9000), 6);
    let alone = crate::support::single(COMPLETIONS, &body).await;
    assert_eq!(alone.status, 400);
    let answer = cluster.post(COMPLETIONS, &body).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["error"]["type"], alone.json()["error"]["type"]);
    assert_eq!(generations(cluster.d()).len(), 0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_prefill_engine_that_is_gone_gives_502() {
    let mut cluster = cluster(&["prefill"]).await;
    cluster.prefill.remove(0).kill().await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_error(&answer, 502, "upstream_connect");
    assert_eq!(generations(cluster.d()).len(), 0);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_decode_engine_that_is_gone_gives_502() {
    let mut cluster = cluster(&["decode"]).await;
    cluster.decode.remove(0).kill().await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_error(&answer, 502, "upstream_connect");
    cluster.finish().await;
}

#[tokio::test]
async fn an_engine_that_dies_while_it_generates_gives_502() {
    let mut cluster = cluster(&["decode"]).await;
    let gate = cluster.d().faults().hold(Stage::BeforeHead, Leg::Decode);
    let mut wire = crate::support::Wire::open(
        cluster.addr,
        &crate::support::request(COMPLETIONS, &[], &completion(PROMPT, 6).to_string()),
    )
    .await;
    gate.arrived(1).await;
    cluster.decode.remove(0).kill().await;
    assert_eq!(wire.head().await.0, 502);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

/// A prefill engine whose bytes are no usable answer, for the policy that goes on without it.
async fn prefill_bytes(bytes: Vec<u8>) -> (u16, Value, Cluster, FakeEngine) {
    let engine = FakeEngine::start(vec![Step::Send(bytes)]).await;
    let cluster =
        Cluster::builder().prefill(0).peer(Role::Prefill, &engine.url()).warns(&["prefill"]).start().await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_hides_engines(&answer);
    assert!(!cluster.d().stats().dead);
    assert_eq!(engine.seen().len(), 1);
    (answer.status, answer.json(), cluster, engine)
}

#[tokio::test]
async fn a_prefill_engine_that_does_not_speak_http_gives_502() {
    let (status, body, cluster, _engine) = prefill_bytes(b"\x00\x01garbage\r\n\r\n".to_vec()).await;
    assert_eq!((status, &body["error"]["code"]), (502, &json!("upstream_protocol")));
    cluster.finish().await;
}

#[tokio::test]
async fn a_prefill_answer_that_is_cut_gives_502() {
    let cut =
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{\"id\":".to_vec();
    let (status, body, cluster, _engine) = prefill_bytes(cut).await;
    assert_eq!((status, &body["error"]["code"]), (502, &json!("upstream_reset")));
    cluster.finish().await;
}

/// A 200 that is no completion is a missing hand-off: the decode engine does it all, with a warning.
async fn garbage(text: &str) {
    let (status, body, cluster, _engine) =
        prefill_bytes(http_answer("200 OK", "application/json", text)).await;
    assert_eq!(status, 200, "{text}: {body}");
    let expected = single_text(COMPLETIONS, &completion(PROMPT, 6)).await;
    assert_eq!(body["choices"][0]["text"], expected);
    assert_eq!((cluster.d().stats().plain_requests, cluster.d().stats().decode_requests), (1, 0));
    assert_eq!(cluster.relayed().await, 0.0);
    assert_eq!(cluster.metric("kvbaton_handoffs_total", &[]).await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_prefill_answer_that_is_no_json_is_never_silent() {
    garbage("<html>it works</html>").await;
}

#[tokio::test]
async fn a_prefill_answer_that_is_empty_is_never_silent() {
    garbage("").await;
}

#[tokio::test]
async fn a_prefill_answer_that_is_no_object_is_never_silent() {
    garbage("[1,2,3]").await;
}

#[tokio::test]
async fn a_prefill_answer_that_is_truncated_json_is_never_silent() {
    garbage(r#"{"choices":[{"text":"a"}],"kv_transfer_params":{"do_remote_prefill":tr"#).await;
}

#[tokio::test]
async fn item_52_without_a_prefill_engine_the_answer_says_so() {
    let cluster = Cluster::builder().prefill(0).warns(&["no_prefill"]).unready().start().await;
    cluster
        .wait_for("the decode engine is ready", async || {
            cluster.get("/readyz").await.json()["decode_ready"] == 1
        })
        .await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_error(&answer, 503, "no_prefill");
    assert!(answer.header("retry-after").parse::<u32>().is_ok(), "{answer:?}");
    assert_eq!(generations(cluster.d()).len(), 0);
    cluster.finish().await;
}

#[tokio::test]
async fn item_53_without_a_decode_engine_no_prefill_is_started() {
    let cluster = Cluster::builder().decode(0).warns(&["no_decode"]).unready().start().await;
    cluster
        .wait_for("the prefill engine is ready", async || {
            cluster.get("/readyz").await.json()["prefill_ready"] == 1
        })
        .await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_error(&answer, 503, "no_decode");
    assert_eq!(generations(cluster.p()).len(), 0);
    cluster.finish().await;
}

#[tokio::test]
async fn an_answer_over_the_limit_gives_502() {
    let answer = format!(r#"{{"choices":[{{"text":"{}"}}]}}"#, "x".repeat(300 << 10));
    let engine =
        FakeEngine::start(vec![Step::Send(http_answer("200 OK", "application/json", &answer))]).await;
    let cluster = Cluster::builder()
        .decode(0)
        .peer(Role::Decode, &engine.url())
        .config(|config| config.limits.answer_bytes = 256 << 10)
        .warns(&["decode"])
        .start()
        .await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await;
    cluster.assert_error(&answer, 502, "upstream_too_large");
    cluster.finish().await;
}
