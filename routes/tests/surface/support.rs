//! A surface over an empty fleet and a client that asks it.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::ConnectInfo;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use kvbaton_proxy::{ModelScope, Proxy, Settings};
use kvbaton_routes::{
    Access, CertificateNames, Cors, Credential, Duty, Limits, Logging, Mounts, Origins, Reload, Rules,
    SecretDigest, State, Surface as Listener, app,
};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

pub(crate) const BODY_BYTES: usize = 64 * 1024;
pub(crate) const TOKEN: &str = "s3cret";

/// The surface, and the core behind it for as long as this lives.
pub(crate) struct Surface {
    pub(crate) router: Router,
    listener: Listener,
    pub(crate) proxy: Proxy,
    _stop: DropGuard,
}

impl Surface {
    pub(crate) fn new() -> Self {
        Self::with(Rules::default())
    }

    pub(crate) fn with_token() -> Self {
        Self::with(Rules::new(vec![credential("ops", Duty::Operator, TOKEN, &[])]))
    }

    pub(crate) fn with(rules: Rules) -> Self {
        Self::mounting(rules, Mounts::ALL, &[])
    }

    /// The endpoints of one listener, open to pages of these origins.
    pub(crate) fn mounting(rules: Rules, mounts: Mounts, origins: &[&str]) -> Self {
        Self::build(Settings::default(), &Access::new(rules), mounts, origins)
    }

    /// Everything, under rules that the test can exchange.
    pub(crate) fn sharing(access: &Access) -> Self {
        Self::build(Settings::default(), access, Mounts::ALL, &[])
    }

    /// Everything, over a core with these settings.
    pub(crate) fn over(settings: Settings, rules: Rules) -> Self {
        Self::build(settings, &Access::new(rules), Mounts::ALL, &[])
    }

    fn build(settings: Settings, access: &Access, mounts: Mounts, origins: &[&str]) -> Self {
        let stop = CancellationToken::new();
        let proxy = Proxy::start(settings, TaskTracker::new(), stop.clone());
        let limits = Limits {
            body_bytes: BODY_BYTES,
            payload_bytes: 16 * 1024,
            body_silence: Duration::from_secs(5),
            body_whole: Duration::from_secs(60),
            keep_alive: Duration::ZERO,
        };
        let origins: Vec<String> = origins.iter().map(|origin| (*origin).to_owned()).collect();
        let cors = Cors { origins: Origins::new(&origins).unwrap(), max_age: Duration::from_secs(60) };
        let state = State {
            proxy: proxy.clone(),
            access: access.clone(),
            cors,
            limits: limits.into(),
            reload: Reload::default(),
            logging: Logging::default(),
        };
        let (router, listener) = (app(state.clone(), mounts), Listener::new(state, mounts));
        Self { router, listener, proxy, _stop: stop.drop_guard() }
    }

    /// As a listener answers, where the client's address is known.
    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let client = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(client)| *client);
        let answer = match client {
            Some(client) => self.listener.answer(request, client, None).await,
            None => self.router.clone().oneshot(request).await,
        };
        answer.unwrap()
    }

    /// The first so many events of an answer that does not end by itself.
    pub(crate) async fn events(&self, ask: Ask, count: usize) -> Vec<Event> {
        let response = self.answer(ask.request).await;
        assert_eq!(
            (response.status(), &response.headers()["content-type"]),
            (StatusCode::OK, &"text/event-stream".parse().unwrap())
        );
        let mut body = response.into_body();
        let mut text = String::new();
        while text.matches("\n\n").count() < count {
            let frame = tokio::time::timeout(Duration::from_secs(5), body.frame()).await.unwrap();
            text.push_str(std::str::from_utf8(frame.unwrap().unwrap().data_ref().unwrap()).unwrap());
        }
        text.split("\n\n").filter(|event| !event.is_empty()).map(Event::parse).collect()
    }

    pub(crate) async fn ask(&self, ask: Ask) -> Answer {
        let response = self.answer(ask.request).await;
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let ids: Vec<_> = head.headers.get_all("x-request-id").iter().collect();
        assert_eq!(ids.len(), 1, "an answer carries exactly one request id");
        Answer { status: head.status, headers: head.headers, body }
    }
}

/// A credential with one secret; its name is its secret's owner.
pub(crate) fn credential(name: &str, duty: Duty, secret: &str, models: &[&str]) -> Credential {
    let models: Vec<String> = models.iter().map(|model| (*model).to_owned()).collect();
    Credential {
        name: name.into(),
        duty,
        secrets: vec![SecretDigest::of(secret).unwrap()],
        certificates: vec![format!("{name}.example.org")],
        models: ModelScope::of(&models),
    }
}

/// One server-sent event.
pub(crate) struct Event {
    pub(crate) name: String,
    pub(crate) id: u64,
    pub(crate) data: Value,
}

impl Event {
    fn parse(text: &str) -> Self {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
        Self {
            name: field("event:").to_owned(),
            id: field("id:").parse().unwrap(),
            data: serde_json::from_str(field("data:")).unwrap(),
        }
    }
}

/// One request, from this host unless told otherwise.
pub(crate) struct Ask {
    request: Request<Body>,
}

impl Ask {
    pub(crate) fn new(method: Method, path: &str) -> Self {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        Self { request }.sent_from("127.0.0.1:40000")
    }

    pub(crate) fn get(path: &str) -> Self {
        Self::new(Method::GET, path)
    }

    pub(crate) fn post(path: &str) -> Self {
        Self::new(Method::POST, path)
    }

    pub(crate) fn sent_from(mut self, address: &str) -> Self {
        let address: SocketAddr = address.parse().unwrap();
        self.request.extensions_mut().insert(ConnectInfo(address));
        self
    }

    pub(crate) fn bearer(self, token: &str) -> Self {
        self.header("authorization", &format!("Bearer {token}"))
    }

    /// Over a connection whose client has shown a certificate with this name.
    pub(crate) fn certified(mut self, name: &str) -> Self {
        self.request.extensions_mut().insert(CertificateNames([name.to_owned()].into()));
        self
    }

    pub(crate) fn sent_from_nowhere(mut self) -> Self {
        self.request.extensions_mut().remove::<ConnectInfo<SocketAddr>>();
        self
    }

    pub(crate) fn header(mut self, name: &'static str, value: &str) -> Self {
        self.request.headers_mut().append(name, value.parse().unwrap());
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Body>) -> Self {
        *self.request.body_mut() = body.into();
        self
    }

    pub(crate) fn json(self, text: &str) -> Self {
        self.header("content-type", "application/json").body(text.to_owned())
    }
}

/// What came back.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Asserts an error in OpenAI's shape and gives its message. In Anthropic's, it has one member more.
    pub(crate) fn expect_error(&self, status: u16, class: &str, param: Option<&str>, code: &str) -> String {
        let mut body = self.json();
        assert_eq!(self.status.as_u16(), status, "{body}");
        assert_eq!(self.header("content-type"), "application/json");
        if body["type"] == "error" {
            body.as_object_mut().unwrap().remove("type");
        }
        let message = body["error"]["message"].as_str().unwrap().to_owned();
        let expected = json!({"error": {"message": message, "type": class, "param": param, "code": code}});
        assert_eq!(body, expected);
        assert!(!message.is_empty());
        message
    }
}
