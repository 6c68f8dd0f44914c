//! A client's connection of which bytes may have been read before whoever they are for was there, and whose client
//! may not take nothing for ever: an answer that cannot go on is asked for nothing, so that its own deadlines rest.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::lending::Lender;

/// Most bytes of a later request that are taken while an answer is on its way.
const AHEAD: usize = 512;

/// A stream and what was read of it before. Says when all is written that there was to write.
pub(super) struct Reread<S> {
    stream: S,
    early: Bytes,
    lender: Lender,
    /// The longest that the client may take nothing.
    stall: Duration,
    /// While it takes nothing.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Reread<S> {
    pub(super) const fn new(stream: S, lender: Lender, stall: Duration) -> Self {
        Self { stream, early: Bytes::new(), lender, stall, stalled: None }
    }

    /// With bytes that were read of it and come before what it still has.
    pub(super) fn with_early(mut self, early: &[u8]) -> Self {
        if !early.is_empty() {
            // A copy: a slice would hold all of the buffer that it was cut from.
            self.early = [early, &*self.early].concat().into();
        }
        self
    }

    pub(super) fn has_early(&self) -> bool {
        !self.early.is_empty()
    }

    /// What came of a write, or that the client has taken nothing for too long.
    fn patient<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stall = self.stall;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(stall)));
        stalled.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> Reread<S> {
    /// Reads some bytes for whoever reads next; how many, zero at the end.
    pub(super) fn poll_ahead(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut space = [const { MaybeUninit::<u8>::uninit() }; AHEAD];
        let mut buffer = ReadBuf::uninit(&mut space);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer))?;
        self.early = [&*self.early, buffer.filled()].concat().into();
        Poll::Ready(Ok(buffer.filled().len()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Reread<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.early.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let most = self.early.len().min(buffer.remaining());
        buffer.put_slice(&self.early[..most]);
        self.early.advance(most);
        if self.early.is_empty() {
            self.early = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Reread<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.patient(written, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        ready!(self.patient(flushed, context))?;
        self.lender.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.patient(shut, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.patient(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
