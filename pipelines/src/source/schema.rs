//! The schema of a file.
//!
//! Parquet and Arrow files contain it. For CSV and JSON it is inferred from the first thousand rows; a column without
//! values takes the type of other files, or Utf8. Columns, and keys inside objects, that only later rows of a JSON file
//! have are not read.

use std::sync::Arc;

use arrow::{
    datatypes::{Field, FieldRef, Schema, SchemaRef},
    error::ArrowError,
};
use tokio::io::AsyncBufReadExt;

use super::{
    Format, InputFile, KeptTypes, SourceError,
    bytes::{self, Bytes, Taken},
    decode::Decode,
    infer_csv, infer_json,
    ipc::Ipc,
    lines, parquet,
    reason::Broken,
    types,
};

/// Maximum number of rows for inference, as in DataFusion.
pub(super) const INFERENCE_ROWS: usize = 1000;
/// Bytes for inference, unless they hold no complete row.
const INFERENCE_BYTES: usize = 1 << 20;
/// Maximum bytes for inference; the first row must end within them.
const MAX_INFERENCE_BYTES: usize = 256 << 20;

/// The schema of a file, without the schema's metadata, which may be about columns that are not read. `None` for an empty
/// CSV or JSON file.
pub(super) async fn of_file(file: &InputFile, types: KeptTypes) -> Result<Option<SchemaRef>, SourceError> {
    match (file.format, types) {
        (Format::Text, _) => Ok(Some(lines::schema())),
        (Format::Parquet, _) => parquet::schema(file).await.map(Some),
        (Format::Arrow, _) => arrow_schema(file).await.map(Some),
        (Format::Csv, KeptTypes::Strings) => infer(file, infer_csv::strings).await,
        (Format::Csv, KeptTypes::Guess) => infer(file, infer_csv::inferred).await,
        (Format::Json, KeptTypes::Strings) => infer(file, infer_json::strings).await,
        (Format::Json, KeptTypes::Guess) => infer(file, infer_json::inferred).await,
    }
}

async fn arrow_schema(file: &InputFile) -> Result<SchemaRef, SourceError> {
    let malformed = |e: ArrowError| SourceError::malformed(file, 0, e);
    let mut bytes = bytes::open(file, &Taken::default()).await?;
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

/// The first bytes of a file, and whether they are the whole file.
pub(super) struct Head<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) all: bool,
}

/// Infers a schema; `Ok(None)` when more bytes are needed.
type Infer = fn(Head<'_>) -> Result<Option<Schema>, Broken>;

/// Byte order marks of UTF-16.
const UTF_16: [&[u8]; 2] = [&[0xff, 0xfe], &[0xfe, 0xff]];

async fn infer(file: &InputFile, infer: Infer) -> Result<Option<SchemaRef>, SourceError> {
    let mut bytes = bytes::open(file, &Taken::default()).await?;
    let mut head = Vec::new();
    let mut limit = INFERENCE_BYTES;
    loop {
        let all = fill(file, &mut bytes, &mut head, limit).await?;
        if all && head.trim_ascii().is_empty() {
            return Ok(None);
        }
        if UTF_16.iter().any(|mark| head.starts_with(mark)) {
            return Err(SourceError::malformed(file, 0, "the file is UTF-16"));
        }
        let malformed = |broken: Broken| SourceError::malformed(file, broken.row, broken.reason);
        let inferred = infer(Head { bytes: &head, all }).map_err(malformed)?;
        if let Some(schema) = inferred {
            return Ok(Some(Arc::new(with_items(&schema))));
        }
        limit *= 4;
        if all || limit > MAX_INFERENCE_BYTES {
            return Err(SourceError::malformed(file, 0, format!("no complete row in the first {} bytes", head.len())));
        }
    }
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
