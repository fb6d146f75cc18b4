//! Bytes to rows, pushed: one loop serves every format that is read from its beginning.

use std::{sync::atomic::Ordering, time::Duration};

use arrow::{array::RecordBatch, csv, datatypes::SchemaRef, error::ArrowError, json};
use tokio::{io::AsyncBufReadExt, time::timeout};

use super::{Format, InputFile, SourceError, bytes, escapes::Escapes, ipc::Ipc, lines::Lines, reason::csv_row};

/// A line of text may have this many bytes. More is a damaged file or a bomb, and several copies must fit into memory.
pub(super) const ROW_BYTES_MAX: usize = 256 << 20;

/// CSV and JSON decoders return after this many rows and look at nothing else, so that few huge cells can lie in one
/// batch. Small batches cost little beside the model and are joined to windows anyway.
const BATCH_ROWS: usize = 4;
/// Bytes that so many rows may have, for the same reason.
const BATCH_BYTES_MAX: usize = 512 << 20;

/// How long the end of an input waits for a read that is under way: a pipe without a byte never ends it.
const UNDER_WAY: Duration = Duration::from_millis(100);

/// Takes bytes, gives rows.
pub(super) trait Decode: Send {
    /// Takes bytes from the front of `bytes` and says how many. Takes fewer than all when rows should be flushed first.
    fn decode(&mut self, bytes: &[u8]) -> Result<usize, ArrowError>;
    /// There are no more bytes.
    fn finish(&mut self) -> Result<(), ArrowError>;
    /// Whether rows should be flushed before more bytes come, given what the last call took of what it was offered.
    fn is_full(&self, used: usize, offered: usize) -> bool {
        used < offered
    }
    /// The rows that are complete, if any.
    fn flush(&mut self) -> Result<Option<RecordBatch>, ArrowError>;
    /// After an error of `decode`: rows before the broken one that were not flushed, as far as the decoder knows.
    fn waiting(&self) -> usize {
        0
    }
}

struct Csv {
    decoder: csv::reader::Decoder,
    quotes: Quotes,
}

impl Decode for Csv {
    fn decode(&mut self, bytes: &[u8]) -> Result<usize, ArrowError> {
        let used = self.decoder.decode(bytes)?;
        self.quotes.read(&bytes[..used]);
        Ok(used)
    }

    fn finish(&mut self) -> Result<(), ArrowError> {
        if self.quotes == Quotes::Inside {
            // The reader would take the rest of the file for one cell.
            return Err(ArrowError::CsvError("a quotation that begins in the next rows is never closed".to_owned()));
        }
        self.decoder.decode(&[]).map(drop)
    }

    fn flush(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        self.decoder.flush()
    }
}

/// Where in a CSV file reading is, as far as quotation marks go (RFC 4180).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Quotes {
    /// Before the first byte of a cell.
    #[default]
    Start,
    /// In a cell that does not begin with a quotation mark: others in it stand for themselves.
    Plain,
    /// In a cell that does.
    Inside,
    /// After a mark in such a cell: its end, or the first of two that stand for one.
    Closed,
}

impl Quotes {
    fn read(&mut self, bytes: &[u8]) {
        for byte in bytes {
            *self = match (*self, byte) {
                (Self::Start, b'"') | (Self::Closed, b'"') => Self::Inside,
                (Self::Inside, b'"') => Self::Closed,
                (Self::Inside, _) => Self::Inside,
                (_, b',' | b'\n' | b'\r') => Self::Start,
                _ => Self::Plain,
            };
        }
    }
}

struct Json {
    decoder: json::reader::Decoder,
    escapes: Escapes,
    /// How many of the bytes that come are known to need no rewriting: the decoder takes a few rows at a time, and to
    /// search all that it leaves each time would take the square of it.
    plain: usize,
    /// Bytes with pairs of escapes replaced, and how many of them the decoder took.
    rewritten: Vec<u8>,
    taken: usize,
    full: bool,
}

impl Json {
    fn new(decoder: json::reader::Decoder) -> Self {
        Self { decoder, escapes: Escapes::default(), plain: 0, rewritten: Vec::new(), taken: 0, full: false }
    }

    /// Gives the decoder what was rewritten.
    fn push(&mut self) -> Result<(), ArrowError> {
        self.taken += self.decoder.decode(&self.rewritten[self.taken..])?;
        self.full = self.taken < self.rewritten.len();
        if !self.full {
            self.rewritten.clear();
            self.taken = 0;
        }
        Ok(())
    }
}

impl Decode for Json {
    fn decode(&mut self, bytes: &[u8]) -> Result<usize, ArrowError> {
        if !self.rewritten.is_empty() {
            self.push()?;
            return Ok(0);
        }
        if self.plain == 0 && self.escapes.is_plain(bytes) {
            self.plain = bytes.len();
        }
        if self.plain > 0 {
            let known = &bytes[..self.plain.min(bytes.len())];
            let used = self.decoder.decode(known)?;
            self.full = used < known.len();
            self.plain -= used;
            return Ok(used);
        }
        self.escapes.rewrite(bytes, &mut self.rewritten);
        self.push()?;
        Ok(bytes.len())
    }

    fn waiting(&self) -> usize {
        // The decoder counts the row that it is in.
        self.decoder.len().saturating_sub(1)
    }

    fn is_full(&self, _: usize, _: usize) -> bool {
        self.full
    }

    fn finish(&mut self) -> Result<(), ArrowError> {
        self.escapes.finish(&mut self.rewritten);
        self.push()?;
        if self.rewritten.is_empty() {
            // A number at the very end is complete only when something follows it.
            self.decoder.decode(b"\n")?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        self.decoder.flush()
    }
}

/// Reads the columns `read` (indices into `schema`, ascending) of a file from its beginning.
pub(super) struct Decoded {
    bytes: bytes::Bytes,
    decoder: Box<dyn Decode>,
    taken: bytes::Taken,
    /// Bytes since the last row came out: a row without an end is refused, not collected.
    pending: usize,
    /// Bytes that were read and not decoded yet.
    left: usize,
    /// A read is under way, whose bytes would be lost with it.
    asked: bool,
}

impl Decoded {
    pub(super) async fn open(file: &InputFile, schema: &SchemaRef, read: &[usize]) -> Result<Self, SourceError> {
        let malformed = |e: ArrowError| SourceError::malformed(file, 0, e);
        let decoder: Box<dyn Decode> = match file.format {
            Format::Csv => {
                let decoder = csv_decoder(schema, read.to_vec(), BATCH_ROWS);
                Box::new(Csv { decoder, quotes: Quotes::default() })
            }
            Format::Json => {
                let wanted = schema.project(read).map_err(malformed)?;
                let builder = json::ReaderBuilder::new(wanted.into()).with_batch_size(BATCH_ROWS);
                Box::new(Json::new(builder.with_coerce_primitive(true).build_decoder().map_err(malformed)?))
            }
            Format::Arrow => Box::new(Ipc::new(read.to_vec())),
            // Parquet is read from its end, by its own reader.
            Format::Text | Format::Parquet => Box::new(Lines::new()),
        };
        let taken = bytes::Taken::default();
        Ok(Self { bytes: bytes::open(file, &taken).await?, decoder, taken, pending: 0, left: 0, asked: false })
    }

    /// Bytes of the file, as it lies there, that were read.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Rows that are complete in the bytes that were taken from the source, or are being taken: no more are asked for.
    pub(super) async fn buffered(&mut self, file: &InputFile, row: u64) -> Result<Option<RecordBatch>, SourceError> {
        while self.left > 0 || self.asked {
            let bytes = match timeout(UNDER_WAY, self.bytes.fill_buf()).await {
                Ok(bytes) => bytes.map_err(|e| bytes::read_error(file, row, e))?,
                Err(_) => break,
            };
            self.asked = false;
            let offered = bytes.len();
            let used = self.decoder.decode(bytes).map_err(|e| SourceError::malformed(file, row, e))?;
            self.bytes.consume(used);
            self.left = offered - used;
            if self.decoder.is_full(used, offered) {
                break;
            }
        }
        self.decoder.flush().map_err(|e| SourceError::malformed(file, row, e))
    }

    /// The next rows; `row` counts those before, for messages.
    pub(super) async fn next(&mut self, file: &InputFile, row: u64) -> Result<Option<RecordBatch>, SourceError> {
        let malformed = |e: ArrowError| SourceError::malformed(file, csv_row(&e).unwrap_or(row), e);
        loop {
            self.asked = true;
            let bytes = self.bytes.fill_buf().await.map_err(|e| bytes::read_error(file, row, e))?;
            self.asked = false;
            if bytes.is_empty() {
                self.decoder.finish().map_err(malformed)?;
                return self.decoder.flush().map_err(malformed);
            }
            let offered = bytes.len();
            let used = match self.decoder.decode(bytes) {
                Ok(used) => used,
                Err(e) => {
                    let row = csv_row(&e).unwrap_or(row + self.decoder.waiting() as u64);
                    return Err(SourceError::malformed(file, row, e));
                }
            };
            self.bytes.consume(used);
            self.left = offered - used;
            self.pending += used;
            if self.decoder.is_full(used, offered) {
                self.pending = 0;
                if let Some(batch) = self.decoder.flush().map_err(malformed)? {
                    return Ok(Some(batch));
                }
            } else if self.pending > BATCH_BYTES_MAX && file.format.is_untyped() {
                let reason =
                    format!("the next {BATCH_ROWS} rows have more than 512 MiB; is a quote or bracket not closed?");
                return Err(SourceError::malformed(file, row, reason));
            }
        }
    }
}

/// A CSV decoder for a file with a header line.
pub(super) fn csv_decoder(schema: &SchemaRef, read: Vec<usize>, rows: usize) -> csv::reader::Decoder {
    csv::ReaderBuilder::new(SchemaRef::clone(schema))
        .with_header(true)
        .with_projection(read)
        .with_batch_size(rows)
        .build_decoder()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;

    /// Each byte is searched once: were the rest searched for every few rows, it would be 100 MB here, not 90 kB.
    #[test]
    fn json_is_searched_for_escapes_once() {
        let text = "{\"a\": 1}\n".repeat(10_000);
        let schema = Arc::new(Schema::new(vec![Field::new("a", DataType::Utf8, true)]));
        let decoder = json::ReaderBuilder::new(schema).with_batch_size(BATCH_ROWS).with_coerce_primitive(true);
        let mut json = Json::new(decoder.build_decoder().unwrap());
        let (mut rest, mut rows) = (text.as_bytes(), 0);
        while !rest.is_empty() {
            let used = json.decode(rest).unwrap();
            let offered = rest.len();
            rest = &rest[used..];
            if json.is_full(used, offered) {
                rows += json.flush().unwrap().map_or(0, |batch| batch.num_rows());
            }
        }
        json.finish().unwrap();
        rows += json.flush().unwrap().map_or(0, |batch| batch.num_rows());
        assert_eq!((rows, json.escapes.searched), (10_000, text.len()));
    }

    #[test]
    fn quotations_that_are_closed_and_one_that_is_not() {
        // By RFC 4180: a mark inside a cell that does not begin with one is an ordinary character.
        let closed =
            ["a,b\n", "\"a\",b\n", "\"a \"\" b\"\n", "5\" disk,x\n", "\"\"\n", "\"two\nlines\"", "", "\"a\"\r\nb"];
        for text in closed {
            let mut quotes = Quotes::default();
            quotes.read(text.as_bytes());
            assert_ne!(quotes, Quotes::Inside, "{text:?}");
        }
        for text in ["\"", "a,\"b\nc,d\n", "\"a\"\"\n", "x\n\"\"\"y"] {
            let mut quotes = Quotes::default();
            text.as_bytes().chunks(1).for_each(|byte| quotes.read(byte));
            assert_eq!(quotes, Quotes::Inside, "{text:?}");
        }
    }
}
