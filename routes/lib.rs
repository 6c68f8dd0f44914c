//! kvbaton's HTTP surface: which endpoints exist, who may use them, how bodies come in and how
//! errors go out. Everything that is decided or moved belongs to `kvbaton-proxy`.
//! Must never talk to an engine itself, nor map an error to a status outside `error.rs`.

mod access;
mod admin;
mod cors;
mod dashboard;
mod direct;
mod error;
mod extract;
mod framing;
mod health;
mod held;
mod keep_alive;
mod log;
mod observe;
mod openai;
mod registry;
mod reload;
mod strict;
mod unread;

use std::time::Duration;

use axum::Router;
use axum::extract::FromRef;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{MethodRouter, delete, get, post, put};
use http::Method;
use kvbaton_proxy::{Endpoint, Proxy};

pub use access::{Access, CertificateNames, Credential, Duty, NotLocal, Rules, SecretDigest, SecretError};
pub use cors::{Cors, NotAnOrigin, Origins};
pub use direct::Surface;
pub use log::{LogFault, LogState, Logging};
pub use openai::Streamed;
#[cfg(fuzzing)]
pub use registry::read_any;
pub use reload::{NotReloaded, Reload, Reloaded, SharedLimits};

use crate::access::Gate;
use crate::error::RouteError;
use crate::extract::BodyBound;

/// Everything that the endpoints share; cheap to clone.
#[derive(Clone)]
pub struct State {
    /// The core that answers.
    pub proxy: Proxy,
    /// Who may use which endpoints.
    pub access: Access,
    /// Which pages of other origins may call the inference endpoints.
    pub cors: Cors,
    /// Bounds on what is read from clients.
    pub limits: SharedLimits,
    /// Reading the settings again.
    pub reload: Reload,
    /// What the program logs.
    pub logging: Logging,
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
    /// How long a whole request body may take to arrive.
    pub body_whole: Duration,
    /// How often a client that waits for a stream gets a comment; zero for never.
    pub keep_alive: Duration,
}

impl Limits {
    const fn body_bound(&self) -> BodyBound {
        BodyBound { bytes: self.body_bytes, silence: self.body_silence, whole: self.body_whole }
    }

    fn payload_bound(&self) -> BodyBound {
        BodyBound { bytes: self.payload_bytes.min(self.body_bytes), ..self.body_bound() }
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
    /// Holders of an API key, or everybody where there are no keys.
    Clients,
    /// Holders of an engine's or an operator's credential, or clients on this host where there are none.
    Engines,
    /// Holders of an operator's credential, or clients on this host where there are none.
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

    const fn of_engines(method: Method, path: &'static str, mount: fn() -> MethodRouter<State>) -> Self {
        Self { method, path, audience: Audience::Engines, mount }
    }

    const fn of_clients(method: Method, path: &'static str, mount: fn() -> MethodRouter<State>) -> Self {
        Self { method, path, audience: Audience::Clients, mount }
    }

    const fn passed_through(method: Method, path: &'static str) -> Self {
        let mount: fn() -> MethodRouter<State> = match method {
            Method::GET => || get(openai::pass_through),
            _ => || post(openai::pass_through),
        };
        Self { method, path, audience: Audience::Clients, mount }
    }

    /// The path as `openapi.yaml` writes it.
    #[must_use]
    pub fn contract_path(&self) -> String {
        self.path.replace("{*", "{")
    }
}

/// Where Prometheus looks.
const METRICS_PATH: &str = "/metrics";

/// The page for operators; its files are below.
const DASHBOARD_PATH: &str = "/dashboard";

/// Every endpoint that exists; the router is built from this list and from nothing else.
///
/// What engines offer beyond it (sleep, profiling, weight updates, adapters, cache resets, ...)
/// changes an engine for everybody or bypasses the hand-off, and stays out of clients' reach.
pub const ENDPOINTS: &[EndpointDoc] = &[
    // Prefill, hand-off, decode.
    EndpointDoc::of_clients(Method::POST, "/v1/completions", || {
        post(|state, request| openai::forward(Endpoint::Completions, state, request))
    }),
    EndpointDoc::of_clients(Method::POST, "/v1/chat/completions", || {
        post(|state, request| openai::forward(Endpoint::ChatCompletions, state, request))
    }),
    EndpointDoc::of_clients(Method::POST, "/v1/responses", || {
        post(|state, request| openai::forward(Endpoint::Responses, state, request))
    }),
    EndpointDoc::of_clients(Method::POST, "/v1/messages", || {
        post(|state, request| openai::forward(Endpoint::Messages, state, request))
    }),
    EndpointDoc::of_clients(Method::GET, "/v1/models", || get(openai::models)),
    EndpointDoc::of_clients(Method::GET, "/v1/models/{*model}", || get(openai::model)),
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
    EndpointDoc::of_engines(Method::GET, "/registry/v1/engines", || get(registry::list)),
    EndpointDoc::of_engines(Method::PUT, "/registry/v1/engines/{engine_id}", || put(registry::register)),
    EndpointDoc::of_engines(Method::GET, "/registry/v1/engines/{engine_id}", || get(registry::engine)),
    EndpointDoc::of_engines(Method::DELETE, "/registry/v1/engines/{engine_id}", || delete(registry::remove)),
    EndpointDoc::of_engines(Method::POST, "/registry/v1/engines/{engine_id}/heartbeat", || {
        post(registry::heartbeat)
    }),
    EndpointDoc::of_engines(Method::PUT, registry::RANK_PATH, || put(registry::register_rank)),
    EndpointDoc::of_engines(Method::GET, registry::RANK_PATH, || get(registry::look_up)),
    EndpointDoc::of_engines(Method::GET, "/registry/v1/watch", || get(registry::watch)),
    // Admin.
    EndpointDoc::guarded(Method::GET, "/admin/peers", || get(admin::peers)),
    EndpointDoc::guarded(Method::POST, "/admin/peers", || post(admin::add_peer)),
    EndpointDoc::guarded(Method::GET, "/admin/peers/{id}", || get(admin::peer)),
    EndpointDoc::guarded(Method::DELETE, "/admin/peers/{id}", || delete(admin::remove_peer)),
    EndpointDoc::guarded(Method::POST, "/admin/peers/{id}/drain", || post(admin::drain_peer)),
    EndpointDoc::guarded(Method::POST, "/admin/peers/{id}/quarantine", || post(admin::quarantine_peer)),
    EndpointDoc::guarded(Method::POST, "/admin/peers/{id}/resume", || post(admin::resume_peer)),
    EndpointDoc::guarded(Method::GET, "/admin/discovery", || get(admin::discovery)),
    EndpointDoc::guarded(Method::GET, "/admin/compatibility", || get(admin::compatibility)),
    EndpointDoc::guarded(Method::POST, "/admin/cached", || post(admin::cached)),
    EndpointDoc::guarded(Method::POST, "/admin/pairs/{prefill}/{decode}/try", || post(admin::try_pair)),
    EndpointDoc::guarded(Method::GET, "/admin/explain", || get(admin::explain)),
    EndpointDoc::guarded(Method::POST, "/admin/explain", || post(admin::explain_prompt)),
    EndpointDoc::guarded(Method::GET, "/admin/handoffs", || get(admin::hand_offs)),
    EndpointDoc::guarded(Method::POST, "/admin/reload", || post(reload::reload)),
    EndpointDoc::guarded(Method::GET, "/admin/requests", || get(observe::requests)),
    EndpointDoc::guarded(Method::GET, "/admin/requests/{id}", || get(observe::request)),
    EndpointDoc::guarded(Method::GET, "/admin/events", || get(observe::events)),
    // The dashboard, which asks for what it shows.
    EndpointDoc::open(Method::GET, DASHBOARD_PATH, || get(dashboard::page)),
    EndpointDoc::open(Method::GET, "/dashboard/{file}", || get(dashboard::asset)),
    EndpointDoc::guarded(Method::GET, "/admin/log", || get(log::show)),
    EndpointDoc::guarded(Method::PUT, "/admin/log", || put(log::change)),
    // Health.
    EndpointDoc::open(Method::GET, "/livez", || get(health::live)),
    EndpointDoc::open(Method::GET, "/readyz", || get(health::ready)),
    EndpointDoc::open(Method::GET, METRICS_PATH, || get(health::metrics)),
];

/// Which endpoints one listener has; liveness and readiness are on every one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mounts {
    /// The inference endpoints.
    pub clients: bool,
    /// The registry.
    pub engines: bool,
    /// The operators' endpoints, and the page that asks them.
    pub operators: bool,
    /// The metrics page.
    pub metrics: bool,
}

impl Mounts {
    /// Everything on one listener.
    pub const ALL: Self = Self { clients: true, engines: true, operators: true, metrics: true };
    /// Liveness and readiness only.
    pub const NONE: Self = Self { clients: false, engines: false, operators: false, metrics: false };

    fn has(&self, endpoint: &EndpointDoc) -> bool {
        match endpoint.audience {
            Audience::Clients => self.clients,
            Audience::Engines => self.engines,
            Audience::Operators => self.operators,
            Audience::Everybody if endpoint.path == METRICS_PATH => self.metrics,
            Audience::Everybody if endpoint.path.starts_with(DASHBOARD_PATH) => self.operators,
            Audience::Everybody => true,
        }
    }
}

/// Builds the router from those of [`ENDPOINTS`] that a listener has; the others are not found there.
///
/// Serve it with the client's address as `ConnectInfo<SocketAddr>` in each request's extensions:
/// without it nobody is taken for a client on this host.
pub fn app(state: State, mounts: Mounts) -> Router {
    let mut router = Router::new();
    for endpoint in ENDPOINTS.iter().filter(|endpoint| mounts.has(endpoint)) {
        let (access, proxy) = (state.access.clone(), state.proxy.clone());
        let gate = Gate { access, proxy, audience: endpoint.audience };
        // Around the handler only: its extractors, which read the body, run after the check.
        let handlers = (endpoint.mount)().route_layer(from_fn_with_state(gate, access::guard));
        router = router.route(endpoint.path, handlers);
    }
    router
        // After the routes: it fills in the fallback of those that exist by now.
        .method_not_allowed_fallback(|| async { RouteError::MethodNotAllowed })
        .fallback(|| async { RouteError::UnknownPath })
        // Around the checks of keys: a browser asks before it sends one, and may read a refusal.
        .layer(from_fn_with_state(state.cors.clone(), cors::share))
        // Around the whole router: any handler, and both fallbacks, may leave a body unread. Twice
        // the limit, so that a body somewhat over it does not cost its sender the connection.
        .layer(from_fn_with_state(state.limits.clone(), unread::discard_unread))
        .layer(from_fn(framing::refuse_ambiguous))
        // Outermost: no answer may leave without the request's id.
        .layer(from_fn(extract::identify))
        .with_state(state)
}
