//! Clients that are answered on threads of their own.

use serde_json::json;

use crate::support::{COMPLETIONS, Cluster, PROMPT, completion, single_text, stream_text};

#[tokio::test]
async fn answers_are_right_on_several_threads_and_all_connections_are_used_again() {
    let cluster = Cluster::builder().threads(3).start().await;
    let expected = single_text(COMPLETIONS, &completion(PROMPT, 6)).await;
    for _ in 0..4 {
        let plain = async || cluster.post(COMPLETIONS, &completion(PROMPT, 6)).await.generated();
        let streamed = async || {
            let mut body = completion(PROMPT, 6);
            body["stream"] = json!(true);
            stream_text(&cluster.post(COMPLETIONS, &body).await.text())
        };
        let both = async || tokio::join!(plain(), streamed());
        for (plain, streamed) in futures_util::future::join_all((0..8).map(|_| both())).await {
            assert_eq!(plain, expected);
            assert_eq!(streamed, expected);
        }
    }
    cluster.wait_no_blocks().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_client_that_leaves_has_its_blocks_freed_from_its_thread() {
    let cluster = Cluster::builder().threads(2).start().await;
    let gate = cluster.d().faults().hold(engine_sim::Stage::Arrival, engine_sim::Leg::Decode);
    let body = completion(PROMPT, 6);
    tokio::select! {
        _ = cluster.post(COMPLETIONS, &body) => panic!("it was answered"),
        () = gate.arrived(1) => {}
    }
    gate.release();
    cluster.wait_no_blocks().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    cluster.wait_idle().await;
    cluster.finish().await;
}
