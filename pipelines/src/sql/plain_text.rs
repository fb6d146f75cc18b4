//! The bytes of CSV and JSON files, as readers get them: decompressed, without a byte order mark, an array of JSON as lines,
//! and with an error if a quotation of CSV is never closed.

use std::{
    fmt,
    io::{self, Cursor, Read},
    ops::Range,
    os::unix::fs::FileExt,
    sync::Arc,
};

use async_trait::async_trait;
use bytes::Bytes;
use datafusion::{
    common::{DataFusionError, Result},
    datasource::file_format::file_compression_type::FileCompressionType,
};
use futures::{StreamExt, TryStreamExt, stream, stream::BoxStream};
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, path::Path,
};
use tokio::{runtime::Handle, task::JoinHandle};

use super::{cells::Cells, error::external};
use crate::source::{
    Items, Rewrite, Shape,
    beginning::{BYTE_ORDER_MARK, Judge, marks},
    reason::own_io,
};

/// Bytes of JSON that are looked at at once.
const PIECE_BYTES: usize = 256 << 10;
/// Bytes that one task reads; large enough that starting the task costs little.
const CHUNK_BYTES: u64 = 1 << 20;

/// Why the content of a file is invalid. [`super::file_errors`] adds the name of the file.
#[derive(Debug, thiserror::Error)]
#[error("after row {row}: {reason}")]
pub(super) struct Broken {
    /// Rows before the broken one.
    pub(super) row: u64,
    /// What is wrong, without data.
    pub(super) reason: String,
}

impl Broken {
    pub(super) fn open_quotation(row: u64) -> Self {
        Self { row, reason: "a quotation that begins in the next row is never closed".to_owned() }
    }
}

/// The text of a file. To be read in a blocking task: it waits for the store.
pub(super) async fn open(
    store: &dyn ObjectStore,
    file: &Path,
    compression: FileCompressionType,
) -> Result<Box<dyn Read + Send>> {
    text(store.get(file).await?.payload, compression)
}

fn text(payload: GetResultPayload, compression: FileCompressionType) -> Result<Box<dyn Read + Send>> {
    let bytes: Box<dyn Read + Send> = match payload {
        GetResultPayload::File(file, _) => Box::new(file),
        GetResultPayload::Stream(stream) => {
            Box::new(Fetched { stream, rest: Bytes::new(), runtime: Handle::current() })
        }
    };
    Ok(Box::new(WithoutMark::Unread(compression.convert_read(bytes)?)))
}

/// The bytes of a response of a store.
struct Fetched {
    stream: BoxStream<'static, object_store::Result<Bytes>>,
    rest: Bytes,
    runtime: Handle,
}

impl Read for Fetched {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            match self.runtime.block_on(self.stream.next()) {
                Some(bytes) => self.rest = bytes.map_err(io::Error::other)?,
                None => return Ok(0),
            }
        }
        let bytes = self.rest.split_to(buffer.len().min(self.rest.len()));
        buffer[..bytes.len()].copy_from_slice(&bytes);
        Ok(bytes.len())
    }
}

/// Skips byte order marks. Fails if the file is no text.
enum WithoutMark {
    Unread(Box<dyn Read + Send>),
    Read(io::Chain<Cursor<Vec<u8>>, Box<dyn Read + Send>>),
}

impl Read for WithoutMark {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Read(rest) => rest.read(buffer),
            Self::Unread(bytes) => {
                let mut judge = Judge::default();
                let start = loop {
                    // A byte at a time, of which there are few, so that nothing is read that is not returned.
                    let mut next = Vec::new();
                    bytes.by_ref().take(1).read_to_end(&mut next)?;
                    let next = next.first().copied();
                    if let Some(start) = judge.take(next)? {
                        break start;
                    }
                };
                let bytes = std::mem::replace(bytes, Box::new(io::empty()));
                *self = Self::Read(Cursor::new(start).chain(bytes));
                self.read(buffer)
            }
        }
    }
}

/// The objects of an array of JSON as lines; lines stay as they are. Notes in `shape` which of both it is.
pub(super) fn lines(text: Box<dyn Read + Send>, shape: Shape) -> Box<dyn Read + Send> {
    Box::new(JsonLines {
        text,
        items: Items::new(shape),
        piece: vec![0; PIECE_BYTES],
        lines: Vec::new(),
        taken: 0,
        failed: None,
    })
}

struct JsonLines {
    text: Box<dyn Read + Send>,
    items: Items,
    /// For the bytes of `text`; empty at its end.
    piece: Vec<u8>,
    lines: Vec<u8>,
    /// How many bytes of `lines` were taken.
    taken: usize,
    /// Why nothing follows `lines`.
    failed: Option<io::Error>,
}

impl Read for JsonLines {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.taken == self.lines.len() && !self.piece.is_empty() {
            self.lines.clear();
            self.taken = 0;
            let rewritten = match self.text.read(&mut self.piece)? {
                0 => {
                    self.piece.clear();
                    self.items.finish(&mut self.lines)
                }
                read => self.items.push(&self.piece[..read], &mut self.lines),
            };
            if let Err(reason) = rewritten {
                self.piece.clear();
                self.failed = Some(own_io(reason));
            }
        }
        // The rows before the error come first.
        if self.taken == self.lines.len()
            && let Some(error) = self.failed.take()
        {
            return Err(error);
        }
        let read = (&self.lines[self.taken..]).read(buffer)?;
        self.taken += read;
        Ok(read)
    }
}

/// A store whose files are text for readers, which are told that the files are not compressed.
pub(super) struct TextStore {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) compression: FileCompressionType,
    /// The dialect of CSV files; `None` for JSON.
    pub(super) cells: Option<Cells>,
}

impl fmt::Debug for TextStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

impl fmt::Display for TextStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

/// The text of a file in pieces.
struct Chunks {
    text: Box<dyn Read + Send>,
    cells: Option<Cells>,
}

type Running = JoinHandle<Result<Option<(Bytes, Chunks)>>>;

impl Chunks {
    fn next(mut self) -> Result<Option<(Bytes, Self)>> {
        let mut chunk = Vec::new();
        (&mut self.text).take(CHUNK_BYTES).read_to_end(&mut chunk).map_err(DataFusionError::IoError)?;
        if let Some(cells) = &mut self.cells {
            cells.read(&chunk);
        }
        if !chunk.is_empty() {
            return Ok(Some((chunk.into(), self)));
        }
        match self.cells.and_then(|cells| cells.rows_before_open_quotation()) {
            Some(row) => Err(external(Broken::open_quotation(row))),
            None => Ok(None),
        }
    }

    /// Reads one chunk ahead of the reader, in tasks that do not wait for it.
    fn stream(self) -> BoxStream<'static, object_store::Result<Bytes>> {
        fn start(chunks: Chunks) -> Running {
            tokio::task::spawn_blocking(move || chunks.next())
        }
        let rest = |running: Running| async move {
            let next = running.await.map_err(|source| object_store::Error::JoinError { source })?;
            Ok(next.map_err(as_store_error)?.map(|(chunk, chunks)| (chunk, start(chunks))))
        };
        // The first task starts when the reader asks for bytes: it opens files ahead of time.
        stream::once(async move { stream::try_unfold(start(self), rest) }).flatten().boxed()
    }
}

/// The error of a store is returned as it is, any other inside one.
fn as_store_error(error: DataFusionError) -> object_store::Error {
    let generic = |error: DataFusionError| object_store::Error::Generic { store: "text", source: Box::new(error) };
    match error {
        DataFusionError::IoError(error) if error.get_ref().is_some_and(|inner| inner.is::<object_store::Error>()) => {
            match error.downcast::<object_store::Error>() {
                Ok(error) => error,
                Err(error) => generic(DataFusionError::IoError(error)),
            }
        }
        error => generic(error),
    }
}

#[async_trait]
impl ObjectStore for TextStore {
    async fn get_opts(&self, file: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        if options.head {
            return self.store.get_opts(file, options).await;
        }
        if let Some(range) = &options.range {
            let is_start = matches!(range, GetRange::Bounded(Range { start: 0, .. }) | GetRange::Offset(0));
            let found = self.store.get_opts(file, options).await?;
            return Ok(if is_start && may_have_mark(&found) { with_blank_mark(found) } else { found });
        }
        let found = self.store.get_opts(file, options).await?;
        let (meta, range, attributes) = (found.meta, found.range, found.attributes);
        let text = text(found.payload, self.compression).map_err(as_store_error)?;
        let text = if self.cells.is_none() { lines(text, Shape::default()) } else { text };
        let payload = GetResultPayload::Stream(Chunks { text, cells: self.cells.clone() }.stream());
        Ok(GetResult { payload, meta, range, attributes })
    }

    async fn put_opts(&self, file: &Path, payload: PutPayload, options: PutOptions) -> object_store::Result<PutResult> {
        self.store.put_opts(file, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        file: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(file, options).await
    }

    fn delete_stream(
        &self,
        files: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.store.delete_stream(files)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.store.copy_opts(from, to, options).await
    }
}

/// Looks at local files, whose reader is faster than a stream.
fn may_have_mark(found: &GetResult) -> bool {
    let GetResultPayload::File(file, _) = &found.payload else { return true };
    let mut start = [0; BYTE_ORDER_MARK.len()];
    file.read_exact_at(&mut start, 0).is_ok() && start == BYTE_ORDER_MARK
}

/// The beginning of a file of which several tasks read parts: they count its bytes, so empty lines replace the mark.
fn with_blank_mark(found: GetResult) -> GetResult {
    let (meta, range, attributes) = (found.meta.clone(), found.range.clone(), found.attributes.clone());
    let mut is_first = true;
    let blank = move |bytes: Bytes| {
        let marks = if std::mem::take(&mut is_first) { marks(&bytes) } else { 0 };
        if marks == 0 {
            return bytes;
        }
        let mut blank = bytes.to_vec();
        blank[..marks].fill(b'\n');
        blank.into()
    };
    let payload = GetResultPayload::Stream(found.into_stream().map_ok(blank).boxed());
    GetResult { payload, meta, range, attributes }
}
