//! A file as a stream of decompressed bytes.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use async_compression::tokio::bufread::{GzipDecoder, ZstdDecoder};
use object_store::{ObjectMeta, ObjectStore, buffered, path::Path};
use tempfile::TempPath;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncSeekExt, AsyncWriteExt, BufReader};

use super::{
    Compression, Format, InputFile, STDIN, SourceError,
    beginning::Judge,
    json_array::{Items, Shape},
    mapped::Rewritten,
    reading::OnMalformed,
    reason::of_own_io,
    sieve::{Noted, Sieve},
};
use crate::stores::{Location, StoreError, Stores};

/// Bytes of one request to the store, large enough that latency does not dominate.
const REQUEST_BYTES: usize = 4 << 20;
/// Maximum ratio of the size of a Parquet file to its compressed size. Columns are compressed already, so real files stay
/// far below it; zstd compresses zeros to a thousandth.
const MAX_RATIO: u64 = 200;
/// Size of the buffer after the decompressor.
const BUFFER_BYTES: usize = 256 << 10;

/// Offset of a stream's first byte in its file; `None` if the stream is not a verbatim part of the file.
pub(super) type Origin = Option<u64>;

/// A stream of decompressed bytes.
pub(super) type Bytes = Box<dyn AsyncBufRead + Send + Unpin>;

/// A file, read in ranges. Most stores would close the connection of one long request while the device is busy.
pub(super) struct Opened {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) path: Path,
    pub(super) size: u64,
    /// Deletes the decompressed copy when dropped.
    _spool: Option<TempPath>,
}

impl Opened {
    /// Opens a file in a store.
    fn new(location: &Location, file: &InputFile) -> Self {
        Self { store: Arc::clone(&location.store), path: location.path.clone(), size: file.size, _spool: None }
    }

    /// Opens a file for random access. A compressed file is decompressed to a temporary file first, and standard input is
    /// copied to one.
    pub(super) async fn whole(file: &InputFile) -> Result<Self, SourceError> {
        let Some(location) = &file.location else {
            let spool = file.pipe.spooled(file).await?;
            let (store, path) = (Arc::clone(&spool.location.store), spool.location.path.clone());
            return Ok(Self { store, path, size: spool.size, _spool: None });
        };
        let opened = Self::new(location, file);
        if file.compression == Compression::None {
            return Ok(opened);
        }
        let most = opened.size.saturating_mul(MAX_RATIO).max(1 << 20);
        let temporary = |e| SourceError::temporary(file, e);
        let (spool, path) = tempfile::NamedTempFile::new().map_err(temporary)?.into_parts();
        let mut spool = tokio::fs::File::from_std(spool);
        let mut decompressed = decompress(opened, file.compression, &Taken::default()).take(most + 1);
        let size = copy_between(&mut decompressed, &mut spool, file).await?;
        if size > most {
            return Err(SourceError::malformed(
                file,
                0,
                format!("decompresses to more than {MAX_RATIO} times its size"),
            ));
        }
        let place = Stores::with_settings([]).locate(&path.to_string_lossy())?;
        Ok(Self { store: place.store, path: place.path, size, _spool: Some(path) })
    }

    /// Reads from the start.
    pub(super) fn reader(&self) -> buffered::BufReader {
        let meta = ObjectMeta {
            location: self.path.clone(),
            last_modified: Default::default(),
            size: self.size,
            e_tag: None,
            version: None,
        };
        buffered::BufReader::with_capacity(Arc::clone(&self.store), &meta, REQUEST_BYTES)
    }
}

/// Copies all bytes to a temporary file. A failure to read is an error of the input, a failure to write one of the local disk.
pub(super) async fn copy_between(
    from: &mut (impl AsyncBufRead + Unpin),
    to: &mut tokio::fs::File,
    file: &InputFile,
) -> Result<u64, SourceError> {
    let temporary = |e| SourceError::temporary(file, e);
    let mut size = 0;
    loop {
        let bytes = from.fill_buf().await.map_err(|e| read_error(file, 0, e))?;
        if bytes.is_empty() {
            break;
        }
        let n = bytes.len();
        to.write_all(bytes).await.map_err(temporary)?;
        from.consume(n);
        size += n as u64;
    }
    to.flush().await.map_err(temporary)?;
    Ok(size)
}

/// Number of compressed bytes that were read from a file.
pub(super) type Taken = Arc<AtomicU64>;

/// The decompressed bytes of `file`, without byte order marks: rows of cells, lines with an object each, or the bytes as
/// they are. Malformed rows are left out and noted if the reading of the file says so. Notes in `shape` whether JSON is an
/// array.
pub(super) async fn open(
    file: &InputFile,
    taken: &Taken,
    noted: &Noted,
    shape: &Shape,
) -> Result<(Bytes, Origin), SourceError> {
    let bytes = match &file.location {
        None => file.pipe.read()?,
        Some(location) => decompress(Opened::new(location, file), file.compression, taken),
    };
    let (bytes, origin) = prepared(file, bytes, noted, shape).await?;
    let is_as_stored = file.location.is_some() && file.compression == Compression::None;
    Ok((bytes, origin.filter(|_| is_as_stored)))
}

/// The bytes of a file that is not compressed, from the beginning of a row.
pub(super) async fn open_at(file: &InputFile, byte: u64, taken: &Taken) -> Result<Bytes, SourceError> {
    let Some(location) = &file.location else {
        return Err(SourceError::malformed(file, 0, "standard input cannot be read again from here"));
    };
    let opened = Opened::new(location, file);
    let mut reader = opened.reader();
    reader.seek(io::SeekFrom::Start(byte)).await.map_err(|e| read_error(file, 0, e))?;
    taken.store(byte, Ordering::Relaxed);
    Ok(Box::new(Measured { reader, taken: Arc::clone(taken), _opened: opened }))
}

/// The same, to look at the beginning. Standard input can be opened once more after that. Notes in `shape` whether JSON is
/// an array.
pub(super) async fn peek(file: &InputFile, shape: &Shape) -> Result<Bytes, SourceError> {
    let bytes = match &file.location {
        None => file.pipe.peek()?,
        Some(location) => decompress(Opened::new(location, file), file.compression, &Taken::default()),
    };
    Ok(prepared(file, bytes, &Noted::default(), shape).await?.0)
}

async fn prepared(
    file: &InputFile,
    mut bytes: Bytes,
    noted: &Noted,
    shape: &Shape,
) -> Result<(Bytes, Origin), SourceError> {
    if !file.format.is_untyped() {
        return Ok((bytes, None));
    }
    let (start, skipped) = start(file, &mut bytes).await?;
    // White space before JSON may be left out.
    let is_kept = file.format != Format::Json || start.first().is_some_and(|byte| !byte.is_ascii_whitespace());
    let bytes = if start.is_empty() { bytes } else { Box::new(io::Cursor::new(start).chain(bytes)) };
    let bytes: Bytes = match file.format {
        Format::Json => Box::new(Rewritten::new(bytes, Items::new(shape.clone()))),
        _ => bytes,
    };
    let noted = (file.reading.malformed == OnMalformed::Skip).then(|| Noted::clone(noted));
    // Of standard input complete rows are decoded at any time, of other files as the decoder likes.
    if noted.is_none() && file.location.is_some() {
        return Ok((bytes, is_kept.then_some(skipped)));
    }
    Ok(match file.format {
        Format::Csv | Format::Tsv => (Box::new(Rewritten::new(bytes, Sieve::of_cells(file.cells(), noted))), None),
        Format::Json => (Box::new(Rewritten::new(bytes, Sieve::of_objects(shape.clone(), noted))), None),
        _ => (bytes, Some(skipped)),
    })
}

/// Skips byte order marks, and returns what else was read to see that the file is text, and the bytes of the marks. A pipe may
/// deliver it in pieces.
async fn start(file: &InputFile, bytes: &mut Bytes) -> Result<(Vec<u8>, u64), SourceError> {
    let (mut judge, mut read) = (Judge::default(), 0);
    loop {
        let next = bytes.fill_buf().await.map_err(|e| read_error(file, 0, e))?.first().copied();
        bytes.consume(usize::from(next.is_some()));
        read += u64::from(next.is_some());
        let (name, format) = (file.to_string(), file.format);
        match judge.take(next) {
            Ok(Some(start)) => {
                let skipped = read - start.len() as u64;
                return Ok((start, skipped));
            }
            Ok(None) => {}
            Err(foreign) => return Err(SourceError::Foreign { file: name, format, foreign }),
        }
    }
}

/// The first bytes of a stream, fewer than `length` at its end.
pub(super) async fn first(file: &InputFile, bytes: &mut Bytes, length: u64) -> Result<Vec<u8>, SourceError> {
    let mut first = Vec::new();
    bytes.take(length).read_to_end(&mut first).await.map_err(|e| read_error(file, 0, e))?;
    Ok(first)
}

/// Standard input as a file: a read of the locked handle would block a worker of the runtime.
pub(super) fn stdin() -> Result<Bytes, SourceError> {
    let failed = |source| StoreError::Local { operation: "open", address: STDIN.to_owned(), source };
    let handle = io::stdin().as_fd().try_clone_to_owned().map_err(failed)?;
    let mut file = std::fs::File::from(handle);
    if !is_blocking(&file)
        // Opened again: flags of this descriptor are shared with other processes.
        && let Ok(own) = std::fs::File::open("/dev/stdin")
    {
        file = own;
    }
    Ok(Box::new(BufReader::new(tokio::fs::File::from_std(file))))
}

/// Whether reads block: some programs pass a pipe that is set to non-blocking.
fn is_blocking(file: &std::fs::File) -> bool {
    // SAFETY: the descriptor is open for as long as `file` is borrowed, and F_GETFL accesses no memory.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    flags < 0 || flags & libc::O_NONBLOCK == 0
}

fn decompress(opened: Opened, compression: Compression, taken: &Taken) -> Bytes {
    let compressed = Measured { reader: opened.reader(), taken: Arc::clone(taken), _opened: opened };
    match compression {
        Compression::None => Box::new(compressed),
        Compression::Gzip => {
            let mut decoder = GzipDecoder::new(compressed);
            decoder.multiple_members(true);
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
        }
        Compression::Zstd => {
            let mut decoder = ZstdDecoder::new(compressed);
            decoder.multiple_members(true);
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
        }
    }
}

/// Counts the bytes read, and keeps the temporary file while it is read.
struct Measured {
    reader: buffered::BufReader,
    taken: Taken,
    _opened: Opened,
}

impl tokio::io::AsyncRead for Measured {
    fn poll_read(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
        buf: &mut tokio::io::ReadBuf<'_>,
    ) -> std::task::Poll<io::Result<()>> {
        std::pin::Pin::new(&mut self.reader).poll_read(cx, buf)
    }
}

impl AsyncBufRead for Measured {
    fn poll_fill_buf(
        self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<io::Result<&[u8]>> {
        std::pin::Pin::new(&mut self.get_mut().reader).poll_fill_buf(cx)
    }

    fn consume(mut self: std::pin::Pin<&mut Self>, amount: usize) {
        self.taken.fetch_add(amount as u64, Ordering::Relaxed);
        std::pin::Pin::new(&mut self.reader).consume(amount);
    }
}

/// An error of the store, or of the compressed data.
pub(super) fn read_error(file: &InputFile, row: u64, error: io::Error) -> SourceError {
    if let Some(reason) = of_own_io(&error) {
        return SourceError::malformed(file, row, reason);
    }
    let store_error = error.get_ref().and_then(|inner| inner.downcast_ref::<object_store::Error>());
    if matches!(store_error, Some(object_store::Error::Precondition { .. })) {
        return SourceError::Changed { file: file.to_string() };
    }
    let from_store = store_error.is_some();
    if from_store || file.location.is_none() {
        let address = file.location.as_ref().map_or_else(|| STDIN.to_owned(), ToString::to_string);
        return StoreError::Local { operation: "read", address, source: error }.into();
    }
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the compressed data end early: the file is cut off".to_owned(),
        _ => format!("the compressed data are damaged: {error}"),
    };
    SourceError::malformed(file, row, reason)
}
