//! What handlers take out of a request: the bounded body, JSON with our own rejection, path
//! segments, and the request id that every answer carries.
//! Must never answer in any shape but the one of `error.rs`, nor read a body past its limit.

use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::middleware::Next;
use axum::response::Response;
use bytes::BytesMut;
use futures_util::FutureExt as _;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http_body_util::BodyExt;
use kvbaton_proxy::{Client, Exchange, Proxy, RequestId};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tracing::Instrument;

use crate::State;
use crate::error::{JsonFault, RouteError, anthropic};
use crate::strict::Fields;

/// The header that names one exchange on both legs, in the log and in the answer.
pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Memory taken for a body before its bytes arrive; a declared length is only a claim.
const FIRST_ALLOCATION: usize = 64 * 1024;

// ---------------------------------------------------------------- request id

/// Gives the request its id and puts exactly one such header on whatever answer comes back.
pub(crate) async fn identify(mut request: Request, next: Next) -> Response {
    let id = RequestId::accept(request.headers().get(X_REQUEST_ID));
    let span = request_span(&id, request.method(), request.uri().path());
    let header = id.header_value();
    request.extensions_mut().insert(id);
    let in_anthropics = anthropic::speaks(request.uri().path());
    let response = next.run(request).instrument(span).await;
    identified(response, header, in_anthropics)
}

/// An answer with its request's id, and with errors in the dialect of its path.
pub(crate) fn identified(response: Response, id: HeaderValue, in_anthropics: bool) -> Response {
    let mut response = if in_anthropics { anthropic::translated(response) } else { response };
    response.headers_mut().insert(X_REQUEST_ID, id);
    response
}

/// What the log says of a request while it is served.
pub(crate) fn request_span(id: &RequestId, method: &http::Method, path: &str) -> tracing::Span {
    tracing::info_span!("request", request_id = id.as_str(), %method, path)
}

/// What the core needs of a request's head.
pub(crate) fn exchange(mut parts: Parts, proxy: &Proxy, endpoint: &'static str) -> Exchange {
    let request_id = parts
        .extensions
        .remove::<RequestId>()
        .unwrap_or_else(|| RequestId::accept(parts.headers.get(X_REQUEST_ID)));
    let client = parts.extensions.remove::<Client>().unwrap_or_default();
    let account = proxy.account(&request_id, endpoint, &parts.headers);
    Exchange { request_id, headers: parts.headers, client, account }
}

// ---------------------------------------------------------------- body

/// The most that one request body may be, and how long its sender may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyBound {
    pub(crate) bytes: usize,
    pub(crate) silence: Duration,
    /// How long all of it may take.
    pub(crate) whole: Duration,
}

/// Reads a whole body; one whose declared length is over the limit is refused unread.
pub(crate) async fn read_body(
    headers: &HeaderMap,
    mut body: impl HttpBody<Data = Bytes> + Unpin,
    bound: BodyBound,
) -> Result<Bytes, RouteError> {
    let too_large = RouteError::BodyTooLarge { limit: bound.bytes };
    let declared = declared_length(headers).unwrap_or(0).max(body.size_hint().lower());
    if declared > bound.bytes as u64 {
        return Err(too_large);
    }
    let ends = Instant::now() + bound.whole;
    let mut first = Bytes::new();
    let mut joined = BytesMut::new();
    loop {
        let mut frame = body.frame();
        let next = match (&mut frame).now_or_never() {
            Some(next) => next,
            None => {
                // Who sends a little now and then is as slow as one that is silent.
                let until = ends.min(Instant::now() + bound.silence);
                tokio::time::timeout_at(until, frame).await.map_err(|_elapsed| RouteError::BodyTimeout)?
            }
        };
        let Some(frame) = next else { break };
        let Ok(data) = frame.map_err(|_cut| RouteError::BodyIncomplete)?.into_data() else {
            continue; // trailers
        };
        if first.len() + joined.len() + data.len() > bound.bytes {
            return Err(too_large);
        }
        if first.is_empty() && joined.is_empty() {
            first = data; // most bodies are one chunk: kept without a copy
            continue;
        }
        if joined.is_empty() {
            let expected = usize::try_from(declared).unwrap_or(bound.bytes);
            joined.reserve(expected.min(FIRST_ALLOCATION).max(first.len() + data.len()));
            joined.extend_from_slice(&std::mem::take(&mut first));
        } else if joined.capacity() - joined.len() < data.len() {
            // Who has sent so much gets all the room that was declared, so that a long body is never there twice.
            let left = usize::try_from(declared).unwrap_or(bound.bytes).saturating_sub(joined.len());
            joined.reserve(left.max(data.len()));
        }
        joined.extend_from_slice(&data);
    }
    Ok(if joined.is_empty() { first } else { joined.freeze() })
}

fn declared_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// Refuses a compressed body, which the router could neither peek into nor rewrite.
pub(crate) fn check_not_encoded(headers: &HeaderMap) -> Result<(), RouteError> {
    let plain = headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .all(|value| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity"));
    if plain { Ok(()) } else { Err(RouteError::ContentEncoding) }
}

/// Refuses a body that does not say that it is of this media type; parameters are ignored.
pub(crate) fn check_media_type(headers: &HeaderMap, expected: &'static str) -> Result<(), RouteError> {
    let essence = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .map(|value| value.split(';').next().unwrap_or(value).trim());
    match essence {
        Some(essence) if essence.eq_ignore_ascii_case(expected) => Ok(()),
        _ => Err(RouteError::ContentType { expected }),
    }
}

// ---------------------------------------------------------------- JSON

/// A JSON body; whatever is wrong with it is answered in our own error shape.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<State> for Json<T> {
    type Rejection = RouteError;

    async fn from_request(request: Request, state: &State) -> Result<Self, RouteError> {
        let (parts, body) = request.into_parts();
        // A page in a browser can post other media types to this host without asking first.
        check_media_type(&parts.headers, "application/json")?;
        check_not_encoded(&parts.headers)?;
        let bytes = read_body(&parts.headers, body, state.limits.body_bound()).await?;
        let Fields(value) = parse_json(&bytes)?;
        Ok(Self(value))
    }
}

pub(crate) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, JsonFault> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        JsonFault::new(Some(path), &error.into_inner())
    })?;
    reader.end().map_err(|error| JsonFault::new(None, &error))?;
    Ok(value)
}

// ---------------------------------------------------------------- query

/// The query of a URL; what is not known is refused by its name.
pub(crate) struct Params<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<State> for Params<T> {
    type Rejection = RouteError;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, RouteError> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(params)) => Ok(Self(params)),
            Err(rejection) => Err(RouteError::Query { what: rejection.body_text() }),
        }
    }
}

// ---------------------------------------------------------------- path

/// The percent-decoded parameters of a path.
pub(crate) struct Segments<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<State> for Segments<T> {
    type Rejection = RouteError;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, RouteError> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(segments)) => Ok(Self(segments)),
            // Handlers take text only, so nothing but undecodable text can fail here.
            Err(PathRejection::FailedToDeserializePathParams(_)) => Err(RouteError::PathNotUtf8),
            Err(unexpected) => {
                tracing::error!(error = %unexpected, "unexpected path rejection");
                Err(RouteError::Unexpected)
            }
        }
    }
}

/// Reads a rank: decimal digits and nothing else.
pub(crate) fn parse_rank(name: &'static str, text: &str) -> Result<u32, RouteError> {
    let digits_only = text.bytes().all(|byte| byte.is_ascii_digit());
    let rank = if digits_only { text.parse().ok() } else { None };
    rank.ok_or(RouteError::RankInvalid { name })
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http_body_util::StreamBody;

    use super::*;

    const BOUND: BodyBound =
        BodyBound { bytes: 8, silence: Duration::from_secs(5), whole: Duration::from_secs(12) };

    fn chunks(parts: &'static [&'static str]) -> Body {
        let frames =
            parts.iter().map(|part| Ok::<_, std::io::Error>(http_body::Frame::data(Bytes::from(*part))));
        Body::new(StreamBody::new(futures_util::stream::iter(frames)))
    }

    #[tokio::test]
    async fn a_body_of_the_exact_limit_is_read_whole() {
        let whole = read_body(&HeaderMap::new(), chunks(&["abc", "", "defgh"]), BOUND).await;
        assert_eq!(whole.unwrap(), "abcdefgh");
    }

    #[tokio::test]
    async fn a_chunked_body_over_the_limit_is_refused() {
        let refused = read_body(&HeaderMap::new(), chunks(&["abcd", "efgh", "i"]), BOUND).await;
        assert!(matches!(refused, Err(RouteError::BodyTooLarge { limit: 8 })));
    }

    #[tokio::test]
    async fn a_long_body_takes_the_room_that_it_declares_and_no_more() {
        const PIECE: usize = 10_000;
        let pieces = (0..300_u32).map(|at| {
            let piece = Bytes::from(vec![at as u8; PIECE]);
            Ok::<_, std::io::Error>(http_body::Frame::data(piece))
        });
        let bound = BodyBound { bytes: 300 * PIECE, ..BOUND };
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_LENGTH, (300 * PIECE).into());
        let body = Body::new(StreamBody::new(futures_util::stream::iter(pieces)));
        let whole = read_body(&headers, body, bound).await.unwrap();
        assert!(
            whole.chunks(PIECE).enumerate().all(|(at, piece)| piece.iter().all(|byte| *byte == at as u8))
        );
        assert_eq!(whole.try_into_mut().unwrap().capacity(), 300 * PIECE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_sender_is_given_up() {
        let silent = Body::new(StreamBody::new(futures_util::stream::pending::<
            Result<http_body::Frame<Bytes>, std::io::Error>,
        >()));
        let refused = read_body(&HeaderMap::new(), silent, BOUND).await;
        assert!(matches!(refused, Err(RouteError::BodyTimeout)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_sender_of_a_byte_now_and_then_is_given_up_too() {
        let began = tokio::time::Instant::now();
        let drops = futures_util::stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_secs(4)).await;
            Some((Ok::<_, std::io::Error>(http_body::Frame::data(Bytes::from_static(b"x"))), ()))
        });
        let refused = read_body(&HeaderMap::new(), Body::new(StreamBody::new(Box::pin(drops))), BOUND).await;
        assert!(matches!(refused, Err(RouteError::BodyTimeout)));
        assert_eq!(began.elapsed(), BOUND.whole);
    }

    #[test]
    fn a_rank_is_digits_only() {
        assert_eq!(parse_rank("tp_rank", "0").unwrap(), 0);
        assert_eq!(parse_rank("tp_rank", "12").unwrap(), 12);
        for text in ["", "+1", "-1", "1.0", "x", "4294967296"] {
            assert!(matches!(parse_rank("tp_rank", text), Err(RouteError::RankInvalid { name: "tp_rank" })));
        }
    }

    #[test]
    fn json_faults_name_where() {
        #[derive(serde::Deserialize, Debug)]
        #[serde(deny_unknown_fields)]
        #[expect(dead_code, reason = "only the parse is looked at")]
        struct Spec {
            url: String,
        }
        let trailing = parse_json::<Spec>(b"{\"url\":\"x\"} y").unwrap_err();
        assert_eq!((trailing.line, trailing.column), (1, 13));
        let unknown = parse_json::<Spec>(b"{\"url\":\"x\",\n \"rolle\":1}").unwrap_err();
        assert_eq!(unknown.line, 2);
        assert!(unknown.what.contains("`rolle`"), "{}", unknown.what);
        let wrong = parse_json::<Spec>(b"{\"url\":7}").unwrap_err();
        assert_eq!(wrong.path.as_deref(), Some("url"));
    }
}
