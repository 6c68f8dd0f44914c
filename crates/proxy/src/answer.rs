//! An engine's answer on its way to the client: what kind it is, and what of it the client gets.

use std::sync::LazyLock;

use bytes::Bytes;
use http::Response;
use http::header::{CONTENT_TYPE, HeaderMap};
use memchr::memmem::Finder;

use crate::account::Account;
use crate::request::Endpoint;
use crate::splice::{Spliced, Told, client_answer_as};
use crate::stream::RelayBody;
use crate::upstream::response_headers;

/// Where answers count cached tokens; the escape is for whoever spells a key in another way.
static COUNTS: LazyLock<[Finder<'static>; 3]> =
    LazyLock::new(|| ["cached_tokens", "cache_read_input_tokens", "\\u"].map(Finder::new));

/// Where an answer holds a hand-off.
pub(crate) static HAND_OFF: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("kv_transfer_params"));

/// A whole answer of a prefill engine as the client's.
pub(crate) fn relay_whole(head: Response<()>, answer: Bytes, account: &Account) -> Response<RelayBody> {
    let (mut head, ()) = head.into_parts();
    response_headers(&mut head.headers);
    let body = for_client(answer, Endpoint::Completions, Told::default())
        .unwrap_or_else(|| Spliced::from(Bytes::new()));
    let status = head.status.as_u16();
    Response::from_parts(head, RelayBody::whole(body, account.clone(), status))
}

/// The answer as the client gets it, whatever its media type says; none if it seems to hold a hand-off, or
/// must be completed, and cannot be read.
pub(crate) fn for_client(answer: Bytes, endpoint: Endpoint, told: Told<'_>) -> Option<Spliced> {
    let part = told.part;
    let must_be_read = HAND_OFF.find(&answer).is_some()
        || part.is_some_and(|part| part.prompt_logprobs.is_some() || part.echo.is_some());
    // Most engines count no cached tokens, and then P's answer has nothing to add.
    let counts = || COUNTS.iter().any(|name| name.find(&answer).is_some());
    if !must_be_read && told.model.is_none() && (part.is_none() || !counts()) {
        return Some(Spliced::from(answer));
    }
    match client_answer_as(&answer, endpoint, told) {
        Ok(shown) => Some(shown),
        Err(_) if must_be_read => None,
        Err(_) => Some(Spliced::from(answer)),
    }
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
