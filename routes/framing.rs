//! Requests whose end or addressee another server on the way may see otherwise. The HTTP library
//! refuses most of them; this refuses the rest, and trusts a connection no further.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::HeaderMap;
use http::header::{CONNECTION, CONTENT_LENGTH, HOST, HeaderValue, TRANSFER_ENCODING};

use crate::error::RouteError;

/// Refuses ambiguous requests.
pub(crate) async fn refuse_ambiguous(request: Request, next: Next) -> Response {
    if is_ambiguous(request.headers()) {
        let mut response = RouteError::Ambiguous.into_response();
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        return response;
    }
    // The HTTP library drops a Content-Length that follows a Transfer-Encoding, so nobody can tell here
    // whether there was one. What such a body is followed by is never taken for a request.
    let chunked = request.headers().contains_key(TRANSFER_ENCODING);
    let mut response = next.run(request).await;
    if chunked {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

pub(crate) fn is_ambiguous(headers: &HeaderMap) -> bool {
    let count = |name| if headers.contains_key(&name) { headers.get_all(name).iter().count() } else { 0 };
    let codings = headers.get_all(TRANSFER_ENCODING);
    let odd_coding = codings.iter().any(|value| !value.as_bytes().eq_ignore_ascii_case(b"chunked"));
    count(HOST) > 1
        || count(CONTENT_LENGTH) > 1
        || count(TRANSFER_ENCODING) > 1
        || odd_coding
        || (count(TRANSFER_ENCODING) > 0 && count(CONTENT_LENGTH) > 0)
}

#[cfg(test)]
mod tests {
    use http::HeaderName;

    use super::*;

    fn ambiguous(lines: &[(&'static str, &'static str)]) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        is_ambiguous(&headers)
    }

    #[test]
    fn what_two_servers_may_read_differently_is_ambiguous() {
        assert!(!ambiguous(&[("host", "a"), ("content-length", "1")]));
        assert!(!ambiguous(&[("host", "a"), ("transfer-encoding", "Chunked")]));
        for lines in [
            &[("host", "a"), ("host", "a")][..],
            &[("content-length", "1"), ("content-length", "1")],
            &[("transfer-encoding", "chunked"), ("content-length", "1")],
            &[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
            &[("transfer-encoding", "gzip, chunked")],
            &[("transfer-encoding", "identity")],
        ] {
            assert!(ambiguous(lines), "{lines:?}");
        }
    }
}
