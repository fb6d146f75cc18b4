//! Rows into the bytes of one Parquet file. Knows neither stores nor threads.

use std::io::Write;

use arrow::{array::RecordBatch, datatypes::SchemaRef, error::ArrowError};
use parquet::{
    arrow::{ArrowWriter, arrow_writer::ArrowWriterOptions},
    errors::ParquetError,
};

use super::{
    Encoding, encoding,
    units::{Unit, Units},
};

/// Encodes the rows of one file. Its bytes depend on the rows alone, not on the batches in which they arrive.
pub(crate) struct Encoder<W: Write + Send> {
    schema: SchemaRef,
    writer: ArrowWriter<W>,
    units: Units,
    rows: u64,
    /// Bytes in the current row group, not encoded.
    group: u64,
    group_bytes: u64,
}

impl<W: Write + Send> Encoder<W> {
    /// Begins a file.
    ///
    /// # Errors
    /// When Parquet has no type for a column.
    pub(crate) fn new(out: W, schema: &SchemaRef, encoding: &Encoding) -> Result<Self, ParquetError> {
        let properties = encoding.properties(schema)?;
        // The schema is appended to the footer together with the caller's pairs.
        let options = ArrowWriterOptions::new().with_properties(properties).with_skip_arrow_metadata(true);
        let writer = ArrowWriter::try_new_with_options(out, SchemaRef::clone(schema), options)?;
        let (schema, group_bytes) = (SchemaRef::clone(schema), encoding.row_group_bytes);
        Ok(Self { schema, writer, units: Units::default(), rows: 0, group: 0, group_bytes })
    }

    /// Adds rows; returns the units that are full, which the caller passes to [`encode`](Self::encode) in this order.
    ///
    /// # Errors
    /// When the rows cannot be concatenated.
    pub(crate) fn push(&mut self, batch: &RecordBatch) -> Result<Vec<Unit>, ArrowError> {
        self.rows += batch.num_rows() as u64;
        self.units.push(batch)
    }

    /// Encodes a unit.
    ///
    /// # Errors
    /// When its rows do not match the schema, or the writer below fails.
    pub(crate) fn encode(&mut self, unit: &Unit) -> Result<(), ParquetError> {
        self.writer.write(&unit.rows)?;
        self.group += unit.bytes;
        if self.group >= self.group_bytes {
            self.group = 0;
            self.writer.flush()?;
        }
        Ok(())
    }

    /// Encodes the rest and writes the footer with these key-value pairs.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub(crate) fn finish(&mut self, footer: &[(String, String)]) -> Result<(), ParquetError> {
        if let Some(unit) = self.units.close()? {
            self.encode(&unit)?;
        }
        for pair in encoding::footer(footer, &self.schema) {
            self.writer.append_key_value_metadata(pair);
        }
        self.writer.finish().map(drop)
    }

    /// Rows so far.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// Size of the file if it ended here: bytes that are encoded, those that the current row group is expected to have,
    /// and the rows of the open unit as they are.
    pub(crate) fn bytes(&self) -> u64 {
        (self.writer.bytes_written() + self.writer.in_progress_size()) as u64 + self.units.bytes()
    }

    /// The writer below.
    pub(crate) fn out(&self) -> &W {
        self.writer.inner()
    }

    /// The writer below, whose bytes may be taken; after [`finish`](Self::finish) it has all of them.
    pub(crate) fn out_mut(&mut self) -> &mut W {
        self.writer.inner_mut()
    }
}
