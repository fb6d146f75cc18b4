//! Who may write to an output: a file lock where the output is local, a lease in an object store.
//!
//! A local lock is the kernel's, which lets go of it when the process ends, however it ends. A lease is an object that its
//! holder writes again and again; how old it is, the store's own clock says. A process that slept through its lease finds
//! out in [`Lock::hold`], before it publishes anything; what is left is a process that falls asleep between that question
//! and the end of the upload.

use std::{
    fs::{File, TryLockError},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use chrono::{DateTime, Utc};
use object_store::{ObjectStoreExt, PutMode, UpdateVersion};
use serde::{Deserialize, Serialize};

use super::{ManifestError, records::read};
use crate::stores::{Location, StoreError};

/// A lease in an object store that was not renewed for this long is nobody's.
pub(super) const LEASE: Duration = Duration::from_secs(60);
/// How often a running job renews its lease.
const RENEWAL: Duration = Duration::from_secs(15);

/// Times that removing a lease is tried again.
const REMOVALS: usize = 3;

/// Keeps a second job out.
#[derive(Debug)]
pub(super) enum Lock {
    /// The kernel lets go of it when the process ends, however it ends.
    File(File),
    Lease(Arc<Lease>, Renewal),
}

/// The task that renews a lease; it ends with the lock, also when the job is dropped half way.
#[derive(Debug)]
pub(super) struct Renewal(tokio::task::JoinHandle<()>);

impl Drop for Renewal {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Who writes to an output in an object store. How old a lease is, the store's own clock says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Holder {
    id: String,
}

impl Lock {
    pub(super) async fn take(output: &Location, folder: &Location) -> Result<Self, ManifestError> {
        match folder.local_path() {
            Some(path) => Self::take_file(output, &path),
            None => Self::take_lease(output, folder).await,
        }
    }

    fn take_file(output: &Location, folder: &std::path::Path) -> Result<Self, ManifestError> {
        let path = folder.join("lock");
        let failed = |e| ManifestError::from(StoreError::local("lock", &path, e));
        loop {
            std::fs::create_dir_all(folder).map_err(failed)?;
            let file = File::options().create(true).write(true).truncate(false).open(&path).map_err(failed)?;
            match file.try_lock() {
                // Between opening and locking, a job that was refused may have removed the file again.
                Ok(()) if !is_same(&file, &path) => {}
                Ok(()) => {
                    // For the message of whoever comes second; the lock itself is the kernel's.
                    std::fs::write(&path, format!("process {}", std::process::id())).map_err(failed)?;
                    return Ok(Self::File(file));
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

    async fn take_lease(output: &Location, folder: &Location) -> Result<Self, ManifestError> {
        let lease = Arc::new(Lease::take(output, folder).await?);
        let renewal = Renewal(tokio::spawn(Lease::keep(Arc::clone(&lease))));
        Ok(Self::Lease(lease, renewal))
    }

    /// Fails when the lock is somebody else's by now.
    pub(super) async fn hold(&self, folder: &Location) -> Result<(), ManifestError> {
        match self {
            Self::Lease(lease, _) => lease.hold().await,
            Self::File(file) => {
                let path = folder.local_path().unwrap_or_default().join("lock");
                match is_same(file, &path) {
                    true => Ok(()),
                    false => Err(ManifestError::Vanished { file: path.display().to_string() }),
                }
            }
        }
    }

    pub(super) async fn release(self) {
        if let Self::Lease(lease, renewal) = self {
            drop(renewal);
            lease.give_back().await;
        }
    }
}

/// Whether an open file is the one that has this name now.
fn is_same(file: &File, path: &std::path::Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |found: std::io::Result<std::fs::Metadata>| found.ok().map(|found| (found.dev(), found.ino()));
    identity(file.metadata()).is_some_and(|open| Some(open) == identity(std::fs::metadata(path)))
}

/// A lock in an object store: an object that its holder writes again and again.
#[derive(Debug)]
pub(super) struct Lease {
    id: String,
    location: Location,
    /// Asked for before parts are published. One renewal at a time.
    state: tokio::sync::Mutex<LeaseState>,
}

#[derive(Debug)]
struct LeaseState {
    version: UpdateVersion,
    /// When the last renewal that the store took was sent.
    renewed: Sent,
}

/// A moment by two clocks: the steady one stands still while the machine sleeps, and the other may be set back.
#[derive(Debug, Clone, Copy)]
struct Sent(Instant, SystemTime);

impl Sent {
    fn now() -> Self {
        Self(Instant::now(), SystemTime::now())
    }

    /// By the clock that says more; a clock that was set back says nothing of use.
    fn ago(self) -> Duration {
        self.0.elapsed().max(self.1.elapsed().unwrap_or(Duration::MAX))
    }
}

impl Lease {
    async fn take(output: &Location, folder: &Location) -> Result<Self, ManifestError> {
        let (location, id) = (folder.child("lock"), uuid::Uuid::new_v4().to_string());
        let sent = Sent::now();
        let version = match location.put(holder(&id), PutMode::Create).await {
            Ok(put) => UpdateVersion { e_tag: put.e_tag, version: put.version },
            // Ours nevertheless, when the request was applied but its answer was lost; also below.
            Err(object_store::Error::AlreadyExists { .. }) => match version_if_of(&location, &id).await? {
                Some(version) => version,
                None => take_over(output, folder, &location, &id, LEASE).await?,
            },
            Err(e) => return Err(StoreError::request("lock", &location, e).into()),
        };
        Ok(Self { id, location, state: tokio::sync::Mutex::new(LeaseState { version, renewed: sent }) })
    }

    /// Tells others that the job lives, until it is dropped or another job has taken over. A renewal that fails is tried
    /// again.
    async fn keep(lease: Arc<Self>) {
        loop {
            tokio::time::sleep(RENEWAL).await;
            match lease.renew().await {
                Ok(()) => {}
                Err(ManifestError::Overtaken { .. }) => {
                    tracing::warn!("another job has taken over the output");
                    return;
                }
                Err(error) => tracing::warn!(%error, "the lock of the output could not be renewed; trying again"),
            }
        }
    }

    /// Whether the lease is still ours: at once when it was renewed in time, else the store is asked. A process that was
    /// asleep for longer than a lease finds out here, before it publishes anything.
    async fn hold(&self) -> Result<(), ManifestError> {
        let fresh = self.state.lock().await.renewed.ago() < LEASE / 2;
        if fresh { Ok(()) } else { self.renew().await }
    }

    async fn renew(&self) -> Result<(), ManifestError> {
        let mut state = self.state.lock().await;
        let sent = Sent::now();
        let version = match self.location.put(holder(&self.id), PutMode::Update(state.version.clone())).await {
            Ok(put) => UpdateVersion { e_tag: put.e_tag, version: put.version },
            Err(object_store::Error::Precondition { .. } | object_store::Error::NotFound { .. }) => {
                self.version_if_ours().await?
            }
            Err(e) => return Err(StoreError::request("lock", &self.location, e).into()),
        };
        *state = LeaseState { version, renewed: sent };
        Ok(())
    }

    async fn version_if_ours(&self) -> Result<UpdateVersion, ManifestError> {
        let version = version_if_of(&self.location, &self.id).await?;
        version.ok_or_else(|| ManifestError::Overtaken { file: self.location.to_string() })
    }

    /// Removes the lease, if it is still ours: asked before every try, as after one without an answer it may be another
    /// job's.
    async fn give_back(&self) {
        let mut tries = 0..REMOVALS;
        loop {
            let removed = match self.version_if_ours().await {
                Ok(_) => self.delete_once().await,
                Err(ManifestError::Overtaken { .. }) => Ok(()),
                Err(error) => Err(error),
            };
            match removed {
                Ok(()) => return,
                Err(_) if tries.next().is_some() => {}
                Err(error) => {
                    tracing::warn!(%error, "the lock of the output could not be removed; it ends by itself");
                    return;
                }
            }
        }
    }

    async fn delete_once(&self) -> Result<(), ManifestError> {
        match self.location.store.delete(&self.location.path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(StoreError::request("delete", &self.location, e).into()),
        }
    }
}

fn holder(id: &str) -> bytes::Bytes {
    serde_json::to_vec(&Holder { id: id.to_owned() }).unwrap_or_default().into()
}

/// The version of a lease whose holder is `id`.
async fn version_if_of(location: &Location, id: &str) -> Result<Option<UpdateVersion>, ManifestError> {
    let Some(meta) = location.head().await? else { return Ok(None) };
    match read::<Holder>(location).await {
        Ok(Some(holder)) if holder.id == id => Ok(Some(UpdateVersion { e_tag: meta.e_tag, version: meta.version })),
        Ok(_) | Err(ManifestError::Broken { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Takes a lease that nobody renews any more; of two that try, the store lets one.
async fn take_over(
    output: &Location,
    folder: &Location,
    location: &Location,
    id: &str,
    lasts: Duration,
) -> Result<UpdateVersion, ManifestError> {
    let locked = |holder: String| ManifestError::Locked { output: output.to_string(), holder };
    let Some(meta) = location.head().await? else { return Err(locked("it has just ended; try again".into())) };
    let age = store_time(folder, id).await?.signed_duration_since(meta.last_modified).num_seconds();
    let left = lasts.as_secs() as i64 - age;
    if left > 0 {
        return Err(locked(format!("last heard of {age} s ago; if it was killed, try again in {left} s")));
    }
    let version = UpdateVersion { e_tag: meta.e_tag, version: meta.version };
    match location.put(holder(id), PutMode::Update(version)).await {
        Ok(put) => Ok(UpdateVersion { e_tag: put.e_tag, version: put.version }),
        Err(object_store::Error::Precondition { .. } | object_store::Error::NotFound { .. }) => {
            version_if_of(location, id).await?.ok_or_else(|| locked("it was faster".into()))
        }
        Err(e) => Err(StoreError::request("lock", location, e).into()),
    }
}

/// What time it is at the store: clocks of two machines may differ by more than a lease lasts.
async fn store_time(folder: &Location, id: &str) -> Result<DateTime<Utc>, ManifestError> {
    let probe = folder.child(&format!("clock-{id}"));
    probe.put(bytes::Bytes::new(), PutMode::Overwrite).await.map_err(|e| StoreError::request("write", &probe, e))?;
    let meta = probe.head().await?;
    probe.delete().await?;
    meta.map(|meta| meta.last_modified).ok_or_else(|| ManifestError::Vanished { file: probe.to_string() })
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

    /// A store that loses its answer to what was written, so that it is written again.
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
        let first = Lease::take(&output, &folder).await.unwrap();
        first.renew().await.unwrap();
        take_over(&output, &folder, &first.location, "second", Duration::ZERO).await.unwrap();
        let second = Holder { id: "second".to_owned() };
        assert_eq!(read::<Holder>(&first.location).await.unwrap(), Some(second));
        // What is the other's stays the other's.
        assert!(matches!(first.renew().await, Err(ManifestError::Overtaken { .. })));
        assert!(matches!(Lease::take(&output, &folder).await, Err(ManifestError::Locked { .. })));
    }

    #[tokio::test]
    async fn a_lease_is_taken_over_only_when_it_is_old_and_its_holder_finds_out() {
        let output = output();
        let folder = output.child(FOLDER);
        let first = Lease::take(&output, &folder).await.unwrap();
        first.renew().await.unwrap();
        assert!(matches!(Lease::take(&output, &folder).await, Err(ManifestError::Locked { .. })));
        // As if a renewal was applied and its answer lost: the version is another one, but the holder is not.
        first.location.put(holder(&first.id), PutMode::Overwrite).await.unwrap();
        first.renew().await.unwrap();
        take_over(&output, &folder, &first.location, "second", Duration::ZERO).await.unwrap();
        assert!(matches!(first.renew().await, Err(ManifestError::Overtaken { .. })));
        first.hold().await.unwrap_or_else(|_| panic!("renewed a moment ago, so not asked"));
        // The lease of another is not given back.
        first.give_back().await;
        assert!(first.location.head().await.unwrap().is_some());
        assert!(folder.children().await.unwrap().iter().all(|object| !object.location.to_string().contains("clock")));
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
        let lock = Lock::take(&output, &folder).await.unwrap();
        lock.hold(&folder).await.unwrap();
        std::fs::remove_dir_all(dir.path().join("out")).unwrap();
        assert!(matches!(lock.hold(&folder).await, Err(ManifestError::Vanished { .. })));
    }
}
