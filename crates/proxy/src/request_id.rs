//! The id that names one request on both legs, in logs and in the answer.

use http::header::{HeaderName, HeaderValue};
use uuid::Uuid;

/// The header that carries the id.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest id taken from a client; engines build block and notification keys from it.
const MAX_LEN: usize = 256;

/// One request's id, usable as a header value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(String);

impl RequestId {
    /// The client's id when it is usable, else a new one. Usable is visible ASCII of at most 256
    /// characters without a comma: engines join ids with commas in their heartbeats.
    #[must_use]
    pub fn accept(header: Option<&HeaderValue>) -> Self {
        let usable = header.and_then(|value| value.to_str().ok()).filter(|id| {
            !id.is_empty() && id.len() <= MAX_LEN && id.bytes().all(|b| b.is_ascii_graphic() && b != b',')
        });
        Self(usable.map_or_else(|| Uuid::new_v4().simple().to_string(), str::to_owned))
    }

    /// The id of a request's n-th prefill, the first of which has the request's own: engines of version
    /// 2 know a hand-off by it alone, and would take two of one request for one.
    #[must_use]
    pub(crate) fn of_try(&self, nth: u32) -> Self {
        if nth > 1 { Self(format!("{}-{nth}", self.0)) } else { self.clone() }
    }

    /// An id for both legs that no other request has, whatever clients call theirs: in push mode engines know
    /// by it which blocks are meant for whom. Must not end like what engines add to ids themselves.
    #[must_use]
    pub(crate) fn unique(&self) -> Self {
        Self(format!("{}.{}", self.0, Uuid::new_v4().simple()))
    }

    /// The id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id as a header value.
    #[must_use]
    pub fn header_value(&self) -> HeaderValue {
        HeaderValue::from_str(&self.0).unwrap_or_else(|_| HeaderValue::from_static("invalid"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usable_id_is_kept() {
        assert_eq!(RequestId::accept(Some(&HeaderValue::from_static("abc-1"))).as_str(), "abc-1");
    }

    #[test]
    fn a_prefill_that_is_tried_again_has_an_id_of_its_own() {
        let id = RequestId::accept(Some(&HeaderValue::from_static("abc-1")));
        assert_eq!(id.of_try(1), id);
        assert_eq!(id.of_try(2).as_str(), "abc-1-2");
    }

    #[test]
    fn an_unusable_id_is_replaced() {
        for bad in ["", "a,b", "a b", "\u{e9}"] {
            let value = HeaderValue::from_bytes(bad.as_bytes()).unwrap();
            let id = RequestId::accept(Some(&value));
            assert_eq!(id.as_str().len(), 32, "{bad:?}");
            assert_eq!(id.header_value().to_str().unwrap(), id.as_str());
        }
        let long = HeaderValue::from_str(&"x".repeat(257)).unwrap();
        assert_eq!(RequestId::accept(Some(&long)).as_str().len(), 32);
    }
}
