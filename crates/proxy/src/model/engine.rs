//! What a modelled engine does with one request. It may be dropped at any await, as a request is whose
//! connection has closed: what it computes then is aborted, what it has finished is kept.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use kv_connector::protocol::params::Generation;
use serde_json::{Value, json};

use super::world::{Lapse, World};

/// What every prompt is answered with.
pub(super) const TRUTH: &str = "abcdefgh";
pub(super) const LONGEST_PREFILL: Duration = Duration::from_secs(8);

/// The connection breaks.
#[derive(Debug, thiserror::Error)]
#[error("reset")]
pub(super) struct Reset;

type Body = BoxBody<Bytes, Reset>;
type Answer = Result<Response<Body>, Reset>;

pub(super) async fn answer(world: World, engine: String, id: String, request: Request<Incoming>) -> Answer {
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await.map_err(|_| Reset)?.to_bytes();
    match path.as_str() {
        "/health" => return Ok(json_answer(StatusCode::OK, &json!({}))),
        "/version" => {
            let version = if world.generation() == Generation::V2 { "0.13.0" } else { "0.32.0" };
            return Ok(json_answer(StatusCode::OK, &json!({"version": version})));
        }
        "/v1/models" => {
            let models = json!({"object": "list", "data": [{"id": "sim", "object": "model"}]});
            return Ok(json_answer(StatusCode::OK, &models));
        }
        _ => {}
    }
    if world.fails(3) {
        return Err(Reset);
    }
    if world.fails(3) {
        return Ok(refusal(StatusCode::SERVICE_UNAVAILABLE));
    }
    if world.fails(2) {
        std::future::pending::<()>().await;
    }
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let params = &body["kv_transfer_params"];
    if params["do_remote_decode"] == true {
        return Ok(prefill(&world, &engine, &id).await);
    }
    let lapse = if params["do_remote_prefill"] == true { world.next_lapse() } else { None };
    match lapse {
        Some(Lapse::Silence) => std::future::pending().await,
        Some(Lapse::Refusal) => Ok(refusal(StatusCode::SERVICE_UNAVAILABLE)),
        None => decode(&world, &id, &body, params).await,
    }
}

async fn prefill(world: &World, engine: &str, id: &str) -> Response<Body> {
    let request = format!("cmpl-{}", uuid::Uuid::new_v4().simple());
    tokio::time::sleep(world.up_to(LONGEST_PREFILL)).await;
    // From here on an abort comes too late.
    world.finished(id, &request);
    tokio::time::sleep(world.up_to(Duration::from_millis(200))).await;
    let mut hand_off = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [1, 2],
        "remote_engine_id": id, "remote_request_id": request, "remote_host": engine,
        "remote_port": 7100, "tp_size": 1,
    });
    if world.generation() == Generation::V14 {
        hand_off["remote_block_ids"] = json!([[1, 2]]);
        hand_off["remote_num_tokens"] = json!(20);
    }
    json_answer(
        StatusCode::OK,
        &json!({
            "id": request, "object": "text_completion", "created": 0, "model": "sim",
            "choices": [{"index": 0, "text": "a", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21},
            "kv_transfer_params": hand_off,
        }),
    )
}

async fn decode(world: &World, id: &str, body: &Value, params: &Value) -> Answer {
    let text = |name: &str| params[name].as_str().unwrap_or_default().to_owned();
    let (engine, request) = (text("remote_engine_id"), text("remote_request_id"));
    let hands_off = params["do_remote_prefill"] == true;
    tokio::time::sleep(world.up_to(Duration::from_millis(50))).await;
    if body["model"] != "sim" {
        if hands_off && world.generation() == Generation::V14 {
            world.told(&engine, &request);
        }
        return Ok(refusal(StatusCode::NOT_FOUND));
    }
    if hands_off {
        // A release by reading: what it reads is thrown away and found by nobody.
        let discarded = body["cache_salt"].is_string();
        let Some(read) = world.read(id, &engine, &request, discarded) else {
            return Ok(refusal(StatusCode::INTERNAL_SERVER_ERROR));
        };
        tokio::time::sleep(world.up_to(Duration::from_millis(500))).await;
        read.end();
        if world.fails(2) {
            return Ok(refusal(StatusCode::INTERNAL_SERVER_ERROR));
        }
        world.told(&engine, &request);
    }
    let tokens = body["max_tokens"].as_u64().map_or(1, |tokens| tokens.min(TRUTH.len() as u64));
    let truth = &TRUTH[..usize::try_from(tokens).unwrap_or(1)];
    if body["stream"] != true {
        tokio::time::sleep(world.up_to(Duration::from_secs(1))).await;
        return Ok(json_answer(
            StatusCode::OK,
            &json!({"id": "x", "object": "text_completion", "model": "sim",
                    "choices": [{"index": 0, "text": truth, "finish_reason": "length"}]}),
        ));
    }
    Ok(streamed(world.clone(), truth))
}

fn streamed(world: World, truth: &'static str) -> Response<Body> {
    let events = futures_events(truth);
    let body = futures_util::stream::unfold((world, events.into_iter()), |(world, mut events)| async move {
        let event = events.next()?;
        tokio::time::sleep(world.up_to(Duration::from_millis(300))).await;
        let frame = if world.fails(1) { Err(Reset) } else { Ok(Frame::data(Bytes::from(event))) };
        Some((frame, (world, events)))
    });
    let mut response = Response::new(StreamBody::new(body).boxed());
    let kind = http::HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response
}

fn futures_events(truth: &str) -> Vec<String> {
    let event = |token: char| {
        let choice = json!({"index": 0, "text": token.to_string(), "finish_reason": null});
        format!("data: {}\n\n", json!({"id": "x", "object": "text_completion", "choices": [choice]}))
    };
    truth.chars().map(event).chain(["data: [DONE]\n\n".to_owned()]).collect()
}

fn refusal(status: StatusCode) -> Response<Body> {
    json_answer(
        status,
        &json!({"error": {"message": "no", "type": "x", "param": null, "code": status.as_u16()}}),
    )
}

fn json_answer(status: StatusCode, body: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {}).boxed();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let kind = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response
}
