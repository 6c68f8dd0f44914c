//! Engines that fail are left out, tried again and taken back; no leg pays for the other's failures
//! (field notes 50 and 56).

use std::time::{Duration, Instant};

use engine_sim::{ArmedFault, Engine, Fault, Leg};
use kvbaton::config::Config;
use kvbaton_proxy::Role;
use serde_json::{Value, json};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use crate::support::{
    COMPLETIONS, Cluster, FakeEngine, PROMPT, SOON, Step, completion, generations, http_answer, single_text,
};

fn quiet_probes(config: &mut Config) {
    // The first failure must be seen by the request, not by a probe.
    config.probe.interval = Duration::from_secs(60);
    config.retry.burst = 1000;
}

fn strict(config: &mut Config) {
    quiet_probes(config);
    config.breaker.failures = 2;
    config.breaker.pause = Duration::from_secs(600);
    config.breaker.longest_pause = Duration::from_secs(600);
    config.breaker.slow_start = Duration::ZERO;
    config.breaker.floor = 0.3;
}

fn always(engine: &Engine, leg: Leg, status: u16) {
    let body = json!({"error": {"message": "no", "type": "t", "param": null, "code": status}});
    engine.faults().arm(ArmedFault { fault: Fault::Refuse { status, body }, leg, sticky: true });
}

async fn health(cluster: &Cluster, id: &str) -> Value {
    let all = cluster.get("/admin/peers").await.json();
    let peers = all["peers"].as_array().unwrap();
    peers.iter().find(|peer| peer["id"] == id).unwrap()["health"].clone()
}

async fn breaker(cluster: &Cluster, id: &str) -> String {
    health(cluster, id).await["breaker"].as_str().unwrap().to_owned()
}

async fn is_right(cluster: &Cluster) {
    let body = completion(PROMPT, 4);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
}

#[tokio::test]
async fn item_50_an_engine_with_good_probes_and_failing_requests_is_left_out() {
    let cluster = Cluster::builder().prefill(2).config(strict).warns(&["engine failed"]).start().await;
    always(&cluster.prefill[0], Leg::Prefill, 503);
    for _ in 0..8 {
        is_right(&cluster).await;
    }
    assert_eq!(breaker(&cluster, "prefill-1").await, "open");
    assert_eq!(generations(&cluster.prefill[0]).len(), 2, "after that it is asked no more");
    for other in ["prefill-2", "decode-1"] {
        let health = health(&cluster, other).await;
        assert_eq!((&health["breaker"], &health["opened"]), (&json!("closed"), &json!(0)), "{other}");
    }
    let label = [("peer", "prefill-1"), ("stage", "prefill")];
    assert_eq!(cluster.metric("kvbaton_peer_breaker_state", &label).await, 2.0);
    assert_eq!(cluster.metric("kvbaton_peer_breaker_openings", &label).await, 1.0);
    cluster.finish().await;
}

#[tokio::test]
async fn an_engine_that_works_again_is_tried_and_taken_back() {
    let impatient = |config: &mut Config| {
        strict(config);
        config.breaker.pause = Duration::from_millis(50);
    };
    let cluster = Cluster::builder().decode(2).config(impatient).warns(&["engine failed"]).start().await;
    always(&cluster.decode[1], Leg::Any, 503);
    cluster
        .wait_for("the breaker has opened", async || {
            is_right(&cluster).await;
            health(&cluster, "decode-2").await["opened"] != 0
        })
        .await;
    cluster.decode[1].faults().clear();
    let before = generations(&cluster.decode[1]).len();
    cluster
        .wait_for("trials have closed the breaker", async || {
            is_right(&cluster).await;
            breaker(&cluster, "decode-2").await == "closed"
        })
        .await;
    for _ in 0..4 {
        is_right(&cluster).await;
    }
    assert!(generations(&cluster.decode[1]).len() >= before + 4, "two trials and its share");
    assert_eq!(health(&cluster, "decode-2").await["share"], 1.0);
    assert_eq!(health(&cluster, "prefill-1").await["opened"], 0);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn where_most_engines_fail_none_is_left_out() {
    let floor = |config: &mut Config| {
        strict(config);
        config.breaker.floor = 0.5;
        config.retry.attempts = 0;
    };
    let cluster = Cluster::builder().prefill(2).config(floor).warns(&["failed"]).start().await;
    for engine in &cluster.prefill {
        always(engine, Leg::Prefill, 503);
    }
    for _ in 0..6 {
        assert_eq!(cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await.status, 502);
    }
    assert_eq!(
        [breaker(&cluster, "prefill-1").await, breaker(&cluster, "prefill-2").await],
        ["open", "open"]
    );
    for engine in &cluster.prefill {
        engine.faults().clear();
    }
    // No breaker's pause is over, and yet they are asked.
    for _ in 0..4 {
        is_right(&cluster).await;
    }
    cluster.finish().await;
}

/// A decode engine that says 500 where it cannot read the blocks is to blame only if others can.
#[tokio::test]
async fn a_hand_off_that_one_of_two_decode_engines_cannot_read_is_that_ones_failure() {
    let cluster = Cluster::builder().decode(2).config(strict).warns(&["engine failed"]).start().await;
    for _ in 0..4 {
        is_right(&cluster).await;
    }
    always(&cluster.decode[0], Leg::Decode, 500);
    for _ in 0..20 {
        cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await;
    }
    assert_eq!(breaker(&cluster, "decode-1").await, "open");
    assert_eq!(health(&cluster, "prefill-1").await["failures_in_a_row"], 0, "P is not blamed");
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_prefill_engine_whose_blocks_cannot_be_read_is_left_out_and_the_decode_engine_is_not() {
    let cluster = Cluster::builder().config(strict).warns(&["engine failed"]);
    // Its hand-offs are sound; whoever gets one says 500, as where the blocks cannot be read.
    let hand_off = json!({"id": "x", "object": "text_completion", "created": 1, "model": "sim",
        "choices": [{"index": 0, "text": "a", "finish_reason": "length", "logprobs": null}],
        "usage": {"prompt_tokens": 77, "completion_tokens": 1, "total_tokens": 78},
        "kv_transfer_params": {"do_remote_prefill": true, "do_remote_decode": false,
            "remote_block_ids": [[0, 1, 2, 3, 4, 5]], "remote_engine_id": "nobody", "remote_request_id": "x",
            "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1}});
    let broken =
        FakeEngine::start(vec![Step::Send(http_answer("200 OK", "application/json", &hand_off.to_string()))])
            .await;
    let cluster =
        cluster.peer(Role::Prefill, &broken.url()).may_warn(&["hand-off", "released"]).start().await;
    cluster
        .wait_for("both prefill engines are ready", async || {
            cluster.get("/readyz").await.json()["prefill_ready"] == 2
        })
        .await;
    let mut answers = Vec::new();
    for _ in 0..16 {
        let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await;
        answers.push((answer.status, answer.text()));
    }
    assert_eq!(health(&cluster, "decode-1").await["opened"], 0, "it reads from the other one");
    assert_eq!(breaker(&cluster, "prefill-2").await, "open", "{answers:?}");
    assert_eq!(breaker(&cluster, "prefill-1").await, "closed");
    cluster.finish_whatever_was_warned().await;
}

#[tokio::test]
async fn the_router_starts_with_whatever_is_up() {
    let free = crate::support::listen().await.local_addr().unwrap();
    let cluster = Cluster::builder()
        .peer(Role::Prefill, &format!("http://{free}"))
        .peer(Role::Decode, &format!("http://{free}/other"))
        .may_warn(&["not usable"])
        .start()
        .await;
    for _ in 0..4 {
        is_right(&cluster).await;
    }
    assert_eq!(cluster.metric("kvbaton_upstream_failures_total", &[]).await, 0.0);
    cluster.finish_whatever_was_warned().await;
}

/// An address that answers probes once and from then on no connection attempt.
struct Swallowing {
    url: String,
    task: JoinSet<()>,
    swallows: tokio::sync::oneshot::Sender<tokio::sync::oneshot::Sender<Vec<TcpStream>>>,
}

impl Swallowing {
    async fn start() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(1).unwrap();
        let addr = listener.local_addr().unwrap();
        let (swallows, mut told) =
            tokio::sync::oneshot::channel::<tokio::sync::oneshot::Sender<Vec<TcpStream>>>();
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut answers = JoinSet::new();
            let done = loop {
                let stream = tokio::select! {
                    done = &mut told => break done,
                    accepted = listener.accept() => accepted.unwrap().0,
                };
                answers.spawn(answer_probe(stream));
            };
            // Full, the backlog lets the kernel drop whatever else comes.
            let mut waiting = Vec::new();
            while let Ok(Ok(stream)) =
                tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(addr)).await
            {
                waiting.push(stream);
            }
            if let Ok(done) = done {
                let _ = done.send(waiting);
            }
            std::future::pending::<()>().await;
            drop(listener);
        });
        Self { url: format!("http://{addr}"), task, swallows }
    }

    /// From now on nothing is accepted, as long as the result lives.
    async fn swallow(self) -> (JoinSet<()>, Vec<TcpStream>) {
        let (done, full) = tokio::sync::oneshot::channel();
        let _ = self.swallows.send(done);
        (self.task, full.await.unwrap())
    }
}

async fn answer_probe(mut stream: TcpStream) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let body = if head.starts_with(b"GET /v1/models") {
        r#"{"object":"list","data":[{"id":"sim","object":"model"}]}"#
    } else {
        r#"{"version":"0.32.0"}"#
    };
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let _ = stream.write_all(answer.as_bytes()).await;
    let _ = stream.shutdown().await;
}

#[tokio::test]
async fn an_address_that_swallows_connections_holds_up_one_request_at_most() {
    const CONNECT: Duration = Duration::from_secs(8);
    let hole = Swallowing::start().await;
    let slow = |config: &mut Config| {
        quiet_probes(config);
        config.timeouts.connect = CONNECT;
        config.timeouts.slow_connect = Duration::from_millis(200);
    };
    let cluster = Cluster::builder()
        .peer(Role::Prefill, &hole.url)
        .config(slow)
        .warns(&["engine failed"])
        .may_warn(&["not usable"])
        .start()
        .await;
    cluster
        .wait_for("both prefill engines are ready", async || {
            cluster.get("/readyz").await.json()["prefill_ready"] == 2
        })
        .await;
    let _backlog = hole.swallow().await;
    let expected = single_text(COMPLETIONS, &completion(PROMPT, 4)).await;
    let one = async || {
        let began = Instant::now();
        let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 4)).await;
        assert_eq!(answer.generated(), expected);
        began.elapsed()
    };
    let at_once = futures_util::future::join_all((0..12).map(|_| one())).await;
    let held_up = at_once.iter().filter(|took| **took >= CONNECT).count();
    assert!(held_up <= 1, "{at_once:?}");
    let after = Instant::now();
    for _ in 0..6 {
        one().await;
    }
    assert!(after.elapsed() < SOON.max(CONNECT), "it is known by now");
    cluster.finish().await;
}
