//! Event streams that last. A connection of hyper's holds two buffers of 8 KiB or more until its answer is whole,
//! and of thousands of streams nearly all wait for their next token at any time. So what is left of a stream after
//! its beginning is written here, into the socket that hyper gets back at its end. One that waits holds no buffer.

use std::cell::Cell;
use std::io::{self, Write as _};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, HttpBody as _};
use tokio::io::{AsyncRead, AsyncWrite};

use super::reread::Reread;

/// Bytes after which what has been gathered is written, though there may be more.
const MOST: usize = 64 << 10;

thread_local! {
    /// Where chunks are put together before they are written.
    static GATHERED: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A stream whose head is written, until it is whole; an error if it does not come to that.
pub(super) struct Passing<'a, S> {
    stream: &'a mut Reread<S>,
    body: Body,
    /// Whether a client that sends no more is taken for one that has left.
    watches: bool,
    /// What the client has not taken yet, and how much of it it has.
    unsent: (Vec<u8>, usize),
    flushed: bool,
    ended: bool,
}

impl<'a, S> Passing<'a, S> {
    pub(super) const fn new(stream: &'a mut Reread<S>, body: Body, watches: bool) -> Self {
        Self { stream, body, watches, unsent: (Vec::new(), 0), flushed: true, ended: false }
    }

    /// Puts together what can be had now; whether the body may have more at once.
    fn gather(&mut self, out: &mut Vec<u8>, context: &mut Context<'_>) -> io::Result<bool> {
        while out.len() < MOST {
            match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Pending => return Ok(false),
                Poll::Ready(Some(Ok(frame))) => {
                    // Trailers are nobody's.
                    let Ok(data) = frame.into_data() else { continue };
                    if !data.is_empty() {
                        write!(out, "{:x}\r\n", data.len())?;
                        out.extend_from_slice(&data);
                        out.extend_from_slice(b"\r\n");
                    }
                }
                Poll::Ready(Some(Err(error))) => return Err(io::Error::other(error)),
                Poll::Ready(None) => {
                    out.extend_from_slice(b"0\r\n\r\n");
                    self.ended = true;
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Passing<'_, S> {
    /// Whether the client has left, as far as that can be seen.
    fn poll_leaves(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if !self.watches || self.stream.has_early() {
            return Ok(());
        }
        match self.stream.poll_ahead(context) {
            Poll::Ready(Ok(0)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Poll::Ready(Err(error)) => Err(error),
            Poll::Ready(Ok(_)) | Poll::Pending => Ok(()),
        }
    }

    /// Writes as much as the client takes.
    fn poll_write(&mut self, bytes: &[u8], context: &mut Context<'_>) -> io::Result<usize> {
        let mut written = 0;
        while written < bytes.len() {
            match Pin::new(&mut *self.stream).poll_write(context, &bytes[written..])? {
                Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(more) => written += more,
                Poll::Pending => break,
            }
            self.flushed = false;
        }
        Ok(written)
    }

    /// Writes what was left over.
    fn poll_unsent(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let (bytes, sent) = std::mem::take(&mut self.unsent);
        let sent = sent + self.poll_write(&bytes[sent..], context)?;
        if sent < bytes.len() {
            self.unsent = (bytes, sent);
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    /// Gathers and writes once; whether there may be more at once.
    fn pass(&mut self, context: &mut Context<'_>) -> io::Result<bool> {
        let mut out = GATHERED.take();
        let gathered = self.gather(&mut out, context);
        let written = self.poll_write(&out, context);
        match written {
            Ok(written) if out.len() - written > MOST => self.unsent = (std::mem::take(&mut out), written),
            Ok(written) => self.unsent = (out[written..].to_vec(), 0),
            Err(_) => {}
        }
        out.clear();
        if out.capacity() <= 2 * MOST {
            GATHERED.set(out);
        }
        written?;
        gathered
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Future for Passing<'_, S> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        this.poll_leaves(context)?;
        loop {
            if !this.unsent.0.is_empty() {
                ready!(this.poll_unsent(context))?;
            }
            // A body that ended may not be asked again.
            let more = !this.ended && this.pass(context)?;
            if !this.unsent.0.is_empty() {
                continue;
            }
            if !this.flushed {
                ready!(Pin::new(&mut *this.stream).poll_flush(context))?;
                this.flushed = true;
            }
            if this.ended {
                return Poll::Ready(Ok(()));
            }
            if !more {
                return Poll::Pending;
            }
        }
    }
}

#[cfg(test)]
#[path = "streaming_tests.rs"]
mod tests;
