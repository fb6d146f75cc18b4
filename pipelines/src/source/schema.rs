//! Which columns a file has, and of what type.
//!
//! Parquet and Arrow files say so. For CSV and JSON the types are guessed from the first thousand rows; a column in
//! which nothing was seen is taken for strings.

use std::sync::Arc;

use arrow::{
    csv,
    datatypes::{DataType, Field, Schema, SchemaRef},
    error::ArrowError,
    json,
};
use tokio::io::AsyncBufReadExt;

use super::{
    Format, InputFile, SourceError,
    bytes::{self, Bytes, Taken},
    decode::{Decode, csv_decoder},
    ipc::Ipc,
    lines, parquet,
};

/// Rows that guessing looks at, as in DataFusion.
const GUESS_ROWS: usize = 1000;
/// Bytes that guessing looks at, unless not even one row is complete by then.
const GUESS_BYTES: usize = 1 << 20;
/// The first row must be complete by then.
const GUESS_BYTES_MAX: usize = 256 << 20;

/// The schema of a file, without metadata of the schema: it may speak of columns that we leave out.
pub(super) async fn of_file(file: &InputFile) -> Result<SchemaRef, SourceError> {
    match file.format {
        Format::Text => Ok(lines::schema()),
        Format::Parquet => parquet::schema(file).await,
        Format::Arrow => arrow_schema(file).await,
        Format::Csv => guess(file, csv_guess).await,
        Format::Json => guess(file, json_guess).await,
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
            return Err(SourceError::malformed(file, 0, "there is no schema in it"));
        }
        // The schema comes first, and a small step keeps from reading on into the rows.
        let used = decoder.decode(&chunk[..chunk.len().min(4096)]).map_err(malformed)?;
        bytes.consume(used);
        decoder.flush().map_err(malformed)?;
    }
}

/// The first bytes of a file, and whether that is all of it.
struct Head<'a> {
    bytes: &'a [u8],
    all: bool,
}

/// `Ok(None)` asks for more bytes.
type Guess = fn(Head<'_>) -> Result<Option<Schema>, ArrowError>;

async fn guess(file: &InputFile, guess: Guess) -> Result<SchemaRef, SourceError> {
    let mut bytes = bytes::open(file, &Taken::default()).await?;
    let mut head = Vec::new();
    let mut limit = GUESS_BYTES;
    loop {
        let all = fill(file, &mut bytes, &mut head, limit).await?;
        let guessed = guess(Head { bytes: &head, all }).map_err(|e| SourceError::malformed(file, 0, e))?;
        if let Some(schema) = guessed {
            return Ok(Arc::new(without_null_types(&schema)));
        }
        limit *= 4;
        if all || limit > GUESS_BYTES_MAX {
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

fn csv_guess(head: Head<'_>) -> Result<Option<Schema>, ArrowError> {
    let format = csv::reader::Format::default().with_header(true);
    if head.all {
        return format.infer_schema(head.bytes, Some(GUESS_ROWS)).map(|(schema, _)| Some(schema));
    }
    // The last row is cut somewhere, perhaps inside quotes: count the complete ones first.
    let (names, _) = format.infer_schema(head.bytes, Some(0))?;
    let mut decoder = csv_decoder(&Arc::new(without_null_types(&names)), vec![0], GUESS_ROWS);
    let mut rest = head.bytes;
    while !rest.is_empty() && decoder.capacity() > 0 {
        rest = &rest[decoder.decode(rest)?..];
    }
    match GUESS_ROWS - decoder.capacity() {
        0 => Ok(None),
        rows => format.infer_schema(head.bytes, Some(rows)).map(|(schema, _)| Some(schema)),
    }
}

fn json_guess(head: Head<'_>) -> Result<Option<Schema>, ArrowError> {
    let end = match head.bytes.iter().rposition(|&b| b == b'\n') {
        _ if head.all => head.bytes.len(),
        Some(end) => end,
        None => return Ok(None),
    };
    json::reader::infer_json_schema(&head.bytes[..end], Some(GUESS_ROWS)).map(|(schema, _)| Some(schema))
}

fn without_null_types(schema: &Schema) -> Schema {
    let string = |field: &Field| match field.data_type() {
        DataType::Null => Field::new(field.name(), DataType::Utf8, true),
        DataType::List(item) if item.data_type() == &DataType::Null => {
            Field::new(field.name(), super::types::words(), true)
        }
        _ => field.clone(),
    };
    Schema::new(schema.fields().iter().map(|field| string(field)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(schema: &Schema) -> Vec<(String, DataType)> {
        schema.fields().iter().map(|f| (f.name().clone(), f.data_type().clone())).collect()
    }

    #[test]
    fn csv_whose_last_row_is_cut_inside_quotes() {
        let text = b"id,text\n1,\"two\nlines\"\n2,\"cut here\nand";
        let schema = csv_guess(Head { bytes: text, all: false }).unwrap().unwrap();
        assert_eq!(types(&schema), [("id".to_owned(), DataType::Int64), ("text".to_owned(), DataType::Utf8)]);
        assert!(csv_guess(Head { bytes: b"id,text\n1,\"tw", all: false }).unwrap().is_none());
    }

    #[test]
    fn json_types() {
        let text = br#"{"a": 1, "b": null, "c": ["x"], "d": []}
{"a": 1.5, "c": [], "e": "late"}
{"a": cut"#;
        let schema = without_null_types(&json_guess(Head { bytes: text, all: false }).unwrap().unwrap());
        let (utf8, words) = (DataType::Utf8, super::super::types::words());
        let expected = [("a", DataType::Float64), ("b", utf8.clone()), ("c", words.clone()), ("d", words), ("e", utf8)];
        assert_eq!(types(&schema), expected.map(|(n, t)| (n.to_owned(), t)));
    }
}
