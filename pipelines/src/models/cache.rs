//! The cache directory: `urls/HASH.json` records what a URL contained, `content/HASH/` holds the files under the hash
//! of their content.
//!
//! Each appears by one rename, content first. So a reader never sees an incomplete model, and two processes may fetch
//! the same one at the same time. Old content is never deleted; the user may delete anything in the cache at any time.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use futures::StreamExt;
use object_store::{GetResult, ObjectStoreExt};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use url::Url;

use super::{
    Models,
    error::ModelsError,
    files::{HDF5, OPTIONS, SAFETENSORS},
    magic::Role,
    unzip::unzip,
};
use crate::{redact::redact, reply::summary, report, stores::Location};

/// Largest file that is fetched. The original ELMo has 0.4 GB.
const MAX_FILE_BYTES: u64 = 8 << 30;
/// Retry budget of the check whether a cached model has changed. It is short, because the cached model can be used.
const CHECK_RETRY_FOR: Duration = Duration::from_secs(5);

/// Fetched and unpacked models.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: PathBuf,
}

/// The content of a URL when it was fetched.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Without secrets, for users who inspect the cache.
    url: String,
    content: String,
    files: Vec<Fetched>,
}

/// A fetched file.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Fetched {
    name: String,
    bytes: u64,
    sha256: String,
    /// The store's identifier of this version.
    etag: Option<String>,
}

/// A file to fetch.
struct Wanted {
    name: &'static str,
    url: Url,
    role: Role,
}

impl Cache {
    /// A cache in `dir`, which is created if necessary.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// `$ELMO_CACHE`, or `elmo` in `$XDG_CACHE_HOME` or `~/.cache`, or in the temporary directory.
    pub fn from_env() -> Self {
        let set = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache"))).unwrap_or_else(env::temp_dir);
        Self::new(set("ELMO_CACHE").unwrap_or_else(|| base.join("elmo")).join("models"))
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Fetches one file, or takes it from the cache.
    pub(super) async fn file(&self, models: &Models<'_>, url: &Url, role: Role) -> Result<PathBuf, ModelsError> {
        let name = match role {
            Role::Options => OPTIONS,
            Role::Weights => "weights",
            Role::Zip => "model.zip",
            Role::Other => "file",
        };
        let dir = match self.current(models, url, |_| Ok(url.clone())).await? {
            Some(dir) => dir,
            None => {
                let draft = self.draft()?;
                let wanted = Wanted { name, url: url.clone(), role };
                let fetched = fetch(models, &wanted, draft.path()).await?;
                self.publish(url, draft, vec![fetched]).await?
            }
        };
        Ok(dir.join(name))
    }

    /// Fetches a model directory, or takes it from the cache.
    pub(super) async fn directory(&self, models: &Models<'_>, url: &Url) -> Result<PathBuf, ModelsError> {
        if let Some(dir) = self.current(models, url, |name| child(url, name)).await? {
            return Ok(dir);
        }
        let draft = self.draft()?;
        let want = |name, role| Ok::<_, ModelsError>(Wanted { name, url: child(url, name)?, role });
        let mut files = vec![fetch(models, &want(OPTIONS, Role::Options)?, draft.path()).await?];
        let safetensors = want(SAFETENSORS, Role::Weights)?;
        files.push(match fetch_optional(models, &safetensors, draft.path()).await? {
            Some(fetched) => fetched,
            None => fetch(models, &want(HDF5, Role::Weights)?, draft.path()).await?,
        });
        for name in ["vocab.txt", "softmax.safetensors", "mix.json", "warm_state.safetensors", "MODEL.md"] {
            files.extend(fetch_optional(models, &want(name, Role::Other)?, draft.path()).await?);
        }
        self.publish(url, draft, files).await
    }

    /// Unpacks a zip, once per content.
    pub(super) async fn unpack(&self, zip: &Path, name: &str) -> Result<PathBuf, ModelsError> {
        let (cache, zip, name) = (self.clone(), zip.to_path_buf(), name.to_owned());
        blocking(move || cache.unpack_here(&zip, &name)).await?
    }

    fn unpack_here(&self, zip: &Path, name: &str) -> Result<PathBuf, ModelsError> {
        let hash = hash_file(zip).map_err(|e| ModelsError::io(zip, e))?;
        let dir = self.content(&format!("zip-{}", &hash[..32]));
        if dir.is_dir() {
            return Ok(dir);
        }
        let draft = self.draft()?;
        unzip(zip, draft.path(), name)?;
        commit(draft, &dir)?;
        Ok(dir)
    }

    /// The cached content of `url`, if it is complete and unchanged in the store.
    ///
    /// When the store cannot be reached, it logs a warning and uses the cached model.
    async fn current(
        &self,
        models: &Models<'_>,
        url: &Url,
        source: impl Fn(&str) -> Result<Url, ModelsError>,
    ) -> Result<Option<PathBuf>, ModelsError> {
        let (cache, of) = (self.clone(), url.clone());
        let found = blocking(move || cache.record(&of).filter(|record| cache.is_complete(record))).await?;
        let Some(record) = found else {
            return if models.offline { Err(ModelsError::Offline(redact(url.as_str()))) } else { Ok(None) };
        };
        let dir = self.content(&record.content);
        if models.offline {
            return Ok(Some(dir));
        }
        for file in &record.files {
            match is_unchanged(models, &source(&file.name)?, file).await? {
                Some(true) => {}
                Some(false) => {
                    let (url, file) = (redact(url.as_str()), &file.name);
                    tracing::info!(url, file, "the model has changed; fetching it again");
                    return Ok(None);
                }
                // Each request to an unreachable store takes its whole retry budget.
                None => break,
            }
        }
        Ok(Some(dir))
    }

    fn record(&self, url: &Url) -> Option<Record> {
        let bytes = fs::read(self.record_path(url)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Every file exists with its recorded hash.
    fn is_complete(&self, record: &Record) -> bool {
        let dir = self.content(&record.content);
        record.files.iter().all(|file| hash_file(&dir.join(&file.name)).is_ok_and(|hash| hash == file.sha256))
    }

    /// Renames a fetched draft to the hash of its content, then records it for `url`.
    async fn publish(&self, url: &Url, draft: TempDir, files: Vec<Fetched>) -> Result<PathBuf, ModelsError> {
        let (cache, url) = (self.clone(), url.clone());
        blocking(move || cache.publish_here(&url, draft, files)).await?
    }

    fn publish_here(&self, url: &Url, draft: TempDir, files: Vec<Fetched>) -> Result<PathBuf, ModelsError> {
        let list: Vec<String> = files.iter().map(|f| format!("{} {}\n", f.sha256, f.name)).collect();
        let content = hex(Sha256::digest(list.concat()).as_slice())[..32].to_owned();
        let dir = self.content(&content);
        let record = Record { url: redact(url.as_str()), content, files };
        if dir.is_dir() && !self.is_complete(&record) {
            fs::remove_dir_all(&dir).map_err(|e| ModelsError::write(&dir, e))?;
        }
        commit(draft, &dir)?;
        self.write_record(url, &record)?;
        Ok(dir)
    }

    fn write_record(&self, url: &Url, record: &Record) -> Result<(), ModelsError> {
        let path = self.record_path(url);
        let parent = path.parent().unwrap_or(&self.dir);
        let failed = |e| ModelsError::write(&path, e);
        let text = serde_json::to_vec_pretty(record).map_err(|e| ModelsError::Internal(e.to_string()))?;
        fs::create_dir_all(parent).map_err(failed)?;
        let draft = tempfile::NamedTempFile::new_in(parent).map_err(failed)?;
        fs::write(draft.path(), text).map_err(failed)?;
        draft.persist(&path).map_err(|e| failed(e.error))?;
        Ok(())
    }

    /// Named by the hash of the URL, which may contain secrets.
    fn record_path(&self, url: &Url) -> PathBuf {
        let hash = hex(Sha256::digest(url.as_str()).as_slice());
        self.dir.join("urls").join(format!("{}.json", &hash[..32]))
    }

    fn content(&self, name: &str) -> PathBuf {
        self.dir.join("content").join(name)
    }

    /// A directory on the same file system, removed unless it is committed.
    fn draft(&self) -> Result<TempDir, ModelsError> {
        let content = self.dir.join("content");
        fs::create_dir_all(&content).map_err(|e| ModelsError::write(&content, e))?;
        tempfile::Builder::new().prefix(".draft-").tempdir_in(&content).map_err(|e| ModelsError::write(&content, e))
    }
}

/// Runs blocking work on a thread of its own.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ModelsError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| ModelsError::Internal(format!("the model cache failed: {e}")))
}

/// Renames a draft to its final name. Existing content, which another process may have just committed, is kept: it is
/// the same, and may be in use.
fn commit(draft: TempDir, dir: &Path) -> Result<(), ModelsError> {
    match fs::rename(draft.path(), dir) {
        Err(_) if dir.is_dir() => Ok(()),
        other => other.map_err(|e| ModelsError::write(dir, e)),
    }
}

/// `name` inside the directory `url`.
fn child(url: &Url, name: &str) -> Result<Url, ModelsError> {
    let mut child = url.clone();
    let no_directory = || ModelsError::Url { url: redact(url.as_str()), reason: "it cannot be a directory".into() };
    child.path_segments_mut().map_err(|()| no_directory())?.pop_if_empty().push(name);
    Ok(child)
}

async fn fetch_optional(models: &Models<'_>, wanted: &Wanted, dir: &Path) -> Result<Option<Fetched>, ModelsError> {
    match fetch(models, wanted, dir).await {
        Ok(fetched) => Ok(Some(fetched)),
        Err(ModelsError::Fetch { source: object_store::Error::NotFound { .. }, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

async fn fetch(models: &Models<'_>, wanted: &Wanted, dir: &Path) -> Result<Fetched, ModelsError> {
    let url = redact(wanted.url.as_str());
    let failed = |source| ModelsError::Fetch { url: url.clone(), source };
    let Location { store, path, .. } = models.stores.locate(wanted.url.as_str())?;
    let got = store.get(&path).await.map_err(failed)?;
    tracing::info!(target: report::TARGET, url, size = report::bytes(got.meta.size), "fetching");
    if got.meta.size > MAX_FILE_BYTES {
        return Err(ModelsError::Internal(format!(
            "{url} has {}, which is more than any model",
            report::bytes(got.meta.size)
        )));
    }
    let etag = got.meta.e_tag.clone();
    let target = dir.join(wanted.name);
    let (bytes, sha256) = save(got, &target, &url).await?;
    wanted.role.check_file(&target, &url)?;
    Ok(Fetched { name: wanted.name.to_owned(), bytes, sha256, etag })
}

/// Writes a response body to `target`; returns its size and SHA-256.
async fn save(got: GetResult, target: &Path, url: &str) -> Result<(u64, String), ModelsError> {
    let failed = |e| ModelsError::write(target, e);
    let mut file = tokio::fs::File::create_new(target).await.map_err(failed)?;
    let expected = got.meta.size;
    let mut stream = got.into_stream();
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|source| ModelsError::Fetch { url: url.to_owned(), source })?;
        hash.update(&chunk);
        file.write_all(&chunk).await.map_err(failed)?;
        bytes += chunk.len() as u64;
    }
    // `sync_all` does not report the error of the last write.
    file.flush().await.map_err(failed)?;
    file.sync_all().await.map_err(failed)?;
    if bytes != expected {
        let source = format!("the connection ended after {bytes} of {expected} bytes").into();
        let source = object_store::Error::Generic { store: "download", source };
        return Err(ModelsError::Fetch { url: url.to_owned(), source });
    }
    Ok((bytes, hex(hash.finalize().as_slice())))
}

/// Whether the store still has this version of a file; `None`, and a warning, when the store cannot be reached.
async fn is_unchanged(models: &Models<'_>, url: &Url, file: &Fetched) -> Result<Option<bool>, ModelsError> {
    let Location { store, path, .. } = models.stores.retrying_for(CHECK_RETRY_FOR).locate(url.as_str())?;
    match store.head(&path).await {
        Ok(meta) => Ok(Some(meta.size == file.bytes && (meta.e_tag.is_none() || meta.e_tag == file.etag))),
        Err(object_store::Error::NotFound { .. }) => Ok(Some(false)),
        Err(error) => {
            let (url, error) = (redact(url.as_str()), redact(&summary(&error)));
            tracing::warn!(url, error, "cannot check whether the model has changed; using the cached one");
            Ok(None)
        }
    }
}

fn hash_file(path: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    io::copy(&mut fs::File::open(path)?, &mut hash)?;
    Ok(hex(hash.finalize().as_slice()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
