//! Push decoding: one loop for all formats that are read from the beginning of a file.

use std::{io::Cursor, mem, sync::atomic::Ordering, time::Duration};

use arrow::{array::RecordBatch, datatypes::SchemaRef, error::ArrowError};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt},
    time::timeout,
};

use super::{
    Format, InputFile, Mark, SourceError, bytes,
    csv::Csv,
    ipc::Ipc,
    json::Json,
    json_array::Shape,
    lines::Lines,
    plan::FilePlan,
    reason::{Broken, own},
    sieve::{Malformed, Noted},
};

/// Maximum bytes of a line of text. A longer line means a damaged file or a decompression bomb.
pub(super) const MAX_ROW_BYTES: usize = 256 << 20;

/// Rows of a batch of CSV or JSON.
pub(super) const BATCH_ROWS: usize = 8192;
/// A batch of CSV or JSON ends with the row that reaches this many bytes, so that few huge cells lie in one batch.
pub(super) const BATCH_BYTES: usize = 1 << 20;
/// Maximum bytes of such a batch: rows below the limit above, plus one huge row.
const MAX_BATCH_BYTES: usize = 512 << 20;
/// A batch of up to this many bytes can be decoded again when it holds a broken row.
const MAX_KEPT_BYTES: usize = 8 << 20;

/// How long the end of an input waits for a running read, which on an idle pipe never ends.
const PENDING_READ: Duration = Duration::from_millis(100);

/// Decodes bytes to rows.
pub(crate) trait Decode: Send {
    /// Decodes a prefix of `bytes` and returns its length, which is less than that of `bytes` when rows must be flushed
    /// first.
    fn decode(&mut self, bytes: &[u8]) -> Result<usize, ArrowError>;
    /// Ends the input.
    fn finish(&mut self) -> Result<(), ArrowError>;
    /// Whether rows must be flushed before more bytes are decoded, given the lengths of what the last call decoded and
    /// was passed.
    fn is_full(&self, used: usize, offered: usize) -> bool {
        used < offered
    }
    /// Returns the complete rows, if any.
    fn flush(&mut self) -> Result<Option<RecordBatch>, ArrowError>;
    /// Number of complete rows that are not flushed, if the decoder knows it.
    fn waiting(&self) -> usize {
        0
    }
    /// The row that an error is about, counted from the first row of this decoder, if the error holds it.
    fn broken_row(&self, _: &ArrowError) -> Option<u64> {
        None
    }
    /// After a flush: the bytes that were passed in and belong to rows that are not flushed.
    fn held(&self) -> Vec<u8> {
        Vec::new()
    }
    /// A decoder that returns each row by itself, `from_start` of the file or from the start of a row; `None` where rows
    /// are not decoded again.
    fn again(&self, _schema: &SchemaRef, _read: &[usize], _from_start: bool) -> Option<Box<dyn Decode>> {
        None
    }
}

/// The rows of a file, from its beginning.
///
/// CSV and JSON are decoded in batches. When a batch holds a broken row, its bytes are decoded again row by row, so that
/// the rows before the broken one are returned and the error names the row.
pub(super) struct Decoded {
    bytes: bytes::Bytes,
    decoder: Box<dyn Decode>,
    schema: SchemaRef,
    read: Vec<usize>,
    taken: bytes::Taken,
    /// Number of rows returned.
    rows: u64,
    /// Malformed rows that were left out, in the bytes decoded so far.
    noted: Noted,
    /// The first row of the decoder.
    first: u64,
    /// Whether a broken batch is decoded again.
    restarts: bool,
    /// The bytes of the current batch; `None` when there are too many, or they are not needed.
    kept: Option<Vec<u8>>,
    /// Bytes since the last batch, to limit the size of a row that does not end.
    pending: usize,
    /// Bytes that were read and not decoded yet.
    left: usize,
    /// Whether a read is running; its bytes would be lost if it were not awaited.
    asked: bool,
    /// Where the bytes are in the file, and how many were decoded.
    origin: bytes::Origin,
    decoded: u64,
    shape: Shape,
}

impl Decoded {
    pub(super) async fn open(plan: &FilePlan) -> Result<Self, SourceError> {
        let (taken, noted, shape) = (bytes::Taken::default(), Noted::default(), Shape::default());
        let (bytes, origin) = bytes::open(&plan.file, &taken, &noted, &shape).await?;
        let decoded = Self::new(plan, bytes, (taken, noted), BATCH_ROWS)?;
        Ok(Self { origin, shape, ..decoded })
    }

    /// Reads from a row on.
    pub(super) async fn open_at(plan: &FilePlan, mark: Mark) -> Result<Self, SourceError> {
        let (taken, noted) = (bytes::Taken::default(), Noted::default());
        let bytes = bytes::open_at(&plan.file, mark.byte, &taken).await?;
        let mut decoded = Self::new(plan, bytes, (taken, noted), BATCH_ROWS)?;
        if plan.file.format.has_cells() {
            let csv = Csv::from_row(&plan.schema, plan.read.clone(), plan.file.cells(), BATCH_ROWS);
            decoded.decoder = Box::new(csv.map_err(|e| SourceError::malformed(&plan.file, mark.row, e))?);
        }
        Ok(Self { rows: mark.row, first: mark.row, ..decoded })
    }

    /// Where the next row begins, if that is known.
    pub(super) fn mark(&self) -> Option<Mark> {
        // Bytes that were rewritten are not those of the file.
        let is_known = self.rows > 0 && !self.shape.is_array() && self.decoder.held().is_empty();
        self.origin.filter(|_| is_known).map(|before| Mark { row: self.rows, byte: before + self.decoded })
    }

    /// Reads `bytes` in batches of at most `batch_rows` rows.
    fn new(
        plan: &FilePlan,
        bytes: bytes::Bytes,
        (taken, noted): (bytes::Taken, Noted),
        batch_rows: usize,
    ) -> Result<Self, SourceError> {
        let malformed = |e: ArrowError| SourceError::malformed(&plan.file, 0, e);
        let decoder: Box<dyn Decode> = match plan.file.format {
            Format::Csv | Format::Tsv => {
                Box::new(Csv::new(&plan.schema, plan.read.clone(), plan.file.cells(), batch_rows))
            }
            Format::Json => {
                let wanted = plan.schema.project(&plan.read).map_err(malformed)?;
                Box::new(Json::new(wanted.into(), batch_rows, plan.wants_all).map_err(malformed)?)
            }
            Format::Arrow => Box::new(Ipc::new(plan.read.clone())),
            // Parquet has a reader of its own.
            Format::Text | Format::Parquet => Box::new(Lines::new()),
        };
        let restarts = plan.file.format.has_cells() || plan.file.format == Format::Json;
        Ok(Self {
            bytes,
            decoder,
            schema: SchemaRef::clone(&plan.schema),
            read: plan.read.clone(),
            taken,
            rows: 0,
            noted,
            first: 0,
            restarts,
            kept: restarts.then(Vec::new),
            pending: 0,
            left: 0,
            asked: false,
            origin: None,
            decoded: 0,
            shape: Shape::default(),
        })
    }

    /// Compressed bytes that were read.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// The malformed rows before row `end` that were not asked for yet.
    pub(super) fn malformed(&self, end: u64) -> Vec<Malformed> {
        let mut noted = self.noted.lock();
        let found = noted.partition_point(|malformed| malformed.row < end);
        noted.drain(..found).collect()
    }

    /// The rows that are complete in the bytes read so far, and in those of a running read.
    pub(super) async fn buffered(&mut self, file: &InputFile) -> Result<Option<RecordBatch>, SourceError> {
        while self.left > 0 || self.asked {
            let bytes = match timeout(PENDING_READ, self.bytes.fill_buf()).await {
                Ok(bytes) => bytes.map_err(|e| bytes::read_error(file, self.rows, e))?,
                Err(_) => break,
            };
            self.asked = false;
            let offered = bytes.len();
            let used = self.decoder.decode(bytes).map_err(|e| SourceError::malformed(file, self.rows, e))?;
            self.bytes.consume(used);
            self.left = offered - used;
            if self.decoder.is_full(used, offered) {
                break;
            }
        }
        let batch = self.decoder.flush().map_err(|e| SourceError::malformed(file, self.rows, e))?;
        Ok(self.out(batch))
    }

    /// The next rows.
    pub(super) async fn next(&mut self, file: &InputFile) -> Result<Option<RecordBatch>, SourceError> {
        loop {
            match self.batch(file).await? {
                Ok(batch) => return Ok(self.out(batch)),
                Err(_) if self.restart() => {}
                Err(Broken { row, reason }) => return Err(SourceError::malformed(file, row, reason)),
            }
        }
    }

    /// Reads until a batch is complete. The inner error is the decoder's.
    async fn batch(&mut self, file: &InputFile) -> Result<Result<Option<RecordBatch>, Broken>, SourceError> {
        loop {
            self.asked = true;
            let bytes = self.bytes.fill_buf().await.map_err(|e| bytes::read_error(file, self.rows, e))?;
            self.asked = false;
            if bytes.is_empty() {
                let last = self.decoder.finish().and_then(|()| self.decoder.flush());
                return Ok(last.map_err(|e| self.broken(e, 0)));
            }
            let offered = bytes.len();
            let used = match self.decoder.decode(bytes) {
                Ok(used) => used,
                Err(e) => return Ok(Err(self.broken(e, self.decoder.waiting()))),
            };
            self.kept = self.kept.take().filter(|kept| kept.len() + used <= MAX_KEPT_BYTES);
            if let Some(kept) = &mut self.kept {
                kept.extend_from_slice(&bytes[..used]);
            }
            self.bytes.consume(used);
            self.left = offered - used;
            self.pending += used;
            self.decoded += used as u64;
            if self.decoder.is_full(used, offered) {
                self.pending = 0;
                match self.decoder.flush() {
                    Ok(None) => {}
                    Ok(batch) => return Ok(Ok(batch)),
                    Err(e) => return Ok(Err(self.broken(e, 0))),
                }
            } else if self.pending > MAX_BATCH_BYTES && file.format.is_untyped() {
                let reason = own("the next row has more than 512 MiB; is a quote or bracket not closed?");
                return Ok(Err(self.broken(reason, self.decoder.waiting())));
            }
        }
    }

    /// An error with its row, or with the first row of its batch where neither the error nor the decoder says it.
    fn broken(&self, reason: ArrowError, waiting: usize) -> Broken {
        let row = self.decoder.broken_row(&reason).map_or(self.rows + waiting as u64, |row| self.first + row);
        Broken { row, reason }
    }

    /// Goes back to the start of the batch, to decode it row by row; false when that is impossible.
    fn restart(&mut self) -> bool {
        let Some(kept) = self.kept.take().filter(|_| self.restarts) else { return false };
        let Some(decoder) = self.decoder.again(&self.schema, &self.read, self.rows == 0) else { return false };
        let rest = mem::replace(&mut self.bytes, Box::new(tokio::io::empty()));
        self.bytes = Box::new(Cursor::new(kept).chain(rest));
        (self.decoder, self.first, self.restarts, self.pending) = (decoder, self.rows, false, 0);
        self.origin = None;
        true
    }

    /// Counts the rows of a batch that is returned.
    fn out(&mut self, batch: Option<RecordBatch>) -> Option<RecordBatch> {
        let rows = batch.as_ref().map_or(0, RecordBatch::num_rows);
        if rows > 0 {
            self.rows += rows as u64;
            self.kept = self.restarts.then(|| self.decoder.held());
        }
        batch
    }
}

#[cfg(test)]
mod tests;
