//! The `/sim` endpoints: what an outside test driver sees and sets.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::reject::json_response;
use crate::faults::{ArmedFault, Leg, Stage};
use crate::shared::Shared;

/// What `POST /sim/faults` takes; the members are applied in this order.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct FaultOrder {
    /// Disarm everything and open every gate that was set over HTTP.
    clear: bool,
    /// Faults to arm.
    arm: Vec<ArmedFault>,
    /// Stages to hold requests at.
    hold: Vec<HoldOrder>,
    /// Stages whose gates are opened.
    release: Vec<Stage>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HoldOrder {
    stage: Stage,
    #[serde(default)]
    leg: Leg,
}

pub(super) async fn stats(State(shared): State<Arc<Shared>>) -> Response {
    let mut stats = serde_json::to_value(shared.read_stats()).unwrap_or_default();
    stats["engine_id"] = shared.engine_id.as_str().into();
    stats["role"] = json!(shared.config.role);
    json_response(StatusCode::OK, stats.to_string())
}

pub(super) async fn requests(State(shared): State<Arc<Shared>>) -> Response {
    let seen: Vec<Value> = shared
        .seen()
        .iter()
        .map(|request| {
            let headers: Map<String, Value> = request
                .headers
                .iter()
                .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into()))
                .collect();
            json!({
                "method": request.method.as_str(), "path": request.path, "headers": headers,
                "body": String::from_utf8_lossy(&request.body),
            })
        })
        .collect();
    json_response(StatusCode::OK, Value::from(seen).to_string())
}

pub(super) async fn faults(State(shared): State<Arc<Shared>>) -> Response {
    json_response(StatusCode::OK, describe(&shared).to_string())
}

pub(super) async fn set_faults(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    let order: FaultOrder = match serde_json::from_slice(&body) {
        Ok(order) => order,
        Err(error) => {
            return json_response(
                StatusCode::BAD_REQUEST,
                json!({ "detail": error.to_string() }).to_string(),
            );
        }
    };
    if order.clear {
        shared.faults.clear();
    }
    shared.faults.arm_all(order.arm);
    for hold in order.hold {
        shared.faults.hold_outside(hold.stage, hold.leg);
    }
    for stage in order.release {
        shared.faults.release_outside(stage);
    }
    json_response(StatusCode::OK, describe(&shared).to_string())
}

fn describe(shared: &Shared) -> Value {
    json!({"armed": shared.faults.armed(), "held": shared.faults.held_outside()})
}
