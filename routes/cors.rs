//! Which pages of other origins may call the inference endpoints from a browser.
//! Must never allow cookies, nor speak for the operators' and engines' endpoints.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HeaderValue, ORIGIN, VARY,
};
use http::{Method, StatusCode};

use crate::{Audience, ENDPOINTS};

/// What a page may read of an answer, beyond what it always may.
const EXPOSED: HeaderValue = HeaderValue::from_static("x-request-id, retry-after, www-authenticate");
const METHODS: HeaderValue = HeaderValue::from_static("GET, POST");

/// The rule for pages of other origins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    /// Who may ask.
    pub origins: Origins,
    /// How long a browser may remember that.
    pub max_age: Duration,
}

/// A set of origins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origins {
    /// No page of another origin.
    #[default]
    Nobody,
    /// Every page.
    Everybody,
    /// Pages of these.
    These(Arc<[HeaderValue]>),
}

/// A text that is no origin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an origin: scheme, host and port without a path, in lower case")]
pub struct NotAnOrigin(pub String);

impl Origins {
    /// Reads a list as the settings have it; `*` is every origin.
    ///
    /// # Errors
    /// The first text that is no origin.
    pub fn new(list: &[String]) -> Result<Self, NotAnOrigin> {
        if list.is_empty() {
            return Ok(Self::Nobody);
        }
        if list.iter().any(|origin| origin == "*") {
            return Ok(Self::Everybody);
        }
        let origins = list.iter().map(|text| origin(text).ok_or_else(|| NotAnOrigin(text.clone())));
        Ok(Self::These(origins.collect::<Result<_, _>>()?))
    }

    /// What is answered to a page of this origin.
    fn allow(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        match self {
            Self::Nobody => None,
            Self::Everybody => Some(HeaderValue::from_static("*")),
            Self::These(origins) => origins.contains(origin).then(|| origin.clone()),
        }
    }
}

fn origin(text: &str) -> Option<HeaderValue> {
    let (scheme, host) = text.split_once("://")?;
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.:[]+_".contains(&byte);
    let fits = |part: &str| !part.is_empty() && part.bytes().all(plain);
    if fits(scheme) && fits(host) { HeaderValue::from_str(text).ok() } else { None }
}

/// Whether any page of another origin is answered to.
pub(crate) fn applies(cors: &Cors) -> bool {
    cors.origins != Origins::Nobody
}

/// Answers a browser's question before a request, and says on answers who may read them.
pub(crate) async fn share(State(cors): State<Cors>, request: Request, next: Next) -> Response {
    if !applies(&cors) || !is_for_pages(request.uri().path()) {
        return next.run(request).await;
    }
    let origin = request.headers().get(ORIGIN).cloned();
    let allowed = origin.as_ref().and_then(|origin| cors.origins.allow(origin));
    let asks_first =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match (&allowed, asks_first) {
        (Some(_), true) => allowed_request(&cors, &request),
        _ => next.run(request).await,
    };
    let headers = response.headers_mut();
    if let Some(allowed) = allowed {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    }
    // A cache must not give one origin's answer to another.
    headers.append(VARY, HeaderValue::from_static("origin"));
    response
}

/// What a page may send; nothing is kept from it, since no cookie or certificate of the browser counts.
fn allowed_request(cors: &Cors, request: &Request) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    if let Some(asked) = request.headers().get(ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
    }
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from(cors.max_age.as_secs()));
    response
}

fn is_for_pages(path: &str) -> bool {
    let of_others = |audience| matches!(audience, Audience::Engines | Audience::Operators);
    let closed = ENDPOINTS.iter().filter(|endpoint| of_others(endpoint.audience));
    let first = |path: &'static str| path.split('/').nth(1).unwrap_or_default();
    let asked = path.split('/').nth(1).unwrap_or_default();
    !closed.map(|endpoint| first(endpoint.path)).any(|first| first == asked)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origins(list: &[&str]) -> Result<Origins, NotAnOrigin> {
        Origins::new(&list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn origins_are_compared_whole() {
        let these = origins(&["https://chat.example.org", "http://[::1]:3000"]).unwrap();
        let allows = |origin: &'static str| these.allow(&HeaderValue::from_static(origin)).is_some();
        assert!(allows("https://chat.example.org"));
        assert!(allows("http://[::1]:3000"));
        for other in
            ["http://chat.example.org", "https://chat.example.org.evil", "https://x.chat.example.org", "null"]
        {
            assert!(!allows(other), "{other}");
        }
        assert_eq!(origins(&[]), Ok(Origins::Nobody));
        assert_eq!(origins(&["https://a", "*"]), Ok(Origins::Everybody));
    }

    #[test]
    fn what_is_no_origin_is_refused() {
        for text in ["chat.example.org", "https://", "https://a/", "https://A", "https://a b", "null"] {
            assert_eq!(origins(&[text]), Err(NotAnOrigin(text.to_owned())));
        }
    }

    #[test]
    fn operators_and_engines_are_not_for_pages() {
        for path in ["/admin/peers", "/registry/v1/engines", "/admin", "/registry/nothing"] {
            assert!(!is_for_pages(path), "{path}");
        }
        for path in ["/v1/models", "/v1/chat/completions", "/readyz", "/administration"] {
            assert!(is_for_pages(path), "{path}");
        }
    }
}
