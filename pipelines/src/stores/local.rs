//! The local file system as a store whose unfinished files no reader takes for data.
//!
//! `LocalFileSystem` writes `NAME#1` beside `NAME` until a file is complete, and a process that is killed leaves it there.
//! Readers that take every file of a folder (pyarrow, pandas, Spark) would read it. They all pass over names that begin
//! with a dot, so a file is called `.NAME#1` until it is complete. It is in the folder of the file, where a link or a
//! rename is atomic.

use std::{
    ffi::OsString,
    fmt,
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path as FilePath, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result, UploadPart, local::LocalFileSystem,
    path::Path,
};

/// The name of this store in errors.
const STORE: &str = "LocalFileSystem";
/// What was staged longer ago than this, and is not locked, was left by a process that is gone. A file may be found before
/// its writer has locked it.
pub(crate) const ABANDONED: Duration = Duration::from_secs(3600);

/// Local files.
#[derive(Debug)]
pub(super) struct LocalFiles(LocalFileSystem);

impl LocalFiles {
    pub(super) fn new() -> Self {
        Self(LocalFileSystem::new())
    }
}

impl fmt::Display for LocalFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A file that is not complete. Dropping it deletes it, unless it got its name.
#[derive(Debug)]
struct Staged {
    /// Locked while it is written, so that nobody takes it for abandoned.
    file: File,
    path: PathBuf,
    target: PathBuf,
}

impl Staged {
    fn new(target: PathBuf) -> io::Result<Self> {
        let mut number = 1_u32;
        loop {
            let path = staged_name(&target, number);
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => {
                    // A file system without locks has none that are held, and then nothing is swept.
                    let _ = file.lock();
                    return Ok(Self { file, path, target });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let folder = target.parent().filter(|folder| !folder.exists()).ok_or(error)?;
                    fs::create_dir_all(folder)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Gives it its name, unless there is a file of that name.
    fn create(self) -> io::Result<PutResult> {
        fs::hard_link(&self.path, &self.target)?;
        self.version()
    }

    /// Gives it its name, in place of a file that has it.
    fn replace(mut self) -> io::Result<PutResult> {
        fs::rename(&self.path, &self.target)?;
        // Another process may have taken the staged name by now.
        self.path.clear();
        self.version()
    }

    /// As `LocalFileSystem` tells versions apart.
    fn version(&self) -> io::Result<PutResult> {
        let found = self.file.metadata()?;
        let modified = found.modified()?.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros();
        let e_tag = Some(format!("{:x}-{modified:x}-{:x}", found.ino(), found.len()));
        Ok(PutResult { e_tag, version: None })
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn staged_name(target: &FilePath, number: u32) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(target.file_name().unwrap_or_default());
    name.push(format!("#{number}"));
    target.with_file_name(name)
}

/// In the name of a complete file that waits for another process to publish it. A number sign would be encoded in a path.
const WAITS: &str = ".staged-";

/// The name of a complete file that another process will publish as `name`.
pub(crate) fn hidden_name(name: &str, attempt: u32) -> String {
    format!(".{name}{WAITS}{attempt}")
}

/// The name that a file gets later, of one that is not complete or not published, also in older versions of elmo.
pub(crate) fn name_of_staged(name: &str) -> Option<&str> {
    let (name, number) = name.rsplit_once('#').or_else(|| name.strip_prefix('.')?.rsplit_once(WAITS))?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let name = is_number.then(|| name.strip_prefix('.').unwrap_or(name))?;
    // A file that will wait, and is not complete.
    Some(name_of_staged(name).unwrap_or(name))
}

/// Deletes files that processes which are gone have left unfinished, at most `depth` folders below `root`, if they are at least
/// this old. Returns how many.
pub(crate) fn sweep(root: &FilePath, depth: usize, age: Duration, is_ours: fn(&str) -> bool) -> io::Result<usize> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut swept = 0;
    for entry in entries {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, entry.file_name());
        if kind.is_dir() && depth > 0 {
            swept += sweep(&entry.path(), depth - 1, age, is_ours)?;
        } else if kind.is_file() && name.to_str().and_then(name_of_staged).is_some_and(is_ours) {
            swept += usize::from(is_abandoned(&entry.path(), age) && fs::remove_file(entry.path()).is_ok());
        }
    }
    Ok(swept)
}

fn is_abandoned(path: &FilePath, age: Duration) -> bool {
    let Ok(file) = File::open(path) else { return false };
    let found =
        file.metadata().and_then(|found| found.modified()).map(|modified| modified.elapsed().unwrap_or_default());
    found.is_ok_and(|found| found >= age) && file.try_lock().is_ok()
}

fn failed(error: io::Error, path: &FilePath) -> Error {
    let path = path.display().to_string();
    match error.kind() {
        io::ErrorKind::AlreadyExists => Error::AlreadyExists { path, source: Box::new(error) },
        io::ErrorKind::NotFound => Error::NotFound { path, source: Box::new(error) },
        _ => Error::Generic { store: STORE, source: Box::new(error) },
    }
}

/// Runs work of the disk on a thread for such work.
async fn on_disk<T: Send + 'static>(path: PathBuf, work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await.unwrap_or_else(|died| Err(io::Error::other(died)));
    done.map_err(|error| failed(error, &path))
}

fn without_attributes(is_empty: bool, operation: &str) -> Result<()> {
    match is_empty {
        true => Ok(()),
        false => Err(Error::NotImplemented { operation: operation.to_owned(), implementer: STORE.to_owned() }),
    }
}

#[async_trait]
impl ObjectStore for LocalFiles {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        use object_store::PutMode::{Create, Overwrite, Update};
        without_attributes(options.attributes.is_empty(), "`put_opts` with attributes")?;
        without_attributes(!matches!(options.mode, Update(_)), "`put_opts` with mode `PutMode::Update`")?;
        let path = self.0.path_to_filesystem(location)?;
        let target = path.clone();
        let put = move || {
            let staged = Staged::new(target)?;
            let mut at = 0;
            for bytes in payload.iter() {
                staged.file.write_all_at(bytes, at)?;
                at += bytes.len() as u64;
            }
            match options.mode {
                Create => staged.create(),
                Overwrite | Update(_) => staged.replace(),
            }
        };
        on_disk(path, put).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        without_attributes(options.attributes.is_empty(), "`put_multipart_opts` with attributes")?;
        let path = self.0.path_to_filesystem(location)?;
        let target = path.clone();
        let staged = on_disk(path.clone(), move || Staged::new(target)).await?;
        Ok(Box::new(Upload { staged: Some(Arc::new(staged)), path, at: 0 }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.0.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.0.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.0.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list(prefix)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.0.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.0.rename_opts(from, to, options).await
    }
}

/// A file that is written in parts.
#[derive(Debug)]
struct Upload {
    /// Shared with parts that are being written; the last one that holds it deletes it.
    staged: Option<Arc<Staged>>,
    path: PathBuf,
    at: u64,
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, payload: PutPayload) -> UploadPart {
        let (staged, path, mut at) = (self.staged.clone(), self.path.clone(), self.at);
        self.at += payload.content_length() as u64;
        let write = move || {
            let staged = staged.ok_or_else(ended)?;
            for bytes in payload.iter() {
                staged.file.write_all_at(bytes, at)?;
                at += bytes.len() as u64;
            }
            Ok(())
        };
        Box::pin(on_disk(path, write))
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let staged = self.staged.take().and_then(Arc::into_inner);
        on_disk(self.path.clone(), move || staged.ok_or_else(ended)?.replace()).await
    }

    async fn abort(&mut self) -> Result<()> {
        let staged = self.staged.take();
        on_disk(self.path.clone(), move || staged.ok_or_else(ended).map(drop)).await
    }
}

fn ended() -> io::Error {
    io::Error::other("the file was completed or given up, or a part of it is still being written")
}

#[cfg(test)]
mod tests {
    use futures::TryStreamExt;
    use object_store::{ObjectStoreExt, PutMode};

    use super::*;

    fn names(folder: &FilePath) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn path(folder: &FilePath, name: &str) -> Path {
        Path::from_absolute_path(folder).unwrap().join(name)
    }

    /// pyarrow passes over names that begin with a dot or an underscore (`ignore_prefixes` of its datasets), Spark too.
    #[tokio::test]
    async fn no_reader_sees_a_file_before_it_is_complete() {
        let folder = tempfile::tempdir().unwrap();
        let (store, at) = (LocalFiles::new(), path(folder.path(), "a.parquet"));
        let mut upload = store.put_multipart(&at).await.unwrap();
        upload.put_part("12".into()).await.unwrap();
        assert_eq!(names(folder.path()), [".a.parquet#1"]);
        // That of a process that was killed.
        fs::write(folder.path().join(".a.parquet#2"), "").unwrap();
        let other = Staged::new(folder.path().join("a.parquet")).unwrap();
        assert_eq!(names(folder.path()), [".a.parquet#1", ".a.parquet#2", ".a.parquet#3"]);
        let listed: Vec<_> = store.list(Some(&path(folder.path(), ""))).try_collect().await.unwrap();
        assert!(listed.is_empty(), "{listed:?}");
        upload.put_part("345".into()).await.unwrap();
        upload.complete().await.unwrap();
        drop(other);
        assert_eq!(names(folder.path()), [".a.parquet#2", "a.parquet"]);
        assert_eq!(store.get(&at).await.unwrap().bytes().await.unwrap(), "12345");
        let mut upload = store.put_multipart(&at).await.unwrap();
        upload.put_part("x".into()).await.unwrap();
        upload.abort().await.unwrap();
        drop(store.put_multipart(&at).await.unwrap());
        assert_eq!(names(folder.path()), [".a.parquet#2", "a.parquet"]);
    }

    #[tokio::test]
    async fn a_file_is_created_once_and_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (store, at) = (LocalFiles::new(), path(&folder.path().join("b"), "a.json"));
        let put = async |bytes: &'static str, mode: PutMode| store.put_opts(&at, bytes.into(), mode.into()).await;
        let created = put("one", PutMode::Create).await.unwrap();
        assert!(matches!(put("two", PutMode::Create).await, Err(Error::AlreadyExists { .. })));
        assert_eq!(store.head(&at).await.unwrap().e_tag, created.e_tag);
        assert_eq!(store.get(&at).await.unwrap().bytes().await.unwrap(), "one");
        put("three", PutMode::Overwrite).await.unwrap();
        assert_eq!(store.get(&at).await.unwrap().bytes().await.unwrap(), "three");
        assert_eq!(names(&folder.path().join("b")), ["a.json"]);
        fs::write(folder.path().join("file"), "").unwrap();
        assert!(store.put(&path(&folder.path().join("file"), "a"), "x".into()).await.is_err());
    }

    #[tokio::test]
    async fn what_a_killed_process_left_is_swept_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("topic=t/partition=0");
        fs::create_dir_all(&deep).unwrap();
        let old = SystemTime::now() - 2 * ABANDONED;
        let write = |name: &str, modified: SystemTime| {
            fs::write(deep.join(name), "").unwrap();
            File::options().write(true).open(deep.join(name)).unwrap().set_modified(modified).unwrap();
        };
        for name in [".1.parquet#1", "1.parquet#2", "mine.txt#1", "1.parquet", "1.parquet#a"] {
            write(name, old);
        }
        write(".2.parquet#1", SystemTime::now());
        // A process that has stood still for long.
        let staged = Staged::new(deep.join("3.parquet")).unwrap();
        staged.file.set_modified(old).unwrap();
        let is_ours = |name: &str| name.ends_with(".parquet");
        assert_eq!(sweep(folder.path(), 1, ABANDONED, is_ours).unwrap(), 0);
        assert_eq!(sweep(folder.path(), 2, ABANDONED, is_ours).unwrap(), 2);
        assert_eq!(names(&deep), [".2.parquet#1", ".3.parquet#1", "1.parquet", "1.parquet#a", "mine.txt#1"]);
        staged.create().unwrap();
        assert!(deep.join("3.parquet").exists() && !deep.join(".3.parquet#1").exists());
        assert_eq!(sweep(&folder.path().join("none"), 2, ABANDONED, is_ours).unwrap(), 0);
    }
}
