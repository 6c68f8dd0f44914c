//! The registry of engines' handshake payloads over HTTP: the bytes that an engine put are the
//! bytes that every engine gets; people may ask for JSON instead.
//! Must never wait for an engine to appear: an unknown one is a 404 at once.

use axum::Json;
use axum::extract::{Request, State as Shared};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue, VARY};
use kvbaton_proxy::{EngineView, Proxy, Registered};
use serde::Serialize;

use crate::State;
use crate::error::RouteError;
use crate::extract::{Segments, check_media_type, check_not_encoded, parse_rank, read_body};

/// The path of one rank's payload.
pub(crate) const RANK_PATH: &str = "/registry/v1/engines/{engine_id}/ranks/{pp_rank}/{tp_rank}";

const MSGPACK: &str = "application/msgpack";
const JSON: &str = "application/json";

/// All engines.
#[derive(Serialize)]
pub(crate) struct Engines {
    engines: Vec<EngineView>,
}

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
}

pub(crate) async fn list(Shared(proxy): Shared<Proxy>) -> Json<Engines> {
    Json(Engines { engines: proxy.registry().list() })
}

pub(crate) async fn remove(
    Shared(proxy): Shared<Proxy>,
    Segments(engine_id): Segments<String>,
) -> Result<StatusCode, RouteError> {
    if proxy.registry().remove(&engine_id) {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(RouteError::UnknownEngine { engine_id })
    }
}

pub(crate) async fn register(
    Shared(state): Shared<State>,
    Segments(segments): Segments<(String, String, String)>,
    request: Request,
) -> Result<(StatusCode, Json<Receipt>), RouteError> {
    let Rank { engine_id, pp_rank, tp_rank } = Rank::parse(segments)?;
    let (parts, body) = request.into_parts();
    check_media_type(&parts.headers, MSGPACK)?;
    check_not_encoded(&parts.headers)?;
    let payload = read_body(&parts.headers, body, state.limits.payload_bound()).await?;
    let registered = state.proxy.registry().put(&engine_id, pp_rank, tp_rank, payload)?;
    let (status, result) = match registered {
        Registered::Created => (StatusCode::CREATED, "created"),
        Registered::Replaced => (StatusCode::OK, "replaced"),
        Registered::Unchanged => (StatusCode::OK, "unchanged"),
    };
    Ok((status, Json(Receipt { engine_id, pp_rank, tp_rank, result })))
}

pub(crate) async fn look_up(
    Shared(proxy): Shared<Proxy>,
    Segments(segments): Segments<(String, String, String)>,
    headers: HeaderMap,
) -> Result<Response, RouteError> {
    let Rank { engine_id, pp_rank, tp_rank } = Rank::parse(segments)?;
    let Some(view) = proxy.registry().get(&engine_id, pp_rank, tp_rank) else {
        return Err(RouteError::UnknownRank { engine_id, pp_rank, tp_rank });
    };
    let mut response = if prefers_json(&headers) {
        Json(&*view).into_response()
    } else {
        ([(CONTENT_TYPE, MSGPACK)], view.payload.clone()).into_response()
    };
    response.headers_mut().insert(VARY, HeaderValue::from_static("accept"));
    Ok(response)
}

/// Whether JSON is asked for before the payload itself, which is what engines want.
fn prefers_json(headers: &HeaderMap) -> bool {
    weight(headers, JSON) > weight(headers, MSGPACK)
}

/// How much a media type is wanted: quality in thousandths, then how exactly it is named.
fn weight(headers: &HeaderMap, media_type: &str) -> (u16, u8) {
    let mut found = (0, 0);
    let lines = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    for range in lines.flat_map(|line| line.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let exactness = match parts.next().unwrap_or_default() {
            exact if exact.eq_ignore_ascii_case(media_type) => 3,
            "application/*" => 2,
            "*/*" => 1,
            _ => continue,
        };
        let quality = parts
            .find_map(|parameter| parameter.strip_prefix("q=").or_else(|| parameter.strip_prefix("Q=")))
            .map_or(Some(1.0_f32), |text| text.parse().ok())
            .filter(|quality| (0.0..=1.0).contains(quality))
            .unwrap_or(0.0);
        if exactness > found.1 {
            found = ((quality * 1000.0) as u16, exactness);
        }
    }
    if found.0 == 0 { (0, 0) } else { found }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefers(accept: &'static str) -> bool {
        prefers_json(&HeaderMap::from_iter([(ACCEPT, HeaderValue::from_static(accept))]))
    }

    #[test]
    fn json_goes_to_those_who_ask_for_it() {
        assert!(prefers("application/json"));
        assert!(prefers("Application/JSON; charset=utf-8"));
        assert!(prefers("application/json, text/plain, */*"));
        assert!(prefers("application/msgpack;q=0.5, application/json"));
    }

    #[test]
    fn engines_and_the_indifferent_get_the_payload() {
        assert!(!prefers_json(&HeaderMap::new()));
        assert!(!prefers("*/*"));
        assert!(!prefers("text/html"));
        assert!(!prefers("application/msgpack"));
        assert!(!prefers("application/json;q=0"));
        assert!(!prefers("application/json, application/msgpack"));
        assert!(!prefers("application/json;q=0.3, application/*"));
    }
}
