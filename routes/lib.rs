//! kvbaton's HTTP surface: which endpoints exist, who may use them, how bodies come in and how
//! errors go out. Everything that is decided or moved belongs to `kvbaton-proxy`.
//! Must never talk to an engine itself, nor map an error to a status outside `error.rs`.

mod access;
mod admin;
mod error;
mod extract;
mod health;
mod held;
mod keep_alive;
mod openai;
mod registry;
mod unread;

use std::time::Duration;

use axum::Router;
use axum::extract::FromRef;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{MethodRouter, delete, get, post, put};
use http::Method;
use kvbaton_proxy::{Endpoint, Proxy};

pub use access::{Access, AdminToken, NotLocal, TokenError};

use crate::error::RouteError;
use crate::extract::BodyBound;

/// Everything that the endpoints share; cheap to clone.
#[derive(Clone)]
pub struct State {
    /// The core that answers.
    pub proxy: Proxy,
    /// Who may use the operator's endpoints.
    pub access: Access,
    /// Bounds on what is read from clients.
    pub limits: Limits,
}

/// Bounds on what is read from clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest request body, in bytes; a larger one is answered with 413.
    pub body_bytes: usize,
    /// Largest handshake payload, in bytes; never more than `body_bytes` counts.
    pub payload_bytes: usize,
    /// How long a client that is sending a body may be silent before it is answered with 408.
    pub body_silence: Duration,
    /// How often a client that waits for a stream gets a comment; zero for never.
    pub keep_alive: Duration,
}

impl Limits {
    const fn body_bound(&self) -> BodyBound {
        BodyBound { bytes: self.body_bytes, silence: self.body_silence }
    }

    fn payload_bound(&self) -> BodyBound {
        BodyBound { bytes: self.payload_bytes.min(self.body_bytes), silence: self.body_silence }
    }
}

impl FromRef<State> for Proxy {
    fn from_ref(state: &State) -> Self {
        state.proxy.clone()
    }
}

/// For whom an endpoint is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Audience {
    /// Whoever reaches the listener.
    Everybody,
    /// Those whom [`Access`] lets through.
    Operators,
}

/// One mounted endpoint.
pub struct EndpointDoc {
    /// Its method; `HEAD` is answered wherever `GET` is.
    pub method: Method,
    /// Its path in the router's syntax: `{name}` is one segment, `{*name}` all that follow.
    pub path: &'static str,
    /// For whom it is there.
    pub audience: Audience,
    mount: fn() -> MethodRouter<State>,
}

impl EndpointDoc {
    const fn open(method: Method, path: &'static str, mount: fn() -> MethodRouter<State>) -> Self {
        Self { method, path, audience: Audience::Everybody, mount }
    }

    const fn guarded(method: Method, path: &'static str, mount: fn() -> MethodRouter<State>) -> Self {
        Self { method, path, audience: Audience::Operators, mount }
    }

    const fn passed_through(method: Method, path: &'static str) -> Self {
        let mount: fn() -> MethodRouter<State> = match method {
            Method::GET => || get(openai::pass_through),
            _ => || post(openai::pass_through),
        };
        Self { method, path, audience: Audience::Everybody, mount }
    }

    /// The path as `openapi.yaml` writes it.
    #[must_use]
    pub fn contract_path(&self) -> String {
        self.path.replace("{*", "{")
    }
}

/// Every endpoint that exists; the router is built from this list and from nothing else.
///
/// What engines offer beyond it (sleep, profiling, weight updates, adapters, cache resets, ...)
/// changes an engine for everybody or bypasses the hand-off, and stays out of clients' reach.
pub const ENDPOINTS: &[EndpointDoc] = &[
    // Prefill, hand-off, decode.
    EndpointDoc::open(Method::POST, "/v1/completions", || {
        post(|state, request| openai::forward(Endpoint::Completions, state, request))
    }),
    EndpointDoc::open(Method::POST, "/v1/chat/completions", || {
        post(|state, request| openai::forward(Endpoint::ChatCompletions, state, request))
    }),
    EndpointDoc::open(Method::POST, "/v1/responses", || {
        post(|state, request| openai::forward(Endpoint::Responses, state, request))
    }),
    EndpointDoc::open(Method::POST, "/v1/messages", || {
        post(|state, request| openai::forward(Endpoint::Messages, state, request))
    }),
    EndpointDoc::open(Method::GET, "/v1/models", || get(openai::models)),
    EndpointDoc::open(Method::GET, "/v1/models/{*model}", || get(openai::model)),
    // One decode engine answers alone.
    EndpointDoc::passed_through(Method::POST, "/v1/messages/count_tokens"),
    EndpointDoc::passed_through(Method::POST, "/v1/embeddings"),
    EndpointDoc::passed_through(Method::POST, "/v2/embed"),
    EndpointDoc::passed_through(Method::POST, "/pooling"),
    EndpointDoc::passed_through(Method::POST, "/classify"),
    EndpointDoc::passed_through(Method::POST, "/score"),
    EndpointDoc::passed_through(Method::POST, "/v1/score"),
    EndpointDoc::passed_through(Method::POST, "/rerank"),
    EndpointDoc::passed_through(Method::POST, "/v1/rerank"),
    EndpointDoc::passed_through(Method::POST, "/v2/rerank"),
    EndpointDoc::passed_through(Method::POST, "/tokenize"),
    EndpointDoc::passed_through(Method::POST, "/detokenize"),
    EndpointDoc::passed_through(Method::GET, "/version"),
    // Registry.
    EndpointDoc::guarded(Method::GET, "/registry/v1/engines", || get(registry::list)),
    EndpointDoc::guarded(Method::PUT, "/registry/v1/engines/{engine_id}", || put(registry::register)),
    EndpointDoc::guarded(Method::GET, "/registry/v1/engines/{engine_id}", || get(registry::engine)),
    EndpointDoc::guarded(Method::DELETE, "/registry/v1/engines/{engine_id}", || delete(registry::remove)),
    EndpointDoc::guarded(Method::POST, "/registry/v1/engines/{engine_id}/heartbeat", || {
        post(registry::heartbeat)
    }),
    EndpointDoc::guarded(Method::PUT, registry::RANK_PATH, || put(registry::register_rank)),
    EndpointDoc::guarded(Method::GET, registry::RANK_PATH, || get(registry::look_up)),
    EndpointDoc::guarded(Method::GET, "/registry/v1/watch", || get(registry::watch)),
    // Admin.
    EndpointDoc::guarded(Method::GET, "/admin/peers", || get(admin::peers)),
    EndpointDoc::guarded(Method::POST, "/admin/peers", || post(admin::add_peer)),
    EndpointDoc::guarded(Method::GET, "/admin/peers/{id}", || get(admin::peer)),
    EndpointDoc::guarded(Method::DELETE, "/admin/peers/{id}", || delete(admin::remove_peer)),
    EndpointDoc::guarded(Method::POST, "/admin/peers/{id}/drain", || post(admin::drain_peer)),
    EndpointDoc::guarded(Method::POST, "/admin/peers/{id}/quarantine", || post(admin::quarantine_peer)),
    EndpointDoc::guarded(Method::POST, "/admin/peers/{id}/resume", || post(admin::resume_peer)),
    EndpointDoc::guarded(Method::GET, "/admin/compatibility", || get(admin::compatibility)),
    EndpointDoc::guarded(Method::GET, "/admin/handoffs", || get(admin::hand_offs)),
    // Health.
    EndpointDoc::open(Method::GET, "/livez", || get(health::live)),
    EndpointDoc::open(Method::GET, "/readyz", || get(health::ready)),
    EndpointDoc::open(Method::GET, "/metrics", || get(health::metrics)),
];

/// Builds the router from [`ENDPOINTS`].
///
/// Serve it with `into_make_service_with_connect_info::<SocketAddr>()`: without the client's
/// address nobody passes [`Access::LoopbackOnly`].
pub fn app(state: State) -> Router {
    let mut router = Router::new();
    for endpoint in ENDPOINTS {
        let mut handlers = (endpoint.mount)();
        if endpoint.audience == Audience::Operators {
            // Around the handler only: its extractors, which read the body, run after the check.
            handlers = handlers.route_layer(from_fn_with_state(state.access.clone(), access::guard));
        }
        router = router.route(endpoint.path, handlers);
    }
    router
        // After the routes: it fills in the fallback of those that exist by now.
        .method_not_allowed_fallback(|| async { RouteError::MethodNotAllowed })
        .fallback(|| async { RouteError::UnknownPath })
        // Around the whole router: any handler, and both fallbacks, may leave a body unread. Twice
        // the limit, so that a body somewhat over it does not cost its sender the connection.
        .layer(from_fn_with_state(state.limits.body_bytes.saturating_mul(2), unread::discard_unread))
        // Outermost: no answer may leave without the request's id.
        .layer(from_fn(extract::identify))
        .with_state(state)
}
