//! Files of an HTTP server, downloaded once.
//!
//! Schema inference reads the beginning of a file, later its rows are read, and many servers cannot send a part of a file.
//! So all readers of a file share one [`Download`], which continues when a reader asks for more: a file that is read once,
//! from its beginning to its end, is one request. A reader that jumps (Parquet begins at the end) is served by range
//! requests if the server announces them, and otherwise waits for the download.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fmt,
    io::SeekFrom,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use object_store::{
    Attributes, ClientOptions, CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result,
    client::{HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService},
    http::HttpBuilder,
    path::Path,
};
use tokio::{
    io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt},
    sync::Mutex as AsyncMutex,
};

use super::client;

/// Maximum number of downloads that are kept for later readers.
const MAX_DOWNLOADS: usize = 128;
/// Maximum bytes of them, except that the newest may be of any size.
const MAX_KEPT_BYTES: u64 = 4 << 30;
/// A download of more bytes goes to a temporary file.
const MEMORY_BYTES: usize = 1 << 20;
/// A file of at most this size is downloaded whole, as range requests would take longer.
const WHOLE_BYTES: u64 = 64 << 10;
/// Maximum bytes per read of a whole file.
const PIECE_BYTES: u64 = 256 << 10;
/// A reader that requests bytes after this offset will read the file to its end. A server that cannot resume might
/// close the connection while the reader works, so the rest is downloaded without waiting for it.
const READ_AHEAD_FROM: u64 = 8 << 20;
/// Number of times that a download is started: many servers cannot resume an interrupted one.
const MAX_STARTS: usize = 3;

/// The files of one server.
pub(super) struct HttpFiles {
    inner: Arc<dyn ObjectStore>,
    ranged: Ranged,
    /// The server's last answer to HEAD for each file: bytes of any other version are refused.
    known: Mutex<HashMap<Path, ObjectMeta>>,
    /// The downloads that are kept, the one used last at the end.
    downloads: Mutex<VecDeque<Arc<Download>>>,
}

impl HttpFiles {
    /// The server at `url`, whose requests are retried for `retry_for`.
    pub(super) fn open<'a>(
        url: &str,
        settings: impl Iterator<Item = (&'a str, &'a str)>,
        retry_for: Duration,
    ) -> Result<Arc<dyn ObjectStore>> {
        let ranged = Ranged { retry_for, paths: Arc::default() };
        let builder = HttpBuilder::new()
            .with_url(url)
            .with_retry(client::retries(retry_for))
            .with_client_options(client::options())
            .with_http_connector(ranged.clone());
        let builder = settings.fold(builder, |builder, (key, value)| match key.parse() {
            Ok(key) => builder.with_config(key, value),
            // A setting of another store.
            Err(_) => builder,
        });
        let (known, downloads) = (Mutex::default(), Mutex::default());
        Ok(Arc::new(Self { inner: Arc::new(builder.build()?), ranged, known, downloads }))
    }

    /// Asks the server for size and version; a download of another version is dropped.
    async fn head(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let found = self.inner.get_opts(path, options).await?;
        let is_stale = |download: &Download| {
            &download.path == path && !(has_version(&found.meta) && is_same(&download.meta, &found.meta))
        };
        locked(&self.downloads).retain(|download| !is_stale(download));
        locked(&self.known).insert(path.clone(), found.meta.clone());
        Ok(found)
    }

    /// The download of this version of a file, if there is one.
    fn download(&self, meta: &ObjectMeta, path: &Path) -> Option<Arc<Download>> {
        let mut downloads = locked(&self.downloads);
        let place = downloads.iter().position(|download| &download.path == path && is_same(&download.meta, meta))?;
        let download = downloads.remove(place)?;
        downloads.push_back(Arc::clone(&download));
        Some(download)
    }

    /// A new download, kept for later readers; the oldest make room for it.
    fn new_download(&self, meta: &ObjectMeta, path: &Path) -> Arc<Download> {
        let download = Arc::new(Download {
            store: Arc::clone(&self.inner),
            path: path.clone(),
            meta: meta.clone(),
            len: AtomicU64::new(0),
            reads_ahead: AtomicBool::new(false),
            state: AsyncMutex::default(),
        });
        let mut downloads = locked(&self.downloads);
        downloads.push_back(Arc::clone(&download));
        let kept = |downloads: &VecDeque<Arc<Download>>| downloads.iter().map(|download| download.len()).sum::<u64>();
        while downloads.len() > 1 && (downloads.len() > MAX_DOWNLOADS || kept(&downloads) > MAX_KEPT_BYTES) {
            downloads.pop_front();
        }
        download
    }

    /// Bytes by a range request; `None` when the server sends whole files only, or no versions: parts of two files could
    /// not be told apart.
    async fn ranged(&self, path: &Path, meta: &ObjectMeta, options: GetOptions) -> Result<Option<GetResult>> {
        if !self.ranged.has(path) || !has_version(meta) {
            return Ok(None);
        }
        match self.inner.get_opts(path, options).await {
            Ok(got) if is_same(&got.meta, meta) => Ok(Some(exactly(got))),
            Ok(_) => Err(changed(path)),
            Err(Error::NotSupported { .. }) => {
                self.ranged.set(path, false);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the server says which version of a file it has.
fn has_version(meta: &ObjectMeta) -> bool {
    meta.e_tag.is_some() || meta.last_modified.timestamp() != 0
}

/// Whether two answers of a server are about the same version of a file.
fn is_same(a: &ObjectMeta, b: &ObjectMeta) -> bool {
    let etag = |meta: &ObjectMeta| meta.e_tag.as_deref().map(|etag| etag.trim_start_matches("W/").to_owned());
    match (etag(a), etag(b)) {
        (Some(a_etag), Some(b_etag)) => (a.size, a_etag) == (b.size, b_etag),
        _ => (a.size, a.last_modified) == (b.size, b.last_modified),
    }
}

fn changed(path: &Path) -> Error {
    Error::Precondition { path: path.to_string(), source: "the file changed on the server".into() }
}

/// A part of a file whose stream fails when it has more or fewer bytes than the server announced.
fn exactly(got: GetResult) -> GetResult {
    let (meta, range, attributes) = (got.meta.clone(), got.range.clone(), got.attributes.clone());
    let checked =
        futures::stream::try_unfold((got.into_stream(), range.end - range.start), |(mut bytes, left)| async move {
            match (bytes.next().await.transpose()?, left) {
                (None, 0) => Ok(None),
                (Some(chunk), left) if chunk.len() as u64 <= left => {
                    let left = left - chunk.len() as u64;
                    Ok(Some((chunk, (bytes, left))))
                }
                _ => Err(Error::Generic {
                    store: "HTTP",
                    source: "the server sent another part than it announced".into(),
                }),
            }
        });
    GetResult { payload: GetResultPayload::Stream(checked.boxed()), meta, range, attributes }
}

impl fmt::Debug for HttpFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HttpFiles").field(&self.inner).finish()
    }
}

impl fmt::Display for HttpFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for HttpFiles {
    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        if options.head {
            return self.head(path, options).await;
        }
        let known = locked(&self.known).get(path).cloned();
        let Some(meta) = known else {
            // A file that was not listed, and that is not read twice.
            return self.inner.get_opts(path, options).await;
        };
        let range = match &options.range {
            None => 0..meta.size,
            Some(range) => checked(range, meta.size)?,
        };
        let download = self.download(&meta, path);
        let next = download.as_ref().map_or(0, |download| download.len());
        if range.start > next
            && meta.size > WHOLE_BYTES
            && let Some(got) = self.ranged(path, &meta, options).await?
        {
            return Ok(got);
        }
        let download = download.unwrap_or_else(|| self.new_download(&meta, path));
        if range.start >= READ_AHEAD_FROM && !self.ranged.has(path) {
            download.read_ahead();
        }
        let payload = GetResultPayload::Stream(download.stream(range.clone()));
        Ok(GetResult { payload, meta, range, attributes: Attributes::default() })
    }

    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.inner.put_opts(path, payload, options).await
    }

    async fn put_multipart_opts(&self, path: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(path, options).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

fn checked(range: &GetRange, size: u64) -> Result<Range<u64>> {
    range.as_range(size).map_err(|error| Error::Generic { store: "HTTP", source: Box::new(error) })
}

/// One download of a file, up to the last byte that was requested.
struct Download {
    store: Arc<dyn ObjectStore>,
    path: Path,
    meta: ObjectMeta,
    /// Bytes downloaded so far.
    len: AtomicU64,
    reads_ahead: AtomicBool,
    /// Held while bytes come, so that readers wait in line.
    state: AsyncMutex<State>,
}

#[derive(Default)]
struct State {
    /// The server's answer; `None` before the first request and after a failure.
    body: Option<BoxStream<'static, Result<Bytes>>>,
    /// Requests so far.
    starts: usize,
    /// Bytes of the response that were stored; fewer than the file has while a response repeats an interrupted one.
    at: u64,
    /// The bytes of the response that are being stored. They stay here until that is done, as a reader may be dropped
    /// meanwhile.
    chunk: Option<Bytes>,
    bytes: Spool,
}

impl Download {
    fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn stream(self: Arc<Self>, range: Range<u64>) -> BoxStream<'static, Result<Bytes>> {
        let pieces = futures::stream::try_unfold((self, range), |(download, range)| async move {
            if range.is_empty() {
                return Ok(None);
            }
            let end = range.end.min(range.start + PIECE_BYTES);
            let piece = download.read(range.start..end).await?;
            Ok(Some((piece, (download, end..range.end))))
        });
        pieces.boxed()
    }

    async fn read(&self, range: Range<u64>) -> Result<Bytes> {
        let mut state = self.state.lock().await;
        while self.len() < range.end {
            self.advance(&mut state).await?;
        }
        state.bytes.read(range).await.map_err(local)
    }

    /// Waits for more bytes, unless all are downloaded.
    async fn advance(&self, state: &mut State) -> Result<()> {
        let before = self.len();
        while self.len() == before && before < self.meta.size {
            if state.chunk.is_some() {
                self.take_chunk(state).await?;
                continue;
            }
            let error = match &mut state.body {
                None => {
                    state.body = Some(self.start().await?);
                    (state.starts, state.at) = (state.starts + 1, 0);
                    continue;
                }
                Some(body) => match body.next().await {
                    Some(Ok(chunk)) => {
                        state.chunk = Some(chunk);
                        continue;
                    }
                    Some(Err(error)) => error,
                    None => Error::Generic { store: "HTTP", source: "the server sent less than it announced".into() },
                },
            };
            state.body = None;
            if state.starts >= MAX_STARTS {
                return Err(error);
            }
            tracing::warn!(%error, "the download was interrupted and is restarted");
        }
        Ok(())
    }

    /// Appends the chunk. Bytes that are there already must be the same: a server without versions may have another file
    /// by now.
    async fn take_chunk(&self, state: &mut State) -> Result<()> {
        let Some(mut new) = state.chunk.clone() else { return Ok(()) };
        let repeated = new.split_to((self.len() - state.at).min(new.len() as u64) as usize);
        let there = state.bytes.read(state.at..state.at + repeated.len() as u64).await.map_err(local)?;
        if there != repeated {
            return Err(changed(&self.path));
        }
        if !new.is_empty() {
            state.bytes.append(&new, self.len()).await.map_err(local)?;
        }
        // Nothing is awaited from here on.
        self.len.fetch_add(new.len() as u64, Ordering::Release);
        state.at += (repeated.len() + new.len()) as u64;
        state.chunk = None;
        Ok(())
    }

    /// Requests the file; fails unless it is still the version that is downloaded.
    async fn start(&self) -> Result<BoxStream<'static, Result<Bytes>>> {
        let got = self.store.get(&self.path).await?;
        match is_same(&got.meta, &self.meta) {
            true => Ok(got.into_stream()),
            false => Err(changed(&self.path)),
        }
    }

    /// Downloads the rest, for as long as the download is kept.
    fn read_ahead(self: &Arc<Self>) {
        if self.reads_ahead.swap(true, Ordering::Relaxed) {
            return;
        }
        let kept = Arc::downgrade(self);
        tokio::spawn(async move {
            while let Some(download) = kept.upgrade().filter(|download| download.len() < download.meta.size) {
                // A reader meets the same error.
                if download.advance(&mut *download.state.lock().await).await.is_err() {
                    break;
                }
            }
        });
    }
}

fn local(error: std::io::Error) -> Error {
    Error::Generic { store: "temporary file", source: Box::new(error) }
}

/// Downloaded bytes: in memory or, when there are many, in a file without a name, which ends with the process.
enum Spool {
    Memory(Vec<u8>),
    File(tokio::fs::File),
}

impl Default for Spool {
    fn default() -> Self {
        Self::Memory(Vec::new())
    }
}

impl Spool {
    /// Appends to the first `len` bytes.
    async fn append(&mut self, bytes: &[u8], len: u64) -> std::io::Result<()> {
        if let Self::Memory(held) = self {
            if held.len() + bytes.len() <= MEMORY_BYTES {
                held.extend_from_slice(bytes);
                return Ok(());
            }
            let mut file = tokio::fs::File::from_std(tempfile::tempfile()?);
            file.write_all(held).await?;
            *self = Self::File(file);
        }
        if let Self::File(file) = self {
            file.seek(SeekFrom::Start(len)).await?;
            file.write_all(bytes).await?;
            file.flush().await?;
        }
        Ok(())
    }

    async fn read(&mut self, range: Range<u64>) -> std::io::Result<Bytes> {
        match self {
            Self::Memory(held) => Ok(Bytes::copy_from_slice(&held[range.start as usize..range.end as usize])),
            Self::File(file) => {
                let mut bytes = vec![0; (range.end - range.start) as usize];
                file.seek(SeekFrom::Start(range.start)).await?;
                file.read_exact(&mut bytes).await?;
                Ok(bytes.into())
            }
        }
    }
}

/// The files that a server can send in parts, as it says when it is asked for their size.
#[derive(Debug, Clone)]
struct Ranged {
    paths: Arc<Mutex<HashSet<Path>>>,
    /// For the clients that are created.
    retry_for: Duration,
}

impl Ranged {
    fn has(&self, path: &Path) -> bool {
        locked(&self.paths).contains(path)
    }

    fn set(&self, path: &Path, ranged: bool) {
        let mut paths = locked(&self.paths);
        if ranged {
            paths.insert(path.clone())
        } else {
            paths.remove(path)
        };
    }
}

impl HttpConnector for Ranged {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        Ok(HttpClient::new(Observed {
            client: client::Connector::new(self.retry_for).connect(options)?,
            ranged: self.clone(),
        }))
    }
}

/// A client whose answers are looked through for `Accept-Ranges`, which the stores do not hand on.
#[derive(Debug)]
struct Observed {
    client: HttpClient,
    ranged: Ranged,
}

#[async_trait]
impl HttpService for Observed {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let is_head = request.method().as_str() == "HEAD";
        let path = Path::from_url_path(request.uri().path()).ok().filter(|_| is_head);
        let answer = self.client.execute(request).await?;
        if let Some(path) = path {
            let accepts = answer.headers().get("accept-ranges").is_some_and(|unit| unit.as_bytes() == b"bytes");
            self.ranged.set(&path, accepts);
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use object_store::{chunked::ChunkedStore, memory::InMemory};

    use super::*;

    /// A query may drop a reader at any point, and the next reader continues the same download.
    #[tokio::test]
    async fn a_reader_that_is_dropped_takes_no_bytes_along() {
        let content: Vec<u8> = (0..3_u32 << 18).flat_map(u32::to_le_bytes).collect();
        let (store, path) = (Arc::new(InMemory::new()), Path::from("a"));
        store.put(&path, content.clone().into()).await.unwrap();
        let meta = store.head(&path).await.unwrap();
        let download = Arc::new(Download {
            store: Arc::new(ChunkedStore::new(store, 50_000)),
            path,
            meta,
            len: AtomicU64::new(0),
            reads_ahead: AtomicBool::new(false),
            state: AsyncMutex::default(),
        });
        let size = content.len() as u64;
        for _ in 0..100 {
            // Polled once, then dropped.
            let _ = tokio::time::timeout(Duration::ZERO, download.read(0..size)).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(download.read(0..size).await.unwrap() == content, "other bytes than the server's");
    }
}
