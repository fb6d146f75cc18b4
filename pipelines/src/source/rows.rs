//! All files as one sequence of rows.

use std::sync::Arc;

use arrow::{
    array::{Array, ArrayRef, AsArray, RecordBatch, RecordBatchOptions, StringArray, new_null_array},
    compute::{CastOptions, cast_with_options},
    datatypes::{DataType, Field},
    error::ArrowError,
};

use super::{Format, Plan, Position, SourceError, decode::Decoded, parquet, plan::FilePlan, schema::is_no_number};

/// Consecutive rows of one file.
#[derive(Debug, Clone)]
pub struct Slice {
    /// Where its first row is.
    pub start: Position,
    /// The texts; of one type over all files.
    pub text: ArrayRef,
    /// The kept columns; of one schema over all files, and as many rows as texts.
    pub kept: RecordBatch,
}

impl Slice {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.text.len()
    }

    /// Without a single row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The part of it from row `from` on that has `len` rows.
    pub fn slice(&self, from: usize, len: usize) -> Self {
        Self {
            start: Position { row: self.start.row + from as u64, ..self.start },
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
    /// The row that comes next.
    next: Position,
    /// Rows to leave out before it: the reader stands at the start of the file.
    skip: u64,
    reader: Option<Reader>,
}

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rows").field("next", &self.next).finish_non_exhaustive()
    }
}

impl Rows {
    /// Starts at `from`, which may be the end of a file.
    pub fn new(plan: Arc<Plan>, from: Position) -> Self {
        Self { plan, next: from, skip: 0, reader: None }
    }

    /// The row that comes next; behind the last one at the end.
    pub fn position(&self) -> Position {
        self.next
    }

    /// Bytes of the files, as they lie there, that were read so far; for progress.
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

    /// The next rows, never none of them; `None` at the end of the last file.
    ///
    /// # Errors
    /// [`SourceError::Malformed`] when the bytes are not what the format wants or a value does not fit its column's
    /// type, [`SourceError::Store`] when the store fails.
    pub async fn next(&mut self) -> Result<Option<Slice>, SourceError> {
        let slice = self.next_slice().await;
        if slice.is_err() {
            // A reader that failed must not go on behind the row where it did.
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

    /// Rows that are complete already, though the next step of reading would have more: the last of an input that nobody
    /// reads on.
    ///
    /// # Errors
    /// As [`Rows::next`].
    pub fn buffered(&mut self) -> Result<Option<Slice>, SourceError> {
        let plan = Arc::clone(&self.plan);
        let (Some(file), Some(Reader::Decoded(reader))) = (plan.files.get(self.next.file), &mut self.reader) else {
            return Ok(None);
        };
        let Some(batch) = reader.buffered(&file.file, self.next.row)? else { return Ok(None) };
        self.slice(&plan, file, &batch).map(Some)
    }

    fn slice(&mut self, plan: &Plan, file: &FilePlan, batch: &RecordBatch) -> Result<Slice, SourceError> {
        let start = self.next;
        let shaped = shape(plan, file, start, batch).map_err(|e| misfit(plan, file, start, batch, e))?;
        self.next.row += batch.num_rows() as u64;
        Ok(shaped)
    }

    async fn read(&mut self, plan: &FilePlan) -> Result<Option<RecordBatch>, SourceError> {
        let reader = match &mut self.reader {
            Some(reader) => reader,
            None => {
                let (reader, skip) = open(plan, self.next.row).await?;
                self.skip = skip;
                self.reader.insert(reader)
            }
        };
        loop {
            let row = self.next.row;
            let batch = match reader {
                Reader::Decoded(reader) => reader.next(&plan.file, row).await?,
                Reader::Parquet(reader) => reader.next(&plan.file, row).await?,
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

/// Opens a file so that reading can go on at `row`; the number says how many rows are still to be left out.
async fn open(plan: &FilePlan, row: u64) -> Result<(Reader, u64), SourceError> {
    if plan.file.location.is_none() && row > 0 {
        return Err(SourceError::malformed(&plan.file, row, "standard input cannot be read again from here"));
    }
    if plan.file.format == Format::Parquet {
        let rows = parquet::Rows::open(&plan.file, &plan.read, row).await?;
        return Ok((Reader::Parquet(Box::new(rows)), 0));
    }
    let decoded = Decoded::open(&plan.file, &plan.schema, &plan.read).await?;
    Ok((Reader::Decoded(Box::new(decoded)), row))
}

fn shape(plan: &Plan, file: &FilePlan, start: Position, batch: &RecordBatch) -> Result<Slice, ArrowError> {
    let text = convert(batch.column(file.text), &plan.text)?;
    let targets = plan.kept().fields().iter().zip(&file.kept);
    let named = |field: &Field, e: ArrowError| ArrowError::CastError(format!("column {:?}: {e}", field.name()));
    let columns = targets.map(|(field, place)| match place {
        Some(place) => convert(batch.column(*place), field.data_type()).map_err(|e| named(field, e)),
        None => Ok(new_null_array(field.data_type(), batch.num_rows())),
    });
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    let kept = columns.collect::<Result<Vec<_>, _>>()?;
    let kept = RecordBatch::try_new_with_options(Arc::clone(plan.kept()), kept, &options)?;
    Ok(Slice { start, text, kept })
}

/// Names the first row of a batch that does not fit.
fn misfit(plan: &Plan, file: &FilePlan, start: Position, batch: &RecordBatch, whole: ArrowError) -> SourceError {
    let mut rows = (0..batch.num_rows()).map(|row| (row, shape(plan, file, start, &batch.slice(row, 1))));
    let first = rows.find_map(|(row, shaped)| shaped.err().map(|error| (row as u64, error)));
    let (row, error) = first.unwrap_or((0, whole));
    SourceError::malformed(&file.file, start.row + row, error)
}

/// Casts without loss; bytes that are no UTF-8 become strings with U+FFFD, as they are reported beside it.
fn convert(column: &ArrayRef, target: &DataType) -> Result<ArrayRef, ArrowError> {
    match (column.data_type(), target) {
        (found, target) if found == target => Ok(Arc::clone(column)),
        (DataType::Binary, DataType::Utf8) => Ok(lossy(column)),
        (DataType::Binary, DataType::LargeUtf8 | DataType::Utf8View) => cast(&lossy(column), target),
        // Dictionaries of strings have no direct cast to bytes.
        (DataType::Dictionary(_, value), DataType::Binary) => cast(&cast(column, value)?, target),
        _ => {
            check_numbers(column, target)?;
            cast(column, target)
        }
    }
}

/// Refuses what a cast to numbers would change without a word, at any depth.
fn check_numbers(column: &ArrayRef, target: &DataType) -> Result<(), ArrowError> {
    match (column.data_type(), target) {
        (DataType::List(_), DataType::List(item)) => {
            let list = column.as_list::<i32>();
            let (first, last) = (list.value_offsets()[0] as usize, list.value_offsets()[list.len()] as usize);
            check_numbers(&list.values().slice(first, last - first), item.data_type())
        }
        (DataType::Struct(_), DataType::Struct(fields)) => {
            let columns = column.as_struct().columns().iter().zip(fields);
            columns.into_iter().try_for_each(|(column, field)| check_numbers(column, field.data_type()))
        }
        (DataType::Utf8, number) if number.is_integer() || number.is_floating() => {
            let changes = |written: &str| written.trim() != written || is_no_number(written, number);
            match column.as_string::<i32>().iter().flatten().any(changes) {
                true => Err(ArrowError::CastError(format!("{number} would not hold the number as it is written"))),
                false => Ok(()),
            }
        }
        _ => Ok(()),
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
    use super::*;
    use crate::source::{InputFile, Request};

    /// What was read before an error is gone: opened again, the rows would be others.
    #[tokio::test]
    async fn standard_input_is_opened_at_its_beginning_only() {
        let plan = Plan::resolve(vec![InputFile::stdin()], &Request::texts("text")).await.unwrap();
        let error = Rows::new(Arc::new(plan), Position { file: 0, row: 5 }).next().await.unwrap_err();
        assert!(error.to_string().contains("cannot be read again"), "{error}");
    }
}
