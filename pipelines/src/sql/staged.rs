//! Stores whose files come into place together, when all rows of a statement are written. DataFusion's writers complete
//! what they have when their rows fail or they are stopped, and would replace what was there.
//!
//! What is held back costs no memory of its own: small files are held by their writers up to here, and the parts of large
//! ones lie in the store, where nobody sees them. A process that dies while many files come into place leaves some of
//! them; before and after that, none and all.

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::{
    common::{DataFusionError, Result as PlanResult},
    execution::{TaskContext, object_store::ObjectStoreRegistry, runtime_env::RuntimeEnv},
};
use futures::{StreamExt, TryFutureExt, TryStreamExt, future::join_all, stream::BoxStream};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart, path::Path,
};
use tokio::{runtime::Handle, task::JoinHandle};
use url::Url;

use super::{files::external, readers::address};
use crate::stores::StoreError;

/// Files that are put into place at once.
const AT_ONCE: usize = 16;
/// How long writers that were stopped have to give up what they began.
const STOPPING: Duration = Duration::from_millis(100);
/// How long stores have to remove it.
const REMOVING: Duration = Duration::from_secs(5);

/// The files of one statement that are written, and not in place.
#[derive(Debug, Default)]
pub(super) struct Staged {
    files: Mutex<Vec<File>>,
    /// What removes the parts of files that were given up.
    removals: Mutex<Vec<JoinHandle<()>>>,
    /// What went wrong first, with rows or stores. Writers have words of their own for it, or none.
    error: Mutex<Option<DataFusionError>>,
}

impl Staged {
    /// A task's context whose stores hold files back.
    pub(super) fn context(self: &Arc<Self>, context: &TaskContext) -> Arc<TaskContext> {
        let runtime = context.runtime_env();
        let registry = Stores { inner: Arc::clone(&runtime.object_store_registry), staged: Arc::clone(self) };
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

    /// Puts all files into place.
    ///
    /// # Errors
    /// What went wrong before; the first error of a store, after which some files may be in place.
    pub(super) async fn commit(&self) -> PlanResult<()> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        let files = std::mem::take(&mut *held(&self.files));
        futures::stream::iter(files).map(|file| Ok(file.put())).try_buffer_unordered(AT_ONCE).try_collect().await
    }

    /// Removes what was written, once the writers have been stopped.
    pub(super) async fn give_up(&self) {
        // The tasks of writers end on other threads.
        tokio::time::sleep(STOPPING).await;
        held(&self.files).clear();
        let removals = std::mem::take(&mut *held(&self.removals));
        // What a store that hangs keeps is its owner's.
        let _ = tokio::time::timeout(REMOVING, join_all(removals)).await;
    }

    /// Keeps what went wrong, if it is the first.
    pub(super) fn failed(&self, error: DataFusionError) {
        held(&self.error).get_or_insert(error);
    }

    /// What went wrong first.
    pub(super) fn error(&self) -> Option<DataFusionError> {
        held(&self.error).take()
    }
}

/// A poisoned lock means that a thread died while it held plain data that is valid at any time.
fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is written, and what puts it into place.
#[derive(Debug)]
enum File {
    Whole { store: Store, at: Path, payload: PutPayload, options: PutOptions },
    Parts(Parts),
}

impl File {
    async fn put(self) -> PlanResult<()> {
        let (name, put) = match self {
            Self::Whole { store, at, payload, options } => {
                (store.name(&at), store.inner.put_opts(&at, payload, options).await)
            }
            Self::Parts(mut parts) => {
                let Some(upload) = &mut parts.upload else { return Ok(()) };
                let put = upload.complete().await;
                if put.is_ok() {
                    // It is in place: nothing is to be removed.
                    parts.upload = None;
                }
                (parts.name.clone(), put)
            }
        };
        put.map(drop).map_err(|error| not_written(&name, error))
    }
}

fn not_written(name: &str, error: Error) -> DataFusionError {
    external(StoreError::Request { operation: "write", address: name.to_owned(), source: Box::new(error) })
}

#[derive(Debug)]
struct Stores {
    inner: Arc<dyn ObjectStoreRegistry>,
    staged: Arc<Staged>,
}

impl ObjectStoreRegistry for Stores {
    fn register_store(&self, url: &Url, store: Arc<dyn ObjectStore>) -> Option<Arc<dyn ObjectStore>> {
        self.inner.register_store(url, store)
    }

    fn get_store(&self, url: &Url) -> PlanResult<Arc<dyn ObjectStore>> {
        let origin = format!("{}/", url.as_str().trim_end_matches('/')).into();
        Ok(Arc::new(Store { inner: self.inner.get_store(url)?, origin, staged: Arc::downgrade(&self.staged) }))
    }
}

#[derive(Debug, Clone)]
struct Store {
    inner: Arc<dyn ObjectStore>,
    /// `scheme://bucket/`
    origin: Arc<str>,
    /// Holds the files; gone when nobody waits for them.
    staged: Weak<Staged>,
}

impl Store {
    fn name(&self, at: &Path) -> String {
        address(&self.origin, at)
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// Keeps a store's error for whoever waits; what the writer gets instead is never shown.
fn kept(staged: &Weak<Staged>, name: &str, error: Error) -> Error {
    if let Some(staged) = staged.upgrade() {
        staged.failed(not_written(name, error));
    }
    given_up()
}

fn given_up() -> Error {
    Error::Generic { store: "elmo", source: "the file was given up".into() }
}

/// Hands a file over until all are written.
fn hold(staged: &Weak<Staged>, file: File) -> Result<PutResult> {
    held(&staged.upgrade().ok_or_else(given_up)?.files).push(file);
    // What a store says of a file that is in place, which this one is not.
    Ok(PutResult { e_tag: None, version: None })
}

#[async_trait]
impl ObjectStore for Store {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        hold(&self.staged, File::Whole { store: self.clone(), at: at.clone(), payload, options })
    }

    async fn put_multipart_opts(&self, at: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let (name, staged) = (self.name(at), Weak::clone(&self.staged));
        match self.inner.put_multipart_opts(at, options).await {
            Ok(upload) => Ok(Box::new(Parts { upload: Some(upload), name, staged })),
            Err(error) => Err(kept(&staged, &name, error)),
        }
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

/// A file that comes in parts. Given up, its parts are removed: stores that are far keep and charge them otherwise.
struct Parts {
    upload: Option<Box<dyn MultipartUpload>>,
    name: String,
    staged: Weak<Staged>,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").field("name", &self.name).finish_non_exhaustive()
    }
}

#[async_trait]
impl MultipartUpload for Parts {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let Some(upload) = &mut self.upload else { return Box::pin(std::future::ready(Err(given_up()))) };
        let (name, staged) = (self.name.clone(), Weak::clone(&self.staged));
        Box::pin(upload.put_part(data).map_err(move |error| kept(&staged, &name, error)))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let staged = Weak::clone(&self.staged);
        let whole = Self { upload: self.upload.take(), name: self.name.clone(), staged: Weak::clone(&staged) };
        hold(&staged, File::Parts(whole))
    }

    async fn abort(&mut self) -> Result<()> {
        match self.upload.take() {
            Some(mut upload) => upload.abort().await,
            None => Ok(()),
        }
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        let Some(mut upload) = self.upload.take() else { return };
        let Ok(runtime) = Handle::try_current() else { return };
        // What fails here has failed before.
        let removal = runtime.spawn(async move { drop(upload.abort().await) });
        if let Some(staged) = self.staged.upgrade() {
            held(&staged.removals).push(removal);
        }
    }
}

#[cfg(test)]
mod tests {
    use object_store::{ObjectStoreExt, local::LocalFileSystem};

    use super::*;

    /// A folder with one file, a store that holds back, and a file of each way begun there.
    async fn begun() -> (tempfile::TempDir, Arc<Staged>, Box<dyn MultipartUpload>) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.csv"), "before").unwrap();
        let inner = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
        let staged = Arc::<Staged>::default();
        let store = Store { inner, origin: "file:///".into(), staged: Arc::downgrade(&staged) };
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
    async fn files_come_into_place_together() {
        let (folder, staged, mut half) = begun().await;
        assert_eq!(std::fs::read_to_string(folder.path().join("a.csv")).unwrap(), "before");
        assert!(!folder.path().join("b.csv").exists());
        half.complete().await.unwrap();
        staged.commit().await.unwrap();
        assert_eq!(files(&folder), expected(&[("a.csv", "after"), ("b.csv", "rows"), ("c.csv", "half")]));
    }

    #[tokio::test]
    async fn what_is_given_up_leaves_nothing() {
        let (folder, staged, half) = begun().await;
        drop(half);
        staged.give_up().await;
        assert_eq!(files(&folder), expected(&[("a.csv", "before")]));
        // A statement that is dropped in the middle.
        let (folder, staged, half) = begun().await;
        drop((half, staged));
        while files(&folder).len() > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(files(&folder), expected(&[("a.csv", "before")]));
    }
}
