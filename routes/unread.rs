//! What happens to a request body that nobody read to its end: on HTTP/1 the answer goes out at
//! once and the rest is then discarded within bounds, so that a client that is still sending can
//! read the answer instead of a connection reset, and the connection stays usable.
//! Must never hold more than one chunk of a discarded body.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HeaderValue};
use http::{Method, StatusCode, Version};
use http_body::{Frame, SizeHint};
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep, sleep};

use crate::reload::SharedLimits;

/// How long the discarding waits for the client's next bytes.
const SILENCE: Duration = Duration::from_millis(500);
/// How long the discarding may take in all.
const TOTAL: Duration = Duration::from_secs(10);

/// Answers at once and discards up to twice the largest body that the handler left unread.
pub(crate) async fn discard_unread(
    State(limits): State<SharedLimits>,
    request: Request,
    next: Next,
) -> Response {
    let limit = limits.now().body_bytes;
    // HTTP/2 resets one stream without harm to the others: nothing to do there.
    if request.version() > Version::HTTP_11 || request.body().is_end_stream() {
        return next.run(request).await;
    }
    let waits_for_continue = request.headers().contains_key(EXPECT);
    let answer_has_body = request.method() != Method::HEAD;
    let (hand_back, mut handed_back) = oneshot::channel();
    let watch = |body| Body::new(Watched { body, touched: false, ended: false, hand_back: Some(hand_back) });
    let mut response = next.run(request.map(watch)).await;

    match handed_back.try_recv() {
        Ok(unread) if answer_has_body => answered(response, unread, waits_for_continue, limit),
        Ok(_) => {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            response
        }
        Err(_) => response,
    }
}

/// The answer to a request whose body was not read to its end, for a limit of so many bytes.
pub(crate) fn answered(
    mut response: Response,
    Unread { body, touched }: Unread,
    waits_for_continue: bool,
    limit: usize,
) -> Response {
    let at_most = limit.saturating_mul(2);
    let never_sent = waits_for_continue && !touched;
    let too_long = body.size_hint().lower() > at_most as u64;
    if never_sent || too_long || response.status() == StatusCode::NO_CONTENT {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        return response;
    }
    // A known length would end the exchange, and with it the discarding, at the answer's last byte.
    response.headers_mut().remove(CONTENT_LENGTH);
    response.map(|answer| Body::new(Lingering::new(answer, body, at_most)))
}

/// A body that its reader dropped before the end.
pub(crate) struct Unread {
    pub(crate) body: Body,
    pub(crate) touched: bool,
}

/// A request body that is handed back when its reader drops it before the end.
struct Watched {
    body: Body,
    touched: bool,
    ended: bool,
    hand_back: Option<oneshot::Sender<Unread>>,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.touched = true;
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.ended |= !matches!(frame, Some(Ok(_)));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.ended || self.body.is_end_stream() {
            return;
        }
        if let Some(hand_back) = self.hand_back.take() {
            let unread = Unread { body: std::mem::take(&mut self.body), touched: self.touched };
            // A closed channel means that the answer is already on its way: the body goes with the connection.
            drop(hand_back.send(unread));
        }
    }
}

/// An answer whose end waits until the request's rest has been discarded.
struct Lingering {
    answer: Option<Body>,
    rest: Option<Body>,
    left: usize,
    silence: Pin<Box<Sleep>>,
    end: Instant,
}

impl Lingering {
    fn new(answer: Body, rest: Body, at_most: usize) -> Self {
        Self {
            answer: Some(answer),
            rest: Some(rest),
            left: at_most,
            silence: Box::pin(sleep(SILENCE)),
            end: Instant::now() + TOTAL,
        }
    }

    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some(rest) = &mut self.rest {
            if self.silence.as_mut().poll(cx).is_ready() {
                break;
            }
            let Some(Ok(frame)) = ready!(Pin::new(rest).poll_frame(cx)) else {
                break;
            };
            let Some(left) = self.left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) else {
                break;
            };
            self.left = left;
            self.silence.as_mut().reset(self.end.min(Instant::now() + SILENCE));
        }
        self.rest = None;
        Poll::Ready(())
    }
}

impl HttpBody for Lingering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(answer) = &mut self.answer {
            if let Some(frame) = ready!(Pin::new(answer).poll_frame(cx)) {
                return Poll::Ready(Some(frame));
            }
            self.answer = None;
        }
        ready!(self.poll_discard(cx));
        Poll::Ready(None)
    }
}
