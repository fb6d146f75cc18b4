//! Any bytes as a file of a store.

use std::{io, path::Path};

use bytes::BytesMut;
use object_store::PutMode;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::{
    chunks::Chunks,
    upload::{Buffering, State, Upload, abort},
};
use crate::stores::{Location, StoreError};

/// Bytes that are read at a time.
const STEP: usize = 1 << 20;

/// Writes all bytes of `from` to a file that appears complete or not at all, and replaces an earlier one. Returns their number
/// and SHA-256. At most a few chunks are in memory. `name` is that of the source in errors.
///
/// # Errors
/// [`StoreError`] when `from` cannot be read or the store fails.
pub(crate) async fn copy(
    location: &Location,
    mut from: impl AsyncRead + Unpin,
    name: &Path,
) -> Result<(u64, String), StoreError> {
    let mut upload = Upload::new(location.clone(), Buffering::Chunk);
    if let Err(error) = send(&mut upload, &mut from, name).await {
        upload.abort().await;
        return Err(error);
    }
    let digest = upload.digest();
    let finished = match upload.state {
        State::Held(bytes) => location.put(bytes.into(), PutMode::Overwrite).await.map(drop),
        State::Chunks(chunks) => complete(location, chunks).await,
    };
    finished.map_err(|e| StoreError::request("write", location, e))?;
    location.sync().map(|()| digest)
}

async fn send(upload: &mut Upload, from: &mut (impl AsyncRead + Unpin), name: &Path) -> Result<(), StoreError> {
    let unreadable = |e: io::Error| StoreError::local("read", name, e);
    loop {
        let mut step = BytesMut::with_capacity(STEP);
        while step.len() < STEP && from.read_buf(&mut step).await.map_err(unreadable)? > 0 {}
        if step.is_empty() {
            return Ok(());
        }
        let sent = upload.write(step.freeze()).await;
        sent.map_err(|e| StoreError::request("write", &upload.location, e))?;
    }
}

async fn complete(location: &Location, mut chunks: Chunks) -> object_store::Result<()> {
    let mut done = chunks.flush().await;
    if done.is_ok() {
        done = chunks.complete().await;
    }
    if done.is_err() {
        abort(location, chunks).await;
    }
    done
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use sha2::{Digest, Sha256};

    use super::*;
    use crate::stores::Stores;

    /// Sizes around that of a chunk, 8 MiB, on a disk and in a store.
    #[tokio::test]
    async fn a_copy_has_the_bytes_of_its_source() {
        let folder = tempfile::tempdir().unwrap();
        let stores = Stores::with_settings([]);
        stores.insert("memory://x", Arc::new(InMemory::new()));
        for place in [folder.path().join("new").display().to_string(), "memory://x/new".to_owned()] {
            for size in [0, 1, STEP, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, 17 << 20] {
                let bytes: Vec<u8> = (0..size).map(|at| (at % 251) as u8).collect();
                let file = stores.locate(&format!("{place}/{size}")).unwrap();
                let written = copy(&file, bytes.as_slice(), Path::new("here")).await.unwrap();
                assert_eq!(written, (size as u64, format!("{:x}", Sha256::digest(&bytes))), "{place}");
                assert!(file.get().await.unwrap().unwrap() == bytes, "{place}, {size}");
            }
        }
    }
}
