//! A store that fails: before or after a request was applied, with a broken connection, or with a list that ends early.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use futures::{StreamExt, stream::BoxStream};
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
    client::{HttpError, HttpErrorKind},
    memory::InMemory,
    path::Path,
};

/// The fate of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// It succeeds.
    None,
    /// 500, 503, or a timeout before the request was applied.
    Before,
    /// The request was applied, but its answer was lost.
    After,
    /// A list ends early, as if there were no more.
    Short,
    /// The connection broke at a request that the client does not retry, before or after it was applied.
    Reset { done: bool },
}

/// Which request fails, by its number since the store was made.
pub(crate) type Plan = Arc<dyn Fn(u64) -> Fault + Send + Sync>;

/// Memory, with faults.
#[derive(Clone)]
pub(crate) struct Faulty {
    pub(crate) inner: Arc<InMemory>,
    pub(crate) plan: Plan,
    pub(crate) requests: Arc<AtomicU64>,
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

fn reset() -> object_store::Error {
    let source = HttpError::new(HttpErrorKind::Interrupted, std::io::Error::from(std::io::ErrorKind::ConnectionReset));
    object_store::Error::Generic { store: "faulty", source: Box::new(source) }
}

fn failure() -> object_store::Error {
    object_store::Error::Generic { store: "faulty", source: "503 Service Unavailable".into() }
}

impl Faulty {
    pub(crate) fn new(inner: &Arc<InMemory>, plan: Plan) -> Self {
        Self { inner: Arc::clone(inner), plan, requests: Arc::default() }
    }

    pub(crate) fn fault(&self) -> Fault {
        (self.plan)(self.requests.fetch_add(1, Ordering::SeqCst))
    }

    async fn request<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        match self.fault() {
            Fault::Before => Err(failure()),
            Fault::After => work.await.and(Err(failure())),
            Fault::None | Fault::Short | Fault::Reset { .. } => work.await,
        }
    }

    /// A request that the stores' clients do not retry.
    async fn change<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        match (self.plan)(self.requests.load(Ordering::SeqCst)) {
            Fault::Reset { done } => {
                self.requests.fetch_add(1, Ordering::SeqCst);
                if done { work.await.and(Err(reset())) } else { Err(reset()) }
            }
            _ => self.request(work).await,
        }
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let overwrites = options.mode == PutMode::Overwrite;
        let put = self.inner.put_opts(at, payload, options);
        if overwrites { self.request(put).await } else { self.change(put).await }
    }

    async fn put_multipart_opts(&self, at: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.request(self.inner.put_multipart_opts(at, options)).await?;
        Ok(Box::new(FaultyUpload { upload, store: self.clone() }))
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.request(self.inner.get_opts(at, options)).await
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        at.then(move |path| {
            let store = store.clone();
            async move {
                let path = path?;
                store.change(store.inner.delete(&path)).await.map(|()| path)
            }
        })
        .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.fault() {
            Fault::None | Fault::Reset { .. } => self.inner.list(prefix),
            Fault::Short => self.inner.list(prefix).take(1).boxed(),
            Fault::Before | Fault::After => futures::stream::once(async { Err(failure()) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        match self.fault() {
            Fault::None | Fault::Reset { .. } => self.inner.list_with_delimiter(prefix).await,
            Fault::Short => {
                let mut list = self.inner.list_with_delimiter(prefix).await?;
                list.objects.truncate(1);
                Ok(list)
            }
            Fault::Before | Fault::After => Err(failure()),
        }
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.request(self.inner.copy_opts(from, to, options)).await
    }
}

#[derive(Debug)]
struct FaultyUpload {
    upload: Box<dyn MultipartUpload>,
    store: Faulty,
}

#[async_trait]
impl MultipartUpload for FaultyUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let part = self.upload.put_part(data);
        let store = self.store.clone();
        Box::pin(async move { store.request(part).await })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.store.request(self.upload.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}
