//! The upload of one file: buffers, hashes and sends its bytes.

use std::mem;

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::chunks::{CHUNK_BYTES, Chunks};
use crate::{reply::summary, stores::Location};

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
    Chunks(Chunks),
}

impl Upload {
    pub(super) fn new(location: Location, buffering: Buffering) -> Self {
        let (state, hash) = (State::Held(Vec::new()), Sha256::new());
        Self { location, buffering, state, hash, bytes: 0 }
    }

    /// An upload in chunks from the beginning.
    pub(super) async fn begun(location: Location) -> Result<Self, object_store::Error> {
        let chunks = Chunks::start(&location).await?;
        Ok(Self { state: State::Chunks(chunks), ..Self::new(location, Buffering::Chunk) })
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
                // Whatever happens to the first chunks, the upload can be aborted.
                self.state = State::Chunks(Chunks::start(&self.location).await?);
                if let State::Chunks(chunks) = &mut self.state {
                    chunks.put(held.into()).await?;
                    chunks.put(bytes).await?;
                }
            }
            State::Chunks(chunks) => chunks.put(bytes).await?,
        }
        Ok(())
    }

    /// Deletes the chunks that the store has.
    pub(super) async fn abort(self) {
        if let State::Chunks(chunks) = self.state {
            abort(&self.location, chunks).await;
        }
    }

    /// Size and SHA-256 (hexadecimal) of the bytes so far.
    pub(super) fn digest(&self) -> (u64, String) {
        (self.bytes, format!("{:x}", self.hash.clone().finalize()))
    }
}

/// Aborts an upload that failed or is not needed; if that fails, its chunks stay in the store.
pub(super) async fn abort(location: &Location, chunks: Chunks) {
    if let Err(error) = chunks.abort().await {
        tracing::warn!(file = %location, error = summary(&error), "an incomplete upload could not be aborted");
    }
}
