//! The schema of a file.
//!
//! Parquet and Arrow files contain it. For CSV and JSON it is inferred from the first rows, see
//! [`InferRows`](super::InferRows); a column without values takes the type of other files, or Utf8.

use std::sync::Arc;

use arrow::{
    datatypes::{Field, FieldRef, Schema, SchemaRef},
    error::ArrowError,
};
use tokio::io::AsyncBufReadExt;

use super::{
    Format, InputFile, KeptTypes, Request, SourceError,
    bytes::{self, Bytes},
    decode::Decode,
    infer_csv,
    infer_json::{Inference, Reader},
    ipc::Ipc,
    json_array::Shape,
    lines, parquet,
    reading::Cells,
    reason::Broken,
    types,
};

/// Bytes of CSV from which the schema is inferred, unless they hold too few rows.
const INFERENCE_BYTES: usize = 1 << 20;
/// Maximum bytes of CSV for inference, and of standard input.
const MAX_CSV_BYTES: usize = 64 << 20;
const MAX_STDIN_BYTES: usize = 1 << 20;
/// Maximum bytes of the first row.
const MAX_ROW_BYTES: usize = 256 << 20;
/// Bytes of JSON that are looked at at once.
const JSON_BYTES: usize = 1 << 20;

/// The schema of a file, without the schema's metadata, which may be about columns that are not read. `None` for an empty
/// CSV or JSON file.
pub(super) async fn of_file(file: &InputFile, request: &Request) -> Result<Option<SchemaRef>, SourceError> {
    match file.format {
        Format::Text => Ok(Some(lines::schema())),
        Format::Parquet => parquet::schema(file).await.map(Some),
        Format::Arrow => arrow_schema(file).await.map(Some),
        Format::Csv | Format::Tsv => csv_schema(file, request).await,
        Format::Json => json_schema(file, request).await,
    }
}

async fn arrow_schema(file: &InputFile) -> Result<SchemaRef, SourceError> {
    let malformed = |e: ArrowError| SourceError::malformed(file, 0, e);
    let mut bytes = bytes::peek(file, &Shape::default()).await?;
    if bytes.fill_buf().await.map_err(|e| bytes::read_error(file, 0, e))?.is_empty() {
        return Err(SourceError::NoBytes { file: file.to_string() });
    }
    let mut decoder = Ipc::whole();
    loop {
        if let Some(schema) = decoder.schema() {
            return Ok(Arc::new(Schema::new(schema.fields().clone())));
        }
        let chunk = bytes.fill_buf().await.map_err(|e| bytes::read_error(file, 0, e))?;
        if chunk.is_empty() {
            decoder.finish().map_err(malformed)?;
            let none = || SourceError::malformed(file, 0, "it has no schema");
            return decoder.schema().map(|schema| Arc::new(Schema::new(schema.fields().clone()))).ok_or_else(none);
        }
        // In small steps, as the schema comes first and the rows are not needed.
        let used = decoder.decode(&chunk[..chunk.len().min(4096)]).map_err(malformed)?;
        bytes.consume(used);
        decoder.flush().map_err(malformed)?;
    }
}

/// The first bytes of a CSV file.
pub(super) struct Head<'a> {
    pub(super) bytes: &'a [u8],
    /// They are the whole file.
    pub(super) all: bool,
    /// There will not be more of them, unless they hold no complete row.
    pub(super) most: bool,
    pub(super) cells: Cells,
    /// Rows that are looked at.
    pub(super) max_rows: Option<usize>,
}

impl Head<'_> {
    /// Whether the rows in them are enough.
    pub(super) fn is_last(&self) -> bool {
        self.all || self.most
    }
}

async fn csv_schema(file: &InputFile, request: &Request) -> Result<Option<SchemaRef>, SourceError> {
    let infer = match request.types {
        KeptTypes::Strings => infer_csv::strings,
        KeptTypes::Guess => infer_csv::inferred,
    };
    let most = if file.location.is_none() { MAX_STDIN_BYTES } else { MAX_CSV_BYTES };
    let mut bytes = bytes::peek(file, &Shape::default()).await?;
    let (mut head, mut limit) = (Vec::new(), INFERENCE_BYTES);
    loop {
        let all = fill(file, &mut bytes, &mut head, limit).await?;
        let is_blank = head.trim_ascii().is_empty();
        if all && is_blank {
            return Ok(None);
        }
        let (cells, max_rows) = (file.cells(), request.infer_rows.0);
        let malformed = |broken: Broken| SourceError::malformed(file, broken.row, broken.reason);
        let head_of_file = Head { bytes: &head, all, most: limit >= most, cells, max_rows };
        let inferred = if is_blank { None } else { infer(&head_of_file).map_err(malformed)? };
        if let Some(schema) = inferred {
            return Ok(Some(Arc::new(with_items(&schema))));
        }
        limit *= 4;
        if all || limit > MAX_ROW_BYTES {
            return Err(no_row(file, head.len()));
        }
    }
}

async fn json_schema(file: &InputFile, request: &Request) -> Result<Option<SchemaRef>, SourceError> {
    let shape = Shape::default();
    let mut bytes = bytes::peek(file, &shape).await?;
    let mut inference = Inference::new(Reader::Job, shape, request.infer_rows.0);
    let (mut head, mut limit, mut blank) = (Vec::new(), JSON_BYTES, 0);
    loop {
        let all = fill(file, &mut bytes, &mut head, limit).await?;
        let end = if all { Some(head.len()) } else { head.iter().rposition(|&byte| byte == b'\n').map(|at| at + 1) };
        let malformed = |broken: Broken| SourceError::malformed(file, broken.row, broken.reason);
        inference.add(&head[..end.unwrap_or(0)]).map_err(malformed)?;
        // Of standard input no more is kept than what was read by now.
        let is_enough = inference.is_full() || (file.location.is_none() && inference.rows() > 0);
        if all || is_enough {
            break;
        }
        blank += if inference.rows() == 0 { end.unwrap_or(0) } else { 0 };
        limit = if end.is_none() { limit * 4 } else { JSON_BYTES };
        if limit.max(blank) > MAX_ROW_BYTES {
            match inference.rows() {
                0 => return Err(no_row(file, blank.max(head.len()))),
                // The decoder says what is wrong with this one.
                _ => break,
            }
        }
        head.drain(..end.unwrap_or(0));
    }
    let schema = match request.types {
        KeptTypes::Strings => inference.strings(),
        KeptTypes::Guess => inference.schema(),
    };
    Ok((inference.rows() > 0).then(|| Arc::new(with_items(&schema))))
}

fn no_row(file: &InputFile, bytes: usize) -> SourceError {
    SourceError::malformed(file, 0, format!("no complete row in the first {bytes} bytes"))
}

/// Reads until `head` has `limit` bytes; true when the file ends before that.
async fn fill(file: &InputFile, bytes: &mut Bytes, head: &mut Vec<u8>, limit: usize) -> Result<bool, SourceError> {
    while head.len() < limit {
        let chunk = bytes.fill_buf().await.map_err(|e| bytes::read_error(file, 0, e))?;
        if chunk.is_empty() {
            return Ok(true);
        }
        let used = chunk.len().min(limit - head.len());
        head.extend_from_slice(&chunk[..used]);
        bytes.consume(used);
    }
    Ok(false)
}

/// Null inside lists and objects becomes Utf8. Columns of type Null stay, as another file may have a type for them.
pub(super) fn with_items(schema: &Schema) -> Schema {
    let with_items = |field: &FieldRef| Field::clone(field).with_data_type(types::with_items(field.data_type()));
    Schema::new(schema.fields().iter().map(with_items).collect::<Vec<_>>())
}
