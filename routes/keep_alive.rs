//! Comments for a client that waits for the first event of its stream. The first one commits the answer to
//! status 200; whatever goes wrong later is then told as an event. Before it, nothing changes.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http_body::Frame;
use http_body_util::BodyExt as _;
use kvbaton_proxy::{Account, Endpoint};
use tokio::time::{Instant, Sleep};

use crate::error::{RouteError, event_of};

const COMMENT: &[u8] = b": keep-alive\n\n";
/// Longest refusal of an engine that is told as an event.
const LONGEST_REFUSAL: usize = 64 << 10;

type Answer = Pin<Box<dyn Future<Output = Result<Response, RouteError>> + Send>>;

/// Waits for the answer, with a comment each `interval` once the first has passed.
pub(crate) async fn answered(
    mut answer: Answer,
    endpoint: Endpoint,
    account: Account,
    interval: Duration,
) -> Result<Response, RouteError> {
    if let Ok(answered) = tokio::time::timeout(interval, answer.as_mut()).await {
        return answered;
    }
    let refusal = Box::pin(async move {
        let response = answer.await?;
        if response.status().is_success() {
            return Ok(response);
        }
        // The status cannot be told any more; what the engine said can.
        let body = http_body_util::Limited::new(response.into_body(), LONGEST_REFUSAL).collect().await;
        let said = body.map(|body| body.to_bytes()).unwrap_or_default();
        Err(RouteError::Refused { said })
    });
    let next = Box::pin(tokio::time::sleep(interval));
    let waiting = Waiting { state: State::Committed(refusal), endpoint, account, interval, next };
    let mut response = Body::new(waiting).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

struct Waiting {
    state: State,
    endpoint: Endpoint,
    account: Account,
    interval: Duration,
    next: Pin<Box<Sleep>>,
}

enum State {
    /// The first comment is due.
    Committed(Answer),
    Waiting(Answer),
    Answering(Body),
    Ended,
}

impl HttpBody for Waiting {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        let comment = || Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
        loop {
            match std::mem::replace(&mut this.state, State::Ended) {
                State::Committed(answer) => {
                    this.state = State::Waiting(answer);
                    return comment();
                }
                State::Waiting(mut answer) => match answer.as_mut().poll(context) {
                    Poll::Ready(Ok(response)) => this.state = State::Answering(response.into_body()),
                    Poll::Ready(Err(error)) => {
                        // An engine's refusal is in the account already.
                        if !matches!(error, RouteError::Refused { .. }) {
                            error.tell(&this.account);
                        }
                        return Poll::Ready(Some(Ok(Frame::data(event_of(&error, this.endpoint)))));
                    }
                    Poll::Pending => {
                        this.state = State::Waiting(answer);
                        if this.next.as_mut().poll(context).is_pending() {
                            return Poll::Pending;
                        }
                        this.next.as_mut().reset(Instant::now() + this.interval);
                        return comment();
                    }
                },
                State::Answering(mut body) => {
                    let polled = Pin::new(&mut body).poll_frame(context);
                    if !matches!(polled, Poll::Ready(None | Some(Err(_)))) {
                        this.state = State::Answering(body);
                    }
                    return polled;
                }
                State::Ended => return Poll::Ready(None),
            }
        }
    }
}
