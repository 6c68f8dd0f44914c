//! Push mode: the prefill engine writes the blocks, and both legs go out at once.

use std::time::Duration;

use engine_sim::{ArmedFault, Engine, Fault, Gate as Hold, Leg, Stage};
use kvbaton_proxy::{Role, TransferMode};
use serde_json::{Value, json};

use crate::support::{
    Builder, CHAT, COMPLETIONS, Cluster, FakeEngine, Gate, PROMPT, Step, Wire, chat, chunk, completion,
    generations, http_answer, parse, request, single_text, sse_head, stream_text,
};

/// Engines that push. Whatever nobody writes is given up well within a test's patience.
fn pushing() -> Builder {
    Cluster::builder()
        .engine(|engine| {
            engine.transfer_mode = TransferMode::Push;
            engine.push_timeout = Duration::from_secs(2);
            engine.lease = Duration::from_secs(4);
        })
        .may_warn(&["the lease has run out", "no push has arrived in time"])
}

fn arm(engine: &Engine, leg: Leg, status: u16) {
    let fault = Fault::Refuse { status, body: json!({"error": {"message": "no", "code": status}}) };
    engine.faults().arm(ArmedFault { fault, leg, sticky: false });
}

async fn pushes(cluster: &Cluster, result: &str) -> f64 {
    cluster.metric("kvbaton_pushes_total", &[("result", result)]).await
}

/// Both legs are under way, and the decode engine has announced its blocks to the other, which is held.
async fn parked(cluster: &Cluster, stream: bool) -> (Hold, Wire) {
    let gate = cluster.p().faults().hold(Stage::Arrival, Leg::Prefill);
    let mut body = completion(PROMPT, 8);
    body["stream"] = json!(stream);
    let wire =
        Wire::open(cluster.addr, &request(COMPLETIONS, &[("connection", "close")], &body.to_string())).await;
    gate.arrived(1).await;
    cluster
        .wait_for("the decode engine waits for blocks", async || {
            cluster.d().stats().waiting_for_remote_kv == 1
        })
        .await;
    (gate, wire)
}

#[tokio::test]
async fn both_legs_go_at_once_and_the_text_is_a_single_engines() {
    let cluster = pushing().start().await;
    for (path, mut body) in [(COMPLETIONS, completion(PROMPT, 8)), (CHAT, chat(PROMPT, 8))] {
        let expected = single_text(path, &body).await;
        assert_eq!(cluster.post(path, &body).await.generated(), expected);
        body["stream"] = true.into();
        assert_eq!(stream_text(&cluster.post(path, &body).await.text()), expected);
    }
    assert_eq!((pushes(&cluster, "at_once").await, pushes(&cluster, "in_turn").await), (4.0, 0.0));
    assert_eq!(cluster.relayed().await, 4.0);
    let (of_prefill, of_decode) = (generations(cluster.p()), generations(cluster.d()));
    for (first, second) in of_prefill.iter().zip(&of_decode) {
        let id = first.headers["x-request-id"].to_str().unwrap();
        assert_eq!(second.headers["x-request-id"], id, "by it the engines find each other");
        let told = &parse(&second.body)["kv_transfer_params"];
        let names = [&told["remote_engine_id"], &told["remote_request_id"]];
        assert_eq!(names, [&json!(cluster.p().engine_id()), &json!(id)]);
        assert_eq!((&told["do_remote_prefill"], &told["tp_size"]), (&json!(true), &json!(1)));
    }
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    cluster.finish().await;
}

#[tokio::test]
async fn the_decode_leg_does_not_wait_for_the_prefill_engine() {
    let cluster = pushing().start().await;
    let expected = single_text(COMPLETIONS, &completion(PROMPT, 8)).await;
    let (gate, mut wire) = parked(&cluster, false).await;
    assert_eq!(cluster.p().stats().running, 0);
    drop(gate);
    let answer = wire.everything().await;
    assert!(answer.contains(&json!(expected).to_string()), "{answer}");
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn clients_may_take_one_id_for_all_their_requests() {
    let cluster = pushing().start().await;
    let headers = [("content-type", "application/json"), ("x-request-id", "mine")];
    let prompts = ["one is here", "two is there", "three is nowhere at all"];
    let sent = prompts.map(|prompt| {
        let body = completion(prompt, 6);
        let cluster = &cluster;
        async move {
            let answer = cluster.send("POST", COMPLETIONS, &headers, body.to_string()).await;
            assert_eq!(answer.generated(), single_text(COMPLETIONS, &body).await);
            assert_eq!(answer.header("x-request-id"), "mine");
        }
    });
    futures_util::future::join_all(sent).await;
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn the_legs_go_in_turn_where_the_operator_wants_it() {
    let cluster = pushing().config(|config| config.hand_off.push_at_once = false).start().await;
    let body = completion(PROMPT, 8);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    assert_eq!((pushes(&cluster, "at_once").await, pushes(&cluster, "in_turn").await), (0.0, 1.0));
    let id = |engine| generations(engine)[0].headers["x-request-id"].clone();
    assert_eq!(id(cluster.p()), id(cluster.d()));
    cluster.wait_no_blocks().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    cluster.finish().await;
}

#[tokio::test]
async fn a_prefill_engine_that_refuses_ends_the_decode_leg_and_its_word_counts() {
    let cluster = pushing().start().await;
    arm(cluster.p(), Leg::Prefill, 422);
    let (gate, mut wire) = parked(&cluster, true).await;
    drop(gate);
    let answer = wire.everything().await;
    assert!(answer.starts_with("HTTP/1.1 422"), "{answer}");
    cluster.wait_for("the decode leg is ended", async || cluster.d().stats().aborted == 1).await;
    assert_eq!(pushes(&cluster, "prefill_failed").await, 1.0);
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn item_35_another_prefill_engine_takes_over() {
    let cluster = pushing().prefill(2).warns(&["an engine failed"]).start().await;
    for engine in &cluster.prefill {
        arm(engine, Leg::Prefill, 503);
    }
    // The second one is asked in turn, and its own fault is met by whoever comes next.
    cluster.prefill[1].faults().clear();
    let body = completion(PROMPT, 8);
    let expected = single_text(COMPLETIONS, &body).await;
    for _ in 0..2 {
        assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), expected);
    }
    assert_eq!(pushes(&cluster, "prefill_failed").await, 1.0);
    assert_eq!(cluster.metric("kvbaton_retries_total", &[("stage", "prefill")]).await, 1.0);
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_decode_engine_that_refuses_first_ends_the_prefill_at_once() {
    let cluster = pushing().start().await;
    let gate = cluster.p().faults().hold(Stage::Arrival, Leg::Prefill);
    arm(cluster.d(), Leg::Decode, 422);
    let answer = cluster.post(COMPLETIONS, &completion(PROMPT, 8)).await;
    assert_eq!(answer.status, 422, "though the prefill engine has said nothing yet");
    assert_eq!(pushes(&cluster, "decode_failed").await, 1.0);
    let aborted = [("result", "aborted")];
    assert_eq!(cluster.metric("kvbaton_abandoned_prefills_total", &aborted).await, 1.0);
    drop(gate);
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn both_refuse_what_no_engine_can_serve() {
    let cluster = pushing().start().await;
    let answer = cluster.post(COMPLETIONS, &completion(&"far too long ".repeat(8000), 8)).await;
    assert_eq!(answer.status, 400, "{answer:?}");
    cluster.wait_no_blocks().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

async fn nothing_stays(cluster: Cluster) {
    cluster.wait_no_blocks().await;
    assert_eq!(cluster.p().stats().kv_expired, 0);
    cluster.wait_idle().await;
    let body = completion(PROMPT, 4);
    assert_eq!(cluster.post(COMPLETIONS, &body).await.generated(), single_text(COMPLETIONS, &body).await);
    cluster.wait_no_blocks().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_client_leaves_while_the_decode_engine_waits() {
    for stream in [false, true] {
        let cluster = pushing().start().await;
        let (gate, wire) = parked(&cluster, stream).await;
        drop(wire);
        let result = "abandoned";
        cluster.wait_for("the router knows", async || pushes(&cluster, result).await == 1.0).await;
        // Both are let come as far as the hand-off: then neither waits for the other.
        drop(gate);
        nothing_stays(cluster).await;
    }
}

#[tokio::test]
async fn a_client_leaves_when_the_prefill_is_done_but_not_answered() {
    let cluster = pushing().start().await;
    let gate = cluster.p().faults().hold(Stage::BeforeHead, Leg::Prefill);
    let bytes = request(COMPLETIONS, &[], &completion(PROMPT, 64).to_string());
    let wire = Wire::open(cluster.addr, &bytes).await;
    gate.arrived(1).await;
    drop(wire);
    cluster.wait_for("the router knows", async || pushes(&cluster, "abandoned").await == 1.0).await;
    drop(gate);
    nothing_stays(cluster).await;
}

/// Engines whose leases outlast a test: what is freed was written.
fn patient() -> Builder {
    pushing().engine(|engine| {
        engine.lease = Duration::from_secs(120);
        engine.push_timeout = Duration::from_secs(120);
    })
}

#[tokio::test]
async fn a_client_leaves_before_the_decode_engine_has_looked() {
    for (stream, at_once) in [(false, true), (true, true), (false, false), (true, false)] {
        let cluster = patient().config(move |config| config.hand_off.push_at_once = at_once).start().await;
        let gate = cluster.d().faults().hold(Stage::Arrival, Leg::Decode);
        let mut body = completion(PROMPT, 8);
        body["stream"] = json!(stream);
        let wire = Wire::open(cluster.addr, &request(COMPLETIONS, &[], &body.to_string())).await;
        gate.arrived(1).await;
        let result = if at_once { "at_once" } else { "in_turn" };
        cluster.wait_for("the prefill is done", async || pushes(&cluster, result).await == 1.0).await;
        assert!(cluster.p().stats().blocks_held > 0);
        drop(wire);
        drop(gate);
        nothing_stays(cluster).await;
    }
}

/// Simulated engines begin to answer when they have the blocks; others with the request.
#[tokio::test]
async fn a_client_leaves_between_the_head_and_the_first_token() {
    let granted = json!({
        "choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 1},
        "kv_transfer_params": {
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": "p", "remote_request_id": "chatcmpl-a-0-aaaaaaaa",
            "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "pp_size": 1,
            "remote_num_tokens": 40, "transfer_mode": "push",
        },
    });
    let granted = http_answer("200 OK", "application/json", &granted.to_string());
    let event = |delta: Value| {
        let event = json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]});
        chunk(format!("data: {event}\n\n").as_bytes())
    };
    let (go, on) = (Gate::new(), Gate::new());
    let decode = FakeEngine::start(vec![
        Step::Send(sse_head()),
        Step::Send(event(json!({"role": "assistant", "content": ""}))),
        Step::Wait(go.clone()),
        Step::Send(event(json!({"content": "a"}))),
        Step::Open(on.clone()),
        Step::Hang,
    ])
    .await;
    let prefill = FakeEngine::start(vec![Step::Send(granted)]).await;
    let builder = Cluster::builder().prefill(0).decode(0);
    let builder = builder.peer(Role::Prefill, &prefill.url()).peer(Role::Decode, &decode.url());
    let cluster = builder.start().await;
    let mut body = chat(PROMPT, 8);
    body["stream"] = json!(true);
    let mut wire = Wire::open(cluster.addr, &request(CHAT, &[], &body.to_string())).await;
    wire.head().await;
    wire.body_until("assistant").await;
    drop(wire);
    // Time for the router to notice.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(cluster.get("/admin/handoffs").await.json()["handoffs"].as_array().unwrap().len(), 1);
    go.open();
    cluster.wait_for("the blocks have come", async || cluster.relayed().await == 1.0).await;
    on.pass().await;
    cluster.wait_idle().await;
    cluster.finish().await;
}

#[tokio::test]
async fn a_decode_engine_dies_before_it_has_looked() {
    for client_stays in [true, false] {
        let mut cluster =
            pushing().decode(2).may_warn(&["an engine failed", "an engine is not usable"]).start().await;
        let gates = [0, 1].map(|of| cluster.decode[of].faults().hold(Stage::Arrival, Leg::Decode));
        let bytes = request(COMPLETIONS, &[("connection", "close")], &completion(PROMPT, 8).to_string());
        let mut wire = Wire::open(cluster.addr, &bytes).await;
        cluster.wait_for("the prefill is done", async || pushes(&cluster, "at_once").await == 1.0).await;
        let asked = usize::from(generations(&cluster.decode[0]).is_empty());
        let dying = cluster.decode.remove(asked);
        if client_stays {
            dying.kill().await;
            drop(gates);
            let answer = wire.everything().await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        } else {
            drop(wire);
            dying.kill().await;
            drop(gates);
        }
        // It may have announced itself: nobody else can, and the lease frees what it did not get.
        cluster.wait_no_blocks().await;
        // The next one finds it gone, and what was computed meanwhile is for the other engine.
        let body = completion(PROMPT, 4);
        let prefills = generations(cluster.p()).len();
        for _ in 0..2 {
            let text = cluster.post(COMPLETIONS, &body).await.generated();
            assert_eq!(text, single_text(COMPLETIONS, &body).await);
        }
        assert_eq!(generations(cluster.p()).len(), prefills + 2);
        cluster.wait_no_blocks().await;
        cluster.finish().await;
    }
}

#[tokio::test]
async fn a_client_leaves_in_the_middle_of_a_stream() {
    let cluster =
        pushing().engine(|engine| engine.decode_time_per_token = Duration::from_millis(20)).start().await;
    let mut body = completion(PROMPT, 200);
    body["stream"] = true.into();
    let wire =
        Wire::open(cluster.addr, &request(COMPLETIONS, &[("connection", "close")], &body.to_string())).await;
    cluster.wait_for("tokens come", async || cluster.relayed().await == 1.0).await;
    drop(wire);
    nothing_stays(cluster).await;
}

#[tokio::test]
async fn responses_are_not_handed_off_and_operators_see_the_mode() {
    let cluster = pushing().start().await;
    let answer = cluster
        .post("/v1/responses", &json!({"model": "sim", "input": PROMPT, "max_output_tokens": 4}))
        .await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(generations(cluster.p()).is_empty(), "there engines would not find each other");
    let peers = cluster.get("/admin/peers").await.json();
    let modes: Vec<&Value> =
        peers["peers"].as_array().unwrap().iter().map(|peer| &peer["transfer_mode"]).collect();
    assert_eq!(modes, ["push", "push"]);
    cluster.finish().await;
}
