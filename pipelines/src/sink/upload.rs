//! Bytes of one file on their way to the store.

use std::mem;

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use object_store::WriteMultipart;
use parquet::{arrow::async_writer::AsyncFileWriter, errors::ParquetError};
use sha2::{Digest, Sha256};

use crate::{
    reply::summary,
    stores::{
        Location,
        uploads::{self, Handle},
    },
};

/// Bytes of one request of an upload in chunks.
const CHUNK_BYTES: usize = 8 << 20;
/// Concurrent requests of an upload in chunks.
const REQUESTS: usize = 4;

/// How much of a file is held in memory until it is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffering {
    /// All of it, so that one request can create it.
    Whole,
    /// A chunk: a file of more than 8 MiB is uploaded while it is written.
    Chunk,
}

/// The bytes of a file, and their digest.
pub(super) struct Upload {
    pub(super) location: Location,
    buffering: Buffering,
    pub(super) state: State,
    hash: Sha256,
    bytes: u64,
}

pub(super) enum State {
    /// All bytes so far.
    Held(Vec<u8>),
    /// Chunks that the store has or is receiving.
    Chunks(WriteMultipart, Option<Handle>),
}

impl Upload {
    pub(super) fn new(location: Location, buffering: Buffering) -> Self {
        let (state, hash) = (State::Held(Vec::new()), Sha256::new());
        Self { location, buffering, state, hash, bytes: 0 }
    }

    pub(super) async fn write(&mut self, bytes: Bytes) -> Result<(), object_store::Error> {
        self.hash.update(&bytes);
        self.bytes += bytes.len() as u64;
        match &mut self.state {
            State::Held(held) if self.buffering == Buffering::Whole || held.len() + bytes.len() < CHUNK_BYTES => {
                held.extend_from_slice(&bytes);
            }
            State::Held(held) => {
                let held = mem::take(held);
                self.location.create_parents()?;
                let (upload, handle) = uploads::start(&self.location).await?;
                let mut upload = WriteMultipart::new_with_chunk_size(upload, CHUNK_BYTES);
                upload.put(held.into());
                upload.put(bytes);
                self.state = State::Chunks(upload, handle);
            }
            State::Chunks(upload, _) => {
                upload.wait_for_capacity(REQUESTS).await?;
                upload.put(bytes);
            }
        }
        Ok(())
    }

    /// Deletes the chunks that the store has.
    pub(super) async fn abort(self) {
        if let State::Chunks(upload, _) = self.state
            && let Err(error) = upload.abort().await
        {
            tracing::warn!(file = %self.location, error = summary(&error), "an incomplete upload could not be aborted");
        }
    }

    /// Size and SHA-256 (hexadecimal) of the bytes so far.
    pub(super) fn digest(&self) -> (u64, String) {
        (self.bytes, format!("{:x}", self.hash.clone().finalize()))
    }
}

impl AsyncFileWriter for Upload {
    fn write(&mut self, bytes: Bytes) -> BoxFuture<'_, Result<(), ParquetError>> {
        async move { Self::write(self, bytes).await.map_err(|e| ParquetError::External(Box::new(e))) }.boxed()
    }

    /// Does nothing: the file is published when the writer is closed.
    fn complete(&mut self) -> BoxFuture<'_, Result<(), ParquetError>> {
        async { Ok(()) }.boxed()
    }
}
