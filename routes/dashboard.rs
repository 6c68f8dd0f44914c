//! The dashboard's files, which are part of the program. They hold nothing of the fleet: the page asks the
//! operators' endpoints for that, with the operator's token.
//! Must never serve anything but these files.

use std::sync::LazyLock;

use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderMap, HeaderName, HeaderValue, IF_NONE_MATCH};
use http::{StatusCode, header};
use sha2::{Digest, Sha256};

use crate::error::RouteError;
use crate::extract::Segments;

/// The page may load its own files and speak to this router, and nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const IMAGE: &str = "image/svg+xml";

struct File {
    name: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
    tag: LazyLock<Option<HeaderValue>>,
}

macro_rules! files {
    ($($name:literal: $kind:expr),* $(,)?) => {
        [$({
            const BYTES: &[u8] = include_bytes!(concat!("../static/", $name));
            File { name: $name, kind: $kind, bytes: BYTES, tag: LazyLock::new(|| tag(BYTES)) }
        }),*]
    };
}

static FILES: [File; 11] = files! {
    "index.html": HTML,
    "style.css": STYLE,
    "app.js": SCRIPT,
    "state.js": SCRIPT,
    "stream.js": SCRIPT,
    "columns.js": SCRIPT,
    "flows.js": SCRIPT,
    "panels.js": SCRIPT,
    "timeline.js": SCRIPT,
    "dom.js": SCRIPT,
    "icon.svg": IMAGE,
};

/// A digest of the bytes: what has changed with the program is fetched again.
fn tag(bytes: &[u8]) -> Option<HeaderValue> {
    let digest = Sha256::digest(bytes);
    let hex: String = digest.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    HeaderValue::from_str(&format!("\"{hex}\"")).ok()
}

pub(crate) async fn page(headers: HeaderMap) -> Result<Response, RouteError> {
    file("index.html", &headers)
}

pub(crate) async fn asset(
    Segments(name): Segments<String>,
    headers: HeaderMap,
) -> Result<Response, RouteError> {
    file(&name, &headers)
}

fn file(name: &str, headers: &HeaderMap) -> Result<Response, RouteError> {
    let file = FILES
        .iter()
        .find(|file| file.name == name)
        .ok_or_else(|| RouteError::UnknownFile { name: name.to_owned() })?;
    let known = headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let tag = file.tag.as_ref();
    let is_known = known
        .flat_map(|list| list.split(','))
        .map(|one| one.trim().trim_start_matches("W/"))
        .any(|one| one == "*" || tag.is_some_and(|tag| tag.as_bytes() == one.as_bytes()));
    let mut response = match is_known {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => ([(CONTENT_TYPE, file.kind)], file.bytes).into_response(),
    };
    let answer = response.headers_mut();
    if let Some(tag) = tag {
        answer.insert(ETAG, tag.clone());
    }
    for (name, value) in [
        (CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        answer.insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}
