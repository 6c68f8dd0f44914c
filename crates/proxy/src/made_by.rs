//! Which peers made an answer, told to clients where the operator wants that. Names only, never a URL.

use std::sync::Arc;

use http::Response;
use http::header::{HeaderMap, HeaderName, HeaderValue};

use crate::pool::peer::Peer;
use crate::settings::Settings;

const X_PD_PREFILL: HeaderName = HeaderName::from_static("x-pd-prefill");
const X_PD_DECODE: HeaderName = HeaderName::from_static("x-pd-decode");

/// The peers of one answer; nothing where they are not shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct MadeBy {
    prefill: Option<HeaderValue>,
    decode: Option<HeaderValue>,
}

impl MadeBy {
    /// `prefill` is absent where the decode engine computed the prompt itself, `decode` where the prefill
    /// engine refused.
    pub(crate) fn of(settings: &Settings, prefill: Option<&Arc<Peer>>, decode: Option<&Arc<Peer>>) -> Self {
        if !settings.hand_off.show_peers {
            return Self::default();
        }
        // An id is fit for a path, and so for a header.
        let name = |peer: &Arc<Peer>| HeaderValue::from_str(&peer.id).ok();
        Self { prefill: prefill.and_then(name), decode: decode.and_then(name) }
    }

    pub(crate) fn shown_in<B>(self, mut response: Response<B>) -> Response<B> {
        put(response.headers_mut(), X_PD_PREFILL, self.prefill);
        put(response.headers_mut(), X_PD_DECODE, self.decode);
        response
    }
}

fn put(headers: &mut HeaderMap, name: HeaderName, value: Option<HeaderValue>) {
    if let Some(value) = value {
        headers.insert(name, value);
    }
}
