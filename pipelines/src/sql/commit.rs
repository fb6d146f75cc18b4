//! All-or-nothing commit of the files that one statement writes.
//!
//! [`StagedFiles`] collects files whose content is complete but not yet visible. [`StagedFiles::commit`] publishes all
//! of them; if one fails, those already published are deleted again. A statement that writes several files gives them
//! new names, so deleting them restores the previous state. Files that they replace are deleted at the end. A process that
//! dies during the commit leaves some of the new files, or all of them and some of those that they replace; so no row is
//! lost.

use std::{
    collections::BTreeSet,
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use datafusion::common::{DataFusionError, Result as PlanResult, exec_err};
use futures::{StreamExt, future::join_all};
use object_store::{
    Error, MultipartUpload, ObjectStore, ObjectStoreExt, PutOptions, PutPayload, UploadPart, path::Path,
};
#[cfg(feature = "cluster")]
use tokio::sync::oneshot::Sender;
use tokio::{runtime::Handle, task::JoinHandle};

#[cfg(feature = "cluster")]
use super::unnamed::{self, Record, Unnamed, UnnamedFiles};
use super::{
    copy::Target,
    copy_place,
    error::{SqlError, external},
    file_errors::address,
    output_folder::OutputFolder,
};
use crate::{
    error::{Error as OwnError, Exit},
    source::reason::one_line,
    stores::StoreError,
};
#[cfg(feature = "cluster")]
use crate::{
    sink::{SinkError, Staged},
    stores::{Location, Stores},
};

/// Files published concurrently.
const CONCURRENT_COMMITS: usize = 16;
/// Grace period for the tasks of cancelled writers to drop their uploads.
const CANCEL_GRACE: Duration = Duration::from_millis(100);
/// Timeout for aborting uploads.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The staged files of one statement.
#[derive(Debug, Default)]
pub(crate) struct StagedFiles {
    state: Arc<CommitState>,
    /// The target of the statement.
    target: Option<Target>,
    /// On a worker: stages files without publishing them.
    #[cfg(feature = "cluster")]
    pub(super) unnamed: Option<Arc<Unnamed>>,
    /// On a client: dropping it lets the workers delete files that are not published.
    #[cfg(feature = "cluster")]
    kept: Mutex<Option<Sender<()>>>,
    /// Number of hive partition columns: as many folders above each file are called after values of rows.
    partition_columns: usize,
    /// Whether the local folder of the target did not exist before.
    is_new: bool,
    /// Local paths of files that were begun.
    begun: Mutex<BTreeSet<PathBuf>>,
    files: Mutex<Vec<StagedFile>>,
    /// Tasks that abort dropped uploads.
    aborts: Mutex<Vec<JoinHandle<()>>>,
    /// The first error of the input or of a store. Writers replace it by errors of their own.
    error: Mutex<Option<DataFusionError>>,
}

impl StagedFiles {
    pub(super) fn new(state: &Arc<CommitState>, target: Option<Target>, partition_columns: usize) -> Self {
        let folder = target.as_ref().and_then(|target| target.folder.as_ref());
        let is_new = folder.is_some_and(OutputFolder::is_new);
        Self { state: Arc::clone(state), target, partition_columns, is_new, ..Self::default() }
    }

    /// The files of a task on a worker.
    #[cfg(feature = "cluster")]
    pub(super) fn unnamed(unnamed: Arc<Unnamed>, has_tabs: bool, partition_columns: usize) -> Self {
        let target = Some(Target { folder: None, file: None, is_written: true, has_tabs, local: None });
        Self { unnamed: Some(unnamed), ..Self::new(&Arc::default(), target, partition_columns) }
    }

    /// Adds the files of all tasks. The workers keep them until `kept` is dropped.
    ///
    /// # Errors
    /// If a file is not complete, or its store cannot be set up.
    #[cfg(feature = "cluster")]
    pub(crate) fn adopt(
        self: &Arc<Self>,
        stores: &Stores,
        files: &mut UnnamedFiles,
        kept: Sender<()>,
    ) -> PlanResult<()> {
        let Some(complete) = files.take_complete() else {
            return exec_err!("a worker reported success with an incomplete file");
        };
        let located = complete.into_iter().map(|file| Ok((file.location(stores)?, file)));
        for (location, file) in located.collect::<PlanResult<Vec<_>>>()? {
            let (shown, store, path) =
                (self.shown(&file.origin, &location.path), Arc::clone(&location.store), location.path.clone());
            let file = WorkerFile { location, staged: Some(file.staged), files: Arc::downgrade(self) };
            self.push(StagedFile { store, path, shown, content: Content::OfWorker(file) });
        }
        *lock(&self.kept) = Some(kept);
        Ok(())
    }

    /// Deletes files of workers that are not needed.
    #[cfg(feature = "cluster")]
    pub(crate) fn discard(&self, stores: &Stores, mut files: UnnamedFiles) {
        let Ok(runtime) = Handle::try_current() else { return };
        let stores = stores.clone();
        lock(&self.aborts).push(runtime.spawn(async move { files.discard(&stores, None).await }));
    }

    /// Deletes all hidden files of a failed attempt, including those whose records did not arrive.
    #[cfg(feature = "cluster")]
    pub(crate) async fn sweep(&self, attempt: u32) {
        let aborts = std::mem::take(&mut *lock(&self.aborts));
        let _ = tokio::time::timeout(ABORT_TIMEOUT, join_all(aborts)).await;
        let Some(root) = self.target.as_ref().and_then(|target| target.local.clone()) else { return };
        let swept = tokio::task::spawn_blocking(move || unnamed::sweep(&root, attempt)).await;
        if let Ok(Err(error)) = swept {
            tracing::warn!(%error, "unfinished files could not be deleted");
        }
    }

    /// Notes a local file that a worker begins.
    #[cfg(feature = "cluster")]
    pub(crate) fn note(&self, stores: &Stores, record: &Record) {
        if let Record::Begun(file) = record
            && let Ok(location) = file.location(stores)
            && let Some(path) = location.local_path()
        {
            self.begin(path);
        }
    }

    /// How messages call a file.
    pub(super) fn shown(&self, origin: &str, path: &Path) -> Shown {
        let mut parts: Vec<String> = path.parts().map(|part| part.as_ref().to_owned()).collect();
        let file = parts.len().saturating_sub(1);
        let mut columns = Vec::new();
        for part in &mut parts[file.saturating_sub(self.partition_columns)..file] {
            if let Some((column, _)) = part.split_once('=') {
                columns.push(column.to_owned());
                *part = format!("{column}=\u{2026}");
            }
        }
        Shown { address: address(origin, parts.join("/")), columns }
    }

    /// Notes that a file is begun on a local disk.
    pub(super) fn begin(&self, file: PathBuf) {
        lock(&self.begun).insert(file);
    }

    /// The folder of a COPY.
    pub(super) fn folder(&self) -> Option<&OutputFolder> {
        self.target.as_ref().and_then(|target| target.folder.as_ref())
    }

    /// Whether the folder of a COPY would have no file.
    ///
    /// # Errors
    /// If the folder cannot be listed.
    pub(super) async fn needs_file(&self) -> PlanResult<bool> {
        match self.folder() {
            Some(folder) if lock(&self.files).is_empty() => folder.needs_file().await.map_err(external),
            _ => Ok(false),
        }
    }

    /// Where a file is written that DataFusion writes to `path`: files of tab-separated values are called `.tsv`.
    pub(super) fn renamed(&self, path: &Path) -> Path {
        let has_tabs = self.target.as_ref().is_some_and(|target| target.has_tabs);
        let name = path.as_ref().rsplit_once('/').map_or(path.as_ref(), |(_, name)| name);
        let folder = &path.as_ref()[..path.as_ref().len() - name.len()];
        let renamed =
            name.split_once(".csv").filter(|_| has_tabs).map(|(name, rest)| format!("{folder}{name}.tsv{rest}"));
        renamed.and_then(|path| Path::parse(path).ok()).unwrap_or_else(|| path.clone())
    }

    /// Adds a complete file.
    pub(super) fn push(&self, file: StagedFile) {
        lock(&self.files).push(file);
    }

    /// Publishes all files, or none of them.
    ///
    /// # Errors
    /// The recorded error, if there is one; the first error of a store; an error if the session was cancelled, or if another
    /// process has written to a folder that must be empty.
    pub(super) async fn commit(self: &Arc<Self>) -> PlanResult<()> {
        if let Some(error) = self.take_error() {
            return Err(error);
        }
        let Some(guard) = self.state.begin_commit() else { return exec_err!("the statement was interrupted") };
        let (files, folder) = (std::mem::take(&mut *lock(&self.files)), self.folder().cloned());
        #[cfg(feature = "cluster")]
        let kept = lock(&self.kept).take();
        // A separate task, so that dropping the query does not abandon the commit halfway.
        let commit = tokio::spawn(async move {
            let _guard = guard;
            let published = match folder {
                Some(folder) => publish_to(&folder, files).await,
                None => publish_all(files, None).await,
            };
            #[cfg(feature = "cluster")]
            drop(kept);
            published
        });
        commit.await.map_err(|e| DataFusionError::ExecutionJoin(Box::new(e)))?
    }

    /// Discards all staged content. Called when the writers have been cancelled.
    pub(super) async fn rollback(&self) {
        // Tasks of cancelled writers end on other threads.
        tokio::time::sleep(CANCEL_GRACE).await;
        lock(&self.files).clear();
        #[cfg(feature = "cluster")]
        drop(lock(&self.kept).take());
        let aborts = std::mem::take(&mut *lock(&self.aborts));
        // A store that does not answer keeps the incomplete upload.
        let _ = tokio::time::timeout(ABORT_TIMEOUT, join_all(aborts)).await;
        if let Some(folder) = self.folder() {
            folder.delete_empty_folders(std::mem::take(&mut *lock(&self.begun)), self.is_new);
        }
    }

    /// Records an error unless one is recorded already.
    pub(super) fn record_error(&self, error: DataFusionError) {
        lock(&self.error).get_or_insert(error);
    }

    /// Takes the recorded error.
    pub(super) fn take_error(&self) -> Option<DataFusionError> {
        lock(&self.error).take()
    }
}

/// Whether the running statement of a session can still be cancelled.
#[derive(Debug, Default)]
pub(super) struct CommitState(Mutex<Phase>);

#[derive(Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Running,
    Committing,
    Cancelled,
}

/// Keeps the state in [`Phase::Committing`] until it is dropped.
struct CommitGuard(Arc<CommitState>);

impl CommitState {
    fn begin_commit(self: &Arc<Self>) -> Option<CommitGuard> {
        let mut phase = lock(&self.0);
        (*phase != Phase::Cancelled).then(|| {
            *phase = Phase::Committing;
            CommitGuard(Arc::clone(self))
        })
    }

    /// Resets the state for the next statement.
    pub(super) fn reset(&self) {
        *lock(&self.0) = Phase::Running;
    }

    /// Prevents commits from now on. Returns `false` if a commit is in progress; the caller must wait for it.
    pub(super) fn cancel(&self) -> bool {
        let mut phase = lock(&self.0);
        let can_cancel = *phase != Phase::Committing;
        if can_cancel {
            *phase = Phase::Cancelled;
        }
        can_cancel
    }
}

impl Drop for CommitGuard {
    fn drop(&mut self) {
        self.0.reset();
    }
}

/// Publishes files in a folder, then deletes those that they replace.
async fn publish_to(folder: &OutputFolder, files: Vec<StagedFile>) -> PlanResult<()> {
    let replaced = folder.replaced().await.map_err(external)?;
    publish_all(files, Some(folder)).await?;
    folder.delete(&replaced).await.map_err(external)
}

/// Publishes files; if one fails, deletes those that were published.
async fn publish_all(files: Vec<StagedFile>, folder: Option<&OutputFolder>) -> PlanResult<()> {
    let mut results = futures::stream::iter(files).map(StagedFile::publish).buffer_unordered(CONCURRENT_COMMITS);
    let (mut published, mut failed) = (Vec::new(), None);
    while let Some(result) = results.next().await {
        match result {
            Ok(file) => published.extend(file),
            Err(error) => {
                failed.get_or_insert(error);
            }
        }
    }
    if let (None, Some(folder)) = (&failed, folder) {
        let paths: Vec<Path> = published.iter().map(|(_, path)| path.clone()).collect();
        failed = folder.sync(&paths).await.err().map(external);
    }
    let Some(error) = failed else { return Ok(()) };
    for (store, path) in published {
        // Best effort: the original error is the one to report.
        let _ = store.delete(&path).await;
    }
    Err(error)
}

/// Locks a mutex. Ignores poisoning: the values here are valid whenever a thread panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A complete file that is not yet visible at its path.
#[derive(Debug)]
pub(super) struct StagedFile {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) path: Path,
    pub(super) shown: Shown,
    pub(super) content: Content,
}

#[derive(Debug)]
pub(super) enum Content {
    /// The bytes of a small file, held in memory.
    Buffered(PutPayload, PutOptions),
    /// An upload whose parts are in the store.
    Uploaded(StagedUpload),
    /// On a worker: the bytes of a small file, and the origin of its store.
    #[cfg(feature = "cluster")]
    Unnamed(Arc<Unnamed>, Arc<str>, PutPayload),
    /// A file that a worker has written.
    #[cfg(feature = "cluster")]
    OfWorker(WorkerFile),
}

impl StagedFile {
    /// Makes the file visible; returns its store and path. On a worker, stages it instead and returns `None`.
    async fn publish(self) -> PlanResult<Option<(Arc<dyn ObjectStore>, Path)>> {
        let Self { store, path, shown, content } = self;
        let (published, has_name) = match content {
            Content::Buffered(payload, options) => (store.put_opts(&path, payload, options).await.map(drop), true),
            Content::Uploaded(upload) => {
                let has_name = upload.has_name;
                (upload.complete().await, has_name)
            }
            #[cfg(feature = "cluster")]
            Content::Unnamed(unnamed, origin, payload) => (unnamed.write(&origin, &path, payload).await, false),
            #[cfg(feature = "cluster")]
            Content::OfWorker(file) => {
                return match file.publish().await {
                    Ok(()) => Ok(Some((store, path))),
                    Err(error) => Err(shown.publish_error(error)),
                };
            }
        };
        match published {
            Ok(()) => Ok(has_name.then_some((store, path))),
            Err(error) => Err(shown.write_error(error)),
        }
    }
}

/// How messages call a file: without the values of rows after which its folders are called.
#[derive(Debug, Clone)]
pub(super) struct Shown {
    address: String,
    /// The columns whose values are left out.
    columns: Vec<String>,
}

impl Shown {
    /// A failed write to a store.
    pub(super) fn write_error(&self, error: Error) -> DataFusionError {
        if !self.columns.is_empty() {
            return self.partition_error(&error);
        }
        let local = self.address.starts_with('/').then_some(std::path::Path::new(&self.address));
        if let Some((message, help)) = local.and_then(|path| copy_place::obstacle(path, false)) {
            let error = SqlError { message, exit: Exit::Storage, help: Some(help.to_owned()) };
            return external(OwnError::from(error));
        }
        external(StoreError::Request { operation: "write", address: self.address.clone(), source: Box::new(error) })
    }

    /// A file that cannot be published.
    #[cfg(feature = "cluster")]
    fn publish_error(&self, error: SinkError) -> DataFusionError {
        match self.columns.is_empty() {
            true => external(OwnError::from(error)),
            // The message of the error shows the path.
            false => {
                let (reason, error) = match error {
                    SinkError::Encode { ref reason, .. } => (reason.clone(), OwnError::from(error)),
                    error => ("the store rejected it".to_owned(), OwnError::from(error)),
                };
                let message = format!("write {}: {reason}", self.address);
                external(OwnError::from(SqlError { message, exit: error.exit(), help: error.help() }))
            }
        }
    }

    /// The innermost error, as the others show the path.
    fn partition_error(&self, error: &Error) -> DataFusionError {
        let causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| error.source());
        let cause = causes.last().map(ToString::to_string).unwrap_or_default();
        let is_name_too_long = cause.contains("File name too long");
        let mut paths = self.columns.iter().flat_map(|column| [format!("{column}="), format!("{column}%3D")]);
        let cause = match paths.any(|path| cause.contains(&path)) {
            true => "the store rejected it".to_owned(),
            false => one_line(&cause),
        };
        let help = "values of PARTITIONED BY are names of folders, which disks limit to 255 bytes: shorten them, as with \
                    left(text, 50) AS text";
        let help = is_name_too_long.then(|| help.to_owned());
        let message = format!("write {}: {cause}", self.address);
        external(OwnError::from(SqlError { message, exit: Exit::Storage, help }))
    }
}

/// A multipart upload that is aborted when it is dropped before it is completed: object stores keep and charge the
/// parts of incomplete uploads.
pub(super) struct StagedUpload {
    upload: Option<Box<dyn MultipartUpload>>,
    /// Whether completing the upload publishes the file.
    has_name: bool,
    files: Weak<StagedFiles>,
}

impl StagedUpload {
    pub(super) fn new(upload: Box<dyn MultipartUpload>, has_name: bool, files: Weak<StagedFiles>) -> Self {
        Self { upload: Some(upload), has_name, files }
    }

    /// Moves the upload out; `self` becomes empty.
    pub(super) fn take(&mut self) -> Self {
        Self { upload: self.upload.take(), has_name: self.has_name, files: Weak::clone(&self.files) }
    }

    /// Uploads a part; `None` if the upload was moved out.
    pub(super) fn put_part(&mut self, data: PutPayload) -> Option<UploadPart> {
        self.upload.as_mut().map(|upload| upload.put_part(data))
    }

    /// Aborts the upload now.
    pub(super) async fn abort(&mut self) -> Result<(), Error> {
        match self.upload.take() {
            Some(mut upload) => upload.abort().await,
            None => Ok(()),
        }
    }

    async fn complete(mut self) -> Result<(), Error> {
        let Some(upload) = &mut self.upload else { return Ok(()) };
        upload.complete().await?;
        // Disarms `drop`.
        self.upload = None;
        Ok(())
    }
}

impl fmt::Debug for StagedUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagedUpload").finish_non_exhaustive()
    }
}

impl Drop for StagedUpload {
    fn drop(&mut self) {
        let Some(mut upload) = self.upload.take() else { return };
        let Ok(runtime) = Handle::try_current() else { return };
        // The error that led here is reported elsewhere; a failed abort adds nothing to it.
        let abort = runtime.spawn(async move { drop(upload.abort().await) });
        if let Some(files) = self.files.upgrade() {
            lock(&files.aborts).push(abort);
        }
    }
}

/// A file that a worker has staged. Dropping it before it is published deletes it.
#[cfg(feature = "cluster")]
#[derive(Debug)]
pub(super) struct WorkerFile {
    location: Location,
    staged: Option<Staged>,
    files: Weak<StagedFiles>,
}

#[cfg(feature = "cluster")]
impl WorkerFile {
    async fn publish(mut self) -> Result<(), SinkError> {
        match self.staged.take() {
            Some(staged) => Ok(staged.publish_unfenced(&self.location).await?),
            None => Ok(()),
        }
    }
}

#[cfg(feature = "cluster")]
impl Drop for WorkerFile {
    fn drop(&mut self) {
        let Some(staged) = self.staged.take() else { return };
        let Ok(runtime) = Handle::try_current() else { return };
        let location = self.location.clone();
        let discarded = runtime.spawn(async move {
            if staged.discard_complete(&location).await.is_err() {
                tracing::warn!("an unfinished file of a COPY could not be deleted");
            }
        });
        if let Some(files) = self.files.upgrade() {
            lock(&files.aborts).push(discarded);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sql::error::sql_error;

    #[test]
    fn only_a_name_that_is_too_long_is_to_be_shortened() {
        let shown = Shown { address: "/rows/k=…/a.parquet".to_owned(), columns: vec!["k".to_owned()] };
        for (reason, is_too_long) in [("File name too long (os error 36)", true), ("No space left on device", false)] {
            let source = Box::new(std::io::Error::other(reason));
            let error = sql_error(shown.write_error(Error::Generic { store: "local", source }));
            assert!(error.to_string().contains(&format!("write /rows/k=…/a.parquet: {reason}")), "{error}");
            assert_eq!(error.help().is_some_and(|help| help.contains("shorten them")), is_too_long, "{reason}");
        }
    }
}
