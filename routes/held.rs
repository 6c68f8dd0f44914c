//! Request bodies within the router's room for all bodies: taken as the bytes arrive, given back when the last
//! slice of them is gone.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use http::header::HeaderMap;
use http_body::{Frame, SizeHint};
use kvbaton_proxy::{Held, Share};

use crate::error::RouteError;
use crate::extract::{BodyBound, read_body};

/// Reads a whole body, as [`read_body`], as long as there is room for it.
pub(crate) async fn read_held_body(
    headers: &HeaderMap,
    body: &mut Body,
    bound: BodyBound,
    held: &Held,
) -> Result<Bytes, RouteError> {
    let announced = body.size_hint().lower();
    // One that is too long by itself is for the limit below to refuse.
    if announced <= bound.bytes as u64 && !held.has_room(announced) {
        return Err(RouteError::NoRoom);
    }
    let share = held.share();
    let mut metered = Metered { body, share: &share, full: false };
    let read = read_body(headers, &mut metered, bound).await;
    if metered.full {
        return Err(RouteError::NoRoom);
    }
    read.map(|body| share.bind(body))
}

struct Metered<'a> {
    body: &'a mut Body,
    share: &'a Share,
    full: bool,
}

impl HttpBody for Metered<'_> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut *self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && !self.share.grow(frame.data_ref().map_or(0, Bytes::len))
        {
            self.full = true;
            return Poll::Ready(Some(Err(axum::Error::new(RouteError::NoRoom))));
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
