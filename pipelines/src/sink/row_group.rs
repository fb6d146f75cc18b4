//! The rows of one row group, a column at a time.
//!
//! A column of vectors is encoded a few rows at a time, as slices of the arrays in which it arrived. So vectors are not
//! copied, and what the encoder computes for a slice (levels and an index for every number, more bytes than the number has)
//! stays in the cache. The other columns of a unit are concatenated.
//!
//! The bytes are the same as if the unit were one array. Arrow's writer checks whether a page is full after each step of a
//! call: `write_batch_size` levels, and those up to the end of the row. A slice ends where a step ends.

use std::{io::Write, slice, sync::Arc};

use arrow::{
    array::{Array, ArrayRef},
    compute::concat,
    datatypes::{DataType, SchemaRef},
    error::ArrowError,
};
use parquet::{
    arrow::arrow_writer::{ArrowColumnChunk, ArrowColumnWriter, ArrowRowGroupWriterFactory, compute_leaves},
    errors::{ParquetError, Result},
    file::writer::SerializedFileWriter,
};

use super::units::Unit;

/// Numbers of the vectors that are encoded at once; a slice has at most one step more.
const SLICE_LEVELS: usize = 16 << 10;

/// A row group that is being filled.
pub(super) struct RowGroup {
    schema: SchemaRef,
    /// For each column of the schema, the writers of its leaves.
    columns: Vec<Vec<ArrowColumnWriter>>,
    /// Levels of a step.
    step: usize,
    /// Bytes of the units, not encoded.
    pub(super) bytes: u64,
}

impl RowGroup {
    /// Begins row group `index` of a file.
    ///
    /// # Errors
    /// When Parquet has no type for a column.
    pub(super) fn new<W: Write + Send>(
        file: &SerializedFileWriter<W>,
        factory: &ArrowRowGroupWriterFactory,
        schema: &SchemaRef,
        index: usize,
    ) -> Result<Self> {
        let mut columns: Vec<Vec<_>> = schema.fields().iter().map(|_| Vec::new()).collect();
        let writers = factory.create_column_writers(index)?;
        for (leaf, writer) in writers.into_iter().enumerate() {
            columns[file.schema_descr().get_column_root_idx(leaf)].push(writer);
        }
        Ok(Self { schema: Arc::clone(schema), columns, step: file.properties().write_batch_size(), bytes: 0 })
    }

    /// Encodes a unit.
    ///
    /// # Errors
    /// When its rows do not match the schema.
    pub(super) fn write(&mut self, unit: &Unit) -> Result<()> {
        self.bytes += unit.bytes;
        for (index, (field, leaves)) in self.schema.fields().iter().zip(&mut self.columns).enumerate() {
            let parts = unit.column(index).ok_or_else(|| missing(field.name()))?;
            let mut rest = Parts::new(&parts);
            for rows in slices(&parts, self.step) {
                let array = rest.take(rows)?;
                for (writer, leaf) in leaves.iter_mut().zip(compute_leaves(field, &array)?) {
                    writer.write(&leaf)?;
                }
            }
        }
        Ok(())
    }

    /// Bytes that it would have in the file if it ended here.
    pub(super) fn encoded_bytes(&self) -> usize {
        self.columns.iter().flatten().map(ArrowColumnWriter::get_estimated_total_bytes).sum()
    }

    /// Encodes what is left.
    ///
    /// # Errors
    /// When the encoder fails.
    pub(super) fn close(self) -> Result<Closed> {
        let columns = self.columns.into_iter().flatten();
        Ok(Closed { columns: columns.map(ArrowColumnWriter::close).collect::<Result<_>>()? })
    }
}

/// A row group that is complete.
pub(super) struct Closed {
    columns: Vec<ArrowColumnChunk>,
}

impl Closed {
    /// Appends it to the file, as the row group with its index.
    ///
    /// # Errors
    /// When the writer below fails.
    pub(super) fn append<W: Write + Send>(self, file: &mut SerializedFileWriter<W>) -> Result<()> {
        let mut group = file.next_row_group()?;
        for column in self.columns {
            column.append_to_row_group(&mut group)?;
        }
        group.close().map(drop)
    }
}

fn missing(column: &str) -> ParquetError {
    ParquetError::ArrowError(format!("the rows have no column {column}"))
}

/// The number of rows of each slice of a column that arrived in `parts`.
fn slices(parts: &[ArrayRef], step: usize) -> Vec<usize> {
    let all_null = parts.iter().all(|part| part.null_count() == part.len());
    match parts.first().map(|part| part.data_type()) {
        // For a column without repetition, and for one of NULLs alone, a step is longer.
        Some(DataType::FixedSizeList(item, width @ 2..)) if item.data_type() == &DataType::Float32 && !all_null => {
            slices_of_vectors(parts, width.unsigned_abs() as usize, step)
        }
        _ => vec![parts.iter().map(|part| part.len()).sum()],
    }
}

/// A slice ends with the first step in which it has [`SLICE_LEVELS`] levels. One of NULLs alone is a single step, because
/// such a call has longer steps.
fn slices_of_vectors(parts: &[ArrayRef], width: usize, step: usize) -> Vec<usize> {
    let mut slices = Vec::new();
    let (mut rows, mut levels, mut of_step) = (0, 0, 0);
    for part in parts {
        for row in 0..part.len() {
            rows += 1;
            of_step += if part.is_null(row) { 1 } else { width };
            if of_step < step {
                continue;
            }
            levels += of_step;
            of_step = 0;
            if levels >= SLICE_LEVELS || rows >= step {
                slices.push(rows);
                (rows, levels) = (0, 0);
            }
        }
    }
    slices.extend(Some(rows).filter(|rows| *rows > 0));
    slices
}

/// An array in parts, from which rows are taken.
struct Parts<'p> {
    parts: slice::Iter<'p, ArrayRef>,
    /// What is left of the part before.
    rest: Option<ArrayRef>,
}

impl<'p> Parts<'p> {
    fn new(parts: &'p [ArrayRef]) -> Self {
        Self { parts: parts.iter(), rest: None }
    }

    /// The next rows: a slice of a part, or a copy of several slices. There must be as many.
    fn take(&mut self, rows: usize) -> Result<ArrayRef, ArrowError> {
        let mut taken: Vec<ArrayRef> = Vec::new();
        let mut missing = rows;
        while let Some(part) = self.rest.take().or_else(|| self.parts.next().cloned()) {
            let count = missing.min(part.len());
            self.rest = Some(part.slice(count, part.len() - count)).filter(|rest| !rest.is_empty());
            taken.push(part.slice(0, count));
            missing -= count;
            if missing == 0 {
                break;
            }
        }
        match taken.as_slice() {
            [array] => Ok(Arc::clone(array)),
            arrays => concat(&arrays.iter().map(AsRef::as_ref).collect::<Vec<_>>()),
        }
    }
}
