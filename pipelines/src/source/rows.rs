//! Reads all files as one sequence of rows.

use std::{ops::Range, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, StringArray, UInt64Array, new_null_array},
    compute::{CastOptions, cast_with_options, take, take_record_batch},
    datatypes::DataType,
    error::ArrowError,
};

use super::{
    Format, Mark, Plan, Position, SourceError,
    decode::Decoded,
    lossless, parquet,
    plan::{FilePlan, Kept},
    reason::in_column,
    sieve::Malformed,
};

/// Lines of standard input that are looked at to tell text from JSON.
const LINES_LOOKED_AT: usize = 3;

/// Consecutive rows of one file.
#[derive(Debug, Clone)]
pub struct Slice {
    /// Where its first row is.
    pub start: Position,
    /// The texts, of the same type for all files.
    pub text: ArrayRef,
    /// The kept columns, of the same schema for all files.
    pub kept: RecordBatch,
    /// Malformed rows that stand here with NULL in every column, in order. They are not for the output.
    pub malformed: Vec<Malformed>,
}

impl Slice {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Rows `from..from + len`.
    pub fn slice(&self, from: usize, len: usize) -> Self {
        let start = Position { row: self.start.row + from as u64, ..self.start };
        let rows = start.row..start.row + len as u64;
        Self {
            start,
            malformed: self.malformed.iter().filter(|malformed| rows.contains(&malformed.row)).cloned().collect(),
            text: self.text.slice(from, len),
            kept: self.kept.slice(from, len),
        }
    }
}

enum Reader {
    Decoded(Box<Decoded>),
    Parquet(Box<parquet::Rows>),
}

/// Reads the files of a plan one after the other.
pub struct Rows {
    plan: Arc<Plan>,
    /// The next row.
    next: Position,
    /// Rows to skip before it, as a reader starts at the beginning of a file.
    skip: u64,
    reader: Option<Reader>,
    /// Where a row of the first file begins that is not after `next`.
    mark: Option<Mark>,
    /// Why the next row cannot be read; the rows before it have been returned.
    failed: Option<SourceError>,
}

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rows").field("next", &self.next).finish_non_exhaustive()
    }
}

impl Rows {
    /// Starts at `from`, which may be the end of a file.
    pub fn new(plan: Arc<Plan>, from: Position) -> Self {
        Self::from_mark(plan, from, None)
    }

    /// The same, where it is known where a row of the file of `from` begins, which is `from` or before it.
    pub(crate) fn from_mark(plan: Arc<Plan>, from: Position, mark: Option<Mark>) -> Self {
        let mark = mark.filter(|mark| mark.row <= from.row);
        Self { plan, next: from, skip: 0, reader: None, mark, failed: None }
    }

    /// Where the next row begins, if that is known.
    pub(crate) fn mark(&self) -> Option<Mark> {
        match &self.reader {
            Some(Reader::Decoded(reader)) => reader.mark().filter(|mark| mark.row == self.next.row),
            _ => None,
        }
    }

    /// The next row; past the last one at the end.
    pub fn position(&self) -> Position {
        self.next
    }

    /// Compressed bytes that were read so far, for progress reports.
    pub fn bytes_read(&self) -> u64 {
        let files = &self.plan.files;
        let before: u64 = files.iter().take(self.next.file).map(|plan| plan.file.size).sum();
        let here = match (&self.reader, files.get(self.next.file)) {
            (Some(Reader::Decoded(reader)), _) => reader.taken(),
            (Some(Reader::Parquet(reader)), Some(plan)) => {
                (plan.file.size as f64 * self.next.row as f64 / reader.total.max(1) as f64) as u64
            }
            _ => 0,
        };
        before + here
    }

    /// Number of rows of the open file, if its footer holds it.
    pub(super) fn rows_in_footer(&self) -> Option<u64> {
        match &self.reader {
            Some(Reader::Parquet(reader)) => Some(reader.total),
            _ => None,
        }
    }

    /// The next rows, at least one; `None` at the end of the last file.
    ///
    /// # Errors
    /// [`SourceError::Malformed`] when the bytes are not valid in the file's format or a value does not fit its
    /// column's type, [`SourceError::Store`] when the store fails.
    pub async fn next(&mut self) -> Result<Option<Slice>, SourceError> {
        let slice = match self.failed.take() {
            Some(error) => Err(error),
            None => self.next_slice().await,
        };
        if slice.is_err() {
            // The next call must not continue after the row that failed.
            self.reader = None;
        }
        slice
    }

    async fn next_slice(&mut self) -> Result<Option<Slice>, SourceError> {
        let plan = Arc::clone(&self.plan);
        while let Some(file) = plan.files.get(self.next.file) {
            let batch = if file.is_empty() { None } else { self.read(file).await? };
            let Some(batch) = batch else {
                self.next = Position { file: self.next.file + 1, row: 0 };
                self.reader = None;
                continue;
            };
            if batch.num_rows() == 0 {
                continue;
            }
            return self.slice(&plan, file, &batch).map(Some);
        }
        Ok(None)
    }

    /// The rows that are complete in the bytes read so far, when the rest of the input is not read.
    ///
    /// # Errors
    /// As [`Rows::next`].
    pub async fn buffered(&mut self) -> Result<Option<Slice>, SourceError> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let plan = Arc::clone(&self.plan);
        let (Some(file), Some(Reader::Decoded(reader))) = (plan.files.get(self.next.file), &mut self.reader) else {
            return Ok(None);
        };
        let Some(batch) = reader.buffered(&file.file).await? else { return Ok(None) };
        self.slice(&plan, file, &batch).map(Some)
    }

    fn slice(&mut self, plan: &Plan, file: &FilePlan, batch: &RecordBatch) -> Result<Slice, SourceError> {
        let start = self.next;
        let shaped = match shape(plan, file, start, batch) {
            Ok(shaped) => shaped,
            Err(whole) => {
                let (row, error) = misfit(plan, file, start, batch, whole);
                if row == 0 {
                    return Err(error);
                }
                self.failed = Some(error);
                let before = take_rows(batch, 0..row).and_then(|rows| shape(plan, file, start, &rows));
                before.map_err(|e| SourceError::malformed(&file.file, start.row, e))?
            }
        };
        self.next.row += shaped.len() as u64;
        let malformed = match &self.reader {
            Some(Reader::Decoded(reader)) => reader.malformed(self.next.row),
            _ => Vec::new(),
        };
        if file.file.location.is_none() && start.row == 0 {
            warn_of_json(file, &shaped.text);
        }
        // Rows before the first one that was asked for were read too.
        let malformed = malformed.into_iter().filter(|malformed| malformed.row >= start.row);
        Ok(Slice { malformed: malformed.collect(), ..shaped })
    }

    async fn read(&mut self, plan: &FilePlan) -> Result<Option<RecordBatch>, SourceError> {
        let reader = match &mut self.reader {
            Some(reader) => reader,
            None => {
                let (reader, skip) = open(plan, self.next.row, self.mark.take()).await?;
                self.skip = skip;
                self.reader.insert(reader)
            }
        };
        loop {
            let batch = match reader {
                Reader::Decoded(reader) => reader.next(&plan.file).await?,
                Reader::Parquet(reader) => reader.next(&plan.file, self.next.row).await?,
            };
            let Some(batch) = batch else { return Ok(None) };
            let rows = batch.num_rows() as u64;
            if rows > self.skip {
                let from = std::mem::take(&mut self.skip) as usize;
                return Ok(Some(batch.slice(from, batch.num_rows() - from)));
            }
            self.skip -= rows;
        }
    }
}

/// Opens a file to read from `row`; returns also how many rows of the reader must be skipped.
async fn open(plan: &FilePlan, row: u64, mark: Option<Mark>) -> Result<(Reader, u64), SourceError> {
    if plan.file.location.is_none() && row > 0 && plan.file.format != Format::Parquet {
        return Err(SourceError::malformed(&plan.file, row, "standard input cannot be read again from here"));
    }
    if plan.file.format == Format::Parquet {
        let rows = parquet::Rows::open(&plan.file, &plan.read, row).await?;
        return Ok((Reader::Parquet(Box::new(rows)), 0));
    }
    let (decoded, before) = match mark {
        Some(mark) => (Decoded::open_at(plan, mark).await?, mark.row),
        None => (Decoded::open(plan).await?, 0),
    };
    Ok((Reader::Decoded(Box::new(decoded)), row - before))
}

fn shape(plan: &Plan, file: &FilePlan, start: Position, batch: &RecordBatch) -> Result<Slice, ArrowError> {
    let text = convert(batch.column(file.text), &plan.text)?;
    let targets = plan.kept().fields().iter().zip(&file.kept);
    let columns = targets.map(|(field, place)| match place {
        Kept::Read(place) => convert(batch.column(*place), field.data_type()).map_err(|e| in_column(field.name(), &e)),
        Kept::Folder(value) => take(value, &UInt64Array::from_value(0, batch.num_rows()), None),
        Kept::Missing => Ok(new_null_array(field.data_type(), batch.num_rows())),
    });
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let kept = columns.collect::<Result<Vec<_>, _>>()?;
    let kept = RecordBatch::try_new_with_options(Arc::clone(plan.kept()), kept, &options)?;
    Ok(Slice { start, text, kept, malformed: Vec::new() })
}

/// Warns when standard input is read as lines of text and holds objects: nobody embeds those on purpose.
fn warn_of_json(file: &FilePlan, lines: &ArrayRef) {
    if file.file.format != Format::Text || file.file.reading.format.is_some() {
        return;
    }
    let lines = lines.as_binary_opt::<i32>().map(|lines| lines.iter().flatten().collect::<Vec<_>>());
    let mut lines =
        lines.into_iter().flatten().filter(|line| !line.trim_ascii().is_empty()).take(LINES_LOOKED_AT).peekable();
    let is_object = |line: &[u8]| {
        line.trim_ascii_start().starts_with(b"{") && serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok()
    };
    if lines.peek().is_some() && lines.all(is_object) {
        tracing::warn!(
            "standard input looks like lines of JSON and is embedded as text, braces and all; --input-format jsonl reads \
             its objects"
        );
    }
}

/// The first row of a batch that does not fit, counted in the batch, and why.
fn misfit(plan: &Plan, file: &FilePlan, start: Position, batch: &RecordBatch, whole: ArrowError) -> (u64, SourceError) {
    let alone = |row: u64| take_rows(batch, row..row + 1).and_then(|rows| shape(plan, file, start, &rows));
    let first = (0..batch.num_rows() as u64).find_map(|row| alone(row).err().map(|error| (row, error)));
    let (row, error) = first.unwrap_or((0, whole));
    (row, SourceError::malformed(&file.file, start.row + row, error))
}

/// Some rows of a batch. Copied, not cut out: a cast looks at all items of a list, also those of other rows.
fn take_rows(batch: &RecordBatch, rows: Range<u64>) -> Result<RecordBatch, ArrowError> {
    take_record_batch(batch, &UInt64Array::from_iter_values(rows))
}

/// Casts without loss. In bytes that are not UTF-8, invalid sequences become U+FFFD; the embedder reports such rows.
pub(super) fn convert(column: &ArrayRef, target: &DataType) -> Result<ArrayRef, ArrowError> {
    match (column.data_type(), target) {
        (found, target) if found == target => Ok(Arc::clone(column)),
        (DataType::Binary, DataType::Utf8) => Ok(lossy(column)),
        (DataType::Binary, DataType::LargeUtf8 | DataType::Utf8View) => cast(&lossy(column), target),
        // Arrow has no cast from dictionaries of strings to bytes.
        (DataType::Dictionary(_, value), target) => convert(&cast(column, value)?, target),
        (DataType::RunEndEncoded(_, value), target) => convert(&cast(column, value.data_type())?, target),
        _ => {
            let read = cast(column, target)?;
            lossless::check(column, &read)?;
            Ok(read)
        }
    }
}

fn cast(column: &ArrayRef, target: &DataType) -> Result<ArrayRef, ArrowError> {
    cast_with_options(column, target, &CastOptions { safe: false, ..CastOptions::default() })
}

fn lossy(column: &ArrayRef) -> ArrayRef {
    let bytes = column.as_binary::<i32>();
    Arc::new(bytes.iter().map(|b| b.map(String::from_utf8_lossy)).collect::<StringArray>())
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::Field;

    use super::*;
    use crate::source::{InputFile, Reading, Request, types};

    /// Standard input cannot be rewound.
    #[tokio::test]
    async fn standard_input_is_opened_at_its_beginning_only() {
        let plan = Plan::resolve(vec![InputFile::stdin(Reading::default())], &Request::texts("text")).await.unwrap();
        let error = Rows::new(Arc::new(plan), Position { file: 0, row: 5 }).next().await.unwrap_err();
        assert!(error.to_string().contains("cannot be read again"), "{error}");
    }

    /// Expected values: the same values in the plain encoding.
    #[test]
    fn slices_of_every_encoding_of_texts() {
        let words: ArrayRef = Arc::new(StringArray::from(vec![Some("ab"), None, Some("ab"), Some("cd"), Some("ef")]));
        let runs = |kind: DataType| {
            let (ends, values) = (Field::new("run_ends", DataType::Int32, false), Field::new("values", kind, true));
            DataType::RunEndEncoded(ends.into(), values.into())
        };
        let dictionary = |kind: DataType| DataType::Dictionary(Box::new(DataType::Int8), Box::new(kind));
        let item = |kind: DataType| Arc::new(Field::new_list_field(kind, true));
        let list = cast(&words, &DataType::List(item(DataType::Utf8))).unwrap();
        let binary = cast(&words, &DataType::Binary).unwrap();
        for (plain, kind) in [
            (&words, runs(DataType::Utf8)),
            (&words, dictionary(DataType::Utf8)),
            (&binary, runs(DataType::Binary)),
            (&binary, DataType::FixedSizeBinary(2)),
            (&list, DataType::FixedSizeList(item(DataType::Utf8), 1)),
            (&list, DataType::ListView(item(DataType::Utf8))),
            (&list, DataType::ListView(item(dictionary(DataType::Utf8)))),
            (&list, DataType::List(item(runs(DataType::Utf8)))),
        ] {
            assert!(types::is_text(&kind), "{kind}");
            let encoded = cast(plain, &kind).unwrap();
            for (from, len) in [(0, 5), (1, 3), (2, 3), (4, 1), (1, 0)] {
                let text = convert(&encoded.slice(from, len), &types::text(&kind)).unwrap();
                assert_eq!(text.as_ref(), plain.slice(from, len).as_ref(), "{kind} from {from}");
            }
        }
    }
}
