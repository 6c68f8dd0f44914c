//! An answer's body, read from its connection when it is polled. Whole, it gives the connection back;
//! dropped before, it closes it. Reads through the stack, so that one that waits holds no buffer.

use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead as _, ReadBuf};

use super::chunked::Chunked;
use super::head::Framing;
use super::kept::Shelf;
use super::{Link, WireError};

/// Most bytes of one read.
pub(super) const READ: usize = 16 << 10;

#[derive(Debug)]
enum Rest {
    Length(u64),
    Chunked(Chunked),
    UntilClose,
    /// Nothing, or nothing that could be read.
    Ended,
}

/// The body of an engine's answer.
#[derive(Debug)]
pub(crate) struct EngineBody {
    rest: Rest,
    /// What came with the head.
    early: Bytes,
    link: Option<Link>,
    /// Where the connection goes when the body is whole.
    home: Option<Arc<Shelf>>,
}

impl EngineBody {
    /// `home` is none for a connection that must not be used again.
    pub(super) fn new(framing: Framing, early: Bytes, link: Link, home: Option<Arc<Shelf>>) -> Self {
        let rest = match framing {
            Framing::Length(length) => Rest::Length(length),
            Framing::Chunked => Rest::Chunked(Chunked::new()),
            Framing::UntilClose => Rest::UntilClose,
        };
        let mut body = Self { rest, early, link: Some(link), home };
        if matches!(body.rest, Rest::Length(0)) {
            let left_over = !body.early.is_empty();
            body.finish(left_over);
        }
        body
    }

    /// The body is whole; bytes that follow it belong to no request.
    fn finish(&mut self, left_over: bool) {
        self.rest = Rest::Ended;
        self.early = Bytes::new();
        if let (Some(link), Some(home)) = (self.link.take(), self.home.take())
            && !left_over
        {
            home.give_back(link);
        }
    }

    fn fail(&mut self, error: WireError) -> WireError {
        self.rest = Rest::Ended;
        self.link = None;
        error
    }

    /// The data in bytes that have come.
    fn decode(&mut self, input: Input<'_>) -> Result<Bytes, WireError> {
        let (data, ended) = match &mut self.rest {
            Rest::Ended => return Ok(Bytes::new()),
            Rest::UntilClose => return Ok(input.up_to(input.len())),
            Rest::Length(left) => {
                let most = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                *left -= most as u64;
                (input.up_to(most), (*left == 0).then_some(most < input.len()))
            }
            Rest::Chunked(chunked) => {
                let mut data = BytesMut::with_capacity(input.len());
                let used = chunked.take(input.bytes(), &mut data);
                // What breaks inside an answer has broken off, whatever the reason.
                let Ok(used) = used else { return Err(self.fail(WireError::Reset { silent: false })) };
                (data.freeze(), chunked.is_done().then_some(used < input.len()))
            }
        };
        if let Some(left_over) = ended {
            self.finish(left_over);
        }
        Ok(data)
    }

    /// The connection has no more bytes.
    fn closed(&mut self) -> Option<Result<Frame<Bytes>, WireError>> {
        match self.rest {
            Rest::UntilClose => {
                self.finish(true);
                None
            }
            Rest::Ended => None,
            Rest::Length(_) | Rest::Chunked(_) => Some(Err(self.fail(WireError::Reset { silent: false }))),
        }
    }
}

/// Bytes that have come, on the stack or with the head.
enum Input<'a> {
    Early(Bytes),
    Read(&'a [u8]),
}

impl Input<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Early(bytes) => bytes,
            Self::Read(bytes) => bytes,
        }
    }

    fn len(&self) -> usize {
        self.bytes().len()
    }

    fn up_to(&self, end: usize) -> Bytes {
        match self {
            Self::Early(bytes) => bytes.slice(..end),
            Self::Read(bytes) => Bytes::copy_from_slice(&bytes[..end]),
        }
    }
}

impl Body for EngineBody {
    type Data = Bytes;
    type Error = WireError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, WireError>>> {
        let body = &mut *self;
        loop {
            if matches!(body.rest, Rest::Ended) {
                return Poll::Ready(None);
            }
            let data = if body.early.is_empty() {
                let Some(link) = &mut body.link else { return Poll::Ready(None) };
                let mut space = [const { MaybeUninit::<u8>::uninit() }; READ];
                let mut buffer = ReadBuf::uninit(&mut space);
                match ready!(Pin::new(&mut link.stream).poll_read(context, &mut buffer)) {
                    Ok(()) if buffer.filled().is_empty() => return Poll::Ready(body.closed()),
                    Ok(()) => body.decode(Input::Read(buffer.filled())),
                    Err(_) => Err(body.fail(WireError::Reset { silent: false })),
                }
            } else {
                let early = std::mem::take(&mut body.early);
                body.decode(Input::Early(early))
            };
            match data {
                Ok(data) if data.is_empty() => {}
                Ok(data) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.rest, Rest::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        match self.rest {
            Rest::Length(left) => SizeHint::with_exact(left),
            Rest::Chunked(_) | Rest::UntilClose => SizeHint::default(),
            Rest::Ended => SizeHint::with_exact(0),
        }
    }
}
