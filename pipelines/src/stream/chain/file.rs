//! The file of a partition that is being filled, and the encoded file that waits to be published.
//!
//! A file is encoded while rows arrive. Its bytes are in memory, or, above a bound, in a file on a local disk that has no
//! name: the system deletes it when it is closed, however the process ends, so nothing has to be swept.

use std::{
    fmt,
    fs::File,
    io::{self, Write},
    mem,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use arrow::{array::RecordBatch, datatypes::SchemaRef};
use bytes::Bytes;
use parquet::errors::ParquetError;

use super::{
    ChainError,
    layout::Layout,
    span::{Rejected, Span},
};
use crate::{
    sink::{Encoder, Encoding, SinkError},
    stream::{
        TopicPartition,
        rotation::{Limits, Rotation},
    },
};

/// Rows of this size are encoded at once. More are encoded on a thread of their own, so that no other partition waits.
const INLINE_BYTES: u64 = 64 << 10;

/// How the files of a dataset are written.
#[derive(Debug, Clone)]
pub struct FileFormat {
    /// Columns of the rows.
    pub schema: SchemaRef,
    /// How they are encoded.
    pub encoding: Encoding,
    /// The pairs `elmo.*` of every footer.
    pub footer: Vec<(String, String)>,
    /// Where large files wait.
    pub spill: Spill,
    /// When files are closed.
    pub limits: Limits,
}

/// Where the bytes of a file are until it is published.
#[derive(Debug, Clone, Default)]
pub struct Spill {
    /// The folder for files above [`Spill::above`], which exists; `None`: all of them are in memory. So are those for which
    /// it has no room.
    pub folder: Option<PathBuf>,
    /// Bytes up to which a file is in memory.
    pub above: usize,
}

impl Spill {
    /// Checks that files can be written into the folder.
    ///
    /// # Errors
    /// [`ChainError::Spill`] when they cannot.
    pub fn check(&self) -> Result<(), ChainError> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let written = tempfile::tempfile_in(folder).and_then(|mut file| file.write_all(b"elmo"));
        written.map_err(|source| ChainError::Spill { folder: folder.clone(), source })
    }
}

/// Who writes a partition: this process, and which of its files.
#[derive(Debug)]
pub struct ChainId {
    pub(super) partition: TopicPartition,
    pub(super) layout: Layout,
    pub(super) writer: Arc<Writer>,
}

/// A process that writes. Its id is random, and the number of a file is used once, whatever partition it is for: a
/// partition that is revoked and assigned again does not repeat numbers.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) id: String,
    pub(super) attempts: AtomicU64,
}

/// The file of a partition that is being filled.
pub struct OpenFile {
    id: Arc<ChainId>,
    span: Span,
    footer: Vec<(String, String)>,
    spill_folder: Option<PathBuf>,
    /// `None` while rows are encoded on another thread; if that is given up in the middle, they are lost.
    encoder: Option<Encoder<Held>>,
    rotation: Rotation,
}

impl fmt::Debug for OpenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenFile").field("span", &self.span).finish_non_exhaustive()
    }
}

impl OpenFile {
    /// Begins the file whose messages begin at `start`: the end of the chain, or the end of the file that is published
    /// before this one.
    ///
    /// # Errors
    /// [`ChainError::Sink`] when Parquet has no type for a column.
    pub fn new(id: &Arc<ChainId>, start: i64, format: &FileFormat) -> Result<Self, ChainError> {
        let held = Held::new(&format.spill);
        let encoder = Encoder::new(held, &format.schema, &format.encoding);
        let span = Span {
            partition: id.partition.clone(),
            start,
            end: start,
            rows: 0,
            rejected: Rejected::new(),
            gaps: Vec::new(),
            generation: id.layout.generation,
            writer: id.writer.id.clone(),
            attempt: id.writer.attempts.fetch_add(1, Ordering::Relaxed),
        };
        let file = Self {
            id: Arc::clone(id),
            span,
            footer: format.footer.clone(),
            spill_folder: format.spill.folder.clone(),
            encoder: None,
            rotation: Rotation::new(format.limits),
        };
        let encoder = encoder.map_err(|e| file.failed(e))?;
        Ok(Self { encoder: Some(encoder), ..file })
    }

    /// Adds the rows of the messages up to `end`, which is exclusive, and counts those that were rejected. There may be
    /// no rows, if all messages were skipped.
    ///
    /// If the future is dropped before it is ready, the file cannot be used any more.
    ///
    /// # Errors
    /// [`ChainError::Sink`] when the rows do not match the schema, [`ChainError::Spill`] when the local disk fails,
    /// [`ChainError::Aborted`] after an error or after a write that was given up.
    pub async fn write(
        &mut self,
        rows: &RecordBatch,
        end: i64,
        rejected: &Rejected,
        now: Instant,
    ) -> Result<(), ChainError> {
        debug_assert!(end >= self.span.end, "offsets go up");
        let mut encoder = self.encoder.take().ok_or_else(|| self.aborted())?;
        let units = encoder.push(rows);
        let size = units.iter().map(|unit| unit.bytes).sum();
        let encoded =
            off_thread(size, move || units.iter().try_for_each(|unit| encoder.encode(unit)).map(|()| encoder));
        let encoder = encoded.await.map_err(|e| self.failed(e))?;
        self.rotation.on_rows(now, rows.num_rows() as u64, encoder.bytes());
        self.encoder = Some(encoder);
        for (label, count) in rejected {
            *self.span.rejected.entry(label.clone()).or_default() += count;
        }
        self.span.rows += rows.num_rows() as u64;
        self.span.end = end;
        Ok(())
    }

    /// Records that the broker has deleted the messages in this range, which follows what was written.
    pub fn gap(&mut self, lost: Range<i64>) {
        debug_assert!(lost.start >= self.span.end && lost.end >= lost.start, "offsets go up");
        self.span.end = lost.end;
        self.span.gaps.push(lost);
    }

    /// Ends the file. Messages up to `end` are in it or were skipped.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub async fn finish(mut self, end: i64) -> Result<EncodedFile, ChainError> {
        debug_assert!(end >= self.span.end, "offsets go up");
        self.span.end = end;
        let mut encoder = self.encoder.take().ok_or_else(|| self.aborted())?;
        let footer: Vec<_> = self.footer.iter().cloned().chain(self.span.pairs()).collect();
        let encoded =
            off_thread(encoder.bytes(), move || encoder.finish(&footer).map(|()| mem::take(encoder.out_mut())));
        let held = encoded.await.map_err(|e| self.failed(e))?;
        Ok(EncodedFile { span: self.span, held: held.into(), spill_folder: self.spill_folder })
    }

    /// The offset at which its messages begin.
    pub fn start(&self) -> i64 {
        self.span.start
    }

    /// The offset after the last message that was written.
    pub fn end(&self) -> i64 {
        self.span.end
    }

    /// Rows so far.
    pub fn rows(&self) -> u64 {
        self.span.rows
    }

    /// Size of the file if it ended now; the part that is not yet encoded is estimated.
    pub fn bytes(&self) -> u64 {
        self.encoder.as_ref().map_or(0, Encoder::bytes)
    }

    /// Bytes of it in memory, with the batch of the last rows.
    pub fn memory(&self) -> u64 {
        let on_disk = |encoder: &Encoder<Held>| encoder.out().on_disk();
        self.encoder.as_ref().map_or(0, |encoder| encoder.bytes().saturating_sub(on_disk(encoder)) + encoder.kept())
    }

    /// When it has to be closed.
    pub fn rotation(&self) -> &Rotation {
        &self.rotation
    }

    fn aborted(&self) -> ChainError {
        ChainError::Aborted { partition: self.span.partition.clone() }
    }

    fn failed(&self, error: ParquetError) -> ChainError {
        match (disk_error(error), &self.spill_folder) {
            (Ok(source), Some(folder)) => ChainError::Spill { folder: folder.clone(), source },
            (Ok(source), None) => self.not_encoded(source.to_string()),
            (Err(reason), _) => self.not_encoded(reason),
        }
    }

    fn not_encoded(&self, reason: String) -> ChainError {
        let file = self.id.layout.object(&self.span.partition, self.span.start).to_string();
        SinkError::Encode { file, reason }.into()
    }
}

/// The error of the local disk that caused a Parquet error, or else the message of the Parquet library.
fn disk_error(error: ParquetError) -> Result<io::Error, String> {
    let ParquetError::External(inner) = error else { return Err(error.to_string()) };
    inner.downcast::<io::Error>().map(|error| *error).map_err(|error| error.to_string())
}

/// Runs work on `size` bytes: at once when they are few, or else on a thread for such work.
async fn off_thread<T: Send + 'static>(size: u64, work: impl FnOnce() -> T + Send + 'static) -> T {
    if size < INLINE_BYTES {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        // Such work cannot be cancelled once it runs, so it panicked; or the runtime is shutting down.
        Err(error) => {
            std::panic::resume_unwind(error.try_into_panic().unwrap_or_else(|error| Box::new(error.to_string())))
        }
    }
}

/// A complete file, not yet published.
#[derive(Debug)]
pub struct EncodedFile {
    span: Span,
    held: Whole,
    spill_folder: Option<PathBuf>,
}

impl EncodedFile {
    /// The messages in it.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        match &self.held {
            Whole::Memory(bytes) => bytes.len() as u64,
            Whole::Disk(_, bytes) => *bytes,
        }
    }

    /// Bytes of it in memory.
    pub fn memory(&self) -> u64 {
        match &self.held {
            Whole::Memory(bytes) => bytes.len() as u64,
            Whole::Disk(..) => 0,
        }
    }

    /// Its bytes, read from the local disk if they are there.
    pub(super) async fn read(&self) -> Result<Bytes, ChainError> {
        let (file, length) = match &self.held {
            Whole::Memory(bytes) => return Ok(bytes.clone()),
            Whole::Disk(file, length) => (Arc::clone(file), *length),
        };
        let read = off_thread(INLINE_BYTES, move || {
            let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
            file.read_exact_at(&mut bytes, 0).map(|()| Bytes::from(bytes))
        });
        let folder = self.spill_folder.clone().unwrap_or_default();
        read.await.map_err(|source| ChainError::Spill { folder, source })
    }
}

/// The bytes of a complete file.
#[derive(Debug)]
enum Whole {
    Memory(Bytes),
    Disk(Arc<File>, u64),
}

impl From<Held> for Whole {
    fn from(held: Held) -> Self {
        match held.state {
            State::Memory(bytes) => Self::Memory(bytes.into()),
            State::Disk(file) => Self::Disk(Arc::new(file), held.bytes),
        }
    }
}

/// The bytes of a file that is being encoded.
#[derive(Debug, Default)]
struct Held {
    spill: Spill,
    state: State,
    bytes: u64,
}

#[derive(Debug)]
enum State {
    Memory(Vec<u8>),
    Disk(File),
}

impl Default for State {
    fn default() -> Self {
        Self::Memory(Vec::new())
    }
}

impl Held {
    fn new(spill: &Spill) -> Self {
        Self { spill: spill.clone(), ..Self::default() }
    }
}

impl Held {
    /// Bytes that are not in memory.
    fn on_disk(&self) -> u64 {
        if let State::Disk(_) = self.state { self.bytes } else { 0 }
    }

    /// Moves what is in memory to the disk.
    fn spill(&mut self, folder: &Path) -> io::Result<()> {
        let State::Memory(held) = &self.state else { return Ok(()) };
        let mut file = tempfile::tempfile_in(folder)?;
        file.write_all(held)?;
        self.state = State::Disk(file);
        Ok(())
    }

    /// The disk is full, or gone: the file stays in memory, which counts it.
    fn stay_in_memory(&mut self, error: &io::Error) -> io::Result<()> {
        if let State::Disk(file) = &self.state {
            let mut held = vec![0; usize::try_from(self.bytes).map_err(io::Error::other)?];
            file.read_exact_at(&mut held, 0)?;
            self.state = State::Memory(held);
        }
        if let Some(folder) = self.spill.folder.take() {
            tracing::warn!(folder = %folder.display(), %error, "a file cannot wait here, and stays in memory");
        }
        Ok(())
    }
}

impl Write for Held {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let (State::Memory(held), Some(folder)) = (&self.state, self.spill.folder.clone())
            && held.len() + bytes.len() > self.spill.above
            && let Err(error) = self.spill(&folder)
        {
            self.stay_in_memory(&error)?;
        }
        if let State::Disk(file) = &mut self.state {
            match file.write_all(bytes) {
                Ok(()) => {}
                Err(error) => self.stay_in_memory(&error)?,
            }
        }
        if let State::Memory(held) = &mut self.state {
            held.extend_from_slice(bytes);
        }
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(folder: Option<PathBuf>, state: State, bytes: u64) -> Held {
        Held { spill: Spill { folder, above: 4 }, state, bytes }
    }

    fn in_memory(held: &Held) -> Option<&[u8]> {
        if let State::Memory(bytes) = &held.state { Some(bytes) } else { None }
    }

    #[test]
    fn a_file_that_finds_no_room_on_the_disk_stays_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut spilled = held(Some(folder.path().into()), State::default(), 0);
        spilled.write_all(b"abcd").unwrap();
        assert_eq!((in_memory(&spilled), spilled.on_disk()), (Some(&b"abcd"[..]), 0));
        spilled.write_all(b"e").unwrap();
        assert_eq!((in_memory(&spilled), spilled.on_disk()), (None, 5));

        let gone = folder.path().join("gone");
        assert!(matches!(Spill { folder: Some(gone.clone()), above: 0 }.check(), Err(ChainError::Spill { .. })));
        Spill { folder: Some(folder.path().into()), above: 0 }.check().unwrap();
        let mut kept = held(Some(gone), State::default(), 0);
        kept.write_all(b"abcd").unwrap();
        kept.write_all(b"efgh").unwrap();
        assert_eq!((in_memory(&kept), kept.on_disk(), kept.bytes), (Some(&b"abcdefgh"[..]), 0, 8));

        // A file that cannot be written to any more, as on a disk that is full.
        let path = folder.path().join("file");
        std::fs::write(&path, "abc").unwrap();
        let mut full = held(Some(folder.path().into()), State::Disk(File::open(&path).unwrap()), 3);
        full.write_all(b"defghi").unwrap();
        assert_eq!((in_memory(&full), full.bytes), (Some(&b"abcdefghi"[..]), 9));
    }
}
