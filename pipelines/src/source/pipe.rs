//! Standard input in a format with a schema, which is read before the rows are.
//!
//! What is read for the schema is kept and read again with the rows. Parquet needs its end first, so it is copied to a
//! temporary file, as large as the input.

use std::{
    io::{self, Cursor},
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use parking_lot::Mutex;
use tempfile::TempPath;
use tokio::{
    io::{AsyncBufRead, AsyncRead, AsyncReadExt, ReadBuf},
    sync::OnceCell,
};

use super::{
    InputFile, STDIN, SourceError,
    bytes::{self, Bytes},
    parquet,
};
use crate::stores::{Location, StoreError, Stores};

/// Standard input.
#[derive(Debug, Default)]
pub(super) struct Pipe {
    state: Arc<Mutex<State>>,
    spool: OnceCell<Spool>,
}

#[derive(Default)]
enum State {
    /// Nothing was read.
    #[default]
    New,
    /// The bytes that were read, and what follows them.
    Peeked(Vec<u8>, Bytes),
    /// The rows were read, or are being read.
    Taken,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::New => "New",
            Self::Peeked(..) => "Peeked",
            Self::Taken => "Taken",
        })
    }
}

/// A copy on the local disk.
#[derive(Debug)]
pub(super) struct Spool {
    pub(super) location: Location,
    pub(super) size: u64,
    /// Deletes it.
    _path: TempPath,
}

impl Pipe {
    /// Reads from the beginning, and keeps what is read for the next reader.
    pub(super) fn peek(&self) -> Result<Bytes, SourceError> {
        let (kept, rest) = self.take()?;
        let peek =
            Peek { kept: kept.clone(), again: Cursor::new(kept), rest: Some(rest), state: Arc::clone(&self.state) };
        Ok(Box::new(peek))
    }

    /// Reads from the beginning, for the last time.
    pub(super) fn read(&self) -> Result<Bytes, SourceError> {
        let (kept, rest) = self.take()?;
        Ok(if kept.is_empty() { rest } else { Box::new(Cursor::new(kept).chain(rest)) })
    }

    fn take(&self) -> Result<(Vec<u8>, Bytes), SourceError> {
        match mem::replace(&mut *self.state.lock(), State::Taken) {
            State::New => Ok((Vec::new(), bytes::stdin()?)),
            State::Peeked(kept, rest) => Ok((kept, rest)),
            State::Taken => Err(StoreError::Local {
                operation: "read",
                address: STDIN.to_owned(),
                source: io::Error::other("standard input cannot be read again"),
            }
            .into()),
        }
    }

    /// The copy, which is made at the first call.
    pub(super) async fn spooled(&self, file: &InputFile) -> Result<&Spool, SourceError> {
        let copy = async {
            let temporary = |source| SourceError::temporary(file, source);
            let (spool, path) = tempfile::NamedTempFile::new().map_err(temporary)?.into_parts();
            let mut spool = tokio::fs::File::from_std(spool);
            let mut bytes = self.read()?;
            // Of a stream that does not end, nothing is copied.
            let start = bytes::first(file, &mut bytes, parquet::MAGIC_BYTES).await?;
            parquet::check_start(file, &start)?;
            let mut bytes = Cursor::new(start).chain(bytes);
            let size = bytes::copy_between(&mut bytes, &mut spool, file).await?;
            let location = Stores::with_settings([]).locate(&path.to_string_lossy())?;
            Ok(Spool { location, size, _path: path })
        };
        self.spool.get_or_try_init(|| copy).await
    }
}

/// Reads, and puts back what it read when it is dropped.
struct Peek {
    /// All bytes that were read, by this reader and earlier ones.
    kept: Vec<u8>,
    /// What earlier readers read.
    again: Cursor<Vec<u8>>,
    /// `None` after it was put back.
    rest: Option<Bytes>,
    state: Arc<Mutex<State>>,
}

impl Peek {
    fn is_behind(&self) -> bool {
        self.again.position() == self.again.get_ref().len() as u64
    }
}

impl AsyncBufRead for Peek {
    fn poll_fill_buf(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        let this = self.get_mut();
        match this.is_behind() {
            true => this.rest.as_deref_mut().map_or(Poll::Ready(Ok(&[])), |rest| Pin::new(rest).poll_fill_buf(context)),
            false => Pin::new(&mut this.again).poll_fill_buf(context),
        }
    }

    fn consume(self: Pin<&mut Self>, amount: usize) {
        let this = self.get_mut();
        if !this.is_behind() {
            return Pin::new(&mut this.again).consume(amount);
        }
        // The bytes are buffered, so that this neither waits nor reads.
        let context = &mut Context::from_waker(std::task::Waker::noop());
        if let Some(rest) = this.rest.as_deref_mut()
            && let Poll::Ready(Ok(bytes)) = Pin::new(&mut *rest).poll_fill_buf(context)
        {
            this.kept.extend_from_slice(&bytes[..amount.min(bytes.len())]);
            Pin::new(rest).consume(amount);
        }
    }
}

impl AsyncRead for Peek {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let bytes = ready!(self.as_mut().poll_fill_buf(context))?;
        let length = bytes.len().min(into.remaining());
        into.put_slice(&bytes[..length]);
        self.consume(length);
        Poll::Ready(Ok(()))
    }
}

impl Drop for Peek {
    fn drop(&mut self) {
        if let Some(rest) = self.rest.take() {
            *self.state.lock() = State::Peeked(mem::take(&mut self.kept), rest);
        }
    }
}
