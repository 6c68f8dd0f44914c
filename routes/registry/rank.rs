//! One rank's payload: the bytes that an engine put are the bytes that every engine gets; people
//! may ask for JSON instead.

use axum::extract::{Request, State as Shared};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, VARY};
use kvbaton_proxy::{Missing, Proxy, Registered, Registry, Writer};
use serde::Serialize;

use super::accept::{MSGPACK, has_tag, prefers_json};
use super::headers::{Patience, describe, entity_tag, put_tag};
use crate::State;
use crate::error::RouteError;
use crate::extract::{Params, Segments, check_media_type, check_not_encoded, parse_rank, read_body};

/// The path of one rank's payload.
pub(crate) const RANK_PATH: &str = "/registry/v1/engines/{engine_id}/ranks/{pp_rank}/{tp_rank}";

/// What became of a payload that was put.
#[derive(Serialize)]
pub(crate) struct Receipt {
    engine_id: String,
    pp_rank: u32,
    tp_rank: u32,
    result: &'static str,
}

/// One rank of one engine, as a path names it.
struct Rank {
    engine_id: String,
    pp_rank: u32,
    tp_rank: u32,
}

impl Rank {
    fn parse((engine_id, pp_rank, tp_rank): (String, String, String)) -> Result<Self, RouteError> {
        Ok(Self {
            engine_id,
            pp_rank: parse_rank("pp_rank", &pp_rank)?,
            tp_rank: parse_rank("tp_rank", &tp_rank)?,
        })
    }

    fn missing(self, missing: Missing) -> RouteError {
        let Self { engine_id, pp_rank, tp_rank } = self;
        match missing {
            Missing::Unknown => RouteError::UnknownRank { engine_id, pp_rank, tp_rank },
            Missing::NotReady => RouteError::EngineNotReady { engine_id },
        }
    }
}

pub(crate) async fn register_rank(
    Shared(state): Shared<State>,
    Extension(writer): Extension<Writer>,
    Segments(segments): Segments<(String, String, String)>,
    request: Request,
) -> Result<(StatusCode, Json<Receipt>), RouteError> {
    let Rank { engine_id, pp_rank, tp_rank } = Rank::parse(segments)?;
    let (parts, body) = request.into_parts();
    check_media_type(&parts.headers, MSGPACK)?;
    check_not_encoded(&parts.headers)?;
    let payload = read_body(&parts.headers, body, state.limits.payload_bound()).await?;
    let registered = state.proxy.put_rank(&writer, &engine_id, (pp_rank, tp_rank), payload).await?;
    let (status, result) = match registered {
        Registered::Created => (StatusCode::CREATED, "created"),
        Registered::Replaced => (StatusCode::OK, "replaced"),
        Registered::Unchanged => (StatusCode::OK, "unchanged"),
    };
    Ok((status, Json(Receipt { engine_id, pp_rank, tp_rank, result })))
}

pub(crate) async fn look_up(
    Shared(proxy): Shared<Proxy>,
    Extension(reader): Extension<Writer>,
    Segments(segments): Segments<(String, String, String)>,
    Params(patience): Params<Patience>,
    headers: HeaderMap,
) -> Result<Response, RouteError> {
    let rank = Rank::parse(segments)?;
    let registry = proxy.registry();
    let look = |registry: &Registry| {
        registry.check_reader(&reader, &rank.engine_id)?;
        registry.look_up(&rank.engine_id, rank.pp_rank, rank.tp_rank)
    };
    let found = match registry.look_within(patience.wait()?, look).await {
        Ok(found) => found,
        Err(missing) => return Err(rank.missing(missing)),
    };
    let view = found.rank;
    let mut response = if prefers_json(&headers) {
        Json(&*view).into_response()
    } else {
        let tag = entity_tag(&view);
        let mut response = if has_tag(&headers, &tag) {
            StatusCode::NOT_MODIFIED.into_response()
        } else {
            ([(CONTENT_TYPE, MSGPACK)], view.payload.clone()).into_response()
        };
        put_tag(response.headers_mut(), &tag);
        response
    };
    describe(response.headers_mut(), &view, registry.clock(&found.engine));
    response.headers_mut().insert(VARY, HeaderValue::from_static("accept"));
    Ok(response)
}
