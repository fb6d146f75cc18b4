//! Result formats: a table for people, and CSV, JSON and Arrow for programs.

use std::{
    fmt,
    io::{self, Write},
    str::FromStr,
    sync::Arc,
};

use arrow::{
    array::{ArrayRef, RecordBatch, StringArray},
    csv,
    datatypes::{DataType, Field, Schema, SchemaRef},
    error::ArrowError,
    ipc::writer::StreamWriter,
    json::{
        EncoderOptions, LineDelimitedWriter, WriterBuilder,
        writer::{JsonArray, Writer, make_encoder},
    },
};
use elmo::spec::SpecError;

use super::table::Table;
use crate::error::{Error, Result};

/// An output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// An aligned table of the first rows, with abbreviated vectors.
    Table,
    /// CSV with a header; nested values as JSON.
    Csv,
    /// A JSON array of objects.
    Json,
    /// A JSON object per line.
    Ndjson,
    /// The Arrow IPC stream.
    Arrow,
    /// A Parquet file.
    Parquet,
}

impl Format {
    /// The names of all formats.
    pub const WORDS: &'static [&'static str] = &["table", "csv", "json", "ndjson", "arrow", "parquet"];
    /// All formats, in the order of their names.
    const ALL: [Self; 6] = [Self::Table, Self::Csv, Self::Json, Self::Ndjson, Self::Arrow, Self::Parquet];

    /// Whether the format is binary, and so holds one result and is not printed to terminals.
    pub fn is_binary(self) -> bool {
        matches!(self, Self::Arrow | Self::Parquet)
    }

    /// Whether readers find columns by their names, so that two cannot have the same one.
    pub(super) fn has_names(self) -> bool {
        matches!(self, Self::Json | Self::Ndjson | Self::Parquet)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Self::WORDS.iter().zip(Self::ALL).find(|(_, format)| format == self);
        f.write_str(word.map_or("", |(word, _)| word))
    }
}

impl FromStr for Format {
    type Err = SpecError;

    fn from_str(word: &str) -> Result<Self, SpecError> {
        let found = Self::WORDS.iter().zip(Self::ALL).find(|(legal, _)| **legal == word);
        found.map(|(_, format)| format).ok_or_else(|| SpecError::Value {
            option: "format",
            value: word.to_owned(),
            legal: Self::WORDS.to_vec(),
        })
    }
}

/// When a record is shown as a line per value instead of a row of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Expanded {
    /// Always.
    On,
    /// Never.
    #[default]
    Off,
    /// If the table is wider than the terminal.
    Auto,
}

/// How a result is written.
#[derive(Debug, Clone, Copy)]
pub struct OutputOptions {
    /// The output format.
    pub format: Format,
    /// Maximum number of rows in [`Format::Table`].
    pub max_rows: usize,
    /// When [`Format::Table`] has a line per value.
    pub expanded: Expanded,
    /// Columns of the terminal to which [`Format::Table`] is fitted; `None` to cut nothing.
    pub width: Option<usize>,
}

/// Writes the batches of one result.
pub(super) enum Printer {
    Table { out: Out, schema: SchemaRef, batches: Vec<RecordBatch>, rows: usize, options: OutputOptions },
    Csv { writer: Box<csv::Writer<Out>>, schema: SchemaRef },
    Json(Writer<Out, JsonArray>),
    Ndjson(LineDelimitedWriter<Out>),
    Arrow(StreamWriter<Out>),
}

/// Where results go.
pub type Out = Box<dyn Write + Send>;

impl Printer {
    /// Creates a printer. [`Format::Parquet`] is written by COPY, not by a printer.
    pub(super) fn new(options: OutputOptions, schema: SchemaRef, out: Out) -> Result<Self> {
        // Writes NULLs, so that every object has every key.
        let json = || WriterBuilder::new().with_explicit_nulls(true);
        Ok(match options.format {
            Format::Table => Self::Table { out, schema, batches: Vec::new(), rows: 0, options },
            Format::Csv => {
                let mut writer = csv::WriterBuilder::new().build(out);
                let schema = csv_schema(&schema);
                // Writes the header, also for a result without rows.
                writer.write(&RecordBatch::new_empty(Arc::clone(&schema))).map_err(failed)?;
                Self::Csv { writer: Box::new(writer), schema }
            }
            Format::Json => Self::Json(json().build(out)),
            Format::Ndjson => Self::Ndjson(json().build(out)),
            Format::Arrow | Format::Parquet => Self::Arrow(StreamWriter::try_new(out, &schema).map_err(failed)?),
        })
    }

    /// Writes a batch. Returns `false` when the table is full.
    pub(super) fn write(&mut self, batch: &RecordBatch) -> Result<bool> {
        match self {
            Self::Table { batches, rows, options, .. } => {
                let taken = batch.num_rows().min(options.max_rows - *rows);
                *rows += taken;
                batches.push(batch.slice(0, taken));
                return Ok(taken == batch.num_rows());
            }
            Self::Csv { writer, schema } => writer.write(&to_csv_batch(batch, schema).map_err(failed)?),
            Self::Json(writer) => writer.write(batch),
            Self::Ndjson(writer) => writer.write(batch),
            Self::Arrow(writer) => writer.write(batch),
        }
        .map_err(failed)?;
        Ok(true)
    }

    /// Writes buffered rows and the end of the format, and flushes the output. Returns the number of columns that were
    /// not shown.
    pub(super) fn finish(self) -> Result<usize> {
        let mut hidden = 0;
        let mut out = match self {
            Self::Table { mut out, schema, batches, options, .. } => {
                let table;
                (table, hidden) = format_table(&schema, &batches, options).map_err(failed)?;
                out.write_all(table.as_bytes()).map_err(io_failed)?;
                out
            }
            Self::Csv { writer, .. } => writer.into_inner(),
            Self::Json(mut writer) => {
                writer.finish().map_err(failed)?;
                let mut out = writer.into_inner();
                writeln!(out).map_err(io_failed)?;
                out
            }
            Self::Ndjson(writer) => writer.into_inner(),
            Self::Arrow(mut writer) => {
                writer.finish().map_err(failed)?;
                writer.into_inner().map_err(failed)?
            }
        };
        out.flush().map_err(io_failed)?;
        Ok(hidden)
    }
}

/// The table, and the number of columns that it does not show.
fn format_table(
    schema: &SchemaRef,
    batches: &[RecordBatch],
    options: OutputOptions,
) -> Result<(String, usize), ArrowError> {
    let (table, width) = (Table::new(schema, batches)?, options.width.unwrap_or(usize::MAX));
    let is_expanded = match options.expanded {
        Expanded::On => true,
        Expanded::Off => false,
        Expanded::Auto => table.is_wider_than(width),
    };
    Ok(if is_expanded { (table.expanded(), 0) } else { table.fit(width) })
}

/// The schema with the selected columns as strings.
fn with_text_columns(schema: &Schema, select: impl Fn(&DataType) -> bool) -> Schema {
    let fields = schema.fields().iter().map(|field| match select(field.data_type()) {
        true => Field::new(field.name(), DataType::Utf8, true),
        false => field.as_ref().clone(),
    });
    Schema::new(fields.collect::<Vec<_>>())
}

fn csv_schema(schema: &Schema) -> SchemaRef {
    Arc::new(with_text_columns(schema, DataType::is_nested))
}

/// Converts nested columns, which CSV does not have, to JSON strings.
fn to_csv_batch(batch: &RecordBatch, schema: &SchemaRef) -> Result<RecordBatch, ArrowError> {
    let input = batch.schema();
    let columns = input.fields().iter().zip(batch.columns()).map(|(field, column)| {
        if !field.data_type().is_nested() {
            return Ok(Arc::clone(column));
        }
        let options = EncoderOptions::default().with_explicit_nulls(true);
        let mut encoder = make_encoder(field, column, &options)?;
        let texts = (0..column.len()).map(|row| {
            if encoder.is_null(row) {
                return None;
            }
            let mut json = Vec::new();
            encoder.encode(row, &mut json);
            String::from_utf8(json).ok()
        });
        Ok(Arc::new(texts.collect::<StringArray>()) as ArrayRef)
    });
    RecordBatch::try_new(Arc::clone(schema), columns.collect::<Result<_, ArrowError>>()?)
}

fn failed(error: ArrowError) -> Error {
    match error {
        ArrowError::IoError(_, error) => io_failed(error),
        ArrowError::CsvError(reason) if reason.contains("Broken pipe") => Error::BrokenPipe,
        error => Error::Failed(format!("cannot write the result: {error}")),
    }
}

pub(super) fn io_failed(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Error::BrokenPipe,
        _ => Error::Failed(format!("cannot write the result: {error}")),
    }
}
