//! Object stores that stage writes: files become visible together, when [`StagedFiles::commit`] is called.
//!
//! DataFusion's writers complete the files they have begun even if their input fails or the query is dropped, which
//! would replace existing files by partial ones. Small files stay in memory, as the writers hold them anyway; a
//! multipart upload per small file would cost an open file each on local disks. Parts of large files go to the store,
//! where they stay invisible until the upload is completed.

use std::{
    fmt,
    ops::Range,
    path::PathBuf,
    sync::{Arc, Weak},
};

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::{
    common::Result as PlanResult,
    execution::{TaskContext, object_store::ObjectStoreRegistry, runtime_env::RuntimeEnv},
};
use futures::{TryFutureExt, stream::BoxStream};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart, path::Path,
};
use url::Url;

#[cfg(feature = "cluster")]
use super::unnamed::Unnamed;
use super::{
    commit::{Content, StagedFile, StagedFiles, StagedUpload},
    copy_place,
};
use crate::operator::copied;

/// A copy of a task context with `files` as a session extension, for operators that collect files staged by other processes.
#[cfg(feature = "cluster")]
pub(super) fn publishing_context(context: &TaskContext, files: &Arc<StagedFiles>) -> Arc<TaskContext> {
    // Weak, to avoid a cycle: the files keep the stream of the other processes open, which owns this context.
    let config = context.session_config().clone().with_extension(Arc::new(Publishing(Arc::downgrade(files))));
    copied(context, config, context.runtime_env())
}

/// The files of a statement that other processes write.
#[cfg(feature = "cluster")]
pub(crate) struct Publishing(pub(crate) Weak<StagedFiles>);

/// A copy of a task context whose stores stage writes in `files`.
pub(super) fn staging_context(context: &TaskContext, files: &Arc<StagedFiles>) -> Arc<TaskContext> {
    let runtime = context.runtime_env();
    let registry = StagingRegistry { inner: Arc::clone(&runtime.object_store_registry), files: Arc::clone(files) };
    let runtime = RuntimeEnv { object_store_registry: Arc::new(registry), ..runtime.as_ref().clone() };
    copied(context, context.session_config().clone(), Arc::new(runtime))
}

#[derive(Debug)]
struct StagingRegistry {
    inner: Arc<dyn ObjectStoreRegistry>,
    files: Arc<StagedFiles>,
}

impl ObjectStoreRegistry for StagingRegistry {
    fn register_store(&self, url: &Url, store: Arc<dyn ObjectStore>) -> Option<Arc<dyn ObjectStore>> {
        self.inner.register_store(url, store)
    }

    fn get_store(&self, url: &Url) -> PlanResult<Arc<dyn ObjectStore>> {
        let origin = format!("{}/", url.as_str().trim_end_matches('/')).into();
        Ok(Arc::new(StagingStore { inner: self.inner.get_store(url)?, origin, files: Arc::downgrade(&self.files) }))
    }
}

/// A store that stages writes and forwards everything else.
#[derive(Debug, Clone)]
struct StagingStore {
    inner: Arc<dyn ObjectStore>,
    /// `scheme://bucket/`
    origin: Arc<str>,
    /// Dangling once the query has been dropped.
    files: Weak<StagedFiles>,
}

impl fmt::Display for StagingStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl StagingStore {
    /// Where a file is written: a link stays, and the file that it names is replaced.
    fn destination(&self, path: &Path) -> Path {
        let files = self.files.upgrade();
        let path = files.as_ref().map_or_else(|| path.clone(), |files| files.renamed(path));
        if !self.origin.starts_with("file:") {
            return path;
        }
        let local = PathBuf::from(format!("/{path}"));
        let linked = copy_place::linked(&local);
        if let Some(files) = files {
            files.begin(local);
        }
        linked.and_then(|file| Path::from_absolute_path(file).ok()).unwrap_or(path)
    }

    /// On a worker: where files are written without their names.
    #[cfg(feature = "cluster")]
    fn unnamed(&self) -> Option<Arc<Unnamed>> {
        self.files.upgrade()?.unnamed.clone()
    }

    /// Records a store's error and returns a placeholder for the writer, which is never shown.
    fn record_error(&self, path: &Path, error: Error) -> Error {
        if let Some(files) = self.files.upgrade() {
            files.record_error(files.shown(&self.origin, path).write_error(error));
        }
        abandoned()
    }

    /// Adds a complete file to those to be committed.
    fn stage(&self, path: &Path, content: Content) -> Result<PutResult> {
        let files = self.files.upgrade().ok_or_else(abandoned)?;
        let (store, path, shown) = (Arc::clone(&self.inner), path.clone(), files.shown(&self.origin, path));
        files.push(StagedFile { store, path, shown, content });
        // Nothing is published yet, so there is no tag and no version.
        Ok(PutResult { e_tag: None, version: None })
    }
}

/// The error that writers see after the statement has failed or was dropped.
fn abandoned() -> Error {
    Error::Generic { store: "elmo", source: "the write was abandoned".into() }
}

#[async_trait]
impl ObjectStore for StagingStore {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let path = self.destination(path);
        #[cfg(feature = "cluster")]
        if let Some(unnamed) = self.unnamed() {
            return self.stage(&path, Content::Unnamed(unnamed, Arc::clone(&self.origin), payload));
        }
        self.stage(&path, Content::Buffered(payload, options))
    }

    async fn put_multipart_opts(&self, path: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let path = self.destination(path);
        #[cfg(feature = "cluster")]
        let (begun, has_name) = match self.unnamed() {
            Some(unnamed) => (unnamed.begin(&self.origin, &path).await, false),
            None => (self.inner.put_multipart_opts(&path, options).await, true),
        };
        #[cfg(not(feature = "cluster"))]
        let (begun, has_name) = (self.inner.put_multipart_opts(&path, options).await, true);
        match begun {
            Ok(upload) => {
                let upload = StagedUpload::new(upload, has_name, Weak::clone(&self.files));
                Ok(Box::new(StagingUpload { upload, path, store: self.clone() }))
            }
            Err(error) => Err(self.record_error(&path, error)),
        }
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(path, options).await
    }

    async fn get_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.inner.get_ranges(path, ranges).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(paths)
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

/// A multipart upload that is staged when its writer completes it.
#[derive(Debug)]
struct StagingUpload {
    upload: StagedUpload,
    path: Path,
    store: StagingStore,
}

#[async_trait]
impl MultipartUpload for StagingUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let Some(part) = self.upload.put_part(data) else { return Box::pin(std::future::ready(Err(abandoned()))) };
        let (store, path) = (self.store.clone(), self.path.clone());
        Box::pin(part.map_err(move |error| store.record_error(&path, error)))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let upload = self.upload.take();
        self.store.stage(&self.path, Content::Uploaded(upload))
    }

    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use object_store::{ObjectStoreExt, local::LocalFileSystem};

    use super::*;

    /// A folder with `a.csv`, a staging store over it with a buffered and an uploaded file staged, and an open upload.
    async fn begun() -> (tempfile::TempDir, Arc<StagedFiles>, Box<dyn MultipartUpload>) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.csv"), "before").unwrap();
        let inner = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
        let staged = Arc::<StagedFiles>::default();
        let store = StagingStore { inner, origin: "file:///".into(), files: Arc::downgrade(&staged) };
        store.put(&Path::from("a.csv"), "after".into()).await.unwrap();
        let mut whole = store.put_multipart(&Path::from("b.csv")).await.unwrap();
        whole.put_part("rows".into()).await.unwrap();
        whole.complete().await.unwrap();
        let mut half = store.put_multipart(&Path::from("c.csv")).await.unwrap();
        half.put_part("half".into()).await.unwrap();
        (folder, staged, half)
    }

    fn files(folder: &tempfile::TempDir) -> Vec<(String, String)> {
        let entries = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let name = |path: &std::path::Path| path.file_name().unwrap().to_string_lossy().into_owned();
        let mut files: Vec<_> = entries.map(|path| (name(&path), std::fs::read_to_string(&path).unwrap())).collect();
        files.sort();
        files
    }

    fn expected(files: &[(&str, &str)]) -> Vec<(String, String)> {
        files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    #[tokio::test]
    async fn files_become_visible_together() {
        let (folder, staged, mut half) = begun().await;
        assert_eq!(std::fs::read_to_string(folder.path().join("a.csv")).unwrap(), "before");
        assert!(!folder.path().join("b.csv").exists());
        half.complete().await.unwrap();
        staged.commit().await.unwrap();
        assert_eq!(files(&folder), expected(&[("a.csv", "after"), ("b.csv", "rows"), ("c.csv", "half")]));
    }

    #[tokio::test]
    async fn a_rollback_leaves_nothing() {
        let (folder, staged, half) = begun().await;
        drop(half);
        staged.rollback().await;
        assert_eq!(files(&folder), expected(&[("a.csv", "before")]));
        // A query that is dropped while it writes.
        let (folder, staged, half) = begun().await;
        drop((half, staged));
        while files(&folder).len() > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(files(&folder), expected(&[("a.csv", "before")]));
    }
}
