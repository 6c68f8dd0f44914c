//! Who may use the operator's endpoints (admin and registry): clients on this host, or whoever
//! holds the configured token. Fails closed: an unknown peer address is not local.
//! Must never log or echo a token.

use std::fmt;
use std::hint::black_box;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header::{AUTHORIZATION, CACHE_CONTROL, FORWARDED, HOST, HeaderName, HeaderValue, VIA};
use http::uri::Authority;

use crate::error::RouteError;

/// Headers that a forwarding proxy adds: the TCP peer is then the proxy and says nothing about the client.
const FORWARDING: [HeaderName; 4] =
    [FORWARDED, VIA, HeaderName::from_static("x-forwarded-for"), HeaderName::from_static("x-real-ip")];

/// The rule for the operator's endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only clients whose own address is a loopback address.
    LoopbackOnly,
    /// Only clients that present this token, wherever they are.
    Token(AdminToken),
}

/// A bearer token that an HTTP header can carry; its text never appears in debug output.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminToken(Arc<str>);

/// A text that cannot serve as an admin token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// It is empty, so everybody would hold it.
    #[error("the admin token is empty")]
    Empty,
    /// It holds a space, a control character or a character outside ASCII.
    #[error("the admin token holds a character other than visible ASCII")]
    NotVisibleAscii,
}

impl AdminToken {
    /// Takes the text of a token.
    ///
    /// # Errors
    /// When it is empty or holds anything but visible ASCII.
    pub fn new(text: &str) -> Result<Self, TokenError> {
        if text.is_empty() {
            return Err(TokenError::Empty);
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(TokenError::NotVisibleAscii);
        }
        Ok(Self(text.into()))
    }

    /// Compares without an early end, so that the time taken tells nothing but the length.
    fn matches(&self, presented: &[u8]) -> bool {
        let expected = self.0.as_bytes();
        if expected.len() != presented.len() {
            return false;
        }
        let difference = expected.iter().zip(presented).fold(0_u8, |sum, (a, b)| black_box(sum | (a ^ b)));
        difference == 0
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken(..)")
    }
}

/// Why a client is not taken for one on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotLocal {
    /// Its address is not a loopback address, or is unknown.
    Address,
    /// The request came through a forwarding proxy.
    Forwarded,
    /// The request names a host by a public DNS name: a web page may have bound that name to this host.
    HostName,
}

impl fmt::Display for NotLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Address => "the client is on another host",
            Self::Forwarded => "the request came through a proxy",
            Self::HostName => "the Host header is neither an address nor a local name",
        })
    }
}

/// Lets a request through to an operator's endpoint, or refuses it.
pub(crate) async fn guard(
    State(access): State<Access>,
    request: Request,
    next: Next,
) -> Result<Response, RouteError> {
    match &access {
        Access::LoopbackOnly => check_local(&request).map_err(RouteError::NotLocal)?,
        Access::Token(token) => check_token(token, &request)?,
    }
    let mut response = next.run(request).await;
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn check_local(request: &Request) -> Result<(), NotLocal> {
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    // A dual-stack socket shows 127.0.0.1 as ::ffff:127.0.0.1.
    if !peer.is_some_and(|ConnectInfo(address)| address.ip().to_canonical().is_loopback()) {
        return Err(NotLocal::Address);
    }
    if FORWARDING.iter().any(|name| request.headers().contains_key(name)) {
        return Err(NotLocal::Forwarded);
    }
    let from_header =
        request.headers().get_all(HOST).iter().map(|host| Authority::try_from(host.as_bytes()).ok());
    let from_target = request.uri().authority().cloned().map(Some);
    let all_local = from_header
        .chain(from_target)
        .all(|authority| authority.is_some_and(|authority| is_local_name(authority.host())));
    if all_local { Ok(()) } else { Err(NotLocal::HostName) }
}

/// Whether a DNS answer under somebody else's control cannot have led here under this name.
fn is_local_name(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let lower = bare.to_ascii_lowercase();
    bare.parse::<IpAddr>().is_ok() || !lower.contains('.') || lower.ends_with(".localhost")
}

fn check_token(token: &AdminToken, request: &Request) -> Result<(), RouteError> {
    let Some(value) = request.headers().get(AUTHORIZATION) else {
        return Err(RouteError::TokenMissing);
    };
    let Some((scheme, presented)) = split_once(value.as_bytes(), b' ') else {
        return Err(RouteError::TokenMissing);
    };
    if !scheme.eq_ignore_ascii_case(b"bearer") {
        return Err(RouteError::TokenMissing);
    }
    if token.matches(presented.trim_ascii()) { Ok(()) } else { Err(RouteError::TokenWrong) }
}

fn split_once(bytes: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|byte| *byte == separator)?;
    Some((bytes.get(..at)?, bytes.get(at + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_must_fit_a_header() {
        assert_eq!(AdminToken::new(""), Err(TokenError::Empty));
        assert_eq!(AdminToken::new("two words"), Err(TokenError::NotVisibleAscii));
        assert_eq!(AdminToken::new("schlüssel"), Err(TokenError::NotVisibleAscii));
        assert!(AdminToken::new("s3cret-~!").is_ok());
    }

    #[test]
    fn a_token_is_compared_whole_and_never_printed() {
        let token = AdminToken::new("s3cret").unwrap();
        assert!(token.matches(b"s3cret"));
        assert!(!token.matches(b"s3creT"));
        assert!(!token.matches(b"s3cre"));
        assert!(!token.matches(b"s3cret2"));
        assert_eq!(format!("{:?}", Access::Token(token)), "Token(AdminToken(..))");
    }

    #[test]
    fn only_names_that_no_outside_dns_can_hold_are_local() {
        for name in ["127.0.0.1", "10.1.2.3", "[::1]", "localhost", "LOCALHOST", "box", "a.localhost"] {
            assert!(is_local_name(name), "{name}");
        }
        for name in ["example.com", "127.0.0.1.example.com", "localhost.example.com", "localhost."] {
            assert!(!is_local_name(name), "{name}");
        }
    }
}
