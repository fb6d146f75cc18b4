//! A stream of bytes that is rewritten as it is read.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncBufRead, AsyncRead, ReadBuf};

use super::{bytes::Bytes, reason::own_io};

/// Rewrites a stream in pieces.
pub(crate) trait Rewrite: Send + Unpin {
    /// Takes the next bytes, and appends what becomes of them.
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), String>;
    /// Ends the stream.
    fn finish(&mut self, out: &mut Vec<u8>) -> Result<(), String>;
}

/// Bytes that were rewritten.
pub(super) struct Rewritten<R> {
    from: Bytes,
    rewrite: R,
    out: Vec<u8>,
    /// How many bytes of `out` were taken.
    taken: usize,
    ended: bool,
}

impl<R: Rewrite> Rewritten<R> {
    pub(super) fn new(from: Bytes, rewrite: R) -> Self {
        Self { from, rewrite, out: Vec::new(), taken: 0, ended: false }
    }
}

impl<R: Rewrite> AsyncBufRead for Rewritten<R> {
    fn poll_fill_buf(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        let this = self.get_mut();
        while this.taken == this.out.len() && !this.ended {
            this.out.clear();
            this.taken = 0;
            let bytes = ready!(Pin::new(&mut this.from).poll_fill_buf(context))?;
            let length = bytes.len();
            this.ended = bytes.is_empty();
            let rewritten = match this.ended {
                true => this.rewrite.finish(&mut this.out),
                false => this.rewrite.push(bytes, &mut this.out),
            };
            // The rows before the error come first.
            if let Err(reason) = rewritten {
                return Poll::Ready(Err(own_io(reason)));
            }
            Pin::new(&mut this.from).consume(length);
        }
        Poll::Ready(Ok(&this.out[this.taken..]))
    }

    fn consume(self: Pin<&mut Self>, amount: usize) {
        self.get_mut().taken += amount;
    }
}

impl<R: Rewrite> AsyncRead for Rewritten<R> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let bytes = ready!(self.as_mut().poll_fill_buf(context))?;
        let length = bytes.len().min(into.remaining());
        into.put_slice(&bytes[..length]);
        self.consume(length);
        Poll::Ready(Ok(()))
    }
}
