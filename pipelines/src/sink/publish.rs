//! Publishes a complete file under its name: conditional PUT, upload behind a fence, or rename.
//!
//! A process may stop at any point and continue after another one has taken over its output. Whatever it publishes then
//! must fail rather than replace a file of its successor:
//!
//! | file | published by | after a takeover |
//! |---|---|---|
//! | local | rename | cannot happen: the kernel holds the lock as long as the process lives |
//! | held in memory | `PUT` with `If-None-Match: *`; where a file has the name, an upload in chunks | the condition fails |
//! | uploaded in chunks | completing the upload, whose id is in the lease | the successor has aborted the upload |

use std::time::Duration;

use bytes::Bytes;
use object_store::PutMode;

use super::{
    SinkError,
    chunks::Chunks,
    upload::{State, Upload, abort},
};
use crate::stores::{
    Location, StoreError, UploadId,
    create_once::{self, Created},
};

/// The owner of an output: checks that only this process writes to it.
pub trait Fence: Sync {
    /// Its own errors, and the sink's.
    type Error: From<SinkError>;

    /// For how long a request that publishes a file is retried.
    const RETRY_FOR: Duration;

    /// Fails if the output belongs to another process. Need not ask the store if it did a moment ago.
    fn verify(&self) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// As [`Fence::verify`], but always asks the store; publishes the id of an upload that a successor has to abort.
    fn renew(&self, upload: Option<&UploadId>) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// The upload need not be aborted any more.
    fn completed(&self, upload: &UploadId) -> impl Future<Output = ()> + Send;
}

/// Creates the file, unless another one has its name.
pub(super) async fn create(upload: Upload) -> Result<(), SinkError> {
    let file = upload.location.to_string();
    match upload.state {
        State::Held(bytes) => match create_once::create(&upload.location, bytes.into()).await? {
            Created::Ours => Ok(()),
            Created::Existed(_) => Err(SinkError::Exists { file }),
        },
        State::Chunks(..) => {
            upload.abort().await;
            Err(SinkError::Encode { file, reason: "only a file that is held as a whole can be created".to_owned() })
        }
    }
}

/// Publishes the file under its name, which an earlier run may have used.
pub(super) async fn replace<F: Fence>(upload: Upload, fence: &F) -> Result<(), F::Error> {
    let location = upload.location;
    match upload.state {
        State::Held(bytes) if location.local_path().is_some() => {
            fence.verify().await?;
            let put = location.put(bytes.into(), PutMode::Overwrite).await;
            put.map_err(|e| failed(&location, e))?;
        }
        State::Held(bytes) => replace_whole(&location, bytes.into(), fence).await?,
        State::Chunks(chunks) => complete(&location, chunks, fence).await?,
    }
    // A manifest entry that survives a power failure needs its file.
    Ok(location.sync().map_err(SinkError::from)?)
}

/// Creates the file. One that exists is replaced by an upload, which a successor can abort, even if it has the same bytes:
/// a request that names the version it replaces would still be applied after a successor had found those bytes, and on S3
/// after it had written them again.
async fn replace_whole<F: Fence>(location: &Location, bytes: Bytes, fence: &F) -> Result<(), F::Error> {
    fence.verify().await?;
    match location.retrying_for(F::RETRY_FOR).put(bytes.clone(), PutMode::Create).await {
        Ok(_) => return Ok(()),
        Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {}
        Err(e) => return Err(failed(location, e).into()),
    }
    let mut chunks = Chunks::start(location).await.map_err(|e| failed(location, e))?;
    match chunks.put(bytes).await {
        Ok(()) => complete(location, chunks, fence).await,
        Err(error) => {
            abort(location, chunks).await;
            Err(failed(location, error).into())
        }
    }
}

/// Completes an upload. Its id is in the lease by then, so a successor knows of every upload that can be completed.
pub(super) async fn complete<F: Fence>(location: &Location, mut chunks: Chunks, fence: &F) -> Result<(), F::Error> {
    let completed = try_complete(location, &mut chunks, fence).await;
    match (&completed, &chunks.handle) {
        (Ok(()), Some(handle)) => fence.completed(handle.id()).await,
        (Ok(()), None) => {}
        (Err(_), _) => abort(location, chunks).await,
    }
    completed
}

async fn try_complete<F: Fence>(location: &Location, chunks: &mut Chunks, fence: &F) -> Result<(), F::Error> {
    chunks.flush().await.map_err(|e| failed(location, e))?;
    match &chunks.handle {
        Some(handle) => {
            fence.renew(Some(handle.id())).await?;
            handle.complete_within(F::RETRY_FOR);
        }
        None => fence.verify().await?,
    }
    if let Err(error) = chunks.complete().await {
        // A successor may have aborted the upload; then the lease is the reason to report.
        fence.renew(None).await?;
        return Err(failed(location, error).into());
    }
    Ok(())
}

pub(super) fn failed(location: &Location, error: object_store::Error) -> SinkError {
    StoreError::request("write", location, error).into()
}
