//! An engine's answer on its way to the client: what kind it is, and the hand-off taken out of it.

use bytes::Bytes;
use http::Response;
use http::header::{CONTENT_TYPE, HeaderMap};
use memchr::memmem;

use crate::json;
use crate::splice::{Spliced, answer_without_hand_off};
use crate::stream::RelayBody;
use crate::upstream::response_headers;

/// A whole answer of an engine as the client's.
pub(crate) fn relay_whole(head: Response<()>, answer: Bytes) -> Response<RelayBody> {
    let (mut head, ()) = head.into_parts();
    response_headers(&mut head.headers);
    let body = without_hand_off(answer).unwrap_or_else(|| Spliced::from(Bytes::new()));
    Response::from_parts(head, RelayBody::whole(body, None))
}

/// The answer less the hand-off, whatever its media type says; none if it seems to hold one and
/// cannot be read, so that it cannot be taken out.
pub(crate) fn without_hand_off(answer: Bytes) -> Option<Spliced> {
    let marked = memmem::find(&answer, b"kv_transfer_params").is_some();
    if marked && json::is_object(&answer).is_err() {
        return None;
    }
    Some(answer_without_hand_off(answer))
}

/// What is neither text nor JSON passes as it comes.
pub(crate) fn is_binary(headers: &HeaderMap) -> bool {
    [&b"audio"[..], b"image", b"video", b"application/octet-stream"].iter().any(|kind| is_type(headers, kind))
}

/// Whether the content type is this one, whatever its parameters; a bare main type stands for all of its kind.
pub(crate) fn is_type(headers: &HeaderMap, media_type: &[u8]) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|value| {
        let value = value.as_bytes();
        value.len() >= media_type.len()
            && value[..media_type.len()].eq_ignore_ascii_case(media_type)
            && !value.get(media_type.len()).is_some_and(u8::is_ascii_alphanumeric)
    })
}

#[cfg(test)]
mod tests {
    use http::header::HeaderValue;

    use super::*;

    #[test]
    fn media_types_are_compared_without_parameters() {
        let of =
            |value: &'static str| HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(value))]);
        assert!(is_type(&of("application/json"), b"application/json"));
        assert!(is_type(&of("Application/JSON; charset=utf-8"), b"application/json"));
        assert!(is_type(&of("text/event-stream; charset=utf-8"), b"text/event-stream"));
        assert!(!is_type(&of("application/jsonl"), b"application/json"));
        assert!(!is_type(&HeaderMap::new(), b"application/json"));
    }
}
