//! From what a user types to an object store and a path in it: the one place that knows URL schemes and credentials.
//!
//! A local path, a `file://` URL and a cloud URL all become a [`Location`], so that nothing downstream has a second
//! code path for local files. Credentials come from the environment only (`AWS_*`, `AZURE_*`, `GOOGLE_*`): a URL that
//! holds a password is refused rather than printed into a manifest some day.

#[cfg(any(feature = "aws", feature = "azure", feature = "gcp", feature = "http"))]
mod client;
pub(crate) mod file;
#[cfg(feature = "http")]
mod http;
mod walk;

/// Stores without a network always answer.
#[cfg(not(any(feature = "aws", feature = "azure", feature = "gcp", feature = "http")))]
mod client {
    pub(super) async fn until_answered<T, F: Future<Output = T>>(request: impl FnOnce() -> F) -> T {
        request().await
    }
}

use std::{
    collections::HashMap,
    env, fmt,
    path::{Component, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::{
    ObjectMeta, ObjectStore, ObjectStoreExt, ObjectStoreScheme, PutMode, PutOptions, PutPayload, PutResult,
    local::LocalFileSystem, path::Path,
};
use thiserror::Error;
use url::Url;

use crate::{
    error::{Exit, Fault},
    reply::summary,
};

/// An address that is none, or a request that a store refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Not a path and not a URL of a scheme that we know.
    #[error("{address}: {reason}; give a local path or an s3://, gs://, az://, http(s):// or file:// URL")]
    Address {
        /// What was given, without credentials.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The store cannot be set up, usually because a setting is missing in the environment.
    #[error("{address}: cannot set up the object store: {}", summary(source))]
    Setup {
        /// What was given.
        address: String,
        /// What the store said.
        source: Box<object_store::Error>,
    },
    /// A request failed after the store's own retries.
    #[error("{operation} {address}: {}", summary(source))]
    Request {
        /// `read`, `write`, `list`, …
        operation: &'static str,
        /// The object.
        address: String,
        /// What the store said.
        source: Box<object_store::Error>,
    },
    /// The local file system failed.
    #[error("{operation} {address}: {}", summary(source))]
    Local {
        /// `lock`, `create`, `sync`, …
        operation: &'static str,
        /// The file.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Fault for StoreError {
    fn exit(&self) -> Exit {
        if self.is_usage() { Exit::Usage } else { Exit::Storage }
    }

    /// The two replies of a store that a newcomer meets first.
    fn help(&self) -> Option<String> {
        let Self::Request { source, .. } = self else { return None };
        match **source {
            object_store::Error::NotFound { .. } => {
                Some("check the name; stores distinguish upper and lower case".into())
            }
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                Some("give credentials through the environment of the store, such as AWS_ACCESS_KEY_ID".into())
            }
            _ => None,
        }
    }
}

impl StoreError {
    pub(crate) fn request(operation: &'static str, location: &Location, source: object_store::Error) -> Self {
        Self::Request { operation, address: location.to_string(), source: Box::new(source) }
    }

    pub(crate) fn local(operation: &'static str, path: &std::path::Path, source: std::io::Error) -> Self {
        Self::Local { operation, address: path.display().to_string(), source }
    }

    /// The address itself is wrong, as opposed to a store that does not answer.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Address { .. })
    }

    /// There is no such object.
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Request { source, .. } => matches!(**source, object_store::Error::NotFound { .. }),
            Self::Local { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }
}

/// An object, or a folder of objects, in a store.
#[derive(Clone)]
pub struct Location {
    /// Where it lives.
    pub store: Arc<dyn ObjectStore>,
    /// Path in the store.
    pub path: Path,
    /// `scheme://bucket/` for stores, nothing for local files.
    origin: Arc<str>,
    /// Conditional updates do not exist here, files and file locks do.
    local: bool,
    /// Served by an HTTP server: read-only, and ranges cannot be relied on.
    http: bool,
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

    /// The file behind it, when it is a local one.
    pub fn local_path(&self) -> Option<PathBuf> {
        // `Path` holds decoded names, so no percent sign needs undoing.
        self.local.then(|| PathBuf::from(format!("/{}", self.path)))
    }

    /// Its URL; `None` where the store is not the whole of a host, so that a URL would be read as another object.
    pub fn url(&self) -> Option<Url> {
        if let Some(path) = self.local_path() {
            return Url::from_file_path(path).ok();
        }
        let mut url = Url::parse(&self.origin).ok().filter(|origin| matches!(origin.path(), "" | "/"))?;
        url.path_segments_mut().ok()?.clear().extend(self.path.parts().map(|part| part.as_ref().to_owned()));
        Some(url)
    }

    /// Whether an HTTP server stands behind it.
    pub fn is_http(&self) -> bool {
        self.http
    }

    /// Size, time and etag; `None` when there is no such object.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn head(&self) -> Result<Option<ObjectMeta>, StoreError> {
        match self.store.head(&self.path).await {
            Ok(meta) => Ok(Some(meta)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(StoreError::request("look at", self, e)),
        }
    }

    /// The whole object; `None` when there is none. For small things only.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn get(&self) -> Result<Option<Bytes>, StoreError> {
        let got = match self.store.get(&self.path).await {
            Ok(got) => got.bytes().await,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(e) => Err(e),
        };
        got.map(Some).map_err(|e| StoreError::request("read", self, e))
    }

    /// Writes the whole object in one request. For small things only.
    ///
    /// A request that gets no answer is sent again and may have been applied the first time: what
    /// [`PutMode::Create`] finds, or [`PutMode::Update`] finds changed, may be what this call wrote.
    ///
    /// # Errors
    /// The store's own: `AlreadyExists` when [`PutMode::Create`] finds an object, `Precondition` when
    /// [`PutMode::Update`] finds another version, anything else when the store fails.
    pub async fn put(&self, bytes: Bytes, mode: PutMode) -> Result<PutResult, object_store::Error> {
        let (payload, options) = (PutPayload::from_bytes(bytes), PutOptions { mode, ..PutOptions::default() });
        client::until_answered(|| self.store.put_opts(&self.path, payload.clone(), options.clone())).await
    }

    /// Sends a local file and its name to the disk, so that they outlive a power cut; stores elsewhere have done so when
    /// they answer.
    ///
    /// # Errors
    /// [`StoreError::Local`] when the disk fails.
    pub fn sync(&self) -> Result<(), StoreError> {
        let Some(path) = self.local_path() else { return Ok(()) };
        let sync = |path: &std::path::Path| std::fs::File::open(path)?.sync_all();
        let folder = path.parent().unwrap_or(&path);
        sync(&path).and_then(|()| sync(folder)).map_err(|e| StoreError::local("write through", &path, e))
    }

    /// Deletes the object; one that is not there is fine.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn delete(&self) -> Result<(), StoreError> {
        match client::until_answered(|| self.store.delete(&self.path)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(StoreError::request("delete", self, e)),
        }
    }

    /// Objects directly in this folder, in the order of their names; none where there is no such folder.
    ///
    /// # Errors
    /// [`StoreError::Request`] when the store fails.
    pub async fn children(&self) -> Result<Vec<ObjectMeta>, StoreError> {
        let listed = self.store.list_with_delimiter(Some(&self.path)).await;
        let mut objects = listed.map_err(|e| StoreError::request("list", self, e))?.objects;
        objects.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(objects)
    }

    /// Objects below `root` in this store, in no order; on a disk not deeper than `deepest` folders, counted from 1,
    /// and only in folders whose name `enters` likes. Links are followed. Files on a disk whose names no path can have are
    /// left out, and a warning says so.
    ///
    /// # Errors
    /// [`StoreError::Request`] or [`StoreError::Local`] when the store or a folder cannot be read.
    pub async fn below(
        &self,
        root: &Path,
        deepest: usize,
        enters: fn(&str) -> bool,
    ) -> Result<Vec<ObjectMeta>, StoreError> {
        match self.at(root.clone()).local_path() {
            Some(root) => walk::files(root, deepest, enters).await,
            None => {
                let listed = self.store.list(Some(root)).try_collect().await;
                listed.map_err(|e| StoreError::request("list", self, e))
            }
        }
    }
}

/// Stores by scheme and bucket, opened once each, with credentials from the environment.
#[derive(Debug, Clone)]
pub struct Stores {
    /// Lower-case `aws_*`, `azure_*` and `google_*` pairs.
    settings: Arc<Vec<(String, String)>>,
    /// Behind a std mutex: it is never held across an await.
    open: Arc<Mutex<HashMap<String, Arc<dyn ObjectStore>>>>,
}

impl Default for Stores {
    fn default() -> Self {
        Self::from_env()
    }
}

impl Stores {
    /// Takes `AWS_*`, `AZURE_*` and `GOOGLE_*` from the environment, as the clouds' own tools do.
    ///
    /// Only these prefixes: the store builders also know bare names such as `token`, which may mean anything in an
    /// environment.
    pub fn from_env() -> Self {
        let wanted = ["aws_", "azure_", "google_"];
        let settings = env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?.to_ascii_lowercase(), v.into_string().ok()?)))
            .filter(|(k, _)| wanted.iter().any(|prefix| k.starts_with(prefix)));
        Self::with_settings(settings)
    }

    /// With the given settings instead of the environment's.
    pub fn with_settings(settings: impl IntoIterator<Item = (String, String)>) -> Self {
        Self { settings: Arc::new(settings.into_iter().collect()), open: Arc::default() }
    }

    /// Uses `store` for every URL with this scheme and host, e.g. `memory://bucket`: tests put faulty stores here.
    pub fn insert(&self, origin: &str, store: Arc<dyn ObjectStore>) {
        self.open().insert(format!("{}/", origin.trim_end_matches('/')), store);
    }

    /// Finds the store and the path that `address` (a path or a URL) means. Asks no store.
    ///
    /// # Errors
    /// [`StoreError::Address`] when it is empty, is no path and no URL of a known scheme, or holds a password or a
    /// query; [`StoreError::Setup`] when a setting of the store is missing in the environment.
    pub fn locate(&self, address: &str) -> Result<Location, StoreError> {
        if address.is_empty() {
            return Err(StoreError::Address { address: "\"\"".to_owned(), reason: "is empty".to_owned() });
        }
        match parse_url(address)? {
            Some(url) => self.locate_url(&url),
            None => self.locate_path(address),
        }
    }

    fn open(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<dyn ObjectStore>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn locate_path(&self, address: &str) -> Result<Location, StoreError> {
        let wrong = |reason: String| StoreError::Address { address: address.to_owned(), reason };
        let absolute = std::path::absolute(address).map_err(|e| wrong(e.to_string()))?;
        let path = Path::from_absolute_path(normalise(absolute)).map_err(|e| wrong(e.to_string()))?;
        let store = Arc::clone(self.open().entry("file:///".to_owned()).or_insert_with(local_store));
        Ok(Location { store, path, origin: "/".into(), local: true, http: false })
    }

    fn locate_url(&self, url: &Url) -> Result<Location, StoreError> {
        let address = redacted(url);
        let wrong = |reason: &str| StoreError::Address { address: address.clone(), reason: reason.to_owned() };
        if url.password().is_some() {
            return Err(wrong("has a password in it; put credentials into the environment"));
        }
        if let Some(reason) = dropped(url) {
            return Err(wrong(reason));
        }
        if url.scheme() == "file" {
            let path = url.to_file_path().map_err(|()| wrong("is no path of this machine"))?;
            return self.locate_path(&path.to_string_lossy());
        }
        let origin = origin(url);
        if let Some(store) = self.open().get(&origin).cloned() {
            let path = match ObjectStoreScheme::parse(url) {
                Ok((_, path)) => path,
                // A store that a test put in under a scheme of its own.
                Err(_) => Path::from_url_path(url.path()).map_err(|e| wrong(&e.to_string()))?,
            };
            return Ok(Location { store, path, http: is_http(url), origin: origin.into(), local: false });
        }
        let (scheme, path) = ObjectStoreScheme::parse(url).map_err(|_| wrong("has a scheme that is not known"))?;
        if scheme == ObjectStoreScheme::Memory {
            return Err(wrong("is a store in memory, which only tests have"));
        }
        let settings = self.settings.iter().map(|(k, v)| (k.as_str(), v.as_str()));
        let http = [("allow_http", "true")].into_iter().filter(|_| url.scheme() == "http");
        let store = open_store(&scheme, url, settings.chain(http))
            .map_err(|source| StoreError::Setup { address: address.clone(), source: Box::new(source) })?;
        self.open().insert(origin.clone(), Arc::clone(&store));
        Ok(Location { store, path, http: scheme == ObjectStoreScheme::Http, origin: origin.into(), local: false })
    }
}

/// The builders of the stores have the same methods, but no trait in common.
#[allow(unused_macros)] // in a build without stores
macro_rules! build {
    ($builder:ty, $url:expr, $settings:expr) => {{
        let builder = <$builder>::new()
            .with_url($url)
            .with_retry(client::retries())
            .with_client_options(client::options())
            .with_http_connector(client::Connector);
        let builder = $settings.fold(builder, |builder, (key, value)| match key.parse() {
            Ok(key) => builder.with_config(key, value),
            // A setting of another store.
            Err(_) => builder,
        });
        Ok(Arc::new(builder.build()?))
    }};
}

/// What [`object_store::parse_url_opts`] does, with clients that notice a silent server.
#[allow(unused_variables)] // in a build without stores
fn open_store<'a>(
    scheme: &ObjectStoreScheme,
    url: &Url,
    settings: impl Iterator<Item = (&'a str, &'a str)>,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    match scheme {
        #[cfg(feature = "aws")]
        ObjectStoreScheme::AmazonS3 => build!(object_store::aws::AmazonS3Builder, url.as_str(), settings),
        #[cfg(feature = "azure")]
        ObjectStoreScheme::MicrosoftAzure => build!(object_store::azure::MicrosoftAzureBuilder, url.as_str(), settings),
        #[cfg(feature = "gcp")]
        ObjectStoreScheme::GoogleCloudStorage => {
            build!(object_store::gcp::GoogleCloudStorageBuilder, url.as_str(), settings)
        }
        #[cfg(feature = "http")]
        ObjectStoreScheme::Http => http::HttpFiles::open(&url[..url::Position::BeforePath], settings),
        other => {
            let reason = format!("this elmo was built without {other:?}");
            Err(object_store::Error::NotSupported { source: reason.into() })
        }
    }
}

/// The URL in `address`; `None` for a path. A Windows drive letter is no scheme, and neither is `a:b.txt`.
fn parse_url(address: &str) -> Result<Option<Url>, StoreError> {
    if !address.contains("://") {
        return Ok(None);
    }
    Url::parse(address).map(Some).map_err(|e| StoreError::Address {
        // Not parsed, so what is secret in it is not known: show the scheme only.
        address: format!("{}://…", address.split("://").next().unwrap_or_default()),
        reason: format!("is no URL ({e})"),
    })
}

fn local_store() -> Arc<dyn ObjectStore> {
    Arc::new(LocalFileSystem::new())
}

fn is_http(url: &Url) -> bool {
    matches!(url.scheme(), "http" | "https")
}

/// Why a URL is refused rather than taken without what follows its path: a token, or half of a name or pattern.
fn dropped(url: &Url) -> Option<&'static str> {
    let store = !matches!(ObjectStoreScheme::parse(url), Ok((ObjectStoreScheme::Http, _)));
    match (url.query(), url.fragment()) {
        (Some(_), _) if !store => Some("has a query after `?`, which is not sent on; download the file first"),
        (Some(_), _) => Some(
            "has a query after `?`; in a pattern use `*`, a `?` of a name is written %3F, and a SAS token goes into \
             AZURE_STORAGE_SAS_TOKEN",
        ),
        (None, Some(_)) if store => Some("has a fragment after `#`; a `#` of a name is written %23"),
        _ => None,
    }
}

/// `scheme://host:port/` and, where the bucket stands in the path, the bucket too.
fn origin(url: &Url) -> String {
    let port = url.port().map(|p| format!(":{p}")).unwrap_or_default();
    let origin = format!("{}://{}{port}/", url.scheme(), url.host_str().unwrap_or_default());
    match ObjectStoreScheme::parse(url) {
        // `https://account.blob.core.windows.net/container/path`: one store per container.
        Ok((scheme, path)) if is_http(url) && scheme != ObjectStoreScheme::Http => {
            let bucket = url.path().trim_start_matches('/').trim_end_matches(path.as_ref());
            format!("{origin}{bucket}")
        }
        _ => origin,
    }
}

/// The URL without user, password and query, any of which may be secret.
pub fn redacted(url: &Url) -> String {
    format!("{}{}", origin(url).trim_end_matches('/'), url.path())
}

/// Resolves `.` and `..` by words, as the shell does for names that need not exist yet.
fn normalise(path: PathBuf) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            part => out.push(part),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;

    fn stores() -> Stores {
        Stores::with_settings([("aws_region".to_owned(), "eu-west-1".to_owned())])
    }

    #[test]
    fn addresses() {
        let here = std::env::current_dir().unwrap();
        let cases = [
            ("a/../b c.txt".to_owned(), here.join("b c.txt").display().to_string()),
            ("/x/./y".to_owned(), "/x/y".to_owned()),
            ("file:///x/y%20z".to_owned(), "/x/y z".to_owned()),
            ("file:///x/y%3Fz%231".to_owned(), "/x/y?z#1".to_owned()),
            ("s3://bucket/a/b.parquet".to_owned(), "s3://bucket/a/b.parquet".to_owned()),
            ("http://127.0.0.1:8000/a.txt".to_owned(), "http://127.0.0.1:8000/a.txt".to_owned()),
            ("https://example.org/a.txt".to_owned(), "https://example.org/a.txt".to_owned()),
        ];
        for (given, shown) in cases {
            assert_eq!(stores().locate(&given).unwrap().to_string(), shown, "{given}");
        }
    }

    #[test]
    fn every_known_scheme_has_a_store() {
        let stores = Stores::with_settings(
            [("aws_region", "eu-west-1"), ("azure_storage_account_name", "a"), ("google_skip_signature", "true")]
                .map(|(key, value)| (key.to_owned(), value.to_owned())),
        );
        for address in ["s3://b/x", "az://c/x", "gs://b/x", "http://h/x", "https://a.blob.core.windows.net/c/x"] {
            assert_eq!(stores.locate(address).unwrap().path.as_ref(), "x", "{address}");
        }
    }

    #[test]
    fn refused_addresses_show_no_secret() {
        for address in [
            "ftp://user:hunter2@host/x",
            "s3://key:hunter2@bucket/x",
            "https://h/x?sig=hunter2",
            "http://[hunter2/x",
            "s3://bucket/x?sig=hunter2",
            "az://container/part-0?.txt?hunter2",
            "https://a.blob.core.windows.net/c/x?sig=hunter2",
            "file:///x?hunter2",
            "gs://bucket/x#hunter2",
            "memory:///x",
            "",
        ] {
            let error = stores().locate(address).unwrap_err();
            assert!(error.is_usage(), "{error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn what_follows_a_question_mark_is_not_dropped() {
        let said = |address: &str| stores().locate(address).unwrap_err().to_string();
        for address in ["s3://bucket/part-?.txt", "https://a.blob.core.windows.net/c/x?sig=s"] {
            assert!(said(address).contains("in a pattern use `*`, a `?` of a name is written %3F"), "{address}");
        }
        assert!(said("https://h/x?a=b").contains("download the file first"));
        assert!(said("").starts_with("\"\": is empty; give a local path"));
    }

    #[test]
    fn a_store_is_opened_once_and_can_be_replaced() {
        let stores = stores();
        let one = stores.locate("s3://bucket/a").unwrap();
        let two = stores.locate("s3://bucket/b").unwrap();
        assert!(Arc::ptr_eq(&one.store, &two.store));
        stores.insert("memory://test", Arc::new(InMemory::new()));
        assert_eq!(
            stores.locate("memory://test/out").unwrap().child("_elmo/job.json").path.as_ref(),
            "out/_elmo/job.json"
        );
    }
}
