//! Stores whose files come into place together, when all rows of a statement are written. DataFusion's writers complete
//! what they have when their rows fail or they are stopped, and would replace what was there.
//!
//! Small files are held in memory, as their writers did up to here (begun in a store of this machine, each would be an open
//! file), and the parts of large ones lie in the store, where nobody sees them. Of several files, which have names of their
//! own, those that are in place are removed again when one cannot be put there. Only a process that dies just then leaves
//! some of them.

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::{
    common::{DataFusionError, Result as PlanResult, exec_err},
    execution::{TaskContext, object_store::ObjectStoreRegistry, runtime_env::RuntimeEnv},
};
use futures::{StreamExt, TryFutureExt, future::join_all, stream::BoxStream};
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
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
    commits: Arc<Commits>,
    files: Mutex<Vec<File>>,
    /// What removes the parts of files that were given up.
    removals: Mutex<Vec<JoinHandle<()>>>,
    /// What went wrong first, with rows or stores. Writers have words of their own for it, or none.
    error: Mutex<Option<DataFusionError>>,
}

impl Staged {
    pub(super) fn new(commits: &Arc<Commits>) -> Self {
        Self { commits: Arc::clone(commits), ..Self::default() }
    }

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

    /// Puts all files into place, or none of them.
    ///
    /// # Errors
    /// What went wrong before; the first error of a store; that the session is to stop.
    pub(super) async fn commit(self: &Arc<Self>) -> PlanResult<()> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        let Some(committing) = self.commits.begin() else { return exec_err!("the statement was interrupted") };
        let files = std::mem::take(&mut *held(&self.files));
        // A task of its own: once begun, it does not end in the middle.
        let put = tokio::spawn(async move {
            let _committing = committing;
            put_all(files).await
        });
        put.await.map_err(|e| DataFusionError::ExecutionJoin(Box::new(e)))?
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

/// Whether the statement of a session may still be stopped.
#[derive(Debug, Default)]
pub(super) struct Commits(Mutex<Phase>);

#[derive(Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Running,
    Committing,
    Stopped,
}

/// Files come into place as long as it is held.
struct Committing(Arc<Commits>);

impl Commits {
    fn begin(self: &Arc<Self>) -> Option<Committing> {
        let mut phase = held(&self.0);
        (*phase != Phase::Stopped).then(|| {
            *phase = Phase::Committing;
            Committing(Arc::clone(self))
        })
    }

    /// Lets a statement run.
    pub(super) fn start(&self) {
        *held(&self.0) = Phase::Running;
    }

    /// Sees to it that no file comes into place from now on; `false` where they do so already, and are to be waited for.
    pub(super) fn stop(&self) -> bool {
        let mut phase = held(&self.0);
        let stops = *phase != Phase::Committing;
        if stops {
            *phase = Phase::Stopped;
        }
        stops
    }
}

impl Drop for Committing {
    fn drop(&mut self) {
        self.0.start();
    }
}

/// Puts files into place; when one cannot be, removes those that are.
async fn put_all(files: Vec<File>) -> PlanResult<()> {
    let mut putting = futures::stream::iter(files).map(File::put).buffer_unordered(AT_ONCE);
    let (mut in_place, mut failed) = (Vec::new(), None);
    while let Some(put) = putting.next().await {
        match put {
            Ok(file) => in_place.push(file),
            Err(error) => {
                failed.get_or_insert(error);
            }
        }
    }
    let Some(error) = failed else { return Ok(()) };
    for (store, at) in in_place {
        // What cannot be removed either is where the error says.
        let _ = store.inner.delete(&at).await;
    }
    Err(error)
}

/// A poisoned lock means that a thread died while it held plain data that is valid at any time.
fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is written, and where it belongs.
#[derive(Debug)]
struct File {
    store: Store,
    at: Path,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Whole(PutPayload, PutOptions),
    Parts(Parts),
}

impl File {
    /// Puts it into place, and says where.
    async fn put(self) -> PlanResult<(Store, Path)> {
        let Self { store, at, content } = self;
        let put = match content {
            Content::Whole(payload, options) => store.inner.put_opts(&at, payload, options).await.map(drop),
            Content::Parts(parts) => parts.finish().await,
        };
        match put {
            Ok(()) => Ok((store, at)),
            Err(error) => Err(not_written(&store.name(&at), error)),
        }
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

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Store {
    fn name(&self, at: &Path) -> String {
        address(&self.origin, at)
    }

    /// Keeps an error for whoever waits; what the writer gets instead is never shown.
    fn failed(&self, at: &Path, error: Error) -> Error {
        if let Some(staged) = self.staged.upgrade() {
            staged.failed(not_written(&self.name(at), error));
        }
        given_up()
    }

    /// Hands a file over until all are written.
    fn hold(&self, at: &Path, content: Content) -> Result<PutResult> {
        let file = File { store: self.clone(), at: at.clone(), content };
        held(&self.staged.upgrade().ok_or_else(given_up)?.files).push(file);
        // What a store says of a file that is in place, which this one is not.
        Ok(PutResult { e_tag: None, version: None })
    }
}

fn given_up() -> Error {
    Error::Generic { store: "elmo", source: "the file was given up".into() }
}

#[async_trait]
impl ObjectStore for Store {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.hold(at, Content::Whole(payload, options))
    }

    async fn put_multipart_opts(&self, at: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        match self.inner.put_multipart_opts(at, options).await {
            Ok(upload) => Ok(Box::new(Parts { upload: Some(upload), at: at.clone(), store: self.clone() })),
            Err(error) => Err(self.failed(at, error)),
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
    at: Path,
    store: Store,
}

impl Parts {
    async fn finish(mut self) -> Result<()> {
        let Some(upload) = &mut self.upload else { return Ok(()) };
        upload.complete().await?;
        // It is in place: nothing is to be removed.
        self.upload = None;
        Ok(())
    }
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").field("at", &self.at).finish_non_exhaustive()
    }
}

#[async_trait]
impl MultipartUpload for Parts {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let Some(upload) = &mut self.upload else { return Box::pin(std::future::ready(Err(given_up()))) };
        let (store, at) = (self.store.clone(), self.at.clone());
        Box::pin(upload.put_part(data).map_err(move |error| store.failed(&at, error)))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let whole = Self { upload: self.upload.take(), at: self.at.clone(), store: self.store.clone() };
        self.store.hold(&self.at, Content::Parts(whole))
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
        if let Some(staged) = self.store.staged.upgrade() {
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
