//! Uploads in chunks that another process can abort.
//!
//! A process that stops between the last chunk and the completion of an upload may complete it much later, over a file
//! that another process has written since. So an upload has an id that can be published, and the process that takes
//! over aborts it first: stores reject the completion of an aborted upload.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use object_store::{
    MultipartUpload, ObjectStoreExt, PutPayload, PutResult, UploadPart,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use serde::{Deserialize, Serialize};

use super::{Location, StoreError};

/// What another process needs to abort an upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadId {
    /// Path of the object in its store.
    path: String,
    /// The store's id; empty in Azure, where an upload is known by its object alone.
    id: String,
}

impl UploadId {
    /// Whether it is that of one upload, and not of all uploads of an object, as in Azure.
    pub(crate) fn is_unique(&self) -> bool {
        !self.id.is_empty()
    }

    /// Aborts the upload, which another process may have started, in the store of `location`. An upload that was completed
    /// or aborted before is left as it is.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn abort(&self, location: &Location) -> Result<(), StoreError> {
        let Some(store) = location.uploads() else { return Ok(()) };
        let object = location.at(Path::from(self.path.as_str()));
        if self.id.is_empty() {
            return discard_blocks(store.as_ref(), &self.id, &object).await;
        }
        match store.abort_multipart(&object.path, &self.id).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(StoreError::request("abort an upload of", &object, e)),
        }
    }
}

/// An upload and a handle to it; `None` where the store's client does not return the upload's id.
pub(crate) type Started = (Box<dyn MultipartUpload>, Option<Handle>);

/// What can be done with an upload besides sending its chunks.
#[derive(Debug)]
pub(crate) struct Handle(Arc<Shared>);

impl Handle {
    pub(crate) fn id(&self) -> &UploadId {
        &self.0.id
    }

    /// What the store returned for each chunk, with which another process can complete the upload; `None` if one is missing.
    pub(crate) fn chunks(&self) -> Option<Vec<String>> {
        lock(&self.0.parts).iter().map(|part| part.as_ref().map(|part| part.content_id.clone())).collect()
    }

    /// Retries the completion of the upload for `budget`; its chunks keep the budget of the location.
    pub(crate) fn complete_within(&self, budget: Duration) {
        let location = self.0.location.retrying_for(budget);
        *lock(&self.0.completion) = location.uploads().cloned();
    }
}

/// Starts an upload of the object at `location`.
pub(crate) async fn start(location: &Location) -> object_store::Result<Started> {
    let Some(store) = location.uploads() else {
        return Ok((location.store.put_multipart(&location.path).await?, None));
    };
    let id = store.create_multipart(&location.path).await?;
    let shared = Arc::new(Shared {
        location: location.clone(),
        store: Arc::clone(store),
        id: UploadId { path: location.path.to_string(), id },
        parts: Mutex::default(),
        completion: Mutex::default(),
    });
    Ok((Box::new(Chunks { shared: Arc::clone(&shared), next: 0 }), Some(Handle(shared))))
}

/// An upload of the object at `location` that another process has started, and of which the store has these chunks. `None` if it
/// is one of another object, or the store's client does not know uploads by their ids.
pub(crate) fn received(location: &Location, id: UploadId, chunks: Vec<String>) -> Option<Started> {
    let store = location.uploads().filter(|_| id.path == location.path.as_ref())?;
    let next = chunks.len();
    let parts = chunks.into_iter().map(|content_id| Some(PartId { content_id })).collect();
    let shared = Arc::new(Shared {
        location: location.clone(),
        store: Arc::clone(store),
        id,
        parts: Mutex::new(parts),
        completion: Mutex::default(),
    });
    Some((Box::new(Chunks { shared: Arc::clone(&shared), next }), Some(Handle(shared))))
}

/// Azure has no request to abort an upload, but committing a list of blocks discards all other blocks of the blob. So an
/// empty list is committed, and the empty blob deleted. A blob that exists is left alone: its next write discards them.
async fn discard_blocks(store: &dyn MultipartStore, id: &str, blob: &Location) -> Result<(), StoreError> {
    if blob.head().await?.is_some() {
        return Ok(());
    }
    let committed = store.complete_multipart(&blob.path, &id.to_owned(), Vec::new()).await;
    committed.map_err(|e| StoreError::request("abort an upload of", blob, e))?;
    blob.delete().await
}

#[derive(Debug)]
struct Chunks {
    shared: Arc<Shared>,
    next: usize,
}

struct Shared {
    location: Location,
    store: Arc<dyn MultipartStore>,
    id: UploadId,
    /// What the store returned for each chunk that it has.
    parts: Mutex<Vec<Option<PartId>>>,
    /// The client that completes the upload, if it is another one.
    completion: Mutex<Option<Arc<dyn MultipartStore>>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Behind a std mutex: it is never held across an await.
fn lock<T>(value: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

#[async_trait]
impl MultipartUpload for Chunks {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (shared, index) = (Arc::clone(&self.shared), self.next);
        self.next += 1;
        Box::pin(async move {
            let part = shared.store.put_part(&shared.location.path, &shared.id.id, index, data).await?;
            let mut parts = lock(&shared.parts);
            if parts.len() <= index {
                parts.resize_with(index + 1, || None);
            }
            parts[index] = Some(part);
            Ok(())
        })
    }

    async fn complete(&mut self) -> object_store::Result<PutResult> {
        let shared = &self.shared;
        let parts: Option<Vec<PartId>> = lock(&shared.parts).iter().cloned().collect();
        let parts = parts.filter(|parts| parts.len() == self.next).ok_or_else(|| object_store::Error::Generic {
            store: "upload",
            source: "a chunk of the upload is missing".into(),
        })?;
        let store = lock(&shared.completion).clone().unwrap_or_else(|| Arc::clone(&shared.store));
        store.complete_multipart(&shared.location.path, &shared.id.id, parts).await
    }

    async fn abort(&mut self) -> object_store::Result<()> {
        let Shared { store, location, id, .. } = &*self.shared;
        match store.abort_multipart(&location.path, &id.id).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            done => done,
        }
    }
}
