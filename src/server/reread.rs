//! A client's connection of which bytes may have been read before whoever they are for was there.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::lending::Lender;

/// Most bytes of a later request that are taken while an answer is on its way.
const AHEAD: usize = 512;

/// A stream and what was read of it before. Says when all is written that there was to write.
pub(super) struct Reread<S> {
    stream: S,
    early: Bytes,
    lender: Lender,
}

impl<S> Reread<S> {
    pub(super) const fn new(stream: S, lender: Lender) -> Self {
        Self { stream, early: Bytes::new(), lender }
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
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        self.lender.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
