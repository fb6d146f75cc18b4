//! A file that one process writes and another one publishes: a worker of a cluster writes it, and the process that has the lock
//! of the output gives it its name.
//!
//! | file | while it is written | published by |
//! |---|---|---|
//! | local | a hidden file beside it | renaming it |
//! | in a store | an upload, whose id the other process knows from the beginning | completing the upload |
//!
//! So a writer that is slow, or that stood still and wakes up, can publish nothing.

use object_store::path::PathPart;
use serde::{Deserialize, Serialize};

use super::{
    SinkError,
    chunks::Chunks,
    publish::{Fence, complete, failed},
    upload::{Buffering, State, Upload, abort},
};
use crate::stores::{Location, StoreError, UploadId, local::hidden_name};
#[cfg(feature = "cluster")]
use crate::stores::{RETRY_FOR, uploads};

/// A complete file without its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Staged {
    /// An upload that is not completed.
    Upload {
        /// Its id.
        id: UploadId,
        /// What the store returned for each chunk.
        chunks: Vec<String>,
    },
    /// A file in the same folder.
    Local {
        /// Its name.
        name: String,
    },
}

impl Staged {
    /// What an attempt to write `location` leaves behind.
    pub(crate) fn of_attempt(location: &Location, attempt: u32, upload: Option<UploadId>) -> Self {
        match upload {
            Some(id) => Self::Upload { id, chunks: Vec::new() },
            None => Self::Local { name: hidden_name(location.path.filename().unwrap_or_default(), attempt) },
        }
    }

    /// Publishes the file as `location`, which it was written for. It is durable when this returns.
    ///
    /// # Errors
    /// The fence's, when the output belongs to another process; [`SinkError::Store`] when the store fails. Then the file is
    /// discarded.
    pub async fn publish<F: Fence>(self, location: &Location, fence: &F) -> Result<(), F::Error> {
        match self {
            Self::Upload { id, chunks } => {
                let chunks = Chunks::received(location, id, chunks).ok_or_else(|| no_uploads(location))?;
                complete(location, chunks, fence).await
            }
            Self::Local { name } => {
                let verified = fence.verify().await;
                let renamed = match verified {
                    Ok(()) => rename(location, &name).map_err(F::Error::from),
                    Err(error) => Err(error),
                };
                if renamed.is_err() {
                    Self::Local { name }.discard(location).await;
                }
                renamed
            }
        }
    }

    /// The hidden file on a local disk; `None` for an upload.
    #[cfg(feature = "cluster")]
    pub(crate) fn hidden(&self, location: &Location) -> Option<Location> {
        match self {
            Self::Local { name } => Some(sibling(location, name)),
            Self::Upload { .. } => None,
        }
    }

    /// Whether both are the same staged file, ignoring which chunks are known.
    #[cfg(feature = "cluster")]
    pub(crate) fn is_of_attempt(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Upload { id, .. }, Self::Upload { id: other, .. }) => id == other,
            _ => self == other,
        }
    }

    /// As [`Staged::discard`] for a file that is complete or published: does not search for temporary files of the local store.
    ///
    /// # Errors
    /// If it cannot be deleted.
    #[cfg(feature = "cluster")]
    pub(crate) async fn discard_complete(self, location: &Location) -> Result<(), StoreError> {
        let Some(hidden) = self.hidden(location).and_then(|hidden| hidden.local_path()) else {
            return self.try_discard(location).await;
        };
        match std::fs::remove_file(&hidden) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(StoreError::local("delete", &hidden, error))
            }
            _ => Ok(()),
        }
    }

    /// As [`Staged::publish`] without a fence: no other process writes to `location`.
    ///
    /// # Errors
    /// When the store fails. Then the file is discarded.
    #[cfg(feature = "cluster")]
    pub(crate) async fn publish_unfenced(self, location: &Location) -> Result<(), SinkError> {
        match self {
            Self::Upload { id, chunks } => {
                let (mut upload, handle) =
                    uploads::received(location, id, chunks).ok_or_else(|| no_uploads(location))?;
                if let Some(handle) = handle {
                    handle.complete_within(RETRY_FOR);
                }
                if let Err(error) = upload.complete().await {
                    // The error that led here is the one to report.
                    let _ = upload.abort().await;
                    return Err(failed(location, error));
                }
                Ok(())
            }
            Self::Local { name } => {
                let location = location.clone();
                let renamed = tokio::task::spawn_blocking(move || {
                    rename(&location, &name).inspect_err(|_| drop(remove(&location, &name)))
                });
                renamed.await.unwrap_or_else(|error| {
                    Err(SinkError::Encode { file: "a file".to_owned(), reason: error.to_string() })
                })
            }
        }
    }

    /// Deletes the file. If that fails, it stays hidden, or its chunks stay in the store.
    pub async fn discard(self, location: &Location) {
        if let Err(error) = self.try_discard(location).await {
            tracing::warn!(file = %location, %error, "an unfinished file could not be deleted");
        }
    }

    /// As [`Staged::discard`], but returns the error instead of logging it with the address.
    ///
    /// # Errors
    /// If it cannot be deleted.
    pub(crate) async fn try_discard(self, location: &Location) -> Result<(), StoreError> {
        match self {
            // Without an id, this would abort all uploads of the file, also that of the next attempt. The store deletes chunks that
            // are not used.
            Self::Upload { id, .. } if !id.is_unique() => Ok(()),
            Self::Upload { id, .. } => id.abort(location).await,
            Self::Local { name } if location.local_path().is_some() => remove(location, &name),
            // No upload has begun.
            Self::Local { .. } => Ok(()),
        }
    }
}

/// Begins a file; see [`super::PartWriter::staged`].
pub(super) async fn begin(location: &Location, attempt: u32) -> Result<(Upload, Option<UploadId>), SinkError> {
    if location.local_path().is_some() {
        let hidden = sibling(location, &hidden_name(location.path.filename().unwrap_or_default(), attempt));
        return Ok((Upload::new(hidden, Buffering::Chunk), None));
    }
    let upload = Upload::begun(location.clone()).await.map_err(|e| failed(location, e))?;
    let id = match &upload.state {
        State::Chunks(Chunks { handle: Some(handle), .. }) => Some(handle.id().clone()),
        _ => None,
    };
    match id {
        Some(id) => Ok((upload, Some(id))),
        None => {
            upload.abort().await;
            Err(no_uploads(location))
        }
    }
}

/// Completes a file without its name.
pub(super) async fn finish(upload: Upload) -> Result<Staged, SinkError> {
    let location = upload.location;
    match upload.state {
        State::Chunks(mut chunks) => {
            if location.local_path().is_some() {
                let completed = async {
                    chunks.flush().await?;
                    chunks.complete().await
                };
                completed.await.map_err(|e| failed(&location, e))?;
                return hidden(&location);
            }
            if let Err(error) = chunks.flush().await {
                abort(&location, chunks).await;
                return Err(failed(&location, error));
            }
            let handle = chunks.handle.as_ref();
            let sent = handle.and_then(|handle| Some((handle.id().clone(), handle.chunks()?)));
            sent.map(|(id, chunks)| Staged::Upload { id, chunks }).ok_or_else(|| no_uploads(&location))
        }
        State::Held(bytes) => {
            let put = location.put(bytes.into(), object_store::PutMode::Overwrite).await;
            put.map_err(|e| failed(&location, e))?;
            hidden(&location)
        }
    }
}

fn hidden(location: &Location) -> Result<Staged, SinkError> {
    location.sync()?;
    Ok(Staged::Local { name: location.path.filename().unwrap_or_default().to_owned() })
}

/// The object `name` beside another one.
fn sibling(location: &Location, name: &str) -> Location {
    let mut parts: Vec<_> = location.path.parts().collect();
    parts.pop();
    // `parse` does not percent-encode the name, unlike `from`.
    let name = PathPart::parse(name).unwrap_or_else(|_| name.into());
    location.at(parts.into_iter().chain([name]).collect())
}

/// Deletes a hidden file, also one that is not complete.
fn remove(location: &Location, name: &str) -> Result<(), StoreError> {
    let Some(path) = sibling(location, name).local_path() else { return Ok(()) };
    let Some(folder) = path.parent() else { return Ok(()) };
    let failed = |e| StoreError::local("delete", &path, e);
    let is_gone = |e: &std::io::Error| e.kind() == std::io::ErrorKind::NotFound;
    let entries = match std::fs::read_dir(folder) {
        Err(e) if is_gone(&e) => return Ok(()),
        entries => entries.map_err(failed)?,
    };
    for entry in entries {
        let entry = entry.map_err(failed)?;
        // The local store calls it .NAME#1 while it is written.
        let is_it = entry.file_name().to_str().is_some_and(|found| {
            let unfinished = found.strip_prefix('.').and_then(|found| found.strip_prefix(name)?.strip_prefix('#'));
            found == name || unfinished.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
        });
        if is_it
            && let Err(e) = std::fs::remove_file(entry.path())
            && !is_gone(&e)
        {
            return Err(failed(e));
        }
    }
    Ok(())
}

fn rename(location: &Location, name: &str) -> Result<(), SinkError> {
    let (from, to) = (sibling(location, name).local_path(), location.local_path());
    let (Some(from), Some(to)) = (from, to) else { return Err(no_uploads(location)) };
    std::fs::rename(&from, &to).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => SinkError::Encode {
            file: location.to_string(),
            reason: "the staged file was not found: the worker has another disk at this path, or deleted it after losing its \
                     connection; use a disk that all processes share, or a URL of an object store"
                .to_owned(),
        },
        _ => StoreError::local("rename", &from, e).into(),
    })?;
    Ok(location.sync()?)
}

fn no_uploads(location: &Location) -> SinkError {
    SinkError::Encode {
        file: location.to_string(),
        reason: "its store does not let one process finish an upload of another one".to_owned(),
    }
}
