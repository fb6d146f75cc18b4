//! An upload in chunks of a fixed size, some of which are sent at the same time.

use bytes::Bytes;
use object_store::{MultipartUpload, PutPayloadMut};
use tokio::task::JoinSet;

use crate::stores::{
    Location, UploadId,
    uploads::{self, Handle},
};

/// Bytes of a chunk.
pub(super) const CHUNK_BYTES: usize = 8 << 20;
/// Chunks that are sent at the same time.
const REQUESTS: usize = 4;

/// As [`object_store::WriteMultipart`], except that sending the last chunk and completing the upload are two steps: the
/// lease is renewed in between.
pub(super) struct Chunks {
    upload: Box<dyn MultipartUpload>,
    /// `None` where the upload has no id.
    pub(super) handle: Option<Handle>,
    /// Less than a chunk.
    rest: PutPayloadMut,
    requests: JoinSet<object_store::Result<()>>,
}

impl Chunks {
    pub(super) async fn start(location: &Location) -> object_store::Result<Self> {
        let (upload, handle) = uploads::start(location).await?;
        Ok(Self { upload, handle, rest: PutPayloadMut::new(), requests: JoinSet::new() })
    }

    /// An upload that another process has started and sent; see [`uploads::received`].
    pub(super) fn received(location: &Location, id: UploadId, chunks: Vec<String>) -> Option<Self> {
        let (upload, handle) = uploads::received(location, id, chunks)?;
        Some(Self { upload, handle, rest: PutPayloadMut::new(), requests: JoinSet::new() })
    }

    /// Appends bytes; waits while too many chunks are being sent.
    pub(super) async fn put(&mut self, mut bytes: Bytes) -> object_store::Result<()> {
        loop {
            let missing = CHUNK_BYTES - self.rest.content_length();
            if bytes.len() < missing {
                self.rest.push(bytes);
                return Ok(());
            }
            self.rest.push(bytes.split_to(missing));
            self.send().await?;
        }
    }

    async fn send(&mut self) -> object_store::Result<()> {
        self.wait(REQUESTS - 1).await?;
        let chunk = std::mem::take(&mut self.rest);
        self.requests.spawn(self.upload.put_part(chunk.into()));
        Ok(())
    }

    /// Waits until at most `limit` chunks are being sent.
    async fn wait(&mut self, limit: usize) -> object_store::Result<()> {
        while self.requests.len() > limit
            && let Some(sent) = self.requests.join_next().await
        {
            sent.map_err(|source| object_store::Error::JoinError { source })??;
        }
        Ok(())
    }

    /// Sends the rest, and waits until the store has every chunk.
    pub(super) async fn flush(&mut self) -> object_store::Result<()> {
        if !self.rest.is_empty() {
            self.send().await?;
        }
        self.wait(0).await
    }

    /// Makes the object appear.
    pub(super) async fn complete(&mut self) -> object_store::Result<()> {
        self.upload.complete().await.map(drop)
    }

    /// Deletes the chunks that the store has.
    pub(super) async fn abort(mut self) -> object_store::Result<()> {
        self.requests.shutdown().await;
        self.upload.abort().await
    }
}
