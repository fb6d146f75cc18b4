//! Stores that complete no file once its writer was given up. A writer that is stopped in the middle takes the end of
//! its channel for the end of the rows, and would put what it has in the place of what was there.

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::{
    common::Result as PlanResult,
    execution::{TaskContext, object_store::ObjectStoreRegistry, runtime_env::RuntimeEnv},
};
use futures::stream::BoxStream;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart, path::Path,
};
use url::Url;

/// Set before a writer that is given up can see an end of its rows.
pub(super) type Failed = Arc<AtomicBool>;

/// A task's context whose stores complete no file once `failed` is set.
pub(super) fn with_refusing_stores(context: &TaskContext, failed: &Failed) -> Arc<TaskContext> {
    let runtime = context.runtime_env();
    let registry = Stores { inner: Arc::clone(&runtime.object_store_registry), failed: Arc::clone(failed) };
    let runtime = RuntimeEnv { object_store_registry: Arc::new(registry), ..runtime.as_ref().clone() };
    Arc::new(TaskContext::new(
        context.task_id(),
        context.session_id(),
        context.session_config().clone(),
        context.scalar_functions().clone(),
        context.higher_order_functions().clone(),
        context.aggregate_functions().clone(),
        context.window_functions().clone(),
        Arc::new(runtime),
    ))
}

#[derive(Debug)]
struct Stores {
    inner: Arc<dyn ObjectStoreRegistry>,
    failed: Failed,
}

impl ObjectStoreRegistry for Stores {
    fn register_store(&self, url: &Url, store: Arc<dyn ObjectStore>) -> Option<Arc<dyn ObjectStore>> {
        self.inner.register_store(url, store)
    }

    fn get_store(&self, url: &Url) -> PlanResult<Arc<dyn ObjectStore>> {
        Ok(Arc::new(Refusing { inner: self.inner.get_store(url)?, failed: Arc::clone(&self.failed) }))
    }
}

#[derive(Debug)]
struct Refusing<T> {
    inner: T,
    failed: Failed,
}

impl<T> Refusing<T> {
    fn check(&self) -> Result<()> {
        if !self.failed.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(Error::Generic { store: "elmo", source: "the rows of the file failed, or nobody waits for it".into() })
    }
}

impl fmt::Display for Refusing<Arc<dyn ObjectStore>> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Refusing<Arc<dyn ObjectStore>> {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.check()?;
        self.inner.put_opts(at, payload, options).await
    }

    async fn put_multipart_opts(&self, at: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let inner = self.inner.put_multipart_opts(at, options).await?;
        Ok(Box::new(Refusing { inner, failed: Arc::clone(&self.failed) }))
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(at, options).await
    }

    async fn get_ranges(&self, at: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.inner.get_ranges(at, ranges).await
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(at)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.inner.rename_opts(from, to, options).await
    }
}

#[async_trait]
impl MultipartUpload for Refusing<Box<dyn MultipartUpload>> {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.inner.put_part(data)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        if let Err(refused) = self.check() {
            self.inner.abort().await?;
            return Err(refused);
        }
        self.inner.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}

#[cfg(test)]
mod tests {
    use object_store::{ObjectStoreExt, memory::InMemory};

    use super::*;

    #[tokio::test]
    async fn no_file_is_completed_once_its_rows_have_failed() {
        let inner: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let failed = Failed::default();
        let store = Refusing { inner: Arc::clone(&inner), failed: Arc::clone(&failed) };
        let at = Path::from("out.csv");
        store.put(&at, "before".into()).await.unwrap();
        let mut whole = store.put_multipart(&Path::from("whole.csv")).await.unwrap();
        whole.put_part("rows".into()).await.unwrap();
        whole.complete().await.unwrap();
        let mut begun = store.put_multipart(&at).await.unwrap();
        begun.put_part("half".into()).await.unwrap();
        failed.store(true, Ordering::SeqCst);
        assert!(begun.complete().await.is_err());
        assert!(store.put(&at, "half".into()).await.is_err());
        let read = async |at: &Path| inner.get(at).await.unwrap().bytes().await.unwrap();
        assert_eq!(read(&at).await, "before");
        assert_eq!(read(&Path::from("whole.csv")).await, "rows");
    }
}
