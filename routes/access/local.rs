//! Whether a request comes from a program on this host: not from elsewhere, not through a proxy, and
//! not from a web page that a browser on this host shows. Fails closed.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use axum::extract::{ConnectInfo, Request};
use http::header::{FORWARDED, HOST, HeaderName, ORIGIN, VIA};
use http::uri::{Authority, Uri};

/// Headers that a forwarding proxy adds: the TCP peer is then the proxy and says nothing about the client.
const FORWARDING: [HeaderName; 4] =
    [FORWARDED, VIA, HeaderName::from_static("x-forwarded-for"), HeaderName::from_static("x-real-ip")];

/// What a browser says about the page that made it ask.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Why a client is not taken for one on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotLocal {
    /// Its address is not a loopback address, or is unknown.
    Address,
    /// The request came through a forwarding proxy.
    Forwarded,
    /// The request names a host by a name that somebody's DNS may have bound to this host.
    HostName,
    /// A page of another origin made the browser ask.
    CrossSite,
}

impl fmt::Display for NotLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Address => "the client is on another host",
            Self::Forwarded => "the request came through a proxy",
            Self::HostName => "the Host header is neither an address nor a name that only this host has",
            Self::CrossSite => "a page of another origin asks",
        })
    }
}

/// Checks that a request comes from this host.
///
/// # Errors
/// Why it is not taken for such a one.
pub(super) fn check(request: &Request) -> Result<(), NotLocal> {
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    // A dual-stack socket shows 127.0.0.1 as ::ffff:127.0.0.1.
    if !peer.is_some_and(|ConnectInfo(address)| address.ip().to_canonical().is_loopback()) {
        return Err(NotLocal::Address);
    }
    if FORWARDING.iter().any(|name| request.headers().contains_key(name)) {
        return Err(NotLocal::Forwarded);
    }
    if !authorities(request).all(|authority| authority.is_some_and(|name| is_local_name(name.host()))) {
        return Err(NotLocal::HostName);
    }
    if is_cross_site(request) { Err(NotLocal::CrossSite) } else { Ok(()) }
}

/// Whether a browser asks on behalf of a page that this host did not serve.
pub(super) fn is_cross_site(request: &Request) -> bool {
    let headers = request.headers();
    let of_page = |value: &http::HeaderValue| {
        // `none` is a person who typed the address.
        !matches!(value.as_bytes(), b"same-origin" | b"none")
    };
    if headers.get_all(SEC_FETCH_SITE).iter().any(of_page) {
        return true;
    }
    headers.get_all(ORIGIN).iter().any(|origin| {
        let origin = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
        let origin = origin.as_ref().and_then(Uri::authority);
        // An opaque origin, "null", has none.
        !origin.is_some_and(|origin| authorities(request).all(|own| own.as_ref() == Some(origin)))
    })
}

/// The hosts that a request names, in its target and its Host lines.
fn authorities(request: &Request) -> impl Iterator<Item = Option<Authority>> {
    let lines = request.headers().get_all(HOST).iter();
    let from_header = lines.map(|host| Authority::try_from(host.as_bytes()).ok());
    from_header.chain(request.uri().authority().cloned().map(Some))
}

/// Whether a DNS answer under somebody else's control cannot have led here under this name. A name of
/// a single label can: search domains are added to it.
fn is_local_name(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let lower = bare.to_ascii_lowercase();
    bare.parse::<IpAddr>().is_ok() || lower == "localhost" || lower.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn only_names_that_no_outside_dns_can_hold_are_local() {
        for name in ["127.0.0.1", "10.1.2.3", "[::1]", "localhost", "LOCALHOST", "a.localhost"] {
            assert!(is_local_name(name), "{name}");
        }
        for name in ["example.com", "127.0.0.1.example.com", "localhost.example.com", "localhost.", "box", ""]
        {
            assert!(!is_local_name(name), "{name}");
        }
    }

    #[test]
    fn a_page_is_known_by_what_its_browser_says() {
        let cross_site = |pairs: &[(&str, &str)]| {
            let request =
                pairs.iter().fold(Request::builder().header("host", "localhost:8000"), |request, pair| {
                    request.header(pair.0, pair.1)
                });
            is_cross_site(&request.body(Body::empty()).unwrap())
        };
        assert!(!cross_site(&[]));
        assert!(!cross_site(&[("origin", "http://localhost:8000"), ("sec-fetch-site", "same-origin")]));
        assert!(!cross_site(&[("sec-fetch-site", "none")]));
        for page in ["https://example.org", "http://localhost:9000", "http://127.0.0.1:8000", "null", ""] {
            assert!(cross_site(&[("origin", page)]), "{page}");
        }
        for site in ["cross-site", "same-site", "what"] {
            assert!(cross_site(&[("sec-fetch-site", site)]), "{site}");
        }
    }
}
