//! One request on one connection, until the head of its answer: writes and reads at the same time, since an
//! engine may refuse a body before it has come whole.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Method, Response};
use tokio::io::{AsyncRead as _, AsyncWrite as _, ReadBuf};

use super::body::{EngineBody, READ};
use super::head::{self, Head};
use super::kept::Shelf;
use super::{Link, Outgoing, WireError};
use crate::connection::Stream;

/// Most pieces of one write.
const PIECES: usize = 16;

/// Longest head of an answer.
const LONGEST_HEAD: usize = 128 << 10;

/// What of a request has gone out.
struct Sending<'a> {
    head: &'a [u8],
    body: &'a [Bytes],
    /// How much of the first piece that is left.
    sent: usize,
    any: bool,
    flushed: bool,
    failed: Option<io::Error>,
}

impl Sending<'_> {
    fn is_done(&self) -> bool {
        self.head.is_empty() && self.body.is_empty()
    }

    /// Writes what can be written now. A failure is kept: an answer may be there all the same.
    fn poll(&mut self, stream: &mut Stream, context: &mut Context<'_>) {
        while self.failed.is_none() && !self.is_done() {
            match self.poll_write(stream, context) {
                Poll::Ready(Ok(0)) => self.failed = Some(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(written)) => self.advance(written),
                Poll::Ready(Err(error)) => self.failed = Some(error),
                Poll::Pending => return,
            }
        }
        if stream.buffers() && !self.flushed && self.failed.is_none() {
            match Pin::new(stream).poll_flush(context) {
                Poll::Ready(Ok(())) => self.flushed = true,
                Poll::Ready(Err(error)) => self.failed = Some(error),
                Poll::Pending => {}
            }
        }
    }

    fn poll_write(&self, stream: &mut Stream, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut pieces = [IoSlice::new(&[]); PIECES];
        let head = (!self.head.is_empty()).then_some(self.head);
        let left = head.into_iter().chain(self.body.iter().map(|piece| &piece[..]));
        let mut used = 0;
        for (slot, piece) in pieces.iter_mut().zip(left) {
            *slot = IoSlice::new(if used == 0 { &piece[self.sent..] } else { piece });
            used += 1;
        }
        Pin::new(stream).poll_write_vectored(context, &pieces[..used])
    }

    fn advance(&mut self, mut written: usize) {
        self.any = true;
        written += self.sent;
        if !self.head.is_empty() {
            if written < self.head.len() {
                self.sent = written;
                return;
            }
            written -= self.head.len();
            self.head = &[];
        }
        while let Some(piece) = self.body.first() {
            if written < piece.len() {
                break;
            }
            written -= piece.len();
            self.body = &self.body[1..];
        }
        self.sent = written;
    }
}

/// What of an answer's head has come.
struct Receiving {
    partial: Vec<u8>,
}

impl Receiving {
    /// The head, with what came after it.
    fn poll(
        &mut self,
        stream: &mut Stream,
        method: &Method,
        context: &mut Context<'_>,
    ) -> Poll<Result<(Head, Bytes), WireError>> {
        loop {
            let mut space = [const { MaybeUninit::<u8>::uninit() }; READ];
            let mut buffer = ReadBuf::uninit(&mut space);
            let read = ready!(Pin::new(&mut *stream).poll_read(context, &mut buffer));
            if read.is_err() || buffer.filled().is_empty() {
                return Poll::Ready(Err(WireError::Reset { silent: self.partial.is_empty() }));
            }
            let came = if self.partial.is_empty() {
                buffer.filled()
            } else {
                self.partial.extend_from_slice(buffer.filled());
                &self.partial[..]
            };
            let (found, passed_over) = last_head(came, method)?;
            if let Some(head) = found {
                let early = Bytes::copy_from_slice(&came[passed_over + head.length..]);
                return Poll::Ready(Ok((head, early)));
            }
            if came.len() - passed_over > LONGEST_HEAD {
                return Poll::Ready(Err(WireError::Protocol));
            }
            if self.partial.is_empty() {
                self.partial = came[passed_over..].to_vec();
            } else {
                self.partial.drain(..passed_over);
            }
        }
    }
}

/// The first head that is not an interim answer's, and how many bytes of those came before it.
fn last_head(came: &[u8], method: &Method) -> Result<(Option<Head>, usize), WireError> {
    let mut at = 0;
    loop {
        match head::parse(&came[at..], method)? {
            Some(head) if head.parts.status.is_informational() && head.parts.status != 101 => {
                at += head.length;
            }
            found => return Ok((found, at)),
        }
    }
}

/// Sends a request on a connection and waits for the head of the answer; the connection goes to `shelf` when
/// the body is whole.
pub(super) async fn exchange(
    mut link: Link,
    head: &[u8],
    request: &Outgoing<'_>,
    shelf: Option<&Arc<Shelf>>,
) -> Result<Response<EngineBody>, WireError> {
    let body = request.body.segments();
    let mut sending = Sending { head, body, sent: 0, any: false, flushed: false, failed: None };
    let mut receiving = Receiving { partial: Vec::new() };
    let stream = &mut link.stream;
    let received = poll_fn(|context| {
        sending.poll(stream, context);
        receiving.poll(stream, request.method, context)
    });
    let (mut head, early) = match received.await {
        Ok(received) => received,
        Err(WireError::Reset { silent: true }) => {
            return Err(match sending.failed {
                Some(error) if !sending.any => WireError::Unsent(error),
                _ => WireError::Reset { silent: link.answers > 0 },
            });
        }
        Err(error) => return Err(error),
    };
    link.answers += 1;
    if let Some(ends) = link.ends {
        head.parts.extensions.insert(ends);
    }
    let keeps = head.keeps && sending.is_done() && sending.failed.is_none() && head.parts.status != 101;
    let home = shelf.filter(|_| keeps).cloned();
    Ok(Response::from_parts(head.parts, EngineBody::new(head.framing, early, link, home)))
}
