//! The registry of engines over HTTP: engines register, give signs of life and leave; everybody
//! reads. One rank's payload is in `registry/rank.rs`, following the changes in `registry/watch.rs`.
//! Must never wait longer for an engine to appear than the asker does.

mod accept;
mod headers;
mod rank;
mod watch;
mod wire;

#[cfg(fuzzing)]
pub use wire::read_any;

use axum::extract::{Request, State as Shared};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, VARY};
use kvbaton_proxy::{EngineRole, EngineState, EngineView, Missing, Proxy, Registry, Writer};
use serde::{Deserialize, Serialize};

pub(crate) use rank::{RANK_PATH, look_up, register_rank};
pub(crate) use watch::watch;

use crate::State;
use crate::error::RouteError;
use crate::extract::{Params, Segments};
use accept::{MSGPACK, prefers_json};
use wire::{EnginePayloads, HeartbeatBody, RegisterBody, read_structured};

/// Largest heartbeat; a sign of life is a few numbers.
const HEARTBEAT_BYTES: usize = 16 * 1024;

/// Which engines are listed; all of them when nothing is said.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Filter {
    role: Option<EngineRole>,
    model: Option<String>,
    state: Option<EngineState>,
}

impl Filter {
    fn matches(&self, engine: &EngineView) -> bool {
        let about = &engine.about;
        self.role.is_none_or(|role| about.role == Some(role))
            && self.model.as_ref().is_none_or(|model| about.model.as_ref() == Some(model))
            && self.state.is_none_or(|state| about.state == state)
    }
}

/// The engines that were asked for.
#[derive(Serialize)]
pub(crate) struct Engines {
    engines: Vec<EngineView>,
}

/// What an engine that registered is told.
#[derive(Serialize)]
pub(crate) struct EngineReceipt {
    engine_id: String,
    revision: u64,
    generation: u64,
    ttl_seconds: Option<f64>,
    router_clock: f64,
}

/// What an engine that gave a sign of life is told.
#[derive(Serialize)]
pub(crate) struct HeartbeatReceipt {
    revision: u64,
    ttl_seconds: Option<f64>,
    router_clock: f64,
}

pub(crate) async fn list(
    Shared(proxy): Shared<Proxy>,
    Extension(reader): Extension<Writer>,
    Params(filter): Params<Filter>,
) -> Result<Json<Engines>, RouteError> {
    let registry = proxy.registry();
    let snapshot = registry.snapshot();
    let seen = snapshot.engines.values().filter(|engine| reader.sees_engine(engine));
    let mut engines: Vec<EngineView> = seen.map(|engine| registry.view(engine)).collect();
    engines.retain(|engine| filter.matches(engine));
    Ok(Json(Engines { engines }))
}

pub(crate) async fn register(
    Shared(state): Shared<State>,
    Extension(writer): Extension<Writer>,
    Segments(engine_id): Segments<String>,
    request: Request,
) -> Result<(StatusCode, Json<EngineReceipt>), RouteError> {
    let body: RegisterBody = read_structured(request, state.limits.body_bound()).await?;
    let receipt = state.proxy.register_engine(body.into_registration(engine_id.clone(), writer)).await?;
    let status = if receipt.created { StatusCode::CREATED } else { StatusCode::OK };
    let receipt = EngineReceipt {
        engine_id,
        revision: receipt.revision,
        generation: receipt.generation,
        ttl_seconds: receipt.ttl.map(|ttl| ttl.as_secs_f64()),
        router_clock: receipt.router_clock,
    };
    Ok((status, Json(receipt)))
}

pub(crate) async fn heartbeat(
    Shared(state): Shared<State>,
    Extension(writer): Extension<Writer>,
    Segments(engine_id): Segments<String>,
    request: Request,
) -> Result<Json<HeartbeatReceipt>, RouteError> {
    let mut bound = state.limits.body_bound();
    bound.bytes = bound.bytes.min(HEARTBEAT_BYTES);
    let body: HeartbeatBody = read_structured(request, bound).await?;
    let receipt = state.proxy.heartbeat(&writer, &engine_id, &body.into()).await?;
    Ok(Json(HeartbeatReceipt {
        revision: receipt.revision,
        ttl_seconds: receipt.ttl.map(|ttl| ttl.as_secs_f64()),
        router_clock: receipt.router_clock,
    }))
}

pub(crate) async fn remove(
    Shared(proxy): Shared<Proxy>,
    Extension(writer): Extension<Writer>,
    Segments(engine_id): Segments<String>,
) -> Result<StatusCode, RouteError> {
    if proxy.remove_engine(&writer, &engine_id).await? {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(RouteError::UnknownEngine { engine_id })
    }
}

/// One engine: for people whatever state it is in, for peers with the payloads once it serves.
pub(crate) async fn engine(
    Shared(proxy): Shared<Proxy>,
    Extension(reader): Extension<Writer>,
    Segments(engine_id): Segments<String>,
    Params(patience): Params<headers::Patience>,
    request_headers: HeaderMap,
) -> Result<Response, RouteError> {
    let registry = proxy.registry();
    // The default is the other way round than for a rank, whose payload is all that it is.
    let mut response = if accept::asks_for_msgpack(&request_headers) && !prefers_json(&request_headers) {
        let look = |registry: &Registry| {
            registry.check_reader(&reader, &engine_id)?;
            registry.look_up_engine(&engine_id)
        };
        let found = registry.look_within(patience.wait()?, look).await;
        let record = found.map_err(|missing| match missing {
            Missing::Unknown => RouteError::UnknownEngine { engine_id: engine_id.clone() },
            Missing::NotReady => RouteError::EngineNotReady { engine_id: engine_id.clone() },
        })?;
        let clock = registry.clock(&record);
        let body = EnginePayloads::new(&registry.view(&record)).encode()?;
        let mut response = ([(CONTENT_TYPE, MSGPACK)], body).into_response();
        if let Some(first) = record.first_rank() {
            headers::describe(response.headers_mut(), first, clock);
        }
        response
    } else {
        patience.wait()?;
        let record = registry.engine(&engine_id).filter(|engine| reader.sees_engine(engine));
        let record = record.ok_or(RouteError::UnknownEngine { engine_id })?;
        Json(registry.view(&record)).into_response()
    };
    response.headers_mut().insert(VARY, HeaderValue::from_static("accept"));
    Ok(response)
}
