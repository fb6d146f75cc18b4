//! The open part, and its rows that survive an interruption.
//!
//! A part is durable as a whole or not at all, so that its bytes never depend on interruptions. An interrupted job saves
//! the rows of the open part that are complete beside the manifest, and the next run writes them first.

use std::{io::Cursor, sync::Arc};

use arrow::{
    array::RecordBatch,
    datatypes::{Schema, SchemaRef},
    error::ArrowError,
    ipc::{reader::StreamReader, writer::StreamWriter},
};
use object_store::PutMode;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    chunks::{Chunk, memory},
    digest::RowDigest,
    manifest::Counts,
};
use crate::{
    error::Result,
    sink::PartWriter,
    source::Position,
    stores::{Location, StoreError},
};

/// Bytes of rows of an open part that are kept in memory for an interruption. Later rows are computed again.
const MAX_SAVED_BYTES: u64 = 256 << 20;
/// Schema metadata key of the [`Note`].
const NOTE: &str = "elmo.partial";

/// A part that is being written.
pub(super) struct OpenPart {
    pub(super) writer: PartWriter,
    /// Its first row.
    pub(super) start: Position,
    /// Counts of the rows in it so far.
    pub(super) counts: Counts,
    /// Digest of their input rows.
    pub(super) digest: RowDigest,
    pub(super) prefix: Prefix,
}

impl OpenPart {
    /// A part of the job with this digest that begins at `start`.
    pub(super) fn new(writer: PartWriter, start: Position, job: String) -> Self {
        let (counts, digest) = (Counts::default(), RowDigest::new());
        let note = Note { start, end: start, counts, rows_digest: None, job };
        let prefix = Prefix { rows: Vec::new(), bytes: 0, full: false, note };
        Self { writer, start, counts, digest, prefix }
    }

    /// Adds the output rows of a chunk, which the caller writes.
    pub(super) fn add(&mut self, chunk: &Chunk, rows: &RecordBatch, counts: Counts) -> Result<()> {
        self.counts += counts;
        for slice in &chunk.slices {
            self.digest.update(slice).map_err(elmo::Error::from)?;
        }
        let note = Note {
            end: chunk.end(),
            counts: self.counts,
            rows_digest: self.digest.value(),
            ..self.prefix.note.clone()
        };
        self.prefix.add(rows, note);
        Ok(())
    }

    /// Begins with rows that an interrupted run saved.
    pub(super) async fn resume(&mut self, partial: Partial) -> Result<()> {
        for rows in &partial.rows {
            self.writer.write(rows).await?;
        }
        self.counts = partial.note.counts;
        self.digest = RowDigest::from_value(partial.note.rows_digest.as_deref());
        self.prefix.resume(partial);
        Ok(())
    }
}

/// Describes the saved rows.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Note {
    start: Position,
    end: Position,
    counts: Counts,
    /// Digest of the input rows; `None` in format 1.
    #[serde(default)]
    rows_digest: Option<String>,
    /// Digest of the job that computed them, which may have lost its lease since; empty in older notes.
    #[serde(default)]
    job: String,
}

/// The first rows of an open part.
pub(super) struct Prefix {
    rows: Vec<RecordBatch>,
    bytes: u64,
    /// Later rows were not added, because the prefix is full.
    full: bool,
    note: Note,
}

impl Prefix {
    fn add(&mut self, rows: &RecordBatch, note: Note) {
        self.full |= self.bytes + memory(rows) > MAX_SAVED_BYTES;
        if !self.full {
            self.note = note;
            self.bytes += memory(rows);
            self.rows.push(rows.clone());
        }
    }

    /// Begins with all rows that were saved, because the note counts all of them.
    fn resume(&mut self, partial: Partial) {
        self.bytes = partial.rows.iter().map(memory).sum();
        self.note = partial.note;
        self.rows = partial.rows;
    }

    /// Saves the rows; returns the number of their input rows.
    pub(super) async fn save(&mut self, location: &Location) -> Result<u64, StoreError> {
        if self.rows.is_empty() {
            return Ok(0);
        }
        let bytes = encode(&self.rows, &self.note).map_err(|e| damaged(location, e))?;
        let put = location.put(sealed(bytes).into(), PutMode::Overwrite).await;
        put.map_err(|e| StoreError::request("write", location, e))?;
        location.sync()?;
        Ok(self.note.counts.rows_in)
    }
}

/// Length of a SHA-256, in bytes.
const DIGEST: usize = 32;

/// Appends a SHA-256, so that a truncated or damaged file is never written to the output.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let digest = Sha256::digest(&bytes);
    bytes.extend_from_slice(&digest);
    bytes
}

fn unsealed(bytes: &[u8]) -> Result<&[u8], ArrowError> {
    let damaged = || ArrowError::IpcError("its SHA-256 does not match".to_owned());
    let (bytes, digest) = bytes.split_last_chunk::<DIGEST>().ok_or_else(damaged)?;
    if Sha256::digest(bytes).as_slice() == digest { Ok(bytes) } else { Err(damaged()) }
}

fn damaged(location: &Location, error: ArrowError) -> StoreError {
    let source = std::io::Error::other(error);
    StoreError::Local { operation: "write", address: location.to_string(), source }
}

fn encode(rows: &[RecordBatch], note: &Note) -> Result<Vec<u8>, ArrowError> {
    let Some(first) = rows.first() else { return Ok(Vec::new()) };
    let note = serde_json::to_string(note).map_err(|e| ArrowError::JsonError(e.to_string()))?;
    let mut schema: Schema = first.schema().as_ref().clone();
    schema.metadata.insert(NOTE.to_owned(), note);
    let mut writer = StreamWriter::try_new(Vec::new(), &schema)?;
    for rows in rows {
        writer.write(rows)?;
    }
    writer.into_inner()
}

/// Rows that an interrupted run saved.
pub(super) struct Partial {
    rows: Vec<RecordBatch>,
    note: Note,
}

impl Partial {
    /// The counts of the saved rows.
    pub(super) fn counts(&self) -> Counts {
        self.note.counts
    }

    /// The row after the saved ones.
    pub(super) fn end(&self) -> Position {
        self.note.end
    }

    /// Reads the saved rows of the part that begins at `start`, of the job with this digest; `None` when there are none that
    /// can be used.
    pub(super) async fn load(location: &Location, schema: &SchemaRef, (start, job): (Position, &str)) -> Option<Self> {
        let bytes = location.get().await.ok()??;
        match unsealed(&bytes).and_then(|bytes| decode(bytes, schema)) {
            Ok((rows, note)) if note.start == start && note.job == job => Some(Self { rows, note }),
            Ok(_) => None,
            Err(error) => {
                tracing::warn!(file = %location, %error, "the saved rows cannot be read; they are computed again");
                None
            }
        }
    }
}

fn decode(bytes: &[u8], schema: &SchemaRef) -> Result<(Vec<RecordBatch>, Note), ArrowError> {
    let reader = StreamReader::try_new(Cursor::new(bytes), None)?;
    let note = reader.schema().metadata.get(NOTE).cloned().unwrap_or_default();
    let note: Note = serde_json::from_str(&note).map_err(|e| ArrowError::JsonError(e.to_string()))?;
    let mut rows = Vec::new();
    for batch in reader {
        rows.push(RecordBatch::try_new(Arc::clone(schema), batch?.columns().to_vec())?);
    }
    let there: usize = rows.iter().map(RecordBatch::num_rows).sum();
    if there as u64 != note.counts.rows_out {
        return Err(ArrowError::IpcError(format!("{there} rows instead of {}", note.counts.rows_out)));
    }
    Ok((rows, note))
}
