//! Bytes of one file on their way to the store.

use std::mem;

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use object_store::{ObjectStoreExt, PutPayload, WriteMultipart};
use parquet::{arrow::async_writer::AsyncFileWriter, errors::ParquetError};
use sha2::{Digest, Sha256};

use crate::{reply::summary, stores::Location};

/// Bytes of one request. A file that is smaller goes up in a single one.
const CHUNK_BYTES: usize = 8 << 20;
/// Requests that may be under way.
const REQUESTS: usize = 4;

/// Writes one object, which appears under its name when the last byte is there, and hashes what it writes.
///
/// Stores do that by nature; the local file system through a file beside it, which is renamed in the end.
pub(super) struct Upload {
    location: Location,
    state: State,
    hash: Sha256,
    bytes: u64,
    /// What the hash must be for the object to appear.
    expected: Option<String>,
}

enum State {
    /// What was written so far.
    Small(Vec<u8>),
    Large(WriteMultipart),
    Over,
}

impl Upload {
    /// The object appears only if its SHA-256 is the one that is expected, if any is.
    pub(super) fn new(location: Location, expected: Option<&str>) -> Self {
        let (state, hash) = (State::Small(Vec::new()), Sha256::new());
        Self { location, state, hash, bytes: 0, expected: expected.map(str::to_owned) }
    }

    pub(super) async fn write(&mut self, bytes: Bytes) -> Result<(), object_store::Error> {
        self.hash.update(&bytes);
        self.bytes += bytes.len() as u64;
        match &mut self.state {
            State::Small(held) if held.len() + bytes.len() < CHUNK_BYTES => held.extend_from_slice(&bytes),
            State::Small(held) => {
                let held = mem::take(held);
                let upload = self.location.store.put_multipart(&self.location.path).await?;
                let mut upload = WriteMultipart::new_with_chunk_size(upload, CHUNK_BYTES);
                upload.put(held.into());
                upload.put(bytes);
                self.state = State::Large(upload);
            }
            State::Large(upload) => {
                upload.wait_for_capacity(REQUESTS).await?;
                upload.put(bytes);
            }
            State::Over => {}
        }
        Ok(())
    }

    /// Whether what was written is what was expected.
    pub(super) fn is_expected(&self) -> bool {
        let hash = || format!("{:x}", self.hash.clone().finalize());
        self.expected.as_ref().is_none_or(|expected| *expected == hash())
    }

    /// Makes the object appear, unless it is not what was expected.
    pub(super) async fn complete(&mut self) -> Result<(), object_store::Error> {
        if !self.is_expected() {
            return match mem::replace(&mut self.state, State::Over) {
                State::Large(upload) => upload.abort().await,
                State::Small(_) | State::Over => Ok(()),
            };
        }
        match mem::replace(&mut self.state, State::Over) {
            State::Small(held) => self.location.store.put(&self.location.path, PutPayload::from(held)).await.map(drop),
            State::Large(upload) => upload.finish().await.map(drop),
            State::Over => Ok(()),
        }
    }

    /// Makes sure that no part of it stays behind.
    pub(super) async fn abort(self) {
        if let State::Large(upload) = self.state
            && let Err(error) = upload.abort().await
        {
            tracing::warn!(file = %self.location, error = summary(&error), "an unfinished upload could not be removed");
        }
    }

    /// Size and SHA-256 of what was written, in hexadecimal.
    pub(super) fn seal(self) -> (u64, String) {
        (self.bytes, format!("{:x}", self.hash.finalize()))
    }
}

impl AsyncFileWriter for Upload {
    fn write(&mut self, bytes: Bytes) -> BoxFuture<'_, Result<(), ParquetError>> {
        async move { Self::write(self, bytes).await.map_err(|e| ParquetError::External(Box::new(e))) }.boxed()
    }

    fn complete(&mut self) -> BoxFuture<'_, Result<(), ParquetError>> {
        async move { Self::complete(self).await.map_err(|e| ParquetError::External(Box::new(e))) }.boxed()
    }
}
