//! Scripted misbehaviour, set in process and over HTTP.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use engine_sim::{ArmedFault, Engine, EngineConfig, Fault, Generation, Leg, Stage};
use reqwest::Client;
use serde_json::{Value, json};

use crate::support::{Pair, completion, config, long_prompt, post, prefill_body, send, set, start, text_of};

async fn engine() -> (Client, Engine) {
    (Client::new(), start(config(Generation::V14)).await)
}

#[tokio::test]
async fn refuses_once() {
    let (client, engine) = engine().await;
    engine.faults().once(Fault::Refuse { status: 503, body: json!({"error": "busy"}) });
    let body = completion("hi", 1);
    assert_eq!(post(&client, &engine, "/v1/completions", &body).await, (503, json!({"error": "busy"})));
    assert_eq!(post(&client, &engine, "/v1/completions", &body).await.0, 200);
}

#[tokio::test]
async fn holds_until_released() {
    let (client, engine) = engine().await;
    let gate = engine.faults().hold(Stage::Arrival, Leg::Any);
    let body = completion("hi", 1);
    let (answer, ()) = tokio::join!(post(&client, &engine, "/v1/completions", &body), async {
        gate.arrived(1).await;
        assert_eq!(engine.stats().plain_requests, 0);
        gate.release();
    });
    assert_eq!(answer.0, 200);
}

#[tokio::test]
async fn handoff_is_dropped_or_replaced() {
    let pair = Pair::start(Generation::V14).await;
    let body = prefill_body(&completion(&long_prompt("h"), 1));
    pair.p.faults().once(Fault::DropHandoff);
    let (_, answer) = post(&pair.client, &pair.p, "/v1/completions", &body).await;
    assert_eq!(answer["kv_transfer_params"], Value::Null);
    assert_eq!(pair.p.stats().leases, 1);
    pair.p.faults().once(Fault::HandoffOverride { params: json!({"bad": [1]}) });
    let (_, answer) = post(&pair.client, &pair.p, "/v1/completions", &body).await;
    assert_eq!(answer["kv_transfer_params"], json!({"bad": [1]}));
}

#[tokio::test]
async fn garbage_and_extra_tokens() {
    let (client, engine) = engine().await;
    engine.faults().once(Fault::Garbage { body: "<html>".to_owned() });
    let body = completion("hi", 1);
    assert_eq!(post(&client, &engine, "/v1/completions", &body).await, (200, json!("<html>")));
    engine.faults().once(Fault::ExtraTokens { count: 3 });
    let (_, answer) = post(&client, &engine, "/v1/completions", &body).await;
    assert_eq!(answer["usage"]["completion_tokens"], 4);
}

fn raw_exchange(engine: &Engine, body: &str) -> (Vec<u8>, Option<std::io::ErrorKind>) {
    let mut socket = TcpStream::connect(engine.addr()).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(format!("{head}{body}").as_bytes()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut got = Vec::new();
    let end = socket.read_to_end(&mut got).err().map(|error| error.kind());
    (got, end)
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_is_reset_at_the_byte() {
    let (_, engine) = engine().await;
    for bytes in [0, 100, 700] {
        engine.faults().once(Fault::Reset { after_bytes: bytes });
        let body = set(&completion("hi", 400), json!({"stream": true})).to_string();
        let (got, end) = tokio::task::block_in_place(|| raw_exchange(&engine, &body));
        assert_eq!(end, Some(std::io::ErrorKind::ConnectionReset));
        assert_eq!(got.len() as u64, bytes);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_close_is_announced_and_done() {
    let (_, engine) = engine().await;
    engine.faults().once(Fault::ConnectionClose);
    let (got, end) = tokio::task::block_in_place(|| raw_exchange(&engine, &completion("hi", 1).to_string()));
    assert_eq!(end, None);
    assert!(String::from_utf8(got).unwrap().to_lowercase().contains("connection: close"));
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connection_is_closed_in_silence() {
    let engine =
        start(EngineConfig { keep_alive: Duration::from_millis(100), ..config(Generation::V14) }).await;
    let began = Instant::now();
    let (got, end) = tokio::task::block_in_place(|| raw_exchange(&engine, &completion("hi", 1).to_string()));
    assert_eq!(end, None);
    let text = String::from_utf8(got).unwrap();
    assert_eq!(text.matches("HTTP/1.1").count(), 1, "{text}");
    assert!(began.elapsed() >= Duration::from_millis(100));
}

#[tokio::test]
async fn stalls_at_each_stage() {
    let (client, engine) = engine().await;
    let body = set(&completion("hi", 5), json!({"stream": true}));
    let limit = Duration::from_millis(200);
    for stage in [Stage::Arrival, Stage::BeforeHead] {
        engine.faults().once(Fault::Stall { stage });
        let asked = tokio::time::timeout(limit, send(&client, &engine, "/v1/completions", &body)).await;
        assert!(asked.is_err(), "{stage:?}");
    }
    engine.faults().once(Fault::Stall { stage: Stage::MidStream });
    let mut response = send(&client, &engine, "/v1/completions", &body).await;
    assert!(response.chunk().await.unwrap().is_some());
    assert!(tokio::time::timeout(limit, response.chunk()).await.is_err());
}

#[tokio::test]
async fn chunks_come_slowly() {
    let (client, engine) = engine().await;
    engine.faults().once(Fault::SlowChunks { millis: 20 });
    let began = Instant::now();
    let body = set(&completion("hi", 5), json!({"stream": true}));
    send(&client, &engine, "/v1/completions", &body).await.text().await.unwrap();
    // Five tokens and the end marker.
    assert!(began.elapsed() >= Duration::from_millis(120));
}

#[tokio::test]
async fn faults_are_set_and_read_over_http() {
    let (client, engine) = engine().await;
    let order = json!({
        "arm": [{"kind": "refuse", "status": 429, "leg": "prefill", "sticky": true}],
        "hold": [{"stage": "before_head", "leg": "decode"}],
    });
    let (status, now) = post(&client, &engine, "/sim/faults", &order).await;
    assert_eq!(status, 200);
    assert_eq!(
        now["armed"][0],
        json!({"kind": "refuse", "status": 429, "body": null, "leg": "prefill", "sticky": true})
    );
    assert_eq!(now["held"], json!([{"stage": "before_head", "leg": "decode", "arrivals": 0}]));
    let prefill = prefill_body(&completion("hi", 1));
    assert_eq!(post(&client, &engine, "/v1/completions", &prefill).await.0, 429);
    assert_eq!(post(&client, &engine, "/v1/completions", &completion("hi", 1)).await.0, 200);
    let (_, cleared) =
        post(&client, &engine, "/sim/faults", &json!({"clear": true, "release": ["before_head"]})).await;
    assert_eq!(cleared, json!({"armed": [], "held": []}));
    assert_eq!(post(&client, &engine, "/sim/faults", &json!({"oops": 1})).await.0, 400);
    let get = async |path: &str| -> Value {
        client.get(format!("{}{path}", engine.url())).send().await.unwrap().json().await.unwrap()
    };
    assert_eq!(get("/sim/stats").await["engine_id"], engine.engine_id());
    let seen = get("/sim/requests").await;
    assert_eq!(seen.as_array().unwrap().len(), 2);
    assert_eq!(seen[0]["body"], prefill.to_string());
    assert_eq!(engine.faults().armed(), Vec::<ArmedFault>::new());
}

#[tokio::test]
async fn shutdown_lets_requests_finish() {
    let slow = EngineConfig { decode_time_per_token: Duration::from_millis(5), ..config(Generation::V14) };
    let (client, engine) = (Client::new(), start(slow).await);
    let gate = engine.faults().hold(Stage::BeforeHead, Leg::Any);
    let body = completion("hi", 5);
    let url = engine.url();
    let asked = async { client.post(format!("{url}/v1/completions")).json(&body).send().await.unwrap() };
    let (response, ()) = tokio::join!(asked, async {
        gate.arrived(1).await;
        gate.release();
        engine.shutdown().await;
    });
    assert_eq!(text_of(&response.json().await.unwrap()).len(), 5);
    assert!(client.get(format!("{url}/health")).send().await.is_err());
}
