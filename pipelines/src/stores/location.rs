//! An object or folder in a store, and the requests that jobs make of it.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::{
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, PutResult, multipart::MultipartStore,
    path::Path,
};
use url::Url;

use super::{
    StoreError, local,
    registry::Client,
    retry::{until_answered, until_read},
    sync, walk,
};

/// An object, or a folder of objects, in a store.
#[derive(Clone)]
pub struct Location {
    /// The store that holds it.
    pub store: Arc<dyn ObjectStore>,
    /// Path in the store.
    pub path: Path,
    pub(super) client: Client,
    /// `scheme://bucket/` for stores, `/` for local files.
    pub(super) origin: Arc<str>,
    pub(super) kind: Kind,
}

/// What a store can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Files and file locks; no conditional updates.
    Local,
    /// An object store.
    Remote,
    /// A web server: read-only, and ranges cannot be relied on.
    Http,
}

impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Location").field(&self.to_string()).finish()
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.origin, self.path)
    }
}

impl Location {
    /// The object or folder `name` below this one; `name` may have several segments.
    pub fn child(&self, name: &str) -> Self {
        let path = name.split('/').fold(self.path.clone(), |path, part| path.join(part));
        self.at(path)
    }

    /// Another path in the same store.
    pub fn at(&self, path: Path) -> Self {
        Self { path, ..self.clone() }
    }

    /// The same object, whose requests are retried for `budget`.
    #[must_use]
    pub fn retrying_for(&self, budget: Duration) -> Self {
        let client = self.client.retrying_for(budget);
        Self { store: Arc::clone(&client.store), client, ..self.clone() }
    }

    /// Path in the local file system, if it is a local file.
    pub fn local_path(&self) -> Option<PathBuf> {
        // `Path` holds decoded names, so nothing is percent-encoded.
        (self.kind == Kind::Local).then(|| PathBuf::from(format!("/{}", self.path)))
    }

    /// Its URL; `None` where the store is a bucket in the path of a host, as the URL would name another object.
    pub fn url(&self) -> Option<Url> {
        if let Some(path) = self.local_path() {
            return Url::from_file_path(path).ok();
        }
        let mut url = Url::parse(&self.origin).ok().filter(|origin| matches!(origin.path(), "" | "/"))?;
        url.path_segments_mut().ok()?.clear().extend(self.path.parts().map(|part| part.as_ref().to_owned()));
        Some(url)
    }

    /// The address by which another process finds it: a path, or a URL with its path encoded.
    pub(crate) fn address(&self) -> String {
        if let Some(path) = self.local_path() {
            return path.display().to_string();
        }
        let mut path = Url::parse("path:/").ok();
        if let Some(mut segments) = path.as_mut().and_then(|path| path.path_segments_mut().ok()) {
            segments.clear().extend(self.path.parts().map(|part| part.as_ref().to_owned()));
        }
        let path = path.map_or_else(|| self.path.to_string(), |path| path.path().trim_start_matches('/').to_owned());
        format!("{}{path}", self.origin)
    }

    /// Whether both are the same object, also where a link leads from one name to the other.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let place = |location: &Self| location.local_path().and_then(|path| path.canonicalize().ok());
        match (place(self), place(other)) {
            (Some(one), Some(other)) => one == other,
            _ => self.to_string() == other.to_string(),
        }
    }

    /// Whether it is served by a web server.
    pub fn is_http(&self) -> bool {
        self.kind == Kind::Http
    }

    /// The part of the store's client that gives uploads an id, if it has one.
    pub(super) fn uploads(&self) -> Option<&Arc<dyn MultipartStore>> {
        self.client.uploads.as_ref()
    }

    /// Size, time and etag; `None` when the object does not exist.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn head(&self) -> Result<Option<ObjectMeta>, StoreError> {
        match self.store.head(&self.path).await {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(StoreError::request("look up", self, e)),
        }
    }

    /// The whole object; `None` when it does not exist. For small objects only.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn get(&self) -> Result<Option<Bytes>, StoreError> {
        Ok(self.get_versioned().await?.map(|(bytes, _)| bytes))
    }

    /// As [`Location::get`], with the time and version of the bytes that were read.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn get_versioned(&self) -> Result<Option<(Bytes, ObjectMeta)>, StoreError> {
        let failed = |e| StoreError::request("read", self, e);
        let found = match self.store.get(&self.path).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        let meta = found.meta.clone();
        Ok(Some((found.bytes().await.map_err(failed)?, meta)))
    }

    /// Writes the whole object in one request.
    ///
    /// A request that gets no answer is retried although it may have been applied: the object that [`PutMode::Create`]
    /// finds, or the version that [`PutMode::Update`] finds, may be the one that this call wrote.
    ///
    /// # Errors
    /// The store's own: `AlreadyExists` when [`PutMode::Create`] finds an object, `Precondition` when
    /// [`PutMode::Update`] finds another version, anything else when the store fails.
    pub async fn put(&self, bytes: Bytes, mode: PutMode) -> Result<PutResult, object_store::Error> {
        self.create_parents()?;
        let (payload, options) = (PutPayload::from_bytes(bytes), PutOptions { mode, ..PutOptions::default() });
        until_answered(self.client.retry_for, || self.store.put_opts(&self.path, payload.clone(), options.clone()))
            .await
    }

    /// Creates the missing folders of a local file, and syncs them.
    ///
    /// # Errors
    /// The local file system's.
    pub(crate) fn create_parents(&self) -> Result<(), object_store::Error> {
        let path = self.local_path();
        let Some(folder) = path.as_deref().and_then(std::path::Path::parent) else { return Ok(()) };
        let failed = |e| object_store::Error::Generic { store: "LocalFileSystem", source: Box::new(e) };
        sync::create_folder(folder).map_err(failed)
    }

    /// Writes a local file and its folder entry through to the disk, so that they survive a power failure. Object stores
    /// have done so when they answer.
    ///
    /// # Errors
    /// [`StoreError::Local`] when the disk fails.
    pub fn sync(&self) -> Result<(), StoreError> {
        let Some(path) = self.local_path() else { return Ok(()) };
        let folder = path.parent().unwrap_or(&path);
        sync::sync(&path).and_then(|()| sync::sync(folder)).map_err(|e| StoreError::local("sync", &path, e))
    }

    /// Deletes local files in this folder, at most `depth` folders below it, that processes which are gone have left
    /// unfinished, if they are at least this old.
    ///
    /// # Errors
    /// [`StoreError::Local`] when a folder cannot be read.
    pub(crate) async fn sweep(&self, depth: usize, age: Duration, is_ours: fn(&str) -> bool) -> Result<(), StoreError> {
        let Some(folder) = self.local_path() else { return Ok(()) };
        let shown = folder.clone();
        let swept = tokio::task::spawn_blocking(move || local::sweep(&folder, depth, age, is_ours)).await;
        match swept.unwrap_or_else(|died| Err(std::io::Error::other(died))) {
            Ok(0) => {}
            Ok(files) => {
                tracing::info!(folder = %shown.display(), files, "unfinished files of killed processes deleted")
            }
            Err(error) => return Err(StoreError::local("sweep", &shown, error)),
        }
        Ok(())
    }

    /// Deletes the object; it is not an error if it does not exist.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn delete(&self) -> Result<(), StoreError> {
        match until_answered(self.client.retry_for, || self.store.delete(&self.path)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(StoreError::request("delete", self, e)),
        }
    }

    /// Objects directly in this folder, sorted by name; none where the folder does not exist.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn children(&self) -> Result<Vec<ObjectMeta>, StoreError> {
        let listed = until_read(self.client.retry_for, || self.store.list_with_delimiter(Some(&self.path))).await;
        let mut objects = listed.map_err(|e| StoreError::request("list", self, e))?.objects;
        objects.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(objects)
    }

    /// Whether there is an object below this folder, by one request.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store cannot be read.
    pub async fn has_objects(&self) -> Result<bool, StoreError> {
        let first = || async { self.store.list(Some(&self.path)).next().await.transpose() };
        let first = until_read(self.client.retry_for, first).await;
        first.map(|object| object.is_some()).map_err(|e| StoreError::request("list", self, e))
    }

    /// Objects below `root` in this store, unsorted; on a local disk at most `max_depth` folders deep, counted from 1, and
    /// only in folders for whose name `enters` is true. Symbolic links are followed. Local files whose names cannot be
    /// represented as a [`Path`] are skipped with a warning.
    ///
    /// # Errors
    /// [`StoreError::Request`] or [`StoreError::Local`] when the store or a folder cannot be read.
    pub async fn below(
        &self,
        root: &Path,
        max_depth: usize,
        enters: fn(&str) -> bool,
    ) -> Result<Vec<ObjectMeta>, StoreError> {
        match self.at(root.clone()).local_path() {
            Some(root) => walk::files(root, max_depth, enters).await,
            None => {
                let listed = until_read(self.client.retry_for, || self.store.list(Some(root)).try_collect()).await;
                listed.map_err(|e| StoreError::request("list", self, e))
            }
        }
    }
}
