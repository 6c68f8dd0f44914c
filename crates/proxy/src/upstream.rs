//! The only client that carries requests to engines: header policy, deadlines, and what broke
//! where. Decides nothing about retries and never logs a body.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::connect::HttpConnector;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::connection::{Dialer, EngineTls};
use crate::dial::Dials;
use crate::error::{Broken, Progress, Stage, UpstreamFailure};
use crate::held::Held;
use crate::pool::peer::Peer;
use crate::request_id::{RequestId, X_REQUEST_ID};
use crate::settings::Timeouts;
use crate::splice::Spliced;
use crate::wire::{Ends, EngineBody, Outgoing, Wire, WireError};

/// Headers that concern one connection only (RFC 9110, 7.6.1), or that the client library sets.
const HOP_BY_HOP: [HeaderName; 10] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("http2-settings"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Which of the engines behind an address shall serve a request: each leg's own matter.
pub(crate) const X_DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Request headers that are made anew for each leg. Compression is not asked of engines, because
/// their JSON answers are read.
const REMADE: [HeaderName; 5] =
    [header::HOST, header::CONTENT_LENGTH, header::EXPECT, header::ACCEPT_ENCODING, X_DATA_PARALLEL_RANK];

/// Request headers that would make an engine answer for other origins, which is the router's to decide.
const CROSS_ORIGIN: [HeaderName; 3] =
    [header::ORIGIN, header::ACCESS_CONTROL_REQUEST_METHOD, header::ACCESS_CONTROL_REQUEST_HEADERS];

/// Response headers that may hold an engine's address.
const ADDRESSES: [HeaderName; 5] =
    [header::LOCATION, header::CONTENT_LOCATION, header::LINK, header::REFRESH, header::ALT_SVC];

/// How soon a kept connection that the engine was closing for idleness fails.
const STALE_WITHIN: Duration = Duration::from_secs(1);

/// The data-path client.
#[derive(Clone, Debug)]
pub(crate) struct Upstream {
    wire: Wire,
    idle: Arc<ArcSwap<Duration>>,
    /// Says in `Via` that a request went through this very router.
    mark: HeaderValue,
    dials: Dials,
    held: Held,
}

/// One request to one engine.
pub(crate) struct Leg<'a> {
    pub(crate) stage: Stage,
    pub(crate) peer: &'a Peer,
    pub(crate) method: Method,
    pub(crate) path: &'a str,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Spliced,
}

/// Where an answer came from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) same_host: bool,
    /// The other end of the connection.
    pub(crate) remote: Option<IpAddr>,
}

impl Upstream {
    pub(crate) fn new(timeouts: &Timeouts, tls: EngineTls, held: Held, tasks: TaskTracker) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(timeouts.connect));
        connector.enforce_http(false);
        // A host that vanished under a connection says nothing; what it does not acknowledge tells.
        let vanished = timeouts.connect * 4;
        connector.set_keepalive(Some(vanished));
        connector.set_keepalive_interval(Some(timeouts.connect));
        #[cfg(target_os = "linux")]
        connector.set_tcp_user_timeout(Some(vanished));
        let dials = Dials::new(timeouts.slow_connect);
        Self::through(Dialer::new(connector, tls, dials, timeouts.connect), timeouts, held, tasks)
    }

    /// Over engines in memory.
    #[cfg(test)]
    pub(crate) fn modelled(
        model: crate::model::World,
        timeouts: &Timeouts,
        held: Held,
        tasks: TaskTracker,
    ) -> Self {
        let dials = Dials::new(timeouts.slow_connect);
        let dialer = Dialer::new(HttpConnector::new(), EngineTls::default(), dials, timeouts.connect);
        Self::through(dialer.over(model), timeouts, held, tasks)
    }

    fn through(dialer: Dialer, timeouts: &Timeouts, held: Held, tasks: TaskTracker) -> Self {
        let dials = dialer.dials().clone();
        let wire = Wire::new(dialer, timeouts.pool_idle, tasks);
        let mark = HeaderValue::try_from(format!("1.1 kvbaton-{}", Uuid::new_v4().simple()));
        let mark = mark.unwrap_or_else(|_| HeaderValue::from_static("1.1 kvbaton"));
        Self { wire, idle: Arc::new(ArcSwap::from_pointee(timeouts.idle)), held, mark, dials }
    }

    /// Another bound on the silence inside answers, for those that begin from now on.
    pub(crate) fn set_idle(&self, idle: Duration) {
        self.idle.store(Arc::new(idle));
    }

    /// The attempts to connect to the peers' addresses.
    pub(crate) fn dials(&self) -> &Dials {
        &self.dials
    }

    /// Whether a request went through this router before.
    pub(crate) fn has_sent(&self, headers: &HeaderMap) -> bool {
        let mark = self.mark.as_bytes();
        let vias =
            headers.get_all(header::VIA).iter().flat_map(|via| via.as_bytes().split(|byte| *byte == b','));
        vias.map(<[u8]>::trim_ascii).any(|via| via == mark)
    }

    /// Sends a request and waits for the response head, at most `head` long. Dropping the future
    /// closes the connection, which an engine takes as an abort.
    ///
    /// # Errors
    /// What broke, and whether the engine may have seen the request.
    pub(crate) fn send<'a>(
        &'a self,
        leg: Leg<'a>,
        head: Duration,
    ) -> impl Future<Output = Result<Response<EngineBody>, UpstreamFailure>> + 'a {
        self.within(leg, false, head)
    }

    /// As [`Upstream::send`] on a connection of its own, for what a kept one has just lost.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn send_anew<'a>(
        &'a self,
        leg: Leg<'a>,
        head: Duration,
    ) -> impl Future<Output = Result<Response<EngineBody>, UpstreamFailure>> + 'a {
        self.within(leg, true, head)
    }

    async fn within(
        &self,
        leg: Leg<'_>,
        anew: bool,
        head: Duration,
    ) -> Result<Response<EngineBody>, UpstreamFailure> {
        let late = UpstreamFailure::new(leg.stage, Broken::Timeout, Progress::Sent);
        timeout(head, self.send_without_end(leg, anew)).await.unwrap_or(Err(late))
    }

    /// As [`Upstream::send`] for a caller with a deadline of its own.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn send_without_end(
        &self,
        leg: Leg<'_>,
        anew: bool,
    ) -> Result<Response<EngineBody>, UpstreamFailure> {
        let stage = leg.stage;
        let failure = |broken, progress| UpstreamFailure::new(stage, broken, progress);
        let mut headers = leg.headers;
        leg.peer.authorize(&mut headers);
        leg.peer.place(&mut headers);
        headers.append(header::VIA, self.mark.clone());
        let request = Outgoing {
            place: leg.peer.wire_place(),
            prefix: leg.peer.prefix(),
            method: &leg.method,
            path: leg.path,
            headers: &headers,
            body: &leg.body,
        };
        let sent = Instant::now();
        let answer = if anew { self.wire.send_anew(&request).await } else { self.wire.send(&request).await };
        match answer {
            // No interim answer, redirect or invented status is an engine's to give: a redirect
            // would send the client to an address of the fleet.
            Ok(response) => match response.status().as_u16() {
                200..=299 | 400..=599 => Ok(response),
                _ => Err(failure(Broken::Protocol, Progress::Answering)),
            },
            Err(error) => {
                let source = std::error::Error::source(&error);
                tracing::debug!(peer = %leg.peer.id, %error, ?source, "exchange failed");
                let failure = classify(stage, &error);
                // An engine that closes for idleness does so at once, not while it works.
                Err(UpstreamFailure { stale: failure.stale && sent.elapsed() < STALE_WITHIN, ..failure })
            }
        }
    }

    /// Reads a whole answer of at most `limit` bytes, allowing each pause to last the idle deadline.
    ///
    /// # Errors
    /// The answer broke off, stalled, or is too large.
    pub(crate) async fn collect(
        &self,
        stage: Stage,
        mut body: EngineBody,
        limit: usize,
    ) -> Result<Bytes, UpstreamFailure> {
        let failure = |broken| UpstreamFailure::new(stage, broken, Progress::Answering);
        let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if announced > limit {
            return Err(failure(Broken::TooLarge));
        }
        let share = self.held.share();
        let idle = self.idle();
        let mut first = Bytes::new();
        let mut whole = BytesMut::new();
        loop {
            let mut frame = body.frame();
            // Most of a short answer is there with its head.
            let frame = match (&mut frame).now_or_never() {
                Some(frame) => frame,
                None => timeout(idle, frame).await.map_err(|_| failure(Broken::Idle))?,
            };
            let Some(frame) = frame else { break };
            let frame = frame.map_err(|error| failure(body_broken(&error)))?;
            let Ok(data) = frame.into_data() else { continue };
            if first.len() + whole.len() + data.len() > limit {
                return Err(failure(Broken::TooLarge));
            }
            if !share.grow(data.len()) {
                return Err(failure(Broken::NoRoom));
            }
            if first.is_empty() && whole.is_empty() {
                first = data;
                continue;
            }
            if whole.is_empty() {
                whole.reserve(announced.max(first.len() + data.len()));
                whole.extend_from_slice(&std::mem::take(&mut first));
            }
            whole.extend_from_slice(&data);
        }
        Ok(share.bind(if whole.is_empty() { first } else { whole.freeze() }))
    }

    pub(crate) fn idle(&self) -> Duration {
        **self.idle.load()
    }
}

/// What an error while reading a body means.
pub(crate) const fn body_broken(error: &WireError) -> Broken {
    match error {
        WireError::Protocol => Broken::Protocol,
        _ => Broken::Reset,
    }
}

const fn classify(stage: Stage, error: &WireError) -> UpstreamFailure {
    let (broken, progress, stale) = match error {
        WireError::Connect(_) => (Broken::Connect, Progress::NotSent, false),
        WireError::Target => (Broken::Protocol, Progress::NotSent, false),
        WireError::Unsent(_) => (Broken::Reset, Progress::NotSent, false),
        WireError::Reset { silent } => (Broken::Reset, Progress::Sent, *silent),
        WireError::Protocol => (Broken::Protocol, Progress::Sent, false),
    };
    UpstreamFailure { stage, broken, progress, stale }
}

/// Whether an engine runs on this host, by the two ends of the connection that its answer came on.
pub(crate) fn route<B>(response: &Response<B>) -> Route {
    let ends = response.extensions().get::<Ends>();
    Route {
        same_host: ends.is_some_and(|ends| is_same_host(ends.remote, ends.local)),
        remote: ends.map(|ends| ends.remote.ip().to_canonical()),
    }
}

fn is_same_host(remote: SocketAddr, local: SocketAddr) -> bool {
    let remote = remote.ip().to_canonical();
    remote.is_loopback() || remote == local.ip().to_canonical()
}

/// The client's headers as an engine gets them: without those of the connection, with exactly one
/// request id.
pub(crate) fn request_headers(client: &HeaderMap, request_id: &RequestId) -> HeaderMap {
    let named = named_by_connection(client);
    // With room for what the legs add.
    let mut headers = HeaderMap::with_capacity(client.len() + 4);
    for (name, value) in client {
        let kept = !HOP_BY_HOP.contains(name)
            && !REMADE.contains(name)
            && !CROSS_ORIGIN.contains(name)
            && *name != X_REQUEST_ID
            && !named.contains(name);
        if kept {
            headers.append(name, value.clone());
        }
    }
    headers.insert(X_REQUEST_ID, request_id.header_value());
    headers
}

/// An engine's response headers as the client gets them. The length is remade from the body, and
/// the request id is the router's to set.
pub(crate) fn response_headers(headers: &mut HeaderMap) {
    let named = named_by_connection(headers);
    let gone = |name: &&HeaderName| {
        HOP_BY_HOP.contains(name)
            || ADDRESSES.contains(name)
            || **name == header::CONTENT_LENGTH
            || **name == X_REQUEST_ID
            || name.as_str().starts_with("access-control-")
            || named.contains(name)
    };
    let gone: Vec<HeaderName> = headers.keys().filter(gone).cloned().collect();
    for name in &gone {
        headers.remove(name);
    }
}

/// What the `Connection` header says is of this connection only.
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    if !headers.contains_key(header::CONNECTION) {
        return Vec::new();
    }
    let values = headers.get_all(header::CONNECTION).iter();
    let names = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    names.filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok()).collect()
}

/// Headers for requests of the router's own.
pub(crate) fn own_headers(request_id: &RequestId) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(X_REQUEST_ID, request_id.header_value());
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse::<HeaderValue>().unwrap()))
            .collect()
    }

    #[test]
    fn connection_headers_stay_on_their_connection() {
        let client = headers(&[
            ("connection", "close, X-Private"),
            ("x-private", "1"),
            ("te", "trailers"),
            ("host", "router"),
            ("content-length", "7"),
            ("accept-encoding", "gzip"),
            ("expect", "100-continue"),
            ("authorization", "Bearer a"),
            ("traceparent", "00-1-2-01"),
        ]);
        let sent = request_headers(&client, &RequestId::accept(None));
        let mut names: Vec<&str> = sent.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "traceparent", "x-request-id"]);
    }

    #[test]
    fn two_request_id_lines_become_one() {
        let client = headers(&[("x-request-id", "a"), ("x-request-id", "b")]);
        let id = RequestId::accept(client.get(X_REQUEST_ID));
        let sent = request_headers(&client, &id);
        let lines: Vec<_> = sent.get_all(X_REQUEST_ID).iter().collect();
        assert_eq!(lines, ["a"]);
    }

    #[test]
    fn an_engine_is_local_when_both_ends_are() {
        let local: SocketAddr = "10.0.0.1:40000".parse().unwrap();
        assert!(is_same_host("127.0.0.1:80".parse().unwrap(), "127.0.0.1:1".parse().unwrap()));
        assert!(is_same_host("10.0.0.1:80".parse().unwrap(), local));
        assert!(!is_same_host("10.0.0.2:80".parse().unwrap(), local));
    }
}
