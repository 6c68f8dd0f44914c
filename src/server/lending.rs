//! Streams that hyper may have to give back: the body of such an answer is only lent to it, so that the connection
//! can go on by itself once hyper has written all that there was.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use http::header::{CONNECTION, CONTENT_LENGTH};
use http::{Request, Response, StatusCode, Version};
use hyper::body::Frame;
use kvbaton_routes::Streamed;
use parking_lot::Mutex;

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// What one connection has lent; clones share it.
#[derive(Clone, Default)]
pub(super) struct Lender(Arc<Mutex<Loan>>);

#[derive(Default)]
struct Loan {
    body: Option<Body>,
    /// The body had no more when it was last asked.
    waits: bool,
    /// Nothing that came out of it is still to be written.
    flushed: bool,
}

impl Lender {
    /// Nothing is left to be written of what the body gave.
    pub(super) fn flushed(&self) {
        self.0.lock().flushed = true;
    }

    /// Whether a body is lent.
    pub(super) fn lends(&self) -> bool {
        self.0.lock().body.is_some()
    }

    /// The body, if all that it gave has been written and it waits for more.
    pub(super) fn take_back(&self) -> Option<Body> {
        let mut loan = self.0.lock();
        if loan.waits && loan.flushed { loan.body.take() } else { None }
    }

    /// The answer with a body that can be had back, where a connection can go on with that.
    fn lend(&self, answer: Response<Body>) -> Response<Body> {
        if !is_plain_stream(&answer) {
            return answer;
        }
        answer.map(|body| {
            *self.0.lock() = Loan { body: Some(body), waits: false, flushed: false };
            Body::new(Lent(self.clone()))
        })
    }
}

/// Whether a request's connection is to stay as it is, which many clients say though it is what HTTP/1.1 does.
pub(super) fn is_plain<B>(request: &Request<B>) -> bool {
    let mut said = request.headers().get_all(CONNECTION).iter();
    let stays = said.all(|value| value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"keep-alive"));
    stays && request.version() == Version::HTTP_11
}

/// Whether an answer is written in chunks and nothing else, and its request was read whole.
fn is_plain_stream(answer: &Response<Body>) -> bool {
    let headers = answer.headers();
    answer.status() == StatusCode::OK
        && answer.extensions().get::<Streamed>().is_some()
        && !headers.contains_key(CONTENT_LENGTH)
        && !headers.contains_key(CONNECTION)
        && answer.body().size_hint().exact().is_none()
}

/// An answer that is awaited.
pub(super) struct Answering {
    pub(super) answer: Answer,
    /// None where the body is not to be lent.
    pub(super) lender: Option<Lender>,
}

impl Future for Answering {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(self.answer.as_mut().poll(context))?;
        Poll::Ready(Ok(match &self.lender {
            Some(lender) => lender.lend(answer),
            None => answer,
        }))
    }
}

/// A body that is lent. Whoever drops it has done with it, unless it was taken back before.
struct Lent(Lender);

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut loan = self.0.0.lock();
        let Some(body) = &mut loan.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(context);
        loan.waits = polled.is_pending();
        loan.flushed &= loan.waits;
        polled
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let body = self.0.0.lock().body.take();
        drop(body);
    }
}

#[cfg(test)]
#[path = "lending_tests.rs"]
mod tests;
