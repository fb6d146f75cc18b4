//! A store that two jobs share, one of which can be stopped in the middle of a request.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartId, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
    memory::InMemory,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use tokio::sync::Semaphore;

/// A store whose uploads have ids, as two jobs see it.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) inner: InMemory,
    /// Chunks by number, of uploads by id.
    pub(crate) uploads: Mutex<BTreeMap<String, BTreeMap<usize, PutPayload>>>,
}

/// One job's view of a store: one of its requests may be held back, and to it every lease has expired.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(crate) shared: Arc<Shared>,
    pub(crate) gate: Option<Arc<Gate>>,
}

/// Which request is held back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum At {
    /// Those that publish a part.
    Publishing,
    /// The one with this number, counted from the one that acquires the lease. Deletions are not counted: no store makes them conditional, so a request to delete that
    /// was sent a minute ago may still arrive.
    Request(u64),
}

/// Where requests wait.
#[derive(Debug)]
pub(crate) struct Gate {
    at: At,
    requests: AtomicU64,
    pub(crate) reached: Semaphore,
    pub(crate) released: Semaphore,
}

impl Gate {
    pub(crate) fn new(at: At) -> Arc<Self> {
        let (reached, released) = (Semaphore::new(0), Semaphore::new(0));
        Arc::new(Self { at, requests: AtomicU64::new(0), reached, released })
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("View")
    }
}

impl View {
    /// A job that stops before the store sees the request.
    async fn request(&self, at: &Path, publishes: bool) {
        let Some(gate) = &self.gate else { return };
        // The first one counted is the one that acquires the lease.
        let counts = at.filename() == Some("lock") || gate.requests.load(Ordering::SeqCst) > 0;
        let number = if counts { gate.requests.fetch_add(1, Ordering::SeqCst) } else { 0 };
        if (counts && gate.at == At::Request(number)) || (gate.at == At::Publishing && publishes) {
            gate.reached.add_permits(1);
            gate.released.acquire().await.unwrap().forget();
        }
    }

    fn no_upload(id: &str) -> object_store::Error {
        object_store::Error::NotFound { path: id.to_owned(), source: "NoSuchUpload".into() }
    }
}

#[async_trait]
impl ObjectStore for View {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.request(at, at.extension() == Some("parquet")).await;
        self.shared.inner.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        panic!("an upload without an id");
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.request(at, false).await;
        let mut found = self.shared.inner.get_opts(at, options).await?;
        if at.filename() == Some("lock") {
            found.meta.last_modified -= chrono::TimeDelta::seconds(61);
        }
        Ok(found)
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.shared.inner.delete_stream(at)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.shared.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.request(prefix.unwrap_or(&Path::default()), false).await;
        self.shared.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.shared.inner.copy_opts(from, to, options).await
    }
}

/// As S3 does it: an upload that was aborted cannot be completed.
#[async_trait]
impl MultipartStore for View {
    async fn create_multipart(&self, at: &Path) -> Result<MultipartId> {
        self.request(at, false).await;
        let mut uploads = self.shared.uploads.lock().unwrap();
        let id = format!("upload {}", uploads.len());
        uploads.insert(id.clone(), BTreeMap::new());
        Ok(id)
    }

    async fn put_part(&self, _: &Path, id: &MultipartId, index: usize, data: PutPayload) -> Result<PartId> {
        let mut uploads = self.shared.uploads.lock().unwrap();
        uploads.get_mut(id).ok_or_else(|| Self::no_upload(id))?.insert(index, data);
        Ok(PartId { content_id: index.to_string() })
    }

    async fn complete_multipart(&self, at: &Path, id: &MultipartId, parts: Vec<PartId>) -> Result<PutResult> {
        self.request(at, true).await;
        let chunks = self.shared.uploads.lock().unwrap().remove(id).ok_or_else(|| Self::no_upload(id))?;
        assert_eq!(parts.len(), chunks.len());
        let bytes = chunks.into_values().flatten().collect::<PutPayload>();
        self.shared.inner.put(at, bytes).await
    }

    async fn abort_multipart(&self, _: &Path, id: &MultipartId) -> Result<()> {
        self.shared.uploads.lock().unwrap().remove(id).map(drop).ok_or_else(|| Self::no_upload(id))
    }
}
