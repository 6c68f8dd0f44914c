//! Who may use an endpoint: holders of a credential for it, or, where none is configured, clients on
//! this host (operators' and engines' endpoints) or everybody (inference).
//! Must never log or echo a token, nor end a comparison early.

mod local;
mod rules;
mod secret;

use std::sync::Arc;

use arc_swap::ArcSwap;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::HeaderMap;
use http::header::{AUTHORIZATION, CACHE_CONTROL, HeaderName, HeaderValue};
use kvbaton_proxy::{Client, ModelScope, Proxy, Writer};

pub use local::NotLocal;
pub use rules::{CertificateNames, Credential, Duty, Rules};
pub use secret::{SecretDigest, SecretError};

use crate::Audience;
use crate::error::RouteError;

/// Where Anthropic's clients put their key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The rules in force; clones share them, and they can be exchanged while requests run.
#[derive(Clone)]
pub struct Access(Arc<ArcSwap<Rules>>);

impl Access {
    /// Puts rules in force.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(rules)))
    }

    /// Exchanges the rules; requests that were let in go on.
    pub fn replace(&self, rules: Rules) {
        self.0.store(Arc::new(rules));
    }
}

/// What a guard needs.
#[derive(Clone)]
pub(crate) struct Gate {
    pub(crate) access: Access,
    pub(crate) proxy: Proxy,
    pub(crate) audience: Audience,
}

/// Who a client is. Its key stays here: engines that need one have a token of their own in the settings.
pub(crate) fn let_in(access: &Access, proxy: &Proxy, request: &mut Request) -> Result<Client, RouteError> {
    if proxy.has_sent(request.headers()) {
        return Err(RouteError::Loop);
    }
    let client = client(&access.0.load(), request)?;
    if client.key.is_some() {
        request.headers_mut().remove(AUTHORIZATION);
        request.headers_mut().remove(X_API_KEY);
    }
    Ok(client)
}

/// Lets a request through to an endpoint, with who sent it in its extensions, or refuses it.
pub(crate) async fn guard(
    State(gate): State<Gate>,
    mut request: Request,
    next: Next,
) -> Result<Response, RouteError> {
    match gate.audience {
        Audience::Everybody => Ok(next.run(request).await),
        Audience::Clients => {
            let client = let_in(&gate.access, &gate.proxy, &mut request)?;
            request.extensions_mut().insert(client);
            Ok(next.run(request).await)
        }
        Audience::Engines | Audience::Operators => {
            let writer = holder(&gate.access.0.load_full(), gate.audience, &request)?;
            request.extensions_mut().insert(writer);
            let mut response = next.run(request).await;
            response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            Ok(response)
        }
    }
}

/// Who uses an operators' or engines' endpoint.
fn holder(rules: &Rules, audience: Audience, request: &Request) -> Result<Writer, RouteError> {
    let duties: &[Duty] = match audience {
        Audience::Engines => &[Duty::Operator, Duty::Engine],
        Audience::Operators | Audience::Clients | Audience::Everybody => &[Duty::Operator],
    };
    if !rules.has(duties) {
        local::check(request).map_err(RouteError::NotLocal)?;
        return Ok(Writer::Trusted);
    }
    let found = match bearer(request.headers()) {
        Some(token) => rules.by_secret(duties, token).ok_or(RouteError::TokenWrong)?,
        None => by_certificate(rules, duties, request)?.ok_or(RouteError::TokenMissing)?,
    };
    let credential = Arc::clone(&found.name);
    Ok(match found.duty {
        Duty::Engine => Writer::Engine { credential, models: found.models.clone() },
        Duty::Operator | Duty::Client => Writer::Operator(credential),
    })
}

/// Who uses an inference endpoint.
fn client(rules: &Rules, request: &Request) -> Result<Client, RouteError> {
    let duties = &[Duty::Client];
    if !rules.has(duties) {
        return Ok(Client { key: None, models: ModelScope::All });
    }
    let headers = request.headers();
    let presented = bearer(headers).or_else(|| headers.get(X_API_KEY).map(|key| key.as_bytes().trim_ascii()));
    let found = match presented {
        Some(key) => rules.by_secret(duties, key).ok_or(RouteError::KeyWrong)?,
        None => by_certificate(rules, duties, request)?.ok_or(RouteError::KeyMissing)?,
    };
    Ok(Client { key: Some(Arc::clone(&found.name)), models: found.models.clone() })
}

/// The credential that the connection's certificate stands for. A browser shows a certificate for
/// whatever page asks it to, so the page is looked at too.
fn by_certificate<'a>(
    rules: &'a Rules,
    duties: &[Duty],
    request: &Request,
) -> Result<Option<&'a Credential>, RouteError> {
    let names = request.extensions().get::<CertificateNames>();
    let found = names.and_then(|names| rules.by_certificate(duties, names));
    if found.is_some() && local::is_cross_site(request) {
        return Err(RouteError::NotLocal(NotLocal::CrossSite));
    }
    Ok(found)
}

/// The token of an `Authorization: Bearer` header.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let at = value.iter().position(|byte| *byte == b' ')?;
    let (scheme, token) = value.split_at(at);
    scheme.eq_ignore_ascii_case(b"bearer").then(|| token.trim_ascii())
}
