//! What the metrics page says of a request, a hand-off and the fleet.

use serde_json::json;

use crate::support::{CHAT, COMPLETIONS, Cluster, PROMPT, chat, completion, engine_metric};

#[tokio::test]
async fn a_streamed_request_is_measured_from_end_to_end() {
    let cluster = Cluster::builder().start().await;
    let mut body = chat(PROMPT, 40);
    body["stream"] = json!(true);
    assert_eq!(cluster.post(CHAT, &body).await.status, 200);
    let of_model = [("model", "sim")];
    cluster
        .wait_for("the request is over", async || {
            cluster.metric("kvbaton_request_seconds_count", &of_model).await == 1.0
        })
        .await;
    let count = async |name: &str, labels: &[(&str, &str)]| cluster.metric(name, labels).await;
    assert_eq!(count("kvbaton_time_to_first_token_seconds_count", &of_model).await, 1.0);
    // How many chunks the tokens came in is the network's matter.
    let steps = count("kvbaton_inter_token_seconds_count", &of_model).await;
    assert!((1.0..=41.0).contains(&steps), "{steps}");
    for name in ["prefill", "hand_over", "decode_head", "decode", "lease"] {
        assert_eq!(count(&format!("kvbaton_{name}_seconds_count"), &[]).await, 1.0, "{name}");
    }
    let served =
        [("model", "sim"), ("outcome", "served"), ("status", "200"), ("endpoint", "chat_completions")];
    assert_eq!(count("kvbaton_requests_total", &served).await, 1.0);
    let prompt = count("kvbaton_prompt_tokens_total", &of_model).await;
    assert_eq!(prompt, engine_metric(cluster.p(), "vllm:prompt_tokens_total", &[]).await);

    // The bytes are those that the decode engine read.
    let bytes = count("kvbaton_handed_over_bytes_total", &[]).await;
    assert!(bytes > 0.0);
    assert_eq!(bytes, engine_metric(cluster.d(), "vllm:nixl_bytes_transferred_sum", &[]).await);
    assert!(count("kvbaton_handed_over_blocks_total", &[]).await > 0.0);
    assert_eq!(count("kvbaton_handoff_blocks_live", &[]).await, 0.0);
    assert_eq!(count("kvbaton_lease_oldest_seconds", &[]).await, 0.0);

    assert_eq!(count("kvbaton_pairs", &[("verdict", "compatible"), ("used", "true")]).await, 1.0);
    assert_eq!(count("kvbaton_registry_engines", &[("state", "ready")]).await, 2.0);
    assert!(count("kvbaton_registry_payload_bytes", &[]).await > 0.0);
    assert!(count("kvbaton_registry_calls_total", &[("result", "done")]).await >= 2.0);
    cluster.finish().await;
}

#[tokio::test]
async fn an_answer_in_one_piece_is_counted_by_its_own_usage() {
    let cluster = Cluster::builder().start().await;
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 7)).await;
    let usage = answer.json()["usage"].clone();
    assert_eq!(usage["completion_tokens"], 7);
    let of_model = [("model", "sim")];
    cluster
        .wait_for("the request is over", async || {
            cluster.metric("kvbaton_output_tokens_total", &of_model).await == 7.0
        })
        .await;
    let prompt = cluster.metric("kvbaton_prompt_tokens_total", &of_model).await;
    assert_eq!(Some(prompt as u64), usage["prompt_tokens"].as_u64());
    assert_eq!(cluster.metric("kvbaton_time_to_first_token_seconds_count", &of_model).await, 0.0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_made_up_model_makes_no_series_of_its_own() {
    let cluster = Cluster::builder().start().await;
    for number in 0..3 {
        let mut body = completion(PROMPT, 1);
        body["model"] = json!(format!("made-up-{number}"));
        assert_eq!(cluster.post(COMPLETIONS, &body).await.status, 404);
    }
    let others = [("model", "other"), ("status", "404")];
    cluster
        .wait_for("they are counted", async || cluster.metric("kvbaton_requests_total", &others).await == 3.0)
        .await;
    assert!(!cluster.get("/metrics").await.text().contains("made-up"));
    cluster.finish().await;
}
