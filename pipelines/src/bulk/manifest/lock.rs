//! The lock that allows one job to write to an output: a file lock where the output is local, a lease in an object
//! store.
//!
//! The kernel releases a file lock when the process ends, however it ends. A lease is an object that its holder rewrites
//! every 15 s; its age is measured by the store's clock, and after a minute another job may take it over.
//!
//! A job whose lease has expired may still have a request in flight. The [`Fence`] makes such a request fail: files
//! that are published in one request are created or replaced conditionally, and the id of an upload in chunks is in the
//! lease before the upload is completed. A successor copies these ids into its own lease in the request that takes the
//! old one over, and aborts the uploads before it does anything else.
//!
//! ```text
//! A: write lease {A, uploads [u]} -> complete u                   u is completed
//! B: read lease {A, [u]} -> if unchanged, write {B, [u]} -> abort u -> list and write parts
//! ```
//!
//! Either B's write finds `u` in the lease, or A's write of `u` finds B's lease and fails.

use std::{
    fs::{File, TryLockError},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use chrono::{DateTime, Utc};
use object_store::{ObjectMeta, ObjectStoreExt, PutMode, UpdateVersion};
use serde::{Deserialize, Serialize};

use super::ManifestError;
use crate::{
    error::Error,
    sink::Fence,
    stores::{
        Location, StoreError, UploadId,
        create_once::{probe, version},
        sync,
    },
};

/// A lease in an object store that was not renewed for this long has expired.
pub(super) const LEASE: Duration = Duration::from_secs(60);
/// How often a running job renews its lease.
const RENEWAL: Duration = Duration::from_secs(15);
/// For how long requests of the lease, and those that publish a part, are retried: less than half a lease, so that a job
/// that publishes has renewed its lease in time.
pub(super) const RETRY_FOR: Duration = Duration::from_secs(25);
/// How often deleting a lease is retried.
const DELETE_RETRIES: usize = 3;

/// Keeps a second job out.
#[derive(Debug)]
pub(super) enum Lock {
    /// The kernel releases it when the process ends, however it ends.
    File { file: File, path: PathBuf },
    /// In an object store.
    Lease(Arc<Lease>, Renewal),
}

/// The task that renews a lease. It ends with the lock, also when the job is dropped.
#[derive(Debug)]
pub(super) struct Renewal(tokio::task::JoinHandle<()>);

impl Drop for Renewal {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Lock {
    pub(super) async fn acquire(output: &Location, folder: &Location) -> Result<Self, ManifestError> {
        match folder.local_path() {
            Some(path) => Self::acquire_file(output, &path),
            None => Self::acquire_lease(output, folder).await,
        }
    }

    fn acquire_file(output: &Location, folder: &std::path::Path) -> Result<Self, ManifestError> {
        let path = folder.join("lock");
        let failed = |e| ManifestError::from(StoreError::local("lock", &path, e));
        loop {
            sync::create_folder(folder).map_err(failed)?;
            let file = File::options().create(true).write(true).truncate(false).open(&path).map_err(failed)?;
            match file.try_lock() {
                // A job that failed deleted the file after we had opened it.
                Ok(()) if !is_same(&file, &path) => {}
                Ok(()) => {
                    // For the error of a second job; the lock itself is the kernel's.
                    std::fs::write(&path, format!("process {}", std::process::id())).map_err(failed)?;
                    return Ok(Self::File { file, path });
                }
                Err(TryLockError::WouldBlock) => {
                    let holder = std::fs::read_to_string(&path).unwrap_or_default();
                    let holder = format!("{holder}, it holds {}", path.display());
                    return Err(ManifestError::Locked {
                        output: output.to_string(),
                        holder: holder.trim_start_matches(", ").to_owned(),
                    });
                }
                Err(TryLockError::Error(e)) => return Err(failed(e)),
            }
        }
    }

    async fn acquire_lease(output: &Location, folder: &Location) -> Result<Self, ManifestError> {
        let folder = folder.retrying_for(RETRY_FOR);
        let lease = Arc::new(Lease::acquire(output, &folder).await?);
        let renewal = Renewal(tokio::spawn(Lease::keep(Arc::clone(&lease))));
        // A store that ignores conditions would give the lease to every job.
        if let Err(error) = probe(&folder.child("probe")).await {
            drop(renewal);
            lease.release().await;
            return Err(error.into());
        }
        Ok(Self::Lease(lease, renewal))
    }

    /// Fails if another job holds the lock. A lease that was renewed a moment ago is not read again.
    pub(super) async fn verify(&self) -> Result<(), ManifestError> {
        match self {
            Self::Lease(lease, _) => lease.verify().await,
            Self::File { file, path } => match is_same(file, path) {
                true => Ok(()),
                false => Err(ManifestError::Vanished { file: path.display().to_string() }),
            },
        }
    }

    /// As [`verify`](Self::verify), but always asks the store.
    pub(super) async fn ask(&self) -> Result<(), ManifestError> {
        match self {
            Self::Lease(lease, _) => lease.renew(None).await,
            Self::File { .. } => self.verify().await,
        }
    }

    pub(super) async fn release(self) {
        match self {
            // Closing the file is not enough where a process that was just started has inherited it.
            Self::File { file, .. } => drop(file.unlock()),
            Self::Lease(lease, renewal) => {
                drop(renewal);
                lease.release().await;
            }
        }
    }
}

impl Fence for Lock {
    type Error = Error;

    const RETRY_FOR: Duration = RETRY_FOR;

    async fn verify(&self) -> Result<(), Error> {
        Ok(Self::verify(self).await?)
    }

    async fn renew(&self, upload: Option<&UploadId>) -> Result<(), Error> {
        match self {
            Self::Lease(lease, _) => Ok(lease.renew(upload).await?),
            Self::File { .. } => Ok(self.verify().await?),
        }
    }

    async fn completed(&self, upload: &UploadId) {
        if let Self::Lease(lease, _) = self {
            lease.state.lock().await.uploads.retain(|open| open != upload);
        }
    }
}

/// Whether a path still refers to an open file.
fn is_same(file: &File, path: &std::path::Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |found: std::io::Result<std::fs::Metadata>| found.ok().map(|found| (found.dev(), found.ino()));
    identity(file.metadata()).is_some_and(|open| Some(open) == identity(std::fs::metadata(path)))
}

/// Content of a lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Holder {
    /// The job.
    id: String,
    /// Differs in every renewal, so that each renewal has a new etag, even if etags are hashes of the content.
    #[serde(default)]
    renewals: u64,
    /// Uploads that a successor has to abort.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    uploads: Vec<UploadId>,
}

impl Holder {
    fn new(id: &str) -> Self {
        Self { id: id.to_owned(), renewals: 0, uploads: Vec::new() }
    }

    fn encode(&self) -> bytes::Bytes {
        serde_json::to_vec(self).unwrap_or_default().into()
    }

    /// The holder of a lease, and the version that names it. Content that cannot be parsed has a holder without a name.
    async fn read(location: &Location) -> Result<Option<(Self, ObjectMeta)>, StoreError> {
        let found = location.get_versioned().await?;
        Ok(found.map(|(bytes, meta)| (serde_json::from_slice(&bytes).unwrap_or_else(|_| Self::new("")), meta)))
    }
}

/// A lock in an object store: an object that its holder rewrites regularly.
#[derive(Debug)]
pub(super) struct Lease {
    id: String,
    location: Location,
    /// One renewal at a time.
    state: tokio::sync::Mutex<LeaseState>,
}

#[derive(Debug)]
struct LeaseState {
    version: UpdateVersion,
    renewals: u64,
    /// Uploads that may be completed.
    uploads: Vec<UploadId>,
    /// When the last successful renewal was sent.
    renewed: Sent,
}

/// A time by two clocks, because the monotonic clock stops while the machine sleeps, and the other may be set back.
#[derive(Debug, Clone, Copy)]
struct Sent(Instant, SystemTime);

impl Sent {
    fn now() -> Self {
        Self(Instant::now(), SystemTime::now())
    }

    /// The longer of the two elapsed times; infinite when the clock was set back.
    fn ago(self) -> Duration {
        self.0.elapsed().max(self.1.elapsed().unwrap_or(Duration::MAX))
    }
}

impl Lease {
    async fn acquire(output: &Location, folder: &Location) -> Result<Self, ManifestError> {
        let (location, id) = (folder.child("lock"), uuid::Uuid::new_v4().to_string());
        let (sent, holder) = (Sent::now(), Holder::new(&id));
        let version = match location.put(holder.encode(), PutMode::Create).await {
            Ok(put) => UpdateVersion { e_tag: put.e_tag, version: put.version },
            Err(object_store::Error::AlreadyExists { .. }) => match Holder::read(&location).await? {
                // The request was applied but its answer was lost.
                Some((found, meta)) if found == holder => version(&meta),
                _ => take_over(output, folder, &location, &id, LEASE).await?,
            },
            Err(e) => return Err(StoreError::request("lock", &location, e).into()),
        };
        let state = LeaseState { version, renewals: 0, uploads: Vec::new(), renewed: sent };
        Ok(Self { id, location, state: tokio::sync::Mutex::new(state) })
    }

    /// Renews the lease until it is dropped or another job has taken it over. A renewal that fails is retried.
    async fn keep(lease: Arc<Self>) {
        loop {
            tokio::time::sleep(RENEWAL).await;
            match lease.renew(None).await {
                Ok(()) => {}
                Err(ManifestError::Overtaken { .. }) => {
                    tracing::warn!("another job has taken over the output");
                    return;
                }
                Err(error) => tracing::warn!(%error, "the lock of the output could not be renewed; retrying"),
            }
        }
    }

    /// Fails if another job holds the lease. Asks the store only if the last renewal is old, for example because the
    /// process was stopped for longer than a lease.
    async fn verify(&self) -> Result<(), ManifestError> {
        let fresh = self.state.lock().await.renewed.ago() < LEASE / 2;
        if fresh { Ok(()) } else { self.renew(None).await }
    }

    /// Renews the lease and adds an upload to it.
    async fn renew(&self, upload: Option<&UploadId>) -> Result<(), ManifestError> {
        let mut state = self.state.lock().await;
        state.uploads.extend(upload.cloned());
        state.renewals += 1;
        let holder = Holder { id: self.id.clone(), renewals: state.renewals, uploads: state.uploads.clone() };
        let sent = Sent::now();
        state.version = self.write(&holder, state.version.clone()).await?;
        state.renewed = sent;
        Ok(())
    }

    /// Replaces our lease; fails if it is another job's.
    async fn write(&self, holder: &Holder, mut old: UpdateVersion) -> Result<UpdateVersion, ManifestError> {
        loop {
            match self.location.put(holder.encode(), PutMode::Update(old)).await {
                Ok(put) => return Ok(UpdateVersion { e_tag: put.e_tag, version: put.version }),
                Err(object_store::Error::Precondition { .. } | object_store::Error::NotFound { .. }) => {}
                Err(e) => return Err(StoreError::request("lock", &self.location, e).into()),
            }
            match Holder::read(&self.location).await? {
                // The request was applied but its answer was lost.
                Some((found, meta)) if found == *holder => return Ok(version(&meta)),
                // So was that of a renewal that was cancelled.
                Some((found, meta)) if found.id == self.id => old = version(&meta),
                _ => return Err(ManifestError::Overtaken { file: self.location.to_string() }),
            }
        }
    }

    /// Aborts uploads that were not completed and deletes the lease if it is still ours.
    async fn release(&self) {
        let uploads = std::mem::take(&mut self.state.lock().await.uploads);
        if let Err(error) = abort_all(&self.location, &uploads).await {
            tracing::warn!(%error, "the lock of the output stays until it expires, as an upload could not be aborted");
            return;
        }
        let mut retries = 0..DELETE_RETRIES;
        loop {
            match self.delete_if_ours().await {
                Ok(()) => return,
                Err(_) if retries.next().is_some() => {}
                Err(error) => {
                    tracing::warn!(%error, "the lock of the output could not be deleted; it expires after a minute");
                    return;
                }
            }
        }
    }

    /// One attempt. Reads the lease first: after an earlier attempt without an answer, another job may hold it.
    async fn delete_if_ours(&self) -> Result<(), StoreError> {
        if Holder::read(&self.location).await?.is_none_or(|(found, _)| found.id != self.id) {
            return Ok(());
        }
        match self.location.store.delete(&self.location.path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(StoreError::request("delete", &self.location, e)),
        }
    }
}

async fn abort_all(location: &Location, uploads: &[UploadId]) -> Result<(), StoreError> {
    for upload in uploads {
        upload.abort(location).await?;
    }
    Ok(())
}

/// Takes over a lease that has expired; of two jobs that try, one succeeds. Uploads of the old holder are aborted. If that
/// fails, the lease is kept until it expires, so that the next job aborts them.
async fn take_over(
    output: &Location,
    folder: &Location,
    location: &Location,
    id: &str,
    lease: Duration,
) -> Result<UpdateVersion, ManifestError> {
    let locked = |holder: &str| ManifestError::Locked { output: output.to_string(), holder: holder.to_owned() };
    let Some((old, meta)) = Holder::read(location).await? else { return Err(locked("it has just ended; try again")) };
    let age = store_time(folder, id).await?.signed_duration_since(meta.last_modified).num_seconds();
    let left = lease.as_secs() as i64 - age;
    if left > 0 {
        return Err(locked(&format!("last heard of {age} s ago; if it was killed, try again in {left} s")));
    }
    let holder = Holder { uploads: old.uploads, ..Holder::new(id) };
    let taken = match location.put(holder.encode(), PutMode::Update(version(&meta))).await {
        Ok(put) => UpdateVersion { e_tag: put.e_tag, version: put.version },
        Err(object_store::Error::Precondition { .. } | object_store::Error::NotFound { .. }) => {
            match Holder::read(location).await? {
                Some((found, meta)) if found == holder => version(&meta),
                _ => return Err(locked("another job acquired the lock first")),
            }
        }
        Err(e) => return Err(StoreError::request("lock", location, e).into()),
    };
    abort_all(location, &holder.uploads).await?;
    Ok(taken)
}

/// The store's time: the clocks of two machines may differ by more than a lease.
async fn store_time(folder: &Location, id: &str) -> Result<DateTime<Utc>, ManifestError> {
    let clock = folder.child(&format!("clock-{id}"));
    clock.put(bytes::Bytes::new(), PutMode::Overwrite).await.map_err(|e| StoreError::request("write", &clock, e))?;
    let meta = clock.head().await?;
    clock.delete().await?;
    meta.map(|meta| meta.last_modified).ok_or_else(|| ManifestError::Vanished { file: clock.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{bulk::manifest::FOLDER, stores::Stores};
    use futures::stream::BoxStream;
    use object_store::{
        CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions,
        PutOptions, PutPayload, PutResult, Result, memory::InMemory, path::Path,
    };

    fn output_in(store: Arc<dyn ObjectStore>) -> Location {
        let stores = Stores::with_settings([]);
        stores.insert("memory://x", store);
        stores.locate("memory://x/out").unwrap()
    }

    fn output() -> Location {
        output_in(Arc::new(InMemory::new()))
    }

    /// A store that loses the answer to a write, so that the write is repeated.
    #[derive(Debug)]
    struct Twice(InMemory);

    impl std::fmt::Display for Twice {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Twice")
        }
    }

    #[async_trait::async_trait]
    impl ObjectStore for Twice {
        async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
            self.0.put_opts(at, payload.clone(), options.clone()).await?;
            self.0.put_opts(at, payload, options).await
        }

        async fn put_multipart_opts(
            &self,
            at: &Path,
            options: PutMultipartOptions,
        ) -> Result<Box<dyn MultipartUpload>> {
            self.0.put_multipart_opts(at, options).await
        }

        async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
            self.0.get_opts(at, options).await
        }

        fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
            self.0.delete_stream(at)
        }

        fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
            self.0.list(prefix)
        }

        async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
            self.0.list_with_delimiter(prefix).await
        }

        async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
            self.0.copy_opts(from, to, options).await
        }
    }

    #[tokio::test]
    async fn a_job_does_not_lock_itself_out() {
        let output = output_in(Arc::new(Twice(InMemory::new())));
        let folder = output.child(FOLDER);
        let first = Lease::acquire(&output, &folder).await.unwrap();
        first.renew(None).await.unwrap();
        take_over(&output, &folder, &first.location, "second", Duration::ZERO).await.unwrap();
        let (found, _) = Holder::read(&first.location).await.unwrap().unwrap();
        assert_eq!(found, Holder::new("second"));
        // The first job cannot take the lease back.
        assert!(matches!(first.renew(None).await, Err(ManifestError::Overtaken { .. })));
        assert!(matches!(Lease::acquire(&output, &folder).await, Err(ManifestError::Locked { .. })));
    }

    #[tokio::test]
    async fn a_lease_is_taken_over_only_when_it_is_old_and_its_holder_finds_out() {
        let output = output();
        let folder = output.child(FOLDER);
        let first = Lease::acquire(&output, &folder).await.unwrap();
        first.renew(None).await.unwrap();
        assert!(matches!(Lease::acquire(&output, &folder).await, Err(ManifestError::Locked { .. })));
        // As if a renewal was applied and its answer lost: the version differs, but the holder is the same.
        first.location.put(Holder::new(&first.id).encode(), PutMode::Overwrite).await.unwrap();
        first.renew(None).await.unwrap();
        take_over(&output, &folder, &first.location, "second", Duration::ZERO).await.unwrap();
        assert!(matches!(first.renew(None).await, Err(ManifestError::Overtaken { .. })));
        first.verify().await.unwrap_or_else(|_| panic!("renewed a moment ago, so the store is not asked"));
        // The lease of another is not given back.
        first.release().await;
        assert!(first.location.head().await.unwrap().is_some());
        assert!(folder.children().await.unwrap().iter().all(|object| !object.location.to_string().contains("clock")));
    }

    /// An upload that no job writes to.
    async fn upload(output: &Location) -> (Box<dyn MultipartUpload>, UploadId) {
        let (upload, handle) = crate::stores::uploads::start(&output.child("part.parquet")).await.unwrap();
        (upload, handle.unwrap().id().clone())
    }

    fn output_with_uploads() -> Location {
        let stores = Stores::with_settings([]);
        stores.insert_with_uploads("memory://x", Arc::new(InMemory::new()));
        stores.locate("memory://x/out").unwrap()
    }

    #[tokio::test]
    async fn uploads_of_a_lost_lease_are_aborted_and_named_until_they_are() {
        let output = output_with_uploads();
        let folder = output.child(FOLDER);
        let first = Lease::acquire(&output, &folder).await.unwrap();
        let (mut started, id) = upload(&output).await;
        first.renew(Some(&id)).await.unwrap();
        // A renewal keeps the upload.
        first.renew(None).await.unwrap();
        take_over(&output, &folder, &first.location, "second", Duration::ZERO).await.unwrap();
        assert!(started.complete().await.is_err());
        assert!(output.child("part.parquet").head().await.unwrap().is_none());
        // If the successor stopped before it aborted the upload, the next successor would abort it.
        let (found, _) = Holder::read(&first.location).await.unwrap().unwrap();
        assert_eq!((found.id.as_str(), found.uploads), ("second", vec![id]));
        assert!(matches!(first.renew(None).await, Err(ManifestError::Overtaken { .. })));
    }

    #[tokio::test]
    async fn a_job_that_ends_leaves_no_upload_that_can_be_completed() {
        let output = output_with_uploads();
        let lease = Lease::acquire(&output, &output.child(FOLDER)).await.unwrap();
        let (mut started, id) = upload(&output).await;
        lease.renew(Some(&id)).await.unwrap();
        lease.release().await;
        assert!(started.complete().await.is_err());
        assert!(lease.location.head().await.unwrap().is_none());
    }

    #[test]
    fn a_machine_that_slept_or_was_set_back_asks_the_store() {
        let (now, long) = (Sent::now(), 2 * LEASE);
        assert!(now.ago() < LEASE);
        assert!(Sent(now.0, now.1 - long).ago() >= long);
        assert_eq!(Sent(now.0, now.1 + long).ago(), Duration::MAX);
    }

    #[tokio::test]
    async fn a_lock_file_that_was_removed_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let output = Stores::with_settings([]).locate(&dir.path().join("out").display().to_string()).unwrap();
        let folder = output.child(FOLDER);
        let lock = Lock::acquire(&output, &folder).await.unwrap();
        lock.verify().await.unwrap();
        std::fs::remove_dir_all(dir.path().join("out")).unwrap();
        assert!(matches!(lock.verify().await, Err(ManifestError::Vanished { .. })));
    }
}
